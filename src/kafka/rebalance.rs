//! librdkafka's callbacks: assigned and revoked partitions, and answers to commits; `rebalance/errors.rs` handles
//! errors.
//!
//! Rebalances and commit answers are handled on the ingest thread, inside its poll. Tasks on other threads change the
//! shared state too, for example when a batch has ended. Partitions are assigned paused and at their beginning, so that
//! nothing is read before their position is found. When they are revoked, batches that are being written get five
//! seconds to end, and stored offsets are committed.

mod errors;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{Offset, TopicPartitionList};
use tokio::sync::Notify;

use super::access::{Access, Refused};
use super::assigned::{AssignedPartitions, Batch, TopicPartition};
use super::begin::Begins;
use super::find::Located;
use super::outage::Outage;
use super::statistics::Statistics;
use crate::store::ledger::{LedgerMove, Reader};
use crate::telemetry::events;
use crate::types::{Limits, SourceName};
pub(super) use errors::{is_of_credentials, told_of_credentials, without_values};

/// How long batches of partitions that are being revoked may take to end. Far below the time for which a group waits
/// for a member (`max.poll.interval.ms`, five minutes).
const REVOKE_WAIT: Duration = Duration::from_secs(5);
/// The metadata of every offset that an inbox commits. If a group has an offset with this metadata, its ledger must
/// exist.
pub(super) const COMMITTED_BY_US: &str = "wharf";

/// A notice from a task to the ingest thread. It also ends a wait of the thread early.
pub(super) enum Notice {
    /// A batch has ended, and the state of its partitions is updated.
    Written,
    /// A record that waited for a decoder is decided, and the state of its partitions is updated.
    Decoded,
    Located(Vec<Located>),
    /// Whether the backlog is over its limits.
    Backlog {
        is_over: bool,
    },
}

/// The state that the ingest thread, its tasks and librdkafka's callbacks share.
pub(super) struct Context {
    pub(super) source: SourceName,
    /// Where topics begin that are not in the ledger.
    pub(super) begins: Begins,
    /// The group and the cluster, once the cluster id is known.
    reader: OnceLock<Arc<Reader>>,
    /// A std mutex: nothing awaits while holding it.
    assigned: Mutex<AssignedPartitions>,
    /// Notified whenever a batch has ended: another one may wait for it.
    has_ended: Notify,
    /// Notices of the tasks. Only the ingest thread receives them.
    notices: Mutex<Receiver<Notice>>,
    /// Positions that were received and not applied yet.
    found: Mutex<Vec<Located>>,
    /// Whether the backlog is over its limits, as last reported.
    is_backlogged: AtomicBool,
    /// The consumer is being closed; stored offsets are committed already.
    is_closing: AtomicBool,
    /// A broker could not be reached, and none has answered since. Then no commit is sent: a commit that is queued
    /// until the session has timed out would fence a static member for good.
    is_cut_off: AtomicBool,
    /// Why this process cannot read at all; cleared when a broker answers.
    problem: Mutex<Option<String>>,
    /// A topic that cannot be read for another reason than a refusal: it does not exist. Also set when no topic matches
    /// a pattern. Other topics may be read meanwhile, so `watch.rs` decides when it is over.
    topics_problem: Mutex<Option<String>>,
    /// Whether `problem` is set: checked for each record.
    has_problem: AtomicBool,
    /// Limits the log lines about brokers that are away.
    outage: Outage,
    /// A token, a group, a topic or the cluster that Kafka refuses to this process.
    pub(super) access: Access,
    pub(super) statistics: Statistics,
    /// Notified when Kafka refused a topic without naming it or does not know one, when the subscription has changed,
    /// and when partitions come while topics have a problem: `watch.rs` then asks about each topic.
    pub(super) check_topics: Notify,
}

impl Context {
    pub(super) fn new(
        source: SourceName,
        begins: Begins,
        notices: Receiver<Notice>,
        assigned: AssignedPartitions,
    ) -> Self {
        Self {
            assigned: Mutex::new(assigned),
            has_ended: Notify::new(),
            source,
            begins,
            reader: OnceLock::new(),
            notices: Mutex::new(notices),
            found: Mutex::default(),
            is_backlogged: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            is_cut_off: AtomicBool::new(false),
            problem: Mutex::default(),
            topics_problem: Mutex::default(),
            has_problem: AtomicBool::new(false),
            outage: Outage::default(),
            access: Access::default(),
            statistics: Statistics::default(),
            check_topics: Notify::new(),
        }
    }

