//! A batch on its way into the store, and the parts in which it is written when the database refuses some of its rows.
//!
//! Each part moves the ledger to its own end. So rows and ledger move together also when a batch is halved: a process
//! that crashes between two parts reads none of the first again, and a database that loses the first part refuses the
//! second.

use std::ops::Range;
use std::sync::Arc;

use crate::store::ledger::{LedgerEntry, LedgerMove};
use crate::store::seam::{Few, Quarantined};
use crate::types::{Position, Receipt, StoredMessage};

/// A record on its way into the store.
pub(crate) enum Row {
    Message { message: Arc<StoredMessage>, payload_hash: [u8; 16], wanted_by: Few<usize> },
    Quarantine(Box<Quarantined>),
}

/// A batch, or a part of one, with the moves of the ledger.
#[derive(Clone, Copy)]
pub(crate) struct RowBatch<'a> {
    pub(crate) rows: &'a [Row],
    pub(crate) ledger: &'a [LedgerEntry],
    /// An earlier try may have stored the batch, with claimed deliveries.
    pub(crate) is_in_doubt: bool,
}

/// The results of a written batch, in its order. Without receipts if it was not written whole because of the ledger.
#[derive(Default)]
pub(crate) struct WrittenBatch {
    pub(crate) receipts: Vec<Receipt>,
    pub(crate) ledger: Vec<LedgerMove>,
}

/// Where the ledger is between the parts of a batch, which are written in order.
pub(super) struct PartLedger<'a> {
    batch: RowBatch<'a>,
    /// One for each entry of the batch.
    from_offsets: Vec<i64>,
}

impl<'a> PartLedger<'a> {
    pub(super) fn new(batch: RowBatch<'a>) -> Self {
        Self { batch, from_offsets: batch.ledger.iter().map(|entry| entry.from_offset).collect() }
    }

    /// The entries for the next part. A partition that has no row in it is only checked.
    pub(super) fn of(&self, part: &Range<usize>) -> Vec<LedgerEntry> {
        let entries = self.batch.ledger.iter().zip(&self.from_offsets);
        let entry = |(entry, &from_offset): (&LedgerEntry, &i64)| {
            let entry = LedgerEntry { from_offset, ..entry.clone() };
            if part.end == self.batch.rows.len() {
                return entry;
            }
            let offsets = self.batch.rows[part.clone()].iter().filter_map(|row| row.offset_in(&entry));
            match offsets.max() {
                Some(last) => LedgerEntry { next_offset: last + 1, leader_epoch: None, ..entry },
                None => entry.check(),
            }
        };
        entries.map(entry).collect()
    }

    /// Called when a part was written with these entries.
    pub(super) fn written(&mut self, entries: &[LedgerEntry]) {
        for (from_offset, entry) in self.from_offsets.iter_mut().zip(entries) {
            *from_offset = entry.next_offset.max(*from_offset);
        }
    }
}

impl Row {
    /// The offset of the record, if it is of this partition.
    fn offset_in(&self, entry: &LedgerEntry) -> Option<i64> {
        let (topic, position) = match self {
            Self::Message { message, .. } => (&message.topic, message.position),
            Self::Quarantine(quarantined) => (&quarantined.record.topic, quarantined.record.position),
        };
        let Position { partition, offset } = position?;
        (partition == entry.partition && *topic == entry.topic).then_some(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ledger::Reader;
    use crate::types::Record;

    fn row(partition: i32, offset: i64) -> Row {
        let record = Record { position: Some(Position { partition, offset }), ..Record::new("t") };
        Row::Quarantine(Box::new(Quarantined { record, reason: "no identity", detail: None }))
    }

    fn entry(partition: i32, from_offset: i64, next_offset: i64) -> LedgerEntry {
        let reader = Arc::new(Reader { group: "g".into(), cluster_id: "c".into() });
        LedgerEntry { reader, topic: "t".into(), partition, from_offset, next_offset, leader_epoch: Some(3) }
    }

    fn told(entries: &[LedgerEntry]) -> Vec<(i32, i64, i64, Option<i32>)> {
        let told = |entry: &LedgerEntry| (entry.partition, entry.from_offset, entry.next_offset, entry.leader_epoch);
        entries.iter().map(told).collect()
    }

    #[test]
    fn each_part_moves_the_ledger_from_the_end_of_the_part_before_to_its_own() {
        let rows = [row(0, 10), row(1, 7), row(0, 12), row(0, 13)];
        // Offsets without rows belong to records that no handler wants.
        let ledger = [entry(0, 10, 20), entry(1, 5, 8)];
        let mut parts = PartLedger::new(RowBatch { rows: &rows, ledger: &ledger, is_in_doubt: false });
        assert_eq!(told(&parts.of(&(0..4))), told(&ledger));

        let first = parts.of(&(0..1));
        assert_eq!(told(&first), [(0, 10, 11, None), (1, 5, 4, None)]);
        parts.written(&first);
        let second = parts.of(&(1..3));
        assert_eq!(told(&second), [(0, 11, 13, None), (1, 5, 8, None)]);
        parts.written(&second);
        assert_eq!(told(&parts.of(&(3..4))), [(0, 13, 20, Some(3)), (1, 8, 8, Some(3))]);
    }
}
