//! Wraps the writing of a batch in a span, and measures its duration.

use std::future::Future;

use tracing::Instrument;

use super::batch::{Row, RowBatch};
use crate::telemetry::spans::{self, AcceptedBy, ReadBy, Seen, Writing};
use crate::types::Result;

/// Writes a batch within a span, which records an error. A batch without rows has no span.
pub(super) async fn observed<T>(
    by: AcceptedBy,
    batch: RowBatch<'_>,
    writing: impl Future<Output = Result<T>>,
) -> Result<T> {
    let reader = batch.ledger.first().map(|entry| &*entry.reader);
    let read_by = reader.map(|reader| ReadBy { group: &reader.group, cluster_id: &reader.cluster_id });
    let records = batch.rows.len();
    // The batch only moves the ledger: no handler wants its records.
    if records == 0 {
        return writing.await;
    }
    let seen = || batch.rows.iter().map(seen);
    let measured = Writing::accept(spans::accept(by, records, read_by, seen), read_by.is_some());
    let written = writing.instrument(measured.span.clone()).await;
    measured.ended(written.as_ref().err());
    written
}

/// The parts of a record that a span may contain. Never the payload.
fn seen(row: &Row) -> Seen<'_> {
    match row {
        Row::Message { message, .. } => Seen::from(&**message),
        Row::Quarantine(quarantined) => Seen::from(&quarantined.record),
    }
}
