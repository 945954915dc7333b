//! Concurrent batches, in every order of events: the stored records are a prefix of each partition, and so are those
//! that may be committed.

use proptest::prelude::*;

use super::*;
use crate::store::ledger::LedgerEntry;

fn small() -> Limits {
    Limits::default().accept_batch_rows(3).accept_queue_rows(100)
}

/// Reads the next `count` records of a partition. A handler wants each of them, so a batch is bounded.
fn read_more(assigned: &mut AssignedPartitions, partition: i32, count: usize) {
    for _ in 0..count {
        let Some(next) = assigned.get("t", partition).map(|owned| owned.next_offset) else { return };
        if assigned.expects(("t", partition), at(next), Instant::now(), || Some(0)) == Expected::Yes {
            assigned.take_in(("t", partition), at(next), Some((row(), 1)));
        }
    }
}

fn row() -> Row {
    let record = crate::types::Record::new("t");
    Row::Quarantine(Box::new(crate::store::seam::Quarantined { record, reason: "a test", detail: None }))
}

/// Where a batch of one partition begins and ends, and whether it follows another.
fn span(batch: &Batch) -> (i32, i64, i64, bool) {
    let [entry] = &*batch.ledger else { panic!("a batch of {} partitions", batch.ledger.len()) };
    (entry.partition, entry.from_offset, entry.next_offset, batch.is_following)
}

fn end(assigned: &mut AssignedPartitions, batch: &Batch) {
    assigned.written(batch.id, &moved(batch), Instant::now());
}

#[test]
fn a_hot_partition_has_batches_one_after_the_other_under_way_and_leaves_a_lane_for_others() {
    let mut assigned = assigned(&[0, 1]);
    read_more(&mut assigned, 0, 20);
    let batches: Vec<Batch> = (0..LANES).filter_map(|lane| assigned.next_batch(lane, &small())).collect();
    let spans: Vec<_> = batches.iter().map(span).collect();
    assert_eq!(spans, [(0, 0, 3, false), (0, 3, 6, true), (0, 6, 9, true)]);

    read_more(&mut assigned, 1, 1);
    let other = assigned.next_batch(3, &small()).unwrap();
    assert_eq!(span(&other), (1, 0, 1, false));
}

#[test]
fn less_than_a_batch_waits_until_the_batch_under_way_has_ended() {
    let mut assigned = assigned(&[0]);
    read_more(&mut assigned, 0, 5);
    let first = assigned.next_batch(0, &small()).unwrap();
    assert!(assigned.next_batch(1, &small()).is_none());
    end(&mut assigned, &first);
    assert_eq!(span(&assigned.next_batch(1, &small()).unwrap()), (0, 3, 5, false));
}

#[test]
fn a_topic_in_order_has_one_batch_of_a_partition_under_way() {
    let mut assigned = begun(AssignedPartitions::new(LANES, Box::new(|topic| topic == "t")), &[0, 1]);
    read_more(&mut assigned, 0, 20);
    read_more(&mut assigned, 1, 20);
    let batches: Vec<Batch> = (0..LANES).filter_map(|lane| assigned.next_batch(lane, &small())).collect();
    assert_eq!(batches.iter().map(span).collect::<Vec<_>>(), [(0, 0, 3, false), (1, 0, 3, false)]);
    end(&mut assigned, &batches[0]);
    assert_eq!(span(&assigned.next_batch(2, &small()).unwrap()), (0, 3, 6, false));
}

#[test]
fn who_was_served_longest_ago_is_served_first() {
    let mut assigned = begun(AssignedPartitions::new(1, Box::new(|_| false)), &[0, 1, 2]);
    (0..3).for_each(|partition| read_more(&mut assigned, partition, 9));
    let mut served = Vec::new();
    for _ in 0..6 {
        let batch = assigned.next_batch(0, &small()).unwrap();
        served.push(span(&batch).0);
        end(&mut assigned, &batch);
    }
    let (first, second) = served.split_at(3);
    assert_eq!(first, second);
    assert_eq!(first.iter().collect::<HashSet<_>>().len(), 3);
}

