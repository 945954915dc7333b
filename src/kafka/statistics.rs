//! Reads librdkafka's statistics, which come every few seconds without a request: how far each partition was fetched,
//! how many records wait in memory, and how long brokers take to answer.
//!
//! Only a few fields are parsed, because the text grows with the number of partitions.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Deserialize;

use super::assigned::TopicPartition;

/// The newest statistics.
#[derive(Debug, Default)]
pub(super) struct Statistics {
    /// A std mutex: nothing awaits while holding it.
    newest: Mutex<Newest>,
}

/// The content of the last statistics.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Newest {
    /// The next offset to fetch for each partition. It is after the last record, and after markers and aborted records,
    /// which a consumer does not get.
    next_offsets: HashMap<TopicPartition, i64>,
    /// Records that were fetched and are not consumed yet.
    pub(super) queued_records: u64,
    pub(super) queued_bytes: u64,
    /// For each broker that has answered since the last statistics: its id, and the 99th percentile of its round trips
    /// in seconds.
    pub(super) round_trips: Vec<(i32, f64)>,
}

/// The fields of librdkafka's JSON that are used. The other types mirror its objects.
#[derive(Deserialize)]
struct Text {
    #[serde(default)]
    brokers: HashMap<String, BrokerText>,
    #[serde(default)]
    topics: HashMap<String, TopicText>,
}

#[derive(Deserialize)]
struct BrokerText {
    nodeid: i32,
    rtt: Option<WindowText>,
}

/// A rolling window of latencies, in microseconds.
#[derive(Deserialize)]
struct WindowText {
    p99: f64,
    cnt: u64,
}

#[derive(Deserialize)]
struct TopicText {
    partitions: HashMap<String, PartitionText>,
}

/// `fetchq_cnt` and `fetchq_size` are the length of the consumer's queue in records and bytes.
#[derive(Deserialize)]
struct PartitionText {
    partition: i32,
    fetchq_cnt: u64,
    fetchq_size: u64,
    next_offset: i64,
}

impl Statistics {
    /// Replaces the statistics. Returns false, and keeps the old ones, if the text could not be parsed.
    pub(super) fn note(&self, json: &[u8]) -> bool {
        let Ok(text) = serde_json::from_slice::<Text>(json) else { return false };
        *self.newest() = Newest::of(text);
        true
    }

    /// The offset up to which nothing is left to store. Everything before `stored` is stored, and `expected` is the
    /// offset after the last record that was read. If no record waits in memory or for the database, fetched offsets
    /// after that are transaction markers, not records.
    pub(super) fn read_out(&self, place: &TopicPartition, stored: i64, expected: i64) -> i64 {
        let newest = self.newest();
        match newest.next_offsets.get(place) {
            Some(next_offset) if newest.queued_records == 0 && expected <= stored => stored.max(*next_offset),
            Some(_) | None => stored,
        }
    }

    /// Called when the partition is read from another position: its statistics describe the old one.
    pub(super) fn forget(&self, place: &TopicPartition) {
        self.newest().next_offsets.remove(place);
    }

    pub(super) fn newest(&self) -> MutexGuard<'_, Newest> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Newest {
    fn of(text: Text) -> Self {
        let mut newest = Self::default();
        for BrokerText { nodeid, rtt } in text.brokers.into_values().filter(|broker| broker.nodeid >= 0) {
            newest.round_trips.extend(rtt.filter(|rtt| rtt.cnt > 0).map(|rtt| (nodeid, rtt.p99 / 1_000_000.0)));
        }
        for (topic, text) in text.topics {
            for one in text.partitions.into_values().filter(|one| one.partition >= 0) {
                // All partitions of a consumer share one queue, and each reports its length.
                newest.queued_records = newest.queued_records.max(one.fetchq_cnt);
                newest.queued_bytes = newest.queued_bytes.max(one.fetchq_size);
                if one.next_offset >= 0 {
                    newest.next_offsets.insert((topic.as_str().into(), one.partition), one.next_offset);
                }
            }
        }
        newest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(queued: u64, next_offset: i64) -> String {
        format!(
            r#"{{"name":"x","brokers":{{"b:1/1":{{"nodeid":1,"rtt":{{"avg":700,"p99":1500,"cnt":3}}}},
                 "b:1/bootstrap":{{"nodeid":-1,"rtt":{{"p99":9,"cnt":1}}}},"b:2/2":{{"nodeid":2,"rtt":{{"p99":0,"cnt":0}}}}}},
               "topics":{{"orders":{{"topic":"orders","partitions":{{
                 "0":{{"partition":0,"fetchq_cnt":{queued},"fetchq_size":70,"next_offset":{next_offset},"app_offset":7}},
                 "-1":{{"partition":-1,"fetchq_cnt":0,"fetchq_size":0,"next_offset":-1001,"app_offset":-1001}}}}}}}}}}"#
        )
    }

    fn place() -> TopicPartition {
        ("orders".into(), 0)
    }

    fn read_out(text: &str, stored: i64, expected: i64) -> i64 {
        let statistics = Statistics::default();
        assert!(statistics.note(text.as_bytes()));
        statistics.read_out(&place(), stored, expected)
    }

    #[test]
    fn markers_behind_the_last_record_are_no_lag() {
        assert_eq!(read_out(&text(0, 8), 7, 7), 8);
    }

    #[test]
    fn what_is_not_stored_yet_or_waits_in_memory_is_lag() {
        assert_eq!(read_out(&text(0, 8), 5, 7), 5);
        assert_eq!(read_out(&text(1, 8), 7, 7), 7);
        assert_eq!(read_out(&text(0, -1001), 5, 5), 5);
        // Statistics that are older than the stored offset.
        assert_eq!(read_out(&text(0, 8), 20, 20), 20);
    }

    #[test]
    fn a_partition_that_is_read_from_another_place_waits_for_new_statistics() {
        let statistics = Statistics::default();
        assert!(statistics.note(text(0, 8).as_bytes()));
        statistics.forget(&place());
        assert_eq!(statistics.read_out(&place(), 3, 3), 3);
    }

    #[test]
    fn queues_and_round_trips_are_those_of_real_brokers_and_partitions() {
        let statistics = Statistics::default();
        assert!(statistics.note(text(3, 8).as_bytes()));
        let newest = statistics.newest();
        assert_eq!((newest.queued_records, newest.queued_bytes), (3, 70));
        assert_eq!(newest.round_trips, [(1, 0.0015)]);
    }

    #[test]
    fn a_text_that_cannot_be_read_changes_nothing() {
        let statistics = Statistics::default();
        assert!(statistics.note(text(3, 8).as_bytes()));
        assert!(!statistics.note(b"{\"topics\":3}") && !statistics.note(b"\xff"));
        assert_eq!(statistics.newest().queued_records, 3);
    }
}
