//! The events of reading from Kafka.

use std::fmt::Display;
use std::time::Duration;

use tracing::{debug, error, info, warn};

use super::super::{counts, table};
use super::{ERROR_CHARS_MAX, Shown, as_millis};
use crate::types::{SourceName, sanitize};

fn count(source: &SourceName, event: &'static str) {
    counts::add(&table::KAFKA_EVENTS, &[&source.name, event], 1);
}

/// Creates the counters of a source with 0.
pub(crate) fn begin_counting(source: &SourceName) {
    table::KAFKA_EVENTS.values.iter().for_each(|event| counts::add(&table::KAFKA_EVENTS, &[&source.name, event], 0));
}

/// The next record of a partition was read.
pub(crate) fn consumed(topic: &str) {
    counts::add_often(&table::CONSUMED, topic, "");
}

/// Sets the gauge that shows whether records are read; [`intake`] is the event.
pub(crate) fn note_intake(source: &SourceName, is_open: bool) {
    counts::set(&table::KAFKA_INTAKE_OPEN, &[&source.name], f64::from(u8::from(is_open)));
}

pub(crate) fn partitions_assigned(source: &SourceName, partitions: usize) {
    count(source, "partitions assigned");
    info!(target: "wharf::kafka", source = &*source.name, group = &*source.group, partitions, "partitions assigned");
}

pub(crate) fn partitions_revoked(source: &SourceName, partitions: usize) {
    count(source, "partitions revoked");
    info!(target: "wharf::kafka", source = &*source.name, group = &*source.group, partitions, "partitions revoked");
}

/// Topics that match patterns were created or deleted, and the subscription has changed.
pub(crate) fn topics_changed(source: &SourceName, added: &[String], removed: &[String]) {
    count(source, "topics changed");
    let shown = |topics: &[String]| sanitize::text(&topics.join(","), ERROR_CHARS_MAX);
    info!(
        target: "wharf::kafka", source = &*source.name, group = &*source.group, added = %Shown(&shown(added)), removed = %Shown(&shown(removed)),
        "topics changed"
    );
}

/// The partition is read from this offset on.
pub(crate) fn partition_begun(source: &SourceName, topic: &str, partition: i32, offset: i64) {
    count(source, "partition begun");
    info!(target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, partition, offset, "partition begun");
}

/// New partitions begin, and the ledger has their positions. `begin` is the setting that decided where.
pub(crate) fn topic_begins(source: &SourceName, topic: &str, begin: &impl Display, partitions: usize) {
    count(source, "topic begins");
    info!(target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, begin = %begin, partitions, "topic begins");
}

/// Kafka deleted offsets that were never read. Transaction markers and aborted records are included, because they
/// cannot be distinguished afterwards.
pub(crate) fn gap(source: &SourceName, topic: &str, partition: i32, from_offset: i64, to_offset: i64) {
    count(source, "gap");
    error!(target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, partition, from_offset, to_offset, "gap");
}

/// The log of the partition is not the one that was read before. An operator has to decide how to continue.
pub(crate) fn partition_stopped(source: &SourceName, topic: &str, partition: i32, ledger: i64, why: &str) {
    count(source, "partition stopped");
    let why = sanitize::text(why, ERROR_CHARS_MAX);
    error!(
        target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, partition, ledger, why = %Shown(&why),
        "partition stopped until `wharf ledger reset` or `wharf ledger skip`"
    );
}

/// The database lost records that were stored: they are read from Kafka again.
pub(crate) fn ledger_behind(source: &SourceName, topic: &str, partition: i32) {
    count(source, "ledger behind");
    error!(
        target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, partition,
        "ledger behind: the database has lost stored records; they are read again from Kafka"
    );
}

/// The ledger is ahead of what this process wrote, was set back by a person, is stopped, or is that of another topic of
/// the same name: the position is determined again.
pub(crate) fn ledger_moved(source: &SourceName, topic: &str, partition: i32) {
    count(source, "ledger moved");
    info!(target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, partition, "ledger moved: a person or another process has changed the position");
}

