//! Handler options that `build()` refuses, because they are invalid alone or in combination. Nothing here queries the
//! database.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::handler::{Body, HandlerKey, Registration};
use crate::store::Backend;
use crate::types::{DURATION_MAX, TopicFilter, is_topic_name};

/// The most slots of a handler. More would be an in-memory queue rather than concurrency.
const CONCURRENCY_MAX: usize = 100_000;
/// The most deliveries that share a transaction, each in a subtransaction. PostgreSQL caches this many subtransactions
/// of a session; with more of them, other sessions have to look them up on disk.
const SHARE_MAX: usize = 64;
/// The most messages of one call of a batch handler. After a crash each message of the batch runs alone, so this bounds
/// the number of such calls.
const BATCH_MAX: usize = 1_000;
/// The longest wait for a batch to fill: meanwhile the claims are held, and no other process can run the messages.
const BATCH_WAIT_MAX: Duration = Duration::from_secs(3_600);

/// Returns every problem of a handler's registration.
pub(super) fn registration_problems<B: Backend>(registration: &Registration<B>) -> Vec<String> {
    let key = &registration.key;
    let mut problems = Vec::new();
    for former in &registration.former_keys {
        if let Err(error) = HandlerKey::parse(former.clone()) {
            problems.push(format!("a former key of {key} is invalid: {error}"));
        }
    }
    for topic in &registration.topics {
        if let Err(problem) = TopicFilter::parse(topic) {
            problems.push(format!("{key} subscribes to {topic:?}: {problem}"));
        }
    }
    if registration.topics.is_empty() {
        problems.push(format!("{key} subscribes to no topic"));
    }
    if !(1..=CONCURRENCY_MAX).contains(&registration.concurrency) {
        problems.push(format!("the concurrency of {key} must be 1 to {CONCURRENCY_MAX}"));
    }
    if registration.timeout.is_some_and(|timeout| timeout.is_zero() || timeout > DURATION_MAX) {
        problems.push(format!("the timeout of {key} must be more than zero and at most 365days"));
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

/// A shared transaction needs a transactional handler that gets one message.
fn share_problem<B: Backend>(registration: &Registration<B>) -> Option<String> {
    let (key, share) = (&registration.key, registration.share?);
    match &registration.body {
        Body::Plain(_) => {
            Some(format!("{key} is not transactional: it has no transaction that deliveries could share"))
        }
        Body::Batch(_) | Body::TxBatch(_) => Some(format!(
            "{key} is a batch handler: a call has at most one transaction, so share_transaction does not apply"
        )),
        Body::Transactional(_) if !(1..=SHARE_MAX).contains(&share) => {
            Some(format!("share_transaction of {key} must be 1 to {SHARE_MAX}"))
        }
        Body::Transactional(_) => None,
    }
}

/// A handler can settle its own delivery only if the engine does not, and only with SQL functions.
fn settling_problem<B: Backend>(registration: &Registration<B>) -> Option<String> {
    let key = &registration.key;
    match &registration.body {
        _ if !registration.settles_itself => None,
        Body::Transactional(_) | Body::TxBatch(_) => {
            Some(format!("{key} is transactional: the engine settles its deliveries, so it cannot settle them itself"))
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

/// The batch options need a batch handler, and are bounded.
fn batch_problems<B: Backend>(registration: &Registration<B>) -> Vec<String> {
    let (key, Some(batch)) = (&registration.key, registration.batch) else { return Vec::new() };
    let mut problems = Vec::new();
    match &registration.body {
        Body::Plain(_) | Body::Transactional(_) => {
            problems
                .push(format!("{key} takes one message at a time: use batch_handler or tx_batch_handler for batches"));
        }
        Body::Batch(_) | Body::TxBatch(_) => {}
    }
    if !(1..=BATCH_MAX).contains(&batch.up_to) {
        problems.push(format!("the batch size of {key} must be 1 to {BATCH_MAX}"));
    }
    if batch.wait > BATCH_WAIT_MAX {
        problems.push(format!(
            "the batch wait of {key} must be at most 1h: other processes cannot run the waiting messages"
        ));
    }
    problems
}

/// Dead letters are written by SQL triggers of PostgreSQL, at most one topic for each reason.
fn dead_letter_problems<B: Backend>(registration: &Registration<B>) -> Vec<String> {
    let key = &registration.key;
    let mut problems = Vec::new();
    if !registration.dead_letters.is_empty() && !B::HAS_DEAD_LETTERS {
        problems.push(format!("{key} has a dead-letter topic, which requires PostgreSQL"));
    }
    for (reason, topic) in &registration.dead_letters {
        if !is_topic_name(topic) {
            problems.push(format!(
                "the dead-letter topic {topic:?} of {key}: a topic name has 1 to 249 characters of A-Z a-z 0-9 . _ -"
            ));
        }
        if registration.dead_letters.iter().filter(|(other, _)| other == reason).count() > 1 {
            problems.push(format!("{key} has two dead-letter topics for one reason"));
        }
    }
    problems
}

/// Refuses options that ordered handlers do not support.
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

/// Durations that are invalid, and deliveries that would expire before they are due.
fn timing_problems<B: Backend>(registration: &Registration<B>) -> Vec<String> {
    let (key, delay) = (&registration.key, &registration.delay);
    let mut problems = Vec::new();
    if registration.expires_after.is_some_and(|after| after.is_zero() || after > DURATION_MAX) {
        problems.push(format!("expires_after of {key} must be more than zero and at most 365days"));
    }
    if delay.after.is_some_and(|after| after.is_zero() || after > DURATION_MAX) {
        problems.push(format!("the delay of {key} must be more than zero and at most 365days"));
    }
    if delay.after.zip(registration.expires_after).is_some_and(|(delay, expires)| delay >= expires) {
        problems
            .push(format!("the deliveries of {key} expire before they are due: its delay must be below expires_after"));
    }
    if delay.header.as_ref().is_some_and(String::is_empty) {
        problems.push(format!("the name of the header that delays {key} must not be empty"));
    }
    problems
}

/// Keys and former keys share one namespace: with a duplicate, a delivery would belong to two handlers.
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
