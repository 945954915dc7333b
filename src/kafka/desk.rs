//! What the ingest knows of its partitions: which it owns, what waits to be written, what is being written, what may be committed.
//!
//! Records of a partition leave in the order of their offsets, and the database writes a batch only after the one that it follows, so what is
//! stored of a partition is always a prefix of it. An assignment has a generation: whatever was begun under an older one changes nothing, so nothing is ever committed for a
//! partition that was given away meanwhile. Pure: no call into Kafka or the store, and the time is an argument.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::position::{At, is_cut};
use crate::accept::Row;
use crate::store::ledger::Reader;
use parts::{Owned, PartitionQueue, Standing, UnderWay, UnwrittenRecord};
use room::{Fill, Load};

mod batches;
mod parts;
mod room;
mod watch;

pub(super) use batches::Batch;
pub(super) use room::Pauses;
pub(super) use watch::Watched;

/// A topic and a partition of it.
pub(super) type TopicPartition = (Arc<str>, i32);

/// Pause before a partition that could not be positioned is tried again.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Pause before it is looked whether a person has put a stopped partition right.
const LOOK_AGAIN: Duration = Duration::from_secs(15);

pub(super) struct Desk {
    /// Whose ledger it is. `None` until Kafka has told its cluster's id: nothing begins before.
    reader: Option<Arc<Reader>>,
    topics: HashMap<Arc<str>, HashMap<i32, Owned>>,
    generation: u64,
    /// Batches that may be written at a time.
    lanes: usize,
    /// Topics of which one batch ends before the next one is sent.
    in_order: HashSet<Arc<str>>,
    /// By their ids.
    under_way: BTreeMap<u64, UnderWay>,
    last_batch: u64,
    /// In all partitions.
    waiting: Load,
    fill: Fill,
}

/// A partition whose position is to be found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) place: TopicPartition,
    pub(super) generation: u64,
    /// It is in the ledger, as far as we know.
    pub(super) has_ledger: bool,
    /// A record came that proves that the log was truncated.
    pub(super) cut: Option<At>,
}

/// Whether a record that was read is to be taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expected {
    Yes,
    /// Its partition is not being read.
    No,
    /// It is not the one that was expected, and compaction or a transaction do not explain it: the position has to be found anew.
    OutOfPlace,
}

impl Desk {
    pub(super) fn new(lanes: usize, in_order: HashSet<Arc<str>>) -> Self {
        Self {
            reader: None,
            topics: HashMap::new(),
            generation: 0,
            lanes,
            in_order,
            under_way: BTreeMap::new(),
            last_batch: 0,
            waiting: Load::default(),
            fill: Fill::default(),
        }
    }

