//! Makes deliveries pending again that were poisoned while no live process had their handler, once a process has it.

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::super::errors::database;
use super::super::statement::{only_row, statements};
use super::act::{NewAuditEntry, audit, keep_history};
use crate::store::operating::{Returned, Signed};
use crate::types::Result;

statements! {
    Parked("
        SELECT message_seq FROM inbox_delivery INDEXED BY inbox_delivery_parked
        WHERE handler_id = :handler_id AND status = 3 AND reason = 'unknown key' ORDER BY message_seq LIMIT :limit")
    -> i64 { handler_id: i16, limit: i64 }

    Key("SELECT key FROM inbox_handler WHERE id = :handler_id") -> String { handler_id: i16 }

    /// The retry counts stay.
    Return("
        UPDATE inbox_delivery SET status = 0, due_at = (SELECT at FROM inbox_now), finished_at = NULL, reason = NULL
        WHERE message_seq = :message_seq AND handler_id = :handler_id") { message_seq: i64, handler_id: i16 }
}

/// At most `limit` deliveries of each handler id.
pub(super) fn return_parked(
    conn: &mut SqliteConnection,
    handler_ids: &[i16],
    actor: &str,
    limit: u32,
) -> Result<Vec<Returned>> {
    let returned = handler_ids.iter().filter_map(|&id| of_handler(conn, id, actor, limit).transpose());
    returned
        .collect::<QueryResult<_>>()
        .map_err(database("cannot return deliveries of handler keys that are known again"))
}

/// One audit row for each handler id; `None` if it has no such delivery.
fn of_handler(conn: &mut SqliteConnection, handler_id: i16, actor: &str, limit: u32) -> QueryResult<Option<Returned>> {
    let parked = Parked { handler_id, limit: limit.into() }.load::<i64>(conn)?;
    if parked.is_empty() {
        return Ok(None);
    }
    let handler_key: String = Key { handler_id }.load(conn).and_then(only_row)?;
    let deliveries = parked.len() as u64;
    let filter = serde_json::json!({ "handler_key": handler_key, "reason": "unknown key" }).to_string();
    let signed =
        Signed { actor: Some(actor.to_owned()), because: Some("a process that has the key was registered".to_owned()) };
    let audit_id = audit(conn, &NewAuditEntry { action: "return", filter, affected: deliveries }, &signed)?;
    for message_seq in parked {
        keep_history(conn, audit_id, message_seq, handler_id)?;
        Return { message_seq, handler_id }.execute(conn)?;
    }
    Ok(Some(Returned { handler_key, deliveries }))
}
