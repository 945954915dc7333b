//! The desk: what is taken in, what is committed, and when a position is found anew. Batches and room have files of their own.

mod prefix;
mod room;

use super::*;
use crate::store::ledger::{LedgerMove, LedgerRow};
use crate::types::Limits;

fn place(partition: i32) -> TopicPartition {
    (Arc::from("t"), partition)
}

/// Batches that are written at a time, as by default.
const LANES: usize = 4;

fn new_desk() -> Desk {
    Desk::new(LANES, HashSet::new())
}

fn desk(partitions: &[i32]) -> Desk {
    begun(new_desk(), partitions)
}

fn begun(mut desk: Desk, partitions: &[i32]) -> Desk {
    desk.read_for(&Arc::new(Reader { group: "g".into(), cluster_id: "c".into() }));
    let now = Instant::now();
    let places: Vec<TopicPartition> = partitions.iter().map(|&partition| place(partition)).collect();
    desk.assign(&places, now);
    assert_eq!(desk.ask(now).len(), partitions.len());
    for place in &places {
        desk.begin(place, at(0));
        desk.committed("t", place.1, 0);
    }
    desk
}

/// Written under the first leader.
fn at(offset: i64) -> At {
    At { offset, epoch: Some(0) }
}

fn read(desk: &mut Desk, partition: i32, offset: i64) -> Expected {
    let expected = desk.expects(("t", partition), at(offset), Instant::now(), || Some(0));
    if expected == Expected::Yes {
        desk.take_in(("t", partition), at(offset), None);
    }
    expected
}

fn moved(batch: &Batch) -> Vec<LedgerMove> {
    vec![LedgerMove::Moved; batch.ledger.len()]
}

#[test]
fn nothing_is_taken_in_before_the_position_is_found() {
    let mut desk = new_desk();
    desk.assign(&[place(0)], Instant::now());
    assert_eq!(read(&mut desk, 0, 0), Expected::No);
    assert_eq!(read(&mut desk, 1, 0), Expected::No);
}

#[test]
fn partitions_that_come_one_by_one_are_shared_out_to_the_lanes() {
    let mut desk = new_desk();
    for partition in 0..8 {
        desk.assign(&[place(partition)], Instant::now());
    }
    let of_lane = |lane| desk.all().filter(|(_, owned)| owned.lane == lane).count();
    assert_eq!([0, 1, 2, 3].map(of_lane), [2; LANES]);
}

#[test]
fn only_what_is_stored_is_committed() {
    let mut desk = desk(&[0]);
    let limits = Limits::default();
    read(&mut desk, 0, 0);
    read(&mut desk, 0, 1);
    let batch = desk.next_batch(0, &limits).unwrap();
    read(&mut desk, 0, 2);
    assert_eq!(desk.to_commit(), []);
    desk.written(batch.id, &moved(&batch), Instant::now());
    assert_eq!(desk.to_commit(), [(place(0), 2)]);
    desk.committed("t", 0, 2);
    assert_eq!(desk.to_commit(), []);
}

#[test]
fn a_batch_of_an_older_assignment_changes_nothing() {
    let mut desk = desk(&[0]);
    read(&mut desk, 0, 0);
    let batch = desk.next_batch(0, &Limits::default()).unwrap();
    desk.revoke(&[place(0)]);
    desk.assign(&[place(0)], Instant::now());
    desk.written(batch.id, &moved(&batch), Instant::now());
    assert_eq!(desk.to_commit(), []);
    assert!(!desk.is_writing_any_of(&[place(0)]));
}

#[test]
fn a_partition_that_was_sent_back_while_its_record_was_looked_at_takes_nothing_in() {
    let mut desk = desk(&[0]);
    read(&mut desk, 0, 0);
    let batch = desk.next_batch(0, &Limits::default()).unwrap();
    assert_eq!(desk.expects(("t", 0), at(1), Instant::now(), || Some(0)), Expected::Yes);
    desk.written(batch.id, &vec![LedgerMove::Behind; batch.ledger.len()], Instant::now());
    desk.take_in(("t", 0), at(1), None);
    assert!(desk.next_batch(0, &Limits::default()).is_none());
}

#[test]
fn a_ledger_that_is_behind_sends_the_partition_back() {
    let mut desk = desk(&[0]);
    read(&mut desk, 0, 0);
    let batch = desk.next_batch(0, &Limits::default()).unwrap();
    read(&mut desk, 0, 1);
    let now = Instant::now();
    assert_eq!(desk.written(batch.id, &[LedgerMove::Behind], now), [place(0)]);
    assert_eq!(read(&mut desk, 0, 2), Expected::No);
    assert!(desk.next_batch(0, &Limits::default()).is_none());
    let asked = desk.ask(now);
    assert!(asked[0].has_ledger);
}

