//! How much may wait: a full partition is paused alone, after a moment, and resumed when it is half empty.

use super::*;

/// Longer than reading waits for room.
const LONG: Duration = Duration::from_secs(2);

fn limits() -> Limits {
    Limits::default().accept_queue_rows(8).accept_batch_rows(2)
}

/// State whose partitions are all read.
fn reading(partitions: &[i32]) -> AssignedPartitions {
    let mut assigned = assigned(partitions);
    let Pauses { pause, resume, full, drained, is_closed } = assigned.pauses(true);
    assert_eq!((pause.len(), resume.len(), full.len(), drained.len()), (0, partitions.len(), 0, 0));
    assert!(!is_closed);
    assigned
}

fn read_from(assigned: &mut AssignedPartitions, partition: i32, count: usize) {
    for _ in 0..count {
        let next = assigned.get("t", partition).unwrap().next_offset;
        assert_eq!(read(assigned, partition, next), Expected::Yes);
    }
}

/// Writes all waiting records of the lane's first partition as one batch. No handler wants these records, so one batch
/// takes them all.
fn write_one(assigned: &mut AssignedPartitions) {
    let batch = assigned.next_batch(0, &limits()).unwrap();
    assigned.written(batch.id, &moved(&batch), Instant::now());
}

#[test]
fn reading_waits_for_room_and_pauses_nothing_while_batches_end() {
    let mut assigned = reading(&[0, 1]);
    let mut now = Instant::now();
    for _ in 0..100 {
        read_from(&mut assigned, 0, 4);
        assert!(assigned.is_full(("t", 0), &limits()) && !assigned.is_full(("t", 1), &limits()));
        assert!(assigned.waits_for_room(&limits(), now));
        assert_eq!(assigned.pauses(true), Pauses::default());
        write_one(&mut assigned);
        now += Duration::from_millis(500);
        assert!(!assigned.waits_for_room(&limits(), now));
        // Another partition's record in between changes nothing.
        read_from(&mut assigned, 1, 1);
        assert_eq!(assigned.pauses(true), Pauses::default());
        write_one(&mut assigned);
    }
}

#[test]
fn a_partition_that_stays_full_is_paused_alone_and_resumed_when_it_is_half_empty() {
    let mut assigned = reading(&[0, 1]);
    let now = Instant::now();
    read_from(&mut assigned, 0, 4);
    assert!(assigned.waits_for_room(&limits(), now));
    assert!(!assigned.waits_for_room(&limits(), now + LONG), "the others are read");
    let pauses = assigned.pauses(true);
    assert_eq!((pauses.pause, pauses.full, pauses.is_closed), (vec![place(0)], vec![place(0)], false));

    read_from(&mut assigned, 1, 1);
    assert_eq!(assigned.pauses(true), Pauses::default());
    let owned = assigned.get_mut("t", 0).unwrap();
    owned.waiting.pop().unwrap();
    assert!(!assigned.waits_for_room(&limits(), now + LONG));
    assert_eq!(assigned.pauses(true), Pauses::default(), "more than half of it waits still");
    let owned = assigned.get_mut("t", 0).unwrap();
    owned.waiting.pop().unwrap();
    assert!(!assigned.waits_for_room(&limits(), now + LONG));
    let pauses = assigned.pauses(true);
    assert_eq!((pauses.resume, pauses.drained), (vec![(place(0), at(4))], vec![place(0)]));
}

#[test]
fn all_are_paused_when_all_together_stay_full() {
    let mut assigned = reading(&[0, 1, 2]);
    let now = Instant::now();
    (0..3).for_each(|partition| read_from(&mut assigned, partition, 3));
    assert!(assigned.is_full(("t", 0), &limits()));
    assert!(assigned.waits_for_room(&limits(), now));
    assert!(!assigned.pauses(true).is_closed);
    assert!(!assigned.waits_for_room(&limits(), now + LONG));
    let pauses = assigned.pauses(true);
    assert_eq!((pauses.pause.len(), pauses.full.len(), pauses.is_closed), (3, 0, true));

    while assigned.waiting.rows > 0 {
        write_one(&mut assigned);
    }
    assert!(!assigned.waits_for_room(&limits(), now + LONG));
    let pauses = assigned.pauses(true);
    assert_eq!((pauses.resume.len(), pauses.is_closed), (3, false));
}

#[test]
fn nothing_is_read_when_every_partition_is_paused() {
    let mut assigned = reading(&[0]);
    let now = Instant::now();
    read_from(&mut assigned, 0, 4);
    assigned.waits_for_room(&limits(), now);
    assigned.waits_for_room(&limits(), now + LONG);
    assert!(assigned.pauses(true).is_closed);
}

#[test]
fn nothing_is_read_while_no_record_is_wanted() {
    let mut assigned = reading(&[0, 1]);
    let pauses = assigned.pauses(false);
    assert_eq!((pauses.pause.len(), pauses.full.len(), pauses.is_closed), (2, 0, true));
    let pauses = assigned.pauses(true);
    assert_eq!((pauses.resume.len(), pauses.is_closed), (2, false));
}

#[test]
fn what_was_dropped_makes_room() {
    let mut assigned = reading(&[0, 1]);
    read_from(&mut assigned, 0, 4);
    assert!(assigned.waits_for_room(&limits(), Instant::now()));
    assigned.revoke(&[place(0)]);
    assert_eq!(assigned.waiting, Load::default());
    assert!(!assigned.waits_for_room(&limits(), Instant::now()));
}
