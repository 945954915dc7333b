-- The schema of the inbox: messages, deliveries, the ledger, the quarantine, the outbox, and the functions for
-- operators.
--
-- Names are not schema-qualified: the tables live in the first schema of the connection's search_path, so two inboxes
-- can share one database. All timestamps come from this database's clock.

-- A key is an alias of a handler id. A renamed handler keeps its id, so its stored deliveries are still found, and a
-- redelivery after the rename is still a duplicate. Claims with a rate limit, and probes, update a row often: with free
-- space on the page (fillfactor) no index is written. The same holds for the other small tables below.
CREATE TABLE inbox_handler (
    id            smallint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key           text COLLATE "C" NOT NULL,         -- the current name, for people; the mapping is inbox_handler_key
    same_as       smallint,                          -- set on every id of a handler that has several: the id of its current key
    paused_at     timestamptz,                       -- not null: the handler is paused; no process claims its deliveries
    unknown_since timestamptz,                       -- since when its deliveries wait and no live processor has the handler
    registered_at timestamptz NOT NULL DEFAULT now(),
    -- Copied from the newest registration.
    is_ordered      boolean   NOT NULL DEFAULT false, -- deliveries of one key run one at a time, in accept order
    passes_poisoned boolean   NOT NULL DEFAULT false, -- a poisoned delivery does not hold its key
    is_fair         boolean   NOT NULL DEFAULT false, -- deliveries take turns by tenant
    calls_on_poison boolean   NOT NULL DEFAULT false, -- a function of the service is called for each poisoned delivery
    -- The circuit breaker. The open state is written to every id of the handler, the probe only to the lowest id.
    breaker_opened_at   timestamptz,                  -- not null: the breaker is open; only one probe at a time is claimed
    breaker_error       text,                         -- the error that opened it
    breaker_probe_at    timestamptz,                  -- the time of the next probe
    breaker_probe_until timestamptz,                  -- the end of the lease of the process that probes
    breaker_probe_no    bigint    NOT NULL DEFAULT 0, -- fencing token of the probe: a process with an older number changes nothing
    -- The rate limit over all processes. The settings are written to every id of the handler. Claims read the lowest id,
    -- and take from its rate_next_at.
    rate_interval_us       bigint,                    -- average time between two starts; NULL: no limit
    rate_burst             integer,                   -- maximum number of starts at once
    rate_next_at           timestamptz,               -- scheduled time of the next start; written by claims
    rate_is_set            boolean NOT NULL DEFAULT false, -- an operator set the limit; it overrides the registration
    registered_interval_us bigint,                    -- copied from the newest registration
    registered_burst       integer
) WITH (fillfactor = 50);

-- Every key that a handler has or had. Keys are never removed, so that an old build finds its handler.
CREATE TABLE inbox_handler_key (
    key        text COLLATE "C" PRIMARY KEY,
    handler_id smallint NOT NULL
);

-- The messages that each handler subscribes to, from its newest registration. Only inbox_accept reads this table; a
-- process uses its own registered handlers. inbox_unsubscribe removes the rows of a handler that no longer exists.
CREATE TABLE inbox_subscription (
    topic        text COLLATE "C" NOT NULL,          -- a name, or a pattern as the service gives it
    handler_id   smallint NOT NULL,                  -- the id under which new deliveries are stored
    event_types  text[],                             -- CloudEvents types; NULL: all
    delay_ms     bigint,                             -- deliveries are due this long after they are accepted
    delay_header text,                               -- the header that holds the due time; only a process can parse it
    order_by     text,                               -- NULL: unordered; `record key`, `header`, `process` (not in SQL)
    order_header text,
    fair_by      text,                               -- NULL: no tenants; otherwise as order_by
    fair_header  text,
    matches      text COLLATE "C",                   -- not null: a pattern, as a regular expression of PostgreSQL
    PRIMARY KEY (topic, handler_id)                  -- inbox_accept: the handlers of a topic
);
-- inbox_accept: the few patterns, tried for every topic.
CREATE INDEX inbox_subscription_pattern ON inbox_subscription (handler_id) WHERE matches IS NOT NULL;

-- Accepted records. Rows are only inserted, until retention deletes them.
CREATE SEQUENCE inbox_message_seq AS bigint CACHE 1;
CREATE TABLE inbox_message (
    seq             bigint      PRIMARY KEY DEFAULT nextval('inbox_message_seq'),
    kafka_offset    bigint,
    received_at     timestamptz NOT NULL DEFAULT now(),
    recorded_at     timestamptz,                     -- the timestamp that the producer or the broker set
    kafka_partition integer,
    -- COLLATE "C" compares bytes: it is faster, and an upgrade of the system's collations cannot corrupt the index.
    message_id      text COLLATE "C" NOT NULL,
    source          text COLLATE "C" NOT NULL,
    topic           text COLLATE "C" NOT NULL,
    payload_hash    bytea       NOT NULL,            -- first 16 bytes of SHA-256; distinguishes a duplicate from a conflict
    record_key      bytea,
    headers         bytea,                           -- read with inbox_headers(headers)
    payload         bytea,                           -- NULL (tombstone) is not the same as empty
    -- Deduplication: used by ON CONFLICT in the accept statement, and by operators to find a message.
    CONSTRAINT inbox_message_identity UNIQUE (message_id, source)
) WITH (
    -- Rows are mostly inserted: advance the visibility map and the freeze horizon before 20 % of a large table has
    -- changed.
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_cost_delay = 1
);
ALTER SEQUENCE inbox_message_seq OWNED BY inbox_message.seq;

-- One message for one handler: the unit of work. The widest columns come first, so that rows need no padding.
-- There is no foreign key: each insert would lock the message row, and shared row locks create multixacts.
CREATE TABLE inbox_delivery (
    message_seq  bigint      NOT NULL,
    due_at       timestamptz NOT NULL,               -- 'infinity': held; it waits for another delivery of its key
    locked_until timestamptz,                        -- end of the lease; if past, the process crashed or is late. Not indexed
    finished_at  timestamptz,                        -- set when done, discarded or poisoned; the row then leaves the claim index
    order_hash   bigint,                             -- hash of the ordering key; NULL: unordered
    -- Hash of the tenant, 0 without one; NULL: stored before the handler was fair. It never changes.
    fair_hash    bigint,
    locked_by    integer,                            -- inbox_processor.id; 0 after an operator released the claim (inbox_release)
    attempts     integer     NOT NULL DEFAULT 0,     -- number of starts. It only grows: it is the fencing token of the claim
    errors       integer     NOT NULL DEFAULT 0,     -- failures that count against the retry budget
    crashes      integer     NOT NULL DEFAULT 0,     -- process crashes in a row; an answer of its handler resets it
    -- Runs in a row that failed because of the store (> 0), or of a dependency of the handler (< 0). Not indexed.
    store_errors integer     NOT NULL DEFAULT 0,
    handler_id   smallint    NOT NULL,
    status       smallint    NOT NULL DEFAULT 0,     -- 0 open, 2 done, 3 poisoned, 4 discarded
    replays      smallint    NOT NULL DEFAULT 0,     -- how often an operator reset its retries; inbox_history has the earlier results
    is_corrected boolean     NOT NULL DEFAULT false, -- its handler receives the newest payload of inbox_correction
    passed       boolean,                            -- true: it was poisoned and does not block its key
    reason       text,                               -- why it was poisoned or discarded
    last_error   text,
    PRIMARY KEY (message_seq, handler_id)            -- settle, renew, redelivery
) WITH (
    -- A claim writes only unindexed columns. With free space on the page this is a HOT update, which writes no index:
    -- 160 bytes of WAL instead of 415.
    fillfactor = 45,
    -- The table changes constantly at any size, so autovacuum starts after a number of rows, not a fraction, and is not
    -- throttled.
    autovacuum_vacuum_scale_factor = 0,  autovacuum_vacuum_threshold = 20000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_cost_delay = 0,
    -- Truncating the end of the table takes an exclusive lock that would block every claim.
    vacuum_truncate = off
);

-- Used by the claim, in its exact order, and to find a handler's oldest due delivery. With status or locked_until in
-- it, claims would not be HOT.
CREATE INDEX inbox_delivery_due ON inbox_delivery (handler_id, due_at, message_seq) WHERE finished_at IS NULL;
-- Lists poisoned deliveries without a scan, the oldest first. Rows enter it only when they are poisoned.
CREATE INDEX inbox_delivery_poisoned ON inbox_delivery (handler_id, finished_at, message_seq) WHERE status = 3;

-- The deliveries that block a key: open ones, and poisoned ones that hold it. Deliveries that are not held come first,
-- then the held ones in accept order. Accept, the claims of ordered handlers and inbox_promote each probe it once per
-- key.
CREATE INDEX inbox_delivery_order ON inbox_delivery (handler_id, order_hash, due_at, message_seq)
    WHERE order_hash IS NOT NULL AND (finished_at IS NULL OR status = 3 AND passed IS NULL);

-- The claim of fair handlers: from one tenant to the next, and the oldest delivery of each. A claim writes no column of
-- the index.
CREATE INDEX inbox_delivery_fair ON inbox_delivery (handler_id, fair_hash, due_at, message_seq)
    WHERE finished_at IS NULL AND fair_hash IS NOT NULL;

-- Deliveries poisoned as `unknown key`: inbox_return_parked finds them among any number of others. It is almost always
-- empty.
CREATE INDEX inbox_delivery_parked ON inbox_delivery (handler_id, message_seq) WHERE status = 3 AND reason = 'unknown key';

-- The result of a delivery before an operator replayed or discarded it, or before it was returned. Deleted with its
-- message.
CREATE TABLE inbox_history (
    message_seq bigint      NOT NULL,
    audit_id    bigint      NOT NULL,                -- inbox_audit.id: who, when, why
    finished_at timestamptz,
    attempts    integer     NOT NULL,
    errors      integer     NOT NULL,
    crashes     integer     NOT NULL,
    handler_id  smallint    NOT NULL,
    status      smallint    NOT NULL,
    reason      text,
    last_error  text,
    PRIMARY KEY (message_seq, handler_id, audit_id)  -- shown with its delivery, purged with its message
);

-- The failures of attempts, written by the statement that settles them. A delivery has a bounded number of places:
-- attempt 1 keeps its own, later attempts, failed or not, reuse the others in turn. So the failures of attempt 1 and of
-- the newest attempts are kept. Deleted with its message.
CREATE TABLE inbox_attempt (
    message_seq bigint      NOT NULL,
    failed_at   timestamptz NOT NULL,
    attempt     integer     NOT NULL,                -- inbox_delivery.attempts of that run
    handler_id  smallint    NOT NULL,
    place       smallint    NOT NULL,                -- 0 for attempt 1
    -- failed, timed out, panicked, unavailable, store error; or the reason for poisoning.
    why         text        NOT NULL,
    error       text,
    PRIMARY KEY (message_seq, handler_id, place)     -- settle, shown with its delivery, purged with its message
);

-- Payloads that operators corrected for one handler, which receives the newest. The message itself never changes.
-- Deleted with its message.
CREATE TABLE inbox_correction (
    message_seq bigint   NOT NULL,
    audit_id    bigint   NOT NULL,                   -- inbox_audit.id: who, when, why
    handler_id  smallint NOT NULL,
    payload     bytea    NOT NULL,
    PRIMARY KEY (message_seq, handler_id, audit_id)  -- claims of corrected deliveries, purged with its message
);

-- The next offset to accept, per consumer group, cluster, topic and partition, written in the transaction that accepts.
-- An offset alone does not identify a record: the same offset holds another record in another cluster, in a recreated
-- topic, and after a truncation.
CREATE TABLE inbox_ledger (
    consumer_group  text        NOT NULL,
    topic           text        NOT NULL,
    kafka_partition integer     NOT NULL,
    next_offset     bigint      NOT NULL,            -- -2: start at the first record that Kafka has
    updated_at      timestamptz NOT NULL DEFAULT now(),
    stopped_at      timestamptz,                     -- not null: the partition is not read until an operator resets or skips it
    leader_epoch    integer,                         -- of the record before next_offset; NULL when unknown
    cluster_id      text        NOT NULL DEFAULT '', -- the cluster id that Kafka reports
    topic_id        text,                            -- the topic id that Kafka reports; a recreated topic has a different one
    stopped_why     text,
    PRIMARY KEY (consumer_group, cluster_id, topic, kafka_partition)
) WITH (fillfactor = 50);

-- Ranges of records that were never read: Kafka had deleted them, or an operator skipped them. Each gap is stored once.
CREATE TABLE inbox_gap (
    consumer_group  text        NOT NULL,
    topic           text        NOT NULL,
    kafka_partition integer     NOT NULL,
    from_offset     bigint      NOT NULL,            -- the first missing offset
    to_offset       bigint      NOT NULL,            -- the first offset after the gap
    noticed_at      timestamptz NOT NULL DEFAULT now(),
    cluster_id      text        NOT NULL DEFAULT '',
    PRIMARY KEY (consumer_group, cluster_id, topic, kafka_partition, from_offset, to_offset)
);

-- The state of each partition, written by the process that reads it: on each change, and once a minute. It is
-- informational; the ledger is authoritative.
CREATE TABLE inbox_partition (
    consumer_group  text        NOT NULL,
    topic           text        NOT NULL,
    kafka_partition integer     NOT NULL,
    cluster_id      text        NOT NULL,
    state           text        NOT NULL,            -- reading, waiting (for its position), blocked (records cannot be read), refused (by Kafka), stopped
    since           timestamptz NOT NULL DEFAULT now(),
    seen_at         timestamptz NOT NULL DEFAULT now(),
    -- Offsets that Kafka has and that are not stored, at seen_at, without transaction markers at the end of the log.
    lag             bigint,
    ingest          text        NOT NULL,            -- inbox_ingest.name
    why             text,
    PRIMARY KEY (consumer_group, cluster_id, topic, kafka_partition)
) WITH (fillfactor = 50);

-- Processes that read from Kafka: a row for each of their sources, written every few seconds. A process removes its
-- rows when it shuts down; the rows of a crashed one are removed after a day.
CREATE TABLE inbox_ingest (
    consumer_group text        NOT NULL,
    name           text        NOT NULL,             -- host and process id
    cluster_id     text        NOT NULL,             -- empty until a broker has answered
    started_at     timestamptz NOT NULL DEFAULT now(),
    seen_at        timestamptz NOT NULL DEFAULT now(),
    problem_since  timestamptz,
    source         text        NOT NULL DEFAULT '',  -- the source's name; the consumer group unless the service gives another
    problem        text,                             -- why it cannot read: failed authentication, an unknown topic, no broker
    PRIMARY KEY (consumer_group, name, source)
) WITH (fillfactor = 50);

