//! Every decision of the engine as one `tracing` event, and those about records and deliveries as a count: the contract of what can be seen
//! from outside.
//!
//! Names, levels and fields stand here and nowhere else. Message ids are shown escaped; a payload is never a field.

use std::fmt;

use tracing::{debug, error, info, info_span, warn};

use super::counts::{self, Count};
use crate::types::{EXPIRED, Error, Outcome, PoisonReason, Purged, Record, StoredMessage, sanitize};

/// Characters of an error that go into an event.
const ERROR_CHARS_MAX: usize = 500;

/// Text from outside, safe for a log line.
struct Shown<'a>(&'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_debug())
    }
}

/// The delivery an event is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subject<'a> {
    pub(crate) message_id: Option<&'a str>,
    pub(crate) handler: &'a str,
    pub(crate) attempt: i32,
}

impl<'a> Subject<'a> {
    fn id(&self) -> Shown<'a> {
        Shown(self.message_id.unwrap_or("(missing)"))
    }
}

macro_rules! about {
    ($level:ident, $target:literal, $subject:expr, $($rest:tt)*) => {
        $level!(target: $target, message_id = %$subject.id(), handler = $subject.handler, attempt = $subject.attempt, $($rest)*)
    };
}

/// What a record became.
fn count_record(topic: &str, became: &'static str) {
    counts::add_often(Count { name: "wharf_records_total", of: "topic", what: Some(("became", became)) }, topic);
}

fn count_quarantined(topic: &str, reason: &'static str) {
    count_record(topic, "quarantined");
    counts::add(Count { name: "wharf_quarantined_total", of: "topic", what: Some(("reason", reason)) }, topic, 1);
}

/// What stood in for an identity that was missing.
fn count_stand_in(topic: &str, by: &'static str) {
    counts::add_often(
        Count { name: "wharf_missing_identities_total", of: "topic", what: Some(("stand_in", by)) },
        topic,
    );
}

fn count_claim(handler: &str, claim: &'static str) {
    counts::add_often(Count { name: "wharf_claims_total", of: "handler", what: Some(("claim", claim)) }, handler);
}

fn count_outcome(handler: &str, outcome: &'static str) {
    counts::add_often(Count { name: "wharf_outcomes_total", of: "handler", what: Some(("outcome", outcome)) }, handler);
}

fn count_poisoned(handler: &str, reason: PoisonReason, number: u64) {
    let what = Some(("reason", reason.as_str()));
    counts::add(Count { name: "wharf_poisoned_total", of: "handler", what }, handler, number);
}

// accept

pub(crate) fn accepted(message: &StoredMessage, deliveries: usize) {
    count_record(&message.topic, "accepted");
    debug!(target: "wharf::accept", message_id = %Shown(&message.id), topic = %Shown(&message.topic), deliveries, "accepted");
}

pub(crate) fn duplicate(message: &StoredMessage, added: usize) {
    count_record(&message.topic, "duplicate");
    debug!(target: "wharf::accept", message_id = %Shown(&message.id), topic = %Shown(&message.topic), added, "duplicate");
}

/// `id` is the row of the quarantine: `wharf quarantine show ID`.
pub(crate) fn conflict(message: &StoredMessage, id: Option<i64>) {
    count_quarantined(&message.topic, "conflict");
    let (partition, offset) = (message.position.map(|at| at.partition), message.position.map(|at| at.offset));
    warn!(target: "wharf::accept", id, message_id = %Shown(&message.id), topic = %Shown(&message.topic), partition, offset, "conflict");
}

/// The last records of a topic were all quarantined: nothing more is taken in from Kafka until a person acts.
#[cfg(feature = "kafka")]
pub(crate) fn intake_stopped(topic: &str, quarantined: usize) {
    error!(target: "wharf::accept", topic = %Shown(topic), quarantined, "intake stopped");
}

pub(crate) fn left_quarantine(id: i64) {
    info!(target: "wharf::accept", id, "left quarantine");
}

pub(crate) fn stays_in_quarantine(id: i64, reason: &str) {
    warn!(target: "wharf::accept", id, reason, "stays in quarantine");
}

/// Where it was is how it is found again in Kafka, and `id` in the quarantine: `wharf quarantine show ID`.
pub(crate) fn quarantined(record: &Record, reason: &'static str, id: Option<i64>) {
    count_quarantined(&record.topic, reason);
    let (partition, offset) = (record.position.map(|at| at.partition), record.position.map(|at| at.offset));
    warn!(target: "wharf::accept", id, topic = %Shown(&record.topic), partition, offset, reason, "quarantined");
}

/// It had no identity, and its topic says that where it was is one.
pub(crate) fn identified_by_position(message: &StoredMessage) {
    count_stand_in(&message.topic, "position");
    debug!(target: "wharf::accept", message_id = %Shown(&message.id), topic = %Shown(&message.topic), "identified by position");
}

