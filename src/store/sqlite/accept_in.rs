//! Accepts messages in the caller's transaction: they are committed together with the caller's own writes.
//!
//! Each call uses one savepoint: a rejected message leaves nothing behind, and the caller's transaction can continue.

use std::time::{Duration, Instant};

use diesel::SqliteConnection;
use diesel::connection::SimpleConnection;

use super::accept;
use super::connect::AsyncSqliteConnection;
use super::errors::database;
use crate::store::seam::{AcceptBatch, Accepted, NewMessage};
use crate::types::{Error, Result};

const CANNOT: &str = "cannot accept in the caller's transaction";

pub(super) async fn accept_in(
    conn: &mut AsyncSqliteConnection,
    batches: Vec<Vec<NewMessage>>,
) -> Result<Vec<Accepted>> {
    conn.spawn_blocking(move |conn| Ok(within_savepoint(conn, batches))).await.map_err(database(CANNOT))?
}

/// A conflict rolls everything back; the results show which message caused it.
fn within_savepoint(conn: &mut SqliteConnection, batches: Vec<Vec<NewMessage>>) -> Result<Vec<Accepted>> {
    // BEGIN fails inside a transaction. If it succeeds, none is open, and a savepoint would begin one.
    if conn.batch_execute("BEGIN").is_ok() {
        conn.batch_execute("ROLLBACK").map_err(database(CANNOT))?;
        return Err(Error::configuration(format!("{CANNOT}: none is open on the connection")));
    }
    conn.batch_execute("SAVEPOINT wharf_accept").map_err(database(CANNOT))?;
    let accepted = accept_all(conn, batches);
    let is_kept = accepted
        .as_ref()
        .is_ok_and(|answers| !answers.iter().any(|answer| matches!(answer, Accepted::Conflict { .. })));
    let end = match is_kept {
        true => "RELEASE wharf_accept",
        false => "ROLLBACK TO wharf_accept; RELEASE wharf_accept",
    };
    let ended = conn.batch_execute(end);
    let answers = accepted?;
    ended.map_err(database(CANNOT))?;
    Ok(answers)
}

/// Nothing is handed over from memory: the caller's transaction may be rolled back.
fn accept_all(conn: &mut SqliteConnection, batches: Vec<Vec<NewMessage>>) -> Result<Vec<Accepted>> {
    let mut answers = Vec::new();
    for messages in batches {
        let batch = AcceptBatch {
            messages,
            quarantined: Vec::new(),
            ledger: Vec::new(),
            processor: None,
            lease: Duration::ZERO,
        };
        let accepted = accept::accept(conn, Instant::now(), &batch)?;
        answers.extend(accepted.ok_or_else(|| Error::bug("a batch that follows no other was not stored"))?.messages);
    }
    Ok(answers)
}
