//! Positions in Kafka as people see them, and which of them an act is about.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::stamp;
use super::{Error, Result};

/// Which partitions of the ledger are meant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LedgerFilter {
    /// The consumer group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub consumer_group: Option<String>,
    /// The topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
    /// The partition. Without it, all partitions of the topic.
    #[serde(rename = "kafka_partition", skip_serializing_if = "Option::is_none")]
    pub partition: Option<i32>,
    /// Kafka's own id of the cluster. Needed only where one database holds positions of several clusters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
}

impl LedgerFilter {
    /// All partitions of a topic that a consumer group reads.
    pub fn topic(consumer_group: impl Into<String>, topic: impl Into<String>) -> Self {
        let (consumer_group, topic) = (Some(consumer_group.into()), Some(topic.into()));
        Self { consumer_group, topic, ..Self::default() }
    }

    /// Only this partition.
    pub fn partition(mut self, partition: i32) -> Self {
        self.partition = Some(partition);
        self
    }

    /// Only on this cluster.
    pub fn cluster(mut self, cluster_id: impl Into<String>) -> Self {
        self.cluster_id = Some(cluster_id.into());
        self
    }

    /// An act is about one topic of one group, and about one partition where it names an offset.
    pub(crate) fn check_act(&self, to_offset: Option<i64>) -> Result<()> {
        if self.consumer_group.is_none() || self.topic.is_none() {
            return Err(Error::configuration("name the consumer group and the topic whose position is to change"));
        }
        if to_offset.is_some() && self.partition.is_none() {
            return Err(Error::configuration("an offset is of one partition: name the partition"));
        }
        if to_offset.is_some_and(|to_offset| to_offset < 0) {
            return Err(Error::configuration("an offset is not negative"));
        }
        Ok(())
    }

    pub(crate) fn to_json(&self, to_offset: Option<i64>) -> String {
        let mut json = serde_json::to_value(self).unwrap_or_default();
        if let (Some(to_offset), Some(fields)) = (to_offset, json.as_object_mut()) {
            fields.insert("to_offset".to_owned(), to_offset.into());
        }
        json.to_string()
    }
}

/// The position of one partition.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LedgerStatus {
    /// The consumer group.
    pub consumer_group: String,
    /// Kafka's own id of the cluster.
    pub cluster_id: String,
    /// The topic.
    pub topic: String,
    /// The partition of it.
    #[serde(rename = "kafka_partition")]
    pub partition: i32,
    /// The next offset to accept; -2: the first that Kafka has.
    pub next_offset: i64,
    /// The leader epoch of the record before it, if it is known.
    pub leader_epoch: Option<i32>,
    /// Kafka's own id of the topic, if it is known.
    pub topic_id: Option<String>,
    /// When the position last moved.
    #[serde(with = "stamp")]
    pub updated_at: SystemTime,
    /// Since when the partition is stopped. It is not read until a person resets or skips it.
    #[serde(with = "stamp::option")]
    pub stopped_at: Option<SystemTime>,
    /// Why it is stopped.
    pub stopped_why: Option<String>,
    /// What the process that reads it said last: `reading`, `waiting`, `standing still` or `stopped`; none when no process has said anything.
    #[serde(default)]
    pub standing: Option<String>,
    /// Since when it has that standing.
    #[serde(default, with = "stamp::option")]
    pub standing_since: Option<SystemTime>,
    /// Offsets that Kafka had and that were not stored, at `seen_at`.
    #[serde(default)]
    pub lag: Option<i64>,
    /// When a process last spoke of it.
    #[serde(default, with = "stamp::option")]
    pub seen_at: Option<SystemTime>,
    /// That process: host and process id.
    #[serde(default)]
    pub ingest: Option<String>,
    /// Why it stands as it does.
    #[serde(default)]
    pub why: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_act_names_its_group_and_topic_and_an_offset_its_partition() {
        assert!(LedgerFilter::default().check_act(None).is_err());
        assert!(LedgerFilter::topic("shop", "orders").check_act(None).is_ok());
        assert!(LedgerFilter::topic("shop", "orders").check_act(Some(3)).is_err());
        assert!(LedgerFilter::topic("shop", "orders").partition(0).check_act(Some(-1)).is_err());
        assert!(LedgerFilter::topic("shop", "orders").partition(0).check_act(Some(3)).is_ok());
    }

    #[test]
    fn the_audit_holds_what_was_named() {
        let json = LedgerFilter::topic("shop", "orders").partition(2).to_json(Some(7));
        let expected = r#"{"consumer_group":"shop","kafka_partition":2,"to_offset":7,"topic":"orders"}"#;
        assert_eq!(json, expected);
    }
}