    /// Locks the state of the partitions. The lock is not reentrant, and the tasks of all lanes need it: drop the guard
    /// before any call that takes time or may lock it again.
    pub(super) fn assigned(&self) -> MutexGuard<'_, AssignedPartitions> {
        self.assigned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The group and cluster, if the cluster is known.
    pub(super) fn reader(&self) -> Option<Arc<Reader>> {
        self.reader.get().map(Arc::clone)
    }

    /// Sets the cluster id. It is requested once, because a client never changes its cluster.
    pub(super) fn read_from(&self, cluster_id: String) -> Arc<Reader> {
        let reader = || Arc::new(Reader { group: Arc::clone(&self.source.group), cluster_id: cluster_id.into() });
        let reader = Arc::clone(self.reader.get_or_init(reader));
        self.assigned().read_for(&reader);
        reader
    }

    /// Positions that were found and not applied yet.
    pub(super) fn take_found(&self) -> Vec<Located> {
        std::mem::take(&mut self.found.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn is_backlogged(&self) -> bool {
        self.is_backlogged.load(Ordering::Relaxed)
    }

    /// Called after the last commit. From now on, revoked partitions are not committed, and Kafka is no longer asked.
    pub(super) fn set_closing(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_cut_off(&self) -> bool {
        self.is_cut_off.load(Ordering::Relaxed)
    }

    /// Called when a broker has answered, also for every record: ends an outage, and refusals of the credentials and
    /// the cluster.
    pub(super) fn broker_answered(&self) {
        self.is_cut_off.store(false, Ordering::Relaxed);
        if self.outage.is_on()
            && let Some(after) = self.outage.heard(Instant::now())
        {
            events::kafka::brokers_back(&self.source, after);
        }
        self.clear_problem();
        self.allowed(&Refused::Credentials);
        self.allowed(&Refused::Cluster);
    }

    pub(super) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Relaxed)
    }

    /// Called when a lane's batch is stored. Returns the lane's next batch, so that the lane does not wait for the
    /// ingest thread.
    pub(super) fn written(&self, lane: usize, id: u64, moves: &[LedgerMove], limits: &Limits) -> Option<Batch> {
        let mut assigned = self.assigned();
        assigned.written(id, moves, Instant::now());
        let next = assigned.next_batch(lane, limits);
        drop(assigned);
        self.has_ended.notify_waiters();
        next
    }

    /// Waits until no earlier batch of the same partitions is being written.
    pub(super) async fn turn(&self, id: u64) {
        loop {
            // Created before the check, so that a batch that ends in between is noticed.
            let has_ended = self.has_ended.notified();
            if self.assigned().is_first(id) {
                return;
            }
            has_ended.await;
        }
    }

    /// Waits at most `wait` for a notice, and handles it and those that have arrived by then. Returns whether there was
    /// one.
    pub(super) fn handle_notices(&self, wait: Duration) -> bool {
        let notices = self.notices.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = match notices.recv_timeout(wait) {
            Ok(first) => first,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return false,
        };
        loop {
            match next {
                Notice::Written | Notice::Decoded => {}
                Notice::Located(found) => self.found.lock().unwrap_or_else(PoisonError::into_inner).extend(found),
                Notice::Backlog { is_over } => self.is_backlogged.store(is_over, Ordering::Relaxed),
            }
            match notices.try_recv() {
                Ok(another) => next = another,
                Err(_) => return true,
            }
        }
    }

    /// Waits until no batch of these partitions is being written, or until the deadline.
    pub(super) fn wait_written(&self, places: &[TopicPartition], deadline: Instant) {
        while self.assigned().is_writing_any_of(places) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.handle_notices(left);
        }
    }

