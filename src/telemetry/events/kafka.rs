//! What happens between Kafka and the desk.

use std::fmt::Display;
use std::time::Duration;

use tracing::{debug, error, info, warn};

use super::super::counts::{self, Count};
use super::{ERROR_CHARS_MAX, Shown, as_millis};
use crate::types::sanitize;

fn count(group: &str, event: &'static str) {
    counts::add(Count { name: "wharf_kafka_events_total", of: "group", what: Some(("event", event)) }, group, 1);
}

pub(crate) fn partitions_assigned(group: &str, partitions: usize) {
    count(group, "partitions assigned");
    info!(target: "wharf::kafka", group, partitions, "partitions assigned");
}

pub(crate) fn partitions_revoked(group: &str, partitions: usize) {
    count(group, "partitions revoked");
    info!(target: "wharf::kafka", group, partitions, "partitions revoked");
}

/// The partition is read from here on.
pub(crate) fn partition_begun(group: &str, topic: &str, partition: i32, offset: i64) {
    count(group, "partition begun");
    info!(target: "wharf::kafka", group, topic, partition, offset, "partition begun");
}

/// Offsets that were never read are no longer there. Markers and aborted records of transactions count: nobody can tell afterwards.
pub(crate) fn gap(group: &str, topic: &str, partition: i32, from_offset: i64, to_offset: i64) {
    count(group, "gap");
    error!(target: "wharf::kafka", group, topic, partition, from_offset, to_offset, "gap");
}

/// The log is not the one that was read. A person has to say what is right.
pub(crate) fn partition_stopped(group: &str, topic: &str, partition: i32, ledger: i64, why: &str) {
    count(group, "partition stopped");
    let why = sanitize::text(why, ERROR_CHARS_MAX);
    error!(
        target: "wharf::kafka", group, topic, partition, ledger, why = %Shown(&why),
        "partition stopped until `wharf ledger reset` or `wharf ledger skip`"
    );
}

/// The database no longer has what it had: it is refilled from Kafka.
pub(crate) fn ledger_behind(group: &str, topic: &str, partition: i32) {
    count(group, "ledger behind");
    error!(
        target: "wharf::kafka", group, topic, partition,
        "ledger behind: the database lost what was stored, reading it again"
    );
}

/// The ledger is ahead of what this process wrote, stopped, or about another topic: the position is found anew.
pub(crate) fn ledger_moved(group: &str, topic: &str, partition: i32) {
    count(group, "ledger moved");
    info!(target: "wharf::kafka", group, topic, partition, "ledger moved: a person or another process has changed the position");
}

/// A consumer that is not an inbox has read on for the group. The inbox reads the same records again.
pub(crate) fn group_ahead(group: &str, topic: &str, partition: i32, ledger: i64, committed: i64) {
    count(group, "group ahead");
    warn!(
        target: "wharf::kafka", group, topic, partition, ledger, committed,
        "group ahead of the ledger by another: another consumer has committed this offset; its records are read again, \
         unless `wharf ledger skip` leaves them out before the start"
    );
}

/// An inbox has read this group before and the database does not know it.
pub(crate) fn ledger_lost(group: &str, topic: &str, partition: i32) {
    count(group, "ledger lost");
    warn!(
        target: "wharf::kafka", group, topic, partition,
        "ledger lost: an inbox has committed offsets for this group and this database has no position; everything Kafka has is read again"
    );
}

/// A record came that was not the next one: the position is found anew.
pub(crate) fn out_of_place(group: &str, topic: &str, partition: i32, offset: i64) {
    count(group, "record out of place");
    warn!(target: "wharf::kafka", group, topic, partition, offset, "record out of place");
}

/// Records that librdkafka cannot read, because they are damaged or compressed in a way it does not know.
pub(crate) fn stands_still(group: &str, topic: &str, partition: i32, offset: i64, reason: &str) {
    count(group, "partition stands still");
    let reason = sanitize::text(reason, ERROR_CHARS_MAX);
    error!(target: "wharf::kafka", group, topic, partition, offset, reason = %Shown(&reason), "partition stands still");
}

