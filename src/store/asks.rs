//! What a claim asks for: how many deliveries of which handler, and how much of the claim index to look at.

// Public in a private module, as in `seam.rs`.
#![allow(unreachable_pub, missing_docs)]

use std::time::Duration;

/// How many deliveries of a handler are wanted.
#[derive(Debug, Clone, Copy)]
pub struct Ask {
    pub handler_id: i16,
    pub limit: i32,
    pub from: LookFrom,
    /// It may be claimed although the handler's breaker is open.
    pub is_probe: bool,
    /// As far as this process knows, the handler has a rate limit over all processes.
    pub is_rated: bool,
    /// The id under which that limit is kept: the lowest of the handler's.
    pub rate_id: i16,
}

/// Where a look into the claim index begins. What lies before it is not found, and costs nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LookFrom {
    Beginning,
    /// So much before the floor; where there is none yet, so much before now.
    Below {
        floor: Option<Stamp>,
        depth: Duration,
    },
}

/// A moment of the database's clock. Opaque here: it is only ever given back to the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp(pub i64);
