//! Compares the ledger and what is stored with what Kafka has. Reads only; for people, and for what watches over a service.

use std::fmt;
use std::time::Duration;

use rdkafka::Offset;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};

use super::rebalance::partitions;
use super::{Kafka, settings};
use crate::store::ledger::{Gap, LedgerReport, LedgerState};
use crate::store::{Backend, Store};
use crate::types::{Error, Kind, Result};

/// How long Kafka may take for each answer.
const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// What an audit saw. See [`Kafka::audit`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Audit {
    /// Every partition that the ledger or Kafka knows, sorted.
    pub partitions: Vec<PartitionAudit>,
    /// Records that were deleted before they were read, as far as it was noticed.
    pub gaps: Vec<Gap>,
}

/// One partition, as the ledger, the store, the group and Kafka see it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartitionAudit {
    /// The topic.
    pub topic: String,
    /// The partition of it.
    pub partition: i32,
    /// The next offset to accept, by the ledger.
    pub next_offset: Option<i64>,
    /// The group's committed offset.
    pub committed: Option<i64>,
    /// The first offset Kafka still has, and the one that comes next; `None` when Kafka did not say.
    pub watermarks: Option<(i64, i64)>,
    /// Messages and quarantined records that are stored now. Fewer than were read: duplicates, unwanted and purged ones are not among them.
    pub stored: i64,
    /// The highest offset among them.
    pub highest_stored: Option<i64>,
    /// Why the partition is stopped, if it is.
    pub stopped: Option<String>,
}

/// Something that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// The partition is stopped until a person resets or skips it.
    Stopped(PartitionAudit),
    /// The group's offset is beyond the ledger. The ledger decides, so nothing is skipped; but somebody else commits for this group.
    CommittedAhead(PartitionAudit),
    /// Kafka has deleted records that were not read.
    Deleted(PartitionAudit),
    /// The log ends before the ledger: the topic was made anew, or lost its end. The partition stands still.
    LogEndsBefore(PartitionAudit),
    /// Kafka has records of a partition that the ledger does not know.
    NeverRead(PartitionAudit),
    /// Kafka did not say what it has.
    Unanswered(PartitionAudit),
    /// Records were deleted before they were read, and that was noted.
    Gap(Gap),
}

impl Kafka {
    /// Compares the ledger and the stored rows of this group with Kafka's watermarks. Reads every message once: not for every minute.
    ///
    /// # Errors
    /// When the settings are refused, the database does not answer, or Kafka says nothing at all.
    pub async fn audit<B: Backend>(&self, store: &Store<B>) -> Result<Audit> {
        let consumer: BaseConsumer = settings::config(self)?.create().map_err(settings::refused)?;
        let report = store.backend.ledger_report(&self.group).await?;
        // Blocking calls, and closing the consumer: on a thread for such.
        let looked = store.backend.reactor().spawn_blocking(move || look(&consumer, report));
        match looked.await {
            Ok(Ok(audit)) => Ok(audit),
            Ok(Err(error)) => {
                Err(Error::new(Kind::Connection, format!("cannot ask Kafka about group {}", self.group))
                    .with_source(error))
            }
            Err(_) => Err(Error::stopped("the store was closed while Kafka was asked")),
        }
    }
}

impl Audit {
    /// Everything that is not as it should be; nothing, when all is well.
    pub fn findings(&self) -> Vec<Finding> {
        let partitions = self.partitions.iter().filter_map(PartitionAudit::finding);
        partitions.chain(self.gaps.iter().cloned().map(Finding::Gap)).collect()
    }
}

impl PartitionAudit {
    /// Records that Kafka has and that are not accepted yet.
    pub fn lag(&self) -> Option<i64> {
        let (low, high) = self.watermarks?;
        Some((high - self.next_offset.unwrap_or(low).max(low)).max(0))
    }

