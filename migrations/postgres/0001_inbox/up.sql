-- The inbox: messages, deliveries, and what stands around them.
--
-- Names are not schema-qualified: the tables live in the first schema of the connection's search_path, so two inboxes can
-- share one database. All stamps are this database's clock.

-- A key is an alias of a handler id. A renamed handler keeps its id, so what was stored under the old name is found, and a
-- redelivery after the rename is still a duplicate.
CREATE TABLE inbox_handler (
    id            smallint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key           text COLLATE "C" NOT NULL,         -- the current name, for people; the mapping is inbox_handler_key
    same_as       smallint,                          -- set when two ids became one handler: the id of its current key
    paused_at     timestamptz,                       -- not null: nobody claims its deliveries
    unknown_since timestamptz,                       -- since when deliveries wait and no live processor knows the handler
    registered_at timestamptz NOT NULL DEFAULT now(),
    -- As the newest registration says.
    is_ordered      boolean   NOT NULL DEFAULT false, -- deliveries of one key run one at a time, in accept order
    passes_poisoned boolean   NOT NULL DEFAULT false, -- a poisoned delivery does not hold its key
    calls_on_poison boolean   NOT NULL DEFAULT false, -- a function of the service is called for each poisoned delivery
    -- The breaker. Whether it is open stands under every id of the handler, the probe under the lowest one.
    breaker_opened_at   timestamptz,                  -- not null: nobody claims its deliveries, except for one probe at a time
    breaker_error       text,                         -- what opened it
    breaker_probe_at    timestamptz,                  -- no probe before this
    breaker_probe_until timestamptz,                  -- until then a process has the right to probe
    breaker_probe_no    bigint    NOT NULL DEFAULT 0, -- counts these rights: who has an older one changes nothing
    -- The rate limit over all processes, under every id of the handler; where it stands is kept under the lowest one.
    rate_interval_us       bigint,                    -- between two starts on average; NULL: no limit
    rate_burst             integer,                   -- starts at once at the most
    rate_next_at           timestamptz,               -- when the next start is on schedule, if none is early; written by claims
    rate_is_set            boolean NOT NULL DEFAULT false, -- a person has set it, and the registration does not count
    registered_interval_us bigint,                    -- as the newest registration says
    registered_burst       integer
) WITH (fillfactor = 50);

CREATE TABLE inbox_handler_key (
    key        text COLLATE "C" PRIMARY KEY,
    handler_id smallint NOT NULL
);

-- Which messages each handler wants, as its newest registration says. Only inbox_accept reads it: a process goes by its own handlers. Rows of a
-- handler that is gone for good are removed by inbox_unsubscribe.
CREATE TABLE inbox_subscription (
    topic        text COLLATE "C" NOT NULL,
    handler_id   smallint NOT NULL,                  -- the id under which new deliveries are stored
    event_types  text[],                             -- CloudEvents types; NULL: all
    delay_ms     bigint,                             -- deliveries are due so long after they are accepted
    delay_header text,                               -- a header that says when they are due: only a process can read it
    order_by     text,                               -- NULL: in no order; `record key`, `header`, or `process` where only a process can read the key
    order_header text,
    PRIMARY KEY (topic, handler_id)                  -- inbox_accept: the handlers of a topic
);

-- Accepted records. Insert-only until retention removes them.
CREATE SEQUENCE inbox_message_seq AS bigint CACHE 1;
CREATE TABLE inbox_message (
    seq             bigint      PRIMARY KEY DEFAULT nextval('inbox_message_seq'),
    kafka_offset    bigint,
    received_at     timestamptz NOT NULL DEFAULT now(),
    recorded_at     timestamptz,                     -- stamped by the producer or the broker
    kafka_partition integer,
    -- Ids and keys are compared byte by byte: faster, and the same after an upgrade of the system's collations, which can break an index.
    message_id      text COLLATE "C" NOT NULL,
    source          text COLLATE "C" NOT NULL,
    topic           text COLLATE "C" NOT NULL,
    payload_hash    bytea       NOT NULL,            -- first 16 bytes of SHA-256; tells a duplicate from a conflict
    record_key      bytea,
    headers         bytea,                           -- read with inbox_headers(headers)
    payload         bytea,                           -- NULL (tombstone) is not the same as empty
    -- Deduplication: the accept statement's ON CONFLICT, and how operators find a message.
    CONSTRAINT inbox_message_identity UNIQUE (message_id, source)
) WITH (
    -- Insert-mostly: keep the visibility map and the freeze horizon moving without waiting for 20 % of a large table.
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_cost_delay = 1
);
ALTER SEQUENCE inbox_message_seq OWNED BY inbox_message.seq;

-- One message for one handler: the unit of work. Widest columns first, so that no byte is padding.
-- No foreign key: each insert would lock the message row, and shared locks become multixacts.
CREATE TABLE inbox_delivery (
    message_seq  bigint      NOT NULL,
    due_at       timestamptz NOT NULL,               -- 'infinity': held, it waits for another delivery of its key
    locked_until timestamptz,                        -- the claim's end; past and not NULL: its process died. Not indexed
    finished_at  timestamptz,                        -- set for done, discarded and poisoned: leaves the claim index
    order_hash   bigint,                             -- of the key that it is ordered by; NULL: it is in no order
    locked_by    integer,                            -- inbox_processor.id; 0 when a person has taken the claim away (inbox_release)
    attempts     integer     NOT NULL DEFAULT 0,     -- starts. Only ever grows: it is the claim's fencing token
    errors       integer     NOT NULL DEFAULT 0,     -- failures charged against the retry limit
    crashes      integer     NOT NULL DEFAULT 0,     -- process deaths in a row; reset by any outcome
    -- Runs in a row that failed for no fault of the delivery: > 0 the store made them fail, < 0 what the handler depends on. Not indexed
    troubles     integer     NOT NULL DEFAULT 0,
    handler_id   smallint    NOT NULL,
    status       smallint    NOT NULL DEFAULT 0,     -- 0 open, 2 done, 3 poisoned, 4 discarded
    replays      smallint    NOT NULL DEFAULT 0,     -- how often a person gave it a fresh set of retries; what was before is in inbox_history
    is_corrected boolean     NOT NULL DEFAULT false, -- its handler is given the newest payload of inbox_correction
    passed       boolean,                            -- true: it was poisoned and does not hold its key
    reason       text,                               -- why it was poisoned or discarded
    last_error   text,
    PRIMARY KEY (message_seq, handler_id)            -- settle, renew, redelivery
) WITH (
    -- A claim writes only unindexed columns. With room on the page that is a HOT update, which touches no index: 160 bytes of
    -- WAL instead of 415.
    fillfactor = 45,
    -- The table churns at any size, so vacuum by count, not by share; and do not throttle it.
    autovacuum_vacuum_scale_factor = 0,  autovacuum_vacuum_threshold = 20000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_cost_delay = 0,
    -- Truncating the tail takes an exclusive lock that would stop every claim.
    vacuum_truncate = off
);

-- The claim, in exactly its order; also the oldest due delivery of a handler. Naming status or locked_until here would end HOT claims.
CREATE INDEX inbox_delivery_due ON inbox_delivery (handler_id, due_at, message_seq) WHERE finished_at IS NULL;
-- Listing poisoned deliveries without a scan, the oldest first. Rows enter it only when they are given up.
CREATE INDEX inbox_delivery_poisoned ON inbox_delivery (handler_id, finished_at, message_seq) WHERE status = 3;

-- What stands in the way of a key: deliveries that are open, and poisoned ones that hold it. Those that are not held come first, then the
-- held ones in accept order: accept, the claims of ordered handlers and inbox_promote each probe it once a key.
CREATE INDEX inbox_delivery_order ON inbox_delivery (handler_id, order_hash, due_at, message_seq)
    WHERE order_hash IS NOT NULL AND (finished_at IS NULL OR status = 3 AND passed IS NULL);

-- Deliveries that were poisoned as `unknown key`: inbox_return_parked finds them beside any number of others. Almost always empty.
CREATE INDEX inbox_delivery_parked ON inbox_delivery (handler_id, message_seq) WHERE status = 3 AND reason = 'unknown key';

-- What a delivery had come to when a person replayed or discarded it, or when it returned. Goes with its message.
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

-- How attempts failed, written by the statement that settles them. Each attempt has a place of a bounded number of places, and is written over what
-- stood there: the first has its own, the others take turns. So the first failure and those of the newest attempts are there. Goes with its message.
CREATE TABLE inbox_attempt (
    message_seq bigint      NOT NULL,
    failed_at   timestamptz NOT NULL,
    attempt     integer     NOT NULL,                -- inbox_delivery.attempts of that run
    handler_id  smallint    NOT NULL,
    place       smallint    NOT NULL,                -- 0 for attempt 1
    why         text        NOT NULL,                -- failed, timed out, panicked, store trouble; or the reason why it was poisoned
    error       text,
    PRIMARY KEY (message_seq, handler_id, place)     -- settle, shown with its delivery, purged with its message
);

-- Payloads that people corrected, each for one handler: its handler is given the newest. The message stays as it came. Goes with its message.
CREATE TABLE inbox_correction (
    message_seq bigint   NOT NULL,
    audit_id    bigint   NOT NULL,                   -- inbox_audit.id: who, when, why
    handler_id  smallint NOT NULL,
    payload     bytea    NOT NULL,
    PRIMARY KEY (message_seq, handler_id, audit_id)  -- claims of corrected deliveries, purged with its message
);

