//! Retention: a bounded scan over the messages in seq order. Each step is one operation that renews the lease.
//!
//! There is no other writer in the meantime, so a message, its deliveries and the kept identity change in one
//! transaction. The same transaction records what was checked, and when the first kept message of each block expires.
//! It never deletes pending or running deliveries, and deletes poisoned deliveries and quarantined records only if they
//! have an expiry.

use std::time::Duration;

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::clock::{self, micros};
use super::errors::database;
use super::statement::{only_row, rows, statements};
use crate::store::counts::{count, limit};
use crate::store::identity_hash::IdentityHash;
use crate::store::purging::{
    BLOCK, BLOCKS_MAX, Counted, Cursor, ExpiredCount, IDS_OF_KEY, LATE, LEASE, LEASE_NAME, Periods, PurgeStep, Step,
    Stepped, UNUSED,
};
use crate::types::Result;

rows! {
    /// A message to check, with its identity in case it is kept.
    MessageRow { seq: i64, received_at: i64, message_id: String, source: String }

    /// When and how a delivery was finished.
    FinishedRow { handler_id: i16, status: i16, finished_at: Option<i64> }
}

statements! {
    /// Changes one row if the lease was taken or renewed.
    TakeLease<'a>("
        INSERT INTO inbox_lease (name, holder, held_until) VALUES (:name, :holder, :held_until)
        ON CONFLICT (name) DO UPDATE SET holder = :holder, held_until = :held_until WHERE holder = :holder OR held_until <= :now")
    { name: &'a str, holder: i64, held_until: i64, now: i64 }

    ReleaseLease<'a>("UPDATE inbox_lease SET held_until = 0 WHERE name = :name AND holder = :holder")
    { name: &'a str, holder: i64 }

    Walk("SELECT seq, received_at, message_id, source FROM inbox_message WHERE seq > :cursor ORDER BY seq LIMIT :rows")
    -> MessageRow { cursor: i64, rows: i32 }

    OfBlock("
        SELECT seq, received_at, message_id, source FROM inbox_message
        WHERE seq >= :block * :size AND seq < (:block + 1) * :size ORDER BY seq") -> MessageRow { block: i64, size: i64 }

    DueBlocks("
        SELECT block FROM inbox_kept WHERE policy = :policy AND block > :after_block AND check_at <= :now ORDER BY block LIMIT :blocks_max")
    -> i64 { policy: i64, after_block: i64, now: i64, blocks_max: i32 }

    WalkedTo("SELECT walked_to FROM inbox_retention WHERE policy = :policy") -> i64 { policy: i64 }

    NoteWalked("
        INSERT INTO inbox_retention (policy, walked_to, purged_at) VALUES (:policy, :walked_to, :now)
        ON CONFLICT (policy) DO UPDATE SET walked_to = max(walked_to, excluded.walked_to), purged_at = excluded.purged_at")
    { policy: i64, walked_to: i64, now: i64 }

    NoteKept("
        INSERT INTO inbox_kept (policy, block, check_at) VALUES (:policy, :block, :check_at)
        ON CONFLICT (policy, block) DO UPDATE SET check_at = excluded.check_at") { policy: i64, block: i64, check_at: i64 }

    NothingKept("DELETE FROM inbox_kept WHERE policy = :policy AND block = :block") { policy: i64, block: i64 }

    ForgetBlocks("
        DELETE FROM inbox_kept WHERE policy IN (SELECT policy FROM inbox_retention WHERE purged_at < :before)") { before: i64 }

    ForgetUnused("DELETE FROM inbox_retention WHERE purged_at < :before") { before: i64 }

    /// Skips records whose replay was requested: otherwise they would keep later records from expiring.
    ExpireQuarantined("
        DELETE FROM inbox_quarantine
        WHERE id IN (SELECT id FROM inbox_quarantine WHERE replay_asked_at IS NULL ORDER BY id LIMIT :rows) AND quarantined_at < :before")
    { rows: i32, before: i64 }

    DeliveriesOf("SELECT handler_id, status, finished_at FROM inbox_delivery WHERE message_seq = :message_seq")
    -> FinishedRow { message_seq: i64 }

    RemoveDeliveries("DELETE FROM inbox_delivery WHERE message_seq = :message_seq") { message_seq: i64 }

    RemoveHistory("DELETE FROM inbox_history WHERE message_seq = :message_seq") { message_seq: i64 }

    RemoveAttempts("DELETE FROM inbox_attempt WHERE message_seq = :message_seq") { message_seq: i64 }

    RemoveCorrections("DELETE FROM inbox_correction WHERE message_seq = :message_seq") { message_seq: i64 }

    RemoveMessage("DELETE FROM inbox_message WHERE seq = :message_seq") { message_seq: i64 }

    Keep<'a>("
        INSERT INTO inbox_identity (hash, purged_at, forget_at) VALUES (:hash, :purged_at, :forget_at)
        ON CONFLICT (hash) DO UPDATE SET forget_at = max(forget_at, excluded.forget_at)")
    { hash: &'a [u8], purged_at: i64, forget_at: i64 }

    Forget("
        DELETE FROM inbox_identity
        WHERE hash IN (SELECT hash FROM inbox_identity WHERE forget_at < :now ORDER BY forget_at LIMIT :rows)")
    { now: i64, rows: i32 }

    Forgettable("SELECT count(*) FROM inbox_identity WHERE forget_at < :now") -> i64 { now: i64 }

    /// Records that `ExpireQuarantined` would delete.
    ExpiredQuarantined("
        SELECT count(*) FROM inbox_quarantine WHERE quarantined_at < :before AND replay_asked_at IS NULL")
    -> i64 { before: i64 }

    /// Including the ids that became one handler with it.
    IdsOfKey<'a>(IDS_OF_KEY) -> i16 { key: &'a str }
}

/// A message that can be deleted.
struct Expired {
    seq: i64,
    message_id: String,
    source: String,
    deliveries: u64,
}

pub(super) fn step(conn: &mut SqliteConnection, holder: i64, step: &PurgeStep) -> Result<Stepped> {
    try_step(conn, holder, step).map_err(database("cannot purge"))
}

/// One step in the caller's transaction, if the lease is free or ours.
fn try_step(conn: &mut SqliteConnection, holder: i64, step: &PurgeStep) -> QueryResult<Stepped> {
    let now = clock::now(conn)?;
    let lease = TakeLease { name: LEASE_NAME, holder, held_until: now + micros(LEASE), now };
    if lease.execute(conn)? == 0 {
        return Ok(Stepped::LockedOut);
    }
    let done = match step {
        // Nothing is accepted in the meantime, so no identity must be written before, and there is no accept to wait
        // for.
        PurgeStep::Mark { .. } | PurgeStep::Settle => Step::default(),
        PurgeStep::Remove { periods, keep, cursor, rows } => remove(conn, periods, *keep, *cursor, *rows, now)?,
        PurgeStep::Forget { rows } => {
            let before = now - micros(UNUSED);
            ForgetBlocks { before }.execute(conn)?;
            ForgetUnused { before }.execute(conn)?;
            let identities = Forget { now, rows: limit(*rows) }.execute(conn)?;
            Step { identities: identities as u64, ..Step::default() }
        }
        PurgeStep::Expire { older_than, rows } => {
            let expire = ExpireQuarantined { rows: limit(*rows), before: now - micros(*older_than) };
            Step { quarantined: expire.execute(conn)? as u64, ..Step::default() }
        }
    };
    Ok(Stepped::Done(done))
}

/// Deletes the expired messages of one part of the scan, and records the part as checked.
fn remove(
    conn: &mut SqliteConnection,
    periods: &Periods,
    keep: Option<Duration>,
    cursor: Cursor,
    rows: u32,
    now: i64,
) -> QueryResult<Step> {
    let walked = walk(conn, periods, cursor, rows, now)?;
    let over = judge(conn, periods, walked.messages, now)?;
    let mut step = Step { cursor: walked.cursor, messages: over.len() as u64, ..Step::default() };
    for Expired { seq, message_id, source, .. } in over {
        step.deliveries += RemoveDeliveries { message_seq: seq }.execute(conn)? as u64;
        RemoveHistory { message_seq: seq }.execute(conn)?;
        RemoveAttempts { message_seq: seq }.execute(conn)?;
        RemoveCorrections { message_seq: seq }.execute(conn)?;
        RemoveMessage { message_seq: seq }.execute(conn)?;
        if let Some(keep) = keep {
            let IdentityHash(hash) = IdentityHash::of(&message_id, &source);
            Keep { hash: &hash, purged_at: now, forget_at: now + micros(keep) }.execute(conn)?;
            step.identities += 1;
        }
    }
    for block in walked.blocks {
        note_kept(conn, periods, block, now)?;
    }
    if let Some(walked_to) = walked.walked_to {
        NoteWalked { policy: periods.policy(), walked_to, now }.execute(conn)?;
    }
    Ok(step)
}

/// Records when the first remaining message of a block expires.
fn note_kept(conn: &mut SqliteConnection, periods: &Periods, block: i64, now: i64) -> QueryResult<()> {
    let mut check_at = None;
    for MessageRow { seq, received_at, .. } in (OfBlock { block, size: BLOCK }).load::<MessageRow>(conn)? {
        let deliveries = DeliveriesOf { message_seq: seq }.load::<FinishedRow>(conn)?;
        let over_at = deliveries.iter().map(|row| row.over_at(periods, now)).max();
        let over_at = over_at.unwrap_or(received_at + micros(periods.default));
        let over_at = over_at.max(received_at + micros(periods.shortest()));
        check_at = Some(check_at.map_or(over_at, |first: i64| first.min(over_at)));
    }
    let policy = periods.policy();
    match check_at {
        Some(check_at) => NoteKept { policy, block, check_at }.execute(conn)?,
        None => NothingKept { policy, block }.execute(conn)?,
    };
    Ok(())
}

impl FinishedRow {
    /// When it expires. An unfinished delivery finishes now at the earliest, done or poisoned, so this is never too late.
    fn over_at(&self, periods: &Periods, now: i64) -> i64 {
        let period = periods.of(self.handler_id);
        self.expiry(periods).unwrap_or(now + micros(periods.poisoned.map_or(period, |poisoned| period.min(poisoned))))
    }

    /// When a finished delivery expires; `None` for one that waits for a handler or an operator.
    fn expiry(&self, periods: &Periods) -> Option<i64> {
        let period = match self.status {
            // Done or discarded.
            2 | 4 => periods.of(self.handler_id),
            // Poisoned.
            3 => periods.poisoned?,
            _ => return None,
        };
        self.finished_at.map(|at| at + micros(period))
    }
}

/// The result of a scan step.
struct ScanStep {
    messages: Vec<MessageRow>,
    blocks: Vec<i64>,
    /// The last message that is not checked again as a new one.
    walked_to: Option<i64>,
    /// Where the scan continues.
    cursor: Option<Cursor>,
}

/// One part of the scan: first the blocks of kept messages that are due, then the messages that were never checked.
fn walk(conn: &mut SqliteConnection, periods: &Periods, cursor: Cursor, rows: u32, now: i64) -> QueryResult<ScanStep> {
    let after_seq = match cursor {
        Cursor::Kept { after_block } => {
            let walked = walk_kept(conn, periods, after_block, rows, now)?;
            if !walked.blocks.is_empty() {
                return Ok(walked);
            }
            None
        }
        Cursor::Fresh { after_seq } => after_seq,
    };
    walk_fresh(conn, periods, after_seq, rows, now)
}

/// Complete blocks that are due.
fn walk_kept(
    conn: &mut SqliteConnection,
    periods: &Periods,
    after_block: i64,
    rows: u32,
    now: i64,
) -> QueryResult<ScanStep> {
    let due = DueBlocks { policy: periods.policy(), after_block, now, blocks_max: BLOCKS_MAX };
    let (mut messages, mut blocks) = (Vec::new(), Vec::new());
    for block in due.load::<i64>(conn)? {
        messages.extend(OfBlock { block, size: BLOCK }.load::<MessageRow>(conn)?);
        blocks.push(block);
        if messages.len() >= rows as usize {
            break;
        }
    }
    let cursor = blocks.last().map(|block| Cursor::Kept { after_block: *block });
    Ok(ScanStep { messages, blocks, walked_to: None, cursor })
}

/// Messages that no purge has checked. With one writer, none of them becomes visible late; young ones are still checked
/// again, as on PostgreSQL.
fn walk_fresh(
    conn: &mut SqliteConnection,
    periods: &Periods,
    after_seq: Option<i64>,
    rows: u32,
    now: i64,
) -> QueryResult<ScanStep> {
    let after_seq = match after_seq {
        Some(seq) => seq,
        None => WalkedTo { policy: periods.policy() }.load(conn)?.pop().unwrap_or(-1),
    };
    let messages = Walk { cursor: after_seq, rows: limit(rows) }.load::<MessageRow>(conn)?;
    let (shortest, late) = (micros(periods.shortest()), micros(LATE));
    let is_at_end = messages.len() < rows as usize || !messages.iter().any(|row| row.received_at < now - shortest);
    let cursor = messages.last().filter(|_| !is_at_end).map(|row| Cursor::Fresh { after_seq: Some(row.seq) });
    let old = messages.iter().take_while(|row| row.received_at < now - shortest.max(late));
    let old: Vec<i64> = old.map(|row| row.seq).collect();
    let mut blocks: Vec<i64> = old.iter().map(|seq| seq / BLOCK).collect();
    blocks.dedup();
    Ok(ScanStep { messages, blocks, walked_to: old.last().copied(), cursor })
}

/// Those of these messages that can be deleted.
fn judge(
    conn: &mut SqliteConnection,
    periods: &Periods,
    messages: Vec<MessageRow>,
    now: i64,
) -> QueryResult<Vec<Expired>> {
    let mut over = Vec::new();
    for MessageRow { seq, received_at, message_id, source } in messages {
        if received_at >= now - micros(periods.shortest()) {
            continue;
        }
        let deliveries = DeliveriesOf { message_seq: seq }.load::<FinishedRow>(conn)?;
        let is_orphan = deliveries.is_empty() && received_at < now - micros(periods.default);
        let is_over = |row: &FinishedRow| row.expiry(periods).is_some_and(|at| at < now);
        if is_orphan || (!deliveries.is_empty() && deliveries.iter().all(is_over)) {
            over.push(Expired { seq, message_id, source, deliveries: deliveries.len() as u64 });
        }
    }
    Ok(over)
}

/// Without it, the next purge would wait for the lease to expire.
pub(super) fn release(conn: &mut SqliteConnection, holder: i64) -> Result<()> {
    let released = ReleaseLease { name: LEASE_NAME, holder }.execute(conn);
    released.map(drop).map_err(database("cannot release the retention lease"))
}

/// Counts in one part of the table. Needs no lease, because it changes nothing.
pub(super) fn count_purgeable(
    conn: &mut SqliteConnection,
    periods: &Periods,
    cursor: i64,
    rows: u32,
) -> Result<Counted> {
    let cannot = || database("cannot count the messages to purge");
    let now = clock::now(conn).map_err(cannot())?;
    let walked = Walk { cursor, rows: limit(rows) }.load::<MessageRow>(conn).map_err(cannot())?;
    let shortest = now - micros(periods.shortest());
    let is_at_end = walked.len() < rows as usize || !walked.iter().any(|row| row.received_at < shortest);
    let cursor = walked.last().map(|row| row.seq).filter(|_| !is_at_end);
    let over = judge(conn, periods, walked, now).map_err(cannot())?;
    let deliveries = over.iter().map(|over| over.deliveries).sum();
    Ok(Counted { cursor, deliveries, messages: over.len() as u64 })
}

pub(super) fn count_expired(conn: &mut SqliteConnection, quarantined: Option<Duration>) -> Result<ExpiredCount> {
    let cannot = || database("cannot count the expired identities and quarantined records");
    let now = clock::now(conn).map_err(cannot())?;
    let identities = Forgettable { now }.load(conn).and_then(only_row).map_err(cannot())?;
    let Some(older_than) = quarantined else {
        return Ok(ExpiredCount { identities: count(identities), quarantined: 0 });
    };
    let records = ExpiredQuarantined { before: now - micros(older_than) }.load(conn).and_then(only_row);
    Ok(ExpiredCount { identities: count(identities), quarantined: count(records.map_err(cannot())?) })
}

pub(super) fn ids_of_keys(conn: &mut SqliteConnection, keys: &[String]) -> Result<Vec<Vec<i16>>> {
    keys.iter()
        .map(|key| IdsOfKey { key }.load(conn))
        .collect::<QueryResult<_>>()
        .map_err(database("cannot find handlers by their keys"))
}
