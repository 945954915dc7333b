//! Operate: what people do with an inbox. They inspect it, replay, discard, pause, purge, and find out why work is not
//! moving.
//!
//! [`Operator`] is the library API; the `wharf` binary and the SQL functions offer the same actions. Nothing here runs
//! a handler: a replayed delivery becomes due, and a process that runs its handler claims it.

mod backfill;
mod canary;
mod doctor;
mod flow;
mod ledger;
mod operator;
mod outbox;
mod overview;
mod purge;
mod quarantine;
mod rename_plan;
mod retention;
mod signed;

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
    QuarantineFilter, QuarantineGroup, QuarantineSummary, Rate, RelayFacts, State, TableFacts, Totals, fingerprint,
};