    fn finding(&self) -> Option<Finding> {
        let this = || self.clone();
        if self.stopped.is_some() {
            return Some(Finding::Stopped(this()));
        }
        match (self.next_offset, self.watermarks) {
            (_, None) => Some(Finding::Unanswered(this())),
            (Some(next), Some((_, high))) if next > high => Some(Finding::LogEndsBefore(this())),
            (Some(next), Some((low, _))) if next < low => Some(Finding::Deleted(this())),
            (Some(next), Some(_)) if self.committed.is_some_and(|committed| committed > next) => {
                Some(Finding::CommittedAhead(this()))
            }
            (None, Some((low, high))) if low < high => Some(Finding::NeverRead(this())),
            (Some(_) | None, Some(_)) => None,
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (about, text) = match self {
            Self::CommittedAhead(p) => {
                (p, "the group's offset is beyond the ledger: somebody else commits for this group")
            }
            Self::Stopped(p) => (p, p.stopped.as_deref().unwrap_or_default()),
            Self::Deleted(p) => (p, "Kafka has deleted records that were not read"),
            Self::LogEndsBefore(p) => (p, "the log ends before the ledger: the topic was made anew or lost its end"),
            Self::NeverRead(p) => (p, "Kafka has records of a partition that was never read"),
            Self::Unanswered(p) => (p, "Kafka did not say what it has"),
            Self::Gap(gap) => {
                let Gap { topic, partition, from_offset, to_offset, .. } = gap;
                return write!(
                    f,
                    "{topic}[{partition}]: offsets {from_offset} to {to_offset} were deleted before they were read"
                );
            }
        };
        write!(f, "{}[{}]: {text}", about.topic, about.partition)?;
        let number = |offset: Option<i64>| offset.map_or("none".to_owned(), |offset| offset.to_string());
        let (low, high) = (about.watermarks.map(|(low, _)| low), about.watermarks.map(|(_, high)| high));
        let (next, committed) = (number(about.next_offset), number(about.committed));
        write!(f, " (ledger {next}, group {committed}, Kafka {} to {})", number(low), number(high))
    }
}

fn look(consumer: &BaseConsumer, report: LedgerReport) -> KafkaResult<Audit> {
    // The group may read other clusters into the same database.
    let cluster_id = consumer.client().fetch_cluster_id(ANSWER_WAIT);
    let is_here = |state: &LedgerState| {
        state.cluster_id.is_empty() || cluster_id.as_ref().is_none_or(|id| *id == state.cluster_id)
    };
    let mut audited: Vec<PartitionAudit> =
        report.partitions.into_iter().filter(is_here).map(PartitionAudit::from).collect();
    let mut topics: Vec<String> = audited.iter().map(|partition| partition.topic.clone()).collect();
    topics.dedup();
    if topics.is_empty() && consumer.client().fetch_cluster_id(ANSWER_WAIT).is_none() {
        // Nothing to compare; but nobody there is not the same as all well.
        return Err(KafkaError::MetadataFetch(RDKafkaErrorCode::AllBrokersDown));
    }
    for topic in topics {
        let metadata = consumer.fetch_metadata(Some(&topic), ANSWER_WAIT)?;
        let partitions = metadata.topics().iter().flat_map(|topic| topic.partitions()).map(|partition| partition.id());
        for partition in partitions {
            if !audited.iter().any(|known| known.topic == topic && known.partition == partition) {
                audited.push(PartitionAudit::unknown(&topic, partition));
            }
        }
    }
    audited.sort_unstable_by(|a, b| (&a.topic, a.partition).cmp(&(&b.topic, b.partition)));
    for partition in &mut audited {
        partition.watermarks = consumer.fetch_watermarks(&partition.topic, partition.partition, ANSWER_WAIT).ok();
    }
    let places: Vec<_> = audited.iter().map(|audit| (audit.topic.as_str().into(), audit.partition)).collect();
    if let Some(list) = partitions(&places) {
        let committed = consumer.committed_offsets(list, ANSWER_WAIT)?;
        for (partition, element) in audited.iter_mut().zip(committed.elements()) {
            partition.committed = match element.offset() {
                Offset::Offset(offset) => Some(offset),
                _ => None,
            };
        }
    }
    Ok(Audit { partitions: audited, gaps: report.gaps })
}

impl PartitionAudit {
    fn unknown(topic: &str, partition: i32) -> Self {
        Self {
            topic: topic.to_owned(),
            partition,
            next_offset: None,
            committed: None,
            watermarks: None,
            stored: 0,
            highest_stored: None,
            stopped: None,
        }
    }
}

impl From<LedgerState> for PartitionAudit {
    fn from(state: LedgerState) -> Self {
        let LedgerState { topic, partition, next_offset, stored, highest_stored, cluster_id: _, stopped } = state;
        let known = Self::unknown(&topic, partition);
        Self { next_offset: Some(next_offset), stored, highest_stored, stopped, ..known }
    }
}