/// It had no identity, and its topic says that it is accepted each time it comes.
pub(crate) fn undeduplicated(message: &StoredMessage) {
    count_stand_in(&message.topic, "undeduplicated");
    debug!(target: "wharf::accept", message_id = %Shown(&message.id), topic = %Shown(&message.topic), "undeduplicated");
}

/// Topics that nobody subscribes to are counted as one: there may be any number of them.
pub(crate) fn unwanted(topic: &str, is_subscribed: bool) {
    count_record(if is_subscribed { topic } else { "(other)" }, "unwanted");
    debug!(target: "wharf::accept", topic = %Shown(topic), "unwanted");
}

// kafka

#[cfg(feature = "kafka")]
pub(crate) mod kafka;

// outbox

#[cfg(feature = "kafka")]
pub(crate) mod outbox;

// process

pub(crate) fn claimed(subject: Subject<'_>) {
    count_claim(subject.handler, "claimed");
    about!(debug, "wharf::process", subject, "claimed");
}

pub(crate) fn handed_over(subject: Subject<'_>) {
    count_claim(subject.handler, "handed over");
    about!(debug, "wharf::process", subject, "handed over");
}

pub(crate) fn reclaimed(subject: Subject<'_>, crashes: i32) {
    count_claim(subject.handler, "reclaimed");
    about!(warn, "wharf::process", subject, crashes, "reclaimed");
}

pub(crate) fn decided(subject: Subject<'_>, outcome: &Outcome) {
    count_outcome(subject.handler, outcome.name());
    match outcome {
        Outcome::Done => about!(debug, "wharf::process", subject, "done"),
        Outcome::Retry { after, error, .. } => {
            let error = sanitize::text(error, ERROR_CHARS_MAX);
            about!(info, "wharf::process", subject, after_ms = as_millis(*after), error, "retried");
        }
        Outcome::Snoozed { after } => about!(debug, "wharf::process", subject, after_ms = as_millis(*after), "snoozed"),
        Outcome::Troubled { after, troubles, error } => {
            let error = sanitize::text(error, ERROR_CHARS_MAX);
            about!(
                warn,
                "wharf::process",
                subject,
                after_ms = as_millis(*after),
                troubles = *troubles,
                error,
                "troubled"
            );
        }
        Outcome::Unavailable { after, error, .. } => {
            let error = sanitize::text(error, ERROR_CHARS_MAX);
            about!(info, "wharf::process", subject, after_ms = as_millis(*after), error, "unavailable");
        }
        Outcome::Discarded { reason } => {
            let reason = sanitize::text(reason, ERROR_CHARS_MAX);
            about!(info, "wharf::process", subject, reason, "discarded");
        }
        Outcome::Expired => about!(info, "wharf::process", subject, "expired"),
        Outcome::Poisoned { reason, error, .. } => {
            let error = sanitize::text(error.as_deref().unwrap_or_default(), ERROR_CHARS_MAX);
            count_poisoned(subject.handler, *reason, 1);
            about!(warn, "wharf::process", subject, reason = reason.as_str(), error, "poisoned");
        }
        Outcome::Released => about!(debug, "wharf::process", subject, "released"),
    }
}

fn count_breaker(handler: &str, became: &'static str) {
    counts::add(Count { name: "wharf_breakers_total", of: "handler", what: Some(("became", became)) }, handler, 1);
}

/// What the handler depends on is away: nothing of it is started, in any process, but one delivery at a time that probes.
pub(crate) fn breaker_opened(handler: &str, error: &str) {
    count_breaker(handler, "open");
    let error = sanitize::text(error, ERROR_CHARS_MAX);
    warn!(target: "wharf::process", handler, error, "breaker opened");
}

pub(crate) fn breaker_closed(handler: &str) {
    count_breaker(handler, "closed");
    info!(target: "wharf::process", handler, "breaker closed");
}

pub(crate) fn claim_lost(subject: Subject<'_>) {
    count_claim(subject.handler, "lost");
    about!(warn, "wharf::process", subject, "claim lost");
}

/// Its handler has settled the delivery in a transaction of its own, and has failed or was stopped after that: what it committed stands.
pub(crate) fn settled_before(subject: Subject<'_>, outcome: &Outcome) {
    count_outcome(subject.handler, Outcome::Done.name());
    let (Outcome::Retry { error, .. } | Outcome::Troubled { error, .. } | Outcome::Poisoned { error: Some(error), .. }) =
        outcome
    else {
        about!(debug, "wharf::process", subject, "settled before it ended");
        return;
    };
    let error = sanitize::text(error, ERROR_CHARS_MAX);
    about!(warn, "wharf::process", subject, error, "settled before it failed");
}

pub(crate) fn overran(subject: Subject<'_>) {
    count_outcome(subject.handler, "overran");
    about!(warn, "wharf::process", subject, "handler overran its timeout and has not ended");
}

