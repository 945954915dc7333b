//! What the ingest knows of its partitions: which it owns, what waits to be written, what is being written, what may be committed.
//!
//! Records of a partition stay in one lane, and a lane writes one batch at a time, so what is stored of a partition is always a prefix
//! of it. An assignment has a generation: whatever was begun under an older one changes nothing, so nothing is ever committed for a
//! partition that was given away meanwhile. Pure: no call into Kafka or the store, and the time is an argument.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::position::{At, is_cut};
use crate::accept::Row;
use crate::store::ledger::{LedgerEntry, LedgerMove, Reader};
use crate::types::Limits;
use parts::{End, Owned, Standing, Waiting};

mod parts;
mod watch;

pub(super) use watch::Watched;

/// A topic and a partition of it.
pub(super) type TopicPartition = (Arc<str>, i32);

/// Batches that may be written at a time, of different partitions.
pub(super) const LANES: usize = 2;
/// Pause before a partition that could not be positioned is tried again.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Pause before it is looked whether a person has put a stopped partition right.
const LOOK_AGAIN: Duration = Duration::from_secs(15);

pub(super) struct Desk {
    /// Whose ledger it is. `None` until Kafka has told its cluster's id: nothing begins before.
    reader: Option<Arc<Reader>>,
    topics: HashMap<Arc<str>, HashMap<i32, Owned>>,
    generation: u64,
    lanes: [WriteLane; LANES],
    waiting_rows: usize,
    waiting_bytes: usize,
}

#[derive(Default)]
struct WriteLane {
    waiting: VecDeque<Waiting>,
    /// Where the batch under way ends.
    writing: Option<Vec<End>>,
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

/// A batch to write.
pub(super) struct Batch {
    pub(super) rows: Vec<Row>,
    pub(super) ledger: Vec<LedgerEntry>,
}

impl Desk {
    pub(super) fn new() -> Self {
        Self {
            reader: None,
            topics: HashMap::new(),
            generation: 0,
            lanes: Default::default(),
            waiting_rows: 0,
            waiting_bytes: 0,
        }
    }

