//! The statements of retention, each bounded by its `rows`. None leaves the order of a join to the planner.

use super::super::statement::{rows, statements};
use crate::store::purging::IDS_OF_KEY;

rows! {
    /// `blocks` were checked as far as their messages are old enough; `walked_to` is the last of these messages.
    WalkRow { last: Option<i64>, is_at_end: bool, seqs: Vec<i64>, blocks: Vec<i64>, walked_to: Option<i64> }

    /// Where the count continues, and what it has found.
    CountRow { last: Option<i64>, is_at_end: bool, messages: i64, deliveries: i64 }

    /// How many messages and deliveries were deleted, and how many deliveries there were.
    RemoveRow { messages: i64, deliveries: i64, found: i64 }
}

/// How long a finished delivery `d` is kept: by its handler, or the default.
macro_rules! period {
    () => {
        "(coalesce((:periods_ms)[array_position(:handler_ids, d.handler_id)], :default_ms) * interval '1 millisecond')"
    };
}

/// When a delivery `d` expires. An unfinished delivery finishes now at the earliest, done or poisoned, so this is never
/// too late.
macro_rules! over_at {
    () => {
        concat!(
            "CASE WHEN d.status IN (2, 4) AND d.finished_at IS NOT NULL THEN d.finished_at + ",
            period!(),
            "
                      WHEN d.status = 3 AND d.finished_at IS NOT NULL AND :poisoned_ms::bigint IS NOT NULL
                      THEN d.finished_at + :poisoned_ms * interval '1 millisecond'
                      ELSE now() + least(",
            period!(),
            ", :poisoned_ms::bigint * interval '1 millisecond') END"
        )
    };
}

/// Whether a delivery `d` is finished and expired.
macro_rules! is_over {
    () => {
        concat!("(d.finished_at IS NOT NULL AND d.status IN (2, 3, 4) AND (d.status <> 3 OR :poisoned_ms::bigint IS NOT NULL)
                  AND ", over_at!(), " < now())")
    };
}

/// Those of the next messages, in order, that can be deleted, with the number of their deliveries.
macro_rules! judged {
    ($walked:literal) => {
        concat!(
            "WITH ",
            $walked,
            ",
            judged AS MATERIALIZED (
                SELECT w.seq, d.deliveries FROM walked w
                CROSS JOIN LATERAL (SELECT count(*) AS deliveries, bool_and(",
            is_over!(),
            ") AS is_over
                                    FROM inbox_delivery d WHERE d.message_seq = w.seq) d
                WHERE w.received_at < now() - :shortest_ms * interval '1 millisecond'
                  AND coalesce(d.is_over, w.received_at < now() - :default_ms * interval '1 millisecond')) "
        )
    };
}

/// For the result of a scan by seq: where it continues, and whether it is at the end.
macro_rules! by_seq {
    () => {
        "SELECT (SELECT max(seq) FROM walked),
                (SELECT count(*) < :rows
                        OR count(*) FILTER (WHERE received_at < now() - :shortest_ms * interval '1 millisecond') = 0 FROM walked), "
    };
}

/// Identities that were written before this time have been seen by every accept that still runs. Autovacuum accepts
/// nothing, and may run for hours; its workers are seen by roles that may read all statistics.
macro_rules! settled_before {
    () => {
        "(SELECT least(now(), min(a.xact_start)) FROM pg_stat_activity a
          WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.backend_type IS DISTINCT FROM 'autovacuum worker')
         - :settle_ms * interval '1 millisecond'"
    };
}

/// For the rest of the transaction, tables are read in index order, whatever the planner estimates. A disabled plan
/// node has a very high cost, so that JIT would compile every step: behind a pooler JIT is on, and compiling takes
/// longer than the step.
macro_rules! by_index {
    () => {
        "concat(set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
                set_config('enable_sort', 'off', true), set_config('jit', 'off', true))"
    };
}

