//! The rules of each topic: which handlers want its messages, and where its records carry their identity.
//!
//! Built once, from the handlers' subscriptions and the identity policies. The rules of a topic that only a pattern
//! matches are computed when its first record comes, and cached. Pure.
//!
//! An identity policy that is given for a topic by its name takes precedence over those of patterns. If several
//! patterns match, the policy that was given first is used.

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock};

use super::identity::Identity;
use super::order;
use crate::handler::{Subscription, Topics};
use crate::store::seam::Few;
use crate::types::{Record, StoredMessage, TopicFilter};

/// The most topics that only a pattern matches whose rules are cached. Rules of further topics are computed for each
/// record: topic names that callers of `accept` invent must not fill the memory.
const MATCHED_MAX: usize = 10_000;

/// The rules of every topic that a handler subscribes to.
#[derive(Debug)]
pub(crate) struct Rules {
    /// In the order of registration. Handlers are identified by their index here.
    subscriptions: Vec<Subscription>,
    /// Policies, in the order in which they were given.
    identities: Vec<(TopicFilter, Identity)>,
    /// Topics that a handler subscribes to by name.
    named: HashMap<String, Arc<TopicRules>>,
    /// Whether a handler subscribes to a pattern.
    has_patterns: bool,
    /// Other topics that match patterns. A std lock: nothing awaits while holding it.
    matched: RwLock<HashMap<Arc<str>, Arc<TopicRules>>>,
}

/// The ordering key and the tenant of one delivery, hashed.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyHashes {
    /// `None`: the handler is not ordered, or the record has no ordering key.
    pub(super) order: Option<i64>,
    /// `None`: the handler has no tenants.
    pub(super) fair: Option<i64>,
}

/// The rules of one topic.
#[derive(Debug, Default)]
pub(crate) struct TopicRules {
    /// The topic's name, shared by its messages.
    pub(super) topic: Arc<str>,
    pub(super) identity: Identity,
    /// The handlers that subscribe to it, by their index in the order of registration.
    pub(super) wanted_by: Few<usize>,
    /// Whether a handler wants only some CloudEvents types, so that the type must be read.
    pub(super) is_type_asked_for: bool,
    /// Whether a handler is ordered, and needs the messages of each partition stored in the order of their offsets.
    pub(super) is_in_order: bool,
}

impl Rules {
    /// Builds the rules. The second value lists everything that cannot work.
    pub(crate) fn new(subscriptions: Vec<Subscription>, identities: Vec<(Topics, Identity)>) -> (Self, Vec<String>) {
        let topics = || subscriptions.iter().flat_map(|subscription| &subscription.topics);
        let names: Vec<String> = topics().filter_map(TopicFilter::name).map(str::to_owned).collect();
        let has_patterns = topics().any(|topic| topic.name().is_none());
        let mut problems = Vec::new();
        let mut given = Vec::new();
        for (given_for, identity) in identities {
            for topic in given_for.0 {
                match TopicFilter::parse(&topic) {
                    Ok(topic) => given.push((topic, identity.clone())),
                    Err(problem) => problems.push(format!("the identity of {topic:?}: {problem}")),
                }
            }
        }
        let mut rules =
            Self { subscriptions, identities: given, named: HashMap::new(), has_patterns, matched: RwLock::default() };
        problems.extend(rules.identity_problems(&names));
        for subscription in &rules.subscriptions {
            let problem = subscription.order.as_ref().and_then(|order| order::problem(&order.place));
            problems.extend(problem.map(|problem| format!("the order of {}: {problem}", subscription.key)));
            let problem = subscription.fair.as_ref().and_then(|fair| order::problem(&fair.place));
            problems.extend(problem.map(|problem| format!("the tenants of {}: {problem}", subscription.key)));
        }
        let named = names.into_iter().filter_map(|name| Some((name.clone(), Arc::new(rules.work_out(&name)?))));
        let named = named.collect();
        rules.named = named;
        (rules, problems)
    }

    pub(crate) fn subscriptions(&self) -> &[Subscription] {
        &self.subscriptions
    }

    /// The names of all topics that a handler subscribes to by name, in no particular order.
    pub(crate) fn topics(&self) -> impl Iterator<Item = &str> {
        self.named.keys().map(String::as_str)
    }

    /// Whether there are topics that handlers subscribe to by patterns.
    pub(crate) fn has_patterns(&self) -> bool {
        self.has_patterns
    }

    /// Whether a handler subscribes to the topic.
    pub(crate) fn is_wanted(&self, topic: &str) -> bool {
        self.named.contains_key(topic)
            || self.has_patterns && self.subscriptions.iter().any(|subscription| subscription.wants_topic(topic))
    }