    /// Assigns the partitions in librdkafka, paused, and adds them to the state of the partitions.
    fn on_assigned(&self, consumer: &BaseConsumer<Self>, list: &mut TopicPartitionList) {
        let places = places(list);
        self.broker_answered();
        self.allowed(&Refused::Group);
        self.topics_came();
        events::kafka::partitions_assigned(&self.source, places.len());
        // Not at the group's offset, because the ledger decides. The partition is paused until its position is found.
        // If a record is read too early nevertheless, it is one from the beginning, so none before it is skipped.
        let begun = list.set_all_offsets(Offset::Beginning).and_then(|()| match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_assign(list),
            RebalanceProtocol::Eager | RebalanceProtocol::None => consumer.assign(list),
        });
        for done in [begun, consumer.pause(list)] {
            if let Err(error) = done {
                self.report_error("assign", &error);
            }
        }
        self.assigned().assign(&places, Instant::now());
    }

    /// Commits what is stored of the partitions and removes them. Blocks the poll for at most `REVOKE_WAIT` and a
    /// commit.
    fn revoked(&self, consumer: &BaseConsumer<Self>, list: &TopicPartitionList) {
        let places = places(list);
        events::kafka::partitions_revoked(&self.source, places.len());
        self.assigned().drop_waiting(&places);
        // Lost partitions belong to another member already: nothing is committed for them. When the consumer is closed,
        // `Work::end` has committed already.
        if !consumer.assignment_lost() && !self.is_closing() {
            self.wait_written(&places, Instant::now() + REVOKE_WAIT);
            let stored = self.assigned().to_commit();
            let going: HashSet<&TopicPartition> = places.iter().collect();
            let stored: Vec<_> = stored.into_iter().filter(|(place, _)| going.contains(place)).collect();
            if let Some(list) = offsets(&stored)
                && let Err(error) = consumer.commit(&list, CommitMode::Sync)
            {
                // No record is lost: the next owner begins at the position in the ledger.
                self.report_error("commit", &error);
            }
        }
        self.assigned().revoke(&places);
        let gone = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_unassign(list),
            RebalanceProtocol::Eager | RebalanceProtocol::None => consumer.unassign(),
        };
        if let Err(error) = gone {
            self.report_error("unassign", &error);
        }
    }
}

impl ConsumerContext for Context {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, what: RDKafkaRespErr, list: &mut TopicPartitionList) {
        match what {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => self.on_assigned(consumer, list),
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__REVOKE_PARTITIONS => self.revoked(consumer, list),
            // The partitions of a failed rebalance are not ours any more.
            error => {
                self.report_error("rebalance", &KafkaError::Rebalance(error.into()));
                self.revoked(consumer, list);
            }
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, list: &TopicPartitionList) {
        if let Err(error) = result {
            // The next commit includes these offsets.
            self.report_error("commit", &error);
            return;
        }
        self.broker_answered();
        let mut is_committed = false;
        let mut assigned = self.assigned();
        for element in list.elements() {
            match (element.error(), element.offset()) {
                (Ok(()), Offset::Offset(offset)) => {
                    is_committed = true;
                    assigned.committed(element.topic(), element.partition(), offset);
                }
                (Ok(()), _) => {}
                (Err(error), _) => self.report_error("commit", &error),
            }
        }
        drop(assigned);
        // The permission for the group may return before the group has assigned partitions again.
        if is_committed {
            self.allowed(&Refused::Group);
        }
    }
}

/// The partitions of a list.
fn places(list: &TopicPartitionList) -> Vec<TopicPartition> {
    list.elements().iter().map(|element| (Arc::from(element.topic()), element.partition())).collect()
}

/// The partitions alone; `None` when there are none.
pub(super) fn partitions(places: &[TopicPartition]) -> Option<TopicPartitionList> {
    let mut list = TopicPartitionList::with_capacity(places.len());
    for (topic, partition) in places {
        list.add_partition(topic, *partition);
    }
    (!places.is_empty()).then_some(list)
}

/// Offsets to commit, with the metadata of an inbox; `None` when there are none.
pub(super) fn offsets(stored: &[(TopicPartition, i64)]) -> Option<TopicPartitionList> {
    let mut list = TopicPartitionList::with_capacity(stored.len());
    for ((topic, partition), offset) in stored {
        let mut element = list.add_partition(topic, *partition);
        // Fails only for offsets that are not numbers.
        let _ = element.set_offset(Offset::Offset(*offset));
        element.set_metadata(COMMITTED_BY_US);
    }
    (!stored.is_empty()).then_some(list)
}