/// More records of the partition wait than may, and have for a while.
pub(crate) fn partition_paused(group: &str, topic: &str, partition: i32) {
    count(group, "partition paused");
    info!(target: "wharf::kafka", group, topic, partition, "partition paused: its records wait to be written");
}

pub(crate) fn partition_resumed(group: &str, topic: &str, partition: i32) {
    count(group, "partition resumed");
    info!(target: "wharf::kafka", group, topic, partition, "partition resumed");
}

pub(crate) fn intake(group: &str, is_open: bool) {
    count(group, if is_open { "intake open" } else { "intake closed" });
    if is_open {
        info!(target: "wharf::kafka", group, "intake open");
    } else {
        warn!(target: "wharf::kafka", group, "intake closed: waiting for the database or the handlers");
    }
}

/// The ingest has ended and will not go on by itself: `Running::failure` has the error.
pub(crate) fn ingest_failed(group: &str, error: &crate::types::Error) {
    count(group, "ingest failed");
    error!(target: "wharf::kafka", group, error = %error, "ingest failed");
}

pub(crate) fn trouble(group: &str, doing: &'static str, error: &impl Display) {
    counts::add(Count { name: "wharf_trouble_total", of: "part", what: Some(("doing", doing)) }, "kafka", 1);
    let error = sanitize::text(&format!("{error:#}"), ERROR_CHARS_MAX);
    warn!(target: "wharf::kafka", group, doing, error = %Shown(&error), "kafka trouble");
}

/// As [`trouble`], while brokers are away and that was told.
pub(crate) fn quiet_trouble(group: &str, doing: &'static str, error: &impl Display) {
    counts::add(Count { name: "wharf_trouble_total", of: "part", what: Some(("doing", doing)) }, "kafka", 1);
    let error = sanitize::text(&error.to_string(), ERROR_CHARS_MAX);
    debug!(target: "wharf::kafka", group, doing, error = %Shown(&error), "kafka trouble");
}

/// Brokers cannot be reached. Emitted once a minute, with the failures since the last time.
pub(crate) fn brokers_away(group: &str, lasts: Duration, held_back: u64, error: &impl Display) {
    counts::add(Count { name: "wharf_trouble_total", of: "part", what: Some(("doing", "consume")) }, "kafka", 1);
    let error = sanitize::text(&error.to_string(), ERROR_CHARS_MAX);
    let for_secs = lasts.as_secs();
    warn!(target: "wharf::kafka", group, doing = "consume", for_secs, held_back, error = %Shown(&error), "kafka trouble");
}

pub(crate) fn brokers_back(group: &str, after: Duration) {
    info!(target: "wharf::kafka", group, after_secs = after.as_secs(), "brokers are back");
}

/// A record that is read again after its message was purged would be new. Without `kept_ms`, the topic keeps records for ever.
pub(crate) fn retention_shorter(group: &str, topic: &str, kept: Option<Duration>, window: Duration) {
    let (kept_ms, window_ms) = (kept.map(as_millis), as_millis(window));
    warn!(
        target: "wharf::kafka", group, topic, kept_ms, window_ms,
        "retention shorter than the topic's: what is read again after it was purged runs again; keep identities for longer"
    );
}

pub(crate) fn retention_unknown(group: &str, topic: &str, error: &impl Display) {
    let error = sanitize::text(&format!("{error:#}"), ERROR_CHARS_MAX);
    debug!(target: "wharf::kafka", group, topic, error = %Shown(&error), "retention unknown");
}

/// A line of librdkafka's own log, by syslog's levels.
pub(crate) fn log(group: &str, level: i32, line: &str) {
    let line = sanitize::text(line, ERROR_CHARS_MAX);
    match level {
        ..=4 => warn!(target: "wharf::kafka", group, line = %Shown(&line), "librdkafka"),
        5..=6 => info!(target: "wharf::kafka", group, line = %Shown(&line), "librdkafka"),
        _ => debug!(target: "wharf::kafka", group, line = %Shown(&line), "librdkafka"),
    }
}
