//! The partitions of an ingest: which are assigned, which of their records wait or are being written, and which offsets
//! may be committed.
//!
//! Records of a partition are written in the order of their offsets, and the database writes a batch only after the one
//! that it follows, so the stored records of a partition are always a prefix of it. Each assignment has a generation,
//! and results of an older generation are ignored, so nothing is committed for a partition that was revoked meanwhile.
//! Pure: no call into Kafka or the store, and the time is an argument.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::position::{At, is_cut};
use crate::accept::Row;
use crate::store::ledger::{LedgerRow, Reader};
use parts::{Owned, PartitionQueue, PartitionState, UnderWay, UnwrittenRecord, recorded_at};
use room::{Fill, Load};

mod batches;
mod decoding;
mod parts;
mod room;
mod watch;

pub(super) use batches::Batch;
pub(super) use decoding::{Failed, Wait};
pub(super) use room::Pauses;
pub(super) use watch::Watched;

/// A topic and a partition of it.
pub(super) type TopicPartition = (Arc<str>, i32);

/// The pause before a position is requested again that could not be determined or set.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// The pause before the next check whether an operator has repaired a stopped partition.
const ASK_STOPPED_AGAIN: Duration = Duration::from_secs(15);

/// Whether the batches of each partition of this topic are sent one at a time.
pub(super) type InOrder = Box<dyn Fn(&str) -> bool + Send>;

/// The state of all assigned partitions. `Context` holds it behind a mutex, because the ingest thread and the tasks
/// that write batches change it.
pub(super) struct AssignedPartitions {
    /// The group and cluster of the ledger. `None` until the cluster id is known; nothing is written before.
    reader: Option<Arc<Reader>>,
    /// The assigned partitions, by topic, so that a record is looked up by its borrowed topic name.
    topics: HashMap<Arc<str>, HashMap<i32, Owned>>,
    /// The number of the last assignment.
    generation: u64,
    /// The number of lanes: batches that may be written at a time.
    lanes: usize,
    in_order: InOrder,
    /// Batches that are being written, by id.
    under_way: BTreeMap<u64, UnderWay>,
    /// The id of the last batch.
    last_batch: u64,
    /// The number of the last wait for a decoder.
    last_wait: u64,
    /// Waiting records of all partitions.
    waiting: Load,
    /// Whether too many records wait in total.
    fill: Fill,
}

/// A partition whose position is requested.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) place: TopicPartition,
    /// The assignment for which it is requested: see `AssignedPartitions::is_current`.
    pub(super) generation: u64,
    /// Everything before this offset was stored when this process read the partition before; `None` if it has not. A
    /// ledger that has no row then, or is before this offset, was set back by a person, or the database has lost data.
    pub(super) stored: Option<i64>,
    /// A record that proves that the log was truncated, if there is one.
    pub(super) cut: Option<At>,
    /// Whether the ledger has had the topic's id or a leader epoch, which a reset removes.
    pub(super) has_marks: bool,
    /// Whether it was reported that the ledger is not where this process left it.
    pub(super) is_told: bool,
}

impl Asked {
    /// Whether the ledger is before the offset where this process left it.
    pub(super) fn is_behind(&self, ledger: Option<&LedgerRow>) -> bool {
        self.stored.is_some_and(|stored| ledger.is_none_or(|row| row.next_offset < stored))
    }
}

/// Whether a record is the expected one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expected {
    Yes,
    /// Its partition is not being read. The record is dropped, and read again from the position that is found.
    No,
    /// It is not the expected one, and neither compaction nor a transaction explains that: the position has to be
    /// determined again.
    OutOfPlace,
}

impl AssignedPartitions {
    pub(super) fn new(lanes: usize, in_order: InOrder) -> Self {
        Self {
            reader: None,
            topics: HashMap::new(),
            generation: 0,
            lanes,
            in_order,
            under_way: BTreeMap::new(),
            last_batch: 0,
            last_wait: 0,
            waiting: Load::default(),
            fill: Fill::default(),
        }
    }

    /// Adds assigned partitions, paused. Each goes to the lane with the fewest partitions.
    pub(super) fn assign(&mut self, places: &[TopicPartition], now: Instant) {
        self.generation += 1;
        let mut loads = vec![0_usize; self.lanes];
        self.all().for_each(|(_, owned)| loads[owned.lane] += 1);
        for (topic, partition) in places {
            let lane = (0..self.lanes).min_by_key(|lane| loads[*lane]).unwrap_or_default();
            loads[lane] += 1;
            let owned = Owned {
                generation: self.generation,
                lane,
                state: PartitionState::New { ask_at: now },
                is_paused: true,
                is_in_order: (self.in_order)(topic),
                waiting: PartitionQueue::default(),
                fill: Fill::default(),
                was_overfull: false,
                under_way: 0,
                last_batch: 0,
                sent: 0,
                next_offset: 0,
                newest: None,
                epoch: None,
                cut: None,
                stopped_why: None,
                blocked_why: None,
                undecoded_why: None,
                asked_before: None,
                has_marks: false,
                is_told: false,
                stored: None,
                committed: None,
            };
            self.topics.entry(Arc::clone(topic)).or_default().insert(*partition, owned);
        }
    }

