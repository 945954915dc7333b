//! The desk under every order of events: what may be committed is always a prefix of what was stored.

use proptest::prelude::*;

use super::*;
use crate::store::ledger::LedgerRow;

fn place(partition: i32) -> TopicPartition {
    (Arc::from("t"), partition)
}

fn desk(partitions: &[i32]) -> Desk {
    let mut desk = Desk::new();
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
    let mut desk = Desk::new();
    desk.assign(&[place(0)], Instant::now());
    assert_eq!(read(&mut desk, 0, 0), Expected::No);
    assert_eq!(read(&mut desk, 1, 0), Expected::No);
}

#[test]
fn partitions_that_come_one_by_one_are_shared_out_to_the_lanes() {
    let mut desk = Desk::new();
    for partition in 0..4 {
        desk.assign(&[place(partition)], Instant::now());
    }
    let of_lane = |lane| desk.all().filter(|(_, owned)| owned.lane == lane).count();
    assert_eq!((of_lane(0), of_lane(1)), (2, 2));
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
    desk.written(0, &moved(&batch), Instant::now());
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
    desk.written(0, &moved(&batch), Instant::now());
    assert_eq!(desk.to_commit(), []);
    assert!(!desk.is_writing_any_of(&[place(0)]));
}

#[test]
fn a_partition_that_was_sent_back_while_its_record_was_looked_at_takes_nothing_in() {
    let mut desk = desk(&[0]);
    read(&mut desk, 0, 0);
    let batch = desk.next_batch(0, &Limits::default()).unwrap();
    assert_eq!(desk.expects(("t", 0), at(1), Instant::now(), || Some(0)), Expected::Yes);
    desk.written(0, &vec![LedgerMove::Behind; batch.ledger.len()], Instant::now());
    desk.take_in(("t", 0), at(1), None);
    assert!(desk.next_batch(0, &Limits::default()).is_none());
}

#[test]
fn a_ledger_that_is_behind_sends_the_partition_back() {
    let mut desk = desk(&[0]);
    read(&mut desk, 0, 0);
    desk.next_batch(0, &Limits::default()).unwrap();
    read(&mut desk, 0, 1);
    let now = Instant::now();
    assert_eq!(desk.written(0, &[LedgerMove::Behind], now), [place(0)]);
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
    desk.written(0, &moved(&batch), now);
    assert_eq!(desk.ask(now).len(), 1);
}

#[test]
fn a_full_desk_pauses_and_a_half_empty_one_resumes() {
    let limits = Limits { accept_queue_rows: 4, accept_batch_rows: 2, ..Limits::default() };
    let mut desk = desk(&[0]);
    assert_eq!(desk.pauses(true), (vec![], vec![(place(0), at(0))]));
    for offset in 0..4 {
        assert!(!desk.is_full(&limits));
        read(&mut desk, 0, offset);
    }
    assert!(desk.is_full(&limits));
    assert_eq!(desk.pauses(false), (vec![place(0)], vec![]));
    // Nobody wants these records, so a batch takes them all.
    desk.next_batch(0, &limits).unwrap();
    assert!(desk.has_room(&limits));
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
        desk.written(0, &moved(&batch), now);
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
        desk.written(0, &moved(&batch), now);
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
    desk.written(0, &moved(&batch), now);
    assert_eq!(desk.compare(&[(&watched[0], Some(&row), false)], now), []);
}

#[derive(Debug, Clone)]
enum Step {
    Read(i32),
    Batch(usize),
    Written(usize),
    Revoke(i32),
    Assign(i32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4i32).prop_map(Step::Read),
        3 => (0..LANES).prop_map(Step::Batch),
        3 => (0..LANES).prop_map(Step::Written),
        1 => (0..4i32).prop_map(Step::Revoke),
        1 => (0..4i32).prop_map(Step::Assign),
    ]
}

proptest! {
    // Whatever order batches end in, everything below a committed offset was stored, without a hole, under this assignment.
    #[test]
    fn what_may_be_committed_is_a_prefix_of_what_is_stored(steps in prop::collection::vec(step(), 1..200)) {
        let mut desk = desk(&[0, 1, 2, 3]);
        let limits = Limits { accept_batch_rows: 3, ..Limits::default() };
        let now = Instant::now();
        // The database: the ledger, which only moves.
        let mut ledger = [0i64; 4];
        let mut under_way: [Option<Batch>; LANES] = [const { None }; LANES];
        for step in steps {
            match step {
                Step::Read(partition) => {
                    if let Some(next) = desk.get("t", partition).map(|owned| owned.next_offset) {
                        read(&mut desk, partition, next);
                    }
                }
                Step::Batch(lane) => {
                    if let Some(batch) = desk.next_batch(lane, &limits) {
                        under_way[lane] = Some(batch);
                    }
                }
                Step::Written(lane) => {
                    if let Some(batch) = under_way[lane].take() {
                        for entry in &batch.ledger {
                            let at = &mut ledger[usize::try_from(entry.partition).unwrap()];
                            prop_assert!(*at >= entry.from_offset, "a batch begins where the ledger is or before");
                            *at = (*at).max(entry.next_offset);
                        }
                        desk.written(lane, &moved(&batch), now);
                    }
                }
                Step::Revoke(partition) => desk.revoke(&[place(partition)]),
                Step::Assign(partition) => {
                    if desk.get("t", partition).is_none() {
                        desk.assign(&[place(partition)], now);
                        desk.ask(now);
                        desk.begin(&place(partition), at(ledger[usize::try_from(partition).unwrap()]));
                    }
                }
            }
            for ((_, partition), offset) in desk.to_commit() {
                prop_assert!(offset <= ledger[usize::try_from(partition).unwrap()]);
            }
        }
    }
}