#[test]
fn the_turn_of_a_batch_comes_when_the_earlier_ones_of_its_partitions_have_ended() {
    let mut assigned = assigned(&[0, 1]);
    read_more(&mut assigned, 0, 9);
    read_more(&mut assigned, 1, 3);
    let [first, other, second] = [0, 1, 2].map(|lane| assigned.next_batch(lane, &small()).unwrap());
    assert_eq!([&first, &other, &second].map(|batch| span(batch).0), [0, 1, 0]);
    assert_eq!([&first, &other, &second].map(|batch| assigned.is_first(batch.id)), [true, true, false]);
    end(&mut assigned, &other);
    assert!(!assigned.is_first(second.id));
    end(&mut assigned, &first);
    assert!(assigned.is_first(second.id));
}

// Both batches are committed; their replies arrive on two connections, in any order.
#[test]
fn a_batch_that_follows_may_be_heard_of_first() {
    let mut assigned = assigned(&[0]);
    read_more(&mut assigned, 0, 6);
    let [first, second] = [0, 1].map(|lane| assigned.next_batch(lane, &small()).unwrap());
    end(&mut assigned, &second);
    assert_eq!(assigned.to_commit(), [(place(0), 6)]);
    end(&mut assigned, &first);
    assert_eq!(assigned.to_commit(), [(place(0), 6)]);
}

#[test]
fn a_position_is_found_anew_only_when_all_batches_of_the_partition_have_ended() {
    let mut assigned = assigned(&[0]);
    let now = Instant::now();
    read_more(&mut assigned, 0, 9);
    let [first, second] = [0, 1].map(|lane| assigned.next_batch(lane, &small()).unwrap());
    assigned.written(first.id, &[LedgerMove::Unwritten], now);
    assert_eq!(assigned.ask(now), []);
    assigned.written(second.id, &[LedgerMove::Unwritten], now);
    assert_eq!(assigned.ask(now).len(), 1);
    assert_eq!(assigned.to_commit(), []);
    assigned.begin(&place(0), at(1));
    read_more(&mut assigned, 0, 1);
    assert_eq!(span(&assigned.next_batch(0, &small()).unwrap()), (0, 1, 2, false));
}

// A batch is written whole or not at all: the ledger of one partition is behind, that of the other is not.
#[test]
fn a_partition_beside_one_whose_ledger_is_behind_is_read_again() {
    let mut assigned = begun(AssignedPartitions::new(1, Box::new(|_| false)), &[0, 1]);
    let now = Instant::now();
    (0..2).for_each(|partition| read_more(&mut assigned, partition, 1));
    let batch = assigned.next_batch(0, &small()).unwrap();
    assert_eq!(batch.ledger.len(), 2);
    assigned.written(batch.id, &[LedgerMove::Unwritten; 2], now);
    assert_eq!(assigned.ask(now).len(), 2);
    assert_eq!(assigned.to_commit(), []);
}

#[derive(Debug, Clone)]
enum Step {
    Read(i32, usize),
    Batch(usize),
    /// The database handles the n-th batch that was sent.
    Try(usize),
    /// The answer for the n-th written batch arrives.
    Heard(usize),
    Revoke(i32),
    Assign(i32),
    /// The database loses the last two offsets of a partition.
    SetBack(i32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4i32, 1..8usize).prop_map(|(partition, count)| Step::Read(partition, count)),
        6 => (0..LANES).prop_map(Step::Batch),
        6 => (0..LANES).prop_map(Step::Try),
        6 => (0..LANES).prop_map(Step::Heard),
        1 => (0..4i32).prop_map(Step::Revoke),
        1 => (0..4i32).prop_map(Step::Assign),
        1 => (0..4i32).prop_map(Step::SetBack),
    ]
}

/// A model of the database: it stores a prefix of each partition, and the ledger is its length.
#[derive(Default)]
struct Database {
    ledger: [i64; 4],
}

impl Database {
    fn ledger(&mut self, partition: i32) -> &mut i64 {
        &mut self.ledger[usize::try_from(partition).unwrap()]
    }