    /// Removes partitions. A batch that is being written continues, and its result is ignored.
    pub(super) fn revoke(&mut self, places: &[TopicPartition]) {
        self.drop_waiting(places);
        for (topic, partition) in places {
            if let Some(partitions) = self.topics.get_mut(topic) {
                partitions.remove(partition);
            }
        }
    }

    /// Drops the waiting records of these partitions, also those that wait for a decoder: a record is never queued
    /// without those before it. Batches that are being written continue.
    pub(super) fn drop_waiting(&mut self, places: &[TopicPartition]) {
        for (topic, partition) in places {
            if let Some(owned) = self.get_mut(topic, *partition) {
                if let PartitionState::Decoding { since, .. } = owned.state {
                    owned.state = PartitionState::New { ask_at: since };
                }
                let Load { rows, bytes } = std::mem::take(&mut owned.waiting).load();
                self.waiting.rows -= rows;
                self.waiting.bytes -= bytes;
            }
        }
    }

    /// All assigned partitions.
    pub(super) fn places(&self) -> Vec<TopicPartition> {
        self.all().map(|(place, _)| place).collect()
    }

    /// Whether a batch with records of one of these partitions is being written.
    pub(super) fn is_writing_any_of(&self, places: &[TopicPartition]) -> bool {
        let places: HashSet<&TopicPartition> = places.iter().collect();
        self.under_way.values().flat_map(|batch| &batch.ends).any(|end| places.contains(&end.place))
    }

    /// Returns the partitions whose position has to be requested now, and marks them as requested. A partition with
    /// records that wait or are being written is left out, because its ledger still moves.
    pub(super) fn ask(&mut self, now: Instant) -> Vec<Asked> {
        let is_due = |(_, owned): (TopicPartition, &Owned)| match owned.state {
            PartitionState::New { ask_at } | PartitionState::Stopped { ask_at } => ask_at <= now,
            PartitionState::Asked | PartitionState::Reading | PartitionState::Decoding { .. } => false,
        };
        if !self.all().any(is_due) {
            return Vec::new();
        }
        let busy = self.busy();
        let mut asked = Vec::new();
        for (topic, partitions) in &mut self.topics {
            for (&partition, owned) in partitions {
                let (PartitionState::New { ask_at } | PartitionState::Stopped { ask_at }) = owned.state else {
                    continue;
                };
                let place = (Arc::clone(topic), partition);
                if ask_at <= now && !busy.contains(&place) {
                    owned.state = PartitionState::Asked;
                    asked.push(Asked {
                        place,
                        generation: owned.generation,
                        stored: owned.stored,
                        cut: owned.cut,
                        has_marks: owned.has_marks,
                        is_told: owned.is_told,
                    });
                }
            }
        }
        asked
    }

    /// Partitions with records that wait or are being written.
    fn busy(&self) -> HashSet<TopicPartition> {
        let waiting = self.all().filter(|(_, owned)| owned.waiting.front().is_some()).map(|(place, _)| place);
        let writing = self.under_way.values().flat_map(|batch| batch.ends.iter().map(|end| end.place.clone()));
        waiting.chain(writing).collect()
    }

    /// Whether an answer belongs to the current assignment of its partition.
    pub(super) fn is_current(&self, asked: &Asked) -> bool {
        let (topic, partition) = &asked.place;
        self.get(topic, *partition).is_some_and(|owned| owned.generation == asked.generation)
    }

    /// Sets the group and cluster of the ledger. Batches can be written from now on.
    pub(super) fn read_for(&mut self, reader: &Arc<Reader>) {
        self.reader = Some(Arc::clone(reader));
    }

    /// Called when the consumer was set to an offset: the partition is read from there. Everything before it is stored.
    pub(super) fn begin(&mut self, (topic, partition): &TopicPartition, at: At) {
        if let Some(owned) = self.get_mut(topic, *partition) {
            owned.state = PartitionState::Reading;
            // An operator has skipped the records that could not be read, so the next ones are others. At the same
            // offset the partition stays blocked: librdkafka has yet to read the records.
            if owned.next_offset != at.offset {
                owned.blocked_why = None;
            }
            owned.next_offset = at.offset;
            owned.epoch = at.epoch;
            owned.cut = None;
            owned.stopped_why = None;
            owned.stored = Some(at.offset);
            owned.is_told = false;
            owned.sent = at.offset;
        }
    }

