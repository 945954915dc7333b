-- The schema of the inbox: messages, deliveries, the ledger, the quarantine, the outbox, and the views for operators.
-- Tables and columns are the same as in PostgreSQL; comments explain the differences.
--
-- All timestamps are integers: microseconds since 1970 UTC, from the clock in inbox_now. The views show them as text.
-- Bytes are stored as TEXT if they are UTF-8 without NUL, else as BLOB: the sqlite3 shell and the JSON functions can
-- read them directly, and no view reads invalid text. AUTOINCREMENT: an id is never reused, even after its row is
-- deleted.

-- The clock. SQLite has none of its own, so it is the host's clock plus an offset that only tests change.
CREATE TABLE inbox_clock (
    offset_us INTEGER NOT NULL
);
INSERT INTO inbox_clock VALUES (0);
-- julianday is exact to a millisecond, and old shells support it.
CREATE VIEW inbox_now AS
SELECT CAST((julianday('now') - 2440587.5) * 86400000 + 0.5 AS INTEGER) * 1000 + offset_us AS at FROM inbox_clock;

-- A key is an alias of a handler id. A renamed handler keeps its id, so its stored deliveries are still found, and a
-- redelivery after the rename is still a duplicate.
CREATE TABLE inbox_handler (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    key           TEXT    NOT NULL,                  -- the current name, for people; the mapping is inbox_handler_key
    same_as       INTEGER,                           -- set on each id of a handler with several: its current id
    paused_at     INTEGER,                           -- not null: the handler is paused; no process claims its deliveries
    unknown_since INTEGER,                           -- since when its deliveries wait and no live processor has the handler
    registered_at INTEGER NOT NULL,
    -- Copied from the newest registration.
    is_ordered      INTEGER NOT NULL DEFAULT 0,      -- deliveries of one key run one at a time, in accept order
    passes_poisoned INTEGER NOT NULL DEFAULT 0,      -- a poisoned delivery does not hold its key
    is_fair         INTEGER NOT NULL DEFAULT 0,      -- deliveries take turns by tenant
    calls_on_poison INTEGER NOT NULL DEFAULT 0,      -- a function of the service is called for each poisoned delivery
    -- The circuit breaker. The open state is written to every id of the handler, the probe only to the lowest id.
    breaker_opened_at   INTEGER,                     -- not null: the breaker is open; only one probe at a time is claimed
    breaker_error       TEXT,                        -- the error that opened it
    breaker_probe_at    INTEGER,                     -- the time of the next probe
    breaker_probe_until INTEGER,                     -- the end of the lease of the process that probes
    breaker_probe_no    INTEGER NOT NULL DEFAULT 0,  -- fencing token of the probe: a process with an older number changes nothing
    -- The rate limit over all processes. The settings are written to every id of the handler. Claims read the lowest id,
    -- and take from its rate_next_at.
    rate_interval_us       INTEGER,                  -- average time between two starts; NULL: no limit
    rate_burst             INTEGER,                  -- maximum number of starts at once
    rate_next_at           INTEGER,                  -- scheduled time of the next start; written by claims
    rate_is_set            INTEGER NOT NULL DEFAULT 0, -- an operator set the limit; it overrides the registration
    registered_interval_us INTEGER,                  -- copied from the newest registration
    registered_burst       INTEGER
);

-- Every key that a handler has or had. Keys are never removed, so that an old build finds its handler.
CREATE TABLE inbox_handler_key (
    key        TEXT    PRIMARY KEY,
    handler_id INTEGER NOT NULL
) WITHOUT ROWID;

-- Accepted records. Rows are only inserted, until retention deletes them.
CREATE TABLE inbox_message (
    seq             INTEGER PRIMARY KEY AUTOINCREMENT,
    kafka_offset    INTEGER,
    received_at     INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 + 0.5 AS INTEGER) * 1000),
    recorded_at     INTEGER,                         -- the timestamp that the producer or the broker set
    kafka_partition INTEGER,
    message_id      TEXT    NOT NULL,
    source          TEXT    NOT NULL,
    topic           TEXT    NOT NULL,
    payload_hash    BLOB    NOT NULL,                -- first 16 bytes of SHA-256; distinguishes a duplicate from a conflict
    record_key      BLOB,
    headers         BLOB,                            -- read with the view inbox_headers
    payload         BLOB,                            -- NULL (tombstone) is not the same as empty
    -- Deduplication: used by ON CONFLICT in the accept statement, and by operators to find a message.
    UNIQUE (message_id, source)
);

-- One message for one handler: the unit of work. WITHOUT ROWID: the table is one tree in the order of its key, which is
-- the order of arrival.
CREATE TABLE inbox_delivery (
    message_seq  INTEGER NOT NULL,
    handler_id   INTEGER NOT NULL,
    due_at       INTEGER NOT NULL,                   -- 9223372036854775807: held; it waits for another delivery of its key
    locked_until INTEGER,                            -- end of the lease; if past, the process crashed or is late. Not indexed
    finished_at  INTEGER,                            -- set when done, discarded or poisoned; the row then leaves the claim index
    locked_by    INTEGER,                            -- inbox_processor.id; 0 after an operator released the claim (inbox_release)
    attempts     INTEGER NOT NULL DEFAULT 0,         -- number of starts. It only grows: it is the fencing token of the claim
    errors       INTEGER NOT NULL DEFAULT 0,         -- failures that count against the retry budget
    crashes      INTEGER NOT NULL DEFAULT 0,         -- process crashes in a row; an answer of its handler resets it
    -- Runs in a row that failed because of the store (> 0), or of a dependency of the handler (< 0). Not indexed.
    store_errors INTEGER NOT NULL DEFAULT 0,
    status       INTEGER NOT NULL DEFAULT 0,         -- 0 open, 2 done, 3 poisoned, 4 discarded
    replays      INTEGER NOT NULL DEFAULT 0,         -- how often an operator reset its retries; inbox_history has the earlier results
    is_corrected INTEGER NOT NULL DEFAULT 0,         -- its handler receives the newest payload of inbox_correction
    reason       TEXT,                               -- why it was poisoned or discarded
    last_error   TEXT,
    order_hash   INTEGER,                            -- hash of the ordering key; NULL: unordered
    -- Hash of the tenant, 0 without one; NULL: stored before the handler was fair. It never changes.
    fair_hash    INTEGER,
    passed       INTEGER,                            -- true: it was poisoned and does not block its key
    PRIMARY KEY (message_seq, handler_id)            -- settle, renew, redelivery
) WITHOUT ROWID;

-- Used by the claim, in its exact order, and to find a handler's oldest due delivery. A claim writes no column of this
-- index.
CREATE INDEX inbox_delivery_due ON inbox_delivery (handler_id, due_at, message_seq) WHERE finished_at IS NULL;
-- Lists poisoned deliveries without a scan, the oldest first. Rows enter it only when they are poisoned.
CREATE INDEX inbox_delivery_poisoned ON inbox_delivery (handler_id, finished_at, message_seq) WHERE status = 3;
-- The deliveries that block a key: open ones, and poisoned ones that hold it. Deliveries that are not held come first,
-- then the held ones in accept order. Accept, the claims of ordered handlers and the triggers below each probe it once
-- per key.
CREATE INDEX inbox_delivery_order ON inbox_delivery (handler_id, order_hash, due_at, message_seq)
    WHERE order_hash IS NOT NULL AND (finished_at IS NULL OR status = 3 AND passed IS NULL);
