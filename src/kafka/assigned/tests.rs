//! The assigned partitions: what is taken in, what is committed, and when a position is determined again. Batches and
//! room have their own files.

mod decoding;
mod prefix;
mod room;

use super::*;
use crate::store::ledger::{BEGINNING, LedgerMove, LedgerRow};
use crate::types::Limits;

fn place(partition: i32) -> TopicPartition {
    (Arc::from("t"), partition)
}

/// Batches that are written at a time, as by default.
const LANES: usize = 4;

fn new_desk() -> AssignedPartitions {
    AssignedPartitions::new(LANES, Box::new(|_| false))
}

fn assigned(partitions: &[i32]) -> AssignedPartitions {
    begun(new_desk(), partitions)
}

fn begun(mut assigned: AssignedPartitions, partitions: &[i32]) -> AssignedPartitions {
    assigned.read_for(&Arc::new(Reader { group: "g".into(), cluster_id: "c".into() }));
    let now = Instant::now();
    let places: Vec<TopicPartition> = partitions.iter().map(|&partition| place(partition)).collect();
    assigned.assign(&places, now);
    assert_eq!(assigned.ask(now).len(), partitions.len());
    for place in &places {
        assigned.begin(place, at(0));
        assigned.committed("t", place.1, 0);
    }
    assigned
}

/// A position whose record was written under the first leader.
fn at(offset: i64) -> At {
    At { offset, epoch: Some(0) }
}

/// Reads the next record of a partition whose log begins at offset 0. No handler wants it, so it has no row.
fn read(assigned: &mut AssignedPartitions, partition: i32, offset: i64) -> Expected {
    let expected = assigned.expects(("t", partition), at(offset), Instant::now(), || Some(0));
    if expected == Expected::Yes {
        assigned.take_in(("t", partition), at(offset), None);
    }
    expected
}

fn moved(batch: &Batch) -> Vec<LedgerMove> {
    vec![LedgerMove::Moved; batch.ledger.len()]
}

#[test]
fn nothing_is_taken_in_before_the_position_is_found() {
    let mut assigned = new_desk();
    assigned.assign(&[place(0)], Instant::now());
    assert_eq!(read(&mut assigned, 0, 0), Expected::No);
    assert_eq!(read(&mut assigned, 1, 0), Expected::No);
}

#[test]
fn partitions_that_come_one_by_one_are_shared_out_to_the_lanes() {
    let mut assigned = new_desk();
    for partition in 0..8 {
        assigned.assign(&[place(partition)], Instant::now());
    }
    let of_lane = |lane| assigned.all().filter(|(_, owned)| owned.lane == lane).count();
    assert_eq!([0, 1, 2, 3].map(of_lane), [2; LANES]);
}

#[test]
fn only_what_is_stored_is_committed() {
    let mut assigned = assigned(&[0]);
    let limits = Limits::default();
    read(&mut assigned, 0, 0);
    read(&mut assigned, 0, 1);
    let batch = assigned.next_batch(0, &limits).unwrap();
    read(&mut assigned, 0, 2);
    assert_eq!(assigned.to_commit(), []);
    assigned.written(batch.id, &moved(&batch), Instant::now());
    assert_eq!(assigned.to_commit(), [(place(0), 2)]);
    assigned.committed("t", 0, 2);
    assert_eq!(assigned.to_commit(), []);
}

#[test]
fn a_batch_of_an_older_assignment_changes_nothing() {
    let mut assigned = assigned(&[0]);
    read(&mut assigned, 0, 0);
    let batch = assigned.next_batch(0, &Limits::default()).unwrap();
    assigned.revoke(&[place(0)]);
    assigned.assign(&[place(0)], Instant::now());
    assigned.written(batch.id, &moved(&batch), Instant::now());
    assert_eq!(assigned.to_commit(), []);
    assert!(!assigned.is_writing_any_of(&[place(0)]));
}

#[test]
fn a_partition_that_was_sent_back_while_its_record_was_looked_at_takes_nothing_in() {
    let mut assigned = assigned(&[0]);
    read(&mut assigned, 0, 0);
    let batch = assigned.next_batch(0, &Limits::default()).unwrap();
    assert_eq!(assigned.expects(("t", 0), at(1), Instant::now(), || Some(0)), Expected::Yes);
    assigned.written(batch.id, &vec![LedgerMove::Unwritten; batch.ledger.len()], Instant::now());
    assigned.take_in(("t", 0), at(1), None);
    assert!(assigned.next_batch(0, &Limits::default()).is_none());
}

