//! Retention: a bounded walk over the messages in their order, each step a short transaction that holds the lease's row.
//!
//! A step looks at so many messages, whatever becomes of them: its cost is that of its rows, neither of the table nor of what is kept. A
//! message and all its deliveries go together or stay together. Their rows are locked before they are judged for the last time, so a
//! delivery that a redelivery adds meanwhile keeps its message; rows that others have locked are passed over, nobody waits for a purge.
//!
//! Never touches what is pending, running, poisoned or quarantined.

mod statements;

use std::time::Duration;

use diesel::QueryResult;
use diesel::result::Error as DieselError;
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::process::millis;
use super::statement::only_row;
use crate::store::counts::{count, limit};
use crate::store::purging::{Counted, LEASE, LEASE_NAME, Periods, PurgeStep, Step, Stepped};
use crate::types::Result;
use statements::{
    ByIndex, Count, CountRow, Forget, Forgettable, IdsOfKey, IsSettled, Lock, MakeLease, Mark, ReleaseLease, Remove,
    RemoveRow, TakeLease, Walk, WalkRow,
};

/// The step that writes identities is over by then: two statements of 20 seconds at the most, and its commit.
const STEP_MAX: Duration = Duration::from_secs(50);

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

/// `patience` is how long an act of this store may take at the most, and those of others are taken to be no slower. So long after an
/// identity was written its message may go; accepts that began before and still run are waited for as well, as far as the server lets
/// us see them.
pub(super) async fn step(
    conn: &mut AsyncPgConnection,
    holder: i64,
    step: &PurgeStep,
    patience: Duration,
) -> Result<Stepped> {
    let settle_ms = millis(STEP_MAX + patience);
    let stepped = conn.transaction(async |conn| {
        if !take_lease(conn, holder).await? {
            return Ok(Stepped::LockedOut);
        }
        let done = match step {
            PurgeStep::Mark { periods, keep, cursor, rows } => mark(conn, periods, *keep, *cursor, *rows).await?,
            PurgeStep::Settle => settle(conn, settle_ms).await?,
            PurgeStep::Remove { periods, keep, cursor, rows } => {
                remove(conn, periods, keep.map(|_| settle_ms), *cursor, *rows).await?
            }
            PurgeStep::Forget { rows } => {
                let identities = Forget { rows: limit(*rows) }.execute(conn).await?;
                Step { identities: identities as u64, ..Step::default() }
            }
        };
        QueryResult::Ok(Stepped::Done(done))
    });
    stepped.await.map_err(database("cannot purge"))
}

async fn take_lease(conn: &mut AsyncPgConnection, holder: i64) -> QueryResult<bool> {
    let take = || TakeLease { holder, lease_ms: millis(LEASE), name: LEASE_NAME };
    if !take().load::<String>(conn).await?.is_empty() {
        return Ok(true);
    }
    let is_made = MakeLease { name: LEASE_NAME }.execute(conn).await? == 1;
    Ok(is_made && !take().load::<String>(conn).await?.is_empty())
}

/// The messages that can go, and where the walk goes on.
async fn walk(
    conn: &mut AsyncPgConnection,
    periods: &Periods,
    cursor: i64,
    rows: u32,
) -> QueryResult<(Vec<i64>, Option<i64>)> {
    let Given { shortest_ms, handler_ids, periods_ms, default_ms } = periods.into();
    let walk = Walk { cursor, rows: limit(rows), shortest_ms, handler_ids, periods_ms, default_ms };
    let WalkRow { last, is_at_end, seqs } = walk.load(conn).await.and_then(only_row)?;
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
    let identities = mark.load(conn).await.and_then(only_row)?;
    Ok(Step { cursor, messages: seqs.len() as u64, identities: count(identities), deliveries: 0 })
}

async fn settle(conn: &mut AsyncPgConnection, settle_ms: i64) -> QueryResult<Step> {
    let is_settled: bool = IsSettled { settle_ms }.load(conn).await.and_then(only_row)?;
    Ok(Step { cursor: (!is_settled).then_some(0), ..Step::default() })
}

async fn remove(
    conn: &mut AsyncPgConnection,
    periods: &Periods,
    settle_ms: Option<i64>,
    cursor: i64,
    rows: u32,
) -> QueryResult<Step> {
    let (seqs, cursor) = walk(conn, periods, cursor, rows).await?;
    let keeps_identities = settle_ms.is_some();
    let lock = Lock { message_seqs: &seqs, keeps_identities, settle_ms: settle_ms.unwrap_or_default() };
    let message_seqs = if seqs.is_empty() { Vec::new() } else { lock.load(conn).await? };
    if message_seqs.is_empty() {
        return Ok(Step { cursor, ..Step::default() });
    }
    let Given { handler_ids, periods_ms, default_ms, .. } = periods.into();
    let remove = Remove { message_seqs, handler_ids, periods_ms, default_ms };
    let RemoveRow { messages, deliveries, found } = remove.load(conn).await.and_then(only_row)?;
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
    let counted = conn.transaction(async |conn| {
        ByIndex {}.load::<String>(conn).await?;
        counting.load(conn).await.and_then(only_row)
    });
    let CountRow { last, is_at_end, messages, deliveries } =
        counted.await.map_err(database("cannot count what can be purged"))?;
    Ok(Counted { cursor: last.filter(|_| !is_at_end), deliveries: count(deliveries), messages: count(messages) })
}

pub(super) async fn count_forgettable(conn: &mut AsyncPgConnection) -> Result<u64> {
    let counted = Forgettable {}.load(conn).await.and_then(only_row);
    counted.map(count).map_err(database("cannot count what can be forgotten"))
}

pub(super) async fn ids_of_keys(conn: &mut AsyncPgConnection, keys: &[String]) -> Result<Vec<Vec<i16>>> {
    let mut found = Vec::with_capacity(keys.len());
    for key in keys {
        let ids = IdsOfKey { key }.load(conn).await;
        found.push(ids.map_err(database("cannot find handlers by their keys"))?);
    }
    Ok(found)
}
