//! Accepts records in the caller's transaction: their messages become visible when the caller commits.
//!
//! Nothing is handed over, because the deliveries are not visible before the commit. Nothing is quarantined, because
//! the caller gets an error. No event reports acceptance, because only the caller knows whether it commits.

use std::sync::Arc;
use std::time::Instant;

use super::acceptor::{TOPIC_CHARS_SHOWN, refused};
use super::batch::{Row, RowBatch};
use super::intake::Intake;
use super::observe::observed;
use super::write::new_messages;
use crate::store::Backend;
use crate::store::seam::{Accepted, NewMessage};
use crate::telemetry::spans::AcceptedBy;
use crate::types::{Error, Receipt, Record, Result, sanitize};

/// Stores the records, all or nothing. Returns one receipt for each, in order.
pub(crate) async fn accept_in<B: Backend>(
    intake: &Arc<Intake<B>>,
    conn: &mut B::Connection,
    records: Vec<Record>,
) -> Result<Vec<Receipt>> {
    let deadline = Instant::now() + intake.limits.accept_patience;
    let handlers = intake.handlers().await?;
    let mut receipts = Vec::with_capacity(records.len());
    let (mut rows, mut places) = (Vec::new(), Vec::new());
    for (at, record) in records.into_iter().enumerate() {
        receipts.push(Receipt::Unwanted);
        match intake.row_by(record, deadline).await? {
            None => {}
            Some((Row::Quarantine(quarantined), _)) => return Err(refused(at, &quarantined)),
            Some((row @ Row::Message { .. }, _)) => {
                rows.push(row);
                places.push(at);
            }
        }
    }
    if rows.is_empty() {
        return Ok(receipts);
    }
    let messages = new_messages(intake, &rows, &handlers, None);
    let writing = intake.store.backend.accept_in(conn, batches(intake, messages.clone()));
    let batch = RowBatch { rows: &rows, ledger: &[], is_in_doubt: false };
    let answers = observed(AcceptedBy::Caller, batch, writing).await?;
    for ((answer, message), at) in answers.iter().zip(&messages).zip(places) {
        receipts[at] = match answer {
            Accepted::New { .. } => Receipt::Accepted { deliveries: message.deliveries.len() },
            Accepted::Duplicate { added, .. } => Receipt::Duplicate { added: *added },
            Accepted::Remembered => Receipt::Duplicate { added: 0 },
            Accepted::Conflict { .. } => return Err(conflict(at, message)),
        };
    }
    if let Some(hand_over) = intake.hand_over() {
        hand_over.expect();
    }
    Ok(receipts)
}

/// Splits messages into batches that are within the limits of one statement.
fn batches<B: Backend>(intake: &Intake<B>, messages: Vec<NewMessage>) -> Vec<Vec<NewMessage>> {
    let mut batches: Vec<Vec<NewMessage>> = Vec::new();
    let mut size_bytes = 0;
    for message in messages {
        let bytes = message.message.size_bytes();
        let is_full = |batch: &Vec<NewMessage>| {
            batch.len() >= intake.limits.accept_batch_rows || size_bytes + bytes > intake.limits.accept_batch_bytes
        };
        match batches.last_mut().filter(|batch| !is_full(batch)) {
            Some(batch) => {
                size_bytes += bytes;
                batch.push(message);
            }
            None => {
                size_bytes = bytes;
                batches.push(vec![message]);
            }
        }
    }
    batches
}

fn conflict(at: usize, message: &NewMessage) -> Error {
    let topic = sanitize::text(&message.message.topic, TOPIC_CHARS_SHOWN);
    Error::refused(format!(
        "cannot accept record {} of topic {topic}: its identity belongs to a message with another payload; nothing was stored",
        at + 1
    ))
}
