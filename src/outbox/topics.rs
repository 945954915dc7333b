//! Topics whose records are held back for a while, because they do not exist or are not writable. Pure: the time is an
//! argument.
//!
//! Records of other topics are still sent. A held topic is retried every two seconds. When it has been unknown for
//! longer than the grace period, its records are poisoned; a topic without write permission is retried forever.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::store::outbound::Outgoing;

/// The time between two tries of a topic.
const TRY_EVERY: Duration = Duration::from_secs(2);

/// The topics that are held.
#[derive(Debug)]
pub(super) struct HeldTopics {
    held: HashMap<Arc<str>, HeldTopic>,
    /// How long records wait for an unknown topic.
    grace: Duration,
}

/// A topic that is held.
#[derive(Debug)]
struct HeldTopic {
    /// Since when it does not exist; `None` if it exists but cannot be written to.
    unknown_since: Option<Instant>,
    /// Its records are read and sent again at this time. `None` when it was given up: no record waits for it.
    try_at: Option<Instant>,
}

/// What happens to a record of an unknown topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unknown {
    /// It waits for the next try.
    Waits,
    /// It is poisoned: the grace period is over.
    GivenUp,
}

impl HeldTopics {
    pub(super) fn new(grace: Duration) -> Self {
        Self { held: HashMap::new(), grace }
    }

    /// Whether no topic is held, so that a read leaves out no records. A topic that was given up is not held.
    pub(super) fn is_empty(&self) -> bool {
        self.held.values().all(|topic| topic.try_at.is_none())
    }

    /// Topics that are not tried now. Reads leave out their records.
    pub(super) fn held(&self, now: Instant) -> Vec<String> {
        let is_held = |topic: &HeldTopic| topic.try_at.is_some_and(|try_at| try_at > now);
        self.held.iter().filter(|(_, topic)| is_held(topic)).map(|(name, _)| name.to_string()).collect()
    }

    /// Called when a record of the topic was acknowledged. Returns whether the topic was held or given up.
    pub(super) fn works(&mut self, topic: &str) -> bool {
        self.held.remove(topic).is_some()
    }

    /// Called when a read at `now` found these records and was not ended by a limit. It has left out only topics that are
    /// not tried now. So no record waits for another topic that is not among them, for example because an operator has
    /// discarded it. Such topics are not held any more.
    pub(super) fn found_all(&mut self, rows: &[Outgoing], now: Instant) {
        let waits = |name: &Arc<str>| rows.iter().any(|row| row.topic == *name);
        self.held.retain(|name, topic| topic.try_at.is_none_or(|try_at| try_at > now) || waits(name));
    }

    /// Called when the topic does not exist. Returns what happens to its records.
    pub(super) fn is_unknown(&mut self, topic: &Arc<str>, now: Instant) -> Unknown {
        let held = self.held.entry(Arc::clone(topic)).or_insert(HeldTopic { unknown_since: None, try_at: None });
        let since = *held.unknown_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= self.grace {
            // Not held back any longer: further records of the topic are poisoned as soon as they are sent.
            held.try_at = None;
            return Unknown::GivenUp;
        }
        held.try_at = Some(now + TRY_EVERY.min(self.grace));
        Unknown::Waits
    }

    /// Called when the relay may not write to the topic.
    pub(super) fn is_denied(&mut self, topic: &Arc<str>, now: Instant) {
        let held = self.held.entry(Arc::clone(topic)).or_insert(HeldTopic { unknown_since: None, try_at: None });
        held.unknown_since = None;
        held.try_at = Some(now + TRY_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Headers;

    #[test]
    fn an_unknown_topic_is_retried_and_given_up_after_the_grace_period() {
        let start = Instant::now();
        let after = |secs| start + Duration::from_secs(secs);
        let mut topics = HeldTopics::new(Duration::from_secs(60));
        let topic: Arc<str> = "t".into();
        assert_eq!(topics.is_unknown(&topic, start), Unknown::Waits);
        assert_eq!(topics.held(after(1)), ["t"]);
        assert!(topics.held(after(2)).is_empty());
        assert_eq!(topics.is_unknown(&topic, after(59)), Unknown::Waits);
        assert!(!topics.is_empty());
        assert_eq!(topics.is_unknown(&topic, after(60)), Unknown::GivenUp);
        assert!(topics.held(after(60)).is_empty());
        assert!(topics.is_empty(), "no record waits for a topic that was given up");
        assert_eq!(topics.is_unknown(&topic, after(61)), Unknown::GivenUp);
        assert!(topics.works("t") && topics.is_empty() && !topics.works("t"));
    }

    #[test]
    fn a_topic_without_write_permission_is_retried_indefinitely() {
        let start = Instant::now();
        let mut topics = HeldTopics::new(Duration::ZERO);
        let topic: Arc<str> = "t".into();
        topics.is_denied(&topic, start);
        assert_eq!(topics.held(start), ["t"]);
        assert!(topics.held(start + TRY_EVERY).is_empty());
    }

    #[test]
    fn a_topic_without_waiting_records_is_not_held_any_more() {
        let start = Instant::now();
        let mut topics = HeldTopics::new(Duration::from_secs(60));
        topics.is_denied(&"t".into(), start);
        topics.found_all(&[], start);
        assert!(!topics.is_empty(), "its records were left out");
        let row = |topic: &str| Outgoing {
            id: 1,
            slot: 0,
            topic: topic.into(),
            recorded_at: None,
            key: None,
            headers: Headers::default(),
            payload: None,
        };
        topics.found_all(&[row("t")], start + TRY_EVERY);
        assert!(!topics.is_empty(), "it is tried with this record");
        topics.found_all(&[row("other")], start + TRY_EVERY);
        assert!(topics.is_empty());
    }
}
