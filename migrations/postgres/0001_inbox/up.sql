-- The inbox: messages, deliveries, and what stands around them.
--
-- Names are not schema-qualified: the tables live in the first schema of the connection's search_path, so two inboxes can
-- share one database. All stamps are this database's clock.

-- A key is an alias of a handler id. A renamed handler keeps its id, so what was stored under the old name is found, and a
-- redelivery after the rename is still a duplicate.
CREATE TABLE inbox_handler (
    id            smallint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key           text        NOT NULL,              -- the current name, for people; the mapping is inbox_handler_key
    same_as       smallint,                          -- set when two ids became one handler: the id of its current key
    paused_at     timestamptz,                       -- not null: nobody claims its deliveries
    unknown_since timestamptz,                       -- since when deliveries wait and no live processor knows the handler
    registered_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE inbox_handler_key (
    key        text     PRIMARY KEY,
    handler_id smallint NOT NULL
);

-- Accepted records. Insert-only until retention removes them.
CREATE SEQUENCE inbox_message_seq AS bigint CACHE 1;
CREATE TABLE inbox_message (
    seq             bigint      PRIMARY KEY DEFAULT nextval('inbox_message_seq'),
    kafka_offset    bigint,
    received_at     timestamptz NOT NULL DEFAULT now(),
    recorded_at     timestamptz,                     -- stamped by the producer or the broker
    kafka_partition integer,
    message_id      text        NOT NULL,
    source          text        NOT NULL,
    topic           text        NOT NULL,
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
    due_at       timestamptz NOT NULL,
    locked_until timestamptz,                        -- the claim's end; past and not NULL: its process died. Not indexed
    finished_at  timestamptz,                        -- set for done, discarded and poisoned: leaves the claim index
    locked_by    integer,                            -- inbox_processor.id
    attempts     integer     NOT NULL DEFAULT 0,     -- starts. Only ever grows: it is the claim's fencing token
    errors       integer     NOT NULL DEFAULT 0,     -- failures charged against the retry limit
    crashes      integer     NOT NULL DEFAULT 0,     -- process deaths in a row; reset by any outcome
    handler_id   smallint    NOT NULL,
    status       smallint    NOT NULL DEFAULT 0,     -- 0 open, 2 done, 3 poisoned, 4 discarded
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
-- Listing poisoned deliveries without a scan. Rows enter it only when they are given up.
CREATE INDEX inbox_delivery_poisoned ON inbox_delivery (handler_id, finished_at) WHERE status = 3;

-- Per consumer group, topic and partition: the next offset to accept, written in the transaction that accepts.
CREATE TABLE inbox_ledger (
    consumer_group  text        NOT NULL,
    topic           text        NOT NULL,
    kafka_partition integer     NOT NULL,
    next_offset     bigint      NOT NULL,
    updated_at      timestamptz NOT NULL DEFAULT now(),
    topic_id        text,                            -- Kafka's own: a topic that is made anew has another
    PRIMARY KEY (consumer_group, topic, kafka_partition)
) WITH (fillfactor = 50);

-- Records that Kafka no longer had when they were to be read. A gap is noted once.
CREATE TABLE inbox_gap (
    consumer_group  text        NOT NULL,
    topic           text        NOT NULL,
    kafka_partition integer     NOT NULL,
    from_offset     bigint      NOT NULL,            -- the first that is missing
    to_offset       bigint      NOT NULL,            -- the first that was there
    noticed_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_group, topic, kafka_partition, from_offset, to_offset)
);

-- Records that could not become messages, kept whole.
CREATE TABLE inbox_quarantine (
    id              bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    quarantined_at  timestamptz NOT NULL DEFAULT now(),
    kafka_offset    bigint,
    recorded_at     timestamptz,
    kafka_partition integer,
    topic           text        NOT NULL,
    reason          text        NOT NULL,
    detail          text,
    message_id      bytea,                           -- the identity as given: it may be what is wrong with the record
    source          bytea,
    record_key      bytea,
    headers         bytea,
    payload         bytea,
    -- Over position, identity and content: a record that is redelivered is quarantined once.
    record_hash     bytea       NOT NULL UNIQUE
);

-- Who is alive and which handlers it knows.
CREATE TABLE inbox_processor (
    id          integer     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text        NOT NULL,
    version     text        NOT NULL,
    handler_ids smallint[]  NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT now(),
    seen_at     timestamptz NOT NULL DEFAULT now(),
    alive_until timestamptz NOT NULL
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

-- One row for each act of a person. Append-only.
CREATE TABLE inbox_audit (
    id       bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    acted_at timestamptz NOT NULL DEFAULT now(),
    actor    text        NOT NULL DEFAULT session_user,
    action   text        NOT NULL,
    filter   jsonb       NOT NULL,
    affected bigint      NOT NULL,
    reason   text
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

-- Every delivery in words.
CREATE VIEW inbox_status AS
SELECT m.message_id, m.source, m.topic, h.key AS handler_key,
       CASE d.status
           WHEN 0 THEN CASE WHEN d.locked_until > now() THEN 'running' ELSE 'pending' END
           WHEN 2 THEN 'done'
           WHEN 3 THEN 'poisoned'
           WHEN 4 THEN 'discarded'
       END AS state,
       d.reason, d.attempts, d.errors, d.crashes, d.due_at, d.locked_until, p.name AS locked_by, d.finished_at,
       now() - m.received_at AS age, m.received_at, d.last_error, d.message_seq, d.handler_id
FROM inbox_delivery d
LEFT JOIN inbox_message m ON m.seq = d.message_seq
LEFT JOIN inbox_handler h ON h.id = d.handler_id
LEFT JOIN inbox_processor p ON p.id = d.locked_by;

-- What the machine gave up and a person must look at.
CREATE VIEW inbox_poisoned AS
SELECT m.message_id, m.source, m.topic, h.key AS handler_key, d.reason, d.last_error, d.attempts, d.errors, d.crashes,
       d.finished_at AS poisoned_at, m.received_at, m.kafka_partition, m.kafka_offset,
       inbox_text(m.record_key) AS record_key, inbox_text(m.payload) AS payload, d.message_seq, d.handler_id
FROM inbox_delivery d
LEFT JOIN inbox_message m ON m.seq = d.message_seq
LEFT JOIN inbox_handler h ON h.id = d.handler_id
WHERE d.status = 3;

-- What is still to be done, per handler.
CREATE VIEW inbox_backlog AS
SELECT h.key AS handler_key,
       count(*) FILTER (WHERE d.due_at <= now() AND (d.locked_until IS NULL OR d.locked_until <= now())) AS due,
       count(*) FILTER (WHERE d.due_at > now()) AS later,
       count(*) FILTER (WHERE d.locked_until > now()) AS running,
       now() - min(d.due_at) FILTER (WHERE d.due_at <= now()) AS oldest_due_age,
       h.paused_at, h.unknown_since, h.id AS handler_id
FROM inbox_handler h
LEFT JOIN inbox_delivery d ON d.handler_id = h.id AND d.finished_at IS NULL
GROUP BY h.id;

-- Gives a poisoned or discarded delivery a fresh set of retries, due now. Returns how many were changed: 0 when there is no
-- such delivery or it is not given up. The attempt number goes on, so that a claim from before the replay stays invalid.
CREATE FUNCTION inbox_replay(message_id text, handler_key text, source text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql
-- The inbox it was made for, whatever the caller's search_path is.
SET search_path FROM CURRENT AS $$
DECLARE
    changed bigint;
BEGIN
    UPDATE inbox_delivery d
    SET status = 0, due_at = now(), finished_at = NULL, errors = 0, crashes = 0, reason = NULL,
        locked_until = NULL, locked_by = NULL
    FROM inbox_message m, inbox_handler_key k, inbox_handler own, inbox_handler same
    WHERE m.message_id = inbox_replay.message_id
      AND m.source = coalesce(inbox_replay.source, m.source)
      AND k.key = inbox_replay.handler_key
      -- Ids that became one handler are one.
      AND own.id = k.handler_id AND coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
      AND d.message_seq = m.seq AND d.handler_id = same.id
      AND d.status IN (3, 4);
    GET DIAGNOSTICS changed = ROW_COUNT;
    INSERT INTO inbox_audit (action, filter, affected)
    VALUES ('replay', jsonb_build_object('message_id', inbox_replay.message_id, 'source', inbox_replay.source,
                                         'handler_key', inbox_replay.handler_key), changed);
    RETURN changed;
END $$;
