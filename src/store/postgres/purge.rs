//! Retention: a bounded scan over the messages in seq order. Each step is a short transaction that holds the lease's
//! row.
//!
//! A scan checks messages that are old enough for the first time, and blocks of kept messages when the first message of
//! a block expires. Both are recorded in the step that checks, so the cost of a purge depends on the rows that it
//! deletes, and the next process continues where this one stopped. A message and all its deliveries are deleted
//! together or kept together. Their rows are locked before the final check, so a delivery that a redelivery adds in the
//! meantime keeps its message. Rows that others have locked are skipped; nothing waits for a purge.
//!
//! It never deletes pending or running deliveries, and deletes poisoned deliveries and quarantined records only if they
//! have an expiry.

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
    BLOCK, BLOCKS_MAX, Counted, Cursor, ExpiredCount, LATE, LEASE, LEASE_NAME, Periods, PurgeStep, Step, Stepped,
    UNUSED,
};
use crate::types::Result;
use statements::{
    ByIndex, Count, CountRow, ExpireQuarantined, ExpiredQuarantined, Forget, ForgetUnused, Forgettable, IdsOfKey,
    IsSettled, Lock, MakeLease, Mark, NoteKept, NoteWalked, ReleaseLease, Remove, RemoveRow, TakeLease, WalkFresh,
    WalkKept, WalkRow,
};

/// The step that writes identities takes less: at most two statements of 20 seconds, and its commit.
const STEP_MAX: Duration = Duration::from_secs(50);

/// Periods as bound by the statements.
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

/// `patience` is the upper limit for an operation of this store; other stores are assumed to be no slower. A message
/// may be deleted this long after its identity was written. Accepts that began before and still run are also awaited,
/// as far as the server shows them.
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

/// Takes or renews the lease. Its row stays locked until the step has ended.
async fn take_lease(conn: &mut AsyncPgConnection, holder: i64) -> QueryResult<bool> {
    let take = || TakeLease { holder, lease_ms: millis(LEASE), name: LEASE_NAME };
    if !take().load::<String>(conn).await?.is_empty() {
        return Ok(true);
    }
    let is_made = MakeLease { name: LEASE_NAME }.execute(conn).await? == 1;
    Ok(is_made && !take().load::<String>(conn).await?.is_empty())
}

/// The result of a scan step.
struct ScanStep {
    /// Messages that can be deleted.
    seqs: Vec<i64>,
    /// Blocks that were checked.
    blocks: Vec<i64>,
    /// The last message that is not checked again as a new one.
    walked_to: Option<i64>,
    /// Where the scan continues.
    cursor: Option<Cursor>,
}

/// One part of the scan: first the blocks of kept messages that are due, then the messages that were never checked.
async fn walk(conn: &mut AsyncPgConnection, periods: &Periods, cursor: Cursor, rows: u32) -> QueryResult<ScanStep> {
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

/// Kept messages of the blocks that are due. Without a due block, the scan goes on with the new messages.
async fn walk_kept(
    conn: &mut AsyncPgConnection,
    periods: &Periods,
    after_block: i64,
    rows: u32,
) -> QueryResult<ScanStep> {
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
    Ok(ScanStep { seqs, blocks, walked_to, cursor: Some(cursor) })
}

/// Messages that no purge with these periods has checked.
async fn walk_fresh(
    conn: &mut AsyncPgConnection,
    periods: &Periods,
    after_seq: Option<i64>,
    rows: u32,
) -> QueryResult<ScanStep> {
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
    Ok(ScanStep { seqs, blocks, walked_to, cursor })
}

/// Records what was checked, after the expired messages were deleted.
async fn note(conn: &mut AsyncPgConnection, periods: &Periods, walked: &ScanStep) -> QueryResult<()> {
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

/// Writes the identities of messages that can be deleted. Records nothing about the scan: the messages are checked
/// again before they are deleted.
async fn mark(
    conn: &mut AsyncPgConnection,
    periods: &Periods,
    keep: Duration,
    cursor: Cursor,
    rows: u32,
) -> QueryResult<Step> {
    let ScanStep { seqs, cursor, .. } = walk(conn, periods, cursor, rows).await?;
    if seqs.is_empty() {
        return Ok(Step { cursor, ..Step::default() });
    }
    let mark = Mark { message_seqs: &seqs, keep_ms: millis(keep) };
    let identities = mark.load(conn).await.and_then(only_row)?;
    Ok(Step { cursor, messages: seqs.len() as u64, identities: count(identities), ..Step::default() })
}

/// The step has a cursor as long as the identities have not settled.
async fn settle(conn: &mut AsyncPgConnection, settle_ms: i64) -> QueryResult<Step> {
    let is_settled: bool = IsSettled { settle_ms }.load(conn).await.and_then(only_row)?;
    Ok(Step { cursor: (!is_settled).then_some(Cursor::START), ..Step::default() })
}

/// Deletes the expired messages of one part of the scan, and records the part as checked.
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

/// Deletes those of the messages that are not locked and still expired.
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
        // An operator replayed one of them at the same moment. Nothing is deleted; the next try sees it.
        return Err(DieselError::RollbackTransaction);
    }
    let identities = if keeps_identities { count(messages) } else { 0 };
    Ok(Step { deliveries: count(deliveries), messages: count(messages), identities, ..Step::default() })
}

/// Without it, the next purge would wait for the lease to expire.
pub(super) async fn release(conn: &mut AsyncPgConnection, holder: i64) -> Result<()> {
    let release = ReleaseLease { name: LEASE_NAME, holder };
    release.execute(conn).await.map(drop).map_err(database("cannot release the retention lease"))
}

/// Counts in one part of the table. Needs no lease, because it changes nothing.
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
        counted.await.map_err(database("cannot count the messages to purge"))?;
    Ok(Counted { cursor: last.filter(|_| !is_at_end), deliveries: count(deliveries), messages: count(messages) })
}

pub(super) async fn count_expired(conn: &mut AsyncPgConnection, quarantined: Option<Duration>) -> Result<ExpiredCount> {
    let identities = Forgettable {}.load(conn).await.and_then(only_row);
    let identities = count(identities.map_err(database("cannot count the expired identities"))?);
    // A role that expires none needs no right to read them.
    let Some(older_than) = quarantined else { return Ok(ExpiredCount { identities, quarantined: 0 }) };
    let records = ExpiredQuarantined { older_than_ms: millis(older_than) }.load(conn).await.and_then(only_row);
    let records = records.map_err(database("cannot count the expired quarantined records"))?;
    Ok(ExpiredCount { identities, quarantined: count(records) })
}

pub(super) async fn ids_of_keys(conn: &mut AsyncPgConnection, keys: &[String]) -> Result<Vec<Vec<i16>>> {
    let mut found = Vec::with_capacity(keys.len());
    for key in keys {
        let ids = IdsOfKey { key }.load(conn).await;
        found.push(ids.map_err(database("cannot find handlers by their keys"))?);
    }
    Ok(found)
}