/// A consumer that is not an inbox has committed offsets for the group. The inbox reads those records again.
pub(crate) fn group_ahead(source: &SourceName, topic: &str, partition: i32, ledger: i64, committed: i64) {
    count(source, "group ahead");
    warn!(
        target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, partition, ledger, committed,
        "group offset is ahead of the ledger: another consumer has committed it; its records are read again, \
         unless `wharf ledger skip` leaves them out before the start"
    );
}

/// An inbox has committed offsets for this group, but the database has no ledger for it.
pub(crate) fn ledger_lost(source: &SourceName, topic: &str, partition: i32) {
    count(source, "ledger lost");
    warn!(
        target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, partition,
        "ledger lost: an inbox has committed offsets for this group and this database has no position; everything Kafka has is read again"
    );
}

/// A record came that is not the next one of its partition: the position is determined again.
pub(crate) fn out_of_place(source: &SourceName, topic: &str, partition: i32, offset: i64) {
    count(source, "record out of place");
    warn!(target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, partition, offset, "record out of place");
}

/// librdkafka cannot read the next records: they are corrupt or use an unknown compression.
pub(crate) fn partition_blocked(source: &SourceName, topic: &str, partition: i32, offset: i64, reason: &str) {
    count(source, "partition blocked");
    let reason = sanitize::text(reason, ERROR_CHARS_MAX);
    error!(target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, partition, offset, reason = %Shown(&reason), "partition blocked");
}

/// The decoder that the partition's next record needs is unavailable. Counted once for each wait. `why` is given, and
/// the event logged, for the first partition of a topic.
pub(crate) fn waits_for_decoder(source: &SourceName, topic: &str, partition: i32, why: Option<&str>) {
    count(source, "partition waits for its decoder");
    if let Some(why) = why {
        warn!(
            target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, partition, why = %Shown(why),
            "partition waits: its identity cannot be decoded yet"
        );
    }
}

/// No partition of the topic waits for an unavailable decoder any more.
pub(crate) fn decoder_back(source: &SourceName, topic: &str, after: Duration) {
    info!(target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, after_secs = after.as_secs(), "decoder is back");
}

/// The queue of the partition has been full for a second: it is not read until half of it is written.
pub(crate) fn partition_paused(source: &SourceName, topic: &str, partition: i32) {
    count(source, "partition paused");
    info!(target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, partition, "partition paused: its records wait to be written");
}

pub(crate) fn partition_resumed(source: &SourceName, topic: &str, partition: i32) {
    count(source, "partition resumed");
    info!(target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, partition, "partition resumed");
}

/// Reading from the source has stopped or continues, for all of its partitions.
pub(crate) fn intake(source: &SourceName, is_open: bool) {
    count(source, if is_open { "intake open" } else { "intake closed" });
    if is_open {
        info!(target: "wharf::kafka", source = &*source.name, group = &*source.group, "intake open");
    } else {
        warn!(target: "wharf::kafka", source = &*source.name, group = &*source.group, "intake closed: waiting for the database or the handlers");
    }
}

/// The ingest has ended for good: `Running::failure` has the error.
pub(crate) fn ingest_failed(source: &SourceName, error: &crate::types::Error) {
    count(source, "ingest failed");
    error!(target: "wharf::kafka", source = &*source.name, group = &*source.group, error = %error, "ingest failed");
}

/// A call to Kafka failed. It is retried.
pub(crate) fn failure(source: &SourceName, operation: &'static str, error: &impl Display) {
    counts::add(&table::ERRORS, &["kafka", operation], 1);
    let error = sanitize::text(&format!("{error:#}"), ERROR_CHARS_MAX);
    warn!(target: "wharf::kafka", source = &*source.name, group = &*source.group, operation, error = %Shown(&error), "kafka error");
}

