//! Compares the ledger and what is stored with what Kafka has. Reads only; for people, and for what watches over a service.

mod look;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rdkafka::consumer::BaseConsumer;

use super::{Kafka, settings};
use crate::store::ledger::{Gap, LedgerRow, LedgerState, Reader};
use crate::store::{Backend, Store};
use crate::types::{Error, Kind, Result};

/// Brokers abort transactions that are open for longer (`transaction.max.timeout.ms`, 15 minutes by default).
const HANGING_AFTER: Duration = Duration::from_secs(15 * 60);

/// What an audit saw. See [`Kafka::audit`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Audit {
    /// Every partition that the ledger or Kafka knows, sorted.
    pub partitions: Vec<PartitionAudit>,
    /// Records that were deleted before they were read, as far as it was noticed.
    pub gaps: Vec<Gap>,
    /// The group, if the ledger has no entry of it.
    pub unknown_group: Option<String>,
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
    /// The first offset Kafka still has, and the one that comes next, also behind open transactions; `None` when Kafka did not say.
    pub watermarks: Option<(i64, i64)>,
    /// The first offset of the oldest open transaction: nothing can be read from there on. `None` when none is open.
    pub open_transaction: Option<i64>,
    /// The time of the first record of that transaction.
    pub open_since: Option<SystemTime>,
    /// Kafka has another topic under this name than the one that was read.
    pub is_made_anew: bool,
    /// Nothing but markers and aborted records of transactions is left to read.
    pub is_read_out: bool,
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
    /// The topic was deleted and made anew: its id is not the one that was read. The partition stands still.
    TopicMadeAnew(PartitionAudit),
    /// A transaction is open for longer than brokers allow, and records wait behind it.
    HangingTransaction(PartitionAudit),
    /// The ledger has no entry of the group.
    UnknownGroup(String),
    /// Records were deleted before they were read, and that was noted.
    Gap(Gap),
}

impl Kafka {
    /// Compares the ledger and the stored rows of this group with Kafka's watermarks. Reads every message once: not for every minute.
    ///
    /// # Errors
    /// When the settings are refused, the database does not answer, or Kafka says nothing at all.
    pub async fn audit<B: Backend>(&self, store: &Store<B>) -> Result<Audit> {
        let config = settings::config(self)?;
        // Here, where what librdkafka says of a setting is kept from showing its value.
        let consumer: BaseConsumer = config.create().map_err(settings::refused)?;
        let report = store.backend.ledger_report(&self.group).await?;
        let unknown_group = report.partitions.is_empty().then(|| self.group.clone());
        let mut partitions = Vec::with_capacity(report.partitions.len());
        for (cluster_id, states) in by_cluster(report.partitions) {
            let reader = Reader { group: self.group.as_str().into(), cluster_id };
            let places: Vec<(Arc<str>, i32)> =
                states.iter().map(|state| (state.topic.as_str().into(), state.partition)).collect();
            let ledger = store.backend.ledger(&reader, &places).await?;
            partitions.extend(states.into_iter().zip(ledger).map(known));
        }
        // Blocking calls, and closing the consumer: on a thread for such.
        let looked = store.backend.reactor().spawn_blocking(move || look::look(consumer, &config, partitions));
        match looked.await {
            Ok(Ok(partitions)) => Ok(Audit { partitions, gaps: report.gaps, unknown_group }),
            Ok(Err(error)) => {
                Err(Error::new(Kind::Connection, format!("cannot ask Kafka about group {}", self.group))
                    .with_source(error))
            }
            Err(_) => Err(Error::stopped("the store was closed while Kafka was asked")),
        }
    }
}

/// A partition, as the ledger knows it.
struct KnownPartition {
    audit: PartitionAudit,
    topic_id: Option<String>,
    cluster_id: String,
}

fn known((state, row): (LedgerState, Option<LedgerRow>)) -> KnownPartition {
    let cluster_id = state.cluster_id.clone();
    KnownPartition { audit: PartitionAudit::from(state), topic_id: row.and_then(|row| row.topic_id), cluster_id }
}

/// One group may read several clusters into the same database.
fn by_cluster(states: Vec<LedgerState>) -> BTreeMap<Arc<str>, Vec<LedgerState>> {
    let mut clusters: BTreeMap<Arc<str>, Vec<LedgerState>> = BTreeMap::new();
    for state in states {
        clusters.entry(state.cluster_id.as_str().into()).or_default().push(state);
    }
    clusters
}

impl Audit {
    /// Everything that is not as it should be; nothing, when all is well.
    pub fn findings(&self) -> Vec<Finding> {
        let now = SystemTime::now();
        let unknown = self.unknown_group.iter().cloned().map(Finding::UnknownGroup);
        let partitions = self.partitions.iter().filter_map(|partition| partition.finding(now));
        unknown.chain(partitions).chain(self.gaps.iter().cloned().map(Finding::Gap)).collect()
    }
}

impl PartitionAudit {
    /// Offsets that Kafka has and that are not accepted yet, also behind open transactions. 0 when only markers and aborted records of
    /// transactions are left.
    pub fn lag(&self) -> Option<i64> {
        let (low, high) = self.watermarks?;
        let lag = (high - self.next_offset.unwrap_or(low).max(low)).max(0);
        Some(if self.is_read_out { 0 } else { lag })
    }

    /// Everything before an open transaction is read, and the transaction is too old to be a healthy one.
    fn is_held_up(&self, now: SystemTime) -> bool {
        let is_reached = self.open_transaction.is_some_and(|open| self.next_offset.is_some_and(|next| next >= open));
        let age = self.open_since.and_then(|since| now.duration_since(since).ok());
        is_reached && age.is_some_and(|age| age > HANGING_AFTER)
    }

    fn finding(&self, now: SystemTime) -> Option<Finding> {
        let this = || self.clone();
        if self.stopped.is_some() {
            return Some(Finding::Stopped(this()));
        }
        match (self.next_offset, self.watermarks) {
            (_, None) => Some(Finding::Unanswered(this())),
            (Some(_), Some(_)) if self.is_made_anew => Some(Finding::TopicMadeAnew(this())),
            (Some(_), Some(_)) if self.is_held_up(now) => Some(Finding::HangingTransaction(this())),
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
            Self::TopicMadeAnew(p) => (p, "the topic was deleted and made anew: its id is not the one that was read"),
            Self::HangingTransaction(p) => {
                (p, "records wait behind a transaction that is open for too long: abort it (kafka-transactions.sh)")
            }
            Self::UnknownGroup(group) => {
                return write!(f, "the ledger has no entry of group {group}: is the name right?");
            }
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

impl PartitionAudit {
    fn unknown(topic: &str, partition: i32) -> Self {
        Self {
            topic: topic.to_owned(),
            partition,
            next_offset: None,
            committed: None,
            watermarks: None,
            open_transaction: None,
            open_since: None,
            is_made_anew: false,
            is_read_out: false,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_is_hanging_when_it_is_too_old_and_everything_before_it_is_read() {
        let now = SystemTime::now();
        let open = |minutes: u64, next_offset| PartitionAudit {
            next_offset: Some(next_offset),
            watermarks: Some((0, 9)),
            open_transaction: Some(5),
            open_since: Some(now - Duration::from_secs(minutes * 60)),
            ..PartitionAudit::unknown("t", 0)
        };
        assert!(matches!(open(16, 5).finding(now), Some(Finding::HangingTransaction(_))));
        assert_eq!(open(14, 5).finding(now), None);
        assert_eq!(open(16, 3).finding(now), None);
        assert_eq!((open(1, 5).lag(), open(1, 3).lag()), (Some(4), Some(6)));
    }
}
