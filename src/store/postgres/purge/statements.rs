//! The statements of retention, each bounded by the rows it is given. None joins two tables in a shape that the planner could choose.

use super::super::statement::{rows, statements};
use crate::store::purging::IDS_OF_KEY;

rows! {
    WalkRow { last: Option<i64>, is_at_end: bool, seqs: Vec<i64> }

    CountRow { last: Option<i64>, is_at_end: bool, messages: i64, deliveries: i64 }

    /// How many messages and deliveries are gone, and how many deliveries there were.
    RemoveRow { messages: i64, deliveries: i64, found: i64 }
}

/// Whether a delivery `d` is finished and over its time: that of its handler, or the default.
macro_rules! is_over {
    () => {
        "(d.status IN (2, 4) AND coalesce(d.finished_at < now() - coalesce(
             (:periods_ms)[array_position(:handler_ids, d.handler_id)], :default_ms) * interval '1 millisecond', false))"
    };
}

/// The next messages behind a cursor, in their order; those of them that can go, with how many deliveries they have; and of the answer
/// where the walk goes on, and whether it is over.
macro_rules! judged {
    () => {
        concat!(
            "WITH walked AS MATERIALIZED (
                SELECT seq, received_at FROM inbox_message WHERE seq > :cursor ORDER BY seq LIMIT :rows),
            judged AS MATERIALIZED (
                SELECT w.seq, d.deliveries FROM walked w
                CROSS JOIN LATERAL (SELECT count(*) AS deliveries, bool_and(", is_over!(), ") AS is_over
                                    FROM inbox_delivery d WHERE d.message_seq = w.seq) d
                WHERE w.received_at < now() - :shortest_ms * interval '1 millisecond'
                  AND coalesce(d.is_over, w.received_at < now() - :default_ms * interval '1 millisecond'))
            SELECT (SELECT max(seq) FROM walked),
                   (SELECT count(*) < :rows
                           OR count(*) FILTER (WHERE received_at < now() - :shortest_ms * interval '1 millisecond') = 0 FROM walked), "
        )
    };
}

/// For the rest of the transaction: tables are read in the order of an index, whatever the planner believes of them. What it is denied
/// it gives an immense cost, which would have every step compiled by JIT: through a pooler that is on, and takes longer than the step.
macro_rules! by_index {
    () => {
        "concat(set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
                set_config('enable_sort', 'off', true), set_config('jit', 'off', true))"
    };
}

