//! Decides from which id on a slot is read. Pure.
//!
//! Sent records do not wait any longer, but while an old snapshot is open the index keeps their entries, and each read
//! would skip over all of them. So a read begins at a floor: below it no record waits, and none can appear.
//!
//! An open transaction may hold a record with a lower id than one that was already sent. Its transaction number was
//! assigned before the id. So when a read has seen an id, every record with a lower id belongs to a transaction whose
//! number is lower than that of any transaction that began to write after the read: marking the records as sent is one.
//! Once the marking and all transactions before it have ended, a read from the old floor shows all records up to that
//! id, and the floor can be raised. The snapshot of the read itself gives no such number: its upper end is only the
//! number after the latest one that has ended. Records that an operator sends again are below the floor, so all floors
//! are dropped every ten seconds.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::store::outbound::Outgoing;

/// How often reads start from the beginning.
const DROP_EVERY: Duration = Duration::from_secs(10);

/// The floor of each slot.
#[derive(Debug)]
pub(super) struct Floors {
    slots: HashMap<i16, Floor>,
    dropped_at: Instant,
}

/// The floor of one slot.
#[derive(Debug, Clone, Copy)]
struct Floor {
    /// Reads begin at this id.
    from: i64,
    /// The read that may raise the floor once the transactions of that time have ended.
    seen: Option<Seen>,
}

/// The highest id of a read, and the number of a transaction that was assigned after it.
#[derive(Debug, Clone, Copy)]
struct Seen {
    id: i64,
    /// `None` until records were marked after the read.
    later_transaction: Option<i64>,
}

impl Floors {
    pub(super) fn new(now: Instant) -> Self {
        Self { slots: HashMap::new(), dropped_at: now }
    }

    /// Removes all floors: reads start from the beginning again.
    pub(super) fn drop_all(&mut self, now: Instant) {
        self.slots.clear();
        self.dropped_at = now;
    }

    /// Where a read of the slot begins.
    pub(super) fn of(&mut self, slot: i16, now: Instant) -> i64 {
        if now.saturating_duration_since(self.dropped_at) >= DROP_EVERY {
            self.drop_all(now);
        }
        self.slots.get(&slot).map_or(i64::MIN, |floor| floor.from)
    }

    /// Takes over a read that returned these records, in the order of slots and ids, when all transactions with a lower
    /// number than `oldest_open` had ended. Must not be called for a read that left out records of some topics.
    pub(super) fn note_read(&mut self, rows: &[Outgoing], oldest_open: i64) {
        let mut rest = rows;
        while let Some(first) = rest.first() {
            let length = rest.iter().take_while(|row| row.slot == first.slot).count();
            let (of_slot, behind) = rest.split_at(length);
            rest = behind;
            let highest = of_slot.last().map_or(first.id, |row| row.id);
            let floor = self.slots.entry(first.slot).or_insert(Floor { from: i64::MIN, seen: None });
            if let Some(Seen { id, later_transaction: Some(later) }) = floor.seen
                && oldest_open >= later
            {
                floor.from = floor.from.max(first.id.min(id.saturating_add(1)));
                floor.seen = None;
            }
            floor.seen.get_or_insert(Seen { id: highest, later_transaction: None });
        }
    }

    /// Takes over that records were marked, in a transaction whose number was assigned after all reads so far.
    pub(super) fn note_marked(&mut self, transaction: i64) {
        for seen in self.slots.values_mut().filter_map(|floor| floor.seen.as_mut()) {
            seen.later_transaction.get_or_insert(transaction);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Headers;

    fn rows(ids: &[i64]) -> Vec<Outgoing> {
        let row = |&id: &i64| Outgoing {
            id,
            slot: 3,
            topic: "t".into(),
            recorded_at: None,
            key: None,
            headers: Headers::default(),
            payload: None,
        };
        ids.iter().map(row).collect()
    }

    #[test]
    fn a_floor_is_raised_only_when_all_transactions_of_the_earlier_scan_have_ended() {
        let now = Instant::now();
        let mut floors = Floors::new(now);
        // Transaction 90 is open and may hold a record with id 9.
        floors.note_read(&rows(&[10, 11]), 90);
        floors.note_marked(100);
        assert_eq!(floors.of(3, now), i64::MIN);
        floors.note_read(&rows(&[12]), 90);
        floors.note_marked(110);
        assert_eq!(floors.of(3, now), i64::MIN, "transaction 90 is still open");
        // It has committed: its record is seen, and becomes the floor.
        floors.note_read(&rows(&[9, 13]), 105);
        floors.note_marked(120);
        assert_eq!(floors.of(3, now), 9);
        floors.note_read(&rows(&[14, 15]), 130);
        floors.note_marked(131);
        assert_eq!(floors.of(3, now), 14, "everything up to 13 was seen");
        floors.note_read(&rows(&[40]), 140);
        assert_eq!(floors.of(3, now), 16, "records between 15 and 40 may still appear");
    }

    // Transaction 90 may have a record below 10, although all transactions below 90 had ended at the time of the read.
    #[test]
    fn a_floor_is_not_raised_before_records_were_marked_after_the_read() {
        let now = Instant::now();
        let mut floors = Floors::new(now);
        floors.note_marked(80);
        floors.note_read(&rows(&[10]), 90);
        floors.note_read(&rows(&[10, 11]), 90);
        assert_eq!(floors.of(3, now), i64::MIN);
        floors.note_marked(95);
        floors.note_read(&rows(&[11]), 90);
        assert_eq!(floors.of(3, now), i64::MIN, "transaction 90 is still open");
        floors.note_read(&rows(&[9, 11]), 96);
        assert_eq!(floors.of(3, now), 9);
    }

    #[test]
    fn each_slot_has_its_own_floor_and_floors_are_dropped_periodically() {
        let now = Instant::now();
        let mut floors = Floors::new(now);
        floors.note_read(&rows(&[10]), 1);
        floors.note_marked(1);
        floors.note_read(&rows(&[11]), 2);
        assert_eq!((floors.of(3, now), floors.of(4, now)), (11, i64::MIN));
        assert_eq!(floors.of(3, now + DROP_EVERY), i64::MIN);
    }
}
