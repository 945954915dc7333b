//! A source of an inbox: its name, and which of the subscribed topics it reads. Reports configuration problems before
//! anything is started.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Kafka, settings};
use crate::accept::{Intake, Rules};
use crate::store::Backend;
use crate::types::{SourceName, TopicFilter};

/// The longest name. Names are values of metric labels, so they are short.
const NAME_CHARS_MAX: usize = 60;
/// The librdkafka setting for how often topic metadata is refreshed.
const REFRESH: &str = "topic.metadata.refresh.interval.ms";
/// How often topics that match patterns are searched by default.
const SEARCH_EVERY: Duration = Duration::from_secs(60);
/// The shortest interval, whatever the setting is.
const SEARCH_EVERY_MIN: Duration = Duration::from_millis(100);
/// The interval when the setting turns the refresh off: the topics are searched once, when the ingest starts.
const FOR_EVER: Duration = Duration::from_secs(365 * 86_400);

impl Kafka {
    /// The name and the group of this source.
    pub(crate) fn source_name(&self) -> SourceName {
        let name = self.name.as_deref().unwrap_or(&self.group);
        SourceName { name: name.into(), group: self.group.as_str().into() }
    }

    /// The topics to read. Invalid names are skipped here and reported by `source_problems`.
    fn filters(&self) -> Vec<TopicFilter> {
        self.topics.iter().filter_map(|topic| TopicFilter::parse(topic).ok()).collect()
    }

    /// How often topics that match patterns are searched; `None`: once, because the setting turns the refresh off.
    fn search_topics_every(&self) -> Option<Duration> {
        let set = self.settings.iter().rev().find(|(name, _)| name == REFRESH);
        match set.and_then(|(_, millis)| millis.parse::<i64>().ok()) {
            None => Some(SEARCH_EVERY),
            Some(millis) => {
                u64::try_from(millis).ok().map(|millis| Duration::from_millis(millis).max(SEARCH_EVERY_MIN))
            }
        }
    }
}

/// The topics that are read from a source, now and later.
pub(super) struct ReadTopics {
    /// Topics that are given by name: subscribed to whether the cluster has them or not.
    named: BTreeSet<String>,
    /// Whether a topic of the cluster is read that is not given by name.
    is_wanted: Box<dyn Fn(&str) -> bool + Send + Sync>,
    /// How often topics are searched; `None` when there are no patterns.
    search_every: Option<Duration>,
    /// A std mutex: nothing awaits while holding it.
    found: Mutex<Found>,
}

/// The subscription, and what the last search of topics has found.
#[derive(Default)]
struct Found {
    /// The current subscription.
    current: BTreeSet<String>,
    /// The next subscription, if it differs.
    next: Option<BTreeSet<String>>,
    /// Topics that were missing at the last check. They are unsubscribed if the next check does not find them either.
    missing: BTreeSet<String>,
}

/// The new subscription, and how it differs from the one before.
pub(super) struct TopicChange {
    /// All topics of the new subscription.
    pub(super) now: Vec<String>,
    /// Topics that are new in it.
    pub(super) come: Vec<String>,
    /// Topics that are not in it any more.
    pub(super) gone: Vec<String>,
}

impl ReadTopics {
    pub(super) fn new<B: Backend>(kafka: &Kafka, intake: &Arc<Intake<B>>) -> Self {
        let (filters, rules) = (kafka.filters(), &intake.rules);
        let is_read = |topic: &str| filters.is_empty() || filters.iter().any(|filter| filter.matches(topic));
        let subscribed = rules.topics().filter(|topic| is_read(topic));
        let given = filters.iter().filter_map(TopicFilter::name).filter(|name| rules.is_wanted(name));
        let named: BTreeSet<String> = subscribed.chain(given).map(str::to_owned).collect();
        let searches =
            rules.has_patterns() && (filters.is_empty() || filters.iter().any(|filter| filter.name().is_none()));
        let found = Found { current: named.clone(), ..Found::default() };
        let asked = Arc::downgrade(intake);
        let is_wanted = move |topic: &str| {
            let is_read = filters.is_empty() || filters.iter().any(|filter| filter.matches(topic));
            is_read && asked.upgrade().is_some_and(|intake| intake.rules.is_wanted(topic))
        };
        let search_every = searches.then(|| kafka.search_topics_every().unwrap_or(FOR_EVER));
        Self { named, is_wanted: Box::new(is_wanted), search_every, found: Mutex::new(found) }
    }

    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The topics that are subscribed to.
    pub(super) fn current(&self) -> Vec<String> {
        self.found().current.iter().cloned().collect()
    }

    /// How often topics that match patterns are searched; `None` when there are no patterns.
    pub(super) fn search_every(&self) -> Option<Duration> {
        self.search_every
    }

    /// Determines the next subscription from the topics that the cluster has. A missing topic is unsubscribed only when
    /// the second check in a row does not find it: a broker that is starting may not know all topics.
    pub(super) fn note(&self, names: &[String]) {
        let there: BTreeSet<&str> = names.iter().map(String::as_str).collect();
        let mut found = self.found();
        let is_kept = |topic: &&String| {
            self.named.contains(*topic) || there.contains(topic.as_str()) || !found.missing.contains(*topic)
        };
        let mut next: BTreeSet<String> = found.current.iter().filter(is_kept).cloned().collect();
        let is_new = |topic: &&str| !next.contains(*topic) && (self.is_wanted)(topic);
        let new: Vec<String> = there.iter().filter(|topic| is_new(topic)).map(|topic| (*topic).to_owned()).collect();
        next.extend(new);
        found.missing = next.iter().filter(|topic| !there.contains(topic.as_str())).cloned().collect();
        found.next = (next != found.current).then_some(next);
    }

