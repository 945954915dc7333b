//! What `build()` refuses: options of handlers that cannot work, alone or together. Nothing here asks the database.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::handler::{Body, HandlerKey, Registration};
use crate::store::Backend;
use crate::types::DURATION_MAX;

/// The longest topic name Kafka allows.
const TOPIC_CHARS_MAX: usize = 249;
/// More would not be concurrency but a queue in memory.
const CONCURRENCY_MAX: usize = 100_000;
/// PostgreSQL keeps so many subtransactions of a session at hand. With more of them every other session has to look them up on disk.
const SHARE_MAX: usize = 64;
/// Messages of one call of a batch handler: one that crashes its process is found out with as many calls alone.
const BATCH_MAX: usize = 1_000;
const BATCH_WAIT_MAX: Duration = Duration::from_secs(3_600);

/// Every reason why a handler cannot work as it is registered.
pub(super) fn registration_problems<B: Backend>(registration: &Registration<B>) -> Vec<String> {
    let key = &registration.key;
    let mut problems = Vec::new();
    for former in &registration.former_keys {
        if let Err(error) = HandlerKey::parse(former.clone()) {
            problems.push(format!("a former key of {key}: {error}"));
        }
    }
    for topic in &registration.topics {
        if !is_topic(topic) {
            problems.push(format!("{key} subscribes to {topic:?}: a topic has 1 to 249 of A-Z a-z 0-9 . _ -"));
        }
    }
    if registration.topics.is_empty() {
        problems.push(format!("{key} subscribes to no topic"));
    }
    if !(1..=CONCURRENCY_MAX).contains(&registration.concurrency) {
        problems.push(format!("the concurrency of {key} is 1 to {CONCURRENCY_MAX}"));
    }
    if registration.timeout.is_some_and(|timeout| timeout.is_zero() || timeout > DURATION_MAX) {
        problems.push(format!("the timeout of {key} is more than zero and at most 365days"));
    }
    problems.extend(share_problem(registration));
    problems.extend(settling_problem(registration));
    problems.extend(batch_problems(registration));
    problems.extend(dead_letter_problems(registration));
    problems.extend(timing_problems(registration));
    problems.extend(order_problems(registration));
    problems.extend(registration.flow_problems());
    problems
}

fn share_problem<B: Backend>(registration: &Registration<B>) -> Option<String> {
    let (key, share) = (&registration.key, registration.share?);
    match &registration.body {
        Body::Plain(_) => {
            Some(format!("{key} is not transactional: it has no transaction that deliveries could share"))
        }
        Body::Batch(_) | Body::TxBatch(_) => Some(format!(
            "{key} is a batch handler: a call has one transaction at the most, and share_transaction is not for it"
        )),
        Body::Transactional(_) if !(1..=SHARE_MAX).contains(&share) => {
            Some(format!("the deliveries of {key} that share a transaction are 1 to {SHARE_MAX}"))
        }
        Body::Transactional(_) => None,
    }
}

fn settling_problem<B: Backend>(registration: &Registration<B>) -> Option<String> {
    let key = &registration.key;
    match &registration.body {
        _ if !registration.settles_itself => None,
        Body::Transactional(_) | Body::TxBatch(_) => {
            Some(format!("{key} is transactional: the engine settles its deliveries, it cannot settle them itself"))
        }
        Body::Batch(_) => {
            Some(format!("{key} is a batch handler: it cannot settle its deliveries itself, use tx_batch_handler"))
        }
        Body::Plain(_) if !B::IS_SETTLED_IN_SQL => {
            Some(format!("{key} cannot settle its deliveries itself on SQLite: use tx_handler"))
        }
        Body::Plain(_) => None,
    }
}

fn batch_problems<B: Backend>(registration: &Registration<B>) -> Vec<String> {
    let (key, Some(batch)) = (&registration.key, registration.batch) else { return Vec::new() };
    let mut problems = Vec::new();
    match &registration.body {
        Body::Plain(_) | Body::Transactional(_) => {
            problems
                .push(format!("{key} takes one message at a time: batch is for batch_handler and tx_batch_handler"));
        }
        Body::Batch(_) | Body::TxBatch(_) => {}
    }
    if !(1..=BATCH_MAX).contains(&batch.up_to) {
        problems.push(format!("the messages of a batch of {key} are 1 to {BATCH_MAX}"));
    }
    if batch.wait > BATCH_WAIT_MAX {
        problems.push(format!("a batch of {key} waits at most 1h to be filled: others could do what waits"));
    }
    problems
}

fn is_topic(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    !name.is_empty() && name.len() <= TOPIC_CHARS_MAX && name.chars().all(is_allowed)
}

fn dead_letter_problems<B: Backend>(registration: &Registration<B>) -> Vec<String> {
    let key = &registration.key;
    let mut problems = Vec::new();
    if !registration.dead_letters.is_empty() && !B::HAS_DEAD_LETTERS {
        problems.push(format!("{key} has a dead-letter topic: that takes PostgreSQL"));
    }
    for (reason, topic) in &registration.dead_letters {
        if !is_topic(topic) {
            problems
                .push(format!("the dead-letter topic {topic:?} of {key}: a topic has 1 to 249 of A-Z a-z 0-9 . _ -"));
        }
        if registration.dead_letters.iter().filter(|(other, _)| other == reason).count() > 1 {
            problems.push(format!("{key} has two dead-letter topics for one reason"));
        }
    }
    problems
}

/// Combinations with an order whose meaning nobody has asked for yet are refused.
fn order_problems<B: Backend>(registration: &Registration<B>) -> Vec<String> {
    let (key, delay) = (&registration.key, &registration.delay);
    let mut problems = Vec::new();
    if registration.order.is_some() && (delay.after.is_some() || delay.header.is_some()) {
        problems.push(format!("{key} is ordered: its deliveries cannot be delayed as well"));
    }
    if registration.order.is_some() && registration.share.is_some_and(|share| share > 1) {
        problems.push(format!("{key} is ordered: its deliveries cannot share transactions"));
    }
    problems
}

fn timing_problems<B: Backend>(registration: &Registration<B>) -> Vec<String> {
    let (key, delay) = (&registration.key, &registration.delay);
    let mut problems = Vec::new();
    if registration.expires_after.is_some_and(|after| after.is_zero() || after > DURATION_MAX) {
        problems.push(format!("expires_after of {key} is more than zero and at most 365days"));
    }
    if delay.after.is_some_and(|after| after.is_zero() || after > DURATION_MAX) {
        problems.push(format!("the delay of {key} is more than zero and at most 365days"));
    }
    if delay.after.zip(registration.expires_after).is_some_and(|(delay, expires)| delay >= expires) {
        problems
            .push(format!("the deliveries of {key} expire before they are due: its delay is not below expires_after"));
    }
    if delay.header.as_ref().is_some_and(String::is_empty) {
        problems.push(format!("the header that delays {key} has a name"));
    }
    problems
}

/// Keys and former keys share one namespace: a text that stands twice would make a delivery belong to two handlers.
pub(super) fn colliding_keys<B: Backend>(registrations: &[Registration<B>]) -> Vec<String> {
    let mut uses: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for registration in registrations {
        let key = registration.key.as_str();
        uses.entry(key).or_default().push("as a key".to_owned());
        for former in &registration.former_keys {
            uses.entry(former).or_default().push(format!("as a former key of {key}"));
        }
    }
    uses.into_iter()
        .filter(|(_, uses)| uses.len() > 1)
        .map(|(key, uses)| format!("the handler key {key} is used {} times: {}", uses.len(), uses.join(", ")))
        .collect()
}
