//! What the relay of the outbox does.

use std::fmt::Display;

use tracing::{debug, error, info, warn};

use super::super::counts::{self, Count};
use super::{ERROR_CHARS_MAX, Shown};
use crate::types::{Error, sanitize};

fn count(topic: &str, became: &'static str, number: u64) {
    counts::add(Count { name: "wharf_outbox_total", of: "topic", what: Some(("became", became)) }, topic, number);
}

/// The broker has acknowledged records, and they are marked.
pub(crate) fn sent(topic: &str, records: u64) {
    count(topic, "sent", records);
    debug!(target: "wharf::outbox", topic = %Shown(topic), records, "sent");
}

/// Kafka refuses the record for good: `wharf outbox show ID`.
pub(crate) fn poisoned(id: i64, topic: &str, reason: &'static str, error: &str) {
    count(topic, "poisoned", 1);
    let error = sanitize::text(error, ERROR_CHARS_MAX);
    warn!(target: "wharf::outbox", id, topic = %Shown(topic), reason, error = %Shown(&error), "record poisoned");
}

/// This relay sends the records of so many more slots.
pub(crate) fn slots_taken(slots: usize, held: usize) {
    info!(target: "wharf::outbox", slots, held, "slots taken");
}

/// This relay could not keep slots: another one sends their records.
pub(crate) fn slots_lost(slots: usize) {
    warn!(target: "wharf::outbox", slots, "slots lost");
}

/// Records could not be sent. They wait, and are sent again.
pub(crate) fn trouble(doing: &'static str, error: &impl Display) {
    counts::add(Count { name: "wharf_trouble_total", of: "part", what: Some(("doing", doing)) }, "outbox", 1);
    let error = sanitize::text(&error.to_string(), ERROR_CHARS_MAX);
    warn!(target: "wharf::outbox", doing, error = %Shown(&error), "outbox trouble");
}

/// As [`trouble`], when that was told less than a minute ago.
pub(crate) fn quiet_trouble(doing: &'static str, error: &impl Display) {
    counts::add(Count { name: "wharf_trouble_total", of: "part", what: Some(("doing", doing)) }, "outbox", 1);
    let error = sanitize::text(&error.to_string(), ERROR_CHARS_MAX);
    debug!(target: "wharf::outbox", doing, error = %Shown(&error), "outbox trouble");
}

/// A line of librdkafka's own log, by syslog's levels.
pub(crate) fn log(level: i32, line: &str) {
    let line = sanitize::text(line, ERROR_CHARS_MAX);
    match level {
        ..=4 => warn!(target: "wharf::outbox", line = %Shown(&line), "librdkafka"),
        5..=6 => info!(target: "wharf::outbox", line = %Shown(&line), "librdkafka"),
        _ => debug!(target: "wharf::outbox", line = %Shown(&line), "librdkafka"),
    }
}

/// The relay has ended, and must not.
pub(crate) fn relay_failed(error: &Error) {
    counts::add(Count { name: "wharf_trouble_total", of: "part", what: Some(("doing", "relay")) }, "outbox", 1);
    error!(target: "wharf::outbox", error = %format_args!("{error:#}"), "relay failed");
}