    /// The rules of a topic; `None` when no handler subscribes to it. The rules of a named topic take no lock.
    pub(super) fn of(&self, topic: &str) -> Option<Arc<TopicRules>> {
        if let Some(rules) = self.named.get(topic) {
            return Some(Arc::clone(rules));
        }
        if !self.has_patterns {
            return None;
        }
        if let Some(rules) = self.matched.read().unwrap_or_else(PoisonError::into_inner).get(topic) {
            return Some(Arc::clone(rules));
        }
        let rules = Arc::new(self.work_out(topic)?);
        let mut matched = self.matched.write().unwrap_or_else(PoisonError::into_inner);
        if matched.len() < MATCHED_MAX {
            matched.insert(Arc::clone(&rules.topic), Arc::clone(&rules));
        }
        Some(rules)
    }

    /// Computes the rules of a topic; `None` when no handler subscribes to it.
    fn work_out(&self, topic: &str) -> Option<TopicRules> {
        let subscribed = || self.subscriptions.iter().enumerate().filter(|(_, handler)| handler.wants_topic(topic));
        let wanted_by: Few<usize> = subscribed().map(|(place, _)| place).collect();
        if wanted_by.is_empty() {
            return None;
        }
        let by_name = self.identities.iter().find(|(given_for, _)| given_for.name() == Some(topic));
        let identity = by_name.or_else(|| self.identities.iter().find(|(given_for, _)| given_for.matches(topic)));
        Some(TopicRules {
            topic: topic.into(),
            identity: identity.map(|(_, identity)| identity.clone()).unwrap_or_default(),
            wanted_by,
            is_type_asked_for: subscribed().any(|(_, handler)| !handler.event_types.is_empty()),
            is_in_order: subscribed().any(|(_, handler)| handler.order.is_some()),
        })
    }

    /// The name of a topic, shared by its messages.
    #[cfg(feature = "kafka")]
    pub(crate) fn shared_name(&self, topic: &str) -> Arc<str> {
        self.of(topic).map_or_else(|| topic.into(), |rules| Arc::clone(&rules.topic))
    }

    /// Whether a handler of the topic is ordered. Then one batch of a partition, or of a call, has to end before the
    /// next one is sent, so that messages are stored in the order of their offsets, or of the call.
    pub(crate) fn is_in_order(&self, topic: &str) -> bool {
        self.of(topic).is_some_and(|rules| rules.is_in_order)
    }

    /// For each of these handlers, the hashes of its delivery of a message; `None` for handlers without an order or
    /// tenants.
    pub(super) fn key_hashes(&self, handlers: &[usize], message: &StoredMessage) -> Few<KeyHashes> {
        // The record is built only if a handler needs it, because that copies the message's fields.
        let made = OnceCell::new();
        let record = || made.get_or_init(|| Record::from(message));
        let hashes = |&handler: &usize| {
            let Subscription { order, fair, .. } = &self.subscriptions[handler];
            KeyHashes {
                order: order.as_ref().and_then(|order| order::order_hash(record(), order)),
                fair: fair.as_ref().map(|fair| order::fair_hash(record(), fair)),
            }
        };
        handlers.iter().map(hashes).collect()
    }

    /// The handlers of a topic that want a message of this type, by their index in the order of registration.
    pub(super) fn wanted_by(&self, rules: &TopicRules, event_type: Option<&[u8]>) -> Few<usize> {
        let is_wanting = |place: &usize| self.subscriptions[*place].wants_type(event_type);
        rules.wanted_by.iter().copied().filter(is_wanting).collect()
    }

