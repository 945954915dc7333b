//! Retention: a bounded walk over the messages in their order, each step a short transaction that holds the lease's row.
//!
//! A step looks at so many messages, whatever becomes of them: its cost is that of its rows, neither of the table nor of what is kept. A
//! message and all its deliveries go together or stay together. Their rows are locked before they are judged for the last time, so a
//! delivery that a redelivery adds meanwhile keeps its message; rows that others have locked are passed over, nobody waits for a purge.
//!
//! Never touches what is pending, running, poisoned or quarantined.

use std::time::Duration;

use diesel::QueryResult;
use diesel::result::Error as DieselError;
use diesel::sql_types::{Array, BigInt, Bool, Integer, Nullable, SmallInt, Text};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::process::millis;
use super::statement::{only_row, statement};
use crate::error::Result;
use crate::store::purging::{Counted, LEASE, LEASE_NAME, Periods, PurgeStep, Step, Stepped};

/// How long after an identity was written its message may go: longer than the step that wrote it can have taken to commit. Accepts that
/// began before then and still run are waited for as well, as far as the server lets us see them.
const SETTLE: Duration = Duration::from_secs(120);

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

statement! {
    /// Answers only to who has the lease or can have it: whoever holds the row this very moment has it. The settings are for the rest of
    /// the transaction: short waits; no fsync of our own, because a purge that a crash undoes is done again; and no scan, whatever the
    /// planner believes.
    TakeLease<'a>("
        UPDATE inbox_lease SET holder = $1, held_until = now() + $2 * interval '1 millisecond'
        WHERE ctid = ANY (ARRAY(SELECT ctid FROM inbox_lease
                                WHERE name = $3 AND (holder = $1 OR held_until <= now()) FOR NO KEY UPDATE SKIP LOCKED))
        RETURNING holder, concat(set_config('lock_timeout', '1s', true), set_config('statement_timeout', '20s', true),
                                 set_config('synchronous_commit', 'off', true), set_config('enable_seqscan', 'off', true))")
    -> (BigInt, Text) {
        holder: i64 => BigInt,
        lease_ms: i64 => BigInt,
        name: &'a str => Text,
    }
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

/// Periods as the statements take them.
struct Given {
    shortest_ms: i64,
    handler_ids: Vec<i16>,
    periods_ms: Vec<i64>,
    default_ms: i64,
}

impl From<&Periods> for Given {
    fn from(periods: &Periods) -> Self {
        Self {
            shortest_ms: millis(periods.shortest()),
            handler_ids: periods.of_handlers.iter().map(|(id, _)| *id).collect(),
            periods_ms: periods.of_handlers.iter().map(|(_, period)| millis(*period)).collect(),
            default_ms: millis(periods.default),
        }
    }
}

pub(super) async fn step(conn: &mut AsyncPgConnection, holder: i64, step: &PurgeStep) -> Result<Stepped> {
    let stepped = conn.transaction(async |conn| {
        if !take_lease(conn, holder).await? {
            return Ok(Stepped::LockedOut);
        }
        let done = match step {
            PurgeStep::Mark { periods, keep, cursor, rows } => mark(conn, periods, *keep, *cursor, *rows).await?,
            PurgeStep::Settle => settle(conn).await?,
            PurgeStep::Remove { periods, keep, cursor, rows } => {
                remove(conn, periods, keep.is_some(), *cursor, *rows).await?
            }
            PurgeStep::Forget { rows } => {
                let identities = Forget { rows: limit(*rows) }.execute(conn).await?;
                Step { identities: u64::try_from(identities).unwrap_or_default(), ..Step::default() }
            }
        };
        QueryResult::Ok(Stepped::Done(done))
    });
    stepped.await.map_err(database("cannot purge"))
}

async fn take_lease(conn: &mut AsyncPgConnection, holder: i64) -> QueryResult<bool> {
    let take = || TakeLease { holder, lease_ms: millis(LEASE), name: LEASE_NAME };
    if !take().load::<(i64, String)>(conn).await?.is_empty() {
        return Ok(true);
    }
    let is_made = MakeLease { name: LEASE_NAME }.execute(conn).await? == 1;
    Ok(is_made && !take().load::<(i64, String)>(conn).await?.is_empty())
}

type Walked = (Option<i64>, bool, Vec<i64>);

/// The messages that can go, and where the walk goes on.
async fn walk(
    conn: &mut AsyncPgConnection,
    periods: &Periods,
    cursor: i64,
    rows: u32,
) -> QueryResult<(Vec<i64>, Option<i64>)> {
    let Given { shortest_ms, handler_ids, periods_ms, default_ms } = periods.into();
    let walk = Walk { cursor, rows: limit(rows), shortest_ms, handler_ids, periods_ms, default_ms };
    let (last, is_at_end, seqs) = walk.load::<Walked>(conn).await.and_then(only_row)?;
    Ok((seqs, last.filter(|_| !is_at_end)))
}

async fn mark(
    conn: &mut AsyncPgConnection,
    periods: &Periods,
    keep: Duration,
    cursor: i64,
    rows: u32,
) -> QueryResult<Step> {
    let (seqs, cursor) = walk(conn, periods, cursor, rows).await?;
    if seqs.is_empty() {
        return Ok(Step { cursor, ..Step::default() });
    }
    let mark = Mark { message_seqs: &seqs, keep_ms: millis(keep) };
    let (identities,) = mark.load::<(i64,)>(conn).await.and_then(only_row)?;
    Ok(Step { cursor, messages: seqs.len() as u64, identities: count(identities), deliveries: 0 })
}

async fn settle(conn: &mut AsyncPgConnection) -> QueryResult<Step> {
    let is_settled = IsSettled { settle_ms: millis(SETTLE) };
    let (is_settled,) = is_settled.load::<(bool,)>(conn).await.and_then(only_row)?;
    Ok(Step { cursor: (!is_settled).then_some(0), ..Step::default() })
}

async fn remove(
    conn: &mut AsyncPgConnection,
    periods: &Periods,
    keeps_identities: bool,
    cursor: i64,
    rows: u32,
) -> QueryResult<Step> {
    let (seqs, cursor) = walk(conn, periods, cursor, rows).await?;
    let lock = Lock { message_seqs: &seqs, keeps_identities, settle_ms: millis(SETTLE) };
    let locked = if seqs.is_empty() { Vec::new() } else { lock.load::<(i64,)>(conn).await? };
    if locked.is_empty() {
        return Ok(Step { cursor, ..Step::default() });
    }
    let Given { handler_ids, periods_ms, default_ms, .. } = periods.into();
    let message_seqs = locked.into_iter().map(|(seq,)| seq).collect();
    let remove = Remove { message_seqs, handler_ids, periods_ms, default_ms };
    let (messages, deliveries, found) = remove.load::<(i64, i64, i64)>(conn).await.and_then(only_row)?;
    if deliveries != found {
        // Somebody replayed one of them that very moment. Nothing goes; the next try sees it.
        return Err(DieselError::RollbackTransaction);
    }
    let identities = if keeps_identities { count(messages) } else { 0 };
    Ok(Step { cursor, deliveries: count(deliveries), messages: count(messages), identities })
}

pub(super) async fn release(conn: &mut AsyncPgConnection, holder: i64) -> Result<()> {
    let release = ReleaseLease { name: LEASE_NAME, holder };
    release.execute(conn).await.map(drop).map_err(database("cannot let the lease of retention go"))
}

pub(super) async fn count_purgeable(
    conn: &mut AsyncPgConnection,
    periods: &Periods,
    cursor: i64,
    rows: u32,
) -> Result<Counted> {
    let Given { shortest_ms, handler_ids, periods_ms, default_ms } = periods.into();
    let counting = Count { cursor, rows: limit(rows), shortest_ms, handler_ids, periods_ms, default_ms };
    let counted = counting.load::<(Option<i64>, bool, i64, i64)>(conn).await.and_then(only_row);
    let (last, is_at_end, messages, deliveries) = counted.map_err(database("cannot count what can be purged"))?;
    Ok(Counted { cursor: last.filter(|_| !is_at_end), deliveries: count(deliveries), messages: count(messages) })
}

pub(super) async fn count_forgettable(conn: &mut AsyncPgConnection) -> Result<u64> {
    let counted = Forgettable {}.load::<(i64,)>(conn).await.and_then(only_row);
    counted.map(|(identities,)| count(identities)).map_err(database("cannot count what can be forgotten"))
}

pub(super) async fn ids_of_keys(conn: &mut AsyncPgConnection, keys: &[String]) -> Result<Vec<Vec<i16>>> {
    let mut found = Vec::with_capacity(keys.len());
    for key in keys {
        let ids =
            IdsOfKey { key }.load::<(i16,)>(conn).await.map_err(database("cannot find handlers by their keys"))?;
        found.push(ids.into_iter().map(|(id,)| id).collect());
    }
    Ok(found)
}

fn limit(rows: u32) -> i32 {
    i32::try_from(rows).unwrap_or(i32::MAX)
}

fn count(rows: i64) -> u64 {
    u64::try_from(rows).unwrap_or_default()
}
