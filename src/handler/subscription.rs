//! Subscriptions: which messages a handler wants, and under which keys its deliveries are stored. No code, no connection type.

use super::delay::Delay;
use super::key::HandlerKey;
use super::order::{OrderKey, OrderPlace};
use super::rate::RateLimit;
use crate::store::seam::{OrderedBy, Wants};

/// What accepting needs to know of a handler.
#[derive(Debug, Clone)]
pub(crate) struct Subscription {
    pub(crate) key: HandlerKey,
    pub(crate) former_keys: Vec<String>,
    pub(crate) topics: Vec<String>,
    /// CloudEvents types; none means all.
    pub(crate) event_types: Vec<String>,
    /// When new deliveries are due.
    pub(crate) delay: Delay,
    /// What its deliveries are ordered by.
    pub(crate) order: Option<OrderKey>,
    /// See `WantedHandler`.
    pub(crate) dead_letters: Vec<(String, String)>,
    /// How many of its deliveries may start, over all processes.
    pub(crate) rate: Option<RateLimit>,
}

impl Subscription {
    /// What is stored of it, for messages that are accepted in SQL.
    pub(crate) fn stored(&self) -> Wants {
        let ordered_by = self.order.as_ref().map(|order| match &order.place {
            OrderPlace::RecordKey => OrderedBy::RecordKey,
            OrderPlace::Header(name) => OrderedBy::Header(name.clone()),
            OrderPlace::JsonPointer(_) | OrderPlace::Function(_) => OrderedBy::Process,
        });
        Wants {
            topics: self.topics.clone(),
            event_types: self.event_types.clone(),
            delay: self.delay.after,
            delay_header: self.delay.header.clone(),
            ordered_by,
        }
    }

    /// Whether a message of this topic and CloudEvents type is for this handler.
    pub(crate) fn wants(&self, topic: &str, event_type: Option<&[u8]>) -> bool {
        let type_fits = self.event_types.is_empty()
            || event_type.is_some_and(|given| self.event_types.iter().any(|wanted| wanted.as_bytes() == given));
        type_fits && self.topics.iter().any(|wanted| wanted == topic)
    }
}