-- The claim of fair handlers: from one tenant to the next, and the oldest delivery of each. A claim writes no column of
-- the index.
CREATE INDEX inbox_delivery_fair ON inbox_delivery (handler_id, fair_hash, due_at, message_seq)
    WHERE finished_at IS NULL AND fair_hash IS NOT NULL;
-- Deliveries poisoned as `unknown key`, for when a process has the key again. It is almost always empty.
CREATE INDEX inbox_delivery_parked ON inbox_delivery (handler_id, message_seq) WHERE status = 3 AND reason = 'unknown key';

-- The result of a delivery before an operator replayed or discarded it, or before it was returned. Deleted with its
-- message.
CREATE TABLE inbox_history (
    message_seq INTEGER NOT NULL,
    handler_id  INTEGER NOT NULL,
    audit_id    INTEGER NOT NULL,                    -- inbox_audit.id: who, when, why
    finished_at INTEGER,
    attempts    INTEGER NOT NULL,
    errors      INTEGER NOT NULL,
    crashes     INTEGER NOT NULL,
    status      INTEGER NOT NULL,
    reason      TEXT,
    last_error  TEXT,
    PRIMARY KEY (message_seq, handler_id, audit_id)  -- shown with its delivery, purged with its message
) WITHOUT ROWID;

-- The failures of attempts, written by the statement that settles them. A delivery has a bounded number of places:
-- attempt 1 keeps its own, later attempts, failed or not, reuse the others in turn. So the failures of attempt 1 and of
-- the newest attempts are kept. Deleted with its message.
CREATE TABLE inbox_attempt (
    message_seq INTEGER NOT NULL,
    handler_id  INTEGER NOT NULL,
    place       INTEGER NOT NULL,                    -- 0 for attempt 1
    attempt     INTEGER NOT NULL,                    -- inbox_delivery.attempts of that run
    failed_at   INTEGER NOT NULL,
    -- failed, timed out, panicked, unavailable, store error; or the reason for poisoning.
    why         TEXT    NOT NULL,
    error       TEXT,
    PRIMARY KEY (message_seq, handler_id, place)     -- settle, shown with its delivery, purged with its message
) WITHOUT ROWID;

-- Payloads that operators corrected for one handler, which receives the newest. The message itself never changes.
-- Deleted with its message.
CREATE TABLE inbox_correction (
    message_seq INTEGER NOT NULL,
    handler_id  INTEGER NOT NULL,
    audit_id    INTEGER NOT NULL,                    -- inbox_audit.id: who, when, why
    payload     BLOB    NOT NULL,
    PRIMARY KEY (message_seq, handler_id, audit_id)  -- claims of corrected deliveries, purged with its message
) WITHOUT ROWID;

-- The next offset to accept, per consumer group, cluster, topic and partition, written in the transaction that accepts.
-- An offset alone does not identify a record: the same offset holds another record in another cluster, in a recreated
-- topic, and after a truncation.
CREATE TABLE inbox_ledger (
    consumer_group  TEXT    NOT NULL,
    topic           TEXT    NOT NULL,
    kafka_partition INTEGER NOT NULL,
    next_offset     INTEGER NOT NULL,                -- -2: start at the first record that Kafka has
    updated_at      INTEGER NOT NULL,
    stopped_at      INTEGER,                         -- not null: the partition is not read until an operator resets or skips it
    leader_epoch    INTEGER,                         -- of the record before next_offset; NULL when unknown
    cluster_id      TEXT    NOT NULL DEFAULT '',     -- the cluster id that Kafka reports
    topic_id        TEXT,                            -- the topic id that Kafka reports; a recreated topic has a different one
    stopped_why     TEXT,
    PRIMARY KEY (consumer_group, cluster_id, topic, kafka_partition)
) WITHOUT ROWID;

-- Ranges of records that were never read: Kafka had deleted them, or an operator skipped them. Each gap is stored once.
CREATE TABLE inbox_gap (
    consumer_group  TEXT    NOT NULL,
    topic           TEXT    NOT NULL,
    kafka_partition INTEGER NOT NULL,
    from_offset     INTEGER NOT NULL,                -- the first missing offset
    to_offset       INTEGER NOT NULL,                -- the first offset after the gap
    noticed_at      INTEGER NOT NULL,
    cluster_id      TEXT    NOT NULL DEFAULT '',
    PRIMARY KEY (consumer_group, cluster_id, topic, kafka_partition, from_offset, to_offset)
) WITHOUT ROWID;

-- The state of each partition, written by the process that reads it: on each change, and once a minute. It is
-- informational; the ledger is authoritative.
CREATE TABLE inbox_partition (
    consumer_group  TEXT    NOT NULL,
    topic           TEXT    NOT NULL,
    kafka_partition INTEGER NOT NULL,
    cluster_id      TEXT    NOT NULL,
    state           TEXT    NOT NULL,                -- reading, waiting (for its position), blocked (records cannot be read), refused (by Kafka), stopped
    since           INTEGER NOT NULL,
    seen_at         INTEGER NOT NULL,
    -- Offsets that Kafka has and that are not stored, at seen_at, without transaction markers at the end of the log.
    lag             INTEGER,
    ingest          TEXT    NOT NULL,                -- inbox_ingest.name
    why             TEXT,
    PRIMARY KEY (consumer_group, cluster_id, topic, kafka_partition)
) WITHOUT ROWID;

-- Processes that read from Kafka: a row for each of their sources, written every few seconds. A process removes its
-- rows when it shuts down; the rows of a crashed one are removed after a day.
CREATE TABLE inbox_ingest (
    consumer_group TEXT    NOT NULL,
    name           TEXT    NOT NULL,                 -- host and process id
    cluster_id     TEXT    NOT NULL,                 -- empty until a broker has answered
    started_at     INTEGER NOT NULL,
    seen_at        INTEGER NOT NULL,
    problem_since  INTEGER,
    source         TEXT    NOT NULL DEFAULT '',      -- the source's name; the consumer group unless the service gives another
    problem        TEXT,                             -- why it cannot read: failed authentication, an unknown topic, no broker
    PRIMARY KEY (consumer_group, name, source)
) WITHOUT ROWID;

-- Records that could not become messages, with all their bytes.
CREATE TABLE inbox_quarantine (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    quarantined_at  INTEGER NOT NULL,
    kafka_offset    INTEGER,
    recorded_at     INTEGER,
    kafka_partition INTEGER,
    topic           TEXT    NOT NULL,
    cluster_id      TEXT,                            -- the Kafka cluster it was read from: part of an identity by position
    reason          TEXT    NOT NULL,
    detail          TEXT,
    message_id      BLOB,                            -- the identity as received: it may be the reason for the rejection
    source          BLOB,
    record_key      BLOB,
    headers         BLOB,
    payload         BLOB,
    -- A hash over position, identity and content: a redelivered record is quarantined once.
    record_hash     BLOB    NOT NULL UNIQUE,
    replay_asked_at INTEGER,                         -- not null: a process that knows the topic accepts it again
    replay_locked_until INTEGER,                     -- end of the lease of the process that replays it
    replays         INTEGER NOT NULL DEFAULT 0       -- number of failed replays
);
-- The few records with a requested replay; every process polls for them.
CREATE INDEX inbox_quarantine_asked ON inbox_quarantine (replay_asked_at) WHERE replay_asked_at IS NOT NULL;
-- Lists the records of a topic, the oldest first.
CREATE INDEX inbox_quarantine_topic ON inbox_quarantine (topic, id);

