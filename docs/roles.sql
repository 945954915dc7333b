-- Least-privilege roles for an inbox in PostgreSQL. Run this once per inbox as the owner of its tables, after `migrate`, with the inbox's
-- schema first in the search_path. Only the owner should have CREATE on that schema: the functions that change data run with the owner's
-- rights.
--
--     psql "$DATABASE_URL" -v prefix=shop -f docs/roles.sql
--
-- creates the roles shop_accept, shop_process, shop_clean, shop_read, shop_admin and shop_client. They cannot log in: grant them to the
-- users that can. A service that consumes and runs handlers needs accept and process. Only `migrate` needs the owner of the tables.
\if :{?prefix}
\else
    \set prefix wharf
\endif
SELECT current_schema() AS schema, :'prefix' || '_accept' AS accept, :'prefix' || '_process' AS process, :'prefix' || '_clean' AS clean,
       :'prefix' || '_read' AS read, :'prefix' || '_admin' AS admin, :'prefix' || '_client' AS client \gset

-- Roles belong to the server, not to the database: an inbox with the same prefix may have created them already.
SELECT format('CREATE ROLE %I NOLOGIN', name) FROM unnest(ARRAY[:'accept', :'process', :'clean', :'read', :'admin', :'client']) AS r (name)
WHERE NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = name) \gexec

GRANT USAGE ON SCHEMA :"schema" TO :"accept", :"process", :"clean", :"read", :"admin", :"client";

-- Every program checks the version of the schema first.
GRANT SELECT ON inbox_migration TO :"accept", :"process", :"clean", :"read", :"admin";

-- accept: registers handlers; writes messages, deliveries, quarantined records and the ledger. It deletes and settles nothing.
GRANT SELECT, INSERT, UPDATE ON inbox_handler, inbox_handler_key TO :"accept", :"process";
GRANT SELECT, INSERT, UPDATE, DELETE ON inbox_subscription TO :"accept", :"process";
-- A rollback may separate handlers that a later version has united.
GRANT EXECUTE ON FUNCTION inbox_promote_parted TO :"accept", :"process";
GRANT SELECT, INSERT ON inbox_message, inbox_delivery, inbox_quarantine TO :"accept";
-- Locks a message's row while a delivery is added to it, and a delivery's row while another delivery of its key is held behind it.
GRANT UPDATE (seq) ON inbox_message TO :"accept";
GRANT UPDATE (message_seq) ON inbox_delivery TO :"accept";
GRANT USAGE ON SEQUENCE inbox_message_seq TO :"accept";
GRANT SELECT, INSERT, UPDATE ON inbox_ledger TO :"accept";
GRANT SELECT, INSERT ON inbox_gap TO :"accept";
GRANT SELECT, INSERT, UPDATE, DELETE ON inbox_ingest, inbox_partition TO :"accept";
GRANT SELECT ON inbox_processor TO :"accept";

GRANT SELECT ON inbox_identity TO :"accept";

-- clean: purges finished messages. It writes only kept identities and the audit. A service that purges in the background needs it too. If
-- it is a separate user and keeps identities, pg_read_all_stats lets it see accepts that run for very long.
GRANT SELECT ON inbox_handler, inbox_handler_key TO :"clean";
GRANT SELECT, DELETE ON inbox_message, inbox_delivery, inbox_history, inbox_attempt, inbox_correction TO :"clean";
GRANT UPDATE (seq) ON inbox_message TO :"clean";
GRANT SELECT, INSERT, UPDATE, DELETE ON inbox_identity TO :"clean";
GRANT SELECT, INSERT, UPDATE ON inbox_lease TO :"clean";
GRANT SELECT, INSERT, UPDATE, DELETE ON inbox_retention, inbox_kept TO :"clean";
-- Only if retention expires quarantined records (`expire_quarantined`), which is off by default:
-- GRANT SELECT, DELETE ON inbox_quarantine TO :"clean";
-- `wharf cleanup` writes an audit row for each purge.
GRANT EXECUTE ON FUNCTION inbox_audit_purge TO :"clean";