-- Records that could not become messages, with all their bytes.
CREATE TABLE inbox_quarantine (
    id              bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    quarantined_at  timestamptz NOT NULL DEFAULT now(),
    kafka_offset    bigint,
    recorded_at     timestamptz,
    kafka_partition integer,
    topic           text        NOT NULL,
    cluster_id      text,                            -- the Kafka cluster it was read from: part of an identity by position
    reason          text        NOT NULL,
    detail          text,
    message_id      bytea,                           -- the identity as received: it may be the reason for the rejection
    source          bytea,
    record_key      bytea,
    headers         bytea,
    payload         bytea,
    -- A hash over position, identity and content: a redelivered record is quarantined once.
    record_hash     bytea       NOT NULL UNIQUE,
    replay_asked_at timestamptz,                     -- not null: a process that knows the topic accepts it again
    replay_locked_until timestamptz,                 -- end of the lease of the process that replays it. Not indexed
    replays         integer     NOT NULL DEFAULT 0   -- number of failed replays
);
-- The few records with a requested replay; every process polls for them.
CREATE INDEX inbox_quarantine_asked ON inbox_quarantine (replay_asked_at) WHERE replay_asked_at IS NOT NULL;
-- Lists the records of a topic, the oldest first.
CREATE INDEX inbox_quarantine_topic ON inbox_quarantine (topic, id);

-- Processes, and the handlers that each of them has. A process removes its row when it shuts down; the row of a crashed
-- one is removed after a day.
CREATE TABLE inbox_processor (
    id          integer     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text        NOT NULL,
    version     text        NOT NULL,
    handler_ids smallint[]  NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT now(),
    seen_at     timestamptz NOT NULL DEFAULT now(),
    alive_until timestamptz NOT NULL,                -- moved by each heartbeat; if it is past, the process has crashed
    report      jsonb                                -- what the process reports: rates, intake, connections
);

-- What remains of a purged message if retention keeps identities: enough to recognize a late redelivery as a duplicate.
-- 56 bytes per row.
CREATE TABLE inbox_identity (
    hash      uuid        NOT NULL,                  -- inbox_identity_hash(message_id, source)
    purged_at timestamptz NOT NULL,                  -- when it was written; its message is deleted later
    forget_at timestamptz NOT NULL
) WITH (
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_vacuum_scale_factor = 0.02
);
-- Accept probes it once per message. A hash index takes two thirds of the time of a b-tree. It cannot be unique and
-- need not be: rows are written only under the retention lease.
CREATE INDEX inbox_identity_hash ON inbox_identity USING hash (hash);
-- The table has no unique index, so logical replication needs the whole row to replicate a DELETE.
ALTER TABLE inbox_identity REPLICA IDENTITY FULL;
-- Finds the identities to forget, oldest first. Rows are inserted in this order, so the index grows at its right edge.
-- A BRIN index would be smaller, but loses its order once the space of deleted rows is reused.
CREATE INDEX inbox_identity_forget ON inbox_identity (forget_at);

-- Leases for work that only one process at a time does. Each step of the work takes or renews the lease; if the holder
-- crashes, it expires.
CREATE TABLE inbox_lease (
    name       text        PRIMARY KEY,
    holder     bigint      NOT NULL,
    held_until timestamptz NOT NULL
) WITH (fillfactor = 10);

-- How far retention has scanned, per set of periods: messages up to this seq were checked. Those that could not be
-- deleted are in inbox_kept.
CREATE TABLE inbox_retention (
    policy    bigint      PRIMARY KEY,               -- a hash of the periods: each set of periods scans on its own
    walked_to bigint      NOT NULL,
    purged_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 10);

-- Blocks of 500 messages (seq / 500) that still hold a message, and when the first of these can be deleted. No purge
-- reads a block before that: the cost of a purge depends on the rows that it deletes, not on those that it keeps.
CREATE TABLE inbox_kept (
    policy   bigint      NOT NULL,
    block    bigint      NOT NULL,
    check_at timestamptz NOT NULL,
    PRIMARY KEY (policy, block) INCLUDE (check_at)   -- the blocks that are due, in order
);

-- One row per operator action. Append-only.
CREATE TABLE inbox_audit (
    id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    acted_at      timestamptz NOT NULL DEFAULT now(),
    database_user text        NOT NULL DEFAULT session_user, -- the user who logged in; actions run with the rights of the inbox's owner
    actor         text,                              -- the person, as reported by the tool: several people may share the database user
    action        text        NOT NULL,
    filter        jsonb       NOT NULL,
    affected      bigint      NOT NULL,
    because       text                               -- the reason that the person gave
);

-- Shows bytes as text if they are valid text, else as hex (\x...). Never fails. Not PARALLEL SAFE: catching an
-- exception takes a subtransaction, which a parallel query cannot start before PostgreSQL 17.
CREATE FUNCTION inbox_text(bytes bytea) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    RETURN convert_from(bytes, 'UTF8');
EXCEPTION WHEN OTHERS THEN
    RETURN '\x' || encode(bytes, 'hex');
END $$;

-- The headers of a message or a quarantined record, in order and with duplicates. The list ends at the first bytes that
-- are not a header.
CREATE FUNCTION inbox_headers(headers bytea) RETURNS TABLE (ordinal integer, name bytea, value bytea)
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    -- A copy: otherwise the stored value would be decompressed again for each header.
    bytes bytea := headers || ''::bytea;
    at bigint := 1;
    size bigint;
BEGIN
    ordinal := 0;
    LOOP
        EXIT WHEN at + 3 > length(bytes);
        size := ('x' || encode(substring(bytes FROM at::integer FOR 4), 'hex'))::bit(32)::bigint;
        EXIT WHEN at + 7 + size > length(bytes);
        name := substring(bytes FROM at::integer + 4 FOR size::integer);
        at := at + 4 + size;
        size := ('x' || encode(substring(bytes FROM at::integer FOR 4), 'hex'))::bit(32)::integer;
        EXIT WHEN at + 3 + greatest(size, 0) > length(bytes);
        value := CASE WHEN size >= 0 THEN substring(bytes FROM at::integer + 4 FOR size::integer) END;
        at := at + 4 + greatest(size, 0);
        ordinal := ordinal + 1;
        RETURN NEXT;
    END LOOP;
END $$;

-- The SQLSTATE with which the server would reject this message; WH000 if it would accept it. Inserts nothing. A driver
-- does not always report why a statement failed, so this is called before a record is quarantined because of its
-- content.
CREATE FUNCTION inbox_refusal(message_id text, source text, topic text, payload_hash bytea, kafka_partition integer,
                              kafka_offset bigint, recorded_at timestamptz, record_key bytea, headers bytea, payload bytea) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO inbox_message (message_id, source, topic, payload_hash, kafka_partition, kafka_offset, recorded_at, record_key,
                               headers, payload)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
    ON CONFLICT DO NOTHING;
    -- Undoes the insert.
    RAISE EXCEPTION USING ERRCODE = 'WH000';
EXCEPTION WHEN OTHERS THEN
    RETURN SQLSTATE;
END $$;

-- The identity of a message in 16 bytes of SHA-256 over id and source, each preceded by its length. The library
-- computes the same hash.
CREATE FUNCTION inbox_identity_hash(message_id text, source text) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN encode(substring(sha256(int4send(octet_length(convert_to(message_id, 'UTF8'))) || convert_to(message_id, 'UTF8')
                            || int4send(octet_length(convert_to(source, 'UTF8'))) || convert_to(source, 'UTF8')) FOR 16), 'hex')::uuid;

-- Which of these hashes, counted from 1, belong to purged messages; NULL if none does. This is a function because of
-- its setting: a plan made while the table was empty would scan the large table in every accept. If no identity was
-- ever kept, nothing is probed.
CREATE FUNCTION inbox_remembered(hashes uuid[]) RETURNS integer[]
LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    IF pg_relation_size('inbox_identity') = 0 THEN
        RETURN NULL;
    END IF;
    RETURN (SELECT array_agg(h.ord::integer) FROM unnest(hashes) WITH ORDINALITY AS h (hash, ord)
            WHERE (SELECT true FROM inbox_identity i WHERE i.hash = h.hash LIMIT 1));
END $$;

-- Refuses to finish a delivery with an ordering key at the isolation level of this transaction. The callers check the
-- level themselves, so that nothing is called for a delivery that may be finished.
CREATE FUNCTION inbox_refuse_isolation() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a delivery of an ordered handler must be finished at the isolation level read committed, not %', current_setting('transaction_isolation')
        USING ERRCODE = 'WH005', CONSTRAINT = 'inbox_isolation', HINT = 'Begin the transaction with BEGIN ISOLATION LEVEL READ COMMITTED.';
END $$;

-- Makes the next held delivery of a key due when the delivery that blocked it has finished. This does not yet allow it
-- to run: the claim checks all deliveries of the key that are not held. It runs with the owner's rights, because the
-- role that purges may delete deliveries but not update them. The snapshot of its statement is taken after the finished
-- row was locked, so it sees every delivery held behind it. JIT is off because without sequential scans the estimated
-- cost is so high that plans would be compiled.
CREATE FUNCTION inbox_promote() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off SET jit = off AS $$
DECLARE
    next_seq bigint;
    next_id smallint;
BEGIN
    -- Only a delivery that was not held promotes the next one.
    IF TG_OP = 'UPDATE' AND NOT (
        OLD.due_at < 'infinity' AND (OLD.finished_at IS NULL OR OLD.status = 3 AND OLD.passed IS NULL)
        AND NEW.finished_at IS NOT NULL AND (NEW.status <> 3 OR NEW.passed IS NOT NULL)) THEN
        RETURN NULL;
    END IF;
    -- At a stricter level this function has the snapshot of its transaction, and would not see the deliveries that were
    -- held since: nothing would ever make them due.
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        PERFORM inbox_refuse_isolation();
    END IF;
    -- A handler with one id: a single statement, because this runs for each delivery. The condition of
    -- inbox_delivery_order is repeated so that the planner cannot choose an index over all held deliveries and walk
    -- through it. Not now(): a transactional handler may have begun its transaction long before.
    UPDATE inbox_delivery d SET due_at = clock_timestamp()
    WHERE (SELECT own.same_as IS NULL FROM inbox_handler own WHERE own.id = OLD.handler_id)
      AND d.handler_id = OLD.handler_id AND d.message_seq = (
        SELECT h.message_seq FROM inbox_delivery h
        WHERE h.handler_id = OLD.handler_id AND h.order_hash = OLD.order_hash AND h.due_at >= 'infinity'
          AND (h.finished_at IS NULL OR h.status = 3 AND h.passed IS NULL) AND CASE WHEN h.finished_at IS NULL THEN true ELSE false END
        ORDER BY h.due_at, h.message_seq LIMIT 1
        FOR NO KEY UPDATE);
    IF FOUND OR (SELECT own.same_as IS NULL FROM inbox_handler own WHERE own.id = OLD.handler_id) THEN
        RETURN NULL;
    END IF;
    -- A handler with several ids: the first held delivery under any of them.
    SELECT d.message_seq, d.handler_id INTO next_seq, next_id
    FROM inbox_handler own
    JOIN inbox_handler same ON same.same_as = own.same_as
    CROSS JOIN LATERAL (
        SELECT h.message_seq, h.handler_id FROM inbox_delivery h
        WHERE h.handler_id = same.id AND h.order_hash = OLD.order_hash AND h.due_at >= 'infinity'
          AND (h.finished_at IS NULL OR h.status = 3 AND h.passed IS NULL) AND CASE WHEN h.finished_at IS NULL THEN true ELSE false END
        ORDER BY h.due_at, h.message_seq LIMIT 1
        FOR NO KEY UPDATE) d
    WHERE own.id = OLD.handler_id
    ORDER BY d.message_seq LIMIT 1;
    IF FOUND THEN
        UPDATE inbox_delivery d SET due_at = clock_timestamp() WHERE d.message_seq = next_seq AND d.handler_id = next_id;
    END IF;
    RETURN NULL;
END $$;

-- Fires for every statement that finishes a delivery. Claims and renewals do not set the column, and for unordered
-- deliveries only the condition is evaluated. The rest of the condition is in the function: the server reads the stored
-- text of a condition for each statement, and with the whole condition here that took a quarter of the time of a
-- statement that settles one delivery.
CREATE TRIGGER inbox_promote_next AFTER UPDATE OF finished_at ON inbox_delivery FOR EACH ROW
WHEN (OLD.order_hash IS NOT NULL AND current_setting('wharf.promotes', true) IS DISTINCT FROM 'together')
EXECUTE FUNCTION inbox_promote();

-- Settles claims of ordered handlers as done, and makes the next delivery of each of their keys due: for a batch, one
-- statement instead of a call of the trigger for each delivery, which takes three times as long. Returns how many
-- claims were current. The second statement has its own snapshot, taken after the settled rows were locked, so it sees
-- every delivery held behind them. A claimed delivery is never held, so each settled one was the head of its key.
CREATE FUNCTION inbox_settle_ordered(processor integer, message_seqs bigint[], handler_ids smallint[], run_attempts integer[]) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off SET lock_timeout = '2s' AS $$
DECLARE
    settled_ids smallint[];
    order_hashes bigint[];