-- Processes, and the handlers that each of them has. A process removes its row when it shuts down; the row of a crashed
-- one is removed after a day.
CREATE TABLE inbox_processor (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    name        TEXT    NOT NULL,
    version     TEXT    NOT NULL,
    handler_ids TEXT    NOT NULL,                    -- a JSON array
    started_at  INTEGER NOT NULL,
    seen_at     INTEGER NOT NULL,
    alive_until INTEGER NOT NULL,                    -- moved by each heartbeat; if it is past, the process has crashed
    report      TEXT                                 -- JSON that the process reports: rates, intake, connections
);

-- What remains of a purged message if retention keeps identities: enough to recognize a late redelivery as a duplicate.
CREATE TABLE inbox_identity (
    hash      BLOB    PRIMARY KEY,                   -- 16 bytes of SHA-256 over id and source, each preceded by its length
    purged_at INTEGER NOT NULL,
    forget_at INTEGER NOT NULL
) WITHOUT ROWID;
-- Finds the identities to forget, oldest first.
CREATE INDEX inbox_identity_forget ON inbox_identity (forget_at);

-- Leases for work that only one process at a time does. Each step of the work takes or renews the lease; if the holder
-- crashes, it expires.
CREATE TABLE inbox_lease (
    name       TEXT    PRIMARY KEY,
    holder     INTEGER NOT NULL,
    held_until INTEGER NOT NULL
) WITHOUT ROWID;

-- How far retention has scanned, per set of periods: messages up to this seq were checked. Those that could not be
-- deleted are in inbox_kept.
CREATE TABLE inbox_retention (
    policy    INTEGER PRIMARY KEY,                   -- a hash of the periods: each set of periods scans on its own
    walked_to INTEGER NOT NULL,
    purged_at INTEGER NOT NULL
);

-- Blocks of 500 messages (seq / 500) that still hold a message, and when the first of these can be deleted. No purge
-- reads a block before that: the cost of a purge depends on the rows that it deletes, not on those that it keeps.
CREATE TABLE inbox_kept (
    policy   INTEGER NOT NULL,
    block    INTEGER NOT NULL,
    check_at INTEGER NOT NULL,
    PRIMARY KEY (policy, block)                      -- the blocks that are due, in order
) WITHOUT ROWID;

-- One row per operator action. Append-only.
CREATE TABLE inbox_audit (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    acted_at      INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 + 0.5 AS INTEGER) * 1000),
    database_user TEXT,                              -- always NULL: SQLite has no users
    actor         TEXT,                              -- the person, as reported by the tool
    action        TEXT    NOT NULL,
    filter        TEXT    NOT NULL,                  -- JSON
    affected      INTEGER NOT NULL,
    because       TEXT                               -- the reason that the person gave
);

-- Every delivery in readable form. Ages are in seconds.
CREATE VIEW inbox_status AS
SELECT m.message_id, m.source, m.topic, h.key AS handler_key,
       CASE d.status
           WHEN 0 THEN CASE WHEN d.locked_until > now.at THEN 'running' ELSE 'pending' END
           WHEN 2 THEN 'done'
           WHEN 3 THEN 'poisoned'
           WHEN 4 THEN 'discarded'
       END AS state,
       d.reason, d.attempts, d.errors, d.crashes, d.store_errors, d.replays, d.is_corrected,
       strftime('%Y-%m-%d %H:%M:%f', d.due_at / 1e6, 'unixepoch') AS due_at,
       strftime('%Y-%m-%d %H:%M:%f', d.locked_until / 1e6, 'unixepoch') AS locked_until, p.name AS locked_by,
       p.alive_until > now.at AS owner_is_alive,
       strftime('%Y-%m-%d %H:%M:%f', d.finished_at / 1e6, 'unixepoch') AS finished_at,
       (now.at - m.received_at) / 1e6 AS age, strftime('%Y-%m-%d %H:%M:%f', m.received_at / 1e6, 'unixepoch') AS received_at,
       d.last_error, d.message_seq, d.handler_id
FROM inbox_delivery d
CROSS JOIN inbox_now now
LEFT JOIN inbox_message m ON m.seq = d.message_seq
LEFT JOIN inbox_handler h ON h.id = d.handler_id
LEFT JOIN inbox_processor p ON p.id = d.locked_by;

-- Deliveries that the engine gave up and that an operator must look at. Bytes that are not text are shown as hex
-- (\x...).
CREATE VIEW inbox_poisoned AS
SELECT m.message_id, m.source, m.topic, h.key AS handler_key, d.reason, d.last_error, d.attempts, d.errors, d.crashes, d.replays,
       strftime('%Y-%m-%d %H:%M:%f', d.finished_at / 1e6, 'unixepoch') AS poisoned_at,
       strftime('%Y-%m-%d %H:%M:%f', m.received_at / 1e6, 'unixepoch') AS received_at, m.kafka_partition, m.kafka_offset,
       CASE typeof(m.record_key) WHEN 'blob' THEN '\x' || lower(hex(m.record_key)) ELSE m.record_key END AS record_key,
       CASE typeof(m.payload) WHEN 'blob' THEN '\x' || lower(hex(m.payload)) ELSE m.payload END AS payload,
       d.message_seq, d.handler_id
FROM inbox_delivery d
LEFT JOIN inbox_message m ON m.seq = d.message_seq
LEFT JOIN inbox_handler h ON h.id = d.handler_id
WHERE d.status = 3;

-- The failed attempts that are kept, in readable form.
CREATE VIEW inbox_failures AS
SELECT m.message_id, m.source, m.topic, h.key AS handler_key, a.attempt,
       strftime('%Y-%m-%d %H:%M:%f', a.failed_at / 1e6, 'unixepoch') AS failed_at, a.why, a.error, a.message_seq, a.handler_id
FROM inbox_attempt a
LEFT JOIN inbox_message m ON m.seq = a.message_seq
LEFT JOIN inbox_handler h ON h.id = a.handler_id;

-- Records that could not become messages, in readable form.
CREATE VIEW inbox_quarantined AS
SELECT id, topic, cluster_id, kafka_partition, kafka_offset, reason, detail,
       strftime('%Y-%m-%d %H:%M:%f', quarantined_at / 1e6, 'unixepoch') AS quarantined_at,
       strftime('%Y-%m-%d %H:%M:%f', replay_asked_at / 1e6, 'unixepoch') AS replay_asked_at, replays,
       CASE typeof(message_id) WHEN 'blob' THEN '\x' || lower(hex(message_id)) ELSE message_id END AS message_id,
       CASE typeof(source) WHEN 'blob' THEN '\x' || lower(hex(source)) ELSE source END AS source,
       CASE typeof(record_key) WHEN 'blob' THEN '\x' || lower(hex(record_key)) ELSE record_key END AS record_key,
       CASE typeof(payload) WHEN 'blob' THEN '\x' || lower(hex(payload)) ELSE payload END AS payload
FROM inbox_quarantine;

