//! Partitions that wait for a decoder.

use super::*;

/// Lets the next record of the partition wait for a decoder.
fn waiting(assigned: &mut AssignedPartitions, partition: i32, offset: i64) -> Wait {
    let now = Instant::now();
    assert_eq!(assigned.expects(("t", partition), at(offset), now, || Some(0)), Expected::Yes);
    assigned.wait_for_decoder(place(partition), at(offset), now).unwrap()
}

fn state(assigned: &AssignedPartitions, partition: i32) -> (&'static str, Option<String>) {
    let watched = assigned.watched().into_iter().find(|one| one.place.1 == partition).unwrap();
    (watched.state, watched.why.map(Into::into))
}

#[test]
fn a_partition_waits_with_its_record_and_reads_on_behind_it() {
    let (mut assigned, limits) = (assigned(&[0, 1]), Limits::default());
    assigned.pauses(true);
    assert_eq!(read(&mut assigned, 0, 0), Expected::Yes);
    let wait = waiting(&mut assigned, 0, 1);
    assert_eq!((read(&mut assigned, 0, 2), read(&mut assigned, 1, 0)), (Expected::No, Expected::Yes));
    assert_eq!(assigned.pauses(true).pause, [place(0)]);
    assert_eq!(state(&assigned, 0), ("reading", None), "a schema is fetched in a moment");
    // The position of a waiting partition is not requested.
    assert_eq!(assigned.ask(Instant::now()), []);

    assert_eq!(assigned.decoded(&wait, None, Instant::now()), None);
    assert_eq!(assigned.pauses(true).resume, [(place(0), at(2))]);
    let batch = assigned.next_batch(0, &limits).unwrap();
    let of_first = batch.ledger.iter().find(|entry| entry.partition == 0).unwrap();
    assert_eq!((of_first.from_offset, of_first.next_offset), (0, 2));
    assert!(!assigned.is_waiting(&wait));
}

#[test]
fn an_outage_of_a_decoder_begins_and_ends_once_for_a_topic() {
    let mut assigned = assigned(&[0, 1]);
    let (first, second) = (waiting(&mut assigned, 0, 0), waiting(&mut assigned, 1, 0));
    assert_eq!(assigned.decoder_failed(&first, "answers 503"), Failed::First { is_news: true });
    assert_eq!(assigned.decoder_failed(&first, "answers 500"), Failed::Again);
    assert_eq!(assigned.decoder_failed(&second, "answers 500"), Failed::First { is_news: false });
    assert_eq!(state(&assigned, 0), ("waiting", Some("answers 500".to_owned())));
    assert_eq!(assigned.decoded(&first, None, Instant::now()), None);
    assert!(assigned.decoded(&second, None, Instant::now()).is_some());
    assert_eq!(state(&assigned, 1), ("reading", None));
}

#[test]
fn a_wait_ends_when_its_partition_is_revoked_or_the_records_before_it_are_dropped() {
    let mut assigned = assigned(&[0, 1, 2]);
    read(&mut assigned, 0, 0);
    let waits = [waiting(&mut assigned, 0, 1), waiting(&mut assigned, 1, 0), waiting(&mut assigned, 2, 0)];
    assigned.drop_waiting(&[place(0)]);
    assigned.revoke(&[place(1)]);
    // An operator skips the record.
    let moved = LedgerRow { next_offset: 1, leader_epoch: None, topic_id: None, stopped: None };
    let watched = assigned.watched();
    let third = watched.iter().find(|one| one.place.1 == 2).unwrap();
    assert_eq!(assigned.compare(&[(third, Some(&moved), false)], Instant::now()), [(place(2), false)]);
    for wait in &waits {
        assert_eq!(assigned.decoder_failed(wait, "answers 503"), Failed::Over);
        assert_eq!(assigned.decoded(wait, None, Instant::now()), None);
    }
    assert!(assigned.next_batch(0, &Limits::default()).is_none());
    let asked: Vec<i32> = assigned.ask(Instant::now()).into_iter().map(|asked| asked.place.1).collect();
    assert!(asked.len() == 2 && !asked.contains(&1), "{asked:?}");
}
