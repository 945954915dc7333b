//! Live processes, deliveries that expire or whose handler no live process has, and the size of the backlog.

use std::time::Duration;

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::clock::{self, micros};
use super::errors::database;
use super::statement::{only_row, rows, statements};
use crate::store::counts::{count, limit};
use crate::store::seam::{Backlog, BlockedHandlers, ProcessorInfo, UnknownHandler};
use crate::types::Result;

/// How long the row of a processor is kept after it was last seen.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(86_400);

rows! {
    /// `is_unknown`: it has waiting deliveries and no live processor knows it.
    HandlerRow { id: i16, key: String, unknown_since: Option<i64>, is_unknown: bool }

    BacklogRow { open: i64, oldest_due: Option<i64> }
}

statements! {
    Forget("DELETE FROM inbox_processor WHERE alive_until < :before") { before: i64 }

    RegisterProcessor<'a>("
        INSERT INTO inbox_processor (name, version, handler_ids, started_at, seen_at, alive_until)
        VALUES (:name, :version, :handler_ids, :now, :now, :alive_until)
        RETURNING id") -> i32 { name: &'a str, version: &'a str, handler_ids: String, now: i64, alive_until: i64 }

    /// Inserts the row again if it is missing: the file may have been restored from a backup.
    Heartbeat<'a>("
        INSERT INTO inbox_processor (id, name, version, handler_ids, started_at, seen_at, alive_until, report)
        VALUES (:id, :name, :version, :handler_ids, :now, :now, :alive_until, :report)
        ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at, alive_until = excluded.alive_until, report = excluded.report")
    { id: i32, name: &'a str, version: &'a str, handler_ids: String, now: i64, alive_until: i64, report: &'a str }

    Paused("SELECT id FROM inbox_handler WHERE paused_at IS NOT NULL") -> i16 {}

    Open("SELECT id FROM inbox_handler WHERE breaker_opened_at IS NOT NULL") -> i16 {}

    Rated("SELECT id FROM inbox_handler WHERE rate_interval_us IS NOT NULL") -> i16 {}

    RemoveProcessor("DELETE FROM inbox_processor WHERE id = :id") { id: i32 }

    /// While a transactional handler held the writer, no processor could renew its row.
    Prolong("UPDATE inbox_processor SET alive_until = alive_until + :by WHERE alive_until > :alive_at")
    { by: i64, alive_at: i64 }

    /// Every handler, and whether it is unknown: no live processor has it, and it has an open delivery. One index probe
    /// per handler.
    Judge("
        SELECT h.id, h.key, h.unknown_since,
               h.id NOT IN (SELECT k.value FROM inbox_processor p, json_each(p.handler_ids) k WHERE p.alive_until > :now OR p.id = :processor)
               AND (SELECT true FROM inbox_delivery d INDEXED BY inbox_delivery_due
                    WHERE d.handler_id = h.id AND d.finished_at IS NULL LIMIT 1) IS TRUE
        FROM inbox_handler h") -> HandlerRow { now: i64, processor: i32 }

    SetUnknownSince("UPDATE inbox_handler SET unknown_since = :since WHERE id = :handler_id")
    { since: Option<i64>, handler_id: i16 }

    /// Poisons, in bounded steps, due deliveries whose handler has been unknown for longer than the grace period.
    PoisonUnknown("
        UPDATE inbox_delivery
        SET status = 3, reason = 'unknown key', finished_at = :now, locked_until = NULL, locked_by = NULL, passed = NULL
        WHERE handler_id = :handler_id
          AND message_seq IN (SELECT d.message_seq FROM inbox_delivery d INDEXED BY inbox_delivery_due
                              WHERE d.handler_id = :handler_id AND d.finished_at IS NULL AND d.due_at <= :now
                                AND (d.locked_until IS NULL OR d.locked_until <= :now)
                              ORDER BY d.due_at, d.message_seq LIMIT :limit)") { now: i64, handler_id: i16, limit: i32 }

    /// One index scan, bounded by the limit.
    BacklogOf("
        SELECT count(*), min(due_at)
        FROM (SELECT due_at FROM inbox_delivery INDEXED BY inbox_delivery_due
              WHERE handler_id = :handler_id AND finished_at IS NULL ORDER BY due_at, message_seq LIMIT :limit)")
    -> BacklogRow { handler_id: i16, limit: i32 }

    /// A delivery is never due before its message was accepted, so a delivery that has been due for longer is older.
    Expire("
        UPDATE inbox_delivery SET status = 4, finished_at = :now, reason = 'expired', locked_by = NULL
        WHERE handler_id = :handler_id
          AND message_seq IN (SELECT d.message_seq FROM inbox_delivery d INDEXED BY inbox_delivery_due
                              WHERE d.handler_id = :handler_id AND d.finished_at IS NULL AND d.due_at < :before
                                AND d.locked_until IS NULL AND d.replays = 0
                                AND (SELECT h.paused_at IS NULL FROM inbox_handler h WHERE h.id = :handler_id)
                              ORDER BY d.due_at, d.message_seq LIMIT :limit)")
    { now: i64, handler_id: i16, before: i64, limit: i32 }

    /// The due time of a held delivery does not show its age, so the message is read. Held deliveries are in the order
    /// of acceptance, so the first of them are the oldest: only they are read.
    ExpireHeld("
        UPDATE inbox_delivery SET status = 4, finished_at = :now, reason = 'expired', locked_by = NULL
        WHERE handler_id = :handler_id
          AND message_seq IN (SELECT o.message_seq
                              FROM (SELECT d.message_seq, d.replays FROM inbox_delivery d INDEXED BY inbox_delivery_due
                                    WHERE d.handler_id = :handler_id AND d.finished_at IS NULL AND d.due_at = 9223372036854775807
                                      AND (SELECT h.paused_at IS NULL FROM inbox_handler h WHERE h.id = :handler_id)
                                    ORDER BY d.message_seq LIMIT :limit) o
                              CROSS JOIN inbox_message m ON m.seq = o.message_seq
                              WHERE o.replays = 0 AND m.received_at < :before)")
    { now: i64, handler_id: i16, limit: i32, before: i64 }
}

/// SQLite has no arrays.
fn ids_as_json(handler_ids: &[i16]) -> String {
    serde_json::json!(handler_ids).to_string()
}

/// Reads the claim index only: at most `count_max` entries over all handler ids, and the first one of each.
pub(super) fn backlog(conn: &mut SqliteConnection, handler_ids: &[i16], count_max: u32) -> Result<Backlog> {
    let cannot = || database("cannot count the backlog");
    let now = clock::now(conn).map_err(cannot())?;
    let (mut open, mut oldest_due) = (0, now);
    for &handler_id in handler_ids {
        let limit = limit(count_max).saturating_sub(i32::try_from(open).unwrap_or(i32::MAX)).max(1);
        let counted = BacklogOf { handler_id, limit }.load::<BacklogRow>(conn).and_then(only_row);
        let backlog = counted.map_err(cannot())?;
        open += count(backlog.open);
        oldest_due = backlog.oldest_due.map_or(oldest_due, |oldest| oldest_due.min(oldest));
    }
    Ok(Backlog { open, oldest_age: Duration::from_micros((now - oldest_due).unsigned_abs()) })
}

/// Also removes processors that have not been seen for a day.
pub(super) fn register_processor(
    conn: &mut SqliteConnection,
    processor: &ProcessorInfo,
) -> Result<(i32, BlockedHandlers)> {
    let register_processor = |conn: &mut SqliteConnection| {
        let now = clock::now(conn)?;
        Forget { before: now - micros(FORGOTTEN_AFTER) }.execute(conn)?;
        let alive_until = now + micros(processor.ttl);
        let handler_ids = ids_as_json(&processor.handler_ids);
        let register_processor =
            RegisterProcessor { name: &processor.name, version: crate::VERSION, handler_ids, now, alive_until };
        let id = register_processor.load(conn).and_then(only_row)?;
        QueryResult::Ok((id, blocked(conn, processor)?))
    };
    register_processor(conn).map_err(database("cannot register the processor"))
}

/// Which handlers of the processor are paused, have an open breaker, or have a rate limit.
fn blocked(conn: &mut SqliteConnection, processor: &ProcessorInfo) -> QueryResult<BlockedHandlers> {
    let is_of = |id: &i16| processor.handler_ids.contains(id);
    let paused = Paused {}.load::<i16>(conn)?.into_iter().filter(is_of).collect();
    let open = Open {}.load::<i16>(conn)?.into_iter().filter(is_of).collect();
    let rated = Rated {}.load::<i16>(conn)?.into_iter().filter(is_of).collect();
    Ok(BlockedHandlers { paused, open, rated })
}

pub(super) fn heartbeat(conn: &mut SqliteConnection, id: i32, processor: &ProcessorInfo) -> Result<BlockedHandlers> {
    let keep = |conn: &mut SqliteConnection| {
        let now = clock::now(conn)?;
        let alive_until = now + micros(processor.ttl);
        let handler_ids = ids_as_json(&processor.handler_ids);
        let ProcessorInfo { name, report, .. } = processor;
        Heartbeat { id, name, version: crate::VERSION, handler_ids, now, alive_until, report }.execute(conn)?;
        blocked(conn, processor)
    };
    keep(conn).map_err(database("cannot renew the processor's row"))
}

pub(super) fn remove_processor(conn: &mut SqliteConnection, id: i32) -> Result<()> {
    RemoveProcessor { id }.execute(conn).map(drop).map_err(database("cannot remove the processor"))
}

/// Extends the rows of processors that were alive at that time by the time in which they could not renew them.
pub(super) fn prolong(conn: &mut SqliteConnection, alive_at: i64, by: Duration) -> QueryResult<()> {
    Prolong { by: micros(by), alive_at }.execute(conn).map(drop)
}

/// Records since when a handler with waiting deliveries is unknown, and clears this when it is known again; poisons
/// deliveries that have waited too long.
pub(super) fn check_unknown(
    conn: &mut SqliteConnection,
    processor: i32,
    grace: Duration,
    limit: u32,
) -> Result<Vec<UnknownHandler>> {
    let cannot = || database("cannot find unknown handler keys");
    let now = clock::now(conn).map_err(cannot())?;
    let judged = Judge { now, processor }.load::<HandlerRow>(conn).map_err(cannot())?;
    let limit = self::limit(limit);
    let mut unknown = Vec::new();
    for HandlerRow { id: handler_id, key, unknown_since: since, is_unknown } in judged {
        if is_unknown != since.is_some() {
            let since = is_unknown.then_some(now);
            SetUnknownSince { since, handler_id }.execute(conn).map_err(cannot())?;
        }
        if !is_unknown {
            continue;
        }
        let is_over = since.unwrap_or(now) <= now - micros(grace);
        let poison = PoisonUnknown { now, handler_id, limit };
        let poisoned = if is_over { poison.execute(conn).map_err(cannot())? } else { 0 };
        unknown.push(UnknownHandler { key, poisoned: u64::try_from(poisoned).unwrap_or(u64::MAX) });
    }
    Ok(unknown)
}

/// Due and held deliveries of each handler id, each up to the limit.
pub(super) fn expire(
    conn: &mut SqliteConnection,
    handler_ids: &[i16],
    older_than: Duration,
    limit: u32,
) -> Result<u64> {
    let cannot = || database("cannot expire deliveries");
    let now = clock::now(conn).map_err(cannot())?;
    let limit = self::limit(limit);
    let mut expired = 0;
    for &handler_id in handler_ids {
        let before = now - micros(older_than);
        expired += Expire { now, handler_id, before, limit }.execute(conn).map_err(cannot())? as u64;
        expired += ExpireHeld { now, handler_id, limit, before }.execute(conn).map_err(cannot())? as u64;
    }
    Ok(expired)
}