    /// Takes over partitions, paused.
    pub(super) fn assign(&mut self, places: &[TopicPartition], now: Instant) {
        self.generation += 1;
        let mut loads = [0_usize; LANES];
        self.all().for_each(|(_, owned)| loads[owned.lane] += 1);
        for (topic, partition) in places {
            let lane = (0..LANES).min_by_key(|lane| loads[*lane]).unwrap_or_default();
            loads[lane] += 1;
            let owned = Owned {
                topic: Arc::clone(topic),
                generation: self.generation,
                lane,
                standing: Standing::New { ask_at: now },
                is_paused: true,
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
        let places: HashSet<&TopicPartition> = places.iter().collect();
        for lane in &mut self.lanes {
            lane.waiting.retain(|waiting| !places.contains(&waiting.place));
        }
        self.waiting_rows = self.lanes.iter().map(|lane| lane.waiting.len()).sum();
        self.waiting_bytes = self.lanes.iter().flat_map(|lane| &lane.waiting).map(|waiting| waiting.size_bytes).sum();
    }

    pub(super) fn places(&self) -> Vec<TopicPartition> {
        self.all().map(|(place, _)| place).collect()
    }

    pub(super) fn is_writing_any_of(&self, places: &[TopicPartition]) -> bool {
        let places: HashSet<&TopicPartition> = places.iter().collect();
        self.lanes.iter().flat_map(|lane| lane.writing.iter().flatten()).any(|end| places.contains(&end.place))
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
        let waiting = self.lanes.iter().flat_map(|lane| lane.waiting.iter().map(|waiting| &waiting.place));
        let writing = self.lanes.iter().flat_map(|lane| lane.writing.iter().flatten().map(|end| &end.place));
        waiting.chain(writing).cloned().collect()
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
        let (lane, place) = (owned.lane, (Arc::clone(&owned.topic), partition));
        let (row, size_bytes) = row.map_or((None, 0), |(row, size_bytes)| (Some(row), size_bytes));
        self.lanes[lane].waiting.push_back(Waiting { place, at, row, size_bytes });
        self.waiting_rows += 1;
        self.waiting_bytes += size_bytes;
    }

    pub(super) fn is_full(&self, limits: &Limits) -> bool {
        self.waiting_rows >= limits.accept_queue_rows || self.waiting_bytes >= limits.accept_queue_bytes
    }

    /// Whether there is room again, after the desk was full.
    pub(super) fn has_room(&self, limits: &Limits) -> bool {
        self.waiting_rows <= limits.accept_queue_rows / 2 && self.waiting_bytes <= limits.accept_queue_bytes / 2
    }

    /// The next batch of a lane; `None` when nothing waits or one is under way.
    pub(super) fn next_batch(&mut self, lane: usize, limits: &Limits) -> Option<Batch> {
        if self.lanes[lane].writing.is_some() || self.lanes[lane].waiting.is_empty() {
            return None;
        }
        let reader = Arc::clone(self.reader.as_ref()?);
        let mut ends: HashMap<TopicPartition, At> = HashMap::new();
        let mut rows = Vec::new();
        let mut size_bytes = 0;
        let waiting = &mut self.lanes[lane].waiting;
        while let Some(next) = waiting.front() {
            let is_full =
                rows.len() >= limits.accept_batch_rows || size_bytes + next.size_bytes > limits.accept_batch_bytes;
            if is_full && !rows.is_empty() {
                break;
            }
            let Some(next) = waiting.pop_front() else { break };
            size_bytes += next.size_bytes;
            self.waiting_rows -= 1;
            rows.extend(next.row);
            ends.insert(next.place, next.at);
        }
        self.waiting_bytes -= size_bytes;
        let mut ledger = Vec::with_capacity(ends.len());
        let mut writing = Vec::with_capacity(ends.len());
        for (place, last) in ends {
            let next_offset = last.offset + 1;
            // What waits is of partitions that are owned and have begun.
            let Some(owned) = self.get(&place.0, place.1) else { continue };
            ledger.push(LedgerEntry {
                reader: Arc::clone(&reader),
                topic: Arc::clone(&place.0),
                partition: place.1,
                from_offset: owned.stored.unwrap_or_default(),
                next_offset,
                leader_epoch: last.epoch,
            });
            writing.push(End { generation: owned.generation, place, next_offset });
        }
        self.lanes[lane].writing = Some(writing);
        Some(Batch { rows, ledger })
    }

    /// The lane's batch is stored. Its offsets may be committed where the partition is still the same assignment; returns the partitions
    /// whose ledger was not where it should have been. What waits of those is dropped, and they find their position anew.
    pub(super) fn written(&mut self, lane: usize, moves: &[LedgerMove], now: Instant) -> Vec<TopicPartition> {
        let mut behind = Vec::new();
        for (end, step) in self.lanes[lane].writing.take().into_iter().flatten().zip(moves) {
            let Some(owned) = self.get_mut(&end.place.0, end.place.1) else { continue };
            if owned.generation != end.generation {
                continue;
            }
            match step {
                LedgerMove::Moved => owned.stored = Some(end.next_offset),
                LedgerMove::Behind => {
                    owned.standing = Standing::New { ask_at: now };
                    behind.push(end.place);
                }
            }
        }
        if !behind.is_empty() {
            self.drop_waiting(&behind);
        }
        behind
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

    /// Partitions to pause and to resume, and notes them as such: only what is being read goes on, and only while there is room.
    /// What is resumed comes with the position that is expected next of it.
    pub(super) fn pauses(&mut self, is_open: bool) -> (Vec<TopicPartition>, Vec<(TopicPartition, At)>) {
        let (mut pause, mut resume) = (Vec::new(), Vec::new());
        for (topic, partitions) in &mut self.topics {
            for (&partition, owned) in partitions {
                let wants_pause = !is_open || owned.standing != Standing::Reading;
                if wants_pause != owned.is_paused {
                    owned.is_paused = wants_pause;
                    let place = (Arc::clone(topic), partition);
                    match wants_pause {
                        true => pause.push(place),
                        false => resume.push((place, At { offset: owned.next_offset, epoch: owned.epoch })),
                    }
                }
            }
        }
        (pause, resume)
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
