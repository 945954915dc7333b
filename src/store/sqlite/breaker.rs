//! Breakers in `inbox_handler`, as in `postgres/breaker.rs`. Each operation is one transaction of the writer.

use std::time::Duration;

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::Sqlite;
use super::clock::{self, micros};
use super::errors::database;
use super::statement::{only_row, rows, statements};
use crate::store::breaking::{Breaking, ProbeAnswer, ProbeEnd, probe_answer, probe_row};
use crate::types::Result;

rows! {
    /// Whether the breaker is open, the number of the last right, and when the next one may be granted.
    ProbeRow { is_open: bool, no: i64, free_at: i64 }
}

statements! {
    /// All ids of a handler change together, also those that this process does not know: the probe of a process that
    /// knows more of them is stored under another id.
    Open<'a>("
        UPDATE inbox_handler
        SET breaker_opened_at = :now, breaker_error = :error, breaker_probe_at = :probe_at, breaker_probe_until = NULL
        WHERE id IN (SELECT same.id FROM inbox_handler own
                     JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id) WHERE own.id = :id)
          AND breaker_opened_at IS NULL") { id: i16, now: i64, probe_at: i64, error: &'a str }

    ReadProbe("
        SELECT breaker_opened_at IS NOT NULL, breaker_probe_no, max(coalesce(breaker_probe_at, 0), coalesce(breaker_probe_until, 0))
        FROM inbox_handler WHERE id = :id") -> ProbeRow { id: i16 }

    /// As in `postgres/breaker.rs`.
    Share("
        UPDATE inbox_handler AS h
        SET breaker_opened_at = o.breaker_opened_at, breaker_error = o.breaker_error, breaker_probe_at = o.breaker_probe_at
        FROM (SELECT * FROM inbox_handler WHERE id IN (SELECT value FROM json_each(:handler_ids)) AND breaker_opened_at IS NOT NULL ORDER BY id LIMIT 1) o
        WHERE h.id IN (SELECT value FROM json_each(:handler_ids)) AND h.breaker_opened_at IS NULL") { handler_ids: String }

    Grant("UPDATE inbox_handler SET breaker_probe_no = :no, breaker_probe_until = :until WHERE id = :id")
    { id: i16, no: i64, until: i64 }

    Renew("
        UPDATE inbox_handler SET breaker_probe_until = :until
        WHERE id = :id AND breaker_probe_no = :no AND breaker_probe_until IS NOT NULL") { id: i16, no: i64, until: i64 }

    Close("
        UPDATE inbox_handler
        SET breaker_opened_at = NULL, breaker_error = NULL, breaker_probe_at = NULL, breaker_probe_until = NULL
        WHERE id IN (SELECT same.id FROM inbox_handler own
                     JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id) WHERE own.id = :id)
          AND breaker_opened_at IS NOT NULL") { id: i16 }

    GiveBack("
        UPDATE inbox_handler SET breaker_probe_until = NULL, breaker_probe_at = max(coalesce(breaker_probe_at, 0), :probe_at)
        WHERE id = :id AND breaker_probe_no = :no") { id: i16, no: i64, probe_at: i64 }
}

impl Breaking for Sqlite {
    async fn open_breaker(&self, handler_ids: &[i16], probe_after: Duration, error: &str) -> Result<bool> {
        let (handler_ids, error) = (handler_ids.to_vec(), error.to_owned());
        let open = move |conn: &mut SqliteConnection| {
            let now = clock::now(conn)?;
            let mut opened = 0;
            for id in handler_ids {
                opened += Open { id, now, probe_at: now + micros(probe_after), error: &error }.execute(conn)?;
            }
            QueryResult::Ok(opened > 0)
        };
        self.write(move |conn| open(conn).map_err(database("cannot open a breaker"))).await
    }

    async fn ask_probe(&self, handler_ids: &[i16], lease: Duration) -> Result<ProbeAnswer> {
        let handler_ids = handler_ids.to_vec();
        self.write(move |conn| self::ask(conn, &handler_ids, lease).map_err(database("cannot ask for a probe"))).await
    }

    async fn renew_probe(&self, handler_ids: &[i16], no: i64, lease: Duration) -> Result<()> {
        let id = probe_row(handler_ids);
        let renew = move |conn: &mut SqliteConnection| {
            let until = clock::now(conn)? + micros(lease);
            Renew { id, no, until }.execute(conn).map(drop)
        };
        self.write(move |conn| renew(conn).map_err(database("cannot renew a probe"))).await
    }

    async fn end_probe(&self, handler_ids: &[i16], no: i64, end: ProbeEnd) -> Result<bool> {
        let handler_ids = handler_ids.to_vec();
        self.write(move |conn| self::end(conn, &handler_ids, no, end).map_err(database("cannot end a probe"))).await
    }
}

fn ask(conn: &mut SqliteConnection, handler_ids: &[i16], lease: Duration) -> QueryResult<ProbeAnswer> {
    let id = probe_row(handler_ids);
    let now = clock::now(conn)?;
    let mut row = ReadProbe { id }.load::<ProbeRow>(conn).and_then(only_row)?;
    if !row.is_open && handler_ids.len() > 1 {
        Share { handler_ids: serde_json::json!(handler_ids).to_string() }.execute(conn)?;
        row = ReadProbe { id }.load::<ProbeRow>(conn).and_then(only_row)?;
    }
    let ProbeRow { is_open, no, free_at } = row;
    let granted = (is_open && free_at <= now).then_some(no + 1);
    if let Some(no) = granted {
        Grant { id, no, until: now + micros(lease) }.execute(conn)?;
    }
    Ok(probe_answer(granted, is_open, (free_at - now) / 1_000))
}

/// Ends a probe. Only a successful one closes the breaker.
fn end(conn: &mut SqliteConnection, handler_ids: &[i16], no: i64, end: ProbeEnd) -> QueryResult<bool> {
    let id = probe_row(handler_ids);
    let probe_at = match end {
        ProbeEnd::Passed => {
            let current = ReadProbe { id }.load::<ProbeRow>(conn).and_then(only_row)?;
            let mut closed = 0;
            for &id in handler_ids.iter().filter(|_| current.no == no) {
                closed += Close { id }.execute(conn)?;
            }
            return Ok(closed > 0);
        }
        ProbeEnd::Failed(again_in) => clock::now(conn)? + micros(again_in),
        ProbeEnd::Unused => 0,
    };
    GiveBack { id, no, probe_at }.execute(conn).map(|_| false)
}