    /// Like the stores: a batch is written whole, if the ledger of each of its partitions is there, or not at all.
    /// Returns `None` if it has to be sent again after the one that it follows.
    fn write(&mut self, batch: &Batch, is_first: bool) -> Option<Vec<LedgerMove>> {
        let is_there =
            |database: &mut Self, entry: &LedgerEntry| *database.ledger(entry.partition) >= entry.from_offset;
        let is_written = batch.ledger.iter().all(|entry| is_there(self, entry));
        if batch.is_following && !is_first && !is_written {
            return None;
        }
        let step = |entry: &LedgerEntry| {
            if !is_written {
                return LedgerMove::Unwritten;
            }
            let ledger = self.ledger(entry.partition);
            *ledger = entry.next_offset.max(*ledger);
            LedgerMove::Moved
        };
        Some(batch.ledger.iter().map(step).collect())
    }
}

/// Whether the reply to a batch of the partition is pending.
fn holds(written: &[(Batch, Vec<LedgerMove>)], partition: i32) -> bool {
    written.iter().flat_map(|(batch, _)| &batch.ledger).any(|entry| entry.partition == partition)
}

proptest! {
    // In whatever order batches are written and replies arrive: each batch begins where the last one ended, and only
    // stored records are committed.
    #[test]
    fn what_may_be_committed_is_a_prefix_of_what_is_stored(steps in prop::collection::vec(step(), 1..200)) {
        let mut assigned = assigned(&[0, 1, 2, 3]);
        let now = Instant::now();
        let mut database = Database::default();
        let mut sent: Vec<(usize, Batch)> = Vec::new();
        let mut written: Vec<(Batch, Vec<LedgerMove>)> = Vec::new();
        for step in steps {
            match step {
                Step::Read(partition, count) => read_more(&mut assigned, partition, count),
                Step::Batch(lane) => {
                    if let Some(batch) = assigned.next_batch(lane, &small()) {
                        for entry in &batch.ledger {
                            let ends = sent.iter().map(|(_, batch)| batch).chain(written.iter().map(|(batch, _)| batch));
                            let ends = ends.flat_map(|batch| &batch.ledger).filter(|end| end.partition == entry.partition);
                            let last = ends.map(|end| end.next_offset).max();
                            prop_assert!(last.is_none() || batch.is_following);
                            prop_assert!(last.is_none_or(|last| last <= entry.from_offset));
                        }
                        sent.push((lane, batch));
                    }
                }
                Step::Try(number) if number < sent.len() => {
                    let is_first = assigned.is_first(sent[number].1.id);
                    if let Some(moves) = database.write(&sent[number].1, is_first) {
                        written.push((sent.remove(number).1, moves));
                    }
                }
                Step::Heard(number) if number < written.len() => {
                    let (batch, moves) = written.remove(number);
                    assigned.written(batch.id, &moves, now);
                }
                Step::Revoke(partition) => assigned.revoke(&[place(partition)]),
                Step::Assign(partition) => {
                    if assigned.get("t", partition).is_none() {
                        assigned.assign(&[place(partition)], now);
                    }
                }
                // Not while the reply to a committed batch is pending: it would report records as stored that are lost
                // by then.
                Step::SetBack(partition) if !holds(&written, partition) => {
                    let ledger = database.ledger(partition);
                    *ledger = (*ledger - 2).max(0);
                    let stored = assigned.get("t", partition).and_then(|owned| owned.stored);
                    // Stored and committed records are lost: `watch.rs` detects it, and the position is determined
                    // again.
                    if stored.is_some_and(|stored| stored > *ledger) {
                        assigned.revoke(&[place(partition)]);
                    }
                }
                Step::Try(_) | Step::Heard(_) | Step::SetBack(_) => {}
            }
            for asked in assigned.ask(now) {
                assigned.begin(&asked.place, at(*database.ledger(asked.place.1)));
            }
            for ((_, partition), offset) in assigned.to_commit() {
                prop_assert!(offset <= *database.ledger(partition));
            }
            let waiting = assigned.all().fold(Load::default(), |sum, (_, owned)| {
                let Load { rows, bytes } = owned.waiting.load();
                Load { rows: sum.rows + rows, bytes: sum.bytes + bytes }
            });
            prop_assert_eq!(waiting, assigned.waiting);
        }
    }
}
