//! Every decision of the engine as a `tracing` event. Decisions about records and deliveries are counted too. Events
//! are a contract with users.
//!
//! Names, levels and fields are defined only here and in `events/`. Message ids are escaped; a payload is never a
//! field. A function without a comment emits the event of its name.

use std::fmt;
use std::time::Duration;

use tracing::{debug, error, info, warn};

use super::{counts, table};
use crate::types::{EXPIRED, Error, Outcome, PoisonReason, Purged, Record, StoredMessage, sanitize};

/// The most characters of an error in an event.
const ERROR_CHARS_MAX: usize = 500;

/// Text from outside, escaped for a log line, so that it cannot forge another line.
pub(super) struct Shown<'a>(pub(super) &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_debug())
    }
}

/// The delivery that an event is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subject<'a> {
    /// `None` when the message of the delivery is missing.
    pub(crate) message_id: Option<&'a str>,
    pub(crate) handler: &'a str,
    pub(crate) attempt: i32,
}

impl<'a> Subject<'a> {
    fn id(&self) -> Shown<'a> {
        Shown(self.message_id.unwrap_or("(missing)"))
    }
}

/// An event about a delivery: adds the fields of its [`Subject`].
macro_rules! about {
    ($level:ident, $target:literal, $subject:expr, $($rest:tt)*) => {
        $level!(target: $target, message_id = %$subject.id(), handler = $subject.handler, attempt = $subject.attempt, $($rest)*)
    };
}

/// Counts a record by its result.
fn count_record(topic: &str, result: &'static str) {
    counts::add_often(&table::RECORDS, topic, result);
}

fn count_quarantined(topic: &str, reason: &'static str) {
    count_record(topic, "quarantined");
    counts::add(&table::QUARANTINED, &[topic, reason], 1);
}

/// Counts a record by what replaced its missing identity.
fn count_stand_in(topic: &str, by: &'static str) {
    counts::add_often(&table::MISSING_IDENTITIES, topic, by);
}

fn count_claim(handler: &str, claim: &'static str) {
    counts::add_often(&table::CLAIMS, handler, claim);
}

fn count_outcome(handler: &str, outcome: &'static str) {
    counts::add_often(&table::OUTCOMES, handler, outcome);
}

