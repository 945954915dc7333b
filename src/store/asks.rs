//! The parameters of a claim: how many deliveries of which handler, and which part of the claim index to read.

// Public in a private module, as in `seam.rs`.
#![allow(unreachable_pub, missing_docs)]

use std::time::Duration;

/// How many deliveries of a handler to claim.
#[derive(Debug, Clone, Copy)]
pub struct Ask {
    /// An id of the handler.
    pub handler_id: i16,
    /// The maximum number of deliveries.
    pub limit: i32,
    /// Where the scan begins.
    pub from: ScanFrom,
    /// Set for a fair handler: the tenant after which turns continue.
    pub after: Option<i64>,
    /// The delivery may be claimed although the handler's breaker is open.
    pub is_probe: bool,
    pub rate: AskedRate,
}

/// What a claim takes from the handler's rate limit over all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AskedRate {
    /// As far as this process knows, the handler has no such limit. If it has one, nothing is claimed.
    Unlimited,
    /// The claimed deliveries are taken from the limit that is stored under this id, the lowest id of the handler.
    Limited(i16),
    /// An earlier claim has taken the delivery from the limit already.
    Paid,
}

impl AskedRate {
    /// Whether the handler may have a limit.
    pub fn is_rated(self) -> bool {
        self != Self::Unlimited
    }

    /// The id of the limit to take from.
    pub fn limit_id(self) -> Option<i16> {
        match self {
            Self::Limited(id) => Some(id),
            Self::Unlimited | Self::Paid => None,
        }
    }
}

/// Where a scan of the claim index begins. Rows before it are not found, and cost nothing. From the beginning, it also
/// reads entries of finished deliveries that vacuum has not removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScanFrom {
    Beginning,
    /// This much before the floor; without a floor, this much before now.
    Below {
        floor: Option<Stamp>,
        depth: Duration,
    },
}

/// A timestamp of the database's clock. Opaque here: it is only passed back to the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp(pub i64);
