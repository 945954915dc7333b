//! Compares the ledger and the stored rows with Kafka. Read-only; for operators and monitoring.

mod query;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rdkafka::consumer::BaseConsumer;

use super::{Kafka, settings};
use crate::store::ledger::{BEGINNING, Gap, LedgerRow, LedgerState, Reader};
use crate::store::{Backend, Store};
use crate::types::{Error, Kind, Result};

/// A transaction that is open for longer is hanging: brokers should have aborted it (`transaction.max.timeout.ms`, 15
/// minutes by default).
const HANGING_AFTER: Duration = Duration::from_secs(15 * 60);

/// The result of an audit. See [`Kafka::audit`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Audit {
    /// Every partition of the topics that are in the ledger, also those that only Kafka has; sorted.
    pub partitions: Vec<PartitionAudit>,
    /// Known gaps: records that were deleted before they were read.
    pub gaps: Vec<Gap>,
    /// The group, if the ledger has no entry of it for this cluster.
    pub unknown_group: Option<String>,
}

/// One partition: its position in the ledger, the store, the group and Kafka.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartitionAudit {
    /// The topic.
    pub topic: String,
    /// The partition number.
    pub partition: i32,
    /// The next offset to accept, from the ledger.
    pub next_offset: Option<i64>,
    /// The group's committed offset.
    pub committed: Option<i64>,
    /// The first offset that Kafka has, and the next offset to be written, including open transactions; `None` when
    /// Kafka did not answer.
    pub watermarks: Option<(i64, i64)>,
    /// The first offset of the oldest open transaction: records from there on cannot be read. `None` when none is open.
    pub open_transaction: Option<i64>,
    /// The timestamp of the first record of that transaction.
    pub open_since: Option<SystemTime>,
    /// Whether Kafka has another topic of this name than the one that was read.
    pub is_recreated: bool,
    /// Whether only markers and aborted records of transactions are left to read.
    pub is_read_out: bool,
    /// Whether only those are left to read before the open transaction.
    is_open_next: bool,
    /// Messages and quarantined records that are stored now. Duplicates, unwanted and purged records are not included.
    pub stored: i64,
    /// The highest offset among them.
    pub highest_stored: Option<i64>,
    /// The reason for which the partition is stopped, if any.
    pub stopped: Option<String>,
}

/// A problem that an audit found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// The partition is stopped until an operator resets or skips it.
    Stopped(PartitionAudit),
    /// The group's offset is beyond the ledger. The ledger decides, so nothing is skipped; but another consumer commits
    /// for this group.
    CommittedAhead(PartitionAudit),
    /// Kafka has deleted records that were not read.
    Deleted(PartitionAudit),
    /// The log ends before the ledger: the topic was deleted and created again, or lost its end. The partition is not
    /// read.
    LogEndsBefore(PartitionAudit),
    /// Kafka has records of a partition that is not in the ledger.
    NeverRead(PartitionAudit),
    /// Kafka did not answer for this partition.
    Unanswered(PartitionAudit),
    /// The topic was deleted and created again: its id is not the one that was read. The partition is not read.
    TopicRecreated(PartitionAudit),
    /// A transaction is open for longer than brokers allow, and records wait behind it.
    HangingTransaction(PartitionAudit),
    /// The ledger has no entry of the group for this cluster.
    UnknownGroup(String),
    /// Records were deleted before they were read, and the gap was recorded.
    Gap(Gap),
}

impl Kafka {
    /// Compares the ledger and the stored rows of this group with Kafka's watermarks. It reads every stored message, so
    /// do not run it every minute.
    ///
    /// ```no_run
    /// # async fn run(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::kafka::Kafka;
    ///
    /// let audit = Kafka::new("broker-1:9092", "shop").audit(&store).await?;
    /// for finding in audit.findings() {
    ///     println!("{finding}");
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the settings are refused, or the database or Kafka does not answer.
    pub async fn audit<B: Backend>(&self, store: &Store<B>) -> Result<Audit> {
        let config = settings::to_ask(&settings::config(self)?);
        // Created here, where librdkafka's error is mapped so that it does not show the value of a setting.
        let consumer: BaseConsumer = config.create().map_err(settings::refused)?;
        let cannot = || format!("cannot ask Kafka about group {}", self.group);
        let token = match &self.tokens {
            Some(tokens) => Some(
                tokens.ask().await.map_err(|error| Error::new(Kind::Connection, format!("{}: {error}", cannot())))?,
            ),
            None => None,
        };
        let report = store.backend.ledger_report(&self.group).await?;
        let mut partitions = Vec::with_capacity(report.partitions.len());
        for (cluster_id, states) in by_cluster(report.partitions) {
            let reader = Reader { group: self.group.as_str().into(), cluster_id };
            let places: Vec<(Arc<str>, i32)> =
                states.iter().map(|state| (state.topic.as_str().into(), state.partition)).collect();
            let ledger = store.backend.ledger(&reader, &places).await?;
            partitions.extend(states.into_iter().zip(ledger).map(known));
        }
        // Blocking calls, and closing the consumer, need a blocking thread.
        let answers =
            store.backend.reactor().spawn_blocking(move || query::query(consumer, &config, token.as_ref(), partitions));
        match answers.await {
            Ok(Ok(KafkaAnswers { cluster_id, partitions })) => {
                // The group may read other clusters into the same database.
                let is_here = |gap: &Gap| cluster_id.as_ref().is_none_or(|id| gap.cluster_id == *id);
                let gaps = report.gaps.into_iter().filter(is_here).collect();
                let unknown_group = partitions.is_empty().then(|| self.group.clone());
                Ok(Audit { partitions, gaps, unknown_group })
            }
            Ok(Err(error)) => Err(Error::new(Kind::Connection, cannot()).with_source(error)),
            Err(_) => Err(Error::stopped("the store was closed while Kafka was asked")),
        }
    }
}