#[test]
fn a_ledger_that_is_behind_sends_the_partition_back() {
    let mut assigned = assigned(&[0]);
    read(&mut assigned, 0, 0);
    let batch = assigned.next_batch(0, &Limits::default()).unwrap();
    read(&mut assigned, 0, 1);
    let now = Instant::now();
    assigned.written(batch.id, &[LedgerMove::Unwritten], now);
    assert_eq!(read(&mut assigned, 0, 2), Expected::No);
    assert!(assigned.next_batch(0, &Limits::default()).is_none());
    let asked = assigned.ask(now);
    assert_eq!(asked[0].stored, Some(0));
}

// A batch may have followed one that was not written: its ledger is not there either, but nothing is lost.
#[test]
fn a_ledger_is_behind_only_if_it_is_before_what_was_stored_and_is_reported_once() {
    let now = Instant::now();
    let row = |next_offset| LedgerRow { next_offset, leader_epoch: None, topic_id: None, stopped: None };
    let mut assigned = assigned(&[0]);
    assigned.begin(&place(0), at(5));
    read(&mut assigned, 0, 5);
    let batch = assigned.next_batch(0, &Limits::default()).unwrap();
    let watched = assigned.watched();
    assigned.written(batch.id, &[LedgerMove::Unwritten], now);
    let asked = assigned.ask(now).pop().unwrap();
    assert_eq!([Some(&row(5)), Some(&row(4)), None].map(|row| asked.is_behind(row)), [false, true, true]);
    assert!(!asked.is_told);

    // The first answer of Kafka is missing.
    assigned.learn(&Asked { is_told: true, ..asked });
    assigned.ask_again(&place(0), now);
    let asked = assigned.ask(now + ASK_AGAIN).pop().unwrap();
    assert!(asked.is_told);
    assigned.begin(&place(0), at(4));
    assert_eq!(assigned.compare(&[(&watched[0], Some(&row(4)), false)], now), []);

    let watched = assigned.watched();
    assert_eq!(assigned.compare(&[(&watched[0], Some(&row(2)), false)], now), [(place(0), true)]);
    assert!(assigned.ask(now).pop().unwrap().is_told);
}

#[test]
fn offsets_may_be_passed_over_by_compaction_but_not_by_deletion_nor_backwards() {
    let now = Instant::now();
    let jump = |offset, low| {
        let mut assigned = assigned(&[0]);
        read(&mut assigned, 0, 0);
        assigned.expects(("t", 0), at(offset), now, || low)
    };
    assert_eq!(jump(1, Some(0)), Expected::Yes);
    assert_eq!(jump(7, Some(1)), Expected::Yes);
    // The beginning of the log is not known: the position is requested again, once.
    assert_eq!(jump(7, None), Expected::OutOfPlace);
    let mut assigned = assigned(&[0]);
    assert_eq!(assigned.expects(("t", 0), at(7), now, || None), Expected::OutOfPlace);
    assigned.begin(&place(0), at(0));
    assert_eq!(assigned.expects(("t", 0), at(7), now, || None), Expected::Yes);
    assert_eq!(jump(7, Some(5)), Expected::OutOfPlace);
    assert_eq!(jump(0, Some(0)), Expected::OutOfPlace);
}

#[test]
fn a_position_is_asked_for_only_when_nothing_of_the_partition_is_on_its_way() {
    let mut assigned = assigned(&[0]);
    let now = Instant::now();
    read(&mut assigned, 0, 0);
    assert_eq!(assigned.expects(("t", 0), at(9), now, || Some(5)), Expected::OutOfPlace);
    assert_eq!(assigned.ask(now), []);
    let batch = assigned.next_batch(0, &Limits::default()).unwrap();
    assert_eq!(assigned.ask(now), []);
    assigned.written(batch.id, &moved(&batch), now);
    assert_eq!(assigned.ask(now).len(), 1);
}

// A record before the expected one that a later leader has written proves that the log was truncated. A record of the
// same leader proves nothing.
#[test]
fn a_step_back_to_a_newer_epoch_is_a_truncation_and_is_remembered_until_a_position_is_found() {
    let now = Instant::now();
    let step_back = |epoch| {
        let mut assigned = assigned(&[0]);
        read(&mut assigned, 0, 0);
        read(&mut assigned, 0, 1);
        let batch = assigned.next_batch(0, &Limits::default()).unwrap();
        assert_eq!(batch.ledger[0].leader_epoch, Some(0));
        assigned.written(batch.id, &moved(&batch), now);
        let record = At { offset: 1, epoch };
        assert_eq!(assigned.expects(("t", 0), record, now, || Some(0)), Expected::OutOfPlace);
        let cut = assigned.ask(now)[0].cut;
        assigned.ask_again(&place(0), now);
        assert_eq!(assigned.ask(now + ASK_AGAIN)[0].cut, cut);
        cut
    };
    assert_eq!(step_back(Some(1)), Some(At { offset: 1, epoch: Some(1) }));
    assert_eq!(step_back(Some(0)), None);
    assert_eq!(step_back(None), None);
}

