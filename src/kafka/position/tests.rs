//! Where a partition begins, and that a truncated log is always reported.

use proptest::prelude::*;

use super::*;

fn ledger_at(offset: i64) -> Option<At> {
    Some(At { offset, epoch: Some(0) })
}

fn at(ledger: Option<i64>, committed: Committed) -> Start {
    start(Known { ledger: ledger.and_then(ledger_at), topic: Topic::Same, committed, low: 10, high: 20 })
}

fn begins(offset: i64, epoch: Option<i32>) -> Start {
    Start::At(At { offset, epoch })
}

#[test]
fn the_ledger_is_right_wherever_it_speaks() {
    assert_eq!(at(Some(12), Committed::ByAnother(15)), begins(12, Some(0)));
    assert_eq!(at(Some(15), Committed::ByUs), begins(15, Some(0)));
    assert_eq!(at(Some(20), Committed::Nothing), begins(20, Some(0)));
    assert_eq!(at(None, Committed::Nothing), begins(10, None));
}

#[test]
fn a_group_from_before_the_inbox_goes_on_where_it_was() {
    assert_eq!(at(None, Committed::ByAnother(15)), begins(15, None));
    assert_eq!(at(None, Committed::ByAnother(25)), begins(20, None));
    assert_eq!(at(None, Committed::ByAnother(3)), Start::AfterGap { from: 3, to: 10 });
}

#[test]
fn a_database_that_lost_the_ledger_is_refilled() {
    assert_eq!(at(None, Committed::ByUs), begins(10, None));
}

#[test]
fn a_ledger_that_was_reset_begins_at_the_first_record_and_notes_no_gap() {
    assert_eq!(at(Some(BEGINNING), Committed::ByAnother(15)), begins(10, None));
}

#[test]
fn what_kafka_no_longer_has_is_a_gap_and_another_log_is_not_touched() {
    assert_eq!(at(Some(3), Committed::ByUs), Start::AfterGap { from: 3, to: 10 });
    let ledger = At { offset: 21, epoch: Some(0) };
    assert_eq!(at(Some(21), Committed::ByUs), Start::Nowhere(Stop::EndsBefore { ledger, high: 20 }));
    let ledger = At { offset: 12, epoch: Some(0) };
    let known = Known { ledger: Some(ledger), topic: Topic::Recreated, committed: Committed::ByUs, low: 10, high: 20 };
    assert_eq!(start(known), Start::Nowhere(Stop::Recreated { ledger, high: 20 }));
}

#[test]
fn a_stopped_ledger_stays_stopped_whatever_kafka_has() {
    let row = |stopped: Option<&str>| LedgerRow {
        next_offset: 12,
        leader_epoch: Some(0),
        topic_id: None,
        stopped: stopped.map(str::to_owned),
    };
    assert_eq!(stopped(&row(Some("cut")), None), Some(Start::Stopped { ledger: 12, why: "cut".to_owned() }));
    assert_eq!(stopped(&row(None), None), None);
    // An operator has moved the ledger to the truncated offset meanwhile.
    assert_eq!(stopped(&row(None), Some(At { offset: 12, epoch: Some(1) })), None);
}

#[test]
fn a_stop_names_both_offsets_and_epochs() {
    let ledger = At { offset: 6000, epoch: Some(3) };
    let text = Stop::Truncated { ledger, record: At { offset: 5000, epoch: Some(4) } }.to_string();
    assert!(text.contains("offset 6000 (leader epoch 3)") && text.contains("offset 5000 (leader epoch 4)"), "{text}");
}

/// A broker's log: the leader epoch of each record.
struct Log(Vec<i32>);

impl Log {
    /// The answer to OffsetForLeaderEpoch: where the records of this epoch and of those before it end.
    fn end_of(&self, epoch: i32) -> i64 {
        self.0.iter().filter(|of| **of <= epoch).count() as i64
    }

    /// The first record that a consumer gets after seeking to `at`: librdkafka goes back to the end of the epoch.
    fn first_read(&self, at: At) -> Option<At> {
        let offset = at.epoch.map_or(at.offset, |epoch| at.offset.min(self.end_of(epoch)));
        let epoch = *self.0.get(usize::try_from(offset).unwrap())?;
        Some(At { offset, epoch: Some(epoch) })
    }
}

proptest! {
    // A log is read up to the ledger, truncated, and written under a newer epoch. Records that were written after the
    // truncation, before the ledger, are either reported or still read: they are never skipped.
    #[test]
    fn a_log_that_was_cut_before_the_ledger_is_never_read_on_in_silence(
        ledger in 1i64..40, unread in 0i64..10, cut in 0i64..50, written in 0usize..60,
    ) {
        let mut log = Log(vec![0; usize::try_from(ledger + unread).unwrap()]);
        log.0.truncate(usize::try_from(cut).unwrap());
        let kept = log.0.len() as i64;
        log.0.extend(vec![1; written]);
        let high = log.0.len() as i64;
        let at = At { offset: ledger, epoch: Some(0) };

        let begun = start(Known { ledger: Some(at), topic: Topic::Same, committed: Committed::Nothing, low: 0, high });

        let is_cut_off = kept < ledger;
        match begun {
            Start::Nowhere(Stop::EndsBefore { .. }) => prop_assert!(is_cut_off && ledger > high),
            Start::At(begun) => {
                prop_assert_eq!(begun, at);
                match log.first_read(begun) {
                    Some(record) if is_cut(begun, record) => prop_assert!(is_cut_off && record.offset == kept),
                    Some(record) => prop_assert!(!is_cut_off && record.offset == ledger),
                    None => prop_assert!(!is_cut_off && high == ledger),
                }
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn what_kafka_deleted_is_a_gap(ledger in 0i64..40, low in 0i64..20, length in 0i64..20) {
        let high = low + length;
        match start(Known { ledger: ledger_at(ledger), topic: Topic::Same, committed: Committed::ByAnother(7), low, high }) {
            Start::At(next) => prop_assert!(next.offset == ledger && ledger >= low),
            Start::AfterGap { from, to } => prop_assert!(from == ledger && to == low && from < to),
            Start::Nowhere(stop) => prop_assert!(ledger > high && stop.ledger().offset == ledger),
            Start::Stopped { .. } => prop_assert!(false),
        }
    }
}