    /// Keeps what was learned while the position was determined, whether it was found or not.
    pub(super) fn learn(&mut self, asked: &Asked) {
        if let Some(owned) = self.get_mut(&asked.place.0, asked.place.1) {
            owned.has_marks |= asked.has_marks;
            owned.is_told |= asked.is_told;
        }
    }

    /// Called when the position could not be determined: it is requested again later.
    pub(super) fn ask_again(&mut self, (topic, partition): &TopicPartition, now: Instant) {
        if let Some(owned) = self.get_mut(topic, *partition) {
            owned.state = PartitionState::New { ask_at: now + ASK_AGAIN };
        }
    }

    /// Stops the partition until an operator acts. Its ledger is checked again every 15 seconds. Returns whether this
    /// reason is new.
    pub(super) fn stop(&mut self, (topic, partition): &TopicPartition, why: &str, now: Instant) -> bool {
        let Some(owned) = self.get_mut(topic, *partition) else { return false };
        owned.state = PartitionState::Stopped { ask_at: now + ASK_STOPPED_AGAIN };
        owned.cut = None;
        owned.stopped_why.replace(why.into()).as_deref() != Some(why)
    }

    /// Whether a record is the next one of its partition. `low` returns the first offset that Kafka still has; called
    /// only when needed.
    pub(super) fn expects(
        &mut self,
        (topic, partition): (&str, i32),
        at: At,
        now: Instant,
        low: impl FnOnce() -> Option<i64>,
    ) -> Expected {
        let Some(owned) = self.get_mut(topic, partition) else { return Expected::No };
        if owned.state != PartitionState::Reading {
            return Expected::No;
        }
        // Compaction and transactions skip offsets, which is not a gap. Offsets before the beginning of the log were
        // deleted unread. If the beginning is not known, the position is requested again, once for each offset, so that
        // no gap goes unreported.
        let next_offset = owned.next_offset;
        let is_gap = at.offset > next_offset
            && match low() {
                Some(low) => low > next_offset,
                None => owned.asked_before.replace(next_offset) != Some(next_offset),
            };
        if at.offset < owned.next_offset || is_gap {
            let expected = At { offset: owned.next_offset, epoch: owned.epoch };
            owned.cut = is_cut(expected, at).then_some(at);
            owned.state = PartitionState::New { ask_at: now };
            return Expected::OutOfPlace;
        }
        Expected::Yes
    }

    /// Queues an expected record: its row, if a handler wants it, and the size of the row. Ignored if a batch has found
    /// the ledger behind meanwhile, because the partition has to find its position again.
    pub(super) fn take_in(&mut self, (topic, partition): (&str, i32), at: At, row: Option<(Row, usize)>) {
        let Some(owned) = self.get_mut(topic, partition) else { return };
        if owned.state != PartitionState::Reading {
            return;
        }
        owned.next_offset = at.offset + 1;
        owned.epoch = at.epoch;
        owned.blocked_why = None;
        owned.newest = row.as_ref().and_then(|(row, _)| recorded_at(row)).or(owned.newest);
        let (row, size_bytes) = row.map_or((None, 0), |(row, size_bytes)| (Some(row), size_bytes));
        owned.waiting.push(UnwrittenRecord { at, row, size_bytes });
        self.waiting.rows += 1;
        self.waiting.bytes += size_bytes;
    }

    /// The partition that expects this offset next, if there is exactly one. librdkafka's errors about unreadable
    /// records have an offset, but not always a partition.
    pub(super) fn only_one_at(&self, offset: i64) -> Option<TopicPartition> {
        let mut there =
            self.all().filter(|(_, owned)| owned.state == PartitionState::Reading && owned.next_offset == offset);
        let first = there.next()?.0;
        there.next().is_none().then_some(first)
    }

    /// The offsets up to which records are stored, of partitions where that differs from the committed offset.
    pub(super) fn to_commit(&self) -> Vec<(TopicPartition, i64)> {
        self.all()
            .filter(|(_, owned)| owned.stored != owned.committed)
            .filter_map(|(place, owned)| Some((place, owned.stored?)))
            .collect()
    }

    /// Called when Kafka has confirmed a commit.
    pub(super) fn committed(&mut self, topic: &str, partition: i32, offset: i64) {
        if let Some(owned) = self.get_mut(topic, partition) {
            owned.committed = Some(offset);
        }
    }

    fn get(&self, topic: &str, partition: i32) -> Option<&Owned> {
        self.topics.get(topic)?.get(&partition)
    }

    fn get_mut(&mut self, topic: &str, partition: i32) -> Option<&mut Owned> {
        self.topics.get_mut(topic)?.get_mut(&partition)
    }

    fn all(&self) -> impl Iterator<Item = (TopicPartition, &Owned)> {
        self.topics.iter().flat_map(|(topic, partitions)| {
            partitions.iter().map(move |(&partition, owned)| ((Arc::clone(topic), partition), owned))
        })
    }
}

#[cfg(test)]
mod tests;
