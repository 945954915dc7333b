//! Plain types that every stage shares: records, messages, outcomes, filters, rows for people, errors, limits.
//!
//! The leaf of the tree: nothing here imports another folder of the crate, knows SQL or starts a task. A type that two
//! folders need and neither owns belongs here.

mod backoff;
mod claim;
mod cloud_event;
mod decode;
#[cfg(feature = "testing")]
mod delivery;
mod error;
mod facts;
mod filter;
mod fingerprint;
mod headers;
mod health;
mod ledger;
mod limits;
mod message;
pub(crate) mod origin;
mod outbox;
mod outcome;
mod overview;
mod panic;
mod process_name;
mod purged;
mod readable;
mod receipt;
mod record;
mod rows;
pub(crate) mod sanitize;
mod setters;
#[cfg(feature = "kafka")]
mod source_name;
pub(crate) mod stamp;
mod topic;
mod trace_context;

pub use cloud_event::{CloudEvent, cloud_event};
pub use decode::{Decoder, Encoded, Keyed, Undecoded, keyed};
#[cfg(feature = "testing")]
pub use delivery::Delivery;
pub use error::{Error, Result};
pub(crate) use facts::INTAKE_STOPPED;
pub use facts::{
    Connections, DeadClaims, Facts, GroupFacts, HeldKeys, IngestFacts, Lag, OldestTransaction, PartitionFacts,
    TableFacts,
};
pub use filter::{DeliveryFilter, QuarantineFilter, State};
pub use fingerprint::fingerprint;
pub use headers::Headers;
pub use health::{Health, HealthReason};
pub use ledger::{LedgerFilter, LedgerStatus};
pub use limits::Limits;
pub use message::{Message, Payload, Raw};
pub use outbox::{OutboxDetails, OutboxFacts, OutboxFilter, OutboxState, OutboxSummary, RelayFacts};
pub use overview::{AuditEntry, LedgerGap, QuarantineGroup, Totals};
pub use purged::{Purgeable, Purged};
pub use readable::Readable;
pub use receipt::Receipt;
pub use record::{Position, Record};
pub use rows::{
    Correction, DeliveryDetails, DeliverySummary, ErrorSummary, FailedAttempt, HandlerStatus, HeldKey, HistoryEntry,
    LongestRun, ProcessorReport, ProcessorStatus, QuarantineDetails, QuarantineSummary, Rate,
};
pub use trace_context::TraceContext;

pub(crate) use backoff::{Backoff, jittered};
pub(crate) use claim::Claim;
pub(crate) use cloud_event::{EventMode, IS_BATCH, IS_UNKNOWN, event_mode, is_structured, read_avro, read_protobuf};
pub(crate) use error::Kind;
pub(crate) use limits::DURATION_MAX;
pub(crate) use message::StoredMessage;
pub(crate) use outcome::{EXPIRED, FailedBy, Outcome, PoisonReason};
pub(crate) use panic::panic_text;
pub(crate) use process_name::process_name;
pub(crate) use setters::setters;
#[cfg(feature = "kafka")]
pub(crate) use source_name::SourceName;
pub(crate) use topic::{TopicFilter, is_topic_name};
pub(crate) use trace_context::{BAGGAGE, TRACEPARENT, TRACESTATE};