fn count_poisoned(handler: &str, reason: PoisonReason, number: u64) {
    counts::add(&table::POISONED, &[handler, reason.as_str()], number);
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

/// A statement has accepted a batch. Batches from Kafka have a ledger; others come from the service.
pub(crate) fn batch_accepted(records: usize, is_without_ledger: bool, took: Duration) {
    let from = if is_without_ledger { "service" } else { "kafka" };
    counts::record(&table::ACCEPT_BATCH_RECORDS, &[from], records as f64);
    counts::record(&table::ACCEPT_BATCH_SECONDS, &[from], took.as_secs_f64());
}

/// A message with another payload has this identity. `id` is the row of the quarantine: `wharf quarantine show ID`.
pub(crate) fn conflict(message: &StoredMessage, id: Option<i64>) {
    count_quarantined(&message.topic, "conflict");
    let (partition, offset) = (message.position.map(|at| at.partition), message.position.map(|at| at.offset));
    warn!(target: "wharf::accept", id, message_id = %Shown(&message.id), topic = %Shown(&message.topic), partition, offset, "conflict");
}

/// The last records of a topic were all quarantined: intake from Kafka stops until an operator acts.
#[cfg(feature = "kafka")]
pub(crate) fn intake_stopped(topic: &str, cluster: &str, quarantined: usize) {
    error!(target: "wharf::accept", topic = %Shown(topic), cluster, quarantined, "intake stopped");
}

pub(crate) fn left_quarantine(id: i64) {
    info!(target: "wharf::accept", id, "left quarantine");
}

pub(crate) fn stays_in_quarantine(id: i64, reason: &str) {
    warn!(target: "wharf::accept", id, reason, "stays in quarantine");
}

/// A record was quarantined. Its position finds it in Kafka, and `id` in the quarantine: `wharf quarantine show ID`.
pub(crate) fn quarantined(record: &Record, reason: &'static str, id: Option<i64>) {
    count_quarantined(&record.topic, reason);
    let (partition, offset) = (record.position.map(|at| at.partition), record.position.map(|at| at.offset));
    warn!(target: "wharf::accept", id, topic = %Shown(&record.topic), partition, offset, reason, "quarantined");
}

/// A record without identity was accepted with its position as identity (`Identity::or_position`).
pub(crate) fn identified_by_position(message: &StoredMessage) {
    count_stand_in(&message.topic, "position");
    debug!(target: "wharf::accept", message_id = %Shown(&message.id), topic = %Shown(&message.topic), "identified by position");
}

/// A record without identity was accepted without deduplication (`Identity::or_undeduplicated`).
pub(crate) fn undeduplicated(message: &StoredMessage) {
    count_stand_in(&message.topic, "undeduplicated");
    debug!(target: "wharf::accept", message_id = %Shown(&message.id), topic = %Shown(&message.topic), "undeduplicated");
}

/// No handler wants the record. Topics without a subscriber are counted as one, because their number is unbounded.
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

/// A delivery is done, this long after the timestamp of its record.
pub(crate) fn done_after(handler: &str, lag: Duration) {
    counts::record_often(&table::END_TO_END, handler, "", lag);
}

/// The outcome of an attempt was decided. It is not written yet.
pub(crate) fn decided(subject: Subject<'_>, outcome: &Outcome) {
    count_outcome(subject.handler, outcome.name());
    match outcome {
        Outcome::Done => about!(debug, "wharf::process", subject, "done"),
        Outcome::Retry { after, error, .. } => {
            let error = sanitize::text(error, ERROR_CHARS_MAX);
            about!(info, "wharf::process", subject, after_ms = as_millis(*after), error, "retried");
        }
        Outcome::Snoozed { after } => about!(debug, "wharf::process", subject, after_ms = as_millis(*after), "snoozed"),
        Outcome::StoreFailed { after, store_errors, error } => {
            let error = sanitize::text(error, ERROR_CHARS_MAX);
            about!(
                warn,
                "wharf::process",
                subject,
                after_ms = as_millis(*after),
                store_errors = *store_errors,
                error,
                "store failed"
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

fn count_breaker(handler: &str, state: &'static str) {
    counts::add(&table::BREAKERS, &[handler, state], 1);
}

/// The handler's dependency is unavailable: no process starts its deliveries, except one probe at a time.
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

/// The handler settled the delivery in its own transaction, and failed or was stopped after that. The commit stays
/// valid.
pub(crate) fn settled_before(subject: Subject<'_>, outcome: &Outcome) {
    count_outcome(subject.handler, Outcome::Done.name());
    let (Outcome::Retry { error, .. }
    | Outcome::StoreFailed { error, .. }
    | Outcome::Poisoned { error: Some(error), .. }) = outcome
    else {
        about!(debug, "wharf::process", subject, "settled before it ended");
        return;
    };
    let error = sanitize::text(error, ERROR_CHARS_MAX);
    about!(warn, "wharf::process", subject, error, "settled before it failed");
}

/// A handler has not ended long after its timeout: it blocks its thread or ignores cancellation.
pub(crate) fn overran(subject: Subject<'_>) {
    count_outcome(subject.handler, "overran");
    about!(warn, "wharf::process", subject, "handler overran its timeout and has not ended");
}

/// The COMMIT of a transactional handler got no reply, so it is unknown whether it was committed.
pub(crate) fn in_doubt(subject: Subject<'_>) {
    count_outcome(subject.handler, "in doubt");
    about!(warn, "wharf::process", subject, "commit in doubt");
}

/// A call of a batch handler with several messages has failed as a whole: each half is called again.
pub(crate) fn batch_failed(handler: &str, messages: usize, why: &str) {
    let error = sanitize::text(why, ERROR_CHARS_MAX);
    info!(target: "wharf::process", handler, messages, error, "batch failed");
}

/// A shared transaction was rolled back: its deliveries run again, each in its own transaction.
pub(crate) fn shared_transaction_undone(handler: &str, why: &str) {
    let error = sanitize::text(why, ERROR_CHARS_MAX);
    warn!(target: "wharf::process", handler, error, "shared transaction undone");
}

/// Deliveries of a handler key that no process knows were poisoned.
pub(crate) fn unknown_key(handler: &str, poisoned: u64) {
    count_poisoned(handler, PoisonReason::UnknownKey, poisoned);
    let reason = PoisonReason::UnknownKey.as_str();
    warn!(target: "wharf::process", handler, poisoned, reason, "unknown key");
}

/// The service's `on_poison` function has failed; it is called again.
pub(crate) fn poison_call_failed(handler: &str, calls: i32, error: &str) {
    counts::add(&table::ERRORS, &["service", "poison call"], 1);
    let error = sanitize::text(error, ERROR_CHARS_MAX);
    warn!(target: "wharf::process", handler, calls, error, "poison call failed");
}

/// Deliveries that were older than their handler allows were expired, several at once.
pub(crate) fn expired(handler: &str, deliveries: u64) {
    counts::add(&table::OUTCOMES, &[handler, EXPIRED], deliveries);
    info!(target: "wharf::process", handler, deliveries, "expired");
}

/// The header with the due time of a delivery cannot be read. Its value comes from outside and is not logged.
pub(crate) fn bad_delay(message: &StoredMessage, handler: &str, header: &str) {
    let (message_id, topic) = (Shown(&message.id), Shown(&message.topic));
    warn!(target: "wharf::accept", %message_id, %topic, handler, header, "delay cannot be read");
}

/// Deliveries that were poisoned as `unknown key` are pending again.
pub(crate) fn returned(handler: &str, deliveries: u64) {
    info!(target: "wharf::process", handler, deliveries, "unknown key is known again");
}

// operate

/// Counts rows that retention has removed, also if the purge failed later.
pub(crate) fn count_purged(purged: &Purged) {
    for (rows, number) in [("messages", purged.messages), ("deliveries", purged.deliveries)] {
        counts::add(&table::PURGED, &[rows], number);
    }
}

/// A purge has ended. `is_locked_out`: another process purges now.
pub(crate) fn purged(purged: &Purged) {
    let Purged { deliveries, messages, identities_kept, identities_forgotten, .. } = *purged;
    if purged.is_locked_out() {
        debug!(target: "wharf::operate", deliveries, messages, identities_kept, identities_forgotten, "purged by another process");
    } else {
        info!(target: "wharf::operate", deliveries, messages, identities_kept, identities_forgotten, "purged");
    }
}

// failures of the engine

/// A loop or task of the engine has ended, which must not happen.
pub(crate) fn engine_failed(what: &'static str, why: &str) {
    counts::add(&table::ERRORS, &["engine", what], 1);
    error!(target: "wharf::process", what, why = %Shown(why), "engine failed");
}

/// The task that accepts a batch panicked: its callers get an error, and the records may or may not be stored.
pub(crate) fn accept_failed(why: &str) {
    counts::add(&table::ERRORS, &["engine", "accept"], 1);
    error!(target: "wharf::accept", why = %Shown(why), "accept failed");
}

/// Counts that a decoder was unavailable.
pub(crate) fn decoder_failed() {
    counts::add(&table::ERRORS, &["decoder", "decode"], 1);
}

/// The decoder for the identity of a topic's quarantined records is unavailable: their replay waits.
pub(crate) fn decoder_error(topic: &str, error: &Error) {
    decoder_failed();
    warn!(target: "wharf::accept", topic, error = %format_args!("{error:#}"), "decoder error");
}

/// A database call failed. It is retried.
pub(crate) fn store_error(operation: &'static str, error: &Error) {
    counts::add(&table::ERRORS, &["store", operation], 1);
    warn!(target: "wharf::store", operation, error = %format_args!("{error:#}"), "store error");
}

/// The subscriber has no layer of the bridge's version of `tracing-opentelemetry`: spans are lost or not connected.
#[cfg(feature = "otel")]
pub(super) fn no_otel_layer() {
    warn!(target: "wharf::process", "the subscriber has no OpenTelemetry layer that Wharf's bridge can use");
}

/// A database call succeeded after it had failed.
pub(crate) fn store_recovered(operation: &'static str) {
    info!(target: "wharf::store", operation, "store recovered");
}

fn as_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
