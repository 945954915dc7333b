//! The events of the outbox relay.

use std::fmt::Display;

use tracing::{debug, error, info, warn};

use super::super::{counts, table};
use super::{ERROR_CHARS_MAX, Shown};
use crate::types::{Error, sanitize};

fn count(topic: &str, result: &'static str, number: u64) {
    counts::add(&table::OUTBOX, &[topic, result], number);
}

/// The broker has acknowledged records, and they are marked as sent.
pub(crate) fn sent(topic: &str, records: u64) {
    count(topic, "sent", records);
    counts::add(&table::SENT, &[topic], records);
    debug!(target: "wharf::outbox", topic = %Shown(topic), records, "sent");
}

/// Kafka rejects the record permanently: `wharf outbox show ID`.
pub(crate) fn poisoned(id: i64, topic: &str, reason: &'static str, error: &str) {
    count(topic, "poisoned", 1);
    let error = sanitize::text(error, ERROR_CHARS_MAX);
    warn!(target: "wharf::outbox", id, topic = %Shown(topic), reason, error = %Shown(&error), "record poisoned");
}

/// This relay sends the records of `slots` more slots.
pub(crate) fn slots_taken(slots: usize, held: usize) {
    info!(target: "wharf::outbox", slots, held, "slots taken");
}

/// This relay has lost the lease of slots: another relay sends their records.
pub(crate) fn slots_lost(slots: usize) {
    warn!(target: "wharf::outbox", slots, "slots lost");
}

/// Records could not be sent. They are retried.
pub(crate) fn failure(operation: &'static str, error: &impl Display) {
    counts::add(&table::ERRORS, &["outbox", operation], 1);
    let error = sanitize::text(&error.to_string(), ERROR_CHARS_MAX);
    warn!(target: "wharf::outbox", operation, error = %Shown(&error), "outbox error");
}

/// Like [`failure`], at debug level: for failures less than a minute after a reported one.
pub(crate) fn quiet_failure(operation: &'static str, error: &impl Display) {
    counts::add(&table::ERRORS, &["outbox", operation], 1);
    let error = sanitize::text(&error.to_string(), ERROR_CHARS_MAX);
    debug!(target: "wharf::outbox", operation, error = %Shown(&error), "outbox error");
}

/// Kafka refuses the credentials, or there is no token. Emitted once, until access is granted again.
pub(crate) fn access_refused(why: &str) {
    counts::add(&table::ERRORS, &["outbox", "send"], 1);
    let why = sanitize::text(why, ERROR_CHARS_MAX);
    error!(target: "wharf::outbox", why = %Shown(&why), "access refused");
}

pub(crate) fn access_granted() {
    info!(target: "wharf::outbox", "access granted");
}

/// A line of librdkafka's log. `level` is a syslog level.
pub(crate) fn log(level: i32, line: &str) {
    let line = sanitize::text(line, ERROR_CHARS_MAX);
    match level {
        ..=4 => warn!(target: "wharf::outbox", line = %Shown(&line), "librdkafka"),
        5..=6 => info!(target: "wharf::outbox", line = %Shown(&line), "librdkafka"),
        _ => debug!(target: "wharf::outbox", line = %Shown(&line), "librdkafka"),
    }
}

/// The relay has ended, which must not happen.
pub(crate) fn relay_failed(error: &Error) {
    counts::add(&table::ERRORS, &["outbox", "relay"], 1);
    error!(target: "wharf::outbox", error = %format_args!("{error:#}"), "relay failed");
}
