//! Retention: a bounded walk over the messages in their order, each step a short transaction that holds the lease's row.
//!
//! A walk looks at messages that are old enough for the first time, and at blocks of messages that were kept when the first of them can go. Both are
//! written down in the step that looks, so a purge costs what goes, not what stays, and the next process goes on where this one was. A
//! message and all its deliveries go together or stay together. Their rows are locked before they are judged for the last time, so a
//! delivery that a redelivery adds meanwhile keeps its message; rows that others have locked are passed over, nobody waits for a purge.
//!
//! Never touches what is pending or running, nor, unless an expiry says so, what is poisoned or quarantined.

mod statements;

use std::time::Duration;

use diesel::QueryResult;
use diesel::result::Error as DieselError;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::process::millis;
use super::statement::only_row;
use crate::store::counts::{count, limit};
use crate::store::purging::{
    BLOCK, BLOCKS_MAX, Counted, Cursor, LATE, LEASE, LEASE_NAME, Periods, PurgeStep, Step, Stepped, UNUSED,
};
use crate::types::Result;
use statements::{
    ByIndex, Count, CountRow, ExpireQuarantined, Forget, ForgetUnused, Forgettable, IdsOfKey, IsSettled, Lock,
    MakeLease, Mark, NoteKept, NoteWalked, ReleaseLease, Remove, RemoveRow, TakeLease, WalkFresh, WalkKept, WalkRow,
};

/// The step that writes identities is over by then: two statements of 20 seconds at the most, and its commit.
const STEP_MAX: Duration = Duration::from_secs(50);

/// Periods as the statements take them.
struct PeriodBinds {
    shortest_ms: i64,
    handler_ids: Vec<i16>,
    periods_ms: Vec<i64>,
    default_ms: i64,
    poisoned_ms: Option<i64>,
}