#[test]
fn a_ledger_that_is_not_where_it_was_left_sends_the_partition_back() {
    let now = Instant::now();
    let row = |next_offset, stopped: Option<&str>| LedgerRow {
        next_offset,
        leader_epoch: Some(0),
        topic_id: None,
        stopped: stopped.map(str::to_owned),
    };
    let compare = |row: Option<LedgerRow>, is_other: bool| {
        let mut assigned = assigned(&[0]);
        read(&mut assigned, 0, 0);
        read(&mut assigned, 0, 1);
        let batch = assigned.next_batch(0, &Limits::default()).unwrap();
        assigned.written(batch.id, &moved(&batch), now);
        let watched = assigned.watched();
        assert_eq!((watched[0].state, watched[0].stored), ("reading", Some(2)));
        let sent_back = assigned.compare(&[(&watched[0], row.as_ref(), is_other)], now);
        assert_eq!(assigned.ask(now).len(), sent_back.len());
        sent_back.into_iter().map(|(_, is_behind)| is_behind).collect::<Vec<_>>()
    };
    assert_eq!(compare(Some(row(2, None)), false), [false; 0]);
    assert_eq!(compare(Some(row(1, None)), false), [true]);
    assert_eq!(compare(None, false), [true]);
    assert_eq!(compare(Some(row(9, None)), false), [false]);
    assert_eq!(compare(Some(row(BEGINNING, None)), false), [false]);
    assert_eq!(compare(Some(row(2, Some("cut"))), false), [false]);
    assert_eq!(compare(Some(row(2, None)), true), [false]);
}

// A reset removes the topic's id and the epoch from the row. A database that has lost commits has a row with one of them.
#[test]
fn a_ledger_that_a_person_has_set_back_is_not_lost_data() {
    let now = Instant::now();
    let none = LedgerRow { next_offset: 5, leader_epoch: None, topic_id: None, stopped: None };
    let after = |before: &LedgerRow, row: LedgerRow| {
        let mut assigned = assigned(&[0]);
        assigned.begin(&place(0), at(5));
        let watched = assigned.watched();
        assert_eq!(assigned.compare(&[(&watched[0], Some(before), false)], now), []);
        assigned.compare(&[(&watched[0], Some(&LedgerRow { next_offset: 2, ..row }), false)], now)
    };
    let with_id = LedgerRow { topic_id: Some("A".to_owned()), ..none.clone() };
    let with_epoch = LedgerRow { leader_epoch: Some(0), ..none.clone() };
    for before in [with_id, with_epoch] {
        assert_eq!(after(&before, before.clone()), [(place(0), true)], "{before:?}");
        assert_eq!(after(&before, none.clone()), [(place(0), false)], "{before:?}");
    }
}

// The ledger is read after the state of the partitions, and batches end in between.
#[test]
fn a_batch_that_ends_while_the_ledger_is_compared_sends_nothing_back() {
    let now = Instant::now();
    let mut assigned = assigned(&[0]);
    let watched = assigned.watched();
    read(&mut assigned, 0, 0);
    let batch = assigned.next_batch(0, &Limits::default()).unwrap();
    let row = LedgerRow { next_offset: 1, leader_epoch: Some(0), topic_id: None, stopped: None };
    assert_eq!(assigned.compare(&[(&watched[0], Some(&row), false)], now), []);
    assigned.written(batch.id, &moved(&batch), now);
    assert_eq!(assigned.compare(&[(&watched[0], Some(&row), false)], now), []);
}

#[test]
fn a_blocked_partition_is_read_again_when_an_operator_has_skipped_its_records() {
    let now = Instant::now();
    let mut assigned = assigned(&[0]);
    assigned.set_blocked(&place(0), "bad checksum");
    let watched = assigned.watched();
    assert_eq!((watched[0].state, watched[0].why.as_deref()), ("blocked", Some("bad checksum")));
    // The position is determined again without a skip: the same records come next.
    assigned.begin(&place(0), at(0));
    assert_eq!(assigned.watched()[0].state, "blocked");
    let skipped = LedgerRow { next_offset: 3, leader_epoch: None, topic_id: None, stopped: None };
    assert_eq!(assigned.compare(&[(&watched[0], Some(&skipped), false)], now), [(place(0), false)]);
    assert_eq!(assigned.ask(now).len(), 1);
    assigned.begin(&place(0), At { offset: 3, epoch: None });
    assert_eq!((assigned.watched()[0].state, assigned.watched()[0].why.as_deref()), ("reading", None));
}
