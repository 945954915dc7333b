//! Who is alive, and which deliveries nobody alive knows the handler of.

use std::time::Duration;

use diesel::QueryResult;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::process::millis;
use super::statement::{only_row, rows, statements};
use crate::store::counts::{count, limit};
use crate::store::seam::{Backlog, Enrolment, HeldBack, UnknownHandler};
use crate::types::Result;

rows! {
    BacklogRow { open: i64, oldest_ms: i64 }

    HeldBackRow { paused: Vec<i16>, open: Vec<i16>, rated: Vec<i16> }
}

statements! {
    /// Also takes out processors that have not been seen for a day.
    Enroll<'a>("
        WITH gone AS (DELETE FROM inbox_processor WHERE alive_until < now() - interval '1 day')
        INSERT INTO inbox_processor (name, version, handler_ids, alive_until)
        VALUES (:name, :version, :handler_ids, now() + :ttl_ms * interval '1 millisecond') RETURNING id")
    -> i32 { name: &'a str, version: &'a str, handler_ids: &'a [i16], ttl_ms: i64 }

    /// Written again when it is gone: a database that failed over may have lost it.
    KeepAlive<'a>("
        INSERT INTO inbox_processor (id, name, version, handler_ids, alive_until, report) OVERRIDING SYSTEM VALUE
        VALUES (:id, :name, :version, :handler_ids, now() + :ttl_ms * interval '1 millisecond', :report::jsonb)
        ON CONFLICT (id) DO UPDATE SET seen_at = now(), alive_until = excluded.alive_until, report = excluded.report")
    { id: i32, name: &'a str, version: &'a str, handler_ids: &'a [i16], ttl_ms: i64, report: &'a str }

    HeldBackNow<'a>("
        SELECT ARRAY(SELECT id FROM inbox_handler WHERE paused_at IS NOT NULL AND id = ANY (:handler_ids)),
               ARRAY(SELECT id FROM inbox_handler WHERE breaker_opened_at IS NOT NULL AND id = ANY (:handler_ids)),
               ARRAY(SELECT id FROM inbox_handler WHERE rate_interval_us IS NOT NULL AND id = ANY (:handler_ids))")
    -> HeldBackRow { handler_ids: &'a [i16] }

    Withdraw("DELETE FROM inbox_processor WHERE id = :id") { id: i32 }

    /// Notes since when a handler is unknown while deliveries wait for it, and that it is known again. One index probe a
    /// handler: the order says which index, without it the planner may hope to meet an open row soon in a scan.
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

    /// Poisons, in bounded steps, what has been unknown for longer than the grace.
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

    /// A delivery is never due before its message was accepted: what has been due for longer is older. One index walk a handler, from its beginning,
    /// which stops at the limit or where they are younger.
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

    /// One index walk a handler, no longer than the limit.
    BacklogOf<'a>("
        SELECT count(*), coalesce((extract(epoch FROM now() - min(open.due_at) FILTER (WHERE open.due_at < 'infinity')) * 1000)::bigint, 0)
        FROM unnest(:handler_ids) AS h (id)
        CROSS JOIN LATERAL (SELECT d.due_at FROM inbox_delivery d WHERE d.handler_id = h.id AND d.finished_at IS NULL
                            ORDER BY d.due_at, d.message_seq LIMIT :limit) open")
    -> BacklogRow { handler_ids: &'a [i16], limit: i32 }
}

pub(super) async fn backlog(conn: &mut AsyncPgConnection, handler_ids: &[i16], count_max: u32) -> Result<Backlog> {
    let limit = limit(count_max);
    let counted = BacklogOf { handler_ids, limit }.load::<BacklogRow>(conn).await.and_then(only_row);
    let BacklogRow { open, oldest_ms } = counted.map_err(database("cannot count the backlog"))?;
    Ok(Backlog { open: count(open), oldest_age: Duration::from_millis(oldest_ms.max(0).unsigned_abs()) })
}

pub(super) async fn expire(
    conn: &mut AsyncPgConnection,
    handler_ids: &[i16],
    older_than: Duration,
    limit: u32,
) -> Result<u64> {
    let expire = Expire { handler_ids, older_ms: millis(older_than), limit: self::limit(limit) };
    expire.load(conn).await.and_then(only_row).map(count).map_err(database("cannot expire deliveries"))
}

pub(super) async fn enroll(conn: &mut AsyncPgConnection, processor: &Enrolment) -> Result<(i32, HeldBack)> {
    let Enrolment { name, handler_ids, ttl, .. } = processor;
    let cannot = || database("cannot enroll the processor");
    let enroll = Enroll { name, version: crate::VERSION, handler_ids, ttl_ms: millis(*ttl) };
    let id = enroll.load(conn).await.and_then(only_row).map_err(cannot())?;
    Ok((id, held_back(conn, handler_ids).await.map_err(cannot())?))
}

async fn held_back(conn: &mut AsyncPgConnection, handler_ids: &[i16]) -> QueryResult<HeldBack> {
    let row = HeldBackNow { handler_ids }.load::<HeldBackRow>(conn).await.and_then(only_row)?;
    let HeldBackRow { paused, open, rated } = row;
    Ok(HeldBack { paused, open, rated })
}

pub(super) async fn keep_alive(conn: &mut AsyncPgConnection, id: i32, processor: &Enrolment) -> Result<HeldBack> {
    let Enrolment { name, handler_ids, ttl, report } = processor;
    let cannot = || database("cannot keep the processor alive");
    let alive = KeepAlive { id, name, version: crate::VERSION, handler_ids, ttl_ms: millis(*ttl), report };
    alive.execute(conn).await.map_err(cannot())?;
    held_back(conn, handler_ids).await.map_err(cannot())
}

pub(super) async fn withdraw(conn: &mut AsyncPgConnection, id: i32) -> Result<()> {
    Withdraw { id }.execute(conn).await.map_err(database("cannot withdraw the processor"))?;
    Ok(())
}

pub(super) async fn check_unknown(
    conn: &mut AsyncPgConnection,
    processor: i32,
    grace: Duration,
    limit: u32,
) -> Result<Vec<UnknownHandler>> {
    let cannot = || database("cannot look for unknown handler keys");
    NoteUnknown { processor }.execute(conn).await.map_err(cannot())?;
    let poison = PoisonUnknown { grace_ms: millis(grace), limit: self::limit(limit) };
    let rows = poison.load::<(String, i64)>(conn).await.map_err(cannot())?;
    Ok(rows.into_iter().map(|(key, poisoned)| UnknownHandler { key, poisoned: count(poisoned) }).collect())
}
