//! Subscriptions: which messages a handler gets, and under which keys its deliveries are stored. Without the handler's
//! code and without a connection type.

use super::delay::Delay;
use super::fair::FairKey;
use super::key::HandlerKey;
use super::key_place::KeyPlace;
use super::order::OrderKey;
use super::rate::RateLimit;
use crate::store::seam::{KeyedBy, WantedTopic, Wants};
use crate::types::TopicFilter;

/// What the accept stage needs to know about a handler.
#[derive(Debug, Clone)]
pub(crate) struct Subscription {
    pub(crate) key: HandlerKey,
    pub(crate) former_keys: Vec<String>,
    pub(crate) topics: Vec<TopicFilter>,
    /// CloudEvents types; an empty list means all.
    pub(crate) event_types: Vec<String>,
    /// When new deliveries are due.
    pub(crate) delay: Delay,
    /// Where a record carries its ordering key; `None` if the handler is not ordered.
    pub(crate) order: Option<OrderKey>,
    /// Where a record carries its tenant; `None` if the handler is not fair.
    pub(crate) fair: Option<FairKey>,
    /// Dead-letter topics by reason; the topic for all other reasons has an empty reason.
    pub(crate) dead_letters: Vec<(String, String)>,
    /// The rate limit over all processes.
    pub(crate) rate: Option<RateLimit>,
}

impl Subscription {
    /// The part that is stored, for messages that are accepted in SQL.
    pub(crate) fn stored(&self) -> Wants {
        Wants {
            topics: self.topics.iter().map(stored_topic).collect(),
            event_types: self.event_types.clone(),
            delay: self.delay.after,
            delay_header: self.delay.header.clone(),
            ordered_by: self.order.as_ref().map(|order| keyed_by(&order.place)),
            fair_by: self.fair.as_ref().map(|fair| keyed_by(&fair.place)),
        }
    }

    /// Whether the handler gets messages of this topic.
    pub(crate) fn wants_topic(&self, topic: &str) -> bool {
        self.topics.iter().any(|wanted| wanted.matches(topic))
    }

    /// Whether the handler gets messages of this CloudEvents type.
    pub(crate) fn wants_type(&self, event_type: Option<&[u8]>) -> bool {
        self.event_types.is_empty()
            || event_type.is_some_and(|given| self.event_types.iter().any(|wanted| wanted.as_bytes() == given))
    }
}

/// A topic as it is stored: a pattern also as the regular expression that the database matches with.
fn stored_topic(topic: &TopicFilter) -> WantedTopic {
    match topic {
        TopicFilter::Name(name) => WantedTopic { topic: name.clone(), matches: None },
        TopicFilter::Pattern(pattern) => {
            WantedTopic { topic: pattern.text().to_owned(), matches: Some(pattern.sql().to_owned()) }
        }
    }
}

/// How SQL can compute the key. It cannot evaluate a pointer or a function: then a process computes the key.
fn keyed_by(place: &KeyPlace) -> KeyedBy {
    match place {
        KeyPlace::RecordKey => KeyedBy::RecordKey,
        KeyPlace::Header(name) => KeyedBy::Header(name.clone()),
        KeyPlace::JsonPointer(_) | KeyPlace::Function(_) => KeyedBy::Process,
    }
}
