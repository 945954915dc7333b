//! What librdkafka calls: partitions come and go, commits are answered, lines are logged.
//!
//! Runs on the ingest's own thread, inside of its poll; only the end of a batch is noted from the store's. Partitions come paused and
//! at the beginning, so that nothing of them is read before their position is found. Before they go, their batch under way gets some
//! time to end, and what is stored is committed.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{ClientContext, Offset, Statistics, TopicPartitionList};
use tokio::sync::Notify;

use super::desk::{Batch, Desk, TopicPartition};
use super::find::Located;
use super::outage::{Outage, Say};
use crate::store::ledger::{LedgerMove, Reader};
use crate::telemetry::events;
use crate::types::Limits;

/// How long a batch of partitions that are being revoked may take to end. Far below the time a group waits for a member (`max.poll.interval.ms`, five
/// minutes).
const REVOKE_WAIT: Duration = Duration::from_secs(5);
/// Stands beside every offset an inbox commits: where it does, there is a ledger.
pub(super) const COMMITTED_BY_US: &str = "wharf";

/// What is told to the ingest's thread by the tasks that work for it.
pub(super) enum Notice {
    /// A batch has ended, and the desk knows.
    Written,
    Located(Vec<Located>),
    /// Whether the backlog is over its limits.
    Backlog {
        is_over: bool,
    },
}

pub(super) struct Context {
    pub(super) group: Arc<str>,
    /// The group and the cluster, once a broker has told the cluster's id.
    reader: OnceLock<Arc<Reader>>,
    desk: Mutex<Desk>,
    /// Notified whenever a batch has ended: another one's turn may have come.
    has_ended: Notify,
    told: Mutex<Receiver<Notice>>,
    found: Mutex<Vec<Located>>,
    is_backlogged: AtomicBool,
    /// The consumer is being closed: what is stored is committed already.
    is_closing: AtomicBool,
    /// No broker is to be reached. A commit that waits for one until the session is over would put out a static member for good.
    is_cut_off: AtomicBool,
    /// What keeps this process from reading at all, until a broker is heard again.
    trouble: Mutex<Option<String>>,
    /// Whether there is any: looked at for each record.
    has_trouble: AtomicBool,
    outage: Outage,
}

impl Context {
    pub(super) fn new(group: Arc<str>, told: Receiver<Notice>, desk: Desk) -> Self {
        Self {
            desk: Mutex::new(desk),
            has_ended: Notify::new(),
            group,
            reader: OnceLock::new(),
            told: Mutex::new(told),
            found: Mutex::default(),
            is_backlogged: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            is_cut_off: AtomicBool::new(false),
            trouble: Mutex::default(),
            has_trouble: AtomicBool::new(false),
            outage: Outage::default(),
        }
    }

    pub(super) fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whose ledger it is, if the cluster is known.
    pub(super) fn reader(&self) -> Option<Arc<Reader>> {
        self.reader.get().map(Arc::clone)
    }

    /// The cluster has told its id. It is asked once: a client never leaves its cluster.
    pub(super) fn read_from(&self, cluster_id: String) -> Arc<Reader> {
        let reader = || Arc::new(Reader { group: Arc::clone(&self.group), cluster_id: cluster_id.into() });
        let reader = Arc::clone(self.reader.get_or_init(reader));
        self.desk().read_for(&reader);
        reader
    }