-- The open work of each handler. `held` counts deliveries that wait for another delivery of their key. Ages are in
-- seconds. Counts stop at 10,000, which then means 10,000 or more, so that the view costs the same at any size. `due`
-- and `running` are counted among the 12,000 open deliveries of the handler that have been due longest.
CREATE VIEW inbox_backlog AS
SELECT h.key AS handler_key,
       (SELECT CASE WHEN count(*) = 12000 THEN 10000
                    ELSE min(count(*) FILTER (WHERE locked_until IS NULL OR locked_until <= now.at), 10000) END
        FROM (SELECT d.locked_until FROM inbox_delivery d WHERE d.handler_id = h.id AND d.finished_at IS NULL AND d.due_at <= now.at
              ORDER BY d.due_at, d.message_seq LIMIT 12000)) AS due,
       (SELECT count(*) FROM (SELECT 1 FROM inbox_delivery d WHERE d.handler_id = h.id AND d.finished_at IS NULL AND d.due_at > now.at
                              AND d.due_at < 9223372036854775807 LIMIT 10000)) AS later,
       (SELECT count(*) FROM (SELECT 1 FROM inbox_delivery d WHERE d.handler_id = h.id AND d.finished_at IS NULL
                              AND d.due_at = 9223372036854775807 LIMIT 10000)) AS held,
       (SELECT min(count(*) FILTER (WHERE locked_until > now.at), 10000)
        FROM (SELECT d.locked_until FROM inbox_delivery d WHERE d.handler_id = h.id AND d.finished_at IS NULL AND d.due_at <= now.at
              ORDER BY d.due_at, d.message_seq LIMIT 12000)) AS running,
       (SELECT count(*) FROM (SELECT 1 FROM inbox_delivery d WHERE d.handler_id = h.id AND d.status = 3 LIMIT 10000)) AS poisoned,
       (now.at - (SELECT d.due_at FROM inbox_delivery d WHERE d.handler_id = h.id AND d.finished_at IS NULL AND d.due_at <= now.at
                  ORDER BY d.due_at LIMIT 1)) / 1e6 AS oldest_due_age,
       strftime('%Y-%m-%d %H:%M:%f', (SELECT d.due_at FROM inbox_delivery d
                                      WHERE d.handler_id = h.id AND d.finished_at IS NULL AND d.due_at > now.at
                                        AND d.due_at < 9223372036854775807 ORDER BY d.due_at LIMIT 1) / 1e6, 'unixepoch') AS next_due_at,
       strftime('%Y-%m-%d %H:%M:%f', h.paused_at / 1e6, 'unixepoch') AS paused_at,
       strftime('%Y-%m-%d %H:%M:%f', h.unknown_since / 1e6, 'unixepoch') AS unknown_since,
       strftime('%Y-%m-%d %H:%M:%f', h.breaker_opened_at / 1e6, 'unixepoch') AS breaker_opened_at, h.id AS handler_id
FROM inbox_handler h
CROSS JOIN inbox_now now;

-- Keys of ordered handlers with waiting deliveries, and the delivery that they wait for. Covers the 1,000 oldest held
-- deliveries of a handler and the 1,000 that have been poisoned longest. `behind` stops at 1,000. The order key itself
-- is not stored: it is in the message. `record_key` is the key of that message's record, which is the order key of
-- handlers that are ordered by it.
CREATE VIEW inbox_held_keys AS
SELECT current.key AS handler_key, m.message_id, m.source, m.topic,
       CASE WHEN head.status = 3 THEN 'poisoned' WHEN head.locked_until > now.at THEN 'running' WHEN head.status = 0 THEN 'pending' END AS state,
       head.reason, head.last_error, k.behind,
       strftime('%Y-%m-%d %H:%M:%f', coalesce(head.finished_at, m.received_at) / 1e6, 'unixepoch') AS held_since,
       strftime('%Y-%m-%d %H:%M:%f', head.due_at / 1e6, 'unixepoch') AS due_at, k.order_hash, head.message_seq, head.handler_id,
       CASE typeof(m.record_key) WHEN 'blob' THEN '\x' || lower(hex(m.record_key)) ELSE m.record_key END AS record_key
FROM (SELECT f.handler_id, f.root, f.order_hash,
             (SELECT count(*) FROM (SELECT 1 FROM inbox_delivery d INDEXED BY inbox_delivery_order
                                    WHERE d.handler_id = f.handler_id AND d.order_hash = f.order_hash AND d.finished_at IS NULL
                                      AND d.due_at = 9223372036854775807 LIMIT 1000)) AS behind,
             -- The primary key of the delivery that they wait for.
             (SELECT json_array(d.message_seq, d.handler_id) FROM inbox_handler same
              CROSS JOIN inbox_delivery d INDEXED BY inbox_delivery_order
                ON d.handler_id = same.id AND d.order_hash = f.order_hash AND d.due_at < 9223372036854775807
               AND (d.finished_at IS NULL OR d.status = 3 AND d.passed IS NULL)
              WHERE coalesce(same.same_as, same.id) = f.root ORDER BY d.due_at, d.message_seq LIMIT 1) AS place
      FROM (SELECT h.id AS handler_id, coalesce(h.same_as, h.id) AS root, d.order_hash FROM inbox_handler h
            CROSS JOIN inbox_delivery d ON d.handler_id = h.id AND d.finished_at IS NULL AND d.due_at = 9223372036854775807
             AND d.message_seq <= coalesce((SELECT l.message_seq FROM inbox_delivery l WHERE l.handler_id = h.id AND l.finished_at IS NULL
                                              AND l.due_at = 9223372036854775807 ORDER BY l.message_seq LIMIT 1 OFFSET 999),
                                           9223372036854775807)
            UNION
            SELECT h.id, coalesce(h.same_as, h.id), d.order_hash FROM inbox_handler h
            CROSS JOIN inbox_delivery d ON d.handler_id = h.id AND d.status = 3 AND d.order_hash IS NOT NULL AND d.passed IS NULL
             AND d.finished_at <= coalesce((SELECT l.finished_at FROM inbox_delivery l WHERE l.handler_id = h.id AND l.status = 3
                                            ORDER BY l.finished_at, l.message_seq LIMIT 1 OFFSET 999), 9223372036854775807)) f) k
JOIN inbox_handler current ON current.id = k.root
CROSS JOIN inbox_now now
LEFT JOIN inbox_delivery head ON head.message_seq = k.place ->> 0 AND head.handler_id = k.place ->> 1
LEFT JOIN inbox_message m ON m.seq = head.message_seq
WHERE k.behind > 0;

-- About a thousand open deliveries of each handler that have been due longest, and all that are due at the same time as
-- the last of them. Running deliveries are among them, because rows keep their place in the index while they run. Held
-- deliveries are not: there can be millions, all with the same due_at.
CREATE VIEW inbox_head AS
SELECT d.message_seq, d.handler_id, d.due_at, d.locked_until, d.locked_by
FROM inbox_handler h
CROSS JOIN inbox_delivery d ON d.handler_id = h.id AND d.finished_at IS NULL
 AND d.due_at <= coalesce((SELECT l.due_at FROM inbox_delivery l WHERE l.handler_id = h.id AND l.finished_at IS NULL
                             AND l.due_at < 9223372036854775807
                           ORDER BY l.due_at, l.message_seq LIMIT 1 OFFSET 999), 9223372036854775806);

-- The headers of a message as a JSON array, in order and with duplicates: [{"name": …, "value": …}, …]. Bytes that are
-- not ASCII are shown as hex (\x...). The list ends at the first bytes that are not a header. The column holds for each
-- header the length of the name (4 bytes), the name, the length of the value (4 bytes, -1 for NULL), the value.
CREATE VIEW inbox_headers AS
SELECT m.seq AS message_seq, m.message_id, m.source,
       (WITH RECURSIVE
            digit (place) AS (VALUES (1), (2), (3), (4), (5), (6), (7), (8)),
            -- Names and values alternate: the start and size of each, and of the field before it. A size of -1 means
            -- NULL.
            field (number, at, size, before_at, before_size) AS (
                SELECT 0, 1, 0, 0, 0
                UNION ALL
                SELECT number + 1, at + max(size, 0) + 4,
                       (SELECT CASE WHEN number % 2 = 1 AND bytes = 'FFFFFFFF' THEN -1 ELSE
                                   (SELECT sum((instr('0123456789ABCDEF', substr(bytes, place, 1)) - 1) << (4 * (8 - place))) FROM digit)
                               END
                        FROM (SELECT hex(substr(m.headers, at + max(size, 0), 4)) AS bytes)),
                       at, size
                FROM field
                WHERE at + max(size, 0) + 3 <= length(m.headers)),
            header (name, value) AS (
                SELECT substr(m.headers, before_at, before_size), CASE WHEN size >= 0 THEN substr(m.headers, at, size) END
                FROM field
                WHERE number > 0 AND number % 2 = 0 AND at + max(size, 0) - 1 <= length(m.headers)
                ORDER BY number)
        SELECT json_group_array(json_object(
                   'name', CASE WHEN CAST(name AS TEXT) GLOB '*[^' || char(1) || '-~]*' OR instr(name, x'00') > 0
                                THEN '\x' || lower(hex(name)) ELSE CAST(name AS TEXT) END,
                   'value', CASE WHEN CAST(value AS TEXT) GLOB '*[^' || char(1) || '-~]*' OR instr(value, x'00') > 0
                                 THEN '\x' || lower(hex(value)) ELSE CAST(value AS TEXT) END))
        FROM header) AS headers
