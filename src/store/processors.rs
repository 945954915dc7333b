//! Processors: the processes that run handlers, as they register with a store and send their heartbeats.

// Public in a private module, as in `seam.rs`.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::sync::Arc;
use std::time::Duration;

/// A processor as it registers, and as each of its heartbeats describes it.
#[derive(Clone)]
pub struct ProcessorInfo {
    /// Host and process, for people: `inbox_processor.name`.
    pub name: Arc<str>,
    /// The handlers that it runs. Deliveries of a handler that no live processor has are poisoned after a grace period.
    pub handler_ids: Vec<i16>,
    /// How long it counts as alive after a heartbeat.
    pub ttl: Duration,
    /// Its report, as JSON.
    pub report: String,
}

/// Handlers, by id, that must not start deliveries now, or only within a rate limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockedHandlers {
    /// An operator has paused them.
    pub paused: Vec<i16>,
    /// Their breakers are open.
    pub open: Vec<i16>,
    /// They have a rate limit across all processes.
    pub rated: Vec<i16>,
}

/// The connections that the engine and operators share; not those of transactional handlers and of renewal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolStatus {
    /// Connections that are taken from the pool now.
    pub in_use: usize,
    /// The maximum of the pool, not the number of open connections.
    pub size: usize,
    /// Tasks that wait for a connection. Always 0 on SQLite.
    pub waiting: usize,
}

#[derive(Debug, Clone)]
pub struct UnknownHandler {
    /// The key of the handler.
    pub key: String,
    /// Deliveries that this check has poisoned.
    pub poisoned: u64,
}