statements! {
    /// Answers only to who has the lease or can have it: whoever holds the row this very moment has it. The settings are for the rest of
    /// the transaction: short waits, and no fsync of our own, because a purge that a crash undoes is done again.
    TakeLease<'a>(concat!("
        UPDATE inbox_lease SET holder = :holder, held_until = now() + :lease_ms * interval '1 millisecond'
        WHERE ctid = ANY (ARRAY(SELECT ctid FROM inbox_lease
                                WHERE name = :name AND (holder = :holder OR held_until <= now()) FOR NO KEY UPDATE SKIP LOCKED))
        RETURNING concat(set_config('lock_timeout', '1s', true), set_config('statement_timeout', '20s', true),
                         set_config('synchronous_commit', 'off', true), ", by_index!(), ")"))
    -> String { holder: i64, lease_ms: i64, name: &'a str }

    ByIndex(concat!("SELECT ", by_index!())) -> String {}

    /// The first time ever.
    MakeLease<'a>("
        INSERT INTO inbox_lease (name, holder, held_until) VALUES (:name, 0, '-infinity') ON CONFLICT (name) DO NOTHING")
    { name: &'a str }

    ReleaseLease<'a>("UPDATE inbox_lease SET held_until = '-infinity' WHERE name = :name AND holder = :holder")
    { name: &'a str, holder: i64 }

    /// Where the walk goes on, whether it is over, and the messages that can go.
    Walk(concat!(judged!(), "ARRAY(SELECT seq FROM judged ORDER BY seq)"))
    -> WalkRow {
        cursor: i64, rows: i32, periods_ms: Vec<i64>, handler_ids: Vec<i16>, default_ms: i64, shortest_ms: i64,
    }

    /// As the walk, counted.
    Count(concat!(judged!(), "(SELECT count(*) FROM judged), (SELECT coalesce(sum(deliveries), 0)::bigint FROM judged)"))
    -> CountRow {
        cursor: i64, rows: i32, periods_ms: Vec<i64>, handler_ids: Vec<i16>, default_ms: i64, shortest_ms: i64,
    }

    /// Writes identities, and prolongs those that a purge has written that did not come to its end: they have been seen since.
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

    /// Whether the identity that was written last is settled.
    IsSettled("
        SELECT coalesce((SELECT i.purged_at < (SELECT least(now(), min(a.xact_start)) FROM pg_stat_activity a
                                               WHERE a.datname = current_database() AND a.pid <> pg_backend_pid())
                                              - :settle_ms * interval '1 millisecond'
                         FROM inbox_identity i ORDER BY i.forget_at DESC LIMIT 1), true)") -> bool { settle_ms: i64 }

    /// Locks messages that nobody else has locked. Where identities are kept, only those whose identity has settled may go.
    Lock<'a>("
        SELECT l.seq FROM unnest(:message_seqs) AS w (seq)
        CROSS JOIN LATERAL (SELECT m.seq, m.message_id, m.source FROM inbox_message m WHERE m.seq = w.seq
                            FOR UPDATE SKIP LOCKED) l
        WHERE CASE WHEN :keeps_identities THEN (SELECT i.purged_at < (SELECT least(now(), min(a.xact_start)) FROM pg_stat_activity a
                                                       WHERE a.datname = current_database() AND a.pid <> pg_backend_pid())
                                                      - :settle_ms * interval '1 millisecond'
                                 FROM inbox_identity i WHERE i.hash = inbox_identity_hash(l.message_id, l.source) LIMIT 1)
                   ELSE true END") -> i64 { message_seqs: &'a [i64], keeps_identities: bool, settle_ms: i64 }

    /// Removes locked messages with their deliveries, judged anew: nobody can add one any more. Answers how many of each are gone, and
    /// how many deliveries there were.
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
              AND t.status IN (2, 4)
            RETURNING 1),
        history AS (
            DELETE FROM inbox_history t
            WHERE t.ctid = ANY (ARRAY(
                SELECT h.tid FROM judged j
                CROSS JOIN LATERAL (SELECT h.ctid AS tid FROM inbox_history h WHERE h.message_seq = j.seq
                                    ORDER BY h.message_seq, h.handler_id, h.audit_id LIMIT 32768) h))),
        message AS (
            DELETE FROM inbox_message t
            WHERE t.ctid = ANY (ARRAY(
                SELECT m.tid FROM judged j
                CROSS JOIN LATERAL (SELECT m.ctid AS tid FROM inbox_message m WHERE m.seq = j.seq LIMIT 1) m))
            RETURNING 1)
        SELECT (SELECT count(*) FROM message), (SELECT count(*) FROM delivery),
               (SELECT coalesce(sum(deliveries), 0)::bigint FROM judged)"))
    -> RemoveRow { message_seqs: Vec<i64>, periods_ms: Vec<i64>, handler_ids: Vec<i16>, default_ms: i64 }

    Forget("
        DELETE FROM inbox_identity
        WHERE ctid = ANY (ARRAY(SELECT ctid FROM inbox_identity WHERE forget_at < now() ORDER BY forget_at LIMIT :rows
                                FOR UPDATE SKIP LOCKED))") { rows: i32 }

    Forgettable("SELECT count(*) FROM inbox_identity WHERE forget_at < now()") -> i64 {}

    /// Ids that became one handler are one.
    IdsOfKey<'a>(IDS_OF_KEY) -> i16 { key: &'a str }
}