-- process: claims and settles deliveries, and updates its row in inbox_processor. It writes no message.
GRANT SELECT ON inbox_message, inbox_correction TO :"process";
GRANT SELECT, UPDATE ON inbox_delivery TO :"process";
GRANT SELECT, INSERT, UPDATE ON inbox_attempt TO :"process";
GRANT SELECT, INSERT, UPDATE, DELETE ON inbox_processor TO :"process";
-- Makes deliveries pending again that were poisoned while no process had their handler.
GRANT EXECUTE ON FUNCTION inbox_return_parked TO :"process";
-- Replays quarantined records; to accept them it also needs the role accept.
GRANT SELECT, DELETE ON inbox_quarantine TO :"process";
GRANT UPDATE (replay_asked_at, replay_locked_until, replays, reason, detail) ON inbox_quarantine TO :"process";

-- publish: stores records in the outbox, through `inbox_publish` or the library. Part of process.
GRANT SELECT, INSERT ON inbox_outbox TO :"process";
GRANT EXECUTE ON FUNCTION inbox_publish TO :"process";
-- relay: sends the records of the outbox, and deletes sent ones.
GRANT UPDATE, DELETE ON inbox_outbox TO :"process";
GRANT SELECT, UPDATE ON inbox_outbox_slots TO :"process";
GRANT SELECT, INSERT, UPDATE, DELETE ON inbox_relay TO :"process";
-- Dead-letter topics are registered with the handlers.
GRANT SELECT, INSERT, UPDATE, DELETE ON inbox_dead_letter TO :"accept", :"process";
-- Calls the service's function for poisoned deliveries.
GRANT SELECT, UPDATE, DELETE ON inbox_poison_call TO :"process";

-- read: reads everything, including payloads. It changes nothing.
GRANT SELECT ON inbox_handler, inbox_handler_key, inbox_subscription, inbox_message, inbox_delivery, inbox_history, inbox_attempt, inbox_correction, inbox_quarantine, inbox_ledger, inbox_gap,
                inbox_processor, inbox_audit, inbox_identity, inbox_lease, inbox_retention, inbox_kept, inbox_status, inbox_failures, inbox_poisoned, inbox_poisoned_by_error, inbox_quarantined, inbox_backlog, inbox_held_keys,
                inbox_partition, inbox_ingest, inbox_outbox, inbox_outbox_slots, inbox_relay, inbox_outgoing, inbox_dead_letter, inbox_poison_call
TO :"read", :"admin";

-- admin: reads everything, and acts through functions: replay, discard, release, pause, the quarantine. They run with the owner's rights
-- and write the audit, so this role cannot change a delivery without an audit row, or write an audit row for another user.
GRANT EXECUTE ON FUNCTION inbox_replay, inbox_replay_matching, inbox_replay_corrected, inbox_discard, inbox_discard_matching, inbox_discard_seen, inbox_release, inbox_pause_handler, inbox_resume_handler, inbox_open_breaker, inbox_close_breaker, inbox_set_rate,
                          inbox_quarantine_replay, inbox_quarantine_discard, inbox_backfill_step, inbox_outbox_replay, inbox_outbox_discard
TO :"admin";
-- Moves Kafka positions through these functions only.
GRANT EXECUTE ON FUNCTION inbox_ledger_reset, inbox_ledger_skip TO :"admin";
-- Allows a purged message to be accepted again.
GRANT EXECUTE ON FUNCTION inbox_forget_identity TO :"admin";

-- Ends the subscriptions of a handler that no longer exists.
GRANT EXECUTE ON FUNCTION inbox_unsubscribe TO :"admin";

-- client: for programs that use the inbox in their own transactions, with any driver. It has no rights on tables. A handler that settles
-- itself calls inbox_settle. A program that accepts messages calls inbox_accept or inbox_accept_json; in a process, inbox.accept_in calls
-- inbox_accept_prepared.
GRANT EXECUTE ON FUNCTION inbox_settle TO :"client", :"process";
GRANT EXECUTE ON FUNCTION inbox_accept, inbox_accept_json, inbox_accept_prepared TO :"client", :"accept";