-- Per consumer group, cluster, topic and partition: the next offset to accept, written in the transaction that accepts. An offset alone does not
-- identify a record: the same offset holds another record in another cluster, in a topic that was created anew, and after a truncation.
CREATE TABLE inbox_ledger (
    consumer_group  text        NOT NULL,
    topic           text        NOT NULL,
    kafka_partition integer     NOT NULL,
    next_offset     bigint      NOT NULL,            -- -2: begin at the first record that Kafka has
    updated_at      timestamptz NOT NULL DEFAULT now(),
    stopped_at      timestamptz,                     -- not null: the partition is not read until a person resets or skips it
    leader_epoch    integer,                         -- of the record before next_offset; null when it is not known
    cluster_id      text        NOT NULL DEFAULT '', -- Kafka's own id of the cluster
    topic_id        text,                            -- Kafka's own: a topic that is created anew has another
    stopped_why     text,
    PRIMARY KEY (consumer_group, cluster_id, topic, kafka_partition)
) WITH (fillfactor = 50);

-- Records that Kafka no longer had when they were to be read. A gap is noted once.
CREATE TABLE inbox_gap (
    consumer_group  text        NOT NULL,
    topic           text        NOT NULL,
    kafka_partition integer     NOT NULL,
    from_offset     bigint      NOT NULL,            -- the first that is missing
    to_offset       bigint      NOT NULL,            -- the first that was there
    noticed_at      timestamptz NOT NULL DEFAULT now(),
    cluster_id      text        NOT NULL DEFAULT '',
    PRIMARY KEY (consumer_group, cluster_id, topic, kafka_partition, from_offset, to_offset)
);

-- What each partition is doing, as the process that reads it says: when that changes, and once a minute. For people; the ledger decides.
CREATE TABLE inbox_partition (
    consumer_group  text        NOT NULL,
    topic           text        NOT NULL,
    kafka_partition integer     NOT NULL,
    cluster_id      text        NOT NULL,
    standing        text        NOT NULL,            -- reading, waiting (for its position), standing still (records cannot be read), stopped
    since           timestamptz NOT NULL DEFAULT now(),
    seen_at         timestamptz NOT NULL DEFAULT now(),
    lag             bigint,                          -- offsets that Kafka had and that were not stored, at seen_at; a last transaction's marker counts
    ingest          text        NOT NULL,            -- inbox_ingest.name
    why             text,
    PRIMARY KEY (consumer_group, cluster_id, topic, kafka_partition)
) WITH (fillfactor = 50);

-- Processes that read from Kafka, every few seconds. The row of a process that was asked to end is removed.
CREATE TABLE inbox_ingest (
    consumer_group text        NOT NULL,
    name           text        NOT NULL,             -- host and process id
    cluster_id     text        NOT NULL,             -- empty until a broker has answered
    started_at     timestamptz NOT NULL DEFAULT now(),
    seen_at        timestamptz NOT NULL DEFAULT now(),
    trouble_since  timestamptz,
    trouble        text,                             -- what keeps it from reading: failed authentication, an unknown topic, no broker
    PRIMARY KEY (consumer_group, name)
) WITH (fillfactor = 50);

-- Records that could not become messages, kept whole.
CREATE TABLE inbox_quarantine (
    id              bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    quarantined_at  timestamptz NOT NULL DEFAULT now(),
    kafka_offset    bigint,
    recorded_at     timestamptz,
    kafka_partition integer,
    topic           text        NOT NULL,
    cluster_id      text,                            -- of the Kafka cluster it was read from: part of an identity by position
    reason          text        NOT NULL,
    detail          text,
    message_id      bytea,                           -- the identity as given: it may be what is wrong with the record
    source          bytea,
    record_key      bytea,
    headers         bytea,
    payload         bytea,
    -- Over position, identity and content: a record that is redelivered is quarantined once.
    record_hash     bytea       NOT NULL UNIQUE,
    replay_asked_at timestamptz,                     -- not null: a process that knows the topic accepts it anew
    replay_locked_until timestamptz,                 -- until then one process has claimed that replay. Not indexed
    replays         integer     NOT NULL DEFAULT 0   -- how often that was tried and came to nothing
);
-- The few whose replay was asked for; every process looks for them.
CREATE INDEX inbox_quarantine_asked ON inbox_quarantine (replay_asked_at) WHERE replay_asked_at IS NOT NULL;
-- Listing by topic, the oldest first.
CREATE INDEX inbox_quarantine_topic ON inbox_quarantine (topic, id);

-- Who is alive and which handlers it knows.
CREATE TABLE inbox_processor (
    id          integer     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text        NOT NULL,
    version     text        NOT NULL,
    handler_ids smallint[]  NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT now(),
    seen_at     timestamptz NOT NULL DEFAULT now(),
    alive_until timestamptz NOT NULL,
    report      jsonb                                -- what it says of itself: rates, intake, connections
);

-- What outlives a purged message, where retention keeps identities: enough to know a late redelivery for a duplicate. 56 bytes a row.
CREATE TABLE inbox_identity (
    hash      uuid        NOT NULL,                  -- inbox_identity_hash(message_id, source)
    purged_at timestamptz NOT NULL,                  -- when it was written; its message goes a while later
    forget_at timestamptz NOT NULL
) WITH (
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_vacuum_scale_factor = 0.02
);
-- Accept's probe, one for each message. A hash index answers in two thirds of a b-tree's time. It cannot be unique and need not be: rows are
-- written under the lease of retention.
CREATE INDEX inbox_identity_hash ON inbox_identity USING hash (hash);
ALTER TABLE inbox_identity REPLICA IDENTITY FULL;
-- Forgetting, oldest first. Rows come in its order, so it grows at its right edge; a BRIN would be smaller, but loses its order once the
-- room of forgotten rows is used again.
CREATE INDEX inbox_identity_forget ON inbox_identity (forget_at);

-- Work that one process at a time does for all. Taken and renewed by each of its steps; of a dead holder it runs out.
CREATE TABLE inbox_lease (
    name       text        PRIMARY KEY,
    holder     bigint      NOT NULL,
    held_until timestamptz NOT NULL
) WITH (fillfactor = 10);

-- How far retention has looked, for each set of periods: messages up to this seq were looked at. What could not go is in inbox_kept.
CREATE TABLE inbox_retention (
    policy    bigint      PRIMARY KEY,               -- a hash of the periods: other periods look for themselves
    walked_to bigint      NOT NULL,
    purged_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 10);

-- Blocks of 500 messages (seq / 500) of which something was kept, and when the first of them can go. Until then no purge reads them: a purge
-- costs what goes, not what stays.
CREATE TABLE inbox_kept (
    policy  bigint      NOT NULL,
    block   bigint      NOT NULL,
    look_at timestamptz NOT NULL,
    PRIMARY KEY (policy, block) INCLUDE (look_at)    -- the blocks that are due, in their order
);

-- One row for each act of a person. Append-only.
CREATE TABLE inbox_audit (
    id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    acted_at      timestamptz NOT NULL DEFAULT now(),
    database_user text        NOT NULL DEFAULT session_user, -- who logged in; acts run with the rights of the inbox's owner
    actor         text,                              -- the person, as the tool says: the database's user may be shared
    action        text        NOT NULL,
    filter        jsonb       NOT NULL,
    affected      bigint      NOT NULL,
    because       text                               -- why the person acted
);

-- Bytes as text where they are text, as hex (\x...) where they are not. Never fails. Not PARALLEL SAFE: catching an exception takes a
-- subtransaction, which a parallel query cannot have before PostgreSQL 17.
CREATE FUNCTION inbox_text(bytes bytea) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    RETURN convert_from(bytes, 'UTF8');
EXCEPTION WHEN OTHERS THEN
    RETURN '\x' || encode(bytes, 'hex');
END $$;

-- The headers of a message or a quarantined record, in order, duplicates and all. Bytes that are not headers end the list.
CREATE FUNCTION inbox_headers(headers bytea) RETURNS TABLE (ordinal integer, name bytea, value bytea)
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    -- A copy: the stored value would be decompressed anew for each header.
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

-- The SQLSTATE with which this message would be refused, WH000 when it would not be. Inserts nothing. Drivers tell that a statement
-- failed but not always why; before a record is quarantined for what it holds, the server itself is asked.
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

-- The identity of a message in 16 bytes: of the SHA-256 over id and source, each behind its length. The program computes the same.
CREATE FUNCTION inbox_identity_hash(message_id text, source text) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN encode(substring(sha256(int4send(octet_length(convert_to(message_id, 'UTF8'))) || convert_to(message_id, 'UTF8')
                            || int4send(octet_length(convert_to(source, 'UTF8'))) || convert_to(source, 'UTF8')) FOR 16), 'hex')::uuid;

-- Which of these, counted from 1, belong to purged messages; NULL when none does. A function for its setting: a plan that was made while the
-- table was empty would scan it in every accept when it is large. Where no identity was ever kept, nothing is probed.
CREATE FUNCTION inbox_remembered(hashes uuid[]) RETURNS integer[]
LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    IF pg_relation_size('inbox_identity') = 0 THEN
        RETURN NULL;
    END IF;
    RETURN (SELECT array_agg(h.ord::integer) FROM unnest(hashes) WITH ORDINALITY AS h (hash, ord)
            WHERE (SELECT true FROM inbox_identity i WHERE i.hash = h.hash LIMIT 1));
END $$;

