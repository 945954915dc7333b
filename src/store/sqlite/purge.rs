//! Retention: a bounded walk over the messages in their order, each step one act that renews the lease.
//!
//! Nobody else writes meanwhile, so a message, its deliveries and what is kept of its identity change in one act. Never touches what is
//! pending, running, poisoned or quarantined.

use std::time::Duration;

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::clock::{self, micros};
use super::errors::database;
use super::statement::{only_row, rows, statements};
use crate::store::counts::{count, limit};
use crate::store::identity_hash::IdentityHash;
use crate::store::purging::{Counted, IDS_OF_KEY, LEASE, LEASE_NAME, Periods, PurgeStep, Step, Stepped};
use crate::types::Result;

rows! {
    MessageRow { seq: i64, received_at: i64, message_id: String, source: String }

    /// When and how a delivery was finished.
    FinishedRow { handler_id: i16, status: i16, finished_at: Option<i64> }
}

statements! {
    /// One row when it is taken.
    TakeLease<'a>("
        INSERT INTO inbox_lease (name, holder, held_until) VALUES (:name, :holder, :held_until)
        ON CONFLICT (name) DO UPDATE SET holder = :holder, held_until = :held_until WHERE holder = :holder OR held_until <= :now")
    { name: &'a str, holder: i64, held_until: i64, now: i64 }

    ReleaseLease<'a>("UPDATE inbox_lease SET held_until = 0 WHERE name = :name AND holder = :holder")
    { name: &'a str, holder: i64 }

    Walk("SELECT seq, received_at, message_id, source FROM inbox_message WHERE seq > :cursor ORDER BY seq LIMIT :rows")
    -> MessageRow { cursor: i64, rows: i32 }

    DeliveriesOf("SELECT handler_id, status, finished_at FROM inbox_delivery WHERE message_seq = :message_seq")
    -> FinishedRow { message_seq: i64 }

    RemoveDeliveries("DELETE FROM inbox_delivery WHERE message_seq = :message_seq") { message_seq: i64 }

    RemoveHistory("DELETE FROM inbox_history WHERE message_seq = :message_seq") { message_seq: i64 }

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

    /// Ids that became one handler are one.
    IdsOfKey<'a>(IDS_OF_KEY) -> i16 { key: &'a str }
}

/// A message that can go.
struct Over {
    seq: i64,
    message_id: String,
    source: String,
    deliveries: u64,
}

pub(super) fn step(conn: &mut SqliteConnection, holder: i64, step: &PurgeStep) -> Result<Stepped> {
    try_step(conn, holder, step).map_err(database("cannot purge"))
}

fn try_step(conn: &mut SqliteConnection, holder: i64, step: &PurgeStep) -> QueryResult<Stepped> {
    let now = clock::now(conn)?;
    let lease = TakeLease { name: LEASE_NAME, holder, held_until: now + micros(LEASE), now };
    if lease.execute(conn)? == 0 {
        return Ok(Stepped::LockedOut);
    }
    let done = match step {
        // Nobody accepts meanwhile: there is nothing to write before, and nobody to wait for.
        PurgeStep::Mark { .. } | PurgeStep::Settle => Step::default(),
        PurgeStep::Remove { periods, keep, cursor, rows } => remove(conn, periods, *keep, *cursor, *rows, now)?,
        PurgeStep::Forget { rows } => {
            let identities = Forget { now, rows: limit(*rows) }.execute(conn)?;
            Step { identities: identities as u64, ..Step::default() }
        }
    };
    Ok(Stepped::Done(done))
}

fn remove(
    conn: &mut SqliteConnection,
    periods: &Periods,
    keep: Option<Duration>,
    cursor: i64,
    rows: u32,
    now: i64,
) -> QueryResult<Step> {
    let (over, cursor) = walk(conn, periods, cursor, rows, now)?;
    let mut step = Step { cursor, messages: over.len() as u64, ..Step::default() };
    for Over { seq, message_id, source, .. } in over {
        step.deliveries += RemoveDeliveries { message_seq: seq }.execute(conn)? as u64;
        RemoveHistory { message_seq: seq }.execute(conn)?;
        RemoveMessage { message_seq: seq }.execute(conn)?;
        if let Some(keep) = keep {
            let IdentityHash(hash) = IdentityHash::of(&message_id, &source);
            Keep { hash: &hash, purged_at: now, forget_at: now + micros(keep) }.execute(conn)?;
            step.identities += 1;
        }
    }
    Ok(step)
}

/// The messages that can go among the next rows, and where the walk goes on.
fn walk(
    conn: &mut SqliteConnection,
    periods: &Periods,
    cursor: i64,
    rows: u32,
    now: i64,
) -> QueryResult<(Vec<Over>, Option<i64>)> {
    let walked = Walk { cursor, rows: limit(rows) }.load::<MessageRow>(conn)?;
    let shortest = now - micros(periods.shortest());
    let is_at_end = walked.len() < rows as usize || !walked.iter().any(|row| row.received_at < shortest);
    let last = walked.last().map(|row| row.seq);
    let mut over = Vec::new();
    for MessageRow { seq, received_at, message_id, source } in walked {
        if received_at >= shortest {
            continue;
        }
        let deliveries = DeliveriesOf { message_seq: seq }.load::<FinishedRow>(conn)?;
        let is_orphan = deliveries.is_empty() && received_at < now - micros(periods.default);
        let is_over = |row: &FinishedRow| {
            let own = periods.of_handlers.iter().find(|(id, _)| *id == row.handler_id);
            let period = own.map_or(periods.default, |(_, period)| *period);
            // Done or discarded.
            matches!(row.status, 2 | 4) && row.finished_at.is_some_and(|at| at < now - micros(period))
        };
        if is_orphan || (!deliveries.is_empty() && deliveries.iter().all(is_over)) {
            over.push(Over { seq, message_id, source, deliveries: deliveries.len() as u64 });
        }
    }
    Ok((over, last.filter(|_| !is_at_end)))
}

pub(super) fn release(conn: &mut SqliteConnection, holder: i64) -> Result<()> {
    let released = ReleaseLease { name: LEASE_NAME, holder }.execute(conn);
    released.map(drop).map_err(database("cannot let the lease of retention go"))
}

pub(super) fn count_purgeable(
    conn: &mut SqliteConnection,
    periods: &Periods,
    cursor: i64,
    rows: u32,
) -> Result<Counted> {
    let walked = clock::now(conn).and_then(|now| walk(conn, periods, cursor, rows, now));
    let (over, cursor) = walked.map_err(database("cannot count what can be purged"))?;
    let deliveries = over.iter().map(|over| over.deliveries).sum();
    Ok(Counted { cursor, deliveries, messages: over.len() as u64 })
}

pub(super) fn count_forgettable(conn: &mut SqliteConnection) -> Result<u64> {
    let counted = clock::now(conn).and_then(|now| Forgettable { now }.load(conn).and_then(only_row));
    counted.map(count).map_err(database("cannot count what can be forgotten"))
}

pub(super) fn ids_of_keys(conn: &mut SqliteConnection, keys: &[String]) -> Result<Vec<Vec<i16>>> {
    keys.iter()
        .map(|key| IdsOfKey { key }.load(conn))
        .collect::<QueryResult<_>>()
        .map_err(database("cannot find handlers by their keys"))
}