    /// Positions that were found and not yet taken up.
    pub(super) fn take_found(&self) -> Vec<Located> {
        std::mem::take(&mut self.found.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn is_backlogged(&self) -> bool {
        self.is_backlogged.load(Ordering::Relaxed)
    }

    pub(super) fn set_closing(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_cut_off(&self) -> bool {
        self.is_cut_off.load(Ordering::Relaxed)
    }

    /// A broker has been heard.
    pub(super) fn is_heard(&self) {
        self.is_cut_off.store(false, Ordering::Relaxed);
        if self.outage.is_on()
            && let Some(after) = self.outage.heard(Instant::now())
        {
            events::kafka::brokers_back(&self.group, after);
        }
        if self.has_trouble.swap(false, Ordering::Relaxed) {
            self.trouble.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }

    /// What keeps this process from reading, for people who look from outside.
    pub(super) fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note_trouble(&self, trouble: String) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(trouble);
        self.has_trouble.store(true, Ordering::Relaxed);
    }

    /// Whatever fails while brokers are away fails because of that, which was told already.
    pub(super) fn tell_trouble(&self, doing: &'static str, error: &impl std::fmt::Display) {
        match self.outage.is_on() {
            true => events::kafka::quiet_trouble(&self.group, doing, error),
            false => events::kafka::trouble(&self.group, doing, error),
        }
    }

    pub(super) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Relaxed)
    }

    /// A lane's batch is stored; returns the next one, so that its connection does not wait for the thread that reads.
    pub(super) fn written(&self, lane: usize, id: u64, moves: &[LedgerMove], limits: &Limits) -> Option<Batch> {
        let mut desk = self.desk();
        let behind = desk.written(id, moves, Instant::now());
        let next = desk.next_batch(lane, limits);
        drop(desk);
        self.has_ended.notify_waiters();
        for (topic, partition) in behind {
            events::kafka::ledger_behind(&self.group, &topic, partition);
        }
        next
    }

    /// Waits until no earlier batch with records of the same partitions is under way.
    pub(super) async fn turn(&self, id: u64) {
        loop {
            // Asked for before the desk is: what ends in between is noticed.
            let has_ended = self.has_ended.notified();
            if self.desk().is_first(id) {
                return;
            }
            has_ended.await;
        }
    }

    /// Takes up what is told within `wait`; returns whether anything was.
    pub(super) fn hear(&self, wait: Duration) -> bool {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = match told.recv_timeout(wait) {
            Ok(first) => first,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return false,
        };
        loop {
            match next {
                Notice::Written => {}
                Notice::Located(found) => self.found.lock().unwrap_or_else(PoisonError::into_inner).extend(found),
                Notice::Backlog { is_over } => self.is_backlogged.store(is_over, Ordering::Relaxed),
            }
            match told.try_recv() {
                Ok(another) => next = another,
                Err(_) => return true,
            }
        }
    }

    /// Waits until no batch of these partitions is under way, or the time is up.
    pub(super) fn wait_written(&self, places: &[TopicPartition], deadline: Instant) {
        while self.desk().is_writing_any_of(places) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.hear(left);
        }
    }

