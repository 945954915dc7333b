//! Sends a batch of Kafka's records while an earlier batch of the same partition is still under way.
//!
//! The database decides whether the earlier one is stored, and writes all of this one or nothing of it. So a partition's next batch is on its
//! way while the one before it is being written, and what is stored of the partition is a prefix of it at every instant.

use std::sync::Arc;

use super::intake::Intake;
use super::quarantine_run;
use super::write::{BatchTurn, Row, RowBatch, WrittenBatch, try_write};
use crate::store::Backend;
use crate::store::ledger::LedgerEntry;
use crate::telemetry::events;

/// What became of a batch that was sent early.
pub(crate) enum Followed {
    Written(WrittenBatch),
    /// Nothing was written.
    NotYet,
    /// Nobody knows whether it was written.
    InDoubt,
}

/// One try. Unless it is written, the caller waits until the earlier batches have ended, and writes it as any other.
pub(crate) async fn follow<B: Backend>(intake: &Arc<Intake<B>>, rows: &[Row], ledger: &[LedgerEntry]) -> Followed {
    // Whether too many records in a row were quarantined is known when the earlier batch has ended, not before.
    let has_quarantined = rows.iter().any(|row| matches!(row, Row::Quarantine(_)));
    if has_quarantined || quarantine_run::refuse_while_stopped(intake).await.is_err() {
        return Followed::NotYet;
    }
    let batch = RowBatch { rows, ledger, is_in_doubt: false };
    match try_write(intake, batch, BatchTurn::Unknown, intake.hand_over()).await {
        Ok(Some((written, _))) => {
            quarantine_run::note(intake, rows, &written.receipts);
            Followed::Written(written)
        }
        Ok(None) => Followed::NotYet,
        Err(error) => {
            events::store_trouble("accept", &error);
            Followed::InDoubt
        }
    }
}
