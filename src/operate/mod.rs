//! Operate: what people do with an inbox. Look, replay, discard, pause, purge, and find out why work is not moving.
//!
//! [`Operator`] is the library's side of it; the `wharf` binary and the SQL functions do the same. Nothing here runs a handler: what is
//! replayed becomes due, and a process that runs the handler claims it.

mod backfill;
mod canary;
mod doctor;
mod flow;
mod ledger;
mod operator;
mod outbox;
mod overview;
mod purge;
mod rename_plan;
mod retention;

pub use backfill::Backfill;
pub use canary::{Canary, CanaryProgress, CanaryStop};
pub use doctor::{Diagnosis, Severity, Symptom};
pub use operator::Operator;
pub(crate) use purge::purge;
pub use rename_plan::{KeyChange, Manifest, ManifestHandler, PlannedHandler};
pub use retention::Retention;

pub use crate::store::operating::SchemaVersion;
pub use crate::types::{
    AuditEntry, Connections, Correction, DeadClaims, DeliveryDetails, DeliveryFilter, DeliverySummary, ErrorSummary,
    Facts, FailedAttempt, GroupFacts, HandlerStatus, HeldKey, HeldKeys, HistoryEntry, IngestFacts, Lag, LedgerFilter,
    LedgerGap, LedgerStatus, LongestRun, OldestTransaction, OutboxDetails, OutboxFacts, OutboxFilter, OutboxState,
    OutboxSummary, PartitionFacts, ProcessorReport, ProcessorStatus, Purgeable, Purged, QuarantineDetails,
    QuarantineFilter, QuarantineGroup, QuarantineSummary, Rate, RelayFacts, State, TableFacts, fingerprint,
};
