//! The statements of retention, each bounded by the rows it is given. None joins two tables in a shape that the planner could choose.

use super::super::statement::{rows, statements};
use crate::store::purging::IDS_OF_KEY;

rows! {
    /// `blocks` were looked at as far as their messages are old enough, `walked_to` is the last of these.
    WalkRow { last: Option<i64>, is_at_end: bool, seqs: Vec<i64>, blocks: Vec<i64>, walked_to: Option<i64> }

    CountRow { last: Option<i64>, is_at_end: bool, messages: i64, deliveries: i64 }

    /// How many messages and deliveries are gone, and how many deliveries there were.
    RemoveRow { messages: i64, deliveries: i64, found: i64 }
}

/// How long a finished delivery `d` stays: by its handler, or the default.
macro_rules! period {
    () => {
        "(coalesce((:periods_ms)[array_position(:handler_ids, d.handler_id)], :default_ms) * interval '1 millisecond')"
    };
}

/// When a delivery `d` is over its time. What is not finished is done now at the earliest, so this is never too late.
macro_rules! over_at {
    () => {
        concat!(
            "CASE WHEN d.status IN (2, 4) AND d.finished_at IS NOT NULL THEN d.finished_at + ",
            period!(),
            "
                      WHEN d.status = 3 AND d.finished_at IS NOT NULL AND :poisoned_ms::bigint IS NOT NULL
                      THEN d.finished_at + :poisoned_ms * interval '1 millisecond'
                      ELSE now() + ",
            period!(),
            " END"
        )
    };
}

/// Whether a delivery `d` is finished and over its time.
macro_rules! is_over {
    () => {
        concat!("(d.finished_at IS NOT NULL AND d.status IN (2, 3, 4) AND (d.status <> 3 OR :poisoned_ms::bigint IS NOT NULL)
                  AND ", over_at!(), " < now())")
    };
}

/// Of the next messages, in their order, those that can go, with how many deliveries they have.
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

/// Of the answer of a walk by seq: where it goes on, and whether it is over.
macro_rules! by_seq {
    () => {
        "SELECT (SELECT max(seq) FROM walked),
                (SELECT count(*) < :rows
                        OR count(*) FILTER (WHERE received_at < now() - :shortest_ms * interval '1 millisecond') = 0 FROM walked), "
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

    /// Messages that no purge has looked at. Those that are young are looked at again the next time, as is every one behind the first of them: an
    /// accept that is under way may have a seq in between.
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

    /// Messages that were kept, of blocks that are worth a look by now. The last block is looked at again unless it is whole.
    WalkKept(concat!(judged!("due AS MATERIALIZED (
                SELECT block FROM inbox_kept WHERE policy = :policy AND block > :after_block AND look_at <= now()
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

    /// Writes down when the first of what is left of each block can go; forgets blocks of which nothing is left.
    NoteKept<'a>(concat!("
        WITH kept AS MATERIALIZED (
            SELECT b.block, k.look_at FROM unnest(:blocks) AS b (block)
            CROSS JOIN LATERAL (
                SELECT min(greatest(m.received_at + :shortest_ms * interval '1 millisecond',
                                    coalesce(d.over_at, m.received_at + :default_ms * interval '1 millisecond'))) AS look_at
                FROM (SELECT seq, received_at FROM inbox_message
                      WHERE seq >= b.block * :block AND seq < (b.block + 1) * :block ORDER BY seq LIMIT :block) m
                CROSS JOIN LATERAL (SELECT max(", over_at!(), ") AS over_at FROM inbox_delivery d WHERE d.message_seq = m.seq) d) k),
        empty AS (
            DELETE FROM inbox_kept
            WHERE ctid = ANY (ARRAY(
                SELECT k.tid FROM kept e
                CROSS JOIN LATERAL (SELECT ctid AS tid FROM inbox_kept WHERE policy = :policy AND block = e.block LIMIT 1) k
                WHERE e.look_at IS NULL)))
        INSERT INTO inbox_kept (policy, block, look_at) SELECT :policy, block, look_at FROM kept WHERE look_at IS NOT NULL
        ON CONFLICT (policy, block) DO UPDATE SET look_at = excluded.look_at"))
    {
        blocks: &'a [i64], policy: i64, block: i64, periods_ms: Vec<i64>, handler_ids: Vec<i16>, default_ms: i64, shortest_ms: i64,
        poisoned_ms: Option<i64>,
    }

    NoteWalked("
        INSERT INTO inbox_retention (policy, walked_to) VALUES (:policy, :walked_to)
        ON CONFLICT (policy) DO UPDATE SET walked_to = greatest(inbox_retention.walked_to, excluded.walked_to), purged_at = now()")
    { policy: i64, walked_to: i64 }

    /// A part of what is known of periods that nobody uses any more.
    ForgetUnused("
        WITH unused AS MATERIALIZED (
            SELECT policy FROM inbox_retention WHERE purged_at < now() - :unused_ms * interval '1 millisecond' LIMIT 1),
        kept AS (
            DELETE FROM inbox_kept
            WHERE ctid = ANY (ARRAY(SELECT k.ctid FROM unused u JOIN inbox_kept k ON k.policy = u.policy LIMIT :rows)) RETURNING 1)
        DELETE FROM inbox_retention r USING unused u WHERE r.policy = u.policy AND (SELECT count(*) FROM kept) < :rows")
    { unused_ms: i64, rows: i32 }

    ExpireQuarantined("
        DELETE FROM inbox_quarantine
        WHERE id = ANY (ARRAY(SELECT id FROM inbox_quarantine ORDER BY id LIMIT :rows))
          AND quarantined_at < now() - :older_than_ms * interval '1 millisecond' AND replay_asked_at IS NULL")
    { rows: i32, older_than_ms: i64 }

    /// All messages in their order, counted.
    Count(concat!(judged!("walked AS MATERIALIZED (
                SELECT seq, received_at FROM inbox_message WHERE seq > :cursor ORDER BY seq LIMIT :rows)"), by_seq!(), "(SELECT count(*) FROM judged), (SELECT coalesce(sum(deliveries), 0)::bigint FROM judged)"))
    -> CountRow {
        cursor: i64, rows: i32, periods_ms: Vec<i64>, handler_ids: Vec<i16>, default_ms: i64, shortest_ms: i64, poisoned_ms: Option<i64>,
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

    Forgettable("SELECT count(*) FROM inbox_identity WHERE forget_at < now()") -> i64 {}

    /// Ids that became one handler are one.
    IdsOfKey<'a>(IDS_OF_KEY) -> i16 { key: &'a str }
}