impl From<&Periods> for PeriodBinds {
    fn from(periods: &Periods) -> Self {
        Self {
            shortest_ms: millis(periods.shortest()),
            handler_ids: periods.of_handlers.iter().map(|(id, _)| *id).collect(),
            periods_ms: periods.of_handlers.iter().map(|(_, period)| millis(*period)).collect(),
            default_ms: millis(periods.default),
            poisoned_ms: periods.poisoned.map(millis),
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
    let mut transaction = conn.build_transaction().read_committed();
    let stepped = transaction.run(async |conn| {
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
                ForgetUnused { unused_ms: millis(UNUSED), rows: limit(*rows) }.execute(conn).await?;
                let identities = Forget { rows: limit(*rows) }.execute(conn).await?;
                Step { identities: identities as u64, ..Step::default() }
            }
            PurgeStep::Expire { older_than, rows } => {
                let expire = ExpireQuarantined { rows: limit(*rows), older_than_ms: millis(*older_than) };
                Step { quarantined: expire.execute(conn).await? as u64, ..Step::default() }
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

/// What a step looked at.
struct Walked {
    /// Messages that can go.
    seqs: Vec<i64>,
    /// Blocks that were looked at.
    blocks: Vec<i64>,
    /// The last message that need not be looked at again for being new.
    walked_to: Option<i64>,
    /// Where the walk goes on.
    cursor: Option<Cursor>,
}

async fn walk(conn: &mut AsyncPgConnection, periods: &Periods, cursor: Cursor, rows: u32) -> QueryResult<Walked> {
    let after_seq = match cursor {
        Cursor::Kept { after_block } => {
            let walked = walk_kept(conn, periods, after_block, rows).await?;
            if !walked.blocks.is_empty() {
                return Ok(walked);
            }
            None
        }
        Cursor::Fresh { after_seq } => after_seq,
    };
    walk_fresh(conn, periods, after_seq, rows).await
}

async fn walk_kept(
    conn: &mut AsyncPgConnection,
    periods: &Periods,
    after_block: i64,
    rows: u32,
) -> QueryResult<Walked> {
    let PeriodBinds { shortest_ms, handler_ids, periods_ms, default_ms, poisoned_ms } = periods.into();
    let walk = WalkKept {
        policy: periods.policy(),
        after_block,
        blocks_max: BLOCKS_MAX,
        block: BLOCK,
        rows: limit(rows),
        periods_ms,
        handler_ids,
        default_ms,
        shortest_ms,
        poisoned_ms,
    };
    let WalkRow { last, is_at_end, seqs, blocks, walked_to } = walk.load(conn).await.and_then(only_row)?;
    let cursor = match last.filter(|_| !is_at_end) {
        Some(after_block) => Cursor::Kept { after_block },
        None => Cursor::Fresh { after_seq: None },
    };
    Ok(Walked { seqs, blocks, walked_to, cursor: Some(cursor) })
}

async fn walk_fresh(
    conn: &mut AsyncPgConnection,
    periods: &Periods,
    after_seq: Option<i64>,
    rows: u32,
) -> QueryResult<Walked> {
    let PeriodBinds { shortest_ms, handler_ids, periods_ms, default_ms, poisoned_ms } = periods.into();
    let walk = WalkFresh {
        after_seq,
        policy: periods.policy(),
        rows: limit(rows),
        late_ms: millis(LATE),
        block: BLOCK,
        periods_ms,
        handler_ids,
        default_ms,
        shortest_ms,
        poisoned_ms,
    };
    let WalkRow { last, is_at_end, seqs, blocks, walked_to } = walk.load(conn).await.and_then(only_row)?;
    let cursor = last.filter(|_| !is_at_end).map(|seq| Cursor::Fresh { after_seq: Some(seq) });
    Ok(Walked { seqs, blocks, walked_to, cursor })
}

/// Writes down what was looked at, after what could go has gone.
async fn note(conn: &mut AsyncPgConnection, periods: &Periods, walked: &Walked) -> QueryResult<()> {
    let PeriodBinds { shortest_ms, handler_ids, periods_ms, default_ms, poisoned_ms } = periods.into();
    let policy = periods.policy();
    if !walked.blocks.is_empty() {
        let (blocks, block) = (&*walked.blocks, BLOCK);
        NoteKept { blocks, policy, block, periods_ms, handler_ids, default_ms, shortest_ms, poisoned_ms }
            .execute(conn)
            .await?;
    }
    if let Some(walked_to) = walked.walked_to {
        NoteWalked { policy, walked_to }.execute(conn).await?;
    }
    Ok(())
}

async fn mark(
    conn: &mut AsyncPgConnection,
    periods: &Periods,
    keep: Duration,
    cursor: Cursor,
    rows: u32,
) -> QueryResult<Step> {
    let Walked { seqs, cursor, .. } = walk(conn, periods, cursor, rows).await?;
    if seqs.is_empty() {
        return Ok(Step { cursor, ..Step::default() });
    }
    let mark = Mark { message_seqs: &seqs, keep_ms: millis(keep) };
    let identities = mark.load(conn).await.and_then(only_row)?;
    Ok(Step { cursor, messages: seqs.len() as u64, identities: count(identities), ..Step::default() })
}

async fn settle(conn: &mut AsyncPgConnection, settle_ms: i64) -> QueryResult<Step> {
    let is_settled: bool = IsSettled { settle_ms }.load(conn).await.and_then(only_row)?;
    Ok(Step { cursor: (!is_settled).then_some(Cursor::START), ..Step::default() })
}

async fn remove(
    conn: &mut AsyncPgConnection,
    periods: &Periods,
    settle_ms: Option<i64>,
    cursor: Cursor,
    rows: u32,
) -> QueryResult<Step> {
    let walked = walk(conn, periods, cursor, rows).await?;
    let step = match walked.seqs.is_empty() {
        true => Step::default(),
        false => remove_walked(conn, periods, settle_ms, &walked.seqs).await?,
    };
    note(conn, periods, &walked).await?;
    Ok(Step { cursor: walked.cursor, ..step })
}

async fn remove_walked(
    conn: &mut AsyncPgConnection,
    periods: &Periods,
    settle_ms: Option<i64>,
    seqs: &[i64],
) -> QueryResult<Step> {
    let keeps_identities = settle_ms.is_some();
    let lock = Lock { message_seqs: seqs, keeps_identities, settle_ms: settle_ms.unwrap_or_default() };
    let message_seqs: Vec<i64> = lock.load(conn).await?;
    if message_seqs.is_empty() {
        return Ok(Step::default());
    }
    let PeriodBinds { handler_ids, periods_ms, default_ms, poisoned_ms, .. } = periods.into();
    let remove = Remove { message_seqs, handler_ids, periods_ms, default_ms, poisoned_ms };
    let RemoveRow { messages, deliveries, found } = remove.load(conn).await.and_then(only_row)?;
    if deliveries != found {
        // Somebody replayed one of them that very moment. Nothing goes; the next try sees it.
        return Err(DieselError::RollbackTransaction);
    }
    let identities = if keeps_identities { count(messages) } else { 0 };
    Ok(Step { deliveries: count(deliveries), messages: count(messages), identities, ..Step::default() })
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
    let PeriodBinds { shortest_ms, handler_ids, periods_ms, default_ms, poisoned_ms } = periods.into();
    let counting = Count { cursor, rows: limit(rows), shortest_ms, handler_ids, periods_ms, default_ms, poisoned_ms };
    let mut transaction = conn.build_transaction().read_committed();
    let counted = transaction.run(async |conn| {
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
