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
    /// As far as this process knows, the handler has a rate limit over all processes.
    pub is_rated: bool,
    /// The id under which that limit is stored: the lowest id of the handler.
    pub rate_id: i16,
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