BEGIN
    -- As in inbox_promote.
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        PERFORM inbox_refuse_isolation();
    END IF;
    -- Turns the trigger off for one statement. Not in the head of the function: only a superuser may set an unknown
    -- parameter there.
    PERFORM set_config('wharf.promotes', 'together', true);
    WITH settled AS (
        UPDATE inbox_delivery d
        SET finished_at = now(), status = 2, locked_until = NULL, locked_by = NULL, crashes = 0
        FROM (SELECT unnest(message_seqs) AS message_seq, unnest(handler_ids) AS handler_id, unnest(run_attempts) AS attempt) s
        WHERE d.message_seq = s.message_seq AND d.handler_id = s.handler_id
          AND CASE WHEN d.attempts = s.attempt AND d.locked_by = processor AND d.locked_until IS NOT NULL AND d.finished_at IS NULL
                   THEN true ELSE false END
        RETURNING d.handler_id, d.order_hash)
    SELECT array_agg(handler_id), array_agg(order_hash) INTO settled_ids, order_hashes FROM settled;
    PERFORM set_config('wharf.promotes', '', true);
    -- As inbox_promote, for all keys at once.
    WITH promoted AS MATERIALIZED (
        SELECT next.message_seq, next.handler_id
        FROM (SELECT unnest(settled_ids) AS handler_id, unnest(order_hashes) AS order_hash) k
        JOIN (SELECT own.id, CASE WHEN own.same_as IS NULL THEN ARRAY[own.id]
                                  ELSE ARRAY(SELECT same.id FROM inbox_handler same WHERE same.same_as = own.same_as) END AS ids
              FROM inbox_handler own WHERE own.id = ANY (settled_ids) OFFSET 0) own ON own.id = k.handler_id
        CROSS JOIN LATERAL (
            SELECT first.message_seq, first.handler_id
            FROM (SELECT unnest(own.ids) AS id) same
            CROSS JOIN LATERAL (
                SELECT h.message_seq, h.handler_id FROM inbox_delivery h
                WHERE h.handler_id = same.id AND h.order_hash = k.order_hash AND h.due_at >= 'infinity'
                  AND (h.finished_at IS NULL OR h.status = 3 AND h.passed IS NULL) AND CASE WHEN h.finished_at IS NULL THEN true ELSE false END
                ORDER BY h.due_at, h.message_seq LIMIT 1
                FOR NO KEY UPDATE) first
            ORDER BY first.message_seq LIMIT 1) next
        WHERE k.order_hash IS NOT NULL)
    UPDATE inbox_delivery t SET due_at = clock_timestamp()
    FROM promoted p WHERE t.message_seq = p.message_seq AND t.handler_id = p.handler_id;
    RETURN coalesce(cardinality(settled_ids), 0);
END $$;