    fn assigned(&self, consumer: &BaseConsumer<Self>, list: &mut TopicPartitionList) {
        let places = places(list);
        self.is_heard();
        events::kafka::partitions_assigned(&self.group, places.len());
        // Not where the group was: the ledger decides, and until it has, nothing is to be read. The beginning is the one place from
        // which a record that slips through is never a step over others.
        let begun = list.set_all_offsets(Offset::Beginning).and_then(|()| match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_assign(list),
            RebalanceProtocol::Eager | RebalanceProtocol::None => consumer.assign(list),
        });
        for done in [begun, consumer.pause(list)] {
            if let Err(error) = done {
                self.tell_trouble("assign", &error);
            }
        }
        self.desk().assign(&places, Instant::now());
    }

    fn revoked(&self, consumer: &BaseConsumer<Self>, list: &TopicPartitionList) {
        let places = places(list);
        events::kafka::partitions_revoked(&self.group, places.len());
        self.desk().drop_waiting(&places);
        // Partitions that are lost belong to somebody else already: nothing is committed for them.
        if !consumer.assignment_lost() && !self.is_closing() {
            self.wait_written(&places, Instant::now() + REVOKE_WAIT);
            let stored = self.desk().to_commit();
            let going: HashSet<&TopicPartition> = places.iter().collect();
            let stored: Vec<_> = stored.into_iter().filter(|(place, _)| going.contains(place)).collect();
            if let Some(list) = offsets(&stored)
                && let Err(error) = consumer.commit(&list, CommitMode::Sync)
            {
                // The next owner goes by the ledger.
                self.tell_trouble("commit", &error);
            }
        }
        self.desk().revoke(&places);
        let gone = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_unassign(list),
            RebalanceProtocol::Eager | RebalanceProtocol::None => consumer.unassign(),
        };
        if let Err(error) = gone {
            self.tell_trouble("unassign", &error);
        }
    }
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, _facility: &str, line: &str) {
        let level = if self.outage.is_on() { RDKafkaLogLevel::Debug } else { level };
        events::kafka::log(&self.group, level as i32, without_values(line));
    }

    fn stats(&self, _statistics: Statistics) {}

    /// Called for every error before the poll returns it, and with more words.
    fn error(&self, error: KafkaError, reason: &str) {
        let reason = without_values(reason);
        match error.rdkafka_error_code() {
            Some(RDKafkaErrorCode::AllBrokersDown | RDKafkaErrorCode::BrokerTransportFailure) => {
                self.is_cut_off.store(true, Ordering::Relaxed);
                self.note_trouble(format!("no broker answers: {reason}"));
                let error = format_args!("{error}: {reason}");
                return match self.outage.failed(Instant::now()) {
                    Say::Warning { lasts, held_back } => {
                        events::kafka::brokers_away(&self.group, lasts, held_back, &error);
                    }
                    Say::Nothing => events::kafka::quiet_trouble(&self.group, "consume", &error),
                };
            }
            Some(
                RDKafkaErrorCode::Authentication
                | RDKafkaErrorCode::SaslAuthenticationFailed
                | RDKafkaErrorCode::TopicAuthorizationFailed
                | RDKafkaErrorCode::GroupAuthorizationFailed
                | RDKafkaErrorCode::ClusterAuthorizationFailed
                | RDKafkaErrorCode::UnknownTopicOrPartition,
            ) => self.note_trouble(format!("{error}: {reason}")),
            // Records that cannot be read: their partition stands still, and says so again and again.
            Some(
                RDKafkaErrorCode::BadMessage | RDKafkaErrorCode::BadCompression | RDKafkaErrorCode::NotImplemented,
            ) => {
                let place = offset_in(reason).and_then(|offset| Some((self.desk().only_one_at(offset)?, offset)));
                if let Some(((topic, partition), offset)) = place {
                    self.desk().stands_still(&(Arc::clone(&topic), partition), reason);
                    return events::kafka::stands_still(&self.group, &topic, partition, offset, reason);
                }
            }
            Some(_) | None => {}
        }
        self.tell_trouble("consume", &format_args!("{error}: {reason}"));
    }
}

impl ConsumerContext for Context {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, what: RDKafkaRespErr, list: &mut TopicPartitionList) {
        match what {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => self.assigned(consumer, list),
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__REVOKE_PARTITIONS => self.revoked(consumer, list),
            error => {
                self.tell_trouble("rebalance", &KafkaError::Rebalance(error.into()));
                self.revoked(consumer, list);
            }
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, list: &TopicPartitionList) {
        if let Err(error) = result {
            // Tried again with what is stored by then.
            self.tell_trouble("commit", &error);
            return;
        }
        self.is_heard();
        let mut desk = self.desk();
        for element in list.elements() {
            match (element.error(), element.offset()) {
                (Ok(()), Offset::Offset(offset)) => desk.committed(element.topic(), element.partition(), offset),
                (Ok(()), _) => {}
                (Err(error), _) => self.tell_trouble("commit", &error),
            }
        }
    }
}

/// librdkafka quotes what it does not understand of this setting, which may be a secret.
pub(super) fn without_values(text: &str) -> &str {
    const QUOTED: &str = "sasl.oauthbearer.config";
    text.find(QUOTED).map_or(text, |at| &text[..at + QUOTED.len()])
}

/// The offset that librdkafka names in words.
fn offset_in(reason: &str) -> Option<i64> {
    let words = ["offset ", "message at "].iter().find_map(|words| reason.split_once(words))?;
    words.1.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

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

/// Offsets to commit; `None` when there are none.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_of_a_damaged_record_is_found_in_what_librdkafka_says() {
        let damaged = "MessageSet at offset 17 (99 bytes) failed CRC32C check (original 0x1 != calculated 0x2)";
        assert_eq!(offset_in(damaged), Some(17));
        assert_eq!(offset_in("Decompression (codec 0x4) of message at 5 of 70 bytes failed: x"), Some(5));
        assert_eq!(offset_in("1/1 brokers are down"), None);
    }
}
