//! From which id on a slot is looked at. Pure.
//!
//! Records that were sent are not waiting any more, but while a snapshot is held somewhere, the index keeps their entries, and each look would
//! pass over all of them. So a look begins at a floor: below it nothing waits, and nothing can come to wait.
//!
//! A transaction that is still open may hold a record with a lower id than one that was sent already. It drew its transaction number before the id.
//! So when a look has seen an id, every record with a lower id is of a transaction whose number was drawn by then; once all of those have
//! ended, a look from the old floor shows everything up to that id that will ever wait, and the floor can be raised. What a person has sent
//! again is below: from time to time all floors are dropped.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::store::outbound::Horizon;
use crate::store::outbound::Outgoing;

/// How often looks begin at the beginning.
const DROP_EVERY: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Floors {
    slots: HashMap<i16, Floor>,
    dropped_at: Instant,
}

#[derive(Debug, Clone, Copy)]
struct Floor {
    from: i64,
    seen: Option<Seen>,
}

/// The highest id of a look, and the first transaction that began after it.
#[derive(Debug, Clone, Copy)]
struct Seen {
    id: i64,
    next_transaction: i64,
}

impl Floors {
    pub(super) fn new(now: Instant) -> Self {
        Self { slots: HashMap::new(), dropped_at: now }
    }

    /// Looks begin at the beginning again.
    pub(super) fn drop_all(&mut self, now: Instant) {
        self.slots.clear();
        self.dropped_at = now;
    }

    /// Where a look at the slot begins.
    pub(super) fn of(&mut self, slot: i16, now: Instant) -> i64 {
        if now.saturating_duration_since(self.dropped_at) >= DROP_EVERY {
            self.drop_all(now);
        }
        self.slots.get(&slot).map_or(i64::MIN, |floor| floor.from)
    }

    /// Takes note of a look that showed these records, in order. Not to be called while records of some topics were left out.
    pub(super) fn looked(&mut self, rows: &[Outgoing], horizon: Horizon) {
        let mut rest = rows;
        while let Some(first) = rest.first() {
            let length = rest.iter().take_while(|row| row.slot == first.slot).count();
            let (of_slot, behind) = rest.split_at(length);
            rest = behind;
            let highest = of_slot.last().map_or(first.id, |row| row.id);
            let floor = self.slots.entry(first.slot).or_insert(Floor { from: i64::MIN, seen: None });
            if let Some(seen) = floor.seen
                && horizon.oldest_open >= seen.next_transaction
            {
                floor.from = floor.from.max(first.id.min(seen.id.saturating_add(1)));
                floor.seen = None;
            }
            floor.seen.get_or_insert(Seen { id: highest, next_transaction: horizon.next });
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

    fn at(oldest_open: i64, next: i64) -> Horizon {
        Horizon { oldest_open, next }
    }

    #[test]
    fn a_floor_is_raised_only_when_all_transactions_of_the_earlier_look_have_ended() {
        let now = Instant::now();
        let mut floors = Floors::new(now);
        // Transaction 90 is open and may hold a record with the id 9.
        floors.looked(&rows(&[10, 11]), at(90, 100));
        assert_eq!(floors.of(3, now), i64::MIN);
        floors.looked(&rows(&[12]), at(90, 110));
        assert_eq!(floors.of(3, now), i64::MIN, "transaction 90 is still open");
        // It has committed: its record is seen, and is the floor.
        floors.looked(&rows(&[9, 13]), at(105, 120));
        assert_eq!(floors.of(3, now), 9);
        floors.looked(&rows(&[14, 15]), at(130, 130));
        assert_eq!(floors.of(3, now), 14, "everything up to 13 was seen");
        floors.looked(&rows(&[40]), at(140, 140));
        assert_eq!(floors.of(3, now), 16, "what is between 15 and 40 may still come");
    }

    #[test]
    fn other_slots_have_other_floors_and_all_are_dropped_now_and_then() {
        let now = Instant::now();
        let mut floors = Floors::new(now);
        floors.looked(&rows(&[10]), at(1, 1));
        floors.looked(&rows(&[11]), at(2, 2));
        assert_eq!((floors.of(3, now), floors.of(4, now)), (11, i64::MIN));
        assert_eq!(floors.of(3, now + DROP_EVERY), i64::MIN);
    }
}