-- Makes the next held delivery of a key due when one that stood in its way has finished. It is given no right to run by that: the claim looks
-- at all deliveries of the key that are not held. With the owner's rights: whoever purges may delete deliveries and not update them. Two statements, each with its own snapshot: the first was taken after the lock of
-- the finished row was had, so it sees whatever was held behind it. Without sequential scans, which makes plans look so dear that they would be compiled.
CREATE FUNCTION inbox_promote() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off SET jit = off AS $$
DECLARE
    next_seq bigint;
    next_id smallint;
BEGIN
    SELECT d.message_seq, d.handler_id INTO next_seq, next_id
    FROM inbox_handler own
    JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
    CROSS JOIN LATERAL (
        SELECT h.message_seq, h.handler_id FROM inbox_delivery h
        -- Said so that no other index can be taken for it: one in the order of all held deliveries would be walked through.
        WHERE h.handler_id = same.id AND h.order_hash = OLD.order_hash AND h.due_at >= 'infinity'
          AND (h.finished_at IS NULL OR h.status = 3 AND h.passed IS NULL) AND CASE WHEN h.finished_at IS NULL THEN true ELSE false END
        ORDER BY h.due_at, h.message_seq LIMIT 1
        FOR NO KEY UPDATE) d
    WHERE own.id = OLD.handler_id
    ORDER BY d.message_seq LIMIT 1;
    IF FOUND THEN
        -- Not now(): a transactional handler began its transaction long before.
        UPDATE inbox_delivery d SET due_at = clock_timestamp() WHERE d.message_seq = next_seq AND d.handler_id = next_id;
    END IF;
    RETURN NULL;
END $$;

-- For every statement that finishes a delivery, whoever sends it. Claims and renewals do not name the column, and for deliveries in no order
-- only the condition is looked at.
CREATE TRIGGER inbox_promote_next AFTER UPDATE OF finished_at ON inbox_delivery FOR EACH ROW
WHEN (OLD.order_hash IS NOT NULL AND OLD.due_at < 'infinity' AND (OLD.finished_at IS NULL OR OLD.status = 3 AND OLD.passed IS NULL)
      AND NEW.finished_at IS NOT NULL AND (NEW.status <> 3 OR NEW.passed IS NOT NULL))
EXECUTE FUNCTION inbox_promote();

-- A poisoned delivery that held its key was deleted, by an expiry of poisoned ones, say.
CREATE TRIGGER inbox_promote_next_of_deleted AFTER DELETE ON inbox_delivery FOR EACH ROW
WHEN (OLD.order_hash IS NOT NULL AND OLD.due_at < 'infinity' AND (OLD.finished_at IS NULL OR OLD.status = 3 AND OLD.passed IS NULL))
EXECUTE FUNCTION inbox_promote();

