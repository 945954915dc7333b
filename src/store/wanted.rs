//! Handlers as they are registered with a store: their keys, the messages they subscribe to, and their ids.

// Public in a private module: it is part of the bound of a public trait, but it cannot be named outside.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::sync::Arc;
use std::time::Duration;

/// A handler as registered: its key and its former keys.
#[derive(Debug, Clone, Default)]
pub struct WantedHandler {
    pub key: String,
    /// Earlier keys: their deliveries belong to this handler.
    pub former_keys: Vec<String>,
    /// Set when it is ordered: whether a poisoned delivery holds its key.
    pub order: Option<Order>,
    /// Whether its deliveries take turns by tenant.
    pub is_fair: bool,
    /// Set when it has a rate limit across all processes.
    pub rate: Option<Rated>,
    /// The messages that it gets.
    pub wants: Wants,
    /// The topics that its poisoned deliveries are published to, each with its reason; an empty reason means every
    /// other one.
    pub dead_letters: Vec<(String, String)>,
    /// A function is called for each of its poisoned deliveries.
    pub calls_on_poison: bool,
}

/// The messages a handler subscribes to, and when their deliveries are due: the data for accepting in SQL.
#[derive(Debug, Clone, Default)]
pub struct Wants {
    pub topics: Vec<WantedTopic>,
    /// CloudEvents types; none means all.
    pub event_types: Vec<String>,
    /// How long after its acceptance a delivery is due; `None`: at once.
    pub delay: Option<Duration>,
    /// The header with the time at which a delivery is due, or its delay.
    pub delay_header: Option<String>,
    /// Where the ordering key is; `None` if the handler is not ordered.
    pub ordered_by: Option<KeyedBy>,
    /// Where the tenant is; `None` if the handler is not fair.
    pub fair_by: Option<KeyedBy>,
}

/// A topic by its name, or all topics that match a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedTopic {
    /// The name, or the pattern as it was given.
    pub topic: String,
    /// The pattern in the database's syntax.
    pub matches: Option<String>,
}

/// Where a record carries its ordering key or its tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyedBy {
    /// The key of the record.
    RecordKey,
    /// The first header of this name.
    Header(String),
    /// A pointer or a function: only a process that has the handler can compute it, not SQL.
    Process,
}

/// A rate limit across all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rated {
    /// The time between two starts, in microseconds.
    pub interval_us: i64,
    /// Starts at once after a time with fewer starts.
    pub burst: i32,
}

/// The ordering options of a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    /// A poisoned delivery does not hold its key.
    pub passes_poisoned: bool,
}

/// The ids under which a handler's deliveries are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandlerIds {
    /// New deliveries are stored under this id.
    pub current: i16,
    /// All ids, the current one first. There are several if two keys had ids before they became one handler.
    pub all: Arc<[i16]>,
}

impl HandlerIds {
    /// The id under which state that exists once per handler (breaker, rate limit) is stored: the lowest id, so that
    /// all processes agree.
    pub fn lowest(&self) -> i16 {
        self.all.iter().copied().min().unwrap_or(self.current)
    }
}
