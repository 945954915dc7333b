//! What Kafka refuses to this process. Each refusal is reported once, and kept until access is granted. Pure.
//!
//! librdkafka repeats a refusal with every attempt, and reports brokers that refuse the credentials as down. The first
//! refusal is the root cause, so its reason is kept.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// What is refused. The order is that of the reasons: the most important first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Refused {
    /// There is no token to authenticate with.
    Token,
    /// The user, the password, the token or the certificate.
    Credentials,
    /// Reading for the consumer group.
    Group,
    /// The whole cluster.
    Cluster,
    /// Reading this topic.
    Topic(String),
}

impl Refused {
    /// The value of the field in events and the status.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Token => "token",
            Self::Credentials => "credentials",
            Self::Group => "group",
            Self::Cluster => "cluster",
            Self::Topic(_) => "topic",
        }
    }
}

/// The current refusals.
#[derive(Debug, Default)]
pub(super) struct Access {
    /// Whether anything is refused. Read for every record, so it takes no lock.
    is_refused: AtomicBool,
    /// The refusals, with their reasons. A std mutex: nothing awaits while holding it.
    refused: Mutex<BTreeMap<Refused, String>>,
    /// Notified when the credentials are refused: another token may be accepted.
    pub(super) needs_token: Arc<Notify>,
}

impl Access {
    /// Adds a refusal. Returns whether it is new; a refusal that is known keeps its first reason.
    pub(super) fn refuse(&self, what: Refused, why: impl FnOnce() -> String) -> bool {
        if what == Refused::Credentials {
            self.needs_token.notify_one();
        }
        let mut refused = self.refused();
        let is_new = !refused.contains_key(&what);
        refused.entry(what).or_insert_with(why);
        self.is_refused.store(true, Ordering::Relaxed);
        is_new
    }

    /// Removes a refusal. Returns whether there was one.
    pub(super) fn allow(&self, what: &Refused) -> bool {
        if !self.is_refused.load(Ordering::Relaxed) {
            return false;
        }
        let mut refused = self.refused();
        let was_refused = refused.remove(what).is_some();
        self.is_refused.store(!refused.is_empty(), Ordering::Relaxed);
        was_refused
    }

    /// Updates the refusals of topics. `topics` has the reason why each topic may not be read; `None` if it may.
    /// Returns what has changed. Topics that are not `subscribed` any more cause no change: their refusals are dropped,
    /// and late answers about them are ignored.
    pub(super) fn judge_topics(
        &self,
        topics: impl IntoIterator<Item = (String, Option<String>)>,
        subscribed: &[String],
    ) -> Vec<Change> {
        let subscribed: HashSet<&str> = subscribed.iter().map(String::as_str).collect();
        self.keep_topics(|topic| subscribed.contains(topic));
        let judge = |(topic, why): (String, Option<String>)| {
            let what = Refused::Topic(topic);
            match why {
                Some(why) => self.refuse(what.clone(), || why.clone()).then_some(Change::Refused(what, why)),
                None => self.allow(&what).then_some(Change::Allowed(what)),
            }
        };
        topics.into_iter().filter(|(topic, _)| subscribed.contains(topic.as_str())).filter_map(judge).collect()
    }

    /// Drops the refusals of other topics.
    fn keep_topics(&self, is_kept: impl Fn(&str) -> bool) {
        let mut refused = self.refused();
        refused.retain(|what, _| match what {
            Refused::Topic(topic) => is_kept(topic),
            Refused::Token | Refused::Credentials | Refused::Group | Refused::Cluster => true,
        });
        self.is_refused.store(!refused.is_empty(), Ordering::Relaxed);
    }

    /// Whether every broker refuses this process, because it has no valid credentials.
    pub(super) fn is_shut_out(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
            && self.refused().keys().any(|what| matches!(what, Refused::Token | Refused::Credentials))
    }

    /// Why the topic may not be read; `None` if Kafka has not refused it.
    pub(super) fn of_topic(&self, topic: &str) -> Option<String> {
        if !self.is_refused.load(Ordering::Relaxed) {
            return None;
        }
        self.refused().get(&Refused::Topic(topic.to_owned())).cloned()
    }

    /// Everything that is refused, the most important first.
    pub(super) fn reasons(&self) -> Vec<String> {
        self.refused().values().cloned().collect()
    }

    fn refused(&self) -> MutexGuard<'_, BTreeMap<Refused, String>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A refusal that is new, or one that has ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    Refused(Refused, String),
    Allowed(Refused),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_new_once_until_it_is_taken_back() {
        let access = Access::default();
        assert!(access.refuse(Refused::Group, || "no group".to_owned()));
        assert!(access.refuse(Refused::Credentials, || "first".to_owned()));
        assert!(!access.refuse(Refused::Credentials, || "second".to_owned()));
        assert_eq!((access.reasons(), access.is_shut_out()), (vec!["first".to_owned(), "no group".to_owned()], true));
        assert!(access.allow(&Refused::Credentials) && !access.allow(&Refused::Credentials));
        assert!(!access.is_shut_out());
        assert!(access.refuse(Refused::Credentials, || "third".to_owned()));
    }

    #[test]
    fn topics_are_judged_together_and_only_changes_are_told() {
        let access = Access::default();
        let subscribed = ["a".to_owned(), "b".to_owned()];
        let judged = |why: Option<&str>| {
            access.judge_topics([("a".to_owned(), why.map(str::to_owned)), ("b".to_owned(), None)], &subscribed)
        };
        let a = || Refused::Topic("a".to_owned());
        assert_eq!(judged(Some("no")), [Change::Refused(a(), "no".to_owned())]);
        assert_eq!((judged(Some("no")), access.of_topic("a").as_deref()), (vec![], Some("no")));
        assert_eq!((judged(None), access.of_topic("a")), (vec![Change::Allowed(a())], None));
    }

    #[test]
    fn a_topic_that_is_not_subscribed_any_more_is_no_reason() {
        let access = Access::default();
        let refused = || ["a", "b"].map(|topic| (topic.to_owned(), Some(format!("no {topic}"))));
        let both = ["a".to_owned(), "b".to_owned()];
        assert_eq!(access.judge_topics(refused(), &both).len(), 2);
        access.refuse(Refused::Group, || "no group".to_owned());
        assert_eq!(access.judge_topics([], &both), [], "without an answer, a refusal stays");
        assert_eq!(access.reasons(), ["no group", "no a", "no b"]);
        // Kafka was asked before the topic was unsubscribed, and answers after it.
        assert_eq!(access.judge_topics(refused(), &both[1..]), [], "access is not granted, either");
        assert_eq!(access.reasons(), ["no group", "no b"]);
        assert!(access.allow(&Refused::Group));
        access.judge_topics([], &[]);
        assert_eq!((access.reasons(), access.of_topic("b")), (vec![], None));
    }
}
