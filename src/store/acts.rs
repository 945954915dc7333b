//! Operator actions as values: what to change, in whose name, and how the audit names it.

// Public in a private module, like `operating.rs`.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::fmt;

use bytes::Bytes;

use crate::types::{DeliveryFilter, LedgerFilter, OutboxFilter, QuarantineFilter, State};

/// An operator action.
#[derive(Debug, Clone)]
pub enum Act {
    Deliveries {
        verb: Verb,
        filter: DeliveryFilter,
        limit: u32,
    },
    /// Discards pending deliveries, each at the attempt that was seen; the filter is for the audit.
    DiscardSeen {
        filter: DeliveryFilter,
        seen: Vec<SeenDelivery>,
    },
    /// Releases the claim of this attempt; the filter has a message id, a handler key and optionally a source.
    Release {
        filter: DeliveryFilter,
        attempt: i32,
    },
    /// Replays a poisoned or discarded delivery with another payload, if it has had no attempt since.
    ReplayCorrected {
        filter: DeliveryFilter,
        attempt: i32,
        payload: Corrected,
    },
    Quarantined {
        verb: Verb,
        filter: QuarantineFilter,
        limit: u32,
    },
    Outgoing {
        verb: Verb,
        filter: OutboxFilter,
        limit: u32,
    },
    Pause {
        handler_key: String,
    },
    Resume {
        handler_key: String,
    },
    OpenBreaker {
        handler_key: String,
    },
    CloseBreaker {
        handler_key: String,
    },
    /// Sets the rate limit of a handler over all processes.
    SetRate {
        handler_key: String,
        rate: RateSetting,
    },
    /// Moves partitions to this offset, or to the first record that Kafka has; stopped ones are read again.
    ResetLedger {
        filter: LedgerFilter,
        to_offset: Option<i64>,
    },
    /// Moves a partition to a later offset. The skipped records are stored as a gap.
    SkipLedger {
        filter: LedgerFilter,
        to_offset: i64,
    },
    /// Deletes the kept identity of a purged message.
    ForgetIdentity {
        message_id: String,
        source: String,
    },
}

/// A rate limit set by an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RateSetting {
    Limit {
        /// Between two starts.
        interval_us: i64,
        /// Starts at once after a time with fewer starts.
        burst: i32,
    },
    /// No limit; overrides the registration.
    Unlimited,
    /// The limit of the registration.
    AsRegistered,
}

/// A payload corrected by an operator. Never logged.
#[derive(Clone)]
pub struct Corrected(pub Bytes);

impl fmt::Debug for Corrected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    Replay,
    Discard,
}

/// A delivery as a person has seen it. Another attempt makes it another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeenDelivery {
    pub message_seq: i64,
    pub handler_id: i16,
    pub attempts: i32,
}

impl Act {
    /// The name in the audit.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Deliveries { verb: Verb::Replay, .. } => "replay",
            Self::Deliveries { verb: Verb::Discard, .. } | Self::DiscardSeen { .. } => "discard",
            Self::Quarantined { verb: Verb::Replay, .. } => "replay quarantined",
            Self::Quarantined { verb: Verb::Discard, .. } => "discard quarantined",
            Self::Outgoing { verb: Verb::Replay, .. } => "replay outgoing",
            Self::Outgoing { verb: Verb::Discard, .. } => "discard outgoing",
            Self::Release { .. } => "release",
            Self::ReplayCorrected { .. } => "replay corrected",
            Self::Pause { .. } => "pause",
            Self::Resume { .. } => "resume",
            Self::OpenBreaker { .. } => "open breaker",
            Self::CloseBreaker { .. } => "close breaker",
            Self::SetRate { .. } => "set rate",
            Self::ResetLedger { .. } => "reset ledger",
            Self::SkipLedger { .. } => "skip ledger",
            Self::ForgetIdentity { .. } => "forget identity",
        }
    }

    /// The filter as JSON for the audit.
    pub(super) fn filter(&self) -> String {
        match self {
            Self::Deliveries { filter, .. } => filter.to_json(),
            Self::DiscardSeen { filter, .. } => filter.to_json_in(State::Pending),
            Self::Release { filter, attempt } => filter.to_json_of(*attempt, None),
            Self::ReplayCorrected { filter, attempt, payload } => filter.to_json_of(*attempt, Some(&payload.0)),
            Self::Quarantined { filter, .. } => filter.to_json(),
            Self::Outgoing { filter, .. } => filter.to_json(),
            Self::ResetLedger { filter, to_offset } => filter.to_json(*to_offset),
            Self::SkipLedger { filter, to_offset } => filter.to_json(Some(*to_offset)),
            Self::ForgetIdentity { message_id, source } => {
                serde_json::json!({ "message_id": message_id, "source": source }).to_string()
            }
            Self::SetRate { handler_key, rate } => {
                let (interval_us, burst) = match rate {
                    RateSetting::Limit { interval_us, burst } => (Some(interval_us), Some(burst)),
                    RateSetting::Unlimited | RateSetting::AsRegistered => (None, None),
                };
                let is_registered = *rate == RateSetting::AsRegistered;
                let filter = serde_json::json!({
                    "handler_key": handler_key, "interval_us": interval_us, "burst": burst, "is_registered": is_registered,
                });
                filter.to_string()
            }
            Self::Pause { handler_key }
            | Self::Resume { handler_key }
            | Self::OpenBreaker { handler_key }
            | Self::CloseBreaker { handler_key } => serde_json::json!({ "handler_key": handler_key }).to_string(),
        }
    }
}

/// Who acts and why, for the audit.
#[derive(Debug, Clone, Default)]
pub struct Signed {
    /// The person, as reported by the tool.
    pub actor: Option<String>,
    /// The reason that the person gave.
    pub because: Option<String>,
}
