//! Kafka positions as people see them, and a filter for them.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::stamp;
use super::{Error, Result};

/// Which partitions of the ledger to list or change.
///
/// ```
/// use wharf::operate::LedgerFilter;
///
/// let partition = LedgerFilter::topic("shop", "orders").partition(3);
/// ```
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
    /// Matches all partitions of a topic that a consumer group reads.
    pub fn topic(consumer_group: impl Into<String>, topic: impl Into<String>) -> Self {
        let (consumer_group, topic) = (Some(consumer_group.into()), Some(topic.into()));
        Self { consumer_group, topic, ..Self::default() }
    }

    /// Restricts the filter to this partition.
    ///
    /// ```
    /// let filter = wharf::operate::LedgerFilter::topic("shop", "orders").partition(3);
    /// assert_eq!(filter.partition, Some(3));
    /// ```
    pub fn partition(mut self, partition: i32) -> Self {
        self.partition = Some(partition);
        self
    }

    /// Restricts the filter to this cluster.
    ///
    /// ```
    /// let filter = wharf::operate::LedgerFilter::topic("shop", "orders").cluster("MkU3OEVBNTcwNTJENDM2Qk");
    /// ```
    pub fn cluster(mut self, cluster_id: impl Into<String>) -> Self {
        self.cluster_id = Some(cluster_id.into());
        self
    }

    /// Checks that an action names one topic of one group, and one partition if it names an offset.
    pub(crate) fn check_act(&self, to_offset: Option<i64>) -> Result<()> {
        if self.consumer_group.is_none() || self.topic.is_none() {
            return Err(Error::configuration("name the consumer group and the topic whose position to change"));
        }
        if to_offset.is_some() && self.partition.is_none() {
            return Err(Error::configuration("an offset belongs to one partition: name the partition"));
        }
        if to_offset.is_some_and(|to_offset| to_offset < 0) {
            return Err(Error::configuration("an offset cannot be negative"));
        }
        Ok(())
    }

    /// The JSON for the audit: the filter, and the offset that the action sets.
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
    /// The number of the partition.
    #[serde(rename = "kafka_partition")]
    pub partition: i32,
    /// The next offset to accept. -2 means the first offset that Kafka has.
    pub next_offset: i64,
    /// The leader epoch of the record before that offset, if it is known.
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
    /// The last reported state: `reading`, `waiting`, `blocked`, `refused` or `stopped`. None when no process has reported.
    #[serde(default)]
    pub state: Option<String>,
    /// Since when it has been in that state.
    #[serde(default, with = "stamp::option")]
    pub state_since: Option<SystemTime>,
    /// How many offsets of Kafka were not stored yet, at `seen_at`.
    #[serde(default)]
    pub lag: Option<i64>,
    /// When a process last reported it.
    #[serde(default, with = "stamp::option")]
    pub seen_at: Option<SystemTime>,
    /// Host and process id of that process.
    #[serde(default)]
    pub ingest: Option<String>,
    /// Why it is in that state.
    #[serde(default)]
    pub why: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_names_its_group_and_topic_and_an_offset_its_partition() {
        assert!(LedgerFilter::default().check_act(None).is_err());
        assert!(LedgerFilter::topic("shop", "orders").check_act(None).is_ok());
        assert!(LedgerFilter::topic("shop", "orders").check_act(Some(3)).is_err());
        assert!(LedgerFilter::topic("shop", "orders").partition(0).check_act(Some(-1)).is_err());
        assert!(LedgerFilter::topic("shop", "orders").partition(0).check_act(Some(3)).is_ok());
    }

    #[test]
    fn the_audit_has_the_fields_that_were_set() {
        let json = LedgerFilter::topic("shop", "orders").partition(2).to_json(Some(7));
        // Parsed: whether the members are sorted depends on the features with which serde_json is built.
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let expected =
            serde_json::json!({ "consumer_group": "shop", "topic": "orders", "kafka_partition": 2, "to_offset": 7 });
        assert_eq!(json, expected);
    }
}
