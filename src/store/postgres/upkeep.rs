//! Live processes, deliveries that expire or whose handler no live process has, and the size of the backlog.

use std::time::Duration;

use diesel::QueryResult;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::process::millis;
use super::statement::{only_row, rows, statements};
use crate::store::counts::{count, limit};
use crate::store::seam::{Backlog, BlockedHandlers, ProcessorInfo, UnknownHandler};
use crate::types::Result;

rows! {
    /// How many deliveries are open, and for how long the oldest is due.
    BacklogRow { open: i64, oldest_ms: i64 }

    /// The ids of handlers that are paused, that have an open breaker, and that have a rate limit.
    BlockedRow { paused: Vec<i16>, open: Vec<i16>, rated: Vec<i16> }
}

statements! {
    /// Also removes processors that have not been seen for a day.
    RegisterProcessor<'a>("
        WITH gone AS (DELETE FROM inbox_processor WHERE alive_until < now() - interval '1 day')
        INSERT INTO inbox_processor (name, version, handler_ids, alive_until)
        VALUES (:name, :version, :handler_ids, now() + :ttl_ms * interval '1 millisecond') RETURNING id")
    -> i32 { name: &'a str, version: &'a str, handler_ids: &'a [i16], ttl_ms: i64 }

    /// Inserts the row again if it is missing: a database that failed over may have lost it.
    Heartbeat<'a>("
        INSERT INTO inbox_processor (id, name, version, handler_ids, alive_until, report) OVERRIDING SYSTEM VALUE
        VALUES (:id, :name, :version, :handler_ids, now() + :ttl_ms * interval '1 millisecond', :report::jsonb)
        ON CONFLICT (id) DO UPDATE SET seen_at = now(), alive_until = excluded.alive_until, report = excluded.report")
    { id: i32, name: &'a str, version: &'a str, handler_ids: &'a [i16], ttl_ms: i64, report: &'a str }

    /// The state of the handlers for a heartbeat. There are few handlers, so the table is small.
    BlockedNow<'a>("
        SELECT ARRAY(SELECT id FROM inbox_handler WHERE paused_at IS NOT NULL AND id = ANY (:handler_ids)),
               ARRAY(SELECT id FROM inbox_handler WHERE breaker_opened_at IS NOT NULL AND id = ANY (:handler_ids)),
               ARRAY(SELECT id FROM inbox_handler WHERE rate_interval_us IS NOT NULL AND id = ANY (:handler_ids))")
    -> BlockedRow { handler_ids: &'a [i16] }

    RemoveProcessor("DELETE FROM inbox_processor WHERE id = :id") { id: i32 }

    /// Records since when a handler with waiting deliveries is unknown, and clears this when it is known again. One
    /// index probe per handler: the ORDER BY forces the index; without it the planner may choose a scan that expects an
    /// open row soon.
    NoteUnknown("
        WITH known AS MATERIALIZED (SELECT unnest(handler_ids) AS id FROM inbox_processor p
                                    WHERE p.alive_until > now() OR p.id = :processor),
        judged AS MATERIALIZED (
            SELECT h.id, (h.id IN (SELECT id FROM known)) IS NOT TRUE
                         AND (SELECT true FROM inbox_delivery d WHERE d.handler_id = h.id AND d.finished_at IS NULL
                              ORDER BY d.due_at, d.message_seq LIMIT 1) IS TRUE AS is_unknown
            FROM inbox_handler h)
        UPDATE inbox_handler h SET unknown_since = CASE WHEN j.is_unknown THEN now() END
        FROM judged j
        WHERE j.id = h.id AND j.is_unknown <> (h.unknown_since IS NOT NULL)") { processor: i32 }

    /// Poisons, in bounded steps, due deliveries whose handler has been unknown for longer than the grace period.
    /// Returns every unknown handler, also those without a poisoned delivery.
    PoisonUnknown("
        WITH expired AS MATERIALIZED (
            SELECT id FROM inbox_handler
            WHERE unknown_since <= now() - :grace_ms * interval '1 millisecond'),
        poisoned AS (
            UPDATE inbox_delivery t
            SET status = 3, reason = 'unknown key', finished_at = now(), locked_until = NULL, locked_by = NULL, passed = NULL
            WHERE t.ctid = ANY (ARRAY(
                SELECT open.tid FROM expired e
                CROSS JOIN LATERAL (
                    SELECT d.ctid AS tid FROM inbox_delivery d
                    WHERE d.handler_id = e.id AND d.finished_at IS NULL AND d.due_at <= now()
                      AND (d.locked_until IS NULL OR d.locked_until <= now())
                    ORDER BY d.due_at, d.message_seq LIMIT :limit
                    FOR NO KEY UPDATE SKIP LOCKED) open))
            RETURNING t.handler_id)
        SELECT h.key, (SELECT count(*) FROM poisoned p WHERE p.handler_id = h.id)
        FROM inbox_handler h WHERE h.unknown_since IS NOT NULL") -> (String, i64) { grace_ms: i64, limit: i32 }

    /// A delivery is never due before its message was accepted, so a delivery that has been due for longer is older.
    /// One index scan per handler, from its beginning, which stops at the limit or at the first younger delivery.
    Expire<'a>("
        WITH expired AS (
            UPDATE inbox_delivery t SET status = 4, finished_at = now(), reason = 'expired', locked_by = NULL
            WHERE t.ctid = ANY (ARRAY(
                SELECT old.tid FROM (SELECT h.id FROM unnest(:handler_ids) AS h (id)
                                     WHERE (SELECT p.paused_at IS NULL FROM inbox_handler p WHERE p.id = h.id) OFFSET 0) h
                CROSS JOIN LATERAL (
                    SELECT d.ctid AS tid FROM inbox_delivery d
                    WHERE d.handler_id = h.id AND d.finished_at IS NULL AND d.due_at < now() - :older_ms * interval '1 millisecond'
                      AND CASE WHEN d.locked_until IS NULL AND d.replays = 0 THEN true ELSE false END
                    ORDER BY d.due_at, d.message_seq LIMIT :limit
                    FOR NO KEY UPDATE SKIP LOCKED) old))
            RETURNING 1)
        SELECT count(*) FROM expired") -> i64 { handler_ids: &'a [i16], older_ms: i64, limit: i32 }

    /// The due time of a held delivery does not show its age, so the message is read. Held deliveries are in the order
    /// of acceptance, so the first of them are the oldest: only they are read. Only those that expire are locked. `>=`:
    /// with `=`, the planner would drop due_at from the order and walk over the primary key.
    ExpireHeld<'a>("
        WITH expired AS (
            UPDATE inbox_delivery t SET status = 4, finished_at = now(), reason = 'expired', locked_by = NULL
            WHERE t.ctid = ANY (ARRAY(
                SELECT locked.tid FROM (SELECT h.id FROM unnest(:handler_ids) AS h (id)
                                        WHERE (SELECT p.paused_at IS NULL FROM inbox_handler p WHERE p.id = h.id) OFFSET 0) h
                CROSS JOIN LATERAL (
                    SELECT o.message_seq
                    FROM (SELECT d.message_seq, d.replays FROM inbox_delivery d
                          WHERE d.handler_id = h.id AND d.finished_at IS NULL AND d.due_at >= 'infinity'
                          ORDER BY d.due_at, d.message_seq LIMIT :limit) o
                    WHERE o.replays = 0
                      AND (SELECT m.received_at < now() - :older_ms * interval '1 millisecond' FROM inbox_message m WHERE m.seq = o.message_seq)
                    OFFSET 0) old
                CROSS JOIN LATERAL (
                    SELECT d.ctid AS tid FROM inbox_delivery d
                    WHERE d.message_seq = old.message_seq AND d.handler_id = h.id AND d.finished_at IS NULL AND d.due_at = 'infinity'
                    LIMIT 1
                    FOR NO KEY UPDATE SKIP LOCKED) locked))
            RETURNING 1)
        SELECT count(*) FROM expired") -> i64 { handler_ids: &'a [i16], limit: i32, older_ms: i64 }

    /// One index scan per handler, until all of them have found as many deliveries as the limit; and the first delivery
    /// of each handler.
    BacklogOf<'a>("
        SELECT (SELECT count(*)
                FROM (SELECT 1 FROM unnest(:handler_ids) AS h (id)
                      CROSS JOIN LATERAL (SELECT 1 FROM inbox_delivery d WHERE d.handler_id = h.id AND d.finished_at IS NULL
                                          ORDER BY d.due_at, d.message_seq LIMIT :limit) open
                      LIMIT :limit) counted),
               (SELECT coalesce((extract(epoch FROM now() - min(first.due_at) FILTER (WHERE first.due_at < 'infinity')) * 1000)::bigint, 0)
                FROM unnest(:handler_ids) AS h (id)
                CROSS JOIN LATERAL (SELECT d.due_at FROM inbox_delivery d WHERE d.handler_id = h.id AND d.finished_at IS NULL
                                    ORDER BY d.due_at, d.message_seq LIMIT 1) first)")
    -> BacklogRow { handler_ids: &'a [i16], limit: i32 }
}

pub(super) async fn backlog(conn: &mut AsyncPgConnection, handler_ids: &[i16], count_max: u32) -> Result<Backlog> {
    let limit = limit(count_max);
    let counted = BacklogOf { handler_ids, limit }.load::<BacklogRow>(conn).await.and_then(only_row);
    let BacklogRow { open, oldest_ms } = counted.map_err(database("cannot count the backlog"))?;
    Ok(Backlog { open: count(open), oldest_age: Duration::from_millis(oldest_ms.max(0).unsigned_abs()) })
}

/// Due and held deliveries, each up to the limit. Two statements, because they are found by different columns.
pub(super) async fn expire(
    conn: &mut AsyncPgConnection,
    handler_ids: &[i16],
    older_than: Duration,
    limit: u32,
) -> Result<u64> {
    let cannot = || database("cannot expire deliveries");
    let (older_ms, limit) = (millis(older_than), self::limit(limit));
    let due = Expire { handler_ids, older_ms, limit }.load(conn).await.and_then(only_row).map_err(cannot())?;
    let held = ExpireHeld { handler_ids, limit, older_ms }.load(conn).await.and_then(only_row).map_err(cannot())?;
    Ok(count(due) + count(held))
}

/// Registers the processor first: handlers that are paused in between are found by the next heartbeat.
pub(super) async fn register_processor(
    conn: &mut AsyncPgConnection,
    processor: &ProcessorInfo,
) -> Result<(i32, BlockedHandlers)> {
    let ProcessorInfo { name, handler_ids, ttl, .. } = processor;
    let cannot = || database("cannot register the processor");
    let register_processor = RegisterProcessor { name, version: crate::VERSION, handler_ids, ttl_ms: millis(*ttl) };
    let id = register_processor.load(conn).await.and_then(only_row).map_err(cannot())?;
    Ok((id, blocked(conn, handler_ids).await.map_err(cannot())?))
}

/// Which of these handlers are paused, have an open breaker, or have a rate limit.
async fn blocked(conn: &mut AsyncPgConnection, handler_ids: &[i16]) -> QueryResult<BlockedHandlers> {
    let row = BlockedNow { handler_ids }.load::<BlockedRow>(conn).await.and_then(only_row)?;
    let BlockedRow { paused, open, rated } = row;
    Ok(BlockedHandlers { paused, open, rated })
}

pub(super) async fn heartbeat(
    conn: &mut AsyncPgConnection,
    id: i32,
    processor: &ProcessorInfo,
) -> Result<BlockedHandlers> {
    let ProcessorInfo { name, handler_ids, ttl, report } = processor;
    let cannot = || database("cannot renew the processor's row");
    let alive = Heartbeat { id, name, version: crate::VERSION, handler_ids, ttl_ms: millis(*ttl), report };
    alive.execute(conn).await.map_err(cannot())?;
    blocked(conn, handler_ids).await.map_err(cannot())
}

pub(super) async fn remove_processor(conn: &mut AsyncPgConnection, id: i32) -> Result<()> {
    RemoveProcessor { id }.execute(conn).await.map_err(database("cannot remove the processor"))?;
    Ok(())
}

/// Two statements: the second one only sees handlers that the first one has judged.
pub(super) async fn check_unknown(
    conn: &mut AsyncPgConnection,
    processor: i32,
    grace: Duration,
    limit: u32,
) -> Result<Vec<UnknownHandler>> {
    let cannot = || database("cannot find unknown handler keys");
    NoteUnknown { processor }.execute(conn).await.map_err(cannot())?;
    let poison = PoisonUnknown { grace_ms: millis(grace), limit: self::limit(limit) };
    let rows = poison.load::<(String, i64)>(conn).await.map_err(cannot())?;
    Ok(rows.into_iter().map(|(key, poisoned)| UnknownHandler { key, poisoned: count(poisoned) }).collect())
}