    /// Takes over partitions, paused.
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
                standing: Standing::New { ask_at: now },
                is_paused: true,
                is_in_order: self.in_order.contains(topic),
                waiting: PartitionQueue::default(),
                fill: Fill::default(),
                was_held_back: false,
                under_way: 0,
                last_batch: 0,
                sent: 0,
                next_offset: 0,
                epoch: None,
                cut: None,
                stopped_why: None,
                stands_still: None,
                asked_before: None,
                stored: None,
                committed: None,
            };
            self.topics.entry(Arc::clone(topic)).or_default().insert(*partition, owned);
        }
    }

    /// Forgets partitions. A batch of theirs that is under way goes on, and changes nothing here any more.
    pub(super) fn revoke(&mut self, places: &[TopicPartition]) {
        self.drop_waiting(places);
        for (topic, partition) in places {
            if let Some(partitions) = self.topics.get_mut(topic) {
                partitions.remove(partition);
            }
        }
    }

    /// Forgets what waits of these partitions. What is being written goes on.
    pub(super) fn drop_waiting(&mut self, places: &[TopicPartition]) {
        for (topic, partition) in places {
            if let Some(owned) = self.get_mut(topic, *partition) {
                let Load { rows, bytes } = std::mem::take(&mut owned.waiting).load();
                self.waiting.rows -= rows;
                self.waiting.bytes -= bytes;
            }
        }
    }

    pub(super) fn places(&self) -> Vec<TopicPartition> {
        self.all().map(|(place, _)| place).collect()
    }

    pub(super) fn is_writing_any_of(&self, places: &[TopicPartition]) -> bool {
        let places: HashSet<&TopicPartition> = places.iter().collect();
        self.under_way.values().flat_map(|batch| &batch.ends).any(|end| places.contains(&end.place))
    }

    /// Partitions whose position is to be found now. Not while records of them are on their way: the ledger would still move.
    pub(super) fn ask(&mut self, now: Instant) -> Vec<Asked> {
        let is_due = |(_, owned): (TopicPartition, &Owned)| match owned.standing {
            Standing::New { ask_at } | Standing::Stopped { ask_at } => ask_at <= now,
            Standing::Asked | Standing::Reading => false,
        };
        if !self.all().any(is_due) {
            return Vec::new();
        }
        let busy = self.busy();
        let mut asked = Vec::new();
        for (topic, partitions) in &mut self.topics {
            for (&partition, owned) in partitions {
                let (Standing::New { ask_at } | Standing::Stopped { ask_at }) = owned.standing else { continue };
                let place = (Arc::clone(topic), partition);
                if ask_at <= now && !busy.contains(&place) {
                    owned.standing = Standing::Asked;
                    let (generation, has_ledger) = (owned.generation, owned.stored.is_some());
                    asked.push(Asked { place, generation, has_ledger, cut: owned.cut });
                }
            }
        }
        asked
    }

    /// Partitions of which records wait or are being written.
    fn busy(&self) -> HashSet<TopicPartition> {
        let waiting = self.all().filter(|(_, owned)| owned.waiting.front().is_some()).map(|(place, _)| place);
        let writing = self.under_way.values().flat_map(|batch| batch.ends.iter().map(|end| end.place.clone()));
        waiting.chain(writing).collect()
    }

    /// Whether an answer is about the assignment it was asked for.
    pub(super) fn is_current(&self, asked: &Asked) -> bool {
        let (topic, partition) = &asked.place;
        self.get(topic, *partition).is_some_and(|owned| owned.generation == asked.generation)
    }

    /// Whose ledger the batches move.
    pub(super) fn read_for(&mut self, reader: &Arc<Reader>) {
        self.reader = Some(Arc::clone(reader));
    }

    /// The partition has been set to an offset: it is read from here on. Everything before is stored.
    pub(super) fn begin(&mut self, (topic, partition): &TopicPartition, at: At) {
        if let Some(owned) = self.get_mut(topic, *partition) {
            owned.standing = Standing::Reading;
            owned.next_offset = at.offset;
            owned.epoch = at.epoch;
            owned.cut = None;
            owned.stopped_why = None;
            owned.stored = Some(at.offset);
            owned.sent = at.offset;
        }
    }

    /// The position could not be found for now.
    pub(super) fn ask_again(&mut self, (topic, partition): &TopicPartition, now: Instant) {
        if let Some(owned) = self.get_mut(topic, *partition) {
            owned.standing = Standing::New { ask_at: now + ASK_AGAIN };
        }
    }

    /// The partition is stopped. It is looked again now and then whether a person has put that right. Returns whether this reason is new.
    pub(super) fn stop(&mut self, (topic, partition): &TopicPartition, why: &str, now: Instant) -> bool {
        let Some(owned) = self.get_mut(topic, *partition) else { return false };
        owned.standing = Standing::Stopped { ask_at: now + LOOK_AGAIN };
        owned.cut = None;
        owned.stopped_why.replace(why.into()).as_deref() != Some(why)
    }

    /// Whether a record is the next of its partition. `low` is asked for the first offset that Kafka still has, only when needed.
    pub(super) fn expects(
        &mut self,
        (topic, partition): (&str, i32),
        at: At,
        now: Instant,
        low: impl FnOnce() -> Option<i64>,
    ) -> Expected {
        let Some(owned) = self.get_mut(topic, partition) else { return Expected::No };
        if owned.standing != Standing::Reading {
            return Expected::No;
        }
        // Offsets are passed over by compaction and by transactions. What lies before the log's beginning was deleted, unread.
        // Without an answer Kafka is asked, once for each place: a gap must not go unnoted.
        let next_offset = owned.next_offset;
        let is_gap = at.offset > next_offset
            && match low() {
                Some(low) => low > next_offset,
                None => owned.asked_before.replace(next_offset) != Some(next_offset),
            };
        if at.offset < owned.next_offset || is_gap {
            let expected = At { offset: owned.next_offset, epoch: owned.epoch };
            owned.cut = is_cut(expected, at).then_some(at);
            owned.standing = Standing::New { ask_at: now };
            return Expected::OutOfPlace;
        }
        Expected::Yes
    }

    /// Takes in a record that was expected, with what it becomes and how large that is. A partition that was sent back meanwhile, by a batch
    /// whose ledger was not where it should have been, takes nothing in.
    pub(super) fn take_in(&mut self, (topic, partition): (&str, i32), at: At, row: Option<(Row, usize)>) {
        let Some(owned) = self.get_mut(topic, partition) else { return };
        if owned.standing != Standing::Reading {
            return;
        }
        owned.next_offset = at.offset + 1;
        owned.epoch = at.epoch;
        owned.stands_still = None;
        let (row, size_bytes) = row.map_or((None, 0), |(row, size_bytes)| (Some(row), size_bytes));
        owned.waiting.push(UnwrittenRecord { at, row, size_bytes });
        self.waiting.rows += 1;
        self.waiting.bytes += size_bytes;
    }

    /// The partition whose next offset this is, if it is the only one.
    pub(super) fn only_one_at(&self, offset: i64) -> Option<TopicPartition> {
        let mut there =
            self.all().filter(|(_, owned)| owned.standing == Standing::Reading && owned.next_offset == offset);
        let first = there.next()?.0;
        there.next().is_none().then_some(first)
    }

    /// What is stored and not committed.
    pub(super) fn to_commit(&self) -> Vec<(TopicPartition, i64)> {
        self.all()
            .filter(|(_, owned)| owned.stored != owned.committed)
            .filter_map(|(place, owned)| Some((place, owned.stored?)))
            .collect()
    }

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