    /// Policies that are given twice, for topics that no handler subscribes to, or that cannot work.
    fn identity_problems(&self, names: &[String]) -> Vec<String> {
        let mut policies: BTreeMap<&str, Vec<(&TopicFilter, &Identity)>> = BTreeMap::new();
        for (given_for, identity) in &self.identities {
            policies.entry(given_for.text()).or_default().push((given_for, identity));
        }
        let is_subscribed_to = |given_for: &TopicFilter| match given_for {
            TopicFilter::Name(name) => self.subscriptions.iter().any(|subscription| subscription.wants_topic(name)),
            // Whether two patterns match a common name cannot be decided simply, so it is assumed.
            TopicFilter::Pattern(pattern) => self.has_patterns || names.iter().any(|name| pattern.matches(name)),
        };
        let mut problems = Vec::new();
        for (topic, policies) in policies {
            if !policies.iter().any(|(given_for, _)| is_subscribed_to(given_for)) {
                problems.push(format!("the identity of {topic:?} is given, but no handler subscribes to it"));
            }
            if policies.len() > 1 {
                problems.push(format!("the identity of {topic:?} is given {} times", policies.len()));
            }
            let cannot_work = policies.iter().flat_map(|(given_for, policy)| policy.problems(given_for.name()));
            problems.extend(cannot_work.map(|problem| format!("the identity of {topic:?}: {problem}")));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::super::prepare::{Prepared, prepare};
    use super::super::ready::Answers;
    use super::*;
    use crate::handler::{HandlerKey, OrderKey};
    use crate::types::Limits;

    fn subscription(key: &'static str, topics: &[&str], order: Option<OrderKey>) -> Subscription {
        Subscription {
            key: HandlerKey::new(key),
            former_keys: Vec::new(),
            topics: topics.iter().map(|topic| TopicFilter::parse(topic).unwrap()).collect(),
            event_types: Vec::new(),
            delay: Default::default(),
            dead_letters: Vec::new(),
            order,
            fair: None,
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
        assert_eq!(problems, ["the order of stock: the header name is empty"]);
    }

    #[test]
    fn a_function_for_the_key_gets_the_cluster_of_the_record() {
        let by_cluster = OrderKey::by(|record| record.cluster().map(str::to_owned));
        let (rules, _) = Rules::new(vec![subscription("stock", &["orders"], Some(by_cluster))], Vec::new());
        let order = |record: Record| {
            let (limits, answers) = (Limits::default(), Answers::default());
            let of = rules.of("orders").unwrap();
            match prepare(record.with_id("a"), &limits, &of, |_| smallvec![0], &answers, || 0) {
                Prepared::Message { message, wanted_by, .. } => rules.key_hashes(&wanted_by, &message)[0].order,
                Prepared::Quarantine(_) | Prepared::Unwanted | Prepared::NotYet(..) => panic!("it is a message"),
            }
        };
        let of_cluster = |id: &'static str| order(Record::new("orders").with_cluster(id));
        assert!(of_cluster("a").is_some() && of_cluster("a") != of_cluster("b"));
        assert_eq!(order(Record::new("orders")), None);
    }

    /// The field that gives the identity of a topic's records, as `Debug` shows it.
    fn identity(rules: &Rules, topic: &str) -> Option<String> {
        rules.of(topic).map(|rules| format!("{:?}", rules.identity))
    }

    fn policy(topic: &str, header: &str) -> (Topics, Identity) {
        (topic.into(), Identity::header(header))
    }

    #[test]
    fn an_identity_by_name_wins_and_of_patterns_the_first_that_was_given() {
        let subscriptions = vec![subscription("mail", &["^orders", "returns"], None)];
        let identities = vec![policy(r"^orders\.eu\.", "eu"), policy("^orders", "any"), policy("orders.eu.old", "old")];
        let (rules, problems) = Rules::new(subscriptions, identities);
        assert_eq!(problems, [""; 0]);
        let by_header = |name: &str| Some(format!("{:?}", Identity::header(name)));
        assert_eq!(identity(&rules, "orders.eu.new"), by_header("eu"));
        assert_eq!(identity(&rules, "orders.us"), by_header("any"));
        assert_eq!(identity(&rules, "orders.eu.old"), by_header("old"));
        assert_eq!(identity(&rules, "returns"), Some(format!("{:?}", Identity::default())));
        assert_eq!(identity(&rules, "payments"), None);
    }

    #[test]
    fn every_handler_whose_name_or_pattern_fits_wants_a_topic_once() {
        let subscriptions = vec![
            subscription("mail", &["orders.eu", r"^orders\."], None),
            subscription("stock", &["^orders"], Some(OrderKey::record_key())),
            subscription("other", &["^returns"], None),
        ];
        let (rules, problems) = Rules::new(subscriptions, Vec::new());
        assert_eq!(problems, [""; 0]);
        let wanted_by = |topic: &str| rules.of(topic).map(|of| rules.wanted_by(&of, None).to_vec());
        assert_eq!(wanted_by("orders.eu"), Some(vec![0, 1]));
        assert_eq!(wanted_by("orders.us"), Some(vec![0, 1]));
        assert_eq!(wanted_by("orders"), Some(vec![1]));
        assert_eq!(wanted_by("payments"), None);
        assert!(is_in_order(&rules, "orders.us") && !is_in_order(&rules, "returns.eu"));
        assert!(rules.is_wanted("orders.us") && !rules.is_wanted("payments"));
        assert_eq!(rules.topics().collect::<Vec<_>>(), ["orders.eu"]);
    }

    #[test]
    fn topics_that_patterns_match_are_remembered_up_to_a_bound() {
        let (rules, _) = Rules::new(vec![subscription("mail", &["^t"], None)], Vec::new());
        for number in 0..MATCHED_MAX + 10 {
            assert!(rules.of(&format!("t{number}")).is_some());
            assert!(rules.of(&format!("x{number}")).is_none());
        }
        assert_eq!(rules.matched.read().unwrap().len(), MATCHED_MAX);
    }

    #[test]
    fn an_identity_that_nobody_needs_or_that_stands_twice_is_a_problem() {
        let problems = |subscribed: &[&str], identities| {
            let (_, problems) = Rules::new(vec![subscription("mail", subscribed, None)], identities);
            problems
        };
        let unneeded = problems(&["orders"], vec![policy("^returns", "id")]);
        assert_eq!(unneeded, [r#"the identity of "^returns" is given, but no handler subscribes to it"#]);
        let twice = problems(&["^orders"], vec![policy("^orders", "a"), policy("^orders", "b")]);
        assert_eq!(twice, [r#"the identity of "^orders" is given 2 times"#]);
        assert_eq!(problems(&["orders"], vec![policy("^ord", "id")]), [""; 0]);
        assert!(problems(&["orders"], vec![policy("^(", "id")])[0].contains("unclosed group"));
    }
}