FROM inbox_message m;

-- Operator actions. SQLite has no stored functions; a row inserted into one of these views fires a trigger:
--     INSERT INTO inbox_replay (message_id, handler_key) VALUES ('order-17/placed', 'mail.receipt');
--     INSERT INTO inbox_discard (message_id, handler_key, because) VALUES ('order-17/placed', 'mail.receipt', 'a test order');
--     INSERT INTO inbox_release (message_id, handler_key, attempt) VALUES ('order-17/placed', 'mail.receipt', 3);
--     INSERT INTO inbox_pause_handler (handler_key) VALUES ('mail.receipt');
-- with a source if several messages have the id. inbox_audit.affected has the number of rows changed: 0 if nothing
-- matches. Every action is fenced against running work, writes a row to inbox_audit, and changes nothing when it is
-- repeated.

-- The ids of a key, including the ids that became one handler with it.
CREATE VIEW inbox_handler_ids AS
SELECT k.key AS handler_key, same.id
FROM inbox_handler_key k
JOIN inbox_handler own ON own.id = k.handler_id
JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id);

-- Makes the next held delivery of a key due when the delivery that blocked it has finished. Fires for every statement
-- that finishes one. CROSS JOIN fixes the order of the joins: SQLite would otherwise read the whole index of all keys
-- for each delivery that finishes. The first held delivery of each id is one probe of the index, however many are held.
CREATE TRIGGER inbox_promote_next AFTER UPDATE OF finished_at ON inbox_delivery
WHEN OLD.order_hash IS NOT NULL AND OLD.due_at < 9223372036854775807
 AND (OLD.finished_at IS NULL OR OLD.status = 3 AND OLD.passed IS NULL)
 AND NEW.finished_at IS NOT NULL AND (NEW.status <> 3 OR NEW.passed IS NOT NULL)
BEGIN
    UPDATE inbox_delivery SET due_at = (SELECT at FROM inbox_now)
    WHERE (message_seq, handler_id) = (
        SELECT d.message_seq, d.handler_id FROM inbox_handler own
        CROSS JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
        CROSS JOIN inbox_delivery d ON d.handler_id = same.id
         AND d.message_seq = (SELECT f.message_seq FROM inbox_delivery f INDEXED BY inbox_delivery_order
                              WHERE f.handler_id = same.id AND f.order_hash = OLD.order_hash AND f.finished_at IS NULL
                                AND f.due_at = 9223372036854775807
                              ORDER BY f.message_seq LIMIT 1)
        WHERE own.id = OLD.handler_id
        ORDER BY d.message_seq LIMIT 1);
END;
-- Fires when a poisoned delivery that held its key is deleted.
CREATE TRIGGER inbox_promote_next_of_deleted AFTER DELETE ON inbox_delivery
WHEN OLD.order_hash IS NOT NULL AND OLD.due_at < 9223372036854775807
 AND (OLD.finished_at IS NULL OR OLD.status = 3 AND OLD.passed IS NULL)
BEGIN
    UPDATE inbox_delivery SET due_at = (SELECT at FROM inbox_now)
    WHERE (message_seq, handler_id) = (
        SELECT d.message_seq, d.handler_id FROM inbox_handler own
        CROSS JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
        CROSS JOIN inbox_delivery d ON d.handler_id = same.id
         AND d.message_seq = (SELECT f.message_seq FROM inbox_delivery f INDEXED BY inbox_delivery_order
                              WHERE f.handler_id = same.id AND f.order_hash = OLD.order_hash AND f.finished_at IS NULL
                                AND f.due_at = 9223372036854775807
                              ORDER BY f.message_seq LIMIT 1)
        WHERE own.id = OLD.handler_id
        ORDER BY d.message_seq LIMIT 1);
END;

-- Resets the retry budget of a poisoned or discarded delivery and makes it due now. The attempt number keeps growing,
-- so that an earlier claim stays invalid.
CREATE VIEW inbox_replay AS SELECT NULL AS message_id, NULL AS handler_key, NULL AS source, NULL AS because, NULL AS actor WHERE false;
CREATE TRIGGER inbox_replay_now INSTEAD OF INSERT ON inbox_replay
BEGIN
    INSERT INTO inbox_audit (acted_at, action, filter, affected, because, actor)
    SELECT (SELECT at FROM inbox_now), 'replay',
           json_object('message_id', NEW.message_id, 'source', NEW.source, 'handler_key', NEW.handler_key), count(*), NEW.because, NEW.actor
    FROM inbox_message m JOIN inbox_delivery d ON d.message_seq = m.seq
    WHERE m.message_id = NEW.message_id AND m.source = coalesce(NEW.source, m.source)
      AND d.handler_id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key) AND d.status IN (3, 4);
    INSERT INTO inbox_history (message_seq, handler_id, audit_id, status, finished_at, attempts, errors, crashes, reason, last_error)
    SELECT d.message_seq, d.handler_id, (SELECT max(id) FROM inbox_audit), d.status, d.finished_at, d.attempts, d.errors, d.crashes,
           d.reason, d.last_error
    FROM inbox_message m JOIN inbox_delivery d ON d.message_seq = m.seq
    WHERE m.message_id = NEW.message_id AND m.source = coalesce(NEW.source, m.source)
      AND d.handler_id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key) AND d.status IN (3, 4);
    UPDATE inbox_delivery
    SET status = 0, due_at = (SELECT at FROM inbox_now), finished_at = NULL, errors = 0, crashes = 0, store_errors = 0, reason = NULL,
        locked_until = NULL, locked_by = NULL, replays = replays + 1
    WHERE (message_seq, handler_id) IN (SELECT message_seq, handler_id FROM inbox_history
                                        WHERE audit_id = (SELECT max(id) FROM inbox_audit)
                                          AND message_seq IN (SELECT seq FROM inbox_message WHERE message_id = NEW.message_id));
END;

