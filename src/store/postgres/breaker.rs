//! Breakers in `inbox_handler`. A conditional update of one row grants the right to probe, so at most one process has
//! it.

use std::time::Duration;

use diesel::QueryResult;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::process::millis;
use super::statement::{only_row, rows, statements};
use super::{Postgres, act};
use crate::store::breaking::{Breaking, ProbeAnswer, ProbeEnd, probe_answer, probe_row};
use crate::types::Result;

rows! {
    ProbeRow { no: Option<i64>, is_open: bool, free_in_ms: i64 }
}

statements! {
    /// All ids of a handler change together, also those that this process does not know: the probe of a process that
    /// knows more of them is stored under another id. A breaker that is open keeps its error.
    Open<'a>("
        UPDATE inbox_handler
        SET breaker_opened_at = now(), breaker_error = :error, breaker_probe_at = now() + :probe_after_ms * interval '1 millisecond',
            breaker_probe_until = NULL
        WHERE id IN (SELECT same.id FROM inbox_handler own
                     JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
                     WHERE own.id = ANY (:handler_ids))
          AND breaker_opened_at IS NULL")
    { handler_ids: &'a [i16], probe_after_ms: i64, error: &'a str }

    /// Of two concurrent requests, the second waits for the row lock of the first, and finds the right granted.
    Ask("
        WITH granted AS (
            UPDATE inbox_handler SET breaker_probe_no = breaker_probe_no + 1, breaker_probe_until = now() + :lease_ms * interval '1 millisecond'
            WHERE id = :id AND breaker_opened_at IS NOT NULL AND breaker_probe_at <= now()
              AND (breaker_probe_until IS NULL OR breaker_probe_until <= now())
            RETURNING breaker_probe_no)
        SELECT (SELECT breaker_probe_no FROM granted), breaker_opened_at IS NOT NULL,
               coalesce((extract(epoch FROM greatest(breaker_probe_at, breaker_probe_until) - now()) * 1000)::bigint, 0)
        FROM inbox_handler WHERE id = :id") -> ProbeRow { id: i16, lease_ms: i64 }

    /// A breaker that is opened while ids are being united may be open for a higher id only: `Open` sees the old
    /// `same_as`. No probe could close it. The rows are read locked, so that a breaker that is being closed stays closed.
    Share<'a>("
        WITH current AS MATERIALIZED (
            SELECT * FROM inbox_handler WHERE id = ANY (:handler_ids) ORDER BY id FOR NO KEY UPDATE)
        UPDATE inbox_handler h
        SET breaker_opened_at = o.breaker_opened_at, breaker_error = o.breaker_error, breaker_probe_at = o.breaker_probe_at
        FROM (SELECT * FROM current WHERE breaker_opened_at IS NOT NULL ORDER BY id LIMIT 1) o
        WHERE h.id = ANY (:handler_ids) AND h.breaker_opened_at IS NULL") { handler_ids: &'a [i16] }

    Renew("
        UPDATE inbox_handler SET breaker_probe_until = now() + :lease_ms * interval '1 millisecond'
        WHERE id = :id AND breaker_probe_no = :no AND breaker_probe_until IS NOT NULL") { id: i16, no: i64, lease_ms: i64 }

    /// The fence is read from the locked row: `FOR NO KEY UPDATE` waits for a concurrent change and sees its result.
    Close<'a>("
        WITH current AS MATERIALIZED (
            SELECT 1 FROM inbox_handler WHERE id = :id AND breaker_probe_no = :no AND breaker_opened_at IS NOT NULL FOR NO KEY UPDATE)
        UPDATE inbox_handler
        SET breaker_opened_at = NULL, breaker_error = NULL, breaker_probe_at = NULL, breaker_probe_until = NULL
        WHERE id IN (SELECT same.id FROM inbox_handler own
                     JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
                     WHERE own.id = ANY (:handler_ids))
          AND (SELECT count(*) FROM current) > 0") { id: i16, no: i64, handler_ids: &'a [i16] }

    /// Fenced by the number: a right that has expired and was granted again is not ended.
    GiveBack("
        UPDATE inbox_handler
        SET breaker_probe_until = NULL, breaker_probe_at = greatest(breaker_probe_at, now() + :again_in_ms * interval '1 millisecond')
        WHERE id = :id AND breaker_probe_no = :no") { id: i16, no: i64, again_in_ms: i64 }
}

impl Breaking for Postgres {
    async fn open_breaker(&self, handler_ids: &[i16], probe_after: Duration, error: &str) -> Result<bool> {
        let open = Open { handler_ids, probe_after_ms: millis(probe_after), error };
        act!(self, conn => async {
            open.execute(&mut conn).await.map(|opened| opened > 0).map_err(database("cannot open a breaker"))
        })
    }

    async fn ask_probe(&self, handler_ids: &[i16], lease: Duration) -> Result<ProbeAnswer> {
        act!(self, conn => async {
            self::ask(&mut conn, handler_ids, lease).await.map_err(database("cannot ask for a probe"))
        })
    }

    async fn renew_probe(&self, handler_ids: &[i16], no: i64, lease: Duration) -> Result<()> {
        let renew = Renew { id: probe_row(handler_ids), no, lease_ms: millis(lease) };
        act!(self, conn => async {
            renew.execute(&mut conn).await.map(drop).map_err(database("cannot renew a probe"))
        })
    }

    async fn end_probe(&self, handler_ids: &[i16], no: i64, end: ProbeEnd) -> Result<bool> {
        act!(self, conn => async {
            self::end(&mut conn, handler_ids, no, end).await.map_err(database("cannot end a probe"))
        })
    }
}

/// Asks again if the breaker may be open for another id than that of the probe.
async fn ask(conn: &mut AsyncPgConnection, handler_ids: &[i16], lease: Duration) -> QueryResult<ProbeAnswer> {
    let answer = ask_once(conn, handler_ids, lease).await?;
    if answer != ProbeAnswer::Closed || handler_ids.len() < 2 {
        return Ok(answer);
    }
    Share { handler_ids }.execute(conn).await?;
    ask_once(conn, handler_ids, lease).await
}

async fn ask_once(conn: &mut AsyncPgConnection, handler_ids: &[i16], lease: Duration) -> QueryResult<ProbeAnswer> {
    let ask = Ask { id: probe_row(handler_ids), lease_ms: millis(lease) };
    let ProbeRow { no, is_open, free_in_ms } = ask.load::<ProbeRow>(conn).await.and_then(only_row)?;
    Ok(probe_answer(no, is_open, free_in_ms))
}

/// Ends a probe. Only a successful one closes the breaker.
async fn end(conn: &mut AsyncPgConnection, handler_ids: &[i16], no: i64, end: ProbeEnd) -> QueryResult<bool> {
    let id = probe_row(handler_ids);
    let again_in_ms = match end {
        ProbeEnd::Passed => return Close { id, no, handler_ids }.execute(conn).await.map(|closed| closed > 0),
        ProbeEnd::Failed(again_in) => millis(again_in),
        ProbeEnd::Unused => 0,
    };
    GiveBack { id, no, again_in_ms }.execute(conn).await.map(|_| false)
}
