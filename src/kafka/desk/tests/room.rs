//! How much may wait: a partition that is full is held back alone, after a moment, and let go when it is half empty.

use super::*;

/// Longer than reading waits for room.
const LONG: Duration = Duration::from_secs(2);

fn limits() -> Limits {
    Limits::default().accept_queue_rows(8).accept_batch_rows(2)
}

/// Begun, and all of them resumed.
fn reading(partitions: &[i32]) -> Desk {
    let mut desk = desk(partitions);
    let Pauses { pause, resume, held_back, let_go, is_closed } = desk.pauses(true);
    assert_eq!((pause.len(), resume.len(), held_back.len(), let_go.len()), (0, partitions.len(), 0, 0));
    assert!(!is_closed);
    desk
}

fn read_from(desk: &mut Desk, partition: i32, count: usize) {
    for _ in 0..count {
        let next = desk.get("t", partition).unwrap().next_offset;
        assert_eq!(read(desk, partition, next), Expected::Yes);
    }
}

/// Has a batch of everything that waits of the lane's first partition written. Nobody wants these records, so a batch takes them all.
fn write_one(desk: &mut Desk) {
    let batch = desk.next_batch(0, &limits()).unwrap();
    desk.written(batch.id, &moved(&batch), Instant::now());
}

#[test]
fn reading_waits_for_room_and_pauses_nothing_while_batches_end() {
    let mut desk = reading(&[0, 1]);
    let mut now = Instant::now();
    for _ in 0..100 {
        read_from(&mut desk, 0, 4);
        assert!(desk.is_full(("t", 0), &limits()) && !desk.is_full(("t", 1), &limits()));
        assert!(desk.waits_for_room(&limits(), now));
        assert_eq!(desk.pauses(true), Pauses::default());
        write_one(&mut desk);
        now += Duration::from_millis(500);
        assert!(!desk.waits_for_room(&limits(), now));
        // Another partition's record in between changes nothing.
        read_from(&mut desk, 1, 1);
        assert_eq!(desk.pauses(true), Pauses::default());
        write_one(&mut desk);
    }
}

#[test]
fn a_partition_that_stays_full_is_held_back_alone_and_let_go_when_it_is_half_empty() {
    let mut desk = reading(&[0, 1]);
    let now = Instant::now();
    read_from(&mut desk, 0, 4);
    assert!(desk.waits_for_room(&limits(), now));
    assert!(!desk.waits_for_room(&limits(), now + LONG), "the others are read");
    let pauses = desk.pauses(true);
    assert_eq!((pauses.pause, pauses.held_back, pauses.is_closed), (vec![place(0)], vec![place(0)], false));

    read_from(&mut desk, 1, 1);
    assert_eq!(desk.pauses(true), Pauses::default());
    let owned = desk.get_mut("t", 0).unwrap();
    owned.waiting.pop().unwrap();
    assert!(!desk.waits_for_room(&limits(), now + LONG));
    assert_eq!(desk.pauses(true), Pauses::default(), "more than half of it waits still");
    let owned = desk.get_mut("t", 0).unwrap();
    owned.waiting.pop().unwrap();
    assert!(!desk.waits_for_room(&limits(), now + LONG));
    let pauses = desk.pauses(true);
    assert_eq!((pauses.resume, pauses.let_go), (vec![(place(0), at(4))], vec![place(0)]));
}

#[test]
fn all_are_held_back_when_all_together_stay_full() {
    let mut desk = reading(&[0, 1, 2]);
    let now = Instant::now();
    (0..3).for_each(|partition| read_from(&mut desk, partition, 3));
    assert!(desk.is_full(("t", 0), &limits()));
    assert!(desk.waits_for_room(&limits(), now));
    assert!(!desk.pauses(true).is_closed);
    assert!(!desk.waits_for_room(&limits(), now + LONG));
    let pauses = desk.pauses(true);
    assert_eq!((pauses.pause.len(), pauses.held_back.len(), pauses.is_closed), (3, 0, true));

    while desk.waiting.rows > 0 {
        write_one(&mut desk);
    }
    assert!(!desk.waits_for_room(&limits(), now + LONG));
    let pauses = desk.pauses(true);
    assert_eq!((pauses.resume.len(), pauses.is_closed), (3, false));
}

#[test]
fn nothing_is_read_when_every_partition_is_held_back() {
    let mut desk = reading(&[0]);
    let now = Instant::now();
    read_from(&mut desk, 0, 4);
    desk.waits_for_room(&limits(), now);
    desk.waits_for_room(&limits(), now + LONG);
    assert!(desk.pauses(true).is_closed);
}

#[test]
fn nothing_is_read_while_no_record_is_wanted() {
    let mut desk = reading(&[0, 1]);
    let pauses = desk.pauses(false);
    assert_eq!((pauses.pause.len(), pauses.held_back.len(), pauses.is_closed), (2, 0, true));
    let pauses = desk.pauses(true);
    assert_eq!((pauses.resume.len(), pauses.is_closed), (2, false));
}

#[test]
fn what_was_dropped_makes_room() {
    let mut desk = reading(&[0, 1]);
    read_from(&mut desk, 0, 4);
    assert!(desk.waits_for_room(&limits(), Instant::now()));
    desk.revoke(&[place(0)]);
    assert_eq!(desk.waiting, Load::default());
    assert!(!desk.waits_for_room(&limits(), Instant::now()));
}