#[test]
fn offsets_may_be_passed_over_by_compaction_but_not_by_deletion_nor_backwards() {
    let now = Instant::now();
    let jump = |offset, low| {
        let mut desk = desk(&[0]);
        read(&mut desk, 0, 0);
        desk.expects(("t", 0), at(offset), now, || low)
    };
    assert_eq!(jump(1, Some(0)), Expected::Yes);
    assert_eq!(jump(7, Some(1)), Expected::Yes);
    // Nobody knows where the log begins: Kafka is asked, once.
    assert_eq!(jump(7, None), Expected::OutOfPlace);
    let mut desk = desk(&[0]);
    assert_eq!(desk.expects(("t", 0), at(7), now, || None), Expected::OutOfPlace);
    desk.begin(&place(0), at(0));
    assert_eq!(desk.expects(("t", 0), at(7), now, || None), Expected::Yes);
    assert_eq!(jump(7, Some(5)), Expected::OutOfPlace);
    assert_eq!(jump(0, Some(0)), Expected::OutOfPlace);
}

#[test]
fn a_position_is_asked_for_only_when_nothing_of_the_partition_is_on_its_way() {
    let mut desk = desk(&[0]);
    let now = Instant::now();
    read(&mut desk, 0, 0);
    assert_eq!(desk.expects(("t", 0), at(9), now, || Some(5)), Expected::OutOfPlace);
    assert_eq!(desk.ask(now), []);
    let batch = desk.next_batch(0, &Limits::default()).unwrap();
    assert_eq!(desk.ask(now), []);
    desk.written(batch.id, &moved(&batch), now);
    assert_eq!(desk.ask(now).len(), 1);
}

// A record before the expected one, written by a later leader: the log was truncated. By the same leader it proves nothing.
#[test]
fn a_step_back_to_a_newer_epoch_is_a_truncation_and_is_remembered_until_a_position_is_found() {
    let now = Instant::now();
    let step_back = |epoch| {
        let mut desk = desk(&[0]);
        read(&mut desk, 0, 0);
        read(&mut desk, 0, 1);
        let batch = desk.next_batch(0, &Limits::default()).unwrap();
        assert_eq!(batch.ledger[0].leader_epoch, Some(0));
        desk.written(batch.id, &moved(&batch), now);
        let record = At { offset: 1, epoch };
        assert_eq!(desk.expects(("t", 0), record, now, || Some(0)), Expected::OutOfPlace);
        let cut = desk.ask(now)[0].cut;
        desk.ask_again(&place(0), now);
        assert_eq!(desk.ask(now + ASK_AGAIN)[0].cut, cut);
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
        let mut desk = desk(&[0]);
        read(&mut desk, 0, 0);
        read(&mut desk, 0, 1);
        let batch = desk.next_batch(0, &Limits::default()).unwrap();
        desk.written(batch.id, &moved(&batch), now);
        let watched = desk.watched();
        assert_eq!((watched[0].standing, watched[0].stored), ("reading", Some(2)));
        let sent_back = desk.compare(&[(&watched[0], row.as_ref(), is_other)], now);
        assert_eq!(desk.ask(now).len(), sent_back.len());
        sent_back.into_iter().map(|(_, is_behind)| is_behind).collect::<Vec<_>>()
    };
    assert_eq!(compare(Some(row(2, None)), false), [false; 0]);
    assert_eq!(compare(Some(row(1, None)), false), [true]);
    assert_eq!(compare(None, false), [true]);
    assert_eq!(compare(Some(row(9, None)), false), [false]);
    assert_eq!(compare(Some(row(2, Some("cut"))), false), [false]);
    assert_eq!(compare(Some(row(2, None)), true), [false]);
}

// The ledger is read after the desk was looked at, and batches end in between.
#[test]
fn a_batch_that_ends_while_the_ledger_is_compared_sends_nothing_back() {
    let now = Instant::now();
    let mut desk = desk(&[0]);
    let watched = desk.watched();
    read(&mut desk, 0, 0);
    let batch = desk.next_batch(0, &Limits::default()).unwrap();
    let row = LedgerRow { next_offset: 1, leader_epoch: Some(0), topic_id: None, stopped: None };
    assert_eq!(desk.compare(&[(&watched[0], Some(&row), false)], now), []);
    desk.written(batch.id, &moved(&batch), now);
    assert_eq!(desk.compare(&[(&watched[0], Some(&row), false)], now), []);
}
