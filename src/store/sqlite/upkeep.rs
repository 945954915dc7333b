//! Who is alive, and which deliveries nobody alive knows the handler of.

use std::time::Duration;

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::clock::{self, micros};
use super::errors::database;
use super::statement::{only_row, rows, statements};
use crate::store::counts::{count, limit};
use crate::store::seam::{Backlog, Enrolment, HeldBack, UnknownHandler};
use crate::types::Result;

/// How long a processor that is not seen any more stays on the list.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(86_400);

rows! {
    /// `is_unknown`: deliveries wait for it and no live processor knows it.
    HandlerRow { id: i16, key: String, unknown_since: Option<i64>, is_unknown: bool }

    BacklogRow { open: i64, oldest_due: Option<i64> }
}

statements! {
    Forget("DELETE FROM inbox_processor WHERE alive_until < :before") { before: i64 }

    Enroll<'a>("
        INSERT INTO inbox_processor (name, version, handler_ids, started_at, seen_at, alive_until)
        VALUES (:name, :version, :handler_ids, :now, :now, :alive_until)
        RETURNING id") -> i32 { name: &'a str, version: &'a str, handler_ids: String, now: i64, alive_until: i64 }

    /// Written again when it is gone: the file may have been put back to an older state.
    KeepAlive<'a>("
        INSERT INTO inbox_processor (id, name, version, handler_ids, started_at, seen_at, alive_until, report)
        VALUES (:id, :name, :version, :handler_ids, :now, :now, :alive_until, :report)
        ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at, alive_until = excluded.alive_until, report = excluded.report")
    { id: i32, name: &'a str, version: &'a str, handler_ids: String, now: i64, alive_until: i64, report: &'a str }

    Paused("SELECT id FROM inbox_handler WHERE paused_at IS NOT NULL") -> i16 {}

    Open("SELECT id FROM inbox_handler WHERE breaker_opened_at IS NOT NULL") -> i16 {}

    Rated("SELECT id FROM inbox_handler WHERE rate_interval_us IS NOT NULL") -> i16 {}

    Withdraw("DELETE FROM inbox_processor WHERE id = :id") { id: i32 }

    /// While a transactional handler had the writer, nobody could give a sign of life.
    Prolong("UPDATE inbox_processor SET alive_until = alive_until + :by WHERE alive_until > :alive_at")
    { by: i64, alive_at: i64 }

    /// Every handler: whether a live processor knows it or no delivery of it is open. One index probe a handler.
    Judge("
        SELECT h.id, h.key, h.unknown_since,
               h.id NOT IN (SELECT k.value FROM inbox_processor p, json_each(p.handler_ids) k WHERE p.alive_until > :now OR p.id = :processor)
               AND (SELECT true FROM inbox_delivery d INDEXED BY inbox_delivery_due
                    WHERE d.handler_id = h.id AND d.finished_at IS NULL LIMIT 1) IS TRUE
        FROM inbox_handler h") -> HandlerRow { now: i64, processor: i32 }

    SetUnknownSince("UPDATE inbox_handler SET unknown_since = :since WHERE id = :handler_id")
    { since: Option<i64>, handler_id: i16 }

    /// Poisons, in bounded steps, what has been unknown for longer than the grace.
    PoisonUnknown("
        UPDATE inbox_delivery
        SET status = 3, reason = 'unknown key', finished_at = :now, locked_until = NULL, locked_by = NULL, passed = NULL
        WHERE handler_id = :handler_id
          AND message_seq IN (SELECT d.message_seq FROM inbox_delivery d INDEXED BY inbox_delivery_due
                              WHERE d.handler_id = :handler_id AND d.finished_at IS NULL AND d.due_at <= :now
                                AND (d.locked_until IS NULL OR d.locked_until <= :now)
                              ORDER BY d.due_at, d.message_seq LIMIT :limit)") { now: i64, handler_id: i16, limit: i32 }

    /// One index walk, no longer than the limit.
    BacklogOf("
        SELECT count(*), min(due_at)
        FROM (SELECT due_at FROM inbox_delivery INDEXED BY inbox_delivery_due
              WHERE handler_id = :handler_id AND finished_at IS NULL ORDER BY due_at, message_seq LIMIT :limit)")
    -> BacklogRow { handler_id: i16, limit: i32 }

    /// A delivery is never due before its message was accepted: what has been due for longer is older.
    Expire("
        UPDATE inbox_delivery SET status = 4, finished_at = :now, reason = 'expired', locked_by = NULL
        WHERE handler_id = :handler_id
          AND message_seq IN (SELECT d.message_seq FROM inbox_delivery d INDEXED BY inbox_delivery_due
                              WHERE d.handler_id = :handler_id AND d.finished_at IS NULL AND d.due_at < :before
                                AND d.locked_until IS NULL AND d.replays = 0
                                AND (SELECT h.paused_at IS NULL FROM inbox_handler h WHERE h.id = :handler_id)
                              ORDER BY d.due_at, d.message_seq LIMIT :limit)")
    { now: i64, handler_id: i16, before: i64, limit: i32 }
}

fn ids_as_json(handler_ids: &[i16]) -> String {
    serde_json::json!(handler_ids).to_string()
}

pub(super) fn backlog(conn: &mut SqliteConnection, handler_ids: &[i16], count_max: u32) -> Result<Backlog> {
    let cannot = || database("cannot count the backlog");
    let now = clock::now(conn).map_err(cannot())?;
    let limit = limit(count_max);
    let (mut open, mut oldest_due) = (0, now);
    for &handler_id in handler_ids {
        let counted = BacklogOf { handler_id, limit }.load::<BacklogRow>(conn).and_then(only_row);
        let backlog = counted.map_err(cannot())?;
        open += count(backlog.open);
        oldest_due = backlog.oldest_due.map_or(oldest_due, |oldest| oldest_due.min(oldest));
    }
    Ok(Backlog { open, oldest_age: Duration::from_micros((now - oldest_due).unsigned_abs()) })
}

/// Also takes out processors that have not been seen for a day.
pub(super) fn enroll(conn: &mut SqliteConnection, processor: &Enrolment) -> Result<(i32, HeldBack)> {
    let enroll = |conn: &mut SqliteConnection| {
        let now = clock::now(conn)?;
        Forget { before: now - micros(FORGOTTEN_AFTER) }.execute(conn)?;
        let alive_until = now + micros(processor.ttl);
        let handler_ids = ids_as_json(&processor.handler_ids);
        let enroll = Enroll { name: &processor.name, version: crate::VERSION, handler_ids, now, alive_until };
        let id = enroll.load(conn).and_then(only_row)?;
        QueryResult::Ok((id, held_back(conn, processor)?))
    };
    enroll(conn).map_err(database("cannot enroll the processor"))
}

fn held_back(conn: &mut SqliteConnection, processor: &Enrolment) -> QueryResult<HeldBack> {
    let is_of = |id: &i16| processor.handler_ids.contains(id);
    let paused = Paused {}.load::<i16>(conn)?.into_iter().filter(is_of).collect();
    let open = Open {}.load::<i16>(conn)?.into_iter().filter(is_of).collect();
    let rated = Rated {}.load::<i16>(conn)?.into_iter().filter(is_of).collect();
    Ok(HeldBack { paused, open, rated })
}

pub(super) fn keep_alive(conn: &mut SqliteConnection, id: i32, processor: &Enrolment) -> Result<HeldBack> {
    let keep = |conn: &mut SqliteConnection| {
        let now = clock::now(conn)?;
        let alive_until = now + micros(processor.ttl);
        let handler_ids = ids_as_json(&processor.handler_ids);
        let Enrolment { name, report, .. } = processor;
        KeepAlive { id, name, version: crate::VERSION, handler_ids, now, alive_until, report }.execute(conn)?;
        held_back(conn, processor)
    };
    keep(conn).map_err(database("cannot keep the processor alive"))
}

pub(super) fn withdraw(conn: &mut SqliteConnection, id: i32) -> Result<()> {
    Withdraw { id }.execute(conn).map(drop).map_err(database("cannot withdraw the processor"))
}

/// Processors that were alive at a moment are, for as much longer as they could not say so.
pub(super) fn prolong(conn: &mut SqliteConnection, alive_at: i64, by: Duration) -> QueryResult<()> {
    Prolong { by: micros(by), alive_at }.execute(conn).map(drop)
}

/// Notes since when a handler is unknown while deliveries wait for it, and that it is known again; poisons what has waited too long.
pub(super) fn check_unknown(
    conn: &mut SqliteConnection,
    processor: i32,
    grace: Duration,
    limit: u32,
) -> Result<Vec<UnknownHandler>> {
    let cannot = || database("cannot look for unknown handler keys");
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
        let expire = Expire { now, handler_id, before: now - micros(older_than), limit };
        expired += expire.execute(conn).map_err(cannot())? as u64;
    }
    Ok(expired)
}
