//! Sends a batch of Kafka records while an earlier batch of the same partition is still being written.
//!
//! The database checks that the earlier batch is stored, and writes the whole batch or nothing. So a batch is on its
//! way to the database while the one before it is written, and the stored records of a partition are always a prefix of
//! it.

use std::sync::Arc;

use super::batch::{Row, RowBatch, WrittenBatch};
use super::intake::Intake;
use super::observe::observed;
use super::quarantine_run;
use super::write::try_write;
use crate::store::Backend;
use crate::store::ledger::LedgerEntry;
use crate::telemetry::events;
use crate::telemetry::spans::AcceptedBy;

/// What became of a batch that was sent early.
pub(crate) enum Followed {
    /// The batch is stored.
    Written(WrittenBatch),
    /// Nothing was written, because the earlier batch is not stored yet or the batch must not be sent early.
    NotYet,
    /// The try failed, and may have been committed.
    InDoubt,
}

/// Tries once. Unless the batch is written, the caller waits until the earlier batches have ended, then writes it in
/// the usual way.
pub(crate) async fn follow<B: Backend>(intake: &Arc<Intake<B>>, rows: &[Row], ledger: &[LedgerEntry]) -> Followed {
    // Whether intake has to stop is only known when the earlier batch has ended, so a batch with quarantined records
    // is not sent early.
    let has_quarantined = rows.iter().any(|row| matches!(row, Row::Quarantine(_)));
    if has_quarantined || quarantine_run::refuse_while_stopped(intake, ledger).await.is_err() {
        return Followed::NotYet;
    }
    let batch = RowBatch { rows, ledger, is_in_doubt: false };
    let writing = try_write(intake, batch, intake.hand_over());
    match observed(AcceptedBy::Engine, batch, writing).await {
        Ok(Some((written, _))) => {
            quarantine_run::note(intake, rows, ledger, &written.receipts);
            Followed::Written(written)
        }
        Ok(None) => Followed::NotYet,
        Err(error) => {
            events::store_error("accept", &error);
            Followed::InDoubt
        }
    }
}