-- Called when handlers that were one are separate again: a delivery may be held behind one that belongs to another
-- handler now, whose end does not promote it. So the first held delivery of each key becomes due; one that still has a
-- member before it is held again by the next claim. A locked row is skipped: the transaction that has it may be about to
-- promote it, and waiting for it could deadlock. Runs with the owner's rights, because a process that only accepts may
-- be the first one that starts.
CREATE FUNCTION inbox_promote_parted(parted smallint[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET enable_seqscan = off AS $$
    UPDATE inbox_delivery d SET due_at = clock_timestamp()
    FROM (SELECT f.message_seq, f.handler_id
          FROM (SELECT DISTINCT ON (h.handler_id, h.order_hash) h.message_seq, h.handler_id FROM inbox_delivery h
                WHERE h.handler_id = ANY (parted) AND h.finished_at IS NULL AND h.due_at = 'infinity' AND h.order_hash IS NOT NULL
                ORDER BY h.handler_id, h.order_hash, h.message_seq) first
          JOIN inbox_delivery f ON f.message_seq = first.message_seq AND f.handler_id = first.handler_id
          WHERE f.finished_at IS NULL AND f.due_at = 'infinity'
          FOR NO KEY UPDATE OF f SKIP LOCKED) free
    WHERE d.message_seq = free.message_seq AND d.handler_id = free.handler_id
$$;

-- Fires when a poisoned delivery that held its key is deleted, for example when poisoned deliveries expire.
CREATE TRIGGER inbox_promote_next_of_deleted AFTER DELETE ON inbox_delivery FOR EACH ROW
WHEN (OLD.order_hash IS NOT NULL AND OLD.due_at < 'infinity' AND (OLD.finished_at IS NULL OR OLD.status = 3 AND OLD.passed IS NULL))
EXECUTE FUNCTION inbox_promote();

-- Groups similar errors: words that contain a digit (numbers, ids, addresses) are left out.
CREATE FUNCTION inbox_fingerprint(error text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN left(encode(sha256(convert_to(regexp_replace(error, '[A-Za-z0-9-]*[0-9][A-Za-z0-9-]*', '#', 'g'), 'UTF8')), 'hex'), 8);

-- A timestamp as microseconds since 1970, for programs.
CREATE FUNCTION inbox_micros(at timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN (extract(epoch FROM at) * 1000000)::bigint;

-- Every delivery in readable form.
CREATE VIEW inbox_status AS
SELECT m.message_id, m.source, m.topic, h.key AS handler_key,
       CASE d.status
           WHEN 0 THEN CASE WHEN d.locked_until > now() THEN 'running' ELSE 'pending' END
           WHEN 2 THEN 'done'
           WHEN 3 THEN 'poisoned'
           WHEN 4 THEN 'discarded'
       END AS state,
       d.reason, d.attempts, d.errors, d.crashes, d.store_errors, d.replays, d.is_corrected, d.due_at, d.locked_until, p.name AS locked_by,
       p.alive_until > now() AS owner_is_alive, d.finished_at,
       now() - m.received_at AS age, m.received_at, m.recorded_at, m.kafka_partition, m.kafka_offset, d.last_error,
       inbox_fingerprint(d.last_error) AS fingerprint, d.message_seq, d.handler_id
FROM inbox_delivery d
LEFT JOIN inbox_message m ON m.seq = d.message_seq
LEFT JOIN inbox_handler h ON h.id = d.handler_id
LEFT JOIN inbox_processor p ON p.id = d.locked_by;

-- Deliveries that the engine gave up and that an operator must look at.
CREATE VIEW inbox_poisoned AS
SELECT m.message_id, m.source, m.topic, h.key AS handler_key, d.reason, d.last_error, inbox_fingerprint(d.last_error) AS fingerprint,
       d.attempts, d.errors, d.crashes, d.replays, d.finished_at AS poisoned_at, m.received_at, m.kafka_partition, m.kafka_offset,
       inbox_text(m.record_key) AS record_key, inbox_text(m.payload) AS payload, d.message_seq, d.handler_id
FROM inbox_delivery d
LEFT JOIN inbox_message m ON m.seq = d.message_seq
LEFT JOIN inbox_handler h ON h.id = d.handler_id
WHERE d.status = 3;

-- Poisoned deliveries grouped by cause: one row per handler, reason and fingerprint.
CREATE VIEW inbox_poisoned_by_error AS
SELECT h.key AS handler_key, d.reason, inbox_fingerprint(d.last_error) AS fingerprint, count(*) AS poisoned,
       min(d.finished_at) AS first_at, max(d.finished_at) AS last_at, min(d.last_error) AS example, d.handler_id
FROM inbox_delivery d
LEFT JOIN inbox_handler h ON h.id = d.handler_id
WHERE d.status = 3
GROUP BY d.handler_id, h.key, d.reason, inbox_fingerprint(d.last_error);

-- The failed attempts that are kept, in readable form.
CREATE VIEW inbox_failures AS
SELECT m.message_id, m.source, m.topic, h.key AS handler_key, a.attempt, a.failed_at, a.why, a.error, inbox_fingerprint(a.error) AS fingerprint,
       a.message_seq, a.handler_id
FROM inbox_attempt a
LEFT JOIN inbox_message m ON m.seq = a.message_seq
LEFT JOIN inbox_handler h ON h.id = a.handler_id;

-- Records that could not become messages, in readable form.
CREATE VIEW inbox_quarantined AS
SELECT id, topic, cluster_id, kafka_partition, kafka_offset, reason, detail, quarantined_at, replay_asked_at, replays,
       inbox_text(message_id) AS message_id, inbox_text(source) AS source, inbox_text(record_key) AS record_key,
       inbox_text(payload) AS payload
FROM inbox_quarantine;

-- The open work of each handler. `held` counts deliveries that wait for another delivery of their key. Counts stop at
-- 10,000, which then means 10,000 or more, so that the view costs the same at any size. `due` and `running` are counted
-- among the 12,000 open deliveries of the handler that have been due longest; running deliveries are nearly always
-- among them.
CREATE VIEW inbox_backlog AS
SELECT h.key AS handler_key,
       CASE WHEN head.looked = 12000 THEN 10000 ELSE least(head.due, 10000) END AS due,
       later.deliveries AS later, held.deliveries AS held, least(head.running, 10000) AS running, given_up.deliveries AS poisoned,
       now() - head.oldest_due_at AS oldest_due_age, later.next_due_at, h.paused_at, h.unknown_since, h.breaker_opened_at, h.id AS handler_id
FROM inbox_handler h
CROSS JOIN LATERAL (
    SELECT count(*) AS looked, count(*) FILTER (WHERE d.locked_until IS NULL OR d.locked_until <= now()) AS due,
           count(*) FILTER (WHERE d.locked_until > now()) AS running, min(d.due_at) AS oldest_due_at
    FROM (SELECT due_at, locked_until FROM inbox_delivery
          WHERE handler_id = h.id AND finished_at IS NULL AND due_at <= now() ORDER BY due_at, message_seq LIMIT 12000) d) head
CROSS JOIN LATERAL (
    SELECT count(*) AS deliveries, min(d.due_at) AS next_due_at
    FROM (SELECT due_at FROM inbox_delivery
          WHERE handler_id = h.id AND finished_at IS NULL AND due_at > now() AND due_at < 'infinity'
          ORDER BY due_at, message_seq LIMIT 10000) d) later
CROSS JOIN LATERAL (
    SELECT count(*) AS deliveries
    FROM (SELECT 1 FROM inbox_delivery
          WHERE handler_id = h.id AND finished_at IS NULL AND due_at = 'infinity' ORDER BY message_seq LIMIT 10000) d) held
CROSS JOIN LATERAL (
    SELECT count(*) AS deliveries
    FROM (SELECT 1 FROM inbox_delivery WHERE handler_id = h.id AND status = 3 ORDER BY finished_at, message_seq LIMIT 10000) d) given_up;

-- Keys of ordered handlers with waiting deliveries, and the delivery that they wait for. Covers the 1,000 oldest held
-- deliveries of a handler and the 1,000 that have been poisoned longest. `behind` stops at 1,000. The order key itself
-- is not stored: it is in the message. `record_key` is the key of that message's record, which is the order key of
-- handlers that are ordered by it.
CREATE VIEW inbox_held_keys AS
SELECT current.key AS handler_key, m.message_id, m.source, m.topic,
       CASE WHEN head.status = 3 THEN 'poisoned' WHEN head.locked_until > now() THEN 'running' WHEN head.status = 0 THEN 'pending' END AS state,
       head.reason, head.last_error, waiting.behind, coalesce(head.finished_at, m.received_at) AS held_since, head.due_at,
       k.order_hash, head.message_seq, head.handler_id, inbox_text(m.record_key) AS record_key
FROM inbox_handler h
JOIN inbox_handler current ON current.id = coalesce(h.same_as, h.id)
CROSS JOIN LATERAL (
    SELECT DISTINCT f.order_hash
    FROM ((SELECT d.order_hash, d.passed FROM inbox_delivery d WHERE d.handler_id = h.id AND d.status = 3
           ORDER BY d.finished_at, d.message_seq LIMIT 1000)
          UNION ALL
          (SELECT d.order_hash, NULL FROM inbox_delivery d WHERE d.handler_id = h.id AND d.finished_at IS NULL AND d.due_at = 'infinity'
           ORDER BY d.message_seq LIMIT 1000)) f
    WHERE f.order_hash IS NOT NULL AND f.passed IS NULL) k
CROSS JOIN LATERAL (
    SELECT count(*) AS behind
    FROM (SELECT 1 FROM inbox_delivery d
          WHERE d.handler_id = h.id AND d.order_hash = k.order_hash AND d.due_at >= 'infinity'
            AND (d.finished_at IS NULL OR d.status = 3 AND d.passed IS NULL)
          ORDER BY d.due_at, d.message_seq LIMIT 1000) w) waiting
LEFT JOIN LATERAL (
    SELECT b.* FROM inbox_handler same
    CROSS JOIN LATERAL (
        SELECT d.* FROM inbox_delivery d
        WHERE d.handler_id = same.id AND d.order_hash = k.order_hash AND d.due_at < 'infinity'
          AND (d.finished_at IS NULL OR d.status = 3 AND d.passed IS NULL)
        ORDER BY d.due_at, d.message_seq LIMIT 1) b
    WHERE coalesce(same.same_as, same.id) = coalesce(h.same_as, h.id)
    ORDER BY b.due_at, b.message_seq LIMIT 1) head ON true
LEFT JOIN LATERAL (SELECT * FROM inbox_message WHERE seq = head.message_seq LIMIT 1) m ON true
WHERE waiting.behind > 0;

-- Operator actions. Each one is fenced against running work, is bounded, writes a row to inbox_audit, and changes
-- nothing when it is repeated. Actions are SECURITY DEFINER: they run with the rights of the inbox's owner, so the
-- caller needs no rights on tables and cannot change a row without an audit row. `database_user` is the user who logged
-- in, not the owner. The end of this file binds each action to the schema of its inbox and revokes EXECUTE from PUBLIC
-- (docs/roles.sql grants it). `actor` is the person as reported by the tool, `because` is the reason that the person
-- gives.

-- The ids of a handler's key, including the ids that became one handler with it. Without a key: all ids.
CREATE FUNCTION inbox_handler_ids(handler_key text) RETURNS smallint[]
LANGUAGE sql STABLE AS $$
    SELECT coalesce(array_agg(DISTINCT same.id), '{}')
    FROM inbox_handler_key k
    JOIN inbox_handler own ON own.id = k.handler_id
    JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
    WHERE k.key = coalesce($1, k.key)
$$;

-- Refuses an unknown handler key, so that a mistyped key does not look like an empty result.
CREATE FUNCTION inbox_check_handler_key(handler_key text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF handler_key IS NOT NULL AND inbox_handler_ids(handler_key) = '{}' THEN
        RAISE EXCEPTION 'unknown handler key %', quote_literal(handler_key)
            USING HINT = 'SELECT key FROM inbox_handler_key lists the known keys.';
    END IF;
END $$;

-- Refuses arguments that are NULL, such as a variable of a script that was never set: as a condition, NULL would match
-- everything.
CREATE FUNCTION inbox_check_given(arguments jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    missing text;
BEGIN
    SELECT string_agg(a.name, ', ' ORDER BY a.name) INTO missing FROM jsonb_each(arguments) AS a (name, value) WHERE a.value = 'null';
    IF missing IS NOT NULL THEN
        RAISE EXCEPTION 'must not be NULL: %', missing
            USING ERRCODE = 'null_value_not_allowed', HINT = 'Leave a condition out, or give its value.';
    END IF;
END $$;

-- Refuses a filter with an unknown name, which would silently match more than intended, a condition without a value, and
-- an empty filter.
CREATE FUNCTION inbox_check_filter(filter jsonb, names text[]) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    wrong text;
BEGIN
    IF jsonb_typeof(filter) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'a filter is a JSON object, such as {"handler_key": "mail.receipt"}';
    END IF;
    SELECT string_agg(name, ', ') INTO wrong FROM jsonb_object_keys(filter) AS k (name) WHERE NOT name = ANY (names || '{all}');
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'unknown filter name %', wrong USING HINT = 'A filter may have: ' || array_to_string(names, ', ') || ', all.';
    END IF;
    PERFORM inbox_check_given(filter);
    IF filter -> 'all' <> 'true' THEN
        RAISE EXCEPTION '"all" can only be true';
    END IF;
    IF filter = '{}' THEN
        RAISE EXCEPTION 'an empty filter would take everything' USING HINT = 'Say {"all": true} if that is what you want.';
    END IF;
END $$;

-- Whether a filter matches a delivery, apart from its handler and message id.
CREATE FUNCTION inbox_is_meant(filter jsonb, source text, topic text, reason text, error text, since timestamptz) RETURNS boolean
LANGUAGE sql STABLE
RETURN ($1 ->> 'source' IS NULL OR $2 = $1 ->> 'source')
   AND ($1 ->> 'topic' IS NULL OR $3 = $1 ->> 'topic')
   AND ($1 ->> 'reason' IS NULL OR $4 = $1 ->> 'reason')
   AND ($1 ->> 'error' IS NULL OR position(lower($1 ->> 'error') IN lower($5)) > 0)
   AND ($1 ->> 'fingerprint' IS NULL OR coalesce(inbox_fingerprint($5), 'none') = $1 ->> 'fingerprint')
   AND ($1 ->> 'older_than' IS NULL OR $6 < now() - ($1 ->> 'older_than')::interval)
   AND ($1 ->> 'newer_than' IS NULL OR $6 >= now() - ($1 ->> 'newer_than')::interval);

-- Whether the action may be applied to a delivery. For actions other than replay and discard: whether the delivery is
-- poisoned.
CREATE FUNCTION inbox_is_free_to(action text, status smallint, locked_until timestamptz) RETURNS boolean
LANGUAGE sql STABLE
RETURN CASE $1 WHEN 'replay' THEN $2 IN (3, 4)
               WHEN 'discard' THEN $2 = 3 OR $2 = 0 AND ($3 IS NULL OR $3 <= now())
               ELSE $2 = 3 END;

-- The row locations of the deliveries that a filter matches: poisoned ones, the oldest first. With message_id, a replay
-- also matches discarded deliveries, and a discard also matches pending ones. The filter: {"handler_key", "message_id",
-- "source", "topic", "reason", "error" (a part of it), "fingerprint" ("none": without an error), "older_than",
-- "newer_than" (intervals since it was poisoned; for other deliveries, since the message was received), "all": true}.
CREATE FUNCTION inbox_matching(filter jsonb, row_limit integer DEFAULT 1000, action text DEFAULT 'replay')
RETURNS TABLE (tid tid, message_seq bigint, handler_id smallint)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    ids smallint[];
BEGIN
    PERFORM inbox_check_filter(filter, '{handler_key, message_id, source, topic, reason, error, fingerprint, older_than, newer_than}');
    ids := inbox_handler_ids(filter ->> 'handler_key');
    IF filter ? 'message_id' THEN
        RETURN QUERY
        SELECT d.tid, d.message_seq, d.handler_id
        FROM inbox_message m
        CROSS JOIN unnest(ids) AS h (id)
        -- LIMIT forces an index probe, whatever the planner estimates.
        CROSS JOIN LATERAL (SELECT ctid AS tid, * FROM inbox_delivery WHERE message_seq = m.seq AND handler_id = h.id LIMIT 1) d
        WHERE m.message_id = filter ->> 'message_id'
          AND inbox_is_meant(filter, m.source, m.topic, d.reason, d.last_error, CASE WHEN d.status = 3 THEN d.finished_at ELSE m.received_at END)
          AND inbox_is_free_to(action, d.status, d.locked_until)
        ORDER BY d.message_seq, d.handler_id LIMIT row_limit;
    ELSE
        PERFORM inbox_check_handler_key(filter ->> 'handler_key');
        RETURN QUERY
        SELECT p.tid, p.message_seq, p.handler_id
        FROM unnest(ids) AS h (id)
        CROSS JOIN LATERAL (
            SELECT d.ctid AS tid, d.message_seq, d.handler_id, d.finished_at
            FROM inbox_delivery d LEFT JOIN LATERAL (SELECT source, topic FROM inbox_message WHERE seq = d.message_seq LIMIT 1) m ON true
            WHERE d.handler_id = h.id AND d.status = 3
              AND inbox_is_meant(filter, m.source, m.topic, d.reason, d.last_error, d.finished_at)
            ORDER BY d.finished_at, d.message_seq LIMIT row_limit) p
        ORDER BY p.finished_at, p.message_seq LIMIT row_limit;
    END IF;
END $$;

-- Replays or discards the deliveries that a filter matches, at most row_limit. Skips rows that change at the same
-- moment. A replay resets the retry budget and makes the delivery due now. The attempt number keeps growing, so that an
-- earlier claim stays invalid.
CREATE FUNCTION inbox_change(action text, filter jsonb, row_limit integer, because text, actor text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    tids tid[];
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('row_limit', row_limit));
    -- Rows are locked in table order, so that two actions never deadlock, and are checked again under the lock.
    SELECT array_agg(l.tid) INTO tids FROM (
        SELECT d.ctid AS tid FROM inbox_delivery d
        WHERE d.ctid = ANY (ARRAY(SELECT f.tid FROM inbox_matching(filter, row_limit, action) f))
          AND inbox_is_free_to(inbox_change.action, d.status, d.locked_until)
        FOR UPDATE SKIP LOCKED) l;
    RETURN inbox_change_locked(action, filter, tids, because, actor);
END $$;

-- Replays or discards rows that the caller has locked, and writes the audit and the history.
CREATE FUNCTION inbox_change_locked(action text, filter jsonb, tids tid[], because text, actor text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    act bigint;
    changed bigint := 0;
BEGIN
    -- The caller may have set it, and then nothing would make the next delivery of a key due.
    PERFORM set_config('wharf.promotes', '', true);
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ($1, $2, coalesce(cardinality(tids), 0), $4, $5)
    RETURNING id INTO act;
    IF tids IS NULL THEN
        RETURN 0;
    END IF;
    INSERT INTO inbox_history (message_seq, handler_id, audit_id, status, finished_at, attempts, errors, crashes, reason, last_error)
    SELECT d.message_seq, d.handler_id, act, d.status, d.finished_at, d.attempts, d.errors, d.crashes, d.reason, d.last_error
    FROM inbox_delivery d WHERE d.ctid = ANY (tids);
    IF $1 = 'replay' THEN
        UPDATE inbox_delivery d
        SET status = 0, due_at = now(), finished_at = NULL, errors = 0, crashes = 0, store_errors = 0, reason = NULL, locked_until = NULL, locked_by = NULL,
            replays = least(d.replays + 1, 32767)
        WHERE d.ctid = ANY (tids);
    ELSE
        UPDATE inbox_delivery d
        SET status = 4, finished_at = now(), locked_until = NULL, locked_by = NULL,
            reason = coalesce($4, 'by a person')
        WHERE d.ctid = ANY (tids);
    END IF;
    GET DIAGNOSTICS changed = ROW_COUNT;
    RETURN changed;
END $$;

-- Makes deliveries pending again that were poisoned as `unknown key`, at most row_limit per handler; `actor` is the
-- process that has these handlers. Their retry counts stay. Sequential scans are off: a plan made while the table was
-- empty would scan it when it is large.
CREATE FUNCTION inbox_return_parked(handler_ids smallint[], row_limit integer, actor text) RETURNS TABLE (handler_key text, returned bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    known_id smallint;
    tids tid[];
    act bigint;
BEGIN
    FOREACH known_id IN ARRAY handler_ids LOOP
        SELECT array_agg(p.tid) INTO tids FROM (
            SELECT d.ctid AS tid FROM inbox_delivery d
            WHERE d.handler_id = known_id AND d.status = 3 AND d.reason = 'unknown key'
            ORDER BY d.message_seq LIMIT row_limit
            FOR UPDATE SKIP LOCKED) p;
        CONTINUE WHEN tids IS NULL;
        SELECT h.key INTO handler_key FROM inbox_handler h WHERE h.id = known_id;
        returned := cardinality(tids);
        INSERT INTO inbox_audit (action, filter, affected, because, actor)
        VALUES ('return', jsonb_build_object('handler_key', inbox_return_parked.handler_key, 'reason', 'unknown key'),
                inbox_return_parked.returned, 'a process that has the key was registered', inbox_return_parked.actor)
        RETURNING id INTO act;
        INSERT INTO inbox_history (message_seq, handler_id, audit_id, status, finished_at, attempts, errors, crashes, reason, last_error)
        SELECT d.message_seq, d.handler_id, act, d.status, d.finished_at, d.attempts, d.errors, d.crashes, d.reason, d.last_error
        FROM inbox_delivery d WHERE d.ctid = ANY (tids);
        UPDATE inbox_delivery d SET status = 0, due_at = now(), finished_at = NULL, reason = NULL WHERE d.ctid = ANY (tids);
        RETURN NEXT;
    END LOOP;
END $$;

-- Runs a poisoned or discarded delivery again. Returns the number of deliveries changed: 0 if none matches or it is not
-- poisoned or discarded.
CREATE FUNCTION inbox_replay(message_id text, handler_key text, source text DEFAULT NULL, because text DEFAULT NULL,
                             actor text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SECURITY DEFINER AS $$
    SELECT inbox_check_given(jsonb_build_object('message_id', $1, 'handler_key', $2));
    SELECT inbox_change('replay', jsonb_strip_nulls(jsonb_build_object('message_id', $1, 'handler_key', $2, 'source', $3)), 1000, $4, $5)
$$;

-- Runs a poisoned or discarded delivery again with another payload, for this handler only; the original payload is
-- kept. `attempt` is the attempt that was inspected (inbox_status.attempts); if the delivery has run since, nothing
-- changes. The audit row has the hash of the payload. Returns 0 if no delivery matches.
CREATE FUNCTION inbox_replay_corrected(message_id text, handler_key text, payload bytea, source text DEFAULT NULL, attempt integer DEFAULT NULL,
                                       because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
    tids tid[];
    act bigint;
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('message_id', $1, 'handler_key', $2, 'payload', CASE WHEN $3 IS NOT NULL THEN true END));
    PERFORM inbox_check_handler_key($2);
    SELECT array_agg(d.tid) INTO tids
    FROM inbox_message m
    CROSS JOIN unnest(inbox_handler_ids($2)) AS h (id)
    CROSS JOIN LATERAL (SELECT ctid AS tid FROM inbox_delivery
                        WHERE message_seq = m.seq AND handler_id = h.id AND status IN (3, 4) AND ($5 IS NULL OR attempts = $5)
                        LIMIT 1 FOR UPDATE SKIP LOCKED) d
    WHERE m.message_id = $1 AND ($4 IS NULL OR m.source = $4);
    IF cardinality(tids) > 1 THEN
        RAISE EXCEPTION 'several messages match' USING HINT = 'Name the source.';
    END IF;
    IF (SELECT $3 = CASE WHEN d.is_corrected THEN (SELECT payload FROM inbox_correction
                                                   WHERE message_seq = d.message_seq AND handler_id = d.handler_id
                                                   ORDER BY audit_id DESC LIMIT 1)
                         ELSE (SELECT payload FROM inbox_message WHERE seq = d.message_seq) END
        FROM inbox_delivery d WHERE d.ctid = ANY (tids)) THEN
        RAISE EXCEPTION 'the payload is unchanged';
    END IF;
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('replay corrected', jsonb_strip_nulls(jsonb_build_object(
                'message_id', $1, 'handler_key', $2, 'source', $4, 'attempt', $5, 'payload_sha256', encode(sha256($3), 'hex'))),
            coalesce(cardinality(tids), 0), $6, $7)
    RETURNING id INTO act;
    INSERT INTO inbox_history (message_seq, handler_id, audit_id, status, finished_at, attempts, errors, crashes, reason, last_error)
    SELECT d.message_seq, d.handler_id, act, d.status, d.finished_at, d.attempts, d.errors, d.crashes, d.reason, d.last_error
    FROM inbox_delivery d WHERE d.ctid = ANY (tids);
    INSERT INTO inbox_correction (message_seq, handler_id, audit_id, payload)
    SELECT d.message_seq, d.handler_id, act, $3 FROM inbox_delivery d WHERE d.ctid = ANY (tids);
    UPDATE inbox_delivery d
    SET status = 0, due_at = now(), finished_at = NULL, errors = 0, crashes = 0, store_errors = 0, reason = NULL, locked_until = NULL, locked_by = NULL,
        replays = least(d.replays + 1, 32767), is_corrected = true
    WHERE d.ctid = ANY (tids);
    RETURN coalesce(cardinality(tids), 0);
END $$;

-- Replays the deliveries that a filter matches; inbox_matching lists them beforehand.
CREATE FUNCTION inbox_replay_matching(filter jsonb, row_limit integer DEFAULT 1000, because text DEFAULT NULL,
                                      actor text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SECURITY DEFINER AS $$
    SELECT inbox_change('replay', $1, $2, $3, $4)
$$;

-- Discards a poisoned or pending delivery for good. A running delivery is left alone.
CREATE FUNCTION inbox_discard(message_id text, handler_key text, source text DEFAULT NULL, because text DEFAULT NULL,
                              actor text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SECURITY DEFINER AS $$
    SELECT inbox_check_given(jsonb_build_object('message_id', $1, 'handler_key', $2));
    SELECT inbox_change('discard', jsonb_strip_nulls(jsonb_build_object('message_id', $1, 'handler_key', $2, 'source', $3)), 1000, $4, $5)
$$;

-- Discards the deliveries that a filter matches.
CREATE FUNCTION inbox_discard_matching(filter jsonb, row_limit integer DEFAULT 1000, because text DEFAULT NULL,
                                       actor text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SECURITY DEFINER AS $$
    SELECT inbox_change('discard', $1, $2, $3, $4)
$$;

-- Discards pending deliveries that a person has seen in a list, each at the attempt that the list showed: a delivery
-- that has run since, or runs now, is left alone. `filter` is for the audit: how the person found them.
CREATE FUNCTION inbox_discard_seen(filter jsonb, message_seqs bigint[], handler_ids smallint[], seen_attempts integer[],
                                   because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    tids tid[];
BEGIN
    SELECT array_agg(d.tid) INTO tids
    FROM unnest(message_seqs, handler_ids, seen_attempts) AS s (message_seq, handler_id, attempt)
    CROSS JOIN LATERAL (SELECT o.ctid AS tid FROM inbox_delivery o
                        WHERE o.message_seq = s.message_seq AND o.handler_id = s.handler_id AND o.attempts = s.attempt
                          AND o.status = 0 AND (o.locked_until IS NULL OR o.locked_until <= now())
                        LIMIT 1 FOR UPDATE SKIP LOCKED) d;
    RETURN inbox_change_locked('discard', filter, tids, because, actor);
END $$;

-- Releases the claim of a running delivery: it is due at once, and the outcome of the current run is ignored. The
-- handler is stopped when its process next renews its claims, within a third of the lease. No retry is consumed.
-- `attempt` selects the run (inbox_status.attempts); without it, the current run. Returns 0 if no such run is active,
-- or if its outcome is being written.
CREATE FUNCTION inbox_release(message_id text, handler_key text, source text DEFAULT NULL, attempt integer DEFAULT NULL,
                              because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
    tids tid[];
    act bigint;
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('message_id', $1, 'handler_key', $2));
    PERFORM inbox_check_handler_key($2);
    SELECT array_agg(d.tid) INTO tids
    FROM inbox_message m
    CROSS JOIN unnest(inbox_handler_ids($2)) AS h (id)
    CROSS JOIN LATERAL (SELECT ctid AS tid FROM inbox_delivery
                        WHERE message_seq = m.seq AND handler_id = h.id AND status = 0 AND locked_until > now() AND ($4 IS NULL OR attempts = $4)
                        LIMIT 1 FOR UPDATE SKIP LOCKED) d
    WHERE m.message_id = $1 AND ($3 IS NULL OR m.source = $3);
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('release', jsonb_strip_nulls(jsonb_build_object('message_id', $1, 'handler_key', $2, 'source', $3, 'attempt', $4)),
            coalesce(cardinality(tids), 0), $5, $6)
    RETURNING id INTO act;
    INSERT INTO inbox_history (message_seq, handler_id, audit_id, status, finished_at, attempts, errors, crashes, reason, last_error)
    SELECT d.message_seq, d.handler_id, act, d.status, d.finished_at, d.attempts, d.errors, d.crashes, d.reason, d.last_error
    FROM inbox_delivery d WHERE d.ctid = ANY (tids);
    UPDATE inbox_delivery d SET locked_until = NULL, locked_by = 0, due_at = now() WHERE d.ctid = ANY (tids);
    RETURN coalesce(cardinality(tids), 0);
END $$;

-- Pauses or resumes a handler. While it is paused, no process claims its deliveries, and none hands them over after its
-- next heartbeat. Running deliveries finish; waiting ones stay pending.
CREATE FUNCTION inbox_set_paused(handler_key text, is_paused boolean, because text, actor text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('handler_key', inbox_set_paused.handler_key));
    PERFORM inbox_check_handler_key(inbox_set_paused.handler_key);
    UPDATE inbox_handler h SET paused_at = CASE WHEN is_paused THEN now() END
    WHERE h.id = ANY (inbox_handler_ids(inbox_set_paused.handler_key)) AND (h.paused_at IS NOT NULL) <> is_paused;
    GET DIAGNOSTICS changed = ROW_COUNT;
    changed := least(changed, 1);
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES (CASE WHEN is_paused THEN 'pause' ELSE 'resume' END, jsonb_build_object('handler_key', inbox_set_paused.handler_key), changed,
            inbox_set_paused.because, inbox_set_paused.actor);
    RETURN changed;
END $$;

CREATE FUNCTION inbox_pause_handler(handler_key text, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SECURITY DEFINER AS $$ SELECT inbox_set_paused($1, true, $2, $3) $$;

CREATE FUNCTION inbox_resume_handler(handler_key text, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SECURITY DEFINER AS $$ SELECT inbox_set_paused($1, false, $2, $3) $$;

-- Opens or closes the circuit breaker of a handler. While it is open, only one delivery at a time is claimed, as a
-- probe, the first one after 10 s; the first success closes it. Running deliveries finish.
CREATE FUNCTION inbox_set_breaker(handler_key text, is_open boolean, because text, actor text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('handler_key', inbox_set_breaker.handler_key));
    PERFORM inbox_check_handler_key(inbox_set_breaker.handler_key);
    UPDATE inbox_handler h
    SET breaker_opened_at = CASE WHEN is_open THEN now() END, breaker_probe_at = CASE WHEN is_open THEN now() + interval '10 seconds' END,
        breaker_error = CASE WHEN is_open THEN coalesce('by a person: ' || inbox_set_breaker.because, 'by a person') END,
        breaker_probe_until = NULL, breaker_probe_no = h.breaker_probe_no + 1
    WHERE h.id = ANY (inbox_handler_ids(inbox_set_breaker.handler_key)) AND (h.breaker_opened_at IS NOT NULL) <> is_open;
    GET DIAGNOSTICS changed = ROW_COUNT;
    changed := least(changed, 1);
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES (CASE WHEN is_open THEN 'open breaker' ELSE 'close breaker' END, jsonb_build_object('handler_key', inbox_set_breaker.handler_key),
            changed, inbox_set_breaker.because, inbox_set_breaker.actor);
    RETURN changed;
END $$;

CREATE FUNCTION inbox_open_breaker(handler_key text, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SECURITY DEFINER AS $$ SELECT inbox_set_breaker($1, true, $2, $3) $$;

CREATE FUNCTION inbox_close_breaker(handler_key text, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SECURITY DEFINER AS $$ SELECT inbox_set_breaker($1, false, $2, $3) $$;

-- Sets the rate limit of a handler in starts per second, over all processes and restarts. It overrides the
-- registration. `burst` is the maximum number of starts at once; by default what one second allows. 'infinity' means no
-- limit; NULL restores the limit of the registration.
CREATE FUNCTION inbox_set_rate(handler_key text, per_sec double precision, burst integer DEFAULT NULL, because text DEFAULT NULL,
                               actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
    interval_us bigint := CASE WHEN per_sec > 0 AND per_sec < 'infinity' THEN round(1000000 / per_sec)::bigint END;
    at_once integer := CASE WHEN per_sec < 'infinity' THEN coalesce(inbox_set_rate.burst, greatest(least(floor(per_sec), 1000000), 1)::integer) END;
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('handler_key', inbox_set_rate.handler_key));
    PERFORM inbox_check_handler_key(inbox_set_rate.handler_key);
    IF per_sec < 'infinity' AND (interval_us IS NULL OR interval_us < 1 OR at_once NOT BETWEEN 1 AND 1000000) THEN
        RAISE 'a rate limit must be greater than 0 and at most 1000000 starts a second, with a burst of 1 to 1000000';
    END IF;
    UPDATE inbox_handler h
    SET rate_is_set = per_sec IS NOT NULL, rate_interval_us = CASE WHEN per_sec IS NULL THEN h.registered_interval_us ELSE interval_us END,
        rate_burst = CASE WHEN per_sec IS NULL THEN h.registered_burst ELSE at_once END, rate_next_at = NULL
    WHERE h.id = ANY (inbox_handler_ids(inbox_set_rate.handler_key))
      AND (h.rate_is_set, h.rate_interval_us, h.rate_burst) IS DISTINCT FROM
          (per_sec IS NOT NULL, CASE WHEN per_sec IS NULL THEN h.registered_interval_us ELSE interval_us END,
           CASE WHEN per_sec IS NULL THEN h.registered_burst ELSE at_once END);
    GET DIAGNOSTICS changed = ROW_COUNT;
    changed := least(changed, 1);
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('set rate', jsonb_build_object('handler_key', inbox_set_rate.handler_key, 'interval_us', interval_us, 'burst', at_once,
                                           'is_registered', per_sec IS NULL),
            changed, inbox_set_rate.because, inbox_set_rate.actor);
    RETURN changed;
END $$;

-- The quarantined records that a filter matches, the oldest first: {"id", "topic", "cluster_id", "reason", "detail" (a
-- part of it), "older_than", "newer_than", "after_id" (records with a higher id), "all": true}.
CREATE FUNCTION inbox_quarantine_matching(filter jsonb, row_limit integer DEFAULT 1000) RETURNS SETOF bigint
-- With stale statistics, the planner would read and sort the rest of the table to return row_limit rows.
LANGUAGE plpgsql STABLE SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    PERFORM inbox_check_filter(filter, '{id, topic, cluster_id, reason, detail, older_than, newer_than, after_id}');
    RETURN QUERY
    SELECT q.id FROM inbox_quarantine q
    -- Always a bound of the index: ids begin at 1.
    WHERE q.id > coalesce((filter ->> 'after_id')::bigint, 0)
      AND (filter ->> 'id' IS NULL OR q.id = (filter ->> 'id')::bigint)
      AND (filter ->> 'topic' IS NULL OR q.topic = filter ->> 'topic')
      AND (filter ->> 'cluster_id' IS NULL OR q.cluster_id = filter ->> 'cluster_id')
      AND (filter ->> 'reason' IS NULL OR q.reason = filter ->> 'reason')
      AND (filter ->> 'detail' IS NULL OR position(lower(filter ->> 'detail') IN lower(q.detail)) > 0)
      AND (filter ->> 'older_than' IS NULL OR q.quarantined_at < now() - (filter ->> 'older_than')::interval)
      AND (filter ->> 'newer_than' IS NULL OR q.quarantined_at >= now() - (filter ->> 'newer_than')::interval)
    ORDER BY q.id LIMIT row_limit;
END $$;

-- Requests that a process that knows their topic accepts quarantined records again, with its current identity policy
-- and limits. Accepted records leave the quarantine. Rejected records stay in quarantine with an updated reason.
CREATE FUNCTION inbox_quarantine_replay(filter jsonb, row_limit integer DEFAULT 1000, because text DEFAULT NULL,
                                        actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('row_limit', row_limit));
    UPDATE inbox_quarantine q SET replay_asked_at = now()
    WHERE q.id = ANY (ARRAY(SELECT inbox_quarantine_matching(inbox_quarantine_replay.filter, row_limit))) AND q.replay_asked_at IS NULL;
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('replay quarantined', inbox_quarantine_replay.filter, changed, inbox_quarantine_replay.because, inbox_quarantine_replay.actor);
    RETURN changed;
END $$;

-- Deletes quarantined records and their content.
CREATE FUNCTION inbox_quarantine_discard(filter jsonb, row_limit integer DEFAULT 1000, because text DEFAULT NULL,
                                         actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('row_limit', row_limit));
    DELETE FROM inbox_quarantine q
    WHERE q.id = ANY (ARRAY(SELECT inbox_quarantine_matching(inbox_quarantine_discard.filter, row_limit)));
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('discard quarantined', inbox_quarantine_discard.filter, changed, inbox_quarantine_discard.because,
            inbox_quarantine_discard.actor);
    RETURN changed;
END $$;

-- One step of a backfill: adds the missing deliveries of a handler for these messages. All steps of a backfill share
-- one audit row: the first step, called without `act`, creates it, and each step adds its count. Returns the id of that
-- row and the number of deliveries.
CREATE FUNCTION inbox_backfill_step(handler_key text, seqs bigint[], filter jsonb, act bigint DEFAULT NULL, because text DEFAULT NULL,
                                    actor text DEFAULT NULL, OUT audit_id bigint, OUT made bigint)
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    locked bigint[];
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('handler_key', inbox_backfill_step.handler_key));
    PERFORM inbox_check_handler_key(inbox_backfill_step.handler_key);
    -- Order keys are extracted from records only when the service accepts them.
    IF (SELECT true FROM inbox_handler h WHERE h.id = ANY (inbox_handler_ids(inbox_backfill_step.handler_key)) AND h.is_ordered LIMIT 1) THEN
        RAISE EXCEPTION 'cannot backfill %: it is ordered, and the order keys of stored messages are unknown', handler_key
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- Locks in seq order, as accept does. Messages purged in the meantime are left out. The next statement finds the
    -- missing deliveries; its snapshot is taken under these locks.
    locked := ARRAY(SELECT m.seq FROM unnest(seqs) AS c (seq)
                    CROSS JOIN LATERAL (SELECT seq FROM inbox_message WHERE seq = c.seq FOR NO KEY UPDATE) m);
    -- Backfilled deliveries of a fair handler take turns like one tenant.
    INSERT INTO inbox_delivery (message_seq, handler_id, fair_hash, due_at)
    SELECT c.seq, own.id, own.fair_hash, now()
    FROM unnest(locked) AS c (seq)
    CROSS JOIN (SELECT coalesce(h.same_as, h.id) AS id, CASE WHEN h.is_fair THEN 0 END AS fair_hash
                FROM inbox_handler_key k JOIN inbox_handler h ON h.id = k.handler_id WHERE k.key = inbox_backfill_step.handler_key) own
    WHERE (SELECT true FROM unnest(inbox_handler_ids(inbox_backfill_step.handler_key)) AS h (id)
           CROSS JOIN LATERAL (SELECT 1 FROM inbox_delivery d WHERE d.message_seq = c.seq AND d.handler_id = h.id LIMIT 1) d
           LIMIT 1) IS NULL
    ON CONFLICT (message_seq, handler_id) DO NOTHING;
    GET DIAGNOSTICS made = ROW_COUNT;
    IF act IS NULL THEN
        INSERT INTO inbox_audit (action, filter, affected, because, actor)
        VALUES ('backfill', jsonb_build_object('handler_key', $1) || $3, made, $5, $6) RETURNING id INTO audit_id;
        RETURN;
    END IF;
    UPDATE inbox_audit a SET affected = a.affected + made
    WHERE a.id = act AND a.action = 'backfill' AND a.database_user = session_user AND a.filter ->> 'handler_key' = $1
    RETURNING a.id INTO audit_id;
    IF audit_id IS NULL THEN
        RAISE EXCEPTION 'audit row % is not a backfill of % by %', act, quote_literal($1), session_user;
    END IF;
END $$;

-- Writes the audit row of a purge, which takes many transactions.
CREATE FUNCTION inbox_audit_purge(filter jsonb, affected bigint, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS void
LANGUAGE sql SECURITY DEFINER AS $$
    INSERT INTO inbox_audit (action, filter, affected, because, actor) VALUES ('purge', $1, $2, $3, $4)
$$;

-- Refuses an action on the ledger that matches the positions of several clusters.
CREATE FUNCTION inbox_check_position(consumer_group text, topic text, kafka_partition integer, cluster_id text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    clusters text;
BEGIN
    SELECT string_agg(DISTINCT l.cluster_id, ', ') INTO clusters FROM inbox_ledger l
    WHERE l.consumer_group = $1 AND l.topic = $2 AND ($3 IS NULL OR l.kafka_partition = $3) AND ($4 IS NULL OR l.cluster_id = $4)
    HAVING count(DISTINCT l.cluster_id) > 1;
    IF clusters IS NOT NULL THEN
        RAISE EXCEPTION 'positions of several clusters match' USING HINT = 'Name one of them: cluster_id => ' || clusters || '.';
    END IF;
END $$;

-- Sets positions to an offset, or without one to the first record that Kafka has; without a partition, for the whole
-- topic. Stopped partitions are read again. Running processes follow within a minute. Returns the number of partitions
-- changed.
CREATE FUNCTION inbox_ledger_reset(consumer_group text, topic text, kafka_partition integer DEFAULT NULL, to_offset bigint DEFAULT NULL,
                                   cluster_id text DEFAULT NULL, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('consumer_group', $1, 'topic', $2));
    IF to_offset < 0 OR to_offset IS NOT NULL AND inbox_ledger_reset.kafka_partition IS NULL THEN
        RAISE EXCEPTION 'an offset must not be negative and needs a partition';
    END IF;
    PERFORM inbox_check_position($1, $2, $3, $5);
    UPDATE inbox_ledger l
    SET next_offset = coalesce(to_offset, -2), leader_epoch = NULL, topic_id = NULL, stopped_at = NULL, stopped_why = NULL, updated_at = now()
    WHERE l.consumer_group = $1 AND l.topic = $2 AND ($3 IS NULL OR l.kafka_partition = $3) AND ($5 IS NULL OR l.cluster_id = $5);
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('reset ledger', jsonb_strip_nulls(jsonb_build_object('consumer_group', $1, 'topic', $2, 'kafka_partition', $3, 'to_offset', $4,
                                                                 'cluster_id', $5)), changed, $6, $7);
    RETURN changed;
END $$;

-- Moves a position forward. The skipped records are stored as a gap. A stopped partition is read again from there.
-- Returns 0 if the offset is not ahead of the ledger.
CREATE FUNCTION inbox_ledger_skip(consumer_group text, topic text, kafka_partition integer, to_offset bigint, cluster_id text DEFAULT NULL,
                                  because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('consumer_group', $1, 'topic', $2, 'kafka_partition', $3, 'to_offset', $4));
    PERFORM inbox_check_position($1, $2, $3, $5);
    WITH before AS (
        SELECT * FROM inbox_ledger l
        WHERE l.consumer_group = $1 AND l.topic = $2 AND l.kafka_partition = $3 AND ($5 IS NULL OR l.cluster_id = $5) AND l.next_offset < $4
        FOR UPDATE),
    gap AS (
        INSERT INTO inbox_gap (consumer_group, cluster_id, topic, kafka_partition, from_offset, to_offset)
        SELECT b.consumer_group, b.cluster_id, b.topic, b.kafka_partition, greatest(b.next_offset, 0), $4 FROM before b
        ON CONFLICT DO NOTHING)
    UPDATE inbox_ledger l
    SET next_offset = $4, leader_epoch = NULL, topic_id = NULL, stopped_at = NULL, stopped_why = NULL, updated_at = now()
    FROM before b
    WHERE l.consumer_group = b.consumer_group AND l.cluster_id = b.cluster_id AND l.topic = b.topic AND l.kafka_partition = b.kafka_partition;
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('skip ledger', jsonb_strip_nulls(jsonb_build_object('consumer_group', $1, 'topic', $2, 'kafka_partition', $3, 'to_offset', $4,
                                                                'cluster_id', $5)), changed, $6, $7);
    RETURN changed;
END $$;

-- Deletes the identity that retention keeps of a purged message: its record is accepted again when it is redelivered.
-- Returns 0 if none is kept.
CREATE FUNCTION inbox_forget_identity(message_id text, source text, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('message_id', $1, 'source', $2));
    DELETE FROM inbox_identity i WHERE i.hash = inbox_identity_hash($1, $2);
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('forget identity', jsonb_build_object('message_id', $1, 'source', $2), changed, $3, $4);
    RETURN changed;
END $$;

-- Settles deliveries as done in the transaction of their handlers. It is sent together with COMMIT and raises an error
-- unless every claim is current, so that nothing is committed in that case. The errors carry the name of a constraint
-- that does not exist, because drivers report that name. The setting `wharf.run` lives exactly as long as the
-- transaction that was begun for the handlers. Not a procedure: until version 15, pg_stat_statements keeps an entry for
-- each CALL with other values.
CREATE FUNCTION inbox_settle_in_transaction(processor integer, message_seqs bigint[], handler_ids smallint[], claim_attempts integer[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    lock_timeout text := set_config('lock_timeout', '2s', true);
    settled bigint;
BEGIN
    IF current_setting('wharf.run', true) IS DISTINCT FROM 'open' THEN
        RAISE 'the transaction of the handler had ended before the handler did' USING CONSTRAINT = 'inbox_transaction_ended';
    END IF;
    UPDATE inbox_delivery d
    SET finished_at = now(), status = 2, locked_until = NULL, locked_by = NULL, crashes = 0
    FROM (SELECT unnest(message_seqs) AS message_seq, unnest(handler_ids) AS handler_id, unnest(claim_attempts) AS attempt) s
    WHERE d.message_seq = s.message_seq AND d.handler_id = s.handler_id
      AND CASE WHEN d.attempts = s.attempt AND d.locked_by = processor AND d.locked_until IS NOT NULL AND d.finished_at IS NULL
               THEN true ELSE false END;
    GET DIAGNOSTICS settled = ROW_COUNT;
    IF settled IS DISTINCT FROM cardinality(message_seqs) THEN
        RAISE '% of % claims are no longer current', cardinality(message_seqs) - settled, cardinality(message_seqs)
        USING CONSTRAINT = 'inbox_claim_lost';
    END IF;
END $$;

-- The same for one delivery. It compares with single values, so that the session plans the statement once. A statement
-- with arrays is planned on each call, because a plan for arrays of unknown length looks more expensive, and planning
-- takes three times as long as the update.
CREATE FUNCTION inbox_settle_one_in_transaction(processor integer, seq bigint, handler integer, claim_attempt integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    lock_timeout text := set_config('lock_timeout', '2s', true);
BEGIN
    IF current_setting('wharf.run', true) IS DISTINCT FROM 'open' THEN
        RAISE 'the transaction of the handler had ended before the handler did' USING CONSTRAINT = 'inbox_transaction_ended';
    END IF;
    UPDATE inbox_delivery d
    SET finished_at = now(), status = 2, locked_until = NULL, locked_by = NULL, crashes = 0
    WHERE d.message_seq = seq AND d.handler_id = handler
      AND CASE WHEN d.attempts = claim_attempt AND d.locked_by = processor AND d.locked_until IS NOT NULL AND d.finished_at IS NULL
               THEN true ELSE false END;
    IF NOT FOUND THEN
        RAISE 'the claim is no longer current' USING CONSTRAINT = 'inbox_claim_lost';
    END IF;
END $$;

-- Settles a delivery as done in the transaction of a handler that uses its own client, or in a stored procedure: SELECT
-- inbox_settle($1), with the text of `message.claim()`, as the last statement before COMMIT. It is fenced like any
-- other settlement: after an error nothing may be committed.
--   WH001  the claim is lost: another attempt owns the delivery, or an operator released it.
--   WH002  this attempt has already settled the delivery: a COMMIT whose reply was lost took effect.
--   WH005  the delivery has an ordering key, and the transaction has another isolation level than read committed.
CREATE FUNCTION inbox_settle(claim text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET lock_timeout = '2s' AS $$
DECLARE
    part bigint[];
BEGIN
    IF claim IS NULL OR claim !~ '^\[\d{1,18},\d{1,5},\d{1,10},\d{1,10}\]$' THEN
        RAISE EXCEPTION 'not a valid claim' USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass the text of message.claim() as it is.';
    END IF;
    IF current_setting('wharf.run', true) = 'open' THEN
        RAISE EXCEPTION 'this is the transaction of a transactional handler, whose delivery the engine settles'
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Leave inbox_settle out, or register the handler with `handler`.';
    END IF;
    -- The caller may have set it, and then nothing would make the next delivery of the key due.
    PERFORM set_config('wharf.promotes', '', true);
    -- Message, handler, attempt, processor.
    part := translate(claim, '[]', '{}')::bigint[];
    UPDATE inbox_delivery d
    SET finished_at = now(), status = 2, locked_until = NULL, locked_by = NULL, crashes = 0
    WHERE d.message_seq = part[1] AND d.handler_id = part[2]::smallint
      AND CASE WHEN d.attempts = part[3] AND d.locked_by = part[4] AND d.locked_until IS NOT NULL AND d.finished_at IS NULL
               THEN true ELSE false END;
    IF FOUND THEN
        RETURN;
    END IF;
    IF (SELECT d.attempts = part[3] AND d.status = 2 AND d.locked_by IS NULL FROM inbox_delivery d
        WHERE d.message_seq = part[1] AND d.handler_id = part[2]::smallint) THEN
        RAISE EXCEPTION 'this attempt has already settled its delivery' USING ERRCODE = 'WH002';
    END IF;
    RAISE EXCEPTION 'the claim is no longer current' USING ERRCODE = 'WH001';
END $$;

-- The hash of an ordering key; NULL for an empty key. The library computes the same hash.
CREATE FUNCTION inbox_order_hash(value bytea) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN CASE WHEN length(value) > 0 THEN ('x' || encode(substring(sha256(value) FOR 8), 'hex'))::bit(64)::bigint END;

-- The same, of the record's key or of the first header of a name; NULL if only a process can compute it.
CREATE FUNCTION inbox_key_hash(keyed_by text, header text, record_key bytea, headers json) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE $1 WHEN 'record key' THEN inbox_order_hash($3)
                   WHEN 'header' THEN (SELECT inbox_order_hash(convert_to(j.value, 'UTF8')) FROM json_each_text($4) WITH ORDINALITY AS j (name, value, ordinal)
                                       WHERE j.name = $2 ORDER BY j.ordinal LIMIT 1) END
$$;

-- Encodes a JSON object of strings as stored headers, in order; NULL if it is empty. The inverse is inbox_headers.
CREATE FUNCTION inbox_encode_headers(headers json) RETURNS bytea
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT string_agg(int4send(length(h.name)) || h.name || CASE WHEN h.value IS NULL THEN int4send(-1) ELSE int4send(length(h.value)) || h.value END,
                      ''::bytea ORDER BY h.ordinal)
    FROM (SELECT convert_to(j.key, 'UTF8') AS name, convert_to(j.value, 'UTF8') AS value, j.ordinal
          FROM json_each_text($1) WITH ORDINALITY AS j (key, value, ordinal)) h
$$;

-- Accepts one message in the caller's transaction, for handlers that were chosen before: by a process
-- (`inbox.accept_in`), which passes the schema of its inbox, or by inbox_accept. `result` is accepted, duplicate or
-- conflict; a conflict stores nothing. The caller's transaction may be long, so this takes as few locks as possible. A
-- message that has all its deliveries is not locked. Deliveries of ordered handlers are due at once, and the claim
-- checks their order: to hold a delivery, accept would have to lock the delivery that it waits for.
CREATE FUNCTION inbox_accept_prepared(inbox_schema text, message_id text, source text, topic text, payload_hash bytea, kafka_partition integer,
                                      kafka_offset bigint, recorded_at timestamptz, record_key bytea, headers bytea, payload bytea,
                                      handler_ids smallint[], order_hashes bigint[], fair_hashes bigint[], delays_ms bigint[],
                                      due_ats timestamptz[],
                                      OUT result text, OUT seq bigint, OUT deliveries integer)
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    is_remembered boolean;
    stored bigint;
    stored_hash bytea;
    missing smallint[];
BEGIN
    -- This function is bound to its schema, so current_schema() is the schema of the inbox.
    IF $1 <> current_schema() THEN
        RAISE EXCEPTION 'the connection reaches the inbox of schema %, not that of schema %', current_schema(), $1
            USING ERRCODE = 'invalid_schema_name', HINT = 'Put the schema of the inbox first in the search_path of the connection.';
    END IF;
    -- The identity may be purged between two steps.
    FOR try IN 1..5 LOOP
        is_remembered := inbox_remembered(ARRAY[inbox_identity_hash($2, $3)]) IS NOT NULL;
        missing := $12;
        stored := NULL;
        IF NOT is_remembered THEN
            INSERT INTO inbox_message (message_id, source, topic, payload_hash, kafka_partition, kafka_offset, recorded_at, record_key, headers, payload)
            VALUES ($2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
            ON CONFLICT ON CONSTRAINT inbox_message_identity DO NOTHING
            RETURNING inbox_message.seq INTO stored;
        END IF;
        result := 'accepted';
        IF stored IS NULL THEN
            result := 'duplicate';
            SELECT m.seq, m.payload_hash INTO stored, stored_hash FROM inbox_message m WHERE m.message_id = $2 AND m.source = $3;
            IF stored IS NULL THEN
                IF is_remembered THEN
                    deliveries := 0;
                    RETURN;
                END IF;
                CONTINUE;
            END IF;
            IF stored_hash <> $5 THEN
                result := 'conflict';
                RETURN;
            END IF;
            missing := inbox_without_delivery(stored, $12);
            IF missing <> '{}' THEN
                -- Two callers that know a handler under two ids must not both add a delivery, so this is checked again
                -- under the lock.
                PERFORM 1 FROM inbox_message m WHERE m.seq = stored FOR NO KEY UPDATE;
                CONTINUE WHEN NOT FOUND;
                missing := inbox_without_delivery(stored, $12);
            END IF;
        END IF;
        INSERT INTO inbox_delivery (message_seq, handler_id, order_hash, fair_hash, due_at)
        SELECT stored, w.handler_id, w.order_hash, w.fair_hash,
               CASE WHEN w.delay_ms IS NULL AND w.due_at IS NULL THEN clock_timestamp()
                    ELSE greatest(clock_timestamp() + coalesce(w.delay_ms, 0) * interval '1 millisecond', w.due_at) END
        FROM unnest($12, $13, $14, $15, $16) AS w (handler_id, order_hash, fair_hash, delay_ms, due_at)
        WHERE w.handler_id = ANY (missing)
        ON CONFLICT ON CONSTRAINT inbox_delivery_pkey DO NOTHING;
        GET DIAGNOSTICS deliveries = ROW_COUNT;
        seq := stored;
        RETURN;
    END LOOP;
    RAISE EXCEPTION 'the identity of the message is being purged; try again' USING ERRCODE = 'serialization_failure';
END $$;

-- Which of these handlers have no delivery for a message, under any of their ids.
CREATE FUNCTION inbox_without_delivery(message_seq bigint, handler_ids smallint[]) RETURNS smallint[]
LANGUAGE sql VOLATILE SET enable_seqscan = off SET jit = off AS $$
    SELECT coalesce(array_agg(w.id), '{}') FROM unnest($2) AS w (id)
    WHERE (SELECT true FROM inbox_handler own
           JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
           CROSS JOIN LATERAL (SELECT 1 FROM inbox_delivery d WHERE d.message_seq = $1 AND d.handler_id = same.id LIMIT 1) d
           WHERE own.id = w.id LIMIT 1) IS NULL
$$;

-- Accepts a message from any client, in the transaction that calls it: the message and its deliveries are committed
-- with the caller's own writes. It is delivered to every handler that a process has registered for the topic, by name
-- or by pattern. `headers` is a JSON object of strings; `source` defaults to the topic. Returns `accepted`,
-- `duplicate`, or `unwanted` if the handlers of the topic subscribe to other CloudEvents types. Processes find it at
-- their next poll.
--   WH003  the identity belongs to a message with another payload.
--   WH004  no process has registered a handler for the topic.
--   0A000  only a process can compute the due time or the order of a delivery, or read the type of a structured
--          CloudEvent: use inbox.accept_in.
CREATE FUNCTION inbox_accept(topic text, message_id text, payload bytea, source text DEFAULT NULL, record_key bytea DEFAULT NULL,
                             headers json DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    event_type text;
    media_type text;
    is_structured boolean;
    wanted record;
    accepted record;
BEGIN
    IF NOT coalesce(length($2) BETWEEN 1 AND 200 AND length(coalesce($4, $1)) BETWEEN 1 AND 200, false) THEN
        RAISE EXCEPTION 'a message id and a source must have 1 to 200 characters' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF json_typeof($6) <> 'object' THEN
        RAISE EXCEPTION 'headers must be a JSON object, such as {"ce_type": "placed"}' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- The first header with a name counts.
    SELECT (array_agg(h.value ORDER BY h.ordinal) FILTER (WHERE h.name = 'ce_type'))[1],
           lower(btrim(split_part((array_agg(h.value ORDER BY h.ordinal) FILTER (WHERE h.name = 'content-type'))[1], ';', 1), E' \t\n\f\r') COLLATE "C")
    INTO event_type, media_type
    FROM json_each_text($6) WITH ORDINALITY AS h (name, value, ordinal);
    -- As in a process: the type of a structured event is in its payload, in any format, and header ce_type does not
    -- count. A tombstone has no payload, so its headers count. A process refuses a batch of events.
    is_structured := media_type LIKE 'application/cloudevents+%' AND $3 IS NOT NULL OR media_type LIKE 'application/cloudevents-batch%';
    SELECT count(*) AS known, bool_or(s.event_types IS NOT NULL) AS is_type_asked_for, coalesce(array_agg(s.handler_id) FILTER (WHERE s.fits), '{}') AS handler_ids,
           coalesce(array_agg(s.order_hash) FILTER (WHERE s.fits), '{}') AS order_hashes,
           coalesce(array_agg(s.fair_hash) FILTER (WHERE s.fits), '{}') AS fair_hashes, coalesce(array_agg(s.delay_ms) FILTER (WHERE s.fits), '{}') AS delays_ms,
           min(s.key) FILTER (WHERE s.fits AND (s.order_by = 'process' OR s.is_delayed_by_header)) AS unable
    INTO wanted
    FROM (SELECT u.*, h.key, u.event_types IS NULL OR event_type = ANY (u.event_types) AS fits,
                 inbox_key_hash(u.order_by, u.order_header, $5, $6) AS order_hash,
                 -- If only a process can compute the tenant, the delivery has none.
                 CASE WHEN u.fair_by IS NOT NULL THEN coalesce(inbox_key_hash(u.fair_by, u.fair_header, $5, $6), 0) END AS fair_hash,
                 EXISTS (SELECT 1 FROM json_each_text($6) AS j (name, value) WHERE j.name = u.delay_header) AS is_delayed_by_header
          FROM (SELECT DISTINCT ON (e.handler_id) e.*
                FROM (SELECT n.* FROM inbox_subscription n WHERE n.topic = $1 AND n.matches IS NULL
                      UNION ALL
                      -- As in a process, a pattern matches names that Kafka allows, and none of Kafka's own topics.
                      SELECT p.* FROM inbox_subscription p
                      WHERE p.matches IS NOT NULL AND $1 ~ '^[A-Za-z0-9._-]{1,249}$' AND $1 !~ '^__' AND $1 ~ p.matches) e
                ORDER BY e.handler_id) u
          JOIN inbox_handler h ON h.id = u.handler_id) s;
    IF wanted.known = 0 THEN
        RAISE EXCEPTION 'no handler is registered for topic %', quote_literal($1)
            USING ERRCODE = 'WH004', HINT = 'A process registers its handlers when it starts. SELECT topic FROM inbox_subscription lists the topics.';
    END IF;
    IF wanted.is_type_asked_for AND is_structured THEN
        RAISE EXCEPTION 'only a process can read the type of a structured CloudEvent'
            USING ERRCODE = 'feature_not_supported', HINT = 'Use inbox.accept_in, or pass the data of the event as payload, its content type as header content-type and the type of the event as header ce_type.';
    END IF;
    IF wanted.unable IS NOT NULL THEN
        RAISE EXCEPTION 'only a process can compute the due time or the order for handler %', wanted.unable
            USING ERRCODE = 'feature_not_supported', HINT = 'Use inbox.accept_in or inbox.accept.';
    END IF;
    IF wanted.handler_ids = '{}' THEN
        RETURN 'unwanted';
    END IF;
    SELECT a.* INTO accepted FROM inbox_accept_prepared(
        current_schema(), $2, coalesce($4, $1), $1, substring(sha256(CASE WHEN $3 IS NULL THEN '\x00'::bytea ELSE '\x01'::bytea || $3 END) FOR 16),
        NULL, NULL, NULL, $5, inbox_encode_headers($6), $3, wanted.handler_ids, wanted.order_hashes, wanted.fair_hashes, wanted.delays_ms, NULL) a;
    IF accepted.result = 'conflict' THEN
        RAISE EXCEPTION 'the identity of the message belongs to a message with another payload' USING ERRCODE = 'WH003';
    END IF;
    RETURN accepted.result;
END $$;

-- The same with a JSON payload, which is stored as written.
CREATE FUNCTION inbox_accept_json(topic text, message_id text, payload json, source text DEFAULT NULL, record_key bytea DEFAULT NULL,
                                  headers json DEFAULT NULL) RETURNS text
LANGUAGE sql SECURITY DEFINER AS $$
    SELECT inbox_accept($1, $2, convert_to($3::text, 'UTF8'), $4, $5, $6)
$$;

-- Ends the subscriptions of a handler that no longer exists: inbox_accept creates no more deliveries for it. A process
-- that has the handler registers it again. Returns the number of topics that it was subscribed to.
CREATE FUNCTION inbox_unsubscribe(handler_key text, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('handler_key', $1));
    PERFORM inbox_check_handler_key($1);
    DELETE FROM inbox_subscription s WHERE s.handler_id = ANY (inbox_handler_ids($1));
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected, because, actor) VALUES ('unsubscribe', jsonb_build_object('handler_key', $1), changed, $2, $3);
    RETURN changed;
END $$;

-- The outbox: records that are sent to Kafka after the transaction that stored them has committed.

-- One record to send. A relay reads the waiting records of a slot in id order, and marks them when the broker has
-- acknowledged them.
CREATE TABLE inbox_outbox (
    id              bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY, -- mark, replay, discard
    stored_at       timestamptz NOT NULL DEFAULT now(),
    finished_at     timestamptz,                     -- when it was acknowledged, poisoned or discarded
    recorded_at     timestamptz,                     -- the record's own timestamp, if the publisher gave one
    kafka_offset    bigint,                          -- the offset that the broker assigned
    kafka_partition integer,
    slot            smallint    NOT NULL,            -- inbox_outbox_slot(record_key): records of one key are in one slot
    status          smallint    NOT NULL DEFAULT 0,  -- 0 waiting, 2 sent, 3 poisoned, 4 discarded
    replays         smallint    NOT NULL DEFAULT 0,  -- how often an operator sent it again
    message_id      text COLLATE "C" NOT NULL,       -- its id (header ce_id), the same on each send
    source          text COLLATE "C" NOT NULL,       -- header ce_source
    topic           text COLLATE "C" NOT NULL,
    record_key      bytea,
    headers         bytea,                           -- as they are sent; read with inbox_headers(headers)
    payload         bytea,
    reason          text,                            -- why it was poisoned or discarded
    last_error      text,
    -- The id while the record waits. It is a separate column, so that no other index has the order in which a relay
    -- reads.
    waiting         bigint      GENERATED ALWAYS AS (CASE WHEN status = 0 THEN id END) STORED
) WITH (
    -- Every record is inserted, updated once and deleted: autovacuum starts after a number of rows, not a fraction.
    autovacuum_vacuum_scale_factor = 0,  autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);
-- Used by a relay to read the waiting records of a slot in order. It does not contain sent records.
CREATE INDEX inbox_outbox_waiting ON inbox_outbox (slot, waiting) WHERE waiting IS NOT NULL;
-- Used by a relay while topics are held, to read the waiting records of the others: any number may wait for a held one.
-- Its condition is another one, so that no statement can use one of the two indexes in place of the other.
CREATE INDEX inbox_outbox_topic ON inbox_outbox (slot, topic, waiting) WHERE status = 0;
-- Used to purge sent and discarded records, the oldest first.
CREATE INDEX inbox_outbox_finished ON inbox_outbox (finished_at) WHERE status IN (2, 4);
-- Lists poisoned records, the oldest first. It is almost always empty.
CREATE INDEX inbox_outbox_poisoned ON inbox_outbox (finished_at, id) WHERE status = 3;

-- The slots, and the relay that holds each of them. Only the holder of a slot sends its records.
CREATE TABLE inbox_outbox_slots (
    slot       smallint    PRIMARY KEY,
    holder     integer,                              -- inbox_relay.id
    held_until timestamptz
) WITH (fillfactor = 10);
INSERT INTO inbox_outbox_slots (slot) SELECT generate_series(0, 15);

-- Processes that send records; each updates its row every few seconds, and removes it at shutdown.
CREATE TABLE inbox_relay (
    id            integer     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name          text        NOT NULL,              -- host and process id
    started_at    timestamptz NOT NULL DEFAULT now(),
    seen_at       timestamptz NOT NULL DEFAULT now(),
    alive_until   timestamptz NOT NULL,
    problem_since timestamptz,
    problem       text                               -- why it cannot send: no broker, an unknown topic
) WITH (fillfactor = 50);

-- The slot of a record: always the same for one key, a random slot for a record without a key.
CREATE FUNCTION inbox_outbox_slot(record_key bytea) RETURNS smallint
LANGUAGE sql VOLATILE PARALLEL RESTRICTED
RETURN CASE WHEN record_key IS NULL THEN floor(random() * 16) ELSE get_byte(sha256(record_key), 0) & 15 END::smallint;

-- Encodes one header as stored; empty if the name is NULL.
CREATE FUNCTION inbox_header(name text, value text) RETURNS bytea
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN name IS NULL THEN ''::bytea
            ELSE int4send(octet_length(convert_to(name, 'UTF8'))) || convert_to(name, 'UTF8')
              || CASE WHEN value IS NULL THEN int4send(-1)
                      ELSE int4send(octet_length(convert_to(value, 'UTF8'))) || convert_to(value, 'UTF8') END END;

-- Stores a record that is sent to Kafka after the caller's transaction has committed. Returns its id in inbox_outbox.
-- `headers` is a JSON object of strings. The record is sent with the CloudEvents headers ce_id (message_id, or a random
-- UUID), ce_source (source, or wharf), ce_type (the topic, unless `headers` has one) and ce_specversion, unless its
-- content-type says that it is a structured CloudEvent. `origin_id` and `origin_source` name the message that caused the
-- record: they are sent as wharf_origin_id and wharf_origin_source, and the message's traceparent, tracestate and
-- baggage are copied, unless the record has its own. Records of one key are sent in id order. This is the commit order
-- if each transaction stores its record after the previous one has committed, for example because both lock the same row
-- first.
CREATE FUNCTION inbox_publish(topic text, payload bytea, record_key bytea DEFAULT NULL, headers jsonb DEFAULT NULL, message_id text DEFAULT NULL,
                              source text DEFAULT NULL, origin_id text DEFAULT NULL, origin_source text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    own_id text := coalesce(message_id, headers ->> 'ce_id', gen_random_uuid()::text);
    own_source text := coalesce(source, headers ->> 'ce_source', 'wharf');
    media_type text := lower(btrim(split_part(headers ->> 'content-type', ';', 1), E' \t\n\f\r') COLLATE "C");
    -- A structured CloudEvent has its attributes in its payload.
    is_structured boolean := coalesce(media_type LIKE 'application/cloudevents+%', false);
    encoded bytea;
    stored bigint;
BEGIN
    IF topic IS NULL OR topic !~ '^[A-Za-z0-9._-]{1,249}$' THEN
        RAISE EXCEPTION 'a topic must have 1 to 249 characters out of A-Z a-z 0-9 . _ -';
    END IF;
    IF NOT (length(own_id) BETWEEN 1 AND 200 AND length(own_source) BETWEEN 1 AND 200) THEN
        RAISE EXCEPTION 'a message id and a source must have 1 to 200 characters' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF headers IS NOT NULL AND jsonb_typeof(headers) <> 'object' THEN
        RAISE EXCEPTION 'headers must be a JSON object, such as {"ce_type": "order.placed"}';
    END IF;
    -- The transaction id is assigned before the record id. So a reader of a record knows which transactions may still
    -- store a record before it.
    PERFORM pg_current_xact_id();
    encoded := CASE WHEN is_structured THEN ''::bytea
                    ELSE inbox_header('ce_specversion', '1.0') || inbox_header('ce_id', own_id) || inbox_header('ce_source', own_source)
                      || inbox_header('ce_type', coalesce(headers ->> 'ce_type', topic)) END
            || inbox_header(CASE WHEN origin_id IS NOT NULL THEN 'wharf_origin_id' END, origin_id)
            || inbox_header(CASE WHEN origin_source IS NOT NULL THEN 'wharf_origin_source' END, origin_source)
            || coalesce((SELECT string_agg(inbox_header(h.name, inbox_text(h.value)), ''::bytea ORDER BY h.ordinal)
                         FROM (SELECT DISTINCT ON (i.name) inbox_text(i.name) AS name, i.value, i.ordinal
                               FROM (SELECT m.headers FROM inbox_message m
                                     WHERE m.message_id = $7 AND ($8 IS NULL OR m.source = $8) LIMIT 1) origin
                               CROSS JOIN LATERAL inbox_headers(origin.headers) i
                               WHERE i.name IN ('traceparent', 'tracestate', 'baggage') AND NOT coalesce($4 ? inbox_text(i.name), false)
                                 -- A trace state belongs to its own traceparent.
                                 AND NOT (i.name = 'tracestate' AND coalesce($4 ? 'traceparent', false))
                               ORDER BY i.name, i.ordinal) h), ''::bytea)
            || coalesce((SELECT string_agg(inbox_header(e.key, e.value), ''::bytea) FROM jsonb_each_text($4) e
                         WHERE is_structured OR e.key NOT IN ('ce_specversion', 'ce_id', 'ce_source', 'ce_type')), ''::bytea);
    INSERT INTO inbox_outbox (slot, message_id, source, topic, record_key, headers, payload)
    VALUES (inbox_outbox_slot($3), own_id, own_source, $1, $3, encoded, $2)
    RETURNING id INTO stored;
    RETURN stored;
END $$;

-- The outbox in readable form.
CREATE VIEW inbox_outgoing AS
SELECT o.id, o.topic,
       CASE o.status WHEN 0 THEN 'waiting' WHEN 2 THEN 'sent' WHEN 3 THEN 'poisoned' WHEN 4 THEN 'discarded' END AS state,
       o.reason, o.last_error, o.message_id, o.source, inbox_text(o.record_key) AS record_key, o.stored_at, o.finished_at, o.replays,
       o.kafka_partition, o.kafka_offset, octet_length(o.payload) AS payload_bytes, o.slot, r.name AS relay,
       inbox_text(o.payload) AS payload
FROM inbox_outbox o
LEFT JOIN inbox_outbox_slots s ON s.slot = o.slot AND s.held_until > now()
LEFT JOIN inbox_relay r ON r.id = s.holder;

-- Whether a filter matches a record of the outbox, apart from its id and state.
CREATE FUNCTION inbox_is_outgoing_meant(filter jsonb, topic text, message_id text, reason text, error text, since timestamptz) RETURNS boolean
LANGUAGE sql STABLE
RETURN ($1 ->> 'topic' IS NULL OR $2 = $1 ->> 'topic')
   AND ($1 ->> 'message_id' IS NULL OR $3 = $1 ->> 'message_id')
   AND ($1 ->> 'reason' IS NULL OR $4 = $1 ->> 'reason')
   AND ($1 ->> 'error' IS NULL OR position(lower($1 ->> 'error') IN lower($5)) > 0)
   AND ($1 ->> 'older_than' IS NULL OR $6 < now() - ($1 ->> 'older_than')::interval)
   AND ($1 ->> 'newer_than' IS NULL OR $6 >= now() - ($1 ->> 'newer_than')::interval);

-- The records of the outbox that a filter matches: {"id", "state" (waiting, sent, poisoned, discarded), "topic",
-- "message_id", "reason", "error" (a part of it), "older_than", "newer_than" (intervals since they were sent, poisoned or
-- discarded; for waiting ones, since they were stored), "all": true}. Without an id or a state, it matches poisoned
-- records, the longest poisoned first. A replay never matches waiting records; a discard matches only waiting and
-- poisoned ones.
CREATE FUNCTION inbox_outbox_matching(filter jsonb, row_limit integer DEFAULT 1000, action text DEFAULT 'show') RETURNS SETOF bigint
LANGUAGE plpgsql STABLE SET enable_seqscan = off AS $$
DECLARE
    wanted smallint[];
BEGIN
    PERFORM inbox_check_filter(filter, '{id, state, topic, message_id, reason, error, older_than, newer_than}');
    wanted := CASE filter ->> 'state' WHEN 'waiting' THEN '{0}' WHEN 'sent' THEN '{2}' WHEN 'poisoned' THEN '{3}' WHEN 'discarded' THEN '{4}' END;
    IF wanted IS NULL AND filter ? 'state' THEN
        RAISE EXCEPTION 'unknown state %', filter ->> 'state' USING HINT = 'A record of the outbox is waiting, sent, poisoned or discarded.';
    END IF;
    wanted := coalesce(wanted, CASE WHEN filter ? 'id' THEN '{0, 2, 3, 4}' ELSE '{3}' END::smallint[]);
    wanted := ARRAY(SELECT w.status FROM unnest(wanted) AS w (status)
                    WHERE CASE action WHEN 'replay' THEN w.status <> 0 WHEN 'discard' THEN w.status IN (0, 3) ELSE true END);
    IF filter ? 'id' THEN
        RETURN QUERY SELECT o.id FROM inbox_outbox o
        WHERE o.id = (filter ->> 'id')::bigint AND o.status = ANY (wanted)
          AND inbox_is_outgoing_meant(filter, o.topic, o.message_id, o.reason, o.last_error, coalesce(o.finished_at, o.stored_at));
    ELSIF wanted = '{3}' THEN
        RETURN QUERY SELECT o.id FROM inbox_outbox o
        WHERE o.status = 3 AND inbox_is_outgoing_meant(filter, o.topic, o.message_id, o.reason, o.last_error, coalesce(o.finished_at, o.stored_at))
        ORDER BY o.finished_at, o.id LIMIT row_limit;
    ELSIF wanted = '{0}' THEN
        RETURN QUERY SELECT o.id FROM inbox_outbox o
        WHERE o.waiting IS NOT NULL AND inbox_is_outgoing_meant(filter, o.topic, o.message_id, o.reason, o.last_error, coalesce(o.finished_at, o.stored_at))
        ORDER BY o.waiting LIMIT row_limit;
    ELSE
        RETURN QUERY SELECT o.id FROM inbox_outbox o
        WHERE o.status = ANY (wanted) AND inbox_is_outgoing_meant(filter, o.topic, o.message_id, o.reason, o.last_error, coalesce(o.finished_at, o.stored_at))
        ORDER BY o.id LIMIT row_limit;
    END IF;
END $$;

-- Sends poisoned records of the outbox again, with the same ids; by id or state also sent or discarded ones. They are
-- sent after the records of their key that were sent in the meantime.
CREATE FUNCTION inbox_outbox_replay(filter jsonb, row_limit integer DEFAULT 1000, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('row_limit', row_limit));
    UPDATE inbox_outbox o
    SET status = 0, finished_at = NULL, reason = NULL, kafka_partition = NULL, kafka_offset = NULL, replays = least(o.replays + 1, 32767)
    WHERE o.id = ANY (ARRAY(SELECT inbox_outbox_matching(inbox_outbox_replay.filter, row_limit, 'replay'))) AND o.status IN (2, 3, 4);
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('replay outgoing', inbox_outbox_replay.filter, changed, inbox_outbox_replay.because, inbox_outbox_replay.actor);
    RETURN changed;
END $$;

-- Discards poisoned records of the outbox for good; by id or state also waiting ones. A record that is being sent at
-- this moment may still be sent.
CREATE FUNCTION inbox_outbox_discard(filter jsonb, row_limit integer DEFAULT 1000, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    PERFORM inbox_check_given(jsonb_build_object('row_limit', row_limit));
    UPDATE inbox_outbox o SET status = 4, finished_at = now(), reason = coalesce(inbox_outbox_discard.because, 'by a person')
    WHERE o.id = ANY (ARRAY(SELECT inbox_outbox_matching(inbox_outbox_discard.filter, row_limit, 'discard'))) AND o.status IN (0, 3);
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('discard outgoing', inbox_outbox_discard.filter, changed, inbox_outbox_discard.because, inbox_outbox_discard.actor);
    RETURN changed;
END $$;

-- Dead letters, and calls for poisoned deliveries.

-- The dead-letter topics of each handler, from its newest registration.
CREATE TABLE inbox_dead_letter (
    handler_id smallint NOT NULL,
    reason     text     NOT NULL,                    -- '': all reasons that have no row of their own
    topic      text     NOT NULL,
    PRIMARY KEY (handler_id, reason)
);

-- Pending calls of a service's function for poisoned deliveries. A row stays until the function has returned without an
-- error.
CREATE TABLE inbox_poison_call (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    poisoned_at  timestamptz NOT NULL DEFAULT now(),
    due_at       timestamptz NOT NULL DEFAULT now(), -- also the end of the lease of the calling process
    message_seq  bigint      NOT NULL,
    attempts     integer     NOT NULL,
    handler_id   smallint    NOT NULL,
    calls        integer     NOT NULL DEFAULT 0,     -- how often the function was called
    reason       text,
    error        text
) WITH (fillfactor = 50);
-- Finds the due calls, the longest due first.
CREATE INDEX inbox_poison_call_due ON inbox_poison_call (due_at, id);

-- Runs when a delivery becomes poisoned or stops being poisoned: publishes this to the dead-letter topic of its
-- handler, and requests the call of the service's function. It is a trigger, so that every statement that poisons does
-- it, in the same transaction. A dead letter has the record's key, payload (the one that the handler received) and
-- headers. It has its own identity; wharf_ headers name its origin. For a replayed, discarded or returned delivery, the
-- record has a short JSON text as its payload.
CREATE FUNCTION inbox_on_poison_change() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off AS $$
DECLARE
    handler record;
    letter_topic text;
    message record;
    event text := CASE WHEN NEW.status = 3 THEN 'poisoned' WHEN NEW.status = 4 THEN 'discarded'
                       WHEN NEW.replays > OLD.replays THEN 'replayed' ELSE 'returned' END;
    why text := CASE WHEN NEW.status = 3 THEN NEW.reason ELSE OLD.reason END;
    id text := gen_random_uuid()::text;
    own bytea;
    kept bytea := ''::bytea;
    content bytea;
BEGIN
    SELECT h.key, h.calls_on_poison INTO handler FROM inbox_handler h WHERE h.id = NEW.handler_id;
    IF handler.calls_on_poison AND NEW.status = 3 THEN
        INSERT INTO inbox_poison_call (message_seq, handler_id, attempts, reason, error)
        VALUES (NEW.message_seq, NEW.handler_id, NEW.attempts, NEW.reason, NEW.last_error);
    END IF;
    SELECT d.topic INTO letter_topic FROM inbox_dead_letter d
    WHERE d.handler_id = NEW.handler_id AND d.reason IN (why, '') ORDER BY d.reason = '' LIMIT 1;
    IF letter_topic IS NULL THEN
        RETURN NULL;
    END IF;
    SELECT m.* INTO message FROM inbox_message m WHERE m.seq = NEW.message_seq;
    own := inbox_header('ce_specversion', '1.0') || inbox_header('ce_id', id) || inbox_header('ce_source', 'wharf')
        || inbox_header('ce_type', 'wharf.delivery.' || event) || inbox_header('wharf_handler', handler.key)
        || inbox_header(CASE WHEN why IS NOT NULL THEN 'wharf_reason' END, why)
        || inbox_header('wharf_attempts', NEW.attempts::text) || inbox_header('wharf_replays', NEW.replays::text)
        || inbox_header(CASE WHEN NEW.status = 3 AND NEW.last_error IS NOT NULL THEN 'wharf_error' END, NEW.last_error)
        || inbox_header(CASE WHEN message.message_id IS NOT NULL THEN 'wharf_origin_id' END, message.message_id)
        || inbox_header(CASE WHEN message.source IS NOT NULL THEN 'wharf_origin_source' END, message.source)
        || inbox_header(CASE WHEN message.topic IS NOT NULL THEN 'wharf_origin_topic' END, message.topic)
        || inbox_header(CASE WHEN message.kafka_partition IS NOT NULL THEN 'wharf_origin_partition' END, message.kafka_partition::text)
        || inbox_header(CASE WHEN message.kafka_offset IS NOT NULL THEN 'wharf_origin_offset' END, message.kafka_offset::text);
    IF event = 'poisoned' THEN
        -- The letter has its own identity, because two handlers may poison the same record. It is no longer a
        -- structured CloudEvent.
        SELECT coalesce(string_agg(int4send(octet_length(n.name)) || n.name
                                   || CASE WHEN h.value IS NULL THEN int4send(-1) ELSE int4send(octet_length(h.value)) || h.value END,
                                   ''::bytea ORDER BY h.ordinal), ''::bytea) INTO kept
        FROM inbox_headers(message.headers) h
        CROSS JOIN LATERAL (SELECT CASE WHEN h.name = 'ce_type' THEN 'wharf_origin_type'::bytea
                                        WHEN lower(inbox_text(h.name)) = 'content-type' AND lower(inbox_text(h.value)) LIKE '%application/cloudevents%'
                                        THEN 'wharf_origin_content_type'::bytea ELSE h.name END AS name) n
        WHERE h.name NOT IN ('ce_id', 'ce_source', 'ce_specversion') AND substring(h.name FOR 6) <> 'wharf_';
        content := CASE WHEN NEW.is_corrected
                        THEN (SELECT k.payload FROM inbox_correction k WHERE k.message_seq = NEW.message_seq AND k.handler_id = NEW.handler_id
                              ORDER BY k.audit_id DESC LIMIT 1)
                        ELSE message.payload END;
    ELSE
        content := convert_to(jsonb_build_object('event', event, 'message_id', message.message_id, 'source', message.source,
                                                 'handler_key', handler.key, 'replays', NEW.replays)::text, 'UTF8');
    END IF;
    INSERT INTO inbox_outbox (slot, message_id, source, topic, record_key, headers, payload)
    VALUES (inbox_outbox_slot(message.record_key), id, 'wharf', letter_topic, message.record_key, own || kept, content);
    RETURN NULL;
END $$;

CREATE TRIGGER inbox_poison_changed AFTER UPDATE OF status ON inbox_delivery FOR EACH ROW
WHEN ((OLD.status = 3) <> (NEW.status = 3))
EXECUTE FUNCTION inbox_on_poison_change();

-- Binds every function above to the schema of this inbox, so that it never reads or changes the inbox of another
-- schema, whatever the caller's search_path is. pg_temp is last, so that a caller's temporary table never hides a table
-- of the inbox. Functions whose body PostgreSQL parsed at creation (RETURN …) are bound by that, and can still be
-- inlined. Only the owner may call an action until EXECUTE is granted.
DO $$
DECLARE
    bound regprocedure;
    is_action boolean;
BEGIN
    FOR bound, is_action IN
        SELECT p.oid::regprocedure, p.prosecdef FROM pg_proc p
        WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname LIKE 'inbox\_%' AND p.prosqlbody IS NULL
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = %I, pg_temp', bound, current_schema());
        IF is_action THEN
            EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', bound);
        END IF;
    END LOOP;
END $$;
