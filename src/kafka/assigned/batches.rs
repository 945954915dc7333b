//! Batches: what the next one contains, whether it follows another, and what changes when one has ended.
//!
//! A lane writes one batch at a time, first of its own partitions, so that concurrent batches have different
//! partitions. An idle lane takes partitions of other lanes, or the next batch of a partition with more than a batch
//! waiting: that batch follows the one that is being written. The partition that was served longest ago comes first.

use std::sync::Arc;
use std::time::Instant;

use super::parts::{BatchEnd, Owned, PartitionQueue, PartitionState, UnderWay};
use super::room::Load;
use super::{AssignedPartitions, At, TopicPartition};
use crate::accept::Row;
use crate::store::ledger::{LedgerEntry, LedgerMove};
use crate::types::Limits;

/// A batch to write.
pub(in crate::kafka) struct Batch {
    /// Of two batches of a partition, the later one has the greater id.
    pub(in crate::kafka) id: u64,
    /// The messages and quarantined records. Records that no handler wants have no row.
    pub(in crate::kafka) rows: Vec<Row>,
    /// One entry per partition: from where to where its ledger moves.
    pub(in crate::kafka) ledger: Vec<LedgerEntry>,
    /// An earlier batch of its partition is being written.
    pub(in crate::kafka) is_following: bool,
}

impl AssignedPartitions {
    /// The next batch of a lane; `None` when there is nothing to write, or the lane is writing one.
    pub(in crate::kafka) fn next_batch(&mut self, lane: usize, limits: &Limits) -> Option<Batch> {
        if self.waiting.rows == 0 || self.under_way.values().any(|batch| batch.lane == lane) {
            return None;
        }
        let reader = Arc::clone(self.reader.as_ref()?);
        let chosen = self.choose(lane, limits);
        if chosen.is_empty() {
            return None;
        }
        self.last_batch += 1;
        let id = self.last_batch;
        let mut batch = Batch { id, rows: Vec::new(), ledger: Vec::new(), is_following: false };
        let (mut size_bytes, mut ends) = (0, Vec::new());
        for place in chosen {
            // `self.get_mut` would borrow all of `self`, and `self.waiting` is changed below.
            let owned = self.topics.get_mut(&place.0).and_then(|partitions| partitions.get_mut(&place.1));
            let Some(owned) = owned else { continue };
            let before = owned.waiting.load();
            let last = fill(&mut batch.rows, &mut size_bytes, &mut owned.waiting, limits);
            let Load { rows, bytes } = owned.waiting.load();
            self.waiting.rows -= before.rows - rows;
            self.waiting.bytes -= before.bytes - bytes;
            // The batch is full: this partition and the following ones wait for the next batch.
            let Some(last) = last else { break };
            let next_offset = last.offset + 1;
            batch.is_following |= owned.under_way > 0;
            batch.ledger.push(LedgerEntry {
                reader: Arc::clone(&reader),
                topic: Arc::clone(&place.0),
                partition: place.1,
                from_offset: owned.sent,
                next_offset,
                leader_epoch: last.epoch,
            });
            owned.sent = next_offset;
            owned.under_way += 1;
            owned.last_batch = id;
            ends.push(BatchEnd { generation: owned.generation, place, next_offset });
        }
        self.under_way.insert(id, UnderWay { lane, ends });
        Some(batch)
    }

    /// The partitions of a lane's next batch, in the order in which they are served. Empty when nothing can be written
    /// now.
    fn choose(&self, lane: usize, limits: &Limits) -> Vec<TopicPartition> {
        let is_free = |owned: &Owned| owned.waiting.front().is_some() && owned.under_way == 0;
        let of = |wanted: &dyn Fn(&Owned) -> bool| {
            let mut found: Vec<(u64, TopicPartition)> = Vec::new();
            for (topic, partitions) in &self.topics {
                let wanted = partitions.iter().filter(|(_, owned)| wanted(owned));
                found.extend(wanted.map(|(&partition, owned)| (owned.last_batch, (Arc::clone(topic), partition))));
            }
            found.sort_unstable();
            found.into_iter().map(|(_, place)| place).collect::<Vec<_>>()
        };
        let own = of(&|owned| owned.lane == lane && is_free(owned));
        if !own.is_empty() {
            return own;
        }
        let others = of(&is_free);
        if !others.is_empty() {
            return others;
        }
        // With three lanes or more, the last one is reserved for partitions that have no batch under way: a partition
        // with many records must not delay the others.
        if self.under_way.len() >= (self.lanes - 1).max(2) {
            return Vec::new();
        }
        let batch = Load::of_batch(limits);
        let mut full = of(&|owned| !owned.is_in_order && owned.waiting.load().reaches(batch));
        full.truncate(1);
        full
    }

    /// Whether no earlier batch of the same partitions is being written.
    pub(in crate::kafka) fn is_first(&self, id: u64) -> bool {
        let Some(batch) = self.under_way.get(&id) else { return true };
        let earlier = self.under_way.range(..id).flat_map(|(_, earlier)| &earlier.ends);
        earlier.into_iter().all(|end| batch.ends.iter().all(|own| own.place != end.place))
    }

    /// Called when a batch is stored. Its offsets may be committed if the assignment is still the same. If it was not
    /// written whole, the waiting records of its partitions are dropped, and their positions are determined again, which shows
    /// which of their ledgers was behind, and why.
    pub(in crate::kafka) fn written(&mut self, id: u64, moves: &[LedgerMove], now: Instant) {
        let mut unwritten = Vec::new();
        let ends = self.under_way.remove(&id).map(|batch| batch.ends);
        for (end, step) in ends.into_iter().flatten().zip(moves) {
            let Some(owned) = self.get_mut(&end.place.0, end.place.1) else { continue };
            if owned.generation != end.generation {
                continue;
            }
            owned.under_way -= 1;
            match step {
                // Answers may come in any order. A following batch is stored only after the one before it, so the
                // highest offset counts.
                LedgerMove::Moved => owned.stored = owned.stored.max(Some(end.next_offset)),
                LedgerMove::Unwritten => {
                    owned.state = PartitionState::New { ask_at: now };
                    unwritten.push(end.place);
                }
            }
        }
        if !unwritten.is_empty() {
            self.drop_waiting(&unwritten);
        }
    }
}

/// Moves records into a batch until it is full; returns the position of the last one that was moved. A record that is
/// larger than a batch is sent alone.
fn fill(rows: &mut Vec<Row>, size_bytes: &mut usize, waiting: &mut PartitionQueue, limits: &Limits) -> Option<At> {
    let mut last = None;
    while let Some(next) = waiting.front() {
        let is_full =
            rows.len() >= limits.accept_batch_rows || *size_bytes + next.size_bytes > limits.accept_batch_bytes;
        if is_full && !rows.is_empty() {
            break;
        }
        let Some(next) = waiting.pop() else { break };
        *size_bytes += next.size_bytes;
        rows.extend(next.row);
        last = Some(next.at);
    }
    last
}