-- Discards a poisoned or pending delivery for good. A running delivery is left alone.
CREATE VIEW inbox_discard AS SELECT NULL AS message_id, NULL AS handler_key, NULL AS source, NULL AS because, NULL AS actor WHERE false;
CREATE TRIGGER inbox_discard_now INSTEAD OF INSERT ON inbox_discard
BEGIN
    INSERT INTO inbox_audit (acted_at, action, filter, affected, because, actor)
    SELECT (SELECT at FROM inbox_now), 'discard',
           json_object('message_id', NEW.message_id, 'source', NEW.source, 'handler_key', NEW.handler_key), count(*), NEW.because, NEW.actor
    FROM inbox_message m JOIN inbox_delivery d ON d.message_seq = m.seq
    WHERE m.message_id = NEW.message_id AND m.source = coalesce(NEW.source, m.source)
      AND d.handler_id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key)
      AND (d.status = 3 OR d.status = 0 AND (d.locked_until IS NULL OR d.locked_until <= (SELECT at FROM inbox_now)));
    INSERT INTO inbox_history (message_seq, handler_id, audit_id, status, finished_at, attempts, errors, crashes, reason, last_error)
    SELECT d.message_seq, d.handler_id, (SELECT max(id) FROM inbox_audit), d.status, d.finished_at, d.attempts, d.errors, d.crashes,
           d.reason, d.last_error
    FROM inbox_message m JOIN inbox_delivery d ON d.message_seq = m.seq
    WHERE m.message_id = NEW.message_id AND m.source = coalesce(NEW.source, m.source)
      AND d.handler_id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key)
      AND (d.status = 3 OR d.status = 0 AND (d.locked_until IS NULL OR d.locked_until <= (SELECT at FROM inbox_now)));
    UPDATE inbox_delivery
    SET status = 4, finished_at = (SELECT at FROM inbox_now), locked_until = NULL, locked_by = NULL,
        reason = coalesce(NEW.because, 'by a person')
    WHERE (message_seq, handler_id) IN (SELECT message_seq, handler_id FROM inbox_history
                                        WHERE audit_id = (SELECT max(id) FROM inbox_audit)
                                          AND message_seq IN (SELECT seq FROM inbox_message WHERE message_id = NEW.message_id));
END;

-- Releases the claim of a running delivery: it is due at once, and the outcome of the current run is ignored. The
-- handler is stopped when its process next renews its claims, within a third of the lease. No retry is consumed.
-- `attempt` selects the run (inbox_status.attempts); without it, the current run.
CREATE VIEW inbox_release AS
SELECT NULL AS message_id, NULL AS handler_key, NULL AS source, NULL AS attempt, NULL AS because, NULL AS actor WHERE false;
CREATE TRIGGER inbox_release_now INSTEAD OF INSERT ON inbox_release
BEGIN
    INSERT INTO inbox_audit (acted_at, action, filter, affected, because, actor)
    SELECT (SELECT at FROM inbox_now), 'release',
           json_object('message_id', NEW.message_id, 'source', NEW.source, 'handler_key', NEW.handler_key, 'attempt', NEW.attempt), count(*),
           NEW.because, NEW.actor
    FROM inbox_message m JOIN inbox_delivery d ON d.message_seq = m.seq
    WHERE m.message_id = NEW.message_id AND m.source = coalesce(NEW.source, m.source)
      AND d.handler_id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key)
      AND d.status = 0 AND d.locked_until > (SELECT at FROM inbox_now) AND d.attempts = coalesce(NEW.attempt, d.attempts);
    INSERT INTO inbox_history (message_seq, handler_id, audit_id, status, finished_at, attempts, errors, crashes, reason, last_error)
    SELECT d.message_seq, d.handler_id, (SELECT max(id) FROM inbox_audit), d.status, d.finished_at, d.attempts, d.errors, d.crashes,
           d.reason, d.last_error
    FROM inbox_message m JOIN inbox_delivery d ON d.message_seq = m.seq
    WHERE m.message_id = NEW.message_id AND m.source = coalesce(NEW.source, m.source)
      AND d.handler_id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key)
      AND d.status = 0 AND d.locked_until > (SELECT at FROM inbox_now) AND d.attempts = coalesce(NEW.attempt, d.attempts);
    UPDATE inbox_delivery SET locked_until = NULL, locked_by = 0, due_at = (SELECT at FROM inbox_now)
    WHERE (message_seq, handler_id) IN (SELECT message_seq, handler_id FROM inbox_history
                                        WHERE audit_id = (SELECT max(id) FROM inbox_audit)
                                          AND message_seq IN (SELECT seq FROM inbox_message WHERE message_id = NEW.message_id));
END;

-- Pauses a handler: no process claims its deliveries. Running deliveries finish; waiting ones stay pending.
CREATE VIEW inbox_pause_handler AS SELECT NULL AS handler_key, NULL AS because, NULL AS actor WHERE false;
CREATE TRIGGER inbox_pause_handler_now INSTEAD OF INSERT ON inbox_pause_handler
BEGIN
    INSERT INTO inbox_audit (acted_at, action, filter, affected, because, actor)
    SELECT (SELECT at FROM inbox_now), 'pause', json_object('handler_key', NEW.handler_key), min(count(*), 1), NEW.because, NEW.actor
    FROM inbox_handler WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key) AND paused_at IS NULL;
    UPDATE inbox_handler SET paused_at = (SELECT at FROM inbox_now)
    WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key) AND paused_at IS NULL;
END;

CREATE VIEW inbox_resume_handler AS SELECT NULL AS handler_key, NULL AS because, NULL AS actor WHERE false;
CREATE TRIGGER inbox_resume_handler_now INSTEAD OF INSERT ON inbox_resume_handler
BEGIN
    INSERT INTO inbox_audit (acted_at, action, filter, affected, because, actor)
    SELECT (SELECT at FROM inbox_now), 'resume', json_object('handler_key', NEW.handler_key), min(count(*), 1), NEW.because, NEW.actor
    FROM inbox_handler WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key) AND paused_at IS NOT NULL;
    UPDATE inbox_handler SET paused_at = NULL
    WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key);
END;

-- Opens the circuit breaker of a handler. While it is open, only one delivery at a time is claimed, as a probe, the
-- first one after 10 s; the first success closes it. Running deliveries finish.
CREATE VIEW inbox_open_breaker AS SELECT NULL AS handler_key, NULL AS because, NULL AS actor WHERE false;
CREATE TRIGGER inbox_open_breaker_now INSTEAD OF INSERT ON inbox_open_breaker
BEGIN
    INSERT INTO inbox_audit (acted_at, action, filter, affected, because, actor)
    SELECT (SELECT at FROM inbox_now), 'open breaker', json_object('handler_key', NEW.handler_key), min(count(*), 1), NEW.because, NEW.actor
    FROM inbox_handler WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key) AND breaker_opened_at IS NULL;
    UPDATE inbox_handler
    SET breaker_opened_at = (SELECT at FROM inbox_now), breaker_probe_at = (SELECT at FROM inbox_now) + 10000000,
        breaker_error = coalesce('by a person: ' || NEW.because, 'by a person'),
        breaker_probe_until = NULL, breaker_probe_no = breaker_probe_no + 1
    WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key) AND breaker_opened_at IS NULL;
END;

CREATE VIEW inbox_close_breaker AS SELECT NULL AS handler_key, NULL AS because, NULL AS actor WHERE false;
CREATE TRIGGER inbox_close_breaker_now INSTEAD OF INSERT ON inbox_close_breaker
BEGIN
    INSERT INTO inbox_audit (acted_at, action, filter, affected, because, actor)
    SELECT (SELECT at FROM inbox_now), 'close breaker', json_object('handler_key', NEW.handler_key), min(count(*), 1), NEW.because, NEW.actor
    FROM inbox_handler WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key) AND breaker_opened_at IS NOT NULL;
    UPDATE inbox_handler
    SET breaker_opened_at = NULL, breaker_probe_at = NULL, breaker_error = NULL,
        breaker_probe_until = NULL, breaker_probe_no = breaker_probe_no + 1
    WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key) AND breaker_opened_at IS NOT NULL;
END;

