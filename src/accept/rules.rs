//! What each topic means to an inbox: who wants its messages, and where its records carry their identity.
//!
//! Built once, from the handlers' subscriptions and the identity policies, and never changed. Pure.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::identity::Identity;
use super::order;
use crate::handler::{Subscription, Topics};
use crate::store::seam::Few;
use crate::types::{Record, StoredMessage};

/// The rules of every topic that a handler subscribes to.
#[derive(Debug)]
pub(crate) struct Rules {
    /// In the order of registration: a handler is known by its place here.
    subscriptions: Vec<Subscription>,
    topics: HashMap<String, TopicRules>,
}

/// What is settled for one topic.
#[derive(Debug, Default)]
pub(crate) struct TopicRules {
    /// The topic's name, shared by its messages.
    pub(super) topic: Arc<str>,
    pub(super) identity: Identity,
    /// A handler wants some CloudEvents types only, so the type must be read.
    pub(super) is_type_asked_for: bool,
    /// A handler is ordered, and needs the messages of each partition stored in the order of their offsets.
    pub(super) is_in_order: bool,
}

impl Rules {
    /// Builds the rules. The second value names everything that cannot work.
    pub(crate) fn new(subscriptions: Vec<Subscription>, identities: Vec<(Topics, Identity)>) -> (Self, Vec<String>) {
        let mut topics: HashMap<String, TopicRules> = HashMap::new();
        for subscription in &subscriptions {
            for topic in &subscription.topics {
                let rules = topics.entry(topic.clone()).or_default();
                rules.topic = topic.as_str().into();
                rules.is_type_asked_for |= !subscription.event_types.is_empty();
                rules.is_in_order |= subscription.order.is_some();
            }
        }
        let mut problems = identity_problems(&topics, &identities);
        for subscription in &subscriptions {
            let problem = subscription.order.as_ref().and_then(order::problem);
            problems.extend(problem.map(|problem| format!("the order of {}: {problem}", subscription.key)));
        }
        for (given_for, identity) in identities {
            for topic in given_for.0 {
                topics.entry(topic).or_default().identity = identity.clone();
            }
        }
        (Self { subscriptions, topics }, problems)
    }

    pub(crate) fn subscriptions(&self) -> &[Subscription] {
        &self.subscriptions
    }

    /// The names of all topics, in no particular order.
    pub(crate) fn topics(&self) -> impl Iterator<Item = &str> {
        self.topics.keys().map(String::as_str)
    }

    /// The rules of a topic; `None` when nobody subscribes to it.
    pub(super) fn of(&self, topic: &str) -> Option<&TopicRules> {
        self.topics.get(topic)
    }

    /// The name of a topic, shared by its messages.
    #[cfg(feature = "kafka")]
    pub(crate) fn shared_name(&self, topic: &str) -> Arc<str> {
        self.of(topic).map_or_else(|| topic.into(), |rules| Arc::clone(&rules.topic))
    }

    /// Whether a handler of the topic is ordered: one batch of a partition has to end before the next one is sent, so that messages are stored in
    /// the order of their offsets.
    #[cfg(feature = "kafka")]
    pub(crate) fn is_in_order(&self, topic: &str) -> bool {
        self.of(topic).is_some_and(|rules| rules.is_in_order)
    }

    /// The order that each of these handlers' deliveries of a message is in; none for handlers that are not ordered.
    pub(super) fn order_hashes(&self, handlers: &[usize], message: &StoredMessage) -> Few<Option<i64>> {
        // Made only where it is asked for.
        let mut record = None;
        let hash = |&handler: &usize| {
            let order = self.subscriptions[handler].order.as_ref()?;
            order::order_hash(record.get_or_insert_with(|| Record::from(message)), order)
        };
        handlers.iter().map(hash).collect()
    }

    /// The handlers that want a message of this topic and type, by their places in the order of registration.
    pub(super) fn wanted_by(&self, topic: &str, event_type: Option<&[u8]>) -> Few<usize> {
        let numbered = self.subscriptions.iter().enumerate();
        numbered.filter(|(_, handler)| handler.wants(topic, event_type)).map(|(place, _)| place).collect()
    }
}

fn identity_problems(topics: &HashMap<String, TopicRules>, identities: &[(Topics, Identity)]) -> Vec<String> {
    let mut policies: BTreeMap<&str, Vec<&Identity>> = BTreeMap::new();
    for (given_for, identity) in identities {
        for topic in &given_for.0 {
            policies.entry(topic).or_default().push(identity);
        }
    }
    let mut problems = Vec::new();
    for (topic, policies) in policies {
        if !topics.contains_key(topic) {
            problems.push(format!("the identity of {topic:?} is given, but nobody subscribes to it"));
        }
        if policies.len() > 1 {
            problems.push(format!("the identity of {topic:?} is given {} times", policies.len()));
        }
        let cannot_work = policies.iter().flat_map(|policy| policy.problems(topic));
        problems.extend(cannot_work.map(|problem| format!("the identity of {topic:?}: {problem}")));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handler::{HandlerKey, OrderKey};

    fn subscription(key: &'static str, topics: &[&str], order: Option<OrderKey>) -> Subscription {
        Subscription {
            key: HandlerKey::new(key),
            former_keys: Vec::new(),
            topics: topics.iter().map(|topic| (*topic).to_owned()).collect(),
            event_types: Vec::new(),
            delay: Default::default(),
            dead_letters: Vec::new(),
            order,
            rate: None,
        }
    }

    fn is_in_order(rules: &Rules, topic: &str) -> bool {
        rules.of(topic).is_some_and(|rules| rules.is_in_order)
    }

    #[test]
    fn a_topic_is_ordered_when_one_of_its_handlers_is() {
        let subscriptions = vec![
            subscription("mail", &["orders", "returns"], None),
            subscription("stock", &["orders"], Some(OrderKey::record_key())),
        ];
        let (rules, problems) = Rules::new(subscriptions, Vec::new());
        assert_eq!(problems, [""; 0]);
        assert!(is_in_order(&rules, "orders"));
        assert!(!is_in_order(&rules, "returns"));
        assert!(!is_in_order(&rules, "nobody subscribes"));
    }

    #[test]
    fn an_order_that_cannot_work_is_a_problem_of_its_handler() {
        let (_, problems) =
            Rules::new(vec![subscription("stock", &["orders"], Some(OrderKey::header("")))], Vec::new());
        assert_eq!(problems, ["the order of stock: the header has no name"]);
    }
}
