//! Calls for poisoned deliveries, and dead-letter topics. The trigger `inbox_on_poison_change` writes the rows that are
//! read here.

use std::time::Duration;

use diesel::pg::data_types::PgTimestamp;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::process::millis;
use super::statement::statements;
use crate::store::counts::limit;
use crate::store::outbound::PoisonCall;
use crate::store::rows::{PoisonCallRow, poison_call};
use crate::store::seam::WantedHandler;
use crate::types::Result;

statements! {
    /// The lease is the new due time, so a call of a crashed process becomes due again by itself.
    ClaimCalls("
        WITH claimed AS (
            UPDATE inbox_poison_call c SET due_at = now() + :lease_ms * interval '1 millisecond', calls = c.calls + 1
            WHERE c.id = ANY (ARRAY(
                SELECT d.id FROM inbox_poison_call d WHERE d.due_at <= now() ORDER BY d.due_at, d.id LIMIT :limit FOR UPDATE SKIP LOCKED))
            RETURNING c.*)
        SELECT c.id, c.calls, c.poisoned_at, c.attempts, c.reason, c.error, current.key, m.message_id, m.source, m.topic
        FROM claimed c
        LEFT JOIN inbox_handler own ON own.id = c.handler_id
        LEFT JOIN inbox_handler current ON current.id = coalesce(own.same_as, own.id)
        LEFT JOIN LATERAL (SELECT * FROM inbox_message WHERE seq = c.message_seq LIMIT 1) m ON true
        ORDER BY c.id") -> PoisonCallRow<PgTimestamp> { lease_ms: i64, limit: i32 }

    EndCall("DELETE FROM inbox_poison_call WHERE id = :id") { id: i64 }

    DelayCall("UPDATE inbox_poison_call SET due_at = now() + :after_ms * interval '1 millisecond' WHERE id = :id") { after_ms: i64, id: i64 }

    /// Written to every id: deliveries stored under an older id also belong to this handler.
    SetDeadLetters<'a>("
        WITH gone AS (DELETE FROM inbox_dead_letter WHERE handler_id = ANY (:all) AND reason <> ALL (:reasons))
        INSERT INTO inbox_dead_letter AS d (handler_id, reason, topic)
        SELECT h.id, r.reason, r.topic FROM unnest(:all) AS h (id) CROSS JOIN unnest(:reasons, :topics) AS r (reason, topic)
        ON CONFLICT (handler_id, reason) DO UPDATE SET topic = excluded.topic WHERE d.topic <> excluded.topic")
    { all: &'a [i16], reasons: Vec<&'a str>, topics: Vec<&'a str> }

    SetCalls<'a>("
        UPDATE inbox_handler SET calls_on_poison = :calls WHERE id = ANY (:all) AND calls_on_poison <> :calls")
    { calls: bool, all: &'a [i16] }
}

/// Writes the options of a registration that concern poisoned deliveries.
pub(super) async fn set(conn: &mut AsyncPgConnection, handler: &WantedHandler, all: &[i16]) -> diesel::QueryResult<()> {
    let reasons = handler.dead_letters.iter().map(|(reason, _)| reason.as_str()).collect();
    let topics = handler.dead_letters.iter().map(|(_, topic)| topic.as_str()).collect();
    SetDeadLetters { all, reasons, topics }.execute(conn).await?;
    SetCalls { calls: handler.calls_on_poison, all }.execute(conn).await?;
    Ok(())
}

pub(super) async fn claim(conn: &mut AsyncPgConnection, lease: Duration, rows: u32) -> Result<Vec<PoisonCall>> {
    let claiming = ClaimCalls { lease_ms: millis(lease), limit: limit(rows) };
    let claimed = claiming
        .load::<PoisonCallRow<PgTimestamp>>(conn)
        .await
        .map_err(database("cannot claim calls for poisoned deliveries"))?;
    Ok(claimed.into_iter().map(poison_call).collect())
}

pub(super) async fn end(conn: &mut AsyncPgConnection, id: i64) -> Result<()> {
    EndCall { id }.execute(conn).await.map(drop).map_err(database("cannot end the call for a poisoned delivery"))
}

pub(super) async fn delay(conn: &mut AsyncPgConnection, id: i64, after: Duration) -> Result<()> {
    let delayed = DelayCall { after_ms: millis(after), id }.execute(conn).await;
    delayed.map(drop).map_err(database("cannot delay the call for a poisoned delivery"))
}