    /// The change of the subscription since the last call, which the caller has to apply.
    pub(super) fn take_change(&self) -> Option<TopicChange> {
        // A fast path without a lock: the ingest thread calls this in every iteration.
        self.search_every?;
        let mut found = self.found();
        let now = found.next.take()?;
        let before = std::mem::replace(&mut found.current, now.clone());
        let (come, gone) = (now.difference(&before).cloned().collect(), before.difference(&now).cloned().collect());
        Some(TopicChange { come, gone, now: now.into_iter().collect() })
    }

    /// Undoes a change that could not be applied, so that a later search reports it again: the next one for new topics,
    /// the one after it for missing topics.
    pub(super) fn forget_change(&self, change: &TopicChange) {
        let mut found = self.found();
        found.current.retain(|topic| !change.come.contains(topic));
        found.current.extend(change.gone.iter().cloned());
    }
}

/// All configuration problems of a source, each as a sentence.
pub(crate) fn source_problems(kafka: &Kafka, rules: &Rules) -> Vec<String> {
    let source = kafka.source_name();
    let mut problems = Vec::new();
    if let Some(name) = kafka.name.as_deref().filter(|name| !is_name(name)) {
        problems.push(format!("the source name {name:?} is not 1 to {NAME_CHARS_MAX} of A-Z a-z 0-9 . _ -"));
    }
    problems.extend(settings::config(kafka).err().map(|error| format!("{source}: {error}")));
    for topic in &kafka.topics {
        let is_subscribed_to = match TopicFilter::parse(topic) {
            Err(problem) => {
                problems.push(format!("{source} reads {topic:?}: {problem}"));
                continue;
            }
            Ok(TopicFilter::Name(name)) => rules.is_wanted(&name),
            Ok(TopicFilter::Pattern(pattern)) => {
                rules.has_patterns() || rules.topics().any(|topic| pattern.matches(topic))
            }
        };
        if !is_subscribed_to {
            problems.push(format!("{source} reads {topic:?}, but no handler subscribes to it"));
        }
    }
    problems
}

/// Describes each name that several sources have.
pub(crate) fn duplicate_names<'a>(sources: impl Iterator<Item = &'a Kafka>) -> Vec<String> {
    let mut names: BTreeMap<String, usize> = BTreeMap::new();
    for source in sources {
        *names.entry(source.source_name().name.to_string()).or_default() += 1;
    }
    let several = names.into_iter().filter(|(_, count)| *count > 1);
    several
        .map(|(name, count)| format!("{count} sources have the name {name:?}: tell them apart with Kafka::named"))
        .collect()
}

fn is_name(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    (1..=NAME_CHARS_MAX).contains(&name.len()) && name.chars().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(named: &[&str], pattern: &'static str) -> ReadTopics {
        let named: BTreeSet<String> = named.iter().map(|name| (*name).to_owned()).collect();
        let found = Found { current: named.clone(), ..Found::default() };
        let is_wanted = Box::new(move |topic: &str| topic.starts_with(pattern));
        ReadTopics { named, is_wanted, search_every: Some(SEARCH_EVERY), found: Mutex::new(found) }
    }

    fn search(reading: &ReadTopics, names: &[&str]) -> Option<Vec<String>> {
        reading.note(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        reading.take_change().map(|change| change.now)
    }

    #[test]
    fn topics_that_come_are_subscribed_to_and_those_that_are_gone_twice_are_not() {
        let reading = reading(&["returns"], "orders");
        assert_eq!(search(&reading, &["returns", "payments"]), None);
        assert_eq!(search(&reading, &["orders.eu", "payments"]).unwrap(), ["orders.eu", "returns"]);
        assert_eq!(search(&reading, &["orders.eu", "orders.us"]).unwrap(), ["orders.eu", "orders.us", "returns"]);
        assert_eq!(search(&reading, &["orders.us"]), None);
        assert_eq!(search(&reading, &["orders.us"]).unwrap(), ["orders.us", "returns"]);
        // A topic that is missing only once stays subscribed.
        assert_eq!(search(&reading, &[]), None);
        assert_eq!(search(&reading, &["orders.us"]), None);
        assert_eq!(search(&reading, &[]), None);
        assert_eq!(search(&reading, &[]).unwrap(), ["returns"]);
    }

    #[test]
    fn a_subscription_that_failed_is_tried_again_after_the_next_look() {
        let reading = reading(&[], "orders");
        reading.note(&["orders.eu".to_owned()]);
        let change = reading.take_change().unwrap();
        reading.forget_change(&change);
        assert_eq!(reading.current(), [""; 0]);
        assert_eq!(search(&reading, &["orders.eu"]).unwrap(), ["orders.eu"]);
    }

    #[test]
    fn topics_are_looked_for_as_often_as_librdkafka_would() {
        let every = |millis: &str| Kafka::new("b", "g").set(REFRESH, millis).search_topics_every();
        assert_eq!(Kafka::new("b", "g").search_topics_every(), Some(SEARCH_EVERY));
        assert_eq!(every("300000"), Some(Duration::from_secs(300)));
        assert_eq!((every("1"), every("-1")), (Some(SEARCH_EVERY_MIN), None));
    }

    #[test]
    fn names_of_sources_are_their_own_and_short() {
        let kafka = || Kafka::new("b", "shop");
        assert_eq!(duplicate_names([kafka().named("eu"), kafka()].iter()), [""; 0]);
        let twice = duplicate_names([kafka(), kafka()].iter());
        assert_eq!(twice, [r#"2 sources have the name "shop": tell them apart with Kafka::named"#]);
        assert!(is_name("eu-1") && !is_name("") && !is_name("e u") && !is_name(&"x".repeat(61)));
    }
}
