//! Handlers as they are registered with a store: their keys, what they want, and the ids that they are given.

// Public in a private module: part of a public trait's bound, but nobody outside can name it.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::sync::Arc;
use std::time::Duration;

/// A handler as registered: its key and the keys it had.
#[derive(Debug, Clone, Default)]
pub struct WantedHandler {
    pub key: String,
    pub former_keys: Vec<String>,
    /// Set when it is ordered: whether a poisoned delivery holds its key.
    pub order: Option<Order>,
    /// Set when it has a rate limit over all processes.
    pub rate: Option<Rated>,
    pub wants: Wants,
    /// The topics that its poisoned deliveries are published to, each with its reason; an empty one is every other reason.
    pub dead_letters: Vec<(String, String)>,
    /// A function is called for each of its poisoned deliveries.
    pub calls_on_poison: bool,
}

/// Which messages a handler wants, and when their deliveries are due: what accepting in SQL has to know.
#[derive(Debug, Clone, Default)]
pub struct Wants {
    pub topics: Vec<String>,
    /// CloudEvents types; none means all.
    pub event_types: Vec<String>,
    pub delay: Option<Duration>,
    pub delay_header: Option<String>,
    pub ordered_by: Option<OrderedBy>,
}

/// Where the key of an ordered handler stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OrderedBy {
    RecordKey,
    Header(String),
    /// Only a process can read it.
    Process,
}

/// A rate limit over all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rated {
    pub interval_us: i64,
    pub burst: i32,
}

/// What the registration of an ordered handler says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    /// A poisoned delivery does not hold its key.
    pub passes_poisoned: bool,
}

/// The ids a handler's deliveries are stored under.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandlerIds {
    /// New deliveries go under this one.
    pub current: i16,
    /// All of them, the current one first. More than one when two keys had ids before they became one handler.
    pub all: Arc<[i16]>,
}

impl HandlerIds {
    /// The id under which what the handler has once is kept: processes that know more or fewer of its ids agree on it.
    pub fn lowest(&self) -> i16 {
        self.all.iter().copied().min().unwrap_or(self.current)
    }
}
