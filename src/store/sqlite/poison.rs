//! Calls for poisoned deliveries. The trigger `inbox_call_for_poisoned` writes the rows that are read here.

use std::time::Duration;

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::clock::{self, micros};
use super::errors::database;
use super::statement::statements;
use crate::store::counts::limit;
use crate::store::outbound::PoisonCall;
use crate::store::rows::{PoisonCallRow, poison_call};
use crate::types::Result;

statements! {
    DueCalls("
        SELECT c.id, c.calls + 1, c.poisoned_at, c.attempts, c.reason, c.error, current.key, m.message_id, m.source, m.topic
        FROM inbox_poison_call c
        LEFT JOIN inbox_handler own ON own.id = c.handler_id
        LEFT JOIN inbox_handler current ON current.id = coalesce(own.same_as, own.id)
        LEFT JOIN inbox_message m ON m.seq = c.message_seq
        WHERE c.due_at <= :now ORDER BY c.due_at, c.id LIMIT :limit") -> PoisonCallRow<i64> { now: i64, limit: i32 }

    ClaimCall("UPDATE inbox_poison_call SET due_at = :due_at, calls = calls + 1 WHERE id = :id") { due_at: i64, id: i64 }

    EndCall("DELETE FROM inbox_poison_call WHERE id = :id") { id: i64 }

    DelayCall("UPDATE inbox_poison_call SET due_at = :due_at WHERE id = :id") { due_at: i64, id: i64 }

    SetCalls("UPDATE inbox_handler SET calls_on_poison = :calls WHERE id = :id") { calls: bool, id: i16 }
}

/// Writes the option to every id: deliveries stored under an older id also belong to this handler.
pub(super) fn set(conn: &mut SqliteConnection, calls: bool, all: &[i16]) -> QueryResult<()> {
    all.iter().try_for_each(|&id| SetCalls { calls, id }.execute(conn).map(drop))
}

/// The lease is the new due time, so a call of a crashed process becomes due again by itself.
pub(super) fn claim(conn: &mut SqliteConnection, lease: Duration, rows: u32) -> Result<Vec<PoisonCall>> {
    let claim = |conn: &mut SqliteConnection| {
        let now = clock::now(conn)?;
        let due = DueCalls { now, limit: limit(rows) }.load::<PoisonCallRow<i64>>(conn)?;
        for row in &due {
            ClaimCall { due_at: now + micros(lease), id: row.id }.execute(conn)?;
        }
        QueryResult::Ok(due)
    };
    let claimed = claim(conn).map_err(database("cannot claim calls for poisoned deliveries"))?;
    Ok(claimed.into_iter().map(poison_call).collect())
}

pub(super) fn end(conn: &mut SqliteConnection, id: i64) -> Result<()> {
    EndCall { id }.execute(conn).map(drop).map_err(database("cannot end the call for a poisoned delivery"))
}

pub(super) fn delay(conn: &mut SqliteConnection, id: i64, after: Duration) -> Result<()> {
    let delay = |conn: &mut SqliteConnection| {
        let due_at = clock::now(conn)? + micros(after);
        DelayCall { due_at, id }.execute(conn)
    };
    delay(conn).map(drop).map_err(database("cannot delay the call for a poisoned delivery"))
}
