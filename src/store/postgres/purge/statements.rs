//! The statements of retention, each bounded by the rows it is given. None joins two tables in a shape that the planner could choose.

use diesel::sql_types::{Array, BigInt, Bool, Integer, Nullable, SmallInt, Text};

use super::super::statement::statement;

/// Whether a delivery `d` is finished and over its time: the periods of handlers that have their own, their ids, the default.
macro_rules! is_over {
    ($periods:literal, $ids:literal, $default:literal) => {
        concat!(
            "(d.status IN (2, 4) AND coalesce(d.finished_at < now() - coalesce((",
            $periods,
            ")[array_position(",
            $ids,
            ", d.handler_id)], ",
            $default,
            ") * interval '1 millisecond', false))"
        )
    };
}

/// The messages behind a cursor in their order, and how many deliveries of each there are and are not over; `$1` and `$2` are cursor and
/// rows, `$6` the shortest period.
macro_rules! judged {
    () => {
        concat!(
            "WITH walked AS MATERIALIZED (
                SELECT seq, received_at FROM inbox_message WHERE seq > $1 ORDER BY seq LIMIT $2),
            judged AS MATERIALIZED (
                SELECT w.seq, d.deliveries FROM walked w
                CROSS JOIN LATERAL (SELECT count(*) AS deliveries, bool_and(", is_over!("$3", "$4", "$5"), ") AS is_over
                                    FROM inbox_delivery d WHERE d.message_seq = w.seq) d
                WHERE w.received_at < now() - $6 * interval '1 millisecond'
                  AND coalesce(d.is_over, w.received_at < now() - $5 * interval '1 millisecond'))
            SELECT (SELECT max(seq) FROM walked),
                   (SELECT count(*) < $2
                           OR count(*) FILTER (WHERE received_at < now() - $6 * interval '1 millisecond') = 0 FROM walked), "
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

statement! {
    /// Answers only to who has the lease or can have it: whoever holds the row this very moment has it. The settings are for the rest of
    /// the transaction: short waits, and no fsync of our own, because a purge that a crash undoes is done again.
    TakeLease<'a>(concat!("
        UPDATE inbox_lease SET holder = $1, held_until = now() + $2 * interval '1 millisecond'
        WHERE ctid = ANY (ARRAY(SELECT ctid FROM inbox_lease
                                WHERE name = $3 AND (holder = $1 OR held_until <= now()) FOR NO KEY UPDATE SKIP LOCKED))
        RETURNING concat(set_config('lock_timeout', '1s', true), set_config('statement_timeout', '20s', true),
                         set_config('synchronous_commit', 'off', true)), ", by_index!()))
    -> (Text, Text) {
        holder: i64 => BigInt,
        lease_ms: i64 => BigInt,
        name: &'a str => Text,
    }
}

statement! {
    ByIndex(concat!("SELECT ", by_index!())) -> (Text) {}
}

statement! {
    /// The first time ever.
    MakeLease<'a>("
        INSERT INTO inbox_lease (name, holder, held_until) VALUES ($1, 0, '-infinity') ON CONFLICT (name) DO NOTHING") {
        name: &'a str => Text,
    }
}

statement! {
    ReleaseLease<'a>("UPDATE inbox_lease SET held_until = '-infinity' WHERE name = $1 AND holder = $2") {
        name: &'a str => Text,
        holder: i64 => BigInt,
    }
}

statement! {
    /// Where the walk goes on, whether it is over, and the messages that can go.
    Walk(concat!(judged!(), "ARRAY(SELECT seq FROM judged ORDER BY seq)"))
    -> (Nullable<BigInt>, Bool, Array<BigInt>) {
        cursor: i64 => BigInt,
        rows: i32 => Integer,
        periods_ms: Vec<i64> => Array<BigInt>,
        handler_ids: Vec<i16> => Array<SmallInt>,
        default_ms: i64 => BigInt,
        shortest_ms: i64 => BigInt,
    }
}

statement! {
    /// As the walk, counted.
    Count(concat!(judged!(), "(SELECT count(*) FROM judged), (SELECT coalesce(sum(deliveries), 0)::bigint FROM judged)"))
    -> (Nullable<BigInt>, Bool, BigInt, BigInt) {
        cursor: i64 => BigInt,
        rows: i32 => Integer,
        periods_ms: Vec<i64> => Array<BigInt>,
        handler_ids: Vec<i16> => Array<SmallInt>,
        default_ms: i64 => BigInt,
        shortest_ms: i64 => BigInt,
    }
}

