//! HeldTopics whose records are left alone for a while, because they do not exist or cannot be written to. Pure: the time is an argument.
//!
//! Records of other topics go on. A topic is tried again every few seconds. When it has been unknown for longer than the grace, its records are
//! poisoned; a topic that may not be written to is tried for ever.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two tries of a topic.
const TRY_EVERY: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct HeldTopics {
    held: HashMap<Arc<str>, HeldTopic>,
    grace: Duration,
}

#[derive(Debug)]
struct HeldTopic {
    unknown_since: Option<Instant>,
    try_at: Instant,
}

/// What becomes of a record whose topic is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unknown {
    Waits,
    /// The grace is over.
    GivenUp,
}

impl HeldTopics {
    pub(super) fn new(grace: Duration) -> Self {
        Self { held: HashMap::new(), grace }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// HeldTopics that are not tried now.
    pub(super) fn held(&self, now: Instant) -> Vec<String> {
        self.held.iter().filter(|(_, topic)| topic.try_at > now).map(|(name, _)| name.to_string()).collect()
    }

    /// A record of the topic was acknowledged; returns whether its records had to wait.
    pub(super) fn works(&mut self, topic: &str) -> bool {
        self.held.remove(topic).is_some()
    }

    /// There is no such topic; returns what becomes of its records.
    pub(super) fn is_unknown(&mut self, topic: &Arc<str>, now: Instant) -> Unknown {
        let held = self.held.entry(Arc::clone(topic)).or_insert(HeldTopic { unknown_since: None, try_at: now });
        let since = *held.unknown_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= self.grace {
            // The next records are given up as soon as they come.
            held.try_at = now;
            return Unknown::GivenUp;
        }
        held.try_at = now + TRY_EVERY.min(self.grace);
        Unknown::Waits
    }

    /// The topic cannot be written to.
    pub(super) fn is_denied(&mut self, topic: &Arc<str>, now: Instant) {
        let held = self.held.entry(Arc::clone(topic)).or_insert(HeldTopic { unknown_since: None, try_at: now });
        held.unknown_since = None;
        held.try_at = now + TRY_EVERY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_topic_waits_is_tried_again_and_is_given_up_after_the_grace() {
        let start = Instant::now();
        let after = |secs| start + Duration::from_secs(secs);
        let mut topics = HeldTopics::new(Duration::from_secs(60));
        let topic: Arc<str> = "t".into();
        assert_eq!(topics.is_unknown(&topic, start), Unknown::Waits);
        assert_eq!(topics.held(after(1)), ["t"]);
        assert!(topics.held(after(2)).is_empty());
        assert_eq!(topics.is_unknown(&topic, after(59)), Unknown::Waits);
        assert_eq!(topics.is_unknown(&topic, after(60)), Unknown::GivenUp);
        assert!(topics.held(after(60)).is_empty());
        assert!(topics.works("t") && topics.is_empty() && !topics.works("t"));
    }

    #[test]
    fn a_topic_that_may_not_be_written_to_is_tried_for_ever() {
        let start = Instant::now();
        let mut topics = HeldTopics::new(Duration::ZERO);
        let topic: Arc<str> = "t".into();
        topics.is_denied(&topic, start);
        assert_eq!(topics.held(start), ["t"]);
        assert!(topics.held(start + TRY_EVERY).is_empty());
    }
}