-- Sets the rate limit of a handler in starts per second, over all processes and restarts. It overrides the
-- registration. `burst` is the maximum number of starts at once; by default what one second allows. 9e999 means no
-- limit; NULL restores the limit of the registration.
CREATE VIEW inbox_set_rate AS SELECT NULL AS handler_key, NULL AS per_sec, NULL AS burst, NULL AS because, NULL AS actor WHERE false;
CREATE TRIGGER inbox_set_rate_now INSTEAD OF INSERT ON inbox_set_rate
BEGIN
    SELECT RAISE(ABORT, 'a rate limit must be greater than 0 and at most 1000000 starts a second, with a burst of 1 to 1000000')
    WHERE NEW.per_sec <= 0 OR NEW.per_sec > 1000000 AND NEW.per_sec < 9e999 OR NEW.burst NOT BETWEEN 1 AND 1000000;
    UPDATE inbox_handler
    SET rate_is_set = NEW.per_sec IS NOT NULL, rate_next_at = NULL,
        rate_interval_us = CASE WHEN NEW.per_sec IS NULL THEN registered_interval_us
                                WHEN NEW.per_sec < 9e999 THEN CAST(round(1000000.0 / NEW.per_sec) AS INTEGER) END,
        rate_burst = CASE WHEN NEW.per_sec IS NULL THEN registered_burst
                          WHEN NEW.per_sec < 9e999 THEN coalesce(NEW.burst, max(CAST(NEW.per_sec AS INTEGER), 1)) END
    WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = NEW.handler_key)
      AND (rate_is_set IS NOT (NEW.per_sec IS NOT NULL)
           OR rate_interval_us IS NOT CASE WHEN NEW.per_sec IS NULL THEN registered_interval_us
                                           WHEN NEW.per_sec < 9e999 THEN CAST(round(1000000.0 / NEW.per_sec) AS INTEGER) END
           OR rate_burst IS NOT CASE WHEN NEW.per_sec IS NULL THEN registered_burst
                                     WHEN NEW.per_sec < 9e999 THEN coalesce(NEW.burst, max(CAST(NEW.per_sec AS INTEGER), 1)) END);
    -- In a trigger, changes() counts the rows of the statement before this one.
    INSERT INTO inbox_audit (acted_at, action, filter, affected, because, actor)
    VALUES ((SELECT at FROM inbox_now), 'set rate',
            json_object('handler_key', NEW.handler_key,
                        'interval_us', CASE WHEN NEW.per_sec < 9e999 THEN CAST(round(1000000.0 / NEW.per_sec) AS INTEGER) END,
                        'burst', CASE WHEN NEW.per_sec < 9e999 THEN coalesce(NEW.burst, max(CAST(NEW.per_sec AS INTEGER), 1)) END,
                        'is_registered', json(iif(NEW.per_sec IS NULL, 'true', 'false'))),
            min(changes(), 1), NEW.because, NEW.actor);
END;

-- Sets positions to an offset, or without one to the first record that Kafka has; without a partition, for the whole
-- topic. Stopped partitions are read again:
--     INSERT INTO inbox_ledger_reset (consumer_group, topic, kafka_partition, to_offset) VALUES ('shop', 'orders', 0, 5000);
CREATE VIEW inbox_ledger_reset AS
SELECT NULL AS consumer_group, NULL AS topic, NULL AS kafka_partition, NULL AS to_offset, NULL AS cluster_id, NULL AS because, NULL AS actor WHERE false;
CREATE TRIGGER inbox_ledger_reset_now INSTEAD OF INSERT ON inbox_ledger_reset
BEGIN
    SELECT RAISE(ABORT, 'an offset must not be negative and needs a partition')
    WHERE NEW.to_offset < 0 OR NEW.to_offset IS NOT NULL AND NEW.kafka_partition IS NULL;
    SELECT RAISE(ABORT, 'positions of several clusters match: name the cluster_id')
    WHERE (SELECT count(DISTINCT cluster_id) FROM inbox_ledger
           WHERE consumer_group = NEW.consumer_group AND topic = NEW.topic AND kafka_partition = coalesce(NEW.kafka_partition, kafka_partition)
             AND cluster_id = coalesce(NEW.cluster_id, cluster_id)) > 1;
    INSERT INTO inbox_audit (acted_at, action, filter, affected, because, actor)
    SELECT (SELECT at FROM inbox_now), 'reset ledger',
           json_object('consumer_group', NEW.consumer_group, 'topic', NEW.topic, 'kafka_partition', NEW.kafka_partition,
                       'to_offset', NEW.to_offset, 'cluster_id', NEW.cluster_id), count(*), NEW.because, NEW.actor
    FROM inbox_ledger
    WHERE consumer_group = NEW.consumer_group AND topic = NEW.topic AND kafka_partition = coalesce(NEW.kafka_partition, kafka_partition)
      AND cluster_id = coalesce(NEW.cluster_id, cluster_id);
    UPDATE inbox_ledger
    SET next_offset = coalesce(NEW.to_offset, -2), leader_epoch = NULL, topic_id = NULL, stopped_at = NULL, stopped_why = NULL,
        updated_at = (SELECT at FROM inbox_now)
    WHERE consumer_group = NEW.consumer_group AND topic = NEW.topic AND kafka_partition = coalesce(NEW.kafka_partition, kafka_partition)
      AND cluster_id = coalesce(NEW.cluster_id, cluster_id);
END;

-- Moves a position forward. The skipped records are stored as a gap. A stopped partition is read again from there:
--     INSERT INTO inbox_ledger_skip (consumer_group, topic, kafka_partition, to_offset) VALUES ('shop', 'orders', 0, 7500);
CREATE VIEW inbox_ledger_skip AS
SELECT NULL AS consumer_group, NULL AS topic, NULL AS kafka_partition, NULL AS to_offset, NULL AS cluster_id, NULL AS because, NULL AS actor WHERE false;
CREATE TRIGGER inbox_ledger_skip_now INSTEAD OF INSERT ON inbox_ledger_skip
BEGIN
    SELECT RAISE(ABORT, 'positions of several clusters match: name the cluster_id')
    WHERE (SELECT count(DISTINCT cluster_id) FROM inbox_ledger
           WHERE consumer_group = NEW.consumer_group AND topic = NEW.topic AND kafka_partition = NEW.kafka_partition
             AND cluster_id = coalesce(NEW.cluster_id, cluster_id)) > 1;
    INSERT INTO inbox_audit (acted_at, action, filter, affected, because, actor)
    SELECT (SELECT at FROM inbox_now), 'skip ledger',
           json_object('consumer_group', NEW.consumer_group, 'topic', NEW.topic, 'kafka_partition', NEW.kafka_partition,
                       'to_offset', NEW.to_offset, 'cluster_id', NEW.cluster_id), count(*), NEW.because, NEW.actor
    FROM inbox_ledger
    WHERE consumer_group = NEW.consumer_group AND topic = NEW.topic AND kafka_partition = NEW.kafka_partition
      AND cluster_id = coalesce(NEW.cluster_id, cluster_id) AND next_offset < NEW.to_offset;
    INSERT INTO inbox_gap (consumer_group, cluster_id, topic, kafka_partition, from_offset, to_offset, noticed_at)
    SELECT consumer_group, cluster_id, topic, kafka_partition, max(next_offset, 0), NEW.to_offset, (SELECT at FROM inbox_now)
    FROM inbox_ledger
    WHERE consumer_group = NEW.consumer_group AND topic = NEW.topic AND kafka_partition = NEW.kafka_partition
      AND cluster_id = coalesce(NEW.cluster_id, cluster_id) AND next_offset < NEW.to_offset
    ON CONFLICT DO NOTHING;
    UPDATE inbox_ledger
    SET next_offset = NEW.to_offset, leader_epoch = NULL, topic_id = NULL, stopped_at = NULL, stopped_why = NULL,
        updated_at = (SELECT at FROM inbox_now)
    WHERE consumer_group = NEW.consumer_group AND topic = NEW.topic AND kafka_partition = NEW.kafka_partition
      AND cluster_id = coalesce(NEW.cluster_id, cluster_id) AND next_offset < NEW.to_offset;
