//! Who is alive, and which deliveries nobody alive knows the handler of.

use std::time::Duration;

use diesel::QueryResult;
use diesel::sql_types::{Array, BigInt, Integer, SmallInt, Text};
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::process::millis;
use super::statement::{only_row, statement};
use crate::store::seam::{Backlog, Enrolment, UnknownHandler};
use crate::types::Result;

statement! {
    /// Also takes out processors that have not been seen for a day.
    Enroll<'a>("
        WITH gone AS (DELETE FROM inbox_processor WHERE alive_until < now() - interval '1 day')
        INSERT INTO inbox_processor (name, version, handler_ids, alive_until)
        VALUES ($1, $2, $3, now() + $4 * interval '1 millisecond') RETURNING id")
    -> (Integer) {
        name: &'a str => Text,
        version: &'a str => Text,
        handler_ids: &'a [i16] => Array<SmallInt>,
        ttl_ms: i64 => BigInt,
    }
}

statement! {
    /// Written again when it is gone: a database that failed over may have lost it.
    KeepAlive<'a>("
        INSERT INTO inbox_processor (id, name, version, handler_ids, alive_until, report) OVERRIDING SYSTEM VALUE
        VALUES ($1, $2, $3, $4, now() + $5 * interval '1 millisecond', $6::jsonb)
        ON CONFLICT (id) DO UPDATE SET seen_at = now(), alive_until = excluded.alive_until, report = excluded.report") {
        id: i32 => Integer,
        name: &'a str => Text,
        version: &'a str => Text,
        handler_ids: &'a [i16] => Array<SmallInt>,
        ttl_ms: i64 => BigInt,
        report: &'a str => Text,
    }
}

statement! {
    Paused<'a>("SELECT id FROM inbox_handler WHERE paused_at IS NOT NULL AND id = ANY ($1)") -> (SmallInt) {
        handler_ids: &'a [i16] => Array<SmallInt>,
    }
}

statement! {
    Withdraw("DELETE FROM inbox_processor WHERE id = $1") {
        id: i32 => Integer,
    }
}

statement! {
    /// Notes since when a handler is unknown while deliveries wait for it, and that it is known again. One index probe a
    /// handler: the order says which index, without it the planner may hope to meet an open row soon in a scan.
    NoteUnknown("
        WITH known AS MATERIALIZED (SELECT unnest(handler_ids) AS id FROM inbox_processor p
                                    WHERE p.alive_until > now() OR p.id = $1),
        judged AS MATERIALIZED (
            SELECT h.id, (h.id IN (SELECT id FROM known)) IS NOT TRUE
                         AND (SELECT true FROM inbox_delivery d WHERE d.handler_id = h.id AND d.finished_at IS NULL
                              ORDER BY d.due_at, d.message_seq LIMIT 1) IS TRUE AS is_unknown
            FROM inbox_handler h)
        UPDATE inbox_handler h SET unknown_since = CASE WHEN j.is_unknown THEN now() END
        FROM judged j
        WHERE j.id = h.id AND j.is_unknown <> (h.unknown_since IS NOT NULL)") {
        processor: i32 => Integer,
    }
}

statement! {
    /// Poisons, in bounded steps, what has been unknown for longer than the grace.
    PoisonUnknown("
        WITH expired AS MATERIALIZED (
            SELECT id FROM inbox_handler
            WHERE unknown_since <= now() - $1 * interval '1 millisecond'),
        poisoned AS (
            UPDATE inbox_delivery t
            SET status = 3, reason = 'unknown key', finished_at = now(), locked_until = NULL, locked_by = NULL
            WHERE t.ctid = ANY (ARRAY(
                SELECT open.tid FROM expired e
                CROSS JOIN LATERAL (
                    SELECT d.ctid AS tid FROM inbox_delivery d
                    WHERE d.handler_id = e.id AND d.finished_at IS NULL AND d.due_at <= now()
                      AND (d.locked_until IS NULL OR d.locked_until <= now())
                    ORDER BY d.due_at, d.message_seq LIMIT $2
                    FOR NO KEY UPDATE SKIP LOCKED) open))
            RETURNING t.handler_id)
        SELECT h.key, (SELECT count(*) FROM poisoned p WHERE p.handler_id = h.id)
        FROM inbox_handler h WHERE h.unknown_since IS NOT NULL")
    -> (Text, BigInt) {
        grace_ms: i64 => BigInt,
        limit: i32 => Integer,
    }
}

statement! {
    /// One index walk a handler, no longer than the limit.
    BacklogOf<'a>("
        SELECT count(*), coalesce((extract(epoch FROM now() - min(open.due_at)) * 1000)::bigint, 0)
        FROM unnest($1) AS h (id)
        CROSS JOIN LATERAL (SELECT d.due_at FROM inbox_delivery d WHERE d.handler_id = h.id AND d.finished_at IS NULL
                            ORDER BY d.due_at, d.message_seq LIMIT $2) open")
    -> (BigInt, BigInt) {
        handler_ids: &'a [i16] => Array<SmallInt>,
        limit: i32 => Integer,
    }
}

pub(super) async fn backlog(conn: &mut AsyncPgConnection, handler_ids: &[i16], count_max: u32) -> Result<Backlog> {
    let limit = i32::try_from(count_max).unwrap_or(i32::MAX);
    let counted = BacklogOf { handler_ids, limit }.load::<(i64, i64)>(conn).await.and_then(only_row);
    let (open, oldest_ms) = counted.map_err(database("cannot count the backlog"))?;
    let [open, oldest_ms] = [open, oldest_ms].map(|count| u64::try_from(count).unwrap_or_default());
    Ok(Backlog { open, oldest_age: Duration::from_millis(oldest_ms) })
}

pub(super) async fn enroll(conn: &mut AsyncPgConnection, processor: &Enrolment<'_>) -> Result<(i32, Vec<i16>)> {
    let Enrolment { name, handler_ids, ttl, .. } = *processor;
    let cannot = || database("cannot enroll the processor");
    let enroll = Enroll { name, version: crate::VERSION, handler_ids, ttl_ms: millis(ttl) };
    let (id,) = enroll.load::<(i32,)>(conn).await.and_then(only_row).map_err(cannot())?;
    Ok((id, paused(conn, handler_ids).await.map_err(cannot())?))
}

async fn paused(conn: &mut AsyncPgConnection, handler_ids: &[i16]) -> QueryResult<Vec<i16>> {
    let paused = Paused { handler_ids }.load::<(i16,)>(conn).await?;
    Ok(paused.into_iter().map(|(id,)| id).collect())
}

pub(super) async fn keep_alive(conn: &mut AsyncPgConnection, id: i32, processor: &Enrolment<'_>) -> Result<Vec<i16>> {
    let Enrolment { name, handler_ids, ttl, report } = *processor;
    let cannot = || database("cannot keep the processor alive");
    let alive = KeepAlive { id, name, version: crate::VERSION, handler_ids, ttl_ms: millis(ttl), report };
    alive.execute(conn).await.map_err(cannot())?;
    paused(conn, handler_ids).await.map_err(cannot())
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
    let poison = PoisonUnknown { grace_ms: millis(grace), limit: i32::try_from(limit).unwrap_or(i32::MAX) };
    let rows = poison.load::<(String, i64)>(conn).await.map_err(cannot())?;
    Ok(rows
        .into_iter()
        .map(|(key, poisoned)| UnknownHandler { key, poisoned: u64::try_from(poisoned).unwrap_or(0) })
        .collect())
}