/// Like [`failure`], at debug level: for failures during an outage or a refusal, which is reported already.
pub(crate) fn quiet_failure(source: &SourceName, operation: &'static str, error: &impl Display) {
    counts::add(&table::ERRORS, &["kafka", operation], 1);
    let error = sanitize::text(&error.to_string(), ERROR_CHARS_MAX);
    debug!(target: "wharf::kafka", source = &*source.name, group = &*source.group, operation, error = %Shown(&error), "kafka error");
}

/// Brokers cannot be reached. Emitted once a minute, with the failures since the last time.
pub(crate) fn brokers_away(source: &SourceName, lasts: Duration, suppressed: u64, error: &impl Display) {
    counts::add(&table::ERRORS, &["kafka", "consume"], 1);
    let error = sanitize::text(&error.to_string(), ERROR_CHARS_MAX);
    let for_secs = lasts.as_secs();
    warn!(target: "wharf::kafka", source = &*source.name, group = &*source.group, operation = "consume", for_secs, suppressed, error = %Shown(&error), "kafka error");
}

/// Kafka refuses the credentials, the group, the cluster or a topic, or there is no token. Emitted once, until access
/// is granted again.
pub(crate) fn access_refused(source: &SourceName, resource: &str, why: &str) {
    count(source, "access refused");
    let why = sanitize::text(why, ERROR_CHARS_MAX);
    error!(target: "wharf::kafka", source = &*source.name, group = &*source.group, resource, why = %Shown(&why), "access refused");
}

pub(crate) fn access_granted(source: &SourceName, resource: &str) {
    count(source, "access granted");
    info!(target: "wharf::kafka", source = &*source.name, group = &*source.group, resource, "access granted");
}

/// Sets the gauges of the records that librdkafka has fetched and that are not consumed yet.
pub(crate) fn fetch_queue(source: &SourceName, records: u64, bytes: u64) {
    counts::set(&table::KAFKA_FETCH_QUEUE_RECORDS, &[&source.name], records as f64);
    counts::set(&table::KAFKA_FETCH_QUEUE_BYTES, &[&source.name], bytes as f64);
}

/// Sets the gauge of how long a broker takes to answer.
pub(crate) fn round_trip(source: &SourceName, broker: i32, secs: f64) {
    counts::set(&table::KAFKA_ROUND_TRIP, &[&source.name, &broker.to_string()], secs);
}

pub(crate) fn brokers_back(source: &SourceName, after: Duration) {
    info!(target: "wharf::kafka", source = &*source.name, group = &*source.group, after_secs = after.as_secs(), "brokers are back");
}

/// The inbox keeps identities for less time than Kafka keeps records: a record that is read again after its message was
/// purged counts as new. `kept` is `None` if the topic keeps records forever.
pub(crate) fn retention_shorter(source: &SourceName, topic: &str, kept: Option<Duration>, window: Duration) {
    let (kept_ms, window_ms) = (kept.map(as_millis), as_millis(window));
    warn!(
        target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, kept_ms, window_ms,
        "retention is shorter than the topic's: a record that is read again after its purge runs again; keep identities for longer"
    );
}

/// Kafka did not report how long it keeps the records of a topic. An empty `topic`: it did not answer at all.
pub(crate) fn retention_unknown(source: &SourceName, topic: &str, error: &impl Display) {
    let error = sanitize::text(&format!("{error:#}"), ERROR_CHARS_MAX);
    debug!(target: "wharf::kafka", source = &*source.name, group = &*source.group, topic, error = %Shown(&error), "retention unknown");
}

/// A line of librdkafka's log. `level` is a syslog level.
pub(crate) fn log(source: &SourceName, level: i32, line: &str) {
    let line = sanitize::text(line, ERROR_CHARS_MAX);
    match level {
        ..=4 => {
            warn!(target: "wharf::kafka", source = &*source.name, group = &*source.group, line = %Shown(&line), "librdkafka");
        }
        5..=6 => {
            info!(target: "wharf::kafka", source = &*source.name, group = &*source.group, line = %Shown(&line), "librdkafka");
        }
        _ => {
            debug!(target: "wharf::kafka", source = &*source.name, group = &*source.group, line = %Shown(&line), "librdkafka");
        }
    }
}