END;

-- The outbox: records that are sent to Kafka after the transaction that stored them has committed.

-- One record to send. A relay reads the waiting records of a slot in id order, and marks them when the broker has
-- acknowledged them.
CREATE TABLE inbox_outbox (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    stored_at       INTEGER NOT NULL,
    finished_at     INTEGER,                         -- when it was acknowledged, poisoned or discarded
    recorded_at     INTEGER,                         -- the record's own timestamp, if the publisher gave one
    kafka_offset    INTEGER,                         -- the offset that the broker assigned
    kafka_partition INTEGER,
    slot            INTEGER NOT NULL,                -- a hash of record_key: records of one key are in one slot
    status          INTEGER NOT NULL DEFAULT 0,      -- 0 waiting, 2 sent, 3 poisoned, 4 discarded
    replays         INTEGER NOT NULL DEFAULT 0,      -- how often an operator sent it again
    message_id      TEXT    NOT NULL,                -- its id (header ce_id), the same on each send
    source          TEXT    NOT NULL,                -- header ce_source
    topic           TEXT    NOT NULL,
    record_key      BLOB,
    headers         BLOB,                            -- as they are sent
    payload         BLOB,
    reason          TEXT,                            -- why it was poisoned or discarded
    last_error      TEXT
);
-- Used by a relay to read the waiting records of a slot in order. It does not contain sent records.
CREATE INDEX inbox_outbox_waiting ON inbox_outbox (slot, id) WHERE status = 0;
-- The same while topics are held: any number of records may wait for a held topic.
CREATE INDEX inbox_outbox_topic ON inbox_outbox (slot, topic, id) WHERE status = 0;
-- Used to purge sent and discarded records, the oldest first.
CREATE INDEX inbox_outbox_finished ON inbox_outbox (finished_at) WHERE status IN (2, 4);
-- Lists poisoned records, the oldest first. It is almost always empty.
CREATE INDEX inbox_outbox_poisoned ON inbox_outbox (finished_at, id) WHERE status = 3;

-- The slots, and the relay that holds each of them. Only the holder of a slot sends its records.
CREATE TABLE inbox_outbox_slots (
    slot       INTEGER PRIMARY KEY,
    holder     INTEGER,                              -- inbox_relay.id
    held_until INTEGER
);
INSERT INTO inbox_outbox_slots (slot)
WITH RECURSIVE slots (slot) AS (SELECT 0 UNION ALL SELECT slot + 1 FROM slots WHERE slot < 15) SELECT slot FROM slots;

-- Processes that send records; each updates its row every few seconds, and removes it at shutdown.
CREATE TABLE inbox_relay (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    name          TEXT    NOT NULL,                  -- host and process id
    started_at    INTEGER NOT NULL,
    seen_at       INTEGER NOT NULL,
    alive_until   INTEGER NOT NULL,
    problem_since INTEGER,
    problem       TEXT                               -- why it cannot send: no broker, an unknown topic
);

-- The outbox in readable form.
CREATE VIEW inbox_outgoing AS
SELECT o.id, o.topic, CASE o.status WHEN 0 THEN 'waiting' WHEN 2 THEN 'sent' WHEN 3 THEN 'poisoned' WHEN 4 THEN 'discarded' END AS state,
       o.reason, o.last_error, o.message_id, o.source, o.record_key, strftime('%Y-%m-%d %H:%M:%f', o.stored_at / 1e6, 'unixepoch') AS stored_at,
       strftime('%Y-%m-%d %H:%M:%f', o.finished_at / 1e6, 'unixepoch') AS finished_at, o.replays, o.kafka_partition, o.kafka_offset,
       length(CAST(o.payload AS BLOB)) AS payload_bytes, o.slot, r.name AS relay, o.payload
FROM inbox_outbox o
LEFT JOIN inbox_outbox_slots s ON s.slot = o.slot AND s.held_until > (SELECT at FROM inbox_now)
LEFT JOIN inbox_relay r ON r.id = s.holder;

-- Sends a sent, poisoned or discarded record again, with the same id:
--     INSERT INTO inbox_outbox_replay (id, because) VALUES (17, 'the topic is there now');
CREATE VIEW inbox_outbox_replay AS SELECT NULL AS id, NULL AS because, NULL AS actor WHERE false;
CREATE TRIGGER inbox_outbox_replay_now INSTEAD OF INSERT ON inbox_outbox_replay
BEGIN
    INSERT INTO inbox_audit (acted_at, action, filter, affected, because, actor)
    SELECT (SELECT at FROM inbox_now), 'replay outgoing', json_object('id', NEW.id), count(*), NEW.because, NEW.actor
    FROM inbox_outbox WHERE id = NEW.id AND status <> 0;
    UPDATE inbox_outbox
    SET status = 0, finished_at = NULL, reason = NULL, kafka_partition = NULL, kafka_offset = NULL, replays = replays + 1
    WHERE id = NEW.id AND status <> 0;
END;

-- Discards a waiting or poisoned record:
--     INSERT INTO inbox_outbox_discard (id, because) VALUES (17, 'nobody needs it');
CREATE VIEW inbox_outbox_discard AS SELECT NULL AS id, NULL AS because, NULL AS actor WHERE false;
CREATE TRIGGER inbox_outbox_discard_now INSTEAD OF INSERT ON inbox_outbox_discard
BEGIN
    INSERT INTO inbox_audit (acted_at, action, filter, affected, because, actor)
    SELECT (SELECT at FROM inbox_now), 'discard outgoing', json_object('id', NEW.id), count(*), NEW.because, NEW.actor
    FROM inbox_outbox WHERE id = NEW.id AND status IN (0, 3);
    UPDATE inbox_outbox SET status = 4, finished_at = (SELECT at FROM inbox_now), reason = coalesce(NEW.because, 'by a person')
    WHERE id = NEW.id AND status IN (0, 3);
END;

-- Pending calls of a service's function for poisoned deliveries. A row stays until the function has returned without an
-- error.
CREATE TABLE inbox_poison_call (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    poisoned_at  INTEGER NOT NULL,
    due_at       INTEGER NOT NULL,                   -- also the end of the lease of the calling process
    message_seq  INTEGER NOT NULL,
    attempts     INTEGER NOT NULL,
    handler_id   INTEGER NOT NULL,
    calls        INTEGER NOT NULL DEFAULT 0,         -- how often the function was called
    reason       TEXT,
    error        TEXT
);
-- Finds the due calls, the longest due first.
CREATE INDEX inbox_poison_call_due ON inbox_poison_call (due_at, id);

-- A trigger, so that every statement that poisons requests the call, in the same transaction.
CREATE TRIGGER inbox_call_for_poisoned AFTER UPDATE OF status ON inbox_delivery
WHEN NEW.status = 3 AND OLD.status <> 3
 AND (SELECT calls_on_poison FROM inbox_handler WHERE id = NEW.handler_id)
BEGIN
    INSERT INTO inbox_poison_call (poisoned_at, due_at, message_seq, attempts, handler_id, reason, error)
    VALUES ((SELECT at FROM inbox_now), (SELECT at FROM inbox_now), NEW.message_seq, NEW.attempts, NEW.handler_id, NEW.reason, NEW.last_error);
END;