statements! {
    /// Returns a row only to a process that has or can take the lease; a process that holds the row lock at this moment
    /// has it. The settings are for the rest of the transaction: short lock waits, and no synchronous commit, because a
    /// purge that a crash undoes is repeated.
    TakeLease<'a>(concat!("
        UPDATE inbox_lease SET holder = :holder, held_until = now() + :lease_ms * interval '1 millisecond'
        WHERE ctid = ANY (ARRAY(SELECT ctid FROM inbox_lease
                                WHERE name = :name AND (holder = :holder OR held_until <= now()) FOR NO KEY UPDATE SKIP LOCKED))
        RETURNING concat(set_config('lock_timeout', '1s', true), set_config('statement_timeout', '20s', true),
                         set_config('synchronous_commit', 'off', true), ", by_index!(), ")"))
    -> String { holder: i64, lease_ms: i64, name: &'a str }

    ByIndex(concat!("SELECT ", by_index!())) -> String {}

    /// For the first purge.
    MakeLease<'a>("
        INSERT INTO inbox_lease (name, holder, held_until) VALUES (:name, 0, '-infinity') ON CONFLICT (name) DO NOTHING")
    { name: &'a str }

    ReleaseLease<'a>("UPDATE inbox_lease SET held_until = '-infinity' WHERE name = :name AND holder = :holder")
    { name: &'a str, holder: i64 }

    /// Messages that no purge has checked. Young ones are checked again next time, as is every message after the first
    /// of them: a running accept may have a seq in between.
    WalkFresh(concat!(judged!("walked AS MATERIALIZED (
                SELECT seq, received_at FROM inbox_message
                WHERE seq > coalesce(:after_seq::bigint, (SELECT walked_to FROM inbox_retention WHERE policy = :policy), -1)
                ORDER BY seq LIMIT :rows),
            young AS MATERIALIZED (
                SELECT min(seq) AS seq FROM walked
                WHERE received_at >= now() - greatest(:shortest_ms, :late_ms) * interval '1 millisecond'),
            safe AS MATERIALIZED (
                SELECT w.seq FROM walked w CROSS JOIN young y WHERE y.seq IS NULL OR w.seq < y.seq)"),
        by_seq!(), "ARRAY(SELECT seq FROM judged ORDER BY seq), ARRAY(SELECT DISTINCT seq / :block FROM safe), (SELECT max(seq) FROM safe)"))
    -> WalkRow {
        after_seq: Option<i64>, policy: i64, rows: i32, late_ms: i64, block: i64, periods_ms: Vec<i64>, handler_ids: Vec<i16>, default_ms: i64,
        shortest_ms: i64, poisoned_ms: Option<i64>,
    }

    /// Kept messages of blocks that are due. The last block is checked again unless it is complete.
    WalkKept(concat!(judged!("due AS MATERIALIZED (
                SELECT block FROM inbox_kept WHERE policy = :policy AND block > :after_block AND check_at <= now()
                ORDER BY block LIMIT :blocks_max),
            walked AS MATERIALIZED (
                SELECT m.seq, m.received_at FROM due b
                CROSS JOIN LATERAL (SELECT seq, received_at FROM inbox_message
                                    WHERE seq >= b.block * :block AND seq < (b.block + 1) * :block ORDER BY seq LIMIT :block) m
                ORDER BY m.seq LIMIT greatest(:rows::bigint, :block)),
            whole AS MATERIALIZED (
                SELECT CASE WHEN (SELECT count(*) FROM walked) < greatest(:rows::bigint, :block) THEN (SELECT max(block) FROM due)
                            ELSE greatest((SELECT max(seq) FROM walked) / :block - 1, (SELECT min(block) FROM due)) END AS block)"), "
        SELECT (SELECT block FROM whole),
               (SELECT count(*) < :blocks_max FROM due) AND (SELECT block FROM whole) IS NOT DISTINCT FROM (SELECT max(block) FROM due),
               ARRAY(SELECT seq FROM judged ORDER BY seq),
               ARRAY(SELECT d.block FROM due d CROSS JOIN whole w WHERE d.block <= w.block), NULL::bigint"))
    -> WalkRow {
        policy: i64, after_block: i64, blocks_max: i32, block: i64, rows: i32, periods_ms: Vec<i64>, handler_ids: Vec<i16>, default_ms: i64,
        shortest_ms: i64, poisoned_ms: Option<i64>,
    }

    /// Records when the first remaining message of each block expires; deletes blocks with none left.
    NoteKept<'a>(concat!("
        WITH kept AS MATERIALIZED (
            SELECT b.block, k.check_at FROM unnest(:blocks) AS b (block)
            CROSS JOIN LATERAL (
                SELECT min(greatest(m.received_at + :shortest_ms * interval '1 millisecond',
                                    coalesce(d.over_at, m.received_at + :default_ms * interval '1 millisecond'))) AS check_at
                FROM (SELECT seq, received_at FROM inbox_message
                      WHERE seq >= b.block * :block AND seq < (b.block + 1) * :block ORDER BY seq LIMIT :block) m
                CROSS JOIN LATERAL (SELECT max(", over_at!(), ") AS over_at FROM inbox_delivery d WHERE d.message_seq = m.seq) d) k),
        empty AS (
            DELETE FROM inbox_kept
            WHERE ctid = ANY (ARRAY(
                SELECT k.tid FROM kept e
                CROSS JOIN LATERAL (SELECT ctid AS tid FROM inbox_kept WHERE policy = :policy AND block = e.block LIMIT 1) k
                WHERE e.check_at IS NULL)))
        INSERT INTO inbox_kept (policy, block, check_at) SELECT :policy, block, check_at FROM kept WHERE check_at IS NOT NULL
        ON CONFLICT (policy, block) DO UPDATE SET check_at = excluded.check_at"))
    {
        blocks: &'a [i64], policy: i64, block: i64, periods_ms: Vec<i64>, handler_ids: Vec<i16>, default_ms: i64, shortest_ms: i64,
        poisoned_ms: Option<i64>,
    }

    /// Only grows: the scan of another process may have gone further.
    NoteWalked("
        INSERT INTO inbox_retention (policy, walked_to) VALUES (:policy, :walked_to)
        ON CONFLICT (policy) DO UPDATE SET walked_to = greatest(inbox_retention.walked_to, excluded.walked_to), purged_at = now()")
    { policy: i64, walked_to: i64 }

    /// Deletes a part of the state of unused periods.
    ForgetUnused("
        WITH unused AS MATERIALIZED (
            SELECT policy FROM inbox_retention WHERE purged_at < now() - :unused_ms * interval '1 millisecond' LIMIT 1),
        kept AS (
            DELETE FROM inbox_kept
            WHERE ctid = ANY (ARRAY(SELECT k.ctid FROM unused u JOIN inbox_kept k ON k.policy = u.policy LIMIT :rows)) RETURNING 1)
        DELETE FROM inbox_retention r USING unused u WHERE r.policy = u.policy AND (SELECT count(*) FROM kept) < :rows")
    { unused_ms: i64, rows: i32 }

    /// Reads the oldest records in the order of ids, which is that of time, so it needs no index on the time. Skips
    /// records whose replay was requested: otherwise they would keep later records from expiring.
    ExpireQuarantined("
        DELETE FROM inbox_quarantine
        WHERE id = ANY (ARRAY(SELECT id FROM inbox_quarantine WHERE replay_asked_at IS NULL ORDER BY id LIMIT :rows))
          AND quarantined_at < now() - :older_than_ms * interval '1 millisecond' AND replay_asked_at IS NULL")
    { rows: i32, older_than_ms: i64 }

    /// Counts all messages in order.
    Count(concat!(judged!("walked AS MATERIALIZED (
                SELECT seq, received_at FROM inbox_message WHERE seq > :cursor ORDER BY seq LIMIT :rows)"), by_seq!(), "(SELECT count(*) FROM judged), (SELECT coalesce(sum(deliveries), 0)::bigint FROM judged)"))
    -> CountRow {
        cursor: i64, rows: i32, periods_ms: Vec<i64>, handler_ids: Vec<i16>, default_ms: i64, shortest_ms: i64, poisoned_ms: Option<i64>,
    }

    /// Writes identities, and extends those written by a purge that did not finish: they have been seen since.
    Mark<'a>("
        WITH marked AS MATERIALIZED (
            SELECT inbox_identity_hash(m.message_id, m.source) AS hash FROM unnest(:message_seqs) AS w (seq)
            CROSS JOIN LATERAL (SELECT message_id, source FROM inbox_message WHERE seq = w.seq LIMIT 1) m),
        known AS MATERIALIZED (
            SELECT k.hash, k.ctid AS tid FROM marked h
            CROSS JOIN LATERAL (SELECT i.hash, i.ctid FROM inbox_identity i WHERE i.hash = h.hash LIMIT 1) k),
        prolonged AS (
            UPDATE inbox_identity i SET forget_at = greatest(i.forget_at, now() + :keep_ms * interval '1 millisecond')
            WHERE i.ctid = ANY (ARRAY(SELECT tid FROM known))),
        written AS (
            INSERT INTO inbox_identity (hash, purged_at, forget_at)
            SELECT hash, clock_timestamp(), now() + :keep_ms * interval '1 millisecond' FROM marked
            WHERE (hash IN (SELECT hash FROM known)) IS NOT TRUE
            RETURNING 1)
        SELECT (SELECT count(*) FROM written)") -> i64 { message_seqs: &'a [i64], keep_ms: i64 }

    /// Whether every accept that may have missed the newest identity has ended.
    IsSettled(concat!("
        SELECT coalesce((SELECT i.purged_at < ", settled_before!(), "
                         FROM inbox_identity i ORDER BY i.forget_at DESC LIMIT 1), true)")) -> bool { settle_ms: i64 }

    /// Locks messages that are not locked. If identities are kept, only those whose identity no accept can have missed.
    Lock<'a>(concat!("
        SELECT l.seq FROM unnest(:message_seqs) AS w (seq)
        CROSS JOIN LATERAL (SELECT m.seq, m.message_id, m.source FROM inbox_message m WHERE m.seq = w.seq
                            FOR UPDATE SKIP LOCKED) l
        WHERE CASE WHEN :keeps_identities THEN (SELECT i.purged_at < ", settled_before!(), "
                                 FROM inbox_identity i WHERE i.hash = inbox_identity_hash(l.message_id, l.source) LIMIT 1)
                   ELSE true END")) -> i64 { message_seqs: &'a [i64], keeps_identities: bool, settle_ms: i64 }

    /// Deletes locked messages with their deliveries, after checking again: no delivery can be added any more. Returns
    /// how many of each were deleted, and how many deliveries there were.
    Remove(concat!("
        WITH judged AS MATERIALIZED (
            SELECT w.seq, d.deliveries FROM unnest(:message_seqs) AS w (seq)
            CROSS JOIN LATERAL (SELECT count(*) AS deliveries, bool_and(", is_over!(), ") AS is_over
                                FROM inbox_delivery d WHERE d.message_seq = w.seq) d
            WHERE coalesce(d.is_over, true)),
        delivery AS (
            DELETE FROM inbox_delivery t
            WHERE t.ctid = ANY (ARRAY(
                SELECT d.tid FROM judged j
                CROSS JOIN LATERAL (SELECT d.ctid AS tid FROM inbox_delivery d WHERE d.message_seq = j.seq
                                    ORDER BY d.message_seq, d.handler_id LIMIT 32768) d))
              AND (t.status IN (2, 4) OR t.status = 3 AND :poisoned_ms::bigint IS NOT NULL)
            RETURNING 1),
        history AS (
            DELETE FROM inbox_history t
            WHERE t.ctid = ANY (ARRAY(
                SELECT h.tid FROM judged j
                CROSS JOIN LATERAL (SELECT h.ctid AS tid FROM inbox_history h WHERE h.message_seq = j.seq
                                    ORDER BY h.message_seq, h.handler_id, h.audit_id LIMIT 32768) h))),
        attempt AS (
            DELETE FROM inbox_attempt t
            WHERE t.ctid = ANY (ARRAY(
                SELECT a.tid FROM judged j
                CROSS JOIN LATERAL (SELECT a.ctid AS tid FROM inbox_attempt a WHERE a.message_seq = j.seq
                                    ORDER BY a.message_seq, a.handler_id, a.place LIMIT 32768) a))),
        correction AS (
            DELETE FROM inbox_correction t
            WHERE t.ctid = ANY (ARRAY(
                SELECT k.tid FROM judged j
                CROSS JOIN LATERAL (SELECT k.ctid AS tid FROM inbox_correction k WHERE k.message_seq = j.seq
                                    ORDER BY k.message_seq, k.handler_id, k.audit_id LIMIT 32768) k))),
        message AS (
            DELETE FROM inbox_message t
            WHERE t.ctid = ANY (ARRAY(
                SELECT m.tid FROM judged j
                CROSS JOIN LATERAL (SELECT m.ctid AS tid FROM inbox_message m WHERE m.seq = j.seq LIMIT 1) m))
            RETURNING 1)
        SELECT (SELECT count(*) FROM message), (SELECT count(*) FROM delivery),
               (SELECT coalesce(sum(deliveries), 0)::bigint FROM judged)"))
    -> RemoveRow {
        message_seqs: Vec<i64>, periods_ms: Vec<i64>, handler_ids: Vec<i16>, default_ms: i64, poisoned_ms: Option<i64>,
    }

    Forget("
        DELETE FROM inbox_identity
        WHERE ctid = ANY (ARRAY(SELECT ctid FROM inbox_identity WHERE forget_at < now() ORDER BY forget_at LIMIT :rows
                                FOR UPDATE SKIP LOCKED))") { rows: i32 }

    /// For the dry run of an operator.
    Forgettable("SELECT count(*) FROM inbox_identity WHERE forget_at < now()") -> i64 {}

    /// Records that `ExpireQuarantined` would delete.
    ExpiredQuarantined("
        SELECT count(*) FROM inbox_quarantine
        WHERE quarantined_at < now() - :older_than_ms * interval '1 millisecond' AND replay_asked_at IS NULL")
    -> i64 { older_than_ms: i64 }

    /// Including the ids that became one handler with it.
    IdsOfKey<'a>(IDS_OF_KEY) -> i16 { key: &'a str }
}