-- What errors have in common: words with a digit in them (numbers, ids, addresses) do not count.
CREATE FUNCTION inbox_fingerprint(error text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN left(encode(sha256(convert_to(regexp_replace(error, '[A-Za-z0-9-]*[0-9][A-Za-z0-9-]*', '#', 'g'), 'UTF8')), 'hex'), 8);

-- A moment as microseconds since 1970, for programs.
CREATE FUNCTION inbox_micros(at timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN (extract(epoch FROM at) * 1000000)::bigint;

-- Every delivery in words.
CREATE VIEW inbox_status AS
SELECT m.message_id, m.source, m.topic, h.key AS handler_key,
       CASE d.status
           WHEN 0 THEN CASE WHEN d.locked_until > now() THEN 'running' ELSE 'pending' END
           WHEN 2 THEN 'done'
           WHEN 3 THEN 'poisoned'
           WHEN 4 THEN 'discarded'
       END AS state,
       d.reason, d.attempts, d.errors, d.crashes, d.troubles, d.replays, d.is_corrected, d.due_at, d.locked_until, p.name AS locked_by,
       p.alive_until > now() AS owner_is_alive, d.finished_at,
       now() - m.received_at AS age, m.received_at, m.recorded_at, m.kafka_partition, m.kafka_offset, d.last_error,
       inbox_fingerprint(d.last_error) AS fingerprint, d.message_seq, d.handler_id
FROM inbox_delivery d
LEFT JOIN inbox_message m ON m.seq = d.message_seq
LEFT JOIN inbox_handler h ON h.id = d.handler_id
LEFT JOIN inbox_processor p ON p.id = d.locked_by;

-- What the machine gave up and a person must look at.
CREATE VIEW inbox_poisoned AS
SELECT m.message_id, m.source, m.topic, h.key AS handler_key, d.reason, d.last_error, inbox_fingerprint(d.last_error) AS fingerprint,
       d.attempts, d.errors, d.crashes, d.replays, d.finished_at AS poisoned_at, m.received_at, m.kafka_partition, m.kafka_offset,
       inbox_text(m.record_key) AS record_key, inbox_text(m.payload) AS payload, d.message_seq, d.handler_id
FROM inbox_delivery d
LEFT JOIN inbox_message m ON m.seq = d.message_seq
LEFT JOIN inbox_handler h ON h.id = d.handler_id
WHERE d.status = 3;

-- The same by what went wrong: one row a handler, reason and fingerprint.
CREATE VIEW inbox_poisoned_by_error AS
SELECT h.key AS handler_key, d.reason, inbox_fingerprint(d.last_error) AS fingerprint, count(*) AS poisoned,
       min(d.finished_at) AS first_at, max(d.finished_at) AS last_at, min(d.last_error) AS example, d.handler_id
FROM inbox_delivery d
LEFT JOIN inbox_handler h ON h.id = d.handler_id
WHERE d.status = 3
GROUP BY d.handler_id, h.key, d.reason, inbox_fingerprint(d.last_error);

-- How attempts failed, in words: the first and those among the newest of each delivery.
CREATE VIEW inbox_failures AS
SELECT m.message_id, m.source, m.topic, h.key AS handler_key, a.attempt, a.failed_at, a.why, a.error, inbox_fingerprint(a.error) AS fingerprint,
       a.message_seq, a.handler_id
FROM inbox_attempt a
LEFT JOIN inbox_message m ON m.seq = a.message_seq
LEFT JOIN inbox_handler h ON h.id = a.handler_id;

-- Records that could not become messages, readable.
CREATE VIEW inbox_quarantined AS
SELECT id, topic, cluster_id, kafka_partition, kafka_offset, reason, detail, quarantined_at, replay_asked_at, replays,
       inbox_text(message_id) AS message_id, inbox_text(source) AS source, inbox_text(record_key) AS record_key,
       inbox_text(payload) AS payload
FROM inbox_quarantine;

-- What is still to be done, per handler. `held` are deliveries that wait for another of their key. Counts stop at 10,000: that value means 10,000 or more, so that the view costs the same at any size.
-- `due` and `running` are counted among the 12,000 open deliveries of the handler that have been due longest; what runs is nearly always among them.
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

-- Keys of ordered handlers on which deliveries wait, with the delivery that they wait for: those of the 1,000 oldest held deliveries of a
-- handler, and of the 1,000 that have been poisoned longest. `behind` stops at 1,000. The key itself is not stored: look at the message.
CREATE VIEW inbox_held_keys AS
SELECT current.key AS handler_key, m.message_id, m.source, m.topic,
       CASE WHEN head.status = 3 THEN 'poisoned' WHEN head.locked_until > now() THEN 'running' WHEN head.status = 0 THEN 'pending' END AS state,
       head.reason, head.last_error, waiting.behind, coalesce(head.finished_at, m.received_at) AS held_since, head.due_at,
       k.order_hash, head.message_seq, head.handler_id
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
LEFT JOIN LATERAL (SELECT * FROM inbox_message WHERE seq = head.message_seq LIMIT 1) m ON true;

-- Operator actions. Each one is fenced against running work, is bounded, writes a row to inbox_audit, and does nothing when it is repeated.
-- Actions are SECURITY DEFINER: they run with the rights of the inbox's owner, so the caller needs no rights on tables and cannot change
-- a row without its audit row. `database_user` is the user who logged in, whoever the definer is. Each is bound to the schema of its inbox: see
-- the end of this file, which also takes the right to call them from PUBLIC (docs/roles.sql grants it).
-- `actor` is the person as the tool says, `because` is why that person acts.

-- The ids of a handler's key; ids that became one handler are one. All of them without a key.
CREATE FUNCTION inbox_handler_ids(handler_key text) RETURNS smallint[]
LANGUAGE sql STABLE AS $$
    SELECT coalesce(array_agg(DISTINCT same.id), '{}')
    FROM inbox_handler_key k
    JOIN inbox_handler own ON own.id = k.handler_id
    JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
    WHERE k.key = coalesce($1, k.key)
$$;

-- A mistyped key is not an answer of nothing.
CREATE FUNCTION inbox_check_handler_key(handler_key text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF handler_key IS NOT NULL AND inbox_handler_ids(handler_key) = '{}' THEN
        RAISE EXCEPTION 'there is no handler key %', quote_literal(handler_key)
            USING HINT = 'SELECT key FROM inbox_handler_key tells which there are.';
    END IF;
END $$;

-- Refuses a filter with a name that means nothing, which would silently take more than was meant, and one that says nothing at all.
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
        RAISE EXCEPTION 'a filter has no %', wrong USING HINT = 'It may have: ' || array_to_string(names, ', ') || ', all.';
    END IF;
    IF filter = '{}' THEN
        RAISE EXCEPTION 'an empty filter would take everything' USING HINT = 'Say {"all": true} if that is what you want.';
    END IF;
END $$;

-- Whether a filter means a delivery, but for its handler and message id.
CREATE FUNCTION inbox_is_meant(filter jsonb, source text, topic text, reason text, error text, finished_at timestamptz) RETURNS boolean
LANGUAGE sql STABLE
RETURN ($1 ->> 'source' IS NULL OR $2 = $1 ->> 'source')
   AND ($1 ->> 'topic' IS NULL OR $3 = $1 ->> 'topic')
   AND ($1 ->> 'reason' IS NULL OR $4 = $1 ->> 'reason')
   AND ($1 ->> 'error' IS NULL OR position(lower($1 ->> 'error') IN lower($5)) > 0)
   AND ($1 ->> 'fingerprint' IS NULL OR inbox_fingerprint($5) = $1 ->> 'fingerprint')
   AND ($1 ->> 'older_than' IS NULL OR $6 < now() - ($1 ->> 'older_than')::interval)
   AND ($1 ->> 'newer_than' IS NULL OR $6 >= now() - ($1 ->> 'newer_than')::interval);

-- Whether a delivery may be replayed or discarded, or, for any other word, is poisoned.
CREATE FUNCTION inbox_is_free_to(action text, status smallint, locked_until timestamptz) RETURNS boolean
LANGUAGE sql STABLE
RETURN CASE $1 WHEN 'replay' THEN $2 IN (3, 4)
               WHEN 'discard' THEN $2 = 3 OR $2 = 0 AND ($3 IS NULL OR $3 <= now())
               ELSE $2 = 3 END;

-- Where the deliveries are that a filter means: poisoned ones, the oldest first. By message_id also, for a replay, those that were
-- discarded, and to discard, those that are still pending.
-- {"handler_key", "message_id", "source", "topic", "reason", "error" (a part of it), "fingerprint", "older_than", "newer_than"
-- (intervals, of when it was poisoned), "all": true}.
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
        -- LIMIT keeps it a probe, whatever the planner believes.
        CROSS JOIN LATERAL (SELECT ctid AS tid, * FROM inbox_delivery WHERE message_seq = m.seq AND handler_id = h.id LIMIT 1) d
        WHERE m.message_id = filter ->> 'message_id'
          AND inbox_is_meant(filter, m.source, m.topic, d.reason, d.last_error, d.finished_at)
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

-- Replays or discards what a filter means, at most row_limit. Whatever changes at the same moment is left alone.
-- A replay gives a fresh set of retries, due now. The attempt number goes on, so that a claim from before stays invalid.
CREATE FUNCTION inbox_change(action text, filter jsonb, row_limit integer, because text, actor text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    tids tid[];
    act bigint;
    changed bigint := 0;
BEGIN
    -- Locked in the order of the table, so that two acts never wait for each other in a circle; looked at again under the lock.
    SELECT array_agg(l.tid) INTO tids FROM (
        SELECT d.ctid AS tid FROM inbox_delivery d
        WHERE d.ctid = ANY (ARRAY(SELECT f.tid FROM inbox_matching(filter, row_limit, action) f))
          AND inbox_is_free_to(inbox_change.action, d.status, d.locked_until)
        FOR UPDATE SKIP LOCKED) l;
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES (inbox_change.action, inbox_change.filter, coalesce(cardinality(tids), 0), inbox_change.because, inbox_change.actor)
    RETURNING id INTO act;
    IF tids IS NULL THEN
        RETURN 0;
    END IF;
    INSERT INTO inbox_history (message_seq, handler_id, audit_id, status, finished_at, attempts, errors, crashes, reason, last_error)
    SELECT d.message_seq, d.handler_id, act, d.status, d.finished_at, d.attempts, d.errors, d.crashes, d.reason, d.last_error
    FROM inbox_delivery d WHERE d.ctid = ANY (tids);
    IF inbox_change.action = 'replay' THEN
        UPDATE inbox_delivery d
        SET status = 0, due_at = now(), finished_at = NULL, errors = 0, crashes = 0, troubles = 0, reason = NULL, locked_until = NULL, locked_by = NULL,
            replays = least(d.replays + 1, 32767)
        WHERE d.ctid = ANY (tids);
    ELSE
        UPDATE inbox_delivery d
        SET status = 4, finished_at = now(), locked_until = NULL, locked_by = NULL,
            reason = coalesce(inbox_change.because, 'by a person')
        WHERE d.ctid = ANY (tids);
    END IF;
    GET DIAGNOSTICS changed = ROW_COUNT;
    RETURN changed;
END $$;

-- Makes deliveries pending again that were poisoned as `unknown key`, at most row_limit of each handler; `actor` is the process that knows
-- these handlers. What they were charged before stays. Without sequential scans: a plan from when the table was empty would scan it when
-- it is large.
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
                inbox_return_parked.returned, 'a process that knows the key enrolled', inbox_return_parked.actor)
        RETURNING id INTO act;
        INSERT INTO inbox_history (message_seq, handler_id, audit_id, status, finished_at, attempts, errors, crashes, reason, last_error)
        SELECT d.message_seq, d.handler_id, act, d.status, d.finished_at, d.attempts, d.errors, d.crashes, d.reason, d.last_error
        FROM inbox_delivery d WHERE d.ctid = ANY (tids);
        UPDATE inbox_delivery d SET status = 0, due_at = now(), finished_at = NULL, reason = NULL WHERE d.ctid = ANY (tids);
        RETURN NEXT;
    END LOOP;
END $$;

-- Runs a poisoned or discarded delivery again. Returns how many were changed: 0 when there is no such delivery or it is not given up.
CREATE FUNCTION inbox_replay(message_id text, handler_key text, source text DEFAULT NULL, because text DEFAULT NULL,
                             actor text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SECURITY DEFINER AS $$
    SELECT inbox_change('replay', jsonb_strip_nulls(jsonb_build_object('message_id', $1, 'handler_key', $2, 'source', $3)), 1000, $4, $5)
$$;

-- Runs a poisoned or discarded delivery again with another payload, which is kept beside the original: for this handler only. `attempt` says which failure
-- was looked at (inbox_status.attempts); when it has run since, nothing is done. The audit has the payload's hash. Returns 0 when there is no such delivery.
CREATE FUNCTION inbox_replay_corrected(message_id text, handler_key text, payload bytea, source text DEFAULT NULL, attempt integer DEFAULT NULL,
                                       because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
    tids tid[];
    act bigint;
BEGIN
    PERFORM inbox_check_handler_key($2);
    IF $3 IS NULL OR $2 IS NULL THEN
        RAISE EXCEPTION 'a corrected payload is not NULL, and is for one handler';
    END IF;
    SELECT array_agg(d.tid) INTO tids
    FROM inbox_message m
    CROSS JOIN unnest(inbox_handler_ids($2)) AS h (id)
    CROSS JOIN LATERAL (SELECT ctid AS tid FROM inbox_delivery
                        WHERE message_seq = m.seq AND handler_id = h.id AND status IN (3, 4) AND ($5 IS NULL OR attempts = $5)
                        LIMIT 1 FOR UPDATE SKIP LOCKED) d
    WHERE m.message_id = $1 AND ($4 IS NULL OR m.source = $4);
    IF cardinality(tids) > 1 THEN
        RAISE EXCEPTION 'these are deliveries of several messages' USING HINT = 'Name the source.';
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
    SET status = 0, due_at = now(), finished_at = NULL, errors = 0, crashes = 0, troubles = 0, reason = NULL, locked_until = NULL, locked_by = NULL,
        replays = least(d.replays + 1, 32767), is_corrected = true
    WHERE d.ctid = ANY (tids);
    RETURN coalesce(cardinality(tids), 0);
END $$;

-- Runs again what a filter means: see inbox_matching, which tells beforehand what that would be.
CREATE FUNCTION inbox_replay_matching(filter jsonb, row_limit integer DEFAULT 1000, because text DEFAULT NULL,
                                      actor text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SECURITY DEFINER AS $$
    SELECT inbox_change('replay', $1, $2, $3, $4)
$$;

-- Gives up a poisoned or pending delivery for good: it is done, by a person's word. A running one is left alone.
CREATE FUNCTION inbox_discard(message_id text, handler_key text, source text DEFAULT NULL, because text DEFAULT NULL,
                              actor text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SECURITY DEFINER AS $$
    SELECT inbox_change('discard', jsonb_strip_nulls(jsonb_build_object('message_id', $1, 'handler_key', $2, 'source', $3)), 1000, $4, $5)
$$;

CREATE FUNCTION inbox_discard_matching(filter jsonb, row_limit integer DEFAULT 1000, because text DEFAULT NULL,
                                       actor text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SECURITY DEFINER AS $$
    SELECT inbox_change('discard', $1, $2, $3, $4)
$$;

-- Takes the claim of a running delivery away: it is due at once, and what its run comes to changes nothing any more. Its handler is told to stop when
-- its process renews its claims next, within a third of the lease. Nothing is charged. `attempt` says which run is meant (inbox_status.attempts);
-- without one, the run of this moment. Returns 0 when no such run is going on, or its outcome is being written.
CREATE FUNCTION inbox_release(message_id text, handler_key text, source text DEFAULT NULL, attempt integer DEFAULT NULL,
                              because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
    tids tid[];
    act bigint;
BEGIN
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

-- Nobody claims a paused handler's deliveries, in any process, within ten seconds; what runs goes on to its end. They wait and lose nothing.
CREATE FUNCTION inbox_set_paused(handler_key text, is_paused boolean, because text, actor text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
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

-- While the breaker of a handler is open, nobody claims its deliveries, except for one at a time that probes; the first that succeeds closes it.
-- What runs goes on to its end.
CREATE FUNCTION inbox_set_breaker(handler_key text, is_open boolean, because text, actor text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
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

-- Sets how many deliveries of a handler start in a second, over all processes and restarts, whatever its registration says: `burst` at once at
-- the most, by default what a second allows. 'infinity' is no limit; NULL is what the registration says.
CREATE FUNCTION inbox_set_rate(handler_key text, per_sec double precision, burst integer DEFAULT NULL, because text DEFAULT NULL,
                               actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
    interval_us bigint := CASE WHEN per_sec > 0 AND per_sec < 'infinity' THEN round(1000000 / per_sec)::bigint END;
    at_once integer := CASE WHEN per_sec < 'infinity' THEN coalesce(inbox_set_rate.burst, greatest(least(floor(per_sec), 1000000), 1)::integer) END;
BEGIN
    PERFORM inbox_check_handler_key(inbox_set_rate.handler_key);
    IF per_sec < 'infinity' AND (interval_us IS NULL OR interval_us < 1 OR at_once NOT BETWEEN 1 AND 1000000) THEN
        RAISE 'a rate limit allows more than 0 and at most 1000000 starts a second, and 1 to 1000000 at once';
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

-- The quarantined records that a filter means, the oldest first: {"id", "topic", "reason", "detail" (a part of it), "older_than",
-- "newer_than", "all": true}.
CREATE FUNCTION inbox_quarantine_matching(filter jsonb, row_limit integer DEFAULT 1000) RETURNS SETOF bigint
LANGUAGE plpgsql STABLE AS $$
BEGIN
    PERFORM inbox_check_filter(filter, '{id, topic, reason, detail, older_than, newer_than}');
    RETURN QUERY
    SELECT q.id FROM inbox_quarantine q
    WHERE (filter ->> 'id' IS NULL OR q.id = (filter ->> 'id')::bigint)
      AND (filter ->> 'topic' IS NULL OR q.topic = filter ->> 'topic')
      AND (filter ->> 'reason' IS NULL OR q.reason = filter ->> 'reason')
      AND (filter ->> 'detail' IS NULL OR position(lower(filter ->> 'detail') IN lower(q.detail)) > 0)
      AND (filter ->> 'older_than' IS NULL OR q.quarantined_at < now() - (filter ->> 'older_than')::interval)
      AND (filter ->> 'newer_than' IS NULL OR q.quarantined_at >= now() - (filter ->> 'newer_than')::interval)
    ORDER BY q.id LIMIT row_limit;
END $$;

-- Asks for quarantined records to be accepted anew, identity and all, by a process that knows their topic. What is accepted leaves the
-- quarantine, what is not stays, with its reason of now.
CREATE FUNCTION inbox_quarantine_replay(filter jsonb, row_limit integer DEFAULT 1000, because text DEFAULT NULL,
                                        actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    UPDATE inbox_quarantine q SET replay_asked_at = now()
    WHERE q.id = ANY (ARRAY(SELECT inbox_quarantine_matching(inbox_quarantine_replay.filter, row_limit))) AND q.replay_asked_at IS NULL;
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('replay quarantined', inbox_quarantine_replay.filter, changed, inbox_quarantine_replay.because, inbox_quarantine_replay.actor);
    RETURN changed;
END $$;

-- Deletes quarantined records. What they held is gone.
CREATE FUNCTION inbox_quarantine_discard(filter jsonb, row_limit integer DEFAULT 1000, because text DEFAULT NULL,
                                         actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    DELETE FROM inbox_quarantine q
    WHERE q.id = ANY (ARRAY(SELECT inbox_quarantine_matching(inbox_quarantine_discard.filter, row_limit)));
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('discard quarantined', inbox_quarantine_discard.filter, changed, inbox_quarantine_discard.because,
            inbox_quarantine_discard.actor);
    RETURN changed;
END $$;

-- One step of a backfill: adds the deliveries that a handler lacks of these messages. All steps of a backfill share one audit row: the first
-- step, without an act, creates it, and each step adds what it made. Returns that row's id and the number of deliveries.
CREATE FUNCTION inbox_backfill_step(handler_key text, seqs bigint[], filter jsonb, act bigint DEFAULT NULL, because text DEFAULT NULL,
                                    actor text DEFAULT NULL, OUT audit_id bigint, OUT made bigint)
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    locked bigint[];
BEGIN
    PERFORM inbox_check_handler_key(inbox_backfill_step.handler_key);
    -- In the order of seq, as accept does. Messages that were purged meanwhile are left out. What is missing is decided by the next
    -- statement, whose snapshot is taken under these locks.
    locked := ARRAY(SELECT m.seq FROM unnest(seqs) AS c (seq)
                    CROSS JOIN LATERAL (SELECT seq FROM inbox_message WHERE seq = c.seq FOR NO KEY UPDATE) m);
    INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
    SELECT c.seq, (SELECT coalesce(h.same_as, h.id) FROM inbox_handler_key k JOIN inbox_handler h ON h.id = k.handler_id
                   WHERE k.key = inbox_backfill_step.handler_key), now()
    FROM unnest(locked) AS c (seq)
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

-- Writes the audit row of a purge, which runs in many transactions.
CREATE FUNCTION inbox_audit_purge(filter jsonb, affected bigint, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS void
LANGUAGE sql SECURITY DEFINER AS $$
    INSERT INTO inbox_audit (action, filter, affected, because, actor) VALUES ('purge', $1, $2, $3, $4)
$$;

-- Refuses an act on the ledger that does not say which position it means.
CREATE FUNCTION inbox_check_position(consumer_group text, topic text, kafka_partition integer, cluster_id text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    clusters text;
BEGIN
    SELECT string_agg(DISTINCT l.cluster_id, ', ') INTO clusters FROM inbox_ledger l
    WHERE l.consumer_group = $1 AND l.topic = $2 AND ($3 IS NULL OR l.kafka_partition = $3) AND ($4 IS NULL OR l.cluster_id = $4)
    HAVING count(DISTINCT l.cluster_id) > 1;
    IF clusters IS NOT NULL THEN
        RAISE EXCEPTION 'these are positions of several clusters' USING HINT = 'Name one of them: cluster_id => ' || clusters || '.';
    END IF;
END $$;

-- Sets positions to an offset, or without one to the first record that Kafka has; without a partition, those of the whole topic. Stopped
-- partitions are read again. Running processes follow within a minute. Returns how many partitions it changed.
CREATE FUNCTION inbox_ledger_reset(consumer_group text, topic text, kafka_partition integer DEFAULT NULL, to_offset bigint DEFAULT NULL,
                                   cluster_id text DEFAULT NULL, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    IF to_offset < 0 OR to_offset IS NOT NULL AND inbox_ledger_reset.kafka_partition IS NULL THEN
        RAISE EXCEPTION 'an offset is not negative, and is of one partition: name the partition';
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

-- Moves a position forward and leaves out the records in between, which are noted as a gap. A stopped partition is read again from there.
-- Returns 0 where the offset is not ahead of the ledger.
CREATE FUNCTION inbox_ledger_skip(consumer_group text, topic text, kafka_partition integer, to_offset bigint, cluster_id text DEFAULT NULL,
                                  because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
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

-- Forgets the identity of a purged message, which retention keeps: its record is accepted once more when it comes again. Returns 0 where
-- none is kept.
CREATE FUNCTION inbox_forget_identity(message_id text, source text, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    DELETE FROM inbox_identity i WHERE i.hash = inbox_identity_hash($1, $2);
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('forget identity', jsonb_build_object('message_id', $1, 'source', $2), changed, $3, $4);
    RETURN changed;
END $$;

-- Settles deliveries as done in the transaction of their handlers. Sent in one message with COMMIT: it raises an error unless every claim is
-- current, so that nothing is committed then. The errors carry the name of a constraint that does not exist, because drivers show that. The mark
-- `wharf.run` lives exactly as long as the transaction that was begun for the handlers.
CREATE FUNCTION inbox_settle_in_transaction(processor integer, message_seqs bigint[], handler_ids smallint[], claim_attempts integer[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    lock_timeout text := set_config('lock_timeout', '2s', true);
    only_seq bigint := message_seqs[1];
    only_handler smallint := handler_ids[1];
    only_attempt integer := claim_attempts[1];
    settled bigint;
BEGIN
    IF current_setting('wharf.run', true) IS DISTINCT FROM 'open' THEN
        RAISE 'the transaction of the handler had ended before the handler did' USING CONSTRAINT = 'inbox_transaction_ended';
    END IF;
    IF cardinality(message_seqs) = 1 THEN
        -- Compares with single values, so that the session plans it once and keeps the plan. A statement with arrays is planned for
        -- each call, because a plan for arrays of unknown length looks more expensive, and that takes three times as long as the update.
        UPDATE inbox_delivery d
        SET finished_at = now(), status = 2, locked_until = NULL, locked_by = NULL, crashes = 0
        WHERE d.message_seq = only_seq AND d.handler_id = only_handler
          AND CASE WHEN d.attempts = only_attempt AND d.locked_by = processor AND d.locked_until IS NOT NULL AND d.finished_at IS NULL
                   THEN true ELSE false END;
    ELSE
        UPDATE inbox_delivery d
        SET finished_at = now(), status = 2, locked_until = NULL, locked_by = NULL, crashes = 0
        FROM (SELECT unnest(message_seqs) AS message_seq, unnest(handler_ids) AS handler_id, unnest(claim_attempts) AS attempt) s
        WHERE d.message_seq = s.message_seq AND d.handler_id = s.handler_id
          AND CASE WHEN d.attempts = s.attempt AND d.locked_by = processor AND d.locked_until IS NOT NULL AND d.finished_at IS NULL
                   THEN true ELSE false END;
    END IF;
    GET DIAGNOSTICS settled = ROW_COUNT;
    IF settled IS DISTINCT FROM cardinality(message_seqs) THEN
        RAISE '% of % claims are no longer current', cardinality(message_seqs) - settled, cardinality(message_seqs)
        USING CONSTRAINT = 'inbox_claim_lost';
    END IF;
END $$;

-- Settles a delivery as done in the transaction of a handler that uses a client of its own, or in a stored procedure: SELECT inbox_settle($1), with the
-- text of `message.claim()`, as the last statement before COMMIT. It is fenced like any other settlement: an error means that nothing may be committed.
--   WH001  the claim is lost: another attempt has the delivery, or a person has taken it away.
--   WH002  this attempt has settled the delivery before: a COMMIT whose answer was lost took effect.
CREATE FUNCTION inbox_settle(claim text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET lock_timeout = '2s' AS $$
DECLARE
    part bigint[];
BEGIN
    IF claim IS NULL OR claim !~ '^\[\d{1,18},\d{1,5},\d{1,10},\d{1,10}\]$' THEN
        RAISE EXCEPTION 'this is not a claim' USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass the text of message.claim() as it is.';
    END IF;
    IF current_setting('wharf.run', true) = 'open' THEN
        RAISE EXCEPTION 'this is the transaction of a transactional handler, whose delivery the engine settles'
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Leave inbox_settle out, or register the handler with `handler`.';
    END IF;
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
        RAISE EXCEPTION 'this attempt has settled its delivery before' USING ERRCODE = 'WH002';
    END IF;
    RAISE EXCEPTION 'the claim is no longer current' USING ERRCODE = 'WH001';
END $$;

-- The order that a delivery is in, of the value of its key; none for an empty one. The program computes the same.
CREATE FUNCTION inbox_order_hash(value bytea) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN CASE WHEN length(value) > 0 THEN ('x' || encode(substring(sha256(value) FOR 8), 'hex'))::bit(64)::bigint END;

-- Headers as they are stored, of a JSON object of texts, in its order; NULL for none. The other way round: inbox_headers.
CREATE FUNCTION inbox_encode_headers(headers json) RETURNS bytea
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT string_agg(int4send(length(h.name)) || h.name || CASE WHEN h.value IS NULL THEN int4send(-1) ELSE int4send(length(h.value)) || h.value END,
                      ''::bytea ORDER BY h.ordinal)
    FROM (SELECT convert_to(j.key, 'UTF8') AS name, convert_to(j.value, 'UTF8') AS value, j.ordinal
          FROM json_each_text($1) WITH ORDINALITY AS j (key, value, ordinal)) h
$$;

-- Accepts one message in the caller's transaction, for handlers that were chosen before: by a process (`inbox.accept_in`), which names the schema of its
-- inbox, or by inbox_accept. `became` is accepted, duplicate or conflict; a conflict stores nothing.
-- The caller's transaction may take long, so this holds as few locks as possible. A message that has all its deliveries is not locked. Deliveries of ordered
-- handlers are due at once, and a claim decides whose turn it is: to hold one, accept would lock the delivery that it waits for.
CREATE FUNCTION inbox_accept_prepared(inbox_schema text, message_id text, source text, topic text, payload_hash bytea, kafka_partition integer,
                                      kafka_offset bigint, recorded_at timestamptz, record_key bytea, headers bytea, payload bytea,
                                      handler_ids smallint[], order_hashes bigint[], delays_ms bigint[], due_ats timestamptz[],
                                      OUT became text, OUT seq bigint, OUT deliveries integer)
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    is_remembered boolean;
    stored bigint;
    stored_hash bytea;
    missing smallint[];
BEGIN
    -- This function is bound to its schema.
    IF $1 <> current_schema() THEN
        RAISE EXCEPTION 'the connection reaches the inbox of schema %, not that of schema %', current_schema(), $1
            USING ERRCODE = 'invalid_schema_name', HINT = 'Put the schema of the inbox first in the search_path of the connection.';
    END IF;
    -- An identity may vanish between two steps: purged that very moment.
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
        became := 'accepted';
        IF stored IS NULL THEN
            became := 'duplicate';
            SELECT m.seq, m.payload_hash INTO stored, stored_hash FROM inbox_message m WHERE m.message_id = $2 AND m.source = $3;
            IF stored IS NULL THEN
                IF is_remembered THEN
                    deliveries := 0;
                    RETURN;
                END IF;
                CONTINUE;
            END IF;
            IF stored_hash <> $5 THEN
                became := 'conflict';
                RETURN;
            END IF;
            missing := inbox_without_delivery(stored, $12);
            IF missing <> '{}' THEN
                -- Two callers that know one handler under two ids must not both add a delivery: looked at again under the lock.
                PERFORM 1 FROM inbox_message m WHERE m.seq = stored FOR NO KEY UPDATE;
                CONTINUE WHEN NOT FOUND;
                missing := inbox_without_delivery(stored, $12);
            END IF;
        END IF;
        INSERT INTO inbox_delivery (message_seq, handler_id, order_hash, due_at)
        SELECT stored, w.handler_id, w.order_hash,
               CASE WHEN w.delay_ms IS NULL AND w.due_at IS NULL THEN clock_timestamp()
                    ELSE greatest(clock_timestamp() + coalesce(w.delay_ms, 0) * interval '1 millisecond', w.due_at) END
        FROM unnest($12, $13, $14, $15) AS w (handler_id, order_hash, delay_ms, due_at)
        WHERE w.handler_id = ANY (missing)
        ON CONFLICT ON CONSTRAINT inbox_delivery_pkey DO NOTHING;
        GET DIAGNOSTICS deliveries = ROW_COUNT;
        seq := stored;
        RETURN;
    END LOOP;
    RAISE EXCEPTION 'the identity of the message comes and goes' USING ERRCODE = 'serialization_failure';
END $$;

-- Which of these handlers have no delivery of a message, under any of their ids.
CREATE FUNCTION inbox_without_delivery(message_seq bigint, handler_ids smallint[]) RETURNS smallint[]
LANGUAGE sql VOLATILE SET enable_seqscan = off SET jit = off AS $$
    SELECT coalesce(array_agg(w.id), '{}') FROM unnest($2) AS w (id)
    WHERE (SELECT true FROM inbox_handler own
           JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
           CROSS JOIN LATERAL (SELECT 1 FROM inbox_delivery d WHERE d.message_seq = $1 AND d.handler_id = same.id LIMIT 1) d
           WHERE own.id = w.id LIMIT 1) IS NULL
$$;

-- Accepts a message from any client, in the transaction that calls it: the message and its deliveries appear with the caller's own writes, or not at all.
-- It is delivered to every handler that a process has registered for the topic. `headers` is a JSON object of texts; `source` is the topic where it is not given.
-- Returns `accepted`, `duplicate`, or `unwanted` when the handlers of the topic want other CloudEvents types. Processes find it at their next poll.
--   WH003  the identity belongs to a message with another payload.
--   WH004  no process has registered a handler for the topic.
--   0A000  only a process can tell when or in which order a handler is due: use inbox.accept_in.
CREATE FUNCTION inbox_accept(topic text, message_id text, payload bytea, source text DEFAULT NULL, record_key bytea DEFAULT NULL,
                             headers json DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    event_type text;
    is_structured boolean;
    wanted record;
    accepted record;
BEGIN
    IF NOT coalesce(length($2) BETWEEN 1 AND 200 AND length(coalesce($4, $1)) BETWEEN 1 AND 200, false) THEN
        RAISE EXCEPTION 'a message id, and a source, has 1 to 200 characters' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF json_typeof($6) <> 'object' THEN
        RAISE EXCEPTION 'headers are a JSON object, such as {"ce_type": "placed"}' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- The first header of a name counts.
    SELECT (array_agg(h.value ORDER BY h.ordinal) FILTER (WHERE h.name = 'ce_type'))[1],
           lower(split_part((array_agg(h.value ORDER BY h.ordinal) FILTER (WHERE h.name = 'content-type'))[1], ';', 1)) LIKE '%application/cloudevents+json%'
    INTO event_type, is_structured
    FROM json_each_text($6) WITH ORDINALITY AS h (name, value, ordinal);
    SELECT count(*) AS known, bool_or(s.event_types IS NOT NULL) AS is_type_asked_for, coalesce(array_agg(s.handler_id) FILTER (WHERE s.fits), '{}') AS handler_ids,
           coalesce(array_agg(s.order_hash) FILTER (WHERE s.fits), '{}') AS order_hashes, coalesce(array_agg(s.delay_ms) FILTER (WHERE s.fits), '{}') AS delays_ms,
           min(s.key) FILTER (WHERE s.fits AND (s.order_by = 'process' OR s.is_delayed_by_header)) AS unable
    INTO wanted
    FROM (SELECT u.*, h.key, u.event_types IS NULL OR event_type = ANY (u.event_types) AS fits,
                 CASE u.order_by WHEN 'record key' THEN inbox_order_hash($5)
                                 WHEN 'header' THEN (SELECT inbox_order_hash(convert_to(j.value, 'UTF8')) FROM json_each_text($6) WITH ORDINALITY AS j (name, value, ordinal)
                                                     WHERE j.name = u.order_header ORDER BY j.ordinal LIMIT 1) END AS order_hash,
                 EXISTS (SELECT 1 FROM json_each_text($6) AS j (name, value) WHERE j.name = u.delay_header) AS is_delayed_by_header
          FROM inbox_subscription u JOIN inbox_handler h ON h.id = u.handler_id WHERE u.topic = $1) s;
    IF wanted.known = 0 THEN
        RAISE EXCEPTION 'no handler is registered for topic %', quote_literal($1)
            USING ERRCODE = 'WH004', HINT = 'A process registers its handlers when it starts. SELECT topic FROM inbox_subscription tells which there are.';
    END IF;
    IF wanted.is_type_asked_for AND is_structured THEN
        RAISE EXCEPTION 'the type of a structured CloudEvent can be read by a process only'
            USING ERRCODE = 'feature_not_supported', HINT = 'Pass the type as header ce_type, or use inbox.accept_in.';
    END IF;
    IF wanted.unable IS NOT NULL THEN
        RAISE EXCEPTION 'when, or in which order, handler % is due can be told by a process only', wanted.unable
            USING ERRCODE = 'feature_not_supported', HINT = 'Use inbox.accept_in or inbox.accept.';
    END IF;
    IF wanted.handler_ids = '{}' THEN
        RETURN 'unwanted';
    END IF;
    SELECT a.* INTO accepted FROM inbox_accept_prepared(
        current_schema(), $2, coalesce($4, $1), $1, substring(sha256(CASE WHEN $3 IS NULL THEN '\x00'::bytea ELSE '\x01'::bytea || $3 END) FOR 16),
        NULL, NULL, NULL, $5, inbox_encode_headers($6), $3, wanted.handler_ids, wanted.order_hashes, wanted.delays_ms, NULL) a;
    IF accepted.became = 'conflict' THEN
        RAISE EXCEPTION 'the identity of the message belongs to a message with another payload' USING ERRCODE = 'WH003';
    END IF;
    RETURN accepted.became;
END $$;

-- The same with JSON as payload, stored as it is written.
CREATE FUNCTION inbox_accept_json(topic text, message_id text, payload json, source text DEFAULT NULL, record_key bytea DEFAULT NULL,
                                  headers json DEFAULT NULL) RETURNS text
LANGUAGE sql SECURITY DEFINER AS $$
    SELECT inbox_accept($1, $2, convert_to($3::text, 'UTF8'), $4, $5, $6)
$$;

-- Ends the subscriptions of a handler that is gone for good: inbox_accept makes no more deliveries for it. A process that has the handler registers it anew.
-- Returns how many topics it had.
CREATE FUNCTION inbox_unsubscribe(handler_key text, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    PERFORM inbox_check_handler_key($1);
    DELETE FROM inbox_subscription s WHERE $1 IS NOT NULL AND s.handler_id = ANY (inbox_handler_ids($1));
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected, because, actor) VALUES ('unsubscribe', jsonb_build_object('handler_key', $1), changed, $2, $3);
    RETURN changed;
END $$;

-- The outbox: records that are sent to Kafka after the transaction that stored them has committed.

-- One record to send. A relay reads a slot's waiting records in the order of id, and marks them when the broker has acknowledged them.
CREATE TABLE inbox_outbox (
    id              bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY, -- mark, replay, discard
    stored_at       timestamptz NOT NULL DEFAULT now(),
    finished_at     timestamptz,                     -- when it was acknowledged, poisoned or discarded
    recorded_at     timestamptz,                     -- the record's own time, if the publisher gave one
    kafka_offset    bigint,                          -- where the broker put it
    kafka_partition integer,
    slot            smallint    NOT NULL,            -- inbox_outbox_slot(record_key): records of one key are in one slot
    status          smallint    NOT NULL DEFAULT 0,  -- 0 waiting, 2 sent, 3 poisoned, 4 discarded
    replays         smallint    NOT NULL DEFAULT 0,  -- how often a person had it sent again
    message_id      text COLLATE "C" NOT NULL,       -- its id (header ce_id), the same each time it is sent
    source          text COLLATE "C" NOT NULL,       -- header ce_source
    topic           text COLLATE "C" NOT NULL,
    record_key      bytea,
    headers         bytea,                           -- as they are sent; read with inbox_headers(headers)
    payload         bytea,
    reason          text,                            -- why it was poisoned or discarded
    last_error      text,
    -- The id while the record waits. A column of its own, so that no other index has the order in which a relay reads.
    waiting         bigint      GENERATED ALWAYS AS (CASE WHEN status = 0 THEN id END) STORED
) WITH (
    -- Every record is inserted, updated once and deleted: vacuum by count, not by share.
    autovacuum_vacuum_scale_factor = 0,  autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);
-- What a relay reads: the waiting records of a slot, in order. Sent records are not in it.
CREATE INDEX inbox_outbox_waiting ON inbox_outbox (slot, waiting) WHERE waiting IS NOT NULL;
-- Purging sent and discarded records, the oldest first.
CREATE INDEX inbox_outbox_finished ON inbox_outbox (finished_at) WHERE status IN (2, 4);
-- Listing poisoned records, the oldest first. Almost always empty.
CREATE INDEX inbox_outbox_poisoned ON inbox_outbox (finished_at, id) WHERE status = 3;

-- The slots, and the relay that holds each of them. Whoever holds a slot sends its records; nobody else does.
CREATE TABLE inbox_outbox_slots (
    slot       smallint    PRIMARY KEY,
    holder     integer,                              -- inbox_relay.id
    held_until timestamptz
) WITH (fillfactor = 10);
INSERT INTO inbox_outbox_slots (slot) SELECT generate_series(0, 15);

-- Processes that send records, each of them every few seconds. The row of a process that was asked to end is removed.
CREATE TABLE inbox_relay (
    id            integer     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name          text        NOT NULL,              -- host and process id
    started_at    timestamptz NOT NULL DEFAULT now(),
    seen_at       timestamptz NOT NULL DEFAULT now(),
    alive_until   timestamptz NOT NULL,
    trouble_since timestamptz,
    trouble       text                               -- what keeps it from sending: no broker, a topic that does not exist
) WITH (fillfactor = 50);

-- The slot of a record: the same for every record of a key, any slot for records without a key.
CREATE FUNCTION inbox_outbox_slot(record_key bytea) RETURNS smallint
LANGUAGE sql VOLATILE PARALLEL RESTRICTED
RETURN CASE WHEN record_key IS NULL THEN floor(random() * 16) ELSE get_byte(sha256(record_key), 0) & 15 END::smallint;

-- One header in the form in which headers are stored; nothing when the name is NULL.
CREATE FUNCTION inbox_header(name text, value text) RETURNS bytea
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN name IS NULL THEN ''::bytea
            ELSE int4send(octet_length(convert_to(name, 'UTF8'))) || convert_to(name, 'UTF8')
              || CASE WHEN value IS NULL THEN int4send(-1)
                      ELSE int4send(octet_length(convert_to(value, 'UTF8'))) || convert_to(value, 'UTF8') END END;

-- Stores a record that is sent to Kafka when the caller's transaction has committed. Returns its id in inbox_outbox.
-- `headers` is a JSON object of texts. The record is sent with the CloudEvents headers ce_id (message_id, or a random UUID), ce_source (source, or
-- wharf), ce_type (the topic, unless `headers` has one) and ce_specversion. `origin_id` and `origin_source` name the message that the record comes
-- from: they are sent as wharf_origin_id and wharf_origin_source, and the message's traceparent and tracestate are copied.
-- Records of one key are sent in the order of their ids: that is the order of commits for transactions of which each stores its record after the
-- one before has committed, because they lock the same row first, say.
CREATE FUNCTION inbox_publish(topic text, payload bytea, record_key bytea DEFAULT NULL, headers jsonb DEFAULT NULL, message_id text DEFAULT NULL,
                              source text DEFAULT NULL, origin_id text DEFAULT NULL, origin_source text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    own_id text := coalesce(message_id, headers ->> 'ce_id', gen_random_uuid()::text);
    own_source text := coalesce(source, headers ->> 'ce_source', 'wharf');
    encoded bytea;
    stored bigint;
BEGIN
    IF topic IS NULL OR topic !~ '^[A-Za-z0-9._-]{1,249}$' THEN
        RAISE EXCEPTION 'a topic has 1 to 249 of A-Z a-z 0-9 . _ -';
    END IF;
    IF headers IS NOT NULL AND jsonb_typeof(headers) <> 'object' THEN
        RAISE EXCEPTION 'headers are a JSON object, such as {"ce_type": "order.placed"}';
    END IF;
    -- A transaction number is drawn before the id is: so whoever sees a record can tell which transactions may still store one before it.
    PERFORM pg_current_xact_id();
    encoded := inbox_header('ce_specversion', '1.0') || inbox_header('ce_id', own_id) || inbox_header('ce_source', own_source)
            || inbox_header('ce_type', coalesce(headers ->> 'ce_type', topic))
            || inbox_header(CASE WHEN origin_id IS NOT NULL THEN 'wharf_origin_id' END, origin_id)
            || inbox_header(CASE WHEN origin_source IS NOT NULL THEN 'wharf_origin_source' END, origin_source)
            || coalesce((SELECT string_agg(inbox_header(h.name, inbox_text(h.value)), ''::bytea ORDER BY h.ordinal)
                         FROM (SELECT DISTINCT ON (i.name) inbox_text(i.name) AS name, i.value, i.ordinal
                               FROM (SELECT m.headers FROM inbox_message m
                                     WHERE m.message_id = $7 AND ($8 IS NULL OR m.source = $8) LIMIT 1) origin
                               CROSS JOIN LATERAL inbox_headers(origin.headers) i
                               WHERE i.name IN ('traceparent', 'tracestate') AND NOT coalesce($4 ? inbox_text(i.name), false)
                               ORDER BY i.name, i.ordinal) h), ''::bytea)
            || coalesce((SELECT string_agg(inbox_header(e.key, e.value), ''::bytea) FROM jsonb_each_text($4) e
                         WHERE e.key NOT IN ('ce_specversion', 'ce_id', 'ce_source', 'ce_type')), ''::bytea);
    INSERT INTO inbox_outbox (slot, message_id, source, topic, record_key, headers, payload)
    VALUES (inbox_outbox_slot($3), own_id, own_source, $1, $3, encoded, $2)
    RETURNING id INTO stored;
    RETURN stored;
END $$;

-- The outbox in words.
CREATE VIEW inbox_outgoing AS
SELECT o.id, o.topic,
       CASE o.status WHEN 0 THEN 'waiting' WHEN 2 THEN 'sent' WHEN 3 THEN 'poisoned' WHEN 4 THEN 'discarded' END AS state,
       o.reason, o.last_error, o.message_id, o.source, inbox_text(o.record_key) AS record_key, o.stored_at, o.finished_at, o.replays,
       o.kafka_partition, o.kafka_offset, octet_length(o.payload) AS payload_bytes, o.slot, r.name AS relay,
       inbox_text(o.payload) AS payload
FROM inbox_outbox o
LEFT JOIN inbox_outbox_slots s ON s.slot = o.slot AND s.held_until > now()
LEFT JOIN inbox_relay r ON r.id = s.holder;

-- Whether a filter means a record of the outbox, but for its id and state.
CREATE FUNCTION inbox_is_outgoing_meant(filter jsonb, topic text, message_id text, reason text, error text, stored_at timestamptz) RETURNS boolean
LANGUAGE sql STABLE
RETURN ($1 ->> 'topic' IS NULL OR $2 = $1 ->> 'topic')
   AND ($1 ->> 'message_id' IS NULL OR $3 = $1 ->> 'message_id')
   AND ($1 ->> 'reason' IS NULL OR $4 = $1 ->> 'reason')
   AND ($1 ->> 'error' IS NULL OR position(lower($1 ->> 'error') IN lower($5)) > 0)
   AND ($1 ->> 'older_than' IS NULL OR $6 < now() - ($1 ->> 'older_than')::interval)
   AND ($1 ->> 'newer_than' IS NULL OR $6 >= now() - ($1 ->> 'newer_than')::interval);

-- The records of the outbox that a filter means: {"id", "state" (waiting, sent, poisoned, discarded), "topic", "message_id", "reason", "error" (a part of
-- it), "older_than", "newer_than" (intervals, of when they were stored), "all": true}. Without an id or a state, those that are poisoned, the oldest
-- first. A replay takes only those that are not waiting, and to discard only those that are waiting or poisoned.
CREATE FUNCTION inbox_outbox_matching(filter jsonb, row_limit integer DEFAULT 1000, action text DEFAULT 'show') RETURNS SETOF bigint
LANGUAGE plpgsql STABLE SET enable_seqscan = off AS $$
DECLARE
    wanted smallint[];
BEGIN
    PERFORM inbox_check_filter(filter, '{id, state, topic, message_id, reason, error, older_than, newer_than}');
    wanted := CASE filter ->> 'state' WHEN 'waiting' THEN '{0}' WHEN 'sent' THEN '{2}' WHEN 'poisoned' THEN '{3}' WHEN 'discarded' THEN '{4}' END;
    IF wanted IS NULL AND filter ? 'state' THEN
        RAISE EXCEPTION 'a record of the outbox is not %', filter ->> 'state' USING HINT = 'It is waiting, sent, poisoned or discarded.';
    END IF;
    wanted := coalesce(wanted, CASE WHEN filter ? 'id' THEN '{0, 2, 3, 4}' ELSE '{3}' END::smallint[]);
    wanted := ARRAY(SELECT w.status FROM unnest(wanted) AS w (status)
                    WHERE CASE action WHEN 'replay' THEN w.status <> 0 WHEN 'discard' THEN w.status IN (0, 3) ELSE true END);
    IF filter ? 'id' THEN
        RETURN QUERY SELECT o.id FROM inbox_outbox o
        WHERE o.id = (filter ->> 'id')::bigint AND o.status = ANY (wanted)
          AND inbox_is_outgoing_meant(filter, o.topic, o.message_id, o.reason, o.last_error, o.stored_at);
    ELSIF wanted = '{3}' THEN
        RETURN QUERY SELECT o.id FROM inbox_outbox o
        WHERE o.status = 3 AND inbox_is_outgoing_meant(filter, o.topic, o.message_id, o.reason, o.last_error, o.stored_at)
        ORDER BY o.finished_at, o.id LIMIT row_limit;
    ELSIF wanted = '{0}' THEN
        RETURN QUERY SELECT o.id FROM inbox_outbox o
        WHERE o.waiting IS NOT NULL AND inbox_is_outgoing_meant(filter, o.topic, o.message_id, o.reason, o.last_error, o.stored_at)
        ORDER BY o.waiting LIMIT row_limit;
    ELSE
        RETURN QUERY SELECT o.id FROM inbox_outbox o
        WHERE o.status = ANY (wanted) AND inbox_is_outgoing_meant(filter, o.topic, o.message_id, o.reason, o.last_error, o.stored_at)
        ORDER BY o.id DESC LIMIT row_limit;
    END IF;
END $$;

-- Sends records of the outbox again, with the same ids: those that are poisoned; by id or state also those that were sent or discarded. They come
-- behind what was sent of their key since.
CREATE FUNCTION inbox_outbox_replay(filter jsonb, row_limit integer DEFAULT 1000, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    UPDATE inbox_outbox o
    SET status = 0, finished_at = NULL, reason = NULL, kafka_partition = NULL, kafka_offset = NULL, replays = least(o.replays + 1, 32767)
    WHERE o.id = ANY (ARRAY(SELECT inbox_outbox_matching(inbox_outbox_replay.filter, row_limit, 'replay'))) AND o.status IN (2, 3, 4);
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('replay outgoing', inbox_outbox_replay.filter, changed, inbox_outbox_replay.because, inbox_outbox_replay.actor);
    RETURN changed;
END $$;

-- Gives up records of the outbox for good: those that are poisoned; by id or state also those that wait. A record that is on its way at
-- this moment may be sent all the same.
CREATE FUNCTION inbox_outbox_discard(filter jsonb, row_limit integer DEFAULT 1000, because text DEFAULT NULL, actor text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    changed bigint;
BEGIN
    UPDATE inbox_outbox o SET status = 4, finished_at = now(), reason = coalesce(inbox_outbox_discard.because, 'by a person')
    WHERE o.id = ANY (ARRAY(SELECT inbox_outbox_matching(inbox_outbox_discard.filter, row_limit, 'discard'))) AND o.status IN (0, 3);
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected, because, actor)
    VALUES ('discard outgoing', inbox_outbox_discard.filter, changed, inbox_outbox_discard.because, inbox_outbox_discard.actor);
    RETURN changed;
END $$;

-- Dead letters, and calls for poisoned deliveries.

-- The topics to which the poisoned deliveries of a handler are published, as the newest registration says.
CREATE TABLE inbox_dead_letter (
    handler_id smallint NOT NULL,
    reason     text     NOT NULL,                    -- '': every reason without a row of its own
    topic      text     NOT NULL,
    PRIMARY KEY (handler_id, reason)
);

-- Calls of the function that a service has for poisoned deliveries. A row stays until the function has returned without an error.
CREATE TABLE inbox_poison_call (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    poisoned_at  timestamptz NOT NULL DEFAULT now(),
    due_at       timestamptz NOT NULL DEFAULT now(), -- also the end of the lease of the process that calls
    message_seq  bigint      NOT NULL,
    attempts     integer     NOT NULL,
    handler_id   smallint    NOT NULL,
    calls        integer     NOT NULL DEFAULT 0,     -- how often the function was called
    reason       text,
    error        text
) WITH (fillfactor = 50);
-- The calls that are due, the longest due first.
CREATE INDEX inbox_poison_call_due ON inbox_poison_call (due_at, id);

-- Publishes a delivery that was poisoned, or is not any more, to the dead-letter topic of its handler, and asks for the call of the service's function.
-- A trigger, so that no statement that poisons can forget it, and in its transaction.
-- A dead letter has the record's key, payload (the one that the handler was given) and headers; its identity is its own, and where it comes from is in
-- headers of ours. Replaying, discarding or returning a delivery is told by a record that has a short JSON text as its payload.
CREATE FUNCTION inbox_bury() RETURNS trigger
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
        -- The identity of the record is not the letter's: two handlers may have poisoned it. What was a structured CloudEvent is not one here.
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

CREATE TRIGGER inbox_bury_poisoned AFTER UPDATE OF status ON inbox_delivery FOR EACH ROW
WHEN ((OLD.status = 3) <> (NEW.status = 3))
EXECUTE FUNCTION inbox_bury();

-- Binds every function above to the schema of this inbox, so that none of them reads or changes the inbox of another schema, whatever the
-- caller's search_path is. pg_temp is last, so that a caller's temporary table is never taken for one of ours. Functions with a body
-- that PostgreSQL parsed when they were created (RETURN …) are bound by that, and can still be inlined.
-- Nobody but the owner may call an action until it is granted.
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