statement! {
    /// Writes identities, and prolongs those that a purge has written that did not come to its end: they have been seen since.
    Mark<'a>("
        WITH marked AS MATERIALIZED (
            SELECT inbox_identity_hash(m.message_id, m.source) AS hash FROM unnest($1) AS w (seq)
            CROSS JOIN LATERAL (SELECT message_id, source FROM inbox_message WHERE seq = w.seq LIMIT 1) m),
        known AS MATERIALIZED (
            SELECT k.hash, k.ctid AS tid FROM marked h
            CROSS JOIN LATERAL (SELECT i.hash, i.ctid FROM inbox_identity i WHERE i.hash = h.hash LIMIT 1) k),
        prolonged AS (
            UPDATE inbox_identity i SET forget_at = greatest(i.forget_at, now() + $2 * interval '1 millisecond')
            WHERE i.ctid = ANY (ARRAY(SELECT tid FROM known))),
        written AS (
            INSERT INTO inbox_identity (hash, purged_at, forget_at)
            SELECT hash, clock_timestamp(), now() + $2 * interval '1 millisecond' FROM marked
            WHERE (hash IN (SELECT hash FROM known)) IS NOT TRUE
            RETURNING 1)
        SELECT (SELECT count(*) FROM written)")
    -> (BigInt) {
        message_seqs: &'a [i64] => Array<BigInt>,
        keep_ms: i64 => BigInt,
    }
}

statement! {
    /// Whether the identity that was written last is settled.
    IsSettled("
        SELECT coalesce((SELECT i.purged_at < (SELECT least(now(), min(a.xact_start)) FROM pg_stat_activity a
                                               WHERE a.datname = current_database() AND a.pid <> pg_backend_pid())
                                              - $1 * interval '1 millisecond'
                         FROM inbox_identity i ORDER BY i.forget_at DESC LIMIT 1), true)")
    -> (Bool) {
        settle_ms: i64 => BigInt,
    }
}

statement! {
    /// Locks messages that nobody else has locked. Where identities are kept, only those whose identity has settled may go.
    Lock<'a>("
        SELECT l.seq FROM unnest($1) AS w (seq)
        CROSS JOIN LATERAL (SELECT m.seq, m.message_id, m.source FROM inbox_message m WHERE m.seq = w.seq
                            FOR UPDATE SKIP LOCKED) l
        WHERE CASE WHEN $2 THEN (SELECT i.purged_at < (SELECT least(now(), min(a.xact_start)) FROM pg_stat_activity a
                                                       WHERE a.datname = current_database() AND a.pid <> pg_backend_pid())
                                                      - $3 * interval '1 millisecond'
                                 FROM inbox_identity i WHERE i.hash = inbox_identity_hash(l.message_id, l.source) LIMIT 1)
                   ELSE true END")
    -> (BigInt) {
        message_seqs: &'a [i64] => Array<BigInt>,
        keeps_identities: bool => Bool,
        settle_ms: i64 => BigInt,
    }
}

statement! {
    /// Removes locked messages with their deliveries, judged anew: nobody can add one any more. Answers how many of each are gone, and
    /// how many deliveries there were.
    Remove(concat!("
        WITH judged AS MATERIALIZED (
            SELECT w.seq, d.deliveries FROM unnest($1) AS w (seq)
            CROSS JOIN LATERAL (SELECT count(*) AS deliveries, bool_and(", is_over!("$2", "$3", "$4"), ") AS is_over
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
    -> (BigInt, BigInt, BigInt) {
        message_seqs: Vec<i64> => Array<BigInt>,
        periods_ms: Vec<i64> => Array<BigInt>,
        handler_ids: Vec<i16> => Array<SmallInt>,
        default_ms: i64 => BigInt,
    }
}

statement! {
    Forget("
        DELETE FROM inbox_identity
        WHERE ctid = ANY (ARRAY(SELECT ctid FROM inbox_identity WHERE forget_at < now() ORDER BY forget_at LIMIT $1
                                FOR UPDATE SKIP LOCKED))") {
        rows: i32 => Integer,
    }
}

statement! {
    Forgettable("SELECT count(*) FROM inbox_identity WHERE forget_at < now()") -> (BigInt) {}
}

statement! {
    /// Ids that became one handler are one.
    IdsOfKey<'a>("
        SELECT same.id FROM inbox_handler_key k
        JOIN inbox_handler own ON own.id = k.handler_id
        JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
        WHERE k.key = $1")
    -> (SmallInt) {
        key: &'a str => Text,
    }
}