pub(crate) fn in_doubt(subject: Subject<'_>) {
    count_outcome(subject.handler, "in doubt");
    about!(warn, "wharf::process", subject, "commit in doubt");
}

/// A call of a batch handler with several messages has failed as a whole: it is followed by a call for each half.
pub(crate) fn batch_failed(handler: &str, messages: usize, why: &str) {
    let error = sanitize::text(why, ERROR_CHARS_MAX);
    info!(target: "wharf::process", handler, messages, error, "batch failed");
}

/// Deliveries that shared a transaction run again, each in one of its own.
pub(crate) fn shared_transaction_undone(handler: &str, why: &str) {
    let error = sanitize::text(why, ERROR_CHARS_MAX);
    warn!(target: "wharf::process", handler, error, "shared transaction undone");
}

pub(crate) fn unknown_key(handler: &str, poisoned: u64) {
    count_poisoned(handler, PoisonReason::UnknownKey, poisoned);
    let reason = PoisonReason::UnknownKey.as_str();
    warn!(target: "wharf::process", handler, poisoned, reason, "unknown key");
}

/// The function that a service has for poisoned deliveries has failed; it is called again.
pub(crate) fn poison_call_failed(handler: &str, calls: i32, error: &str) {
    counts::add(Count { name: "wharf_trouble_total", of: "part", what: Some(("doing", "poison call")) }, "service", 1);
    let error = sanitize::text(error, ERROR_CHARS_MAX);
    warn!(target: "wharf::process", handler, calls, error, "poison call failed");
}

/// Deliveries that were older than their handler wants were discarded, many at once.
pub(crate) fn expired(handler: &str, deliveries: u64) {
    let what = Some(("outcome", EXPIRED));
    counts::add(Count { name: "wharf_outcomes_total", of: "handler", what }, handler, deliveries);
    info!(target: "wharf::process", handler, deliveries, "expired");
}

/// The header that says when a delivery is due cannot be read. Its value came from outside and is not shown.
pub(crate) fn bad_delay(message: &StoredMessage, handler: &str, header: &str) {
    let (message_id, topic) = (Shown(&message.id), Shown(&message.topic));
    warn!(target: "wharf::accept", %message_id, %topic, handler, header, "delay cannot be read");
}

/// Deliveries that were poisoned as `unknown key` are pending again.
pub(crate) fn returned(handler: &str, deliveries: u64) {
    info!(target: "wharf::process", handler, deliveries, "unknown key is known again");
}

// operate

/// Rows that retention has removed, also where it ended in trouble then.
pub(crate) fn count_purged(purged: &Purged) {
    for (rows, number) in [("messages", purged.messages), ("deliveries", purged.deliveries)] {
        counts::add(Count { name: "wharf_purged_total", of: "rows", what: None }, rows, number);
    }
}

pub(crate) fn purged(purged: &Purged) {
    let Purged { deliveries, messages, identities_kept, identities_forgotten, .. } = *purged;
    if purged.is_locked_out() {
        debug!(target: "wharf::operate", deliveries, messages, identities_kept, identities_forgotten, "purged by another process");
    } else {
        info!(target: "wharf::operate", deliveries, messages, identities_kept, identities_forgotten, "purged");
    }
}

/// The span of one run of a handler.
pub(crate) fn run_span(message_id: &str, handler: &str, attempt: u32) -> tracing::Span {
    info_span!(target: "wharf::process", "run", message_id = %Shown(message_id), handler, attempt)
}

/// The span of one call of a batch handler with several messages.
pub(crate) fn call_span(handler: &str, messages: usize) -> tracing::Span {
    info_span!(target: "wharf::process", "run", handler, messages)
}

// our own trouble

/// A loop or task of the engine has ended that must not.
pub(crate) fn engine_failed(what: &'static str, why: &str) {
    counts::add(Count { name: "wharf_trouble_total", of: "part", what: Some(("doing", what)) }, "engine", 1);
    error!(target: "wharf::process", what, why = %Shown(why), "engine failed");
}

/// A batch was being accepted and its task panicked: its callers have an error, the records were stored or not.
pub(crate) fn accept_failed(why: &str) {
    counts::add(Count { name: "wharf_trouble_total", of: "part", what: Some(("doing", "accept")) }, "engine", 1);
    error!(target: "wharf::accept", why = %Shown(why), "accept failed");
}

pub(crate) fn store_trouble(doing: &'static str, error: &Error) {
    counts::add(Count { name: "wharf_trouble_total", of: "part", what: Some(("doing", doing)) }, "store", 1);
    warn!(target: "wharf::store", doing, error = %format_args!("{error:#}"), "store trouble");
}

pub(crate) fn store_recovered(doing: &'static str) {
    info!(target: "wharf::store", doing, "store recovered");
}

fn as_millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