/// Kafka's side of the audit.
struct KafkaAnswers {
    /// The cluster that was asked. `None` when Kafka did not answer.
    cluster_id: Option<String>,
    partitions: Vec<PartitionAudit>,
}

/// A partition from the ledger, with what identifies its log.
struct KnownPartition {
    audit: PartitionAudit,
    topic_id: Option<String>,
    cluster_id: String,
}

fn known((state, row): (LedgerState, Option<LedgerRow>)) -> KnownPartition {
    let cluster_id = state.cluster_id.clone();
    KnownPartition { audit: PartitionAudit::from(state), topic_id: row.and_then(|row| row.topic_id), cluster_id }
}

/// Groups the partitions by cluster: one group may read several clusters into the same database.
fn by_cluster(states: Vec<LedgerState>) -> BTreeMap<Arc<str>, Vec<LedgerState>> {
    let mut clusters: BTreeMap<Arc<str>, Vec<LedgerState>> = BTreeMap::new();
    for state in states {
        clusters.entry(state.cluster_id.as_str().into()).or_default().push(state);
    }
    clusters
}

impl Audit {
    /// All problems; empty when there are none.
    pub fn findings(&self) -> Vec<Finding> {
        let now = SystemTime::now();
        let unknown = self.unknown_group.iter().cloned().map(Finding::UnknownGroup);
        let partitions = self.partitions.iter().filter_map(|partition| partition.finding(now));
        unknown.chain(partitions).chain(self.gaps.iter().cloned().map(Finding::Gap)).collect()
    }
}

impl PartitionAudit {
    /// Offsets that Kafka has and that are not accepted yet, including open transactions. 0 when only markers and
    /// aborted records of transactions are left.
    pub fn lag(&self) -> Option<i64> {
        let (low, high) = self.watermarks?;
        let lag = (high - self.next_offset.unwrap_or(low).max(low)).max(0);
        Some(if self.is_read_out { 0 } else { lag })
    }

    /// Where reading continues: after a reset to the beginning, at the first record that Kafka has.
    fn position(&self) -> Option<i64> {
        match (self.next_offset, self.watermarks) {
            (Some(BEGINNING), Some((low, _))) => Some(low),
            (next, _) => next,
        }
    }

    /// Whether everything before an open transaction is read, and the transaction has been open for too long.
    fn is_held_up(&self, now: SystemTime) -> bool {
        let is_at = |open| self.is_open_next || self.position().is_some_and(|next| next >= open);
        let is_reached = self.open_transaction.is_some_and(is_at);
        let age = self.open_since.and_then(|since| now.duration_since(since).ok());
        is_reached && age.is_some_and(|age| age > HANGING_AFTER)
    }

    /// The most important problem of the partition. One at most: the first one usually causes the others.
    fn finding(&self, now: SystemTime) -> Option<Finding> {
        let this = || self.clone();
        if self.stopped.is_some() {
            return Some(Finding::Stopped(this()));
        }
        // A person has reset the position, so the group's offset is of the time before.
        let is_reset = self.next_offset == Some(BEGINNING);
        match (self.position(), self.watermarks) {
            (_, None) => Some(Finding::Unanswered(this())),
            (Some(_), Some(_)) if self.is_recreated => Some(Finding::TopicRecreated(this())),
            (Some(next), Some((low, _))) if next < low => Some(Finding::Deleted(this())),
            (Some(_), Some(_)) if self.is_held_up(now) => Some(Finding::HangingTransaction(this())),
            (Some(next), Some((_, high))) if next > high => Some(Finding::LogEndsBefore(this())),
            (Some(next), Some(_)) if !is_reset && self.committed.is_some_and(|committed| committed > next) => {
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
                (p, "the group's offset is beyond the ledger: another consumer commits for this group")
            }
            Self::Stopped(p) => (p, p.stopped.as_deref().unwrap_or_default()),
            Self::Deleted(p) => (p, "Kafka has deleted records that were not read"),
            Self::LogEndsBefore(p) => {
                (p, "the log ends before the ledger: the topic was created again or lost its end")
            }
            Self::NeverRead(p) => (p, "Kafka has records of a partition that was never read"),
            Self::Unanswered(p) => (p, "Kafka did not answer for this partition"),
            Self::TopicRecreated(p) => {
                (p, "the topic was deleted and created again: its id is not the one that was read")
            }
            Self::HangingTransaction(p) => {
                (p, "records wait behind a transaction that is open for too long: abort it (kafka-transactions.sh)")
            }
            Self::UnknownGroup(group) => {
                return write!(f, "the ledger has no entry for group {group}: check the name");
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
    /// A partition about which nothing is known yet.
    fn unknown(topic: &str, partition: i32) -> Self {
        Self {
            topic: topic.to_owned(),
            partition,
            next_offset: None,
            committed: None,
            watermarks: None,
            open_transaction: None,
            open_since: None,
            is_recreated: false,
            is_read_out: false,
            is_open_next: false,
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
        // Offsets 3 and 4 are markers of transactions.
        let behind_markers = PartitionAudit { is_open_next: true, ..open(16, 3) };
        assert!(matches!(behind_markers.finding(now), Some(Finding::HangingTransaction(_))));
        assert_eq!(behind_markers.lag(), Some(6));
    }

    #[test]
    fn a_position_that_a_person_has_reset_to_the_beginning_is_no_finding() {
        let reset = PartitionAudit {
            next_offset: Some(BEGINNING),
            committed: Some(7),
            watermarks: Some((3, 9)),
            ..PartitionAudit::unknown("t", 0)
        };
        assert_eq!((reset.finding(SystemTime::now()), reset.lag()), (None, Some(6)));
    }
}
