//! Decides where a partition begins when it is assigned. Pure.
//!
//! The ledger is right wherever it speaks: a group offset that is lost, expired or ahead of what is stored skips nothing. What Kafka no
//! longer has is named as a gap. A log that ends before the ledger is another log under the same name, and is not touched.

/// What is known of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Known {
    /// The next offset to accept, by the ledger.
    pub(super) ledger: Option<i64>,
    pub(super) topic: Topic,
    pub(super) committed: Committed,
    /// The first offset that Kafka still has.
    pub(super) low: i64,
    /// The offset of the next record to be produced.
    pub(super) high: i64,
}

/// Whether the topic is the one that the ledger is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Topic {
    /// As far as anybody can tell: Kafka has not always told ids.
    Same,
    MadeAnew,
}

/// The group's offset, and who committed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Committed {
    Nothing,
    /// By whatever consumed before the inbox: it vouches for what it has passed.
    ByAnother(i64),
    /// By an inbox. It never is without a ledger: if there is none, the database has lost it and what came with it.
    ByUs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    At(i64),
    /// Records from `from` up to `to` are gone; go on at `to`.
    AfterGap {
        from: i64,
        to: i64,
    },
    /// The log ends before the ledger: the topic was made anew, or lost its end.
    Nowhere {
        ledger: i64,
        high: i64,
    },
}

pub(super) fn start(known: Known) -> Start {
    let Known { ledger, topic, committed, low, high } = known;
    match (ledger, committed) {
        (Some(ledger), _) if ledger > high || topic == Topic::MadeAnew => Start::Nowhere { ledger, high },
        (Some(next), _) | (None, Committed::ByAnother(next)) if next < low => Start::AfterGap { from: next, to: low },
        (Some(next), _) => Start::At(next),
        (None, Committed::ByAnother(next)) => Start::At(next.min(high)),
        // Everything Kafka has, again: what is stored already is a duplicate.
        (None, Committed::ByUs | Committed::Nothing) => Start::At(low),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(ledger: Option<i64>, committed: Committed) -> Start {
        start(Known { ledger, topic: Topic::Same, committed, low: 10, high: 20 })
    }

    #[test]
    fn the_ledger_is_right_wherever_it_speaks() {
        assert_eq!(at(Some(12), Committed::ByAnother(15)), Start::At(12));
        assert_eq!(at(Some(15), Committed::ByUs), Start::At(15));
        assert_eq!(at(Some(20), Committed::Nothing), Start::At(20));
        assert_eq!(at(None, Committed::Nothing), Start::At(10));
    }

    #[test]
    fn a_group_from_before_the_inbox_goes_on_where_it_was() {
        assert_eq!(at(None, Committed::ByAnother(15)), Start::At(15));
        assert_eq!(at(None, Committed::ByAnother(25)), Start::At(20));
        assert_eq!(at(None, Committed::ByAnother(3)), Start::AfterGap { from: 3, to: 10 });
    }

    #[test]
    fn a_database_that_lost_the_ledger_is_refilled() {
        assert_eq!(at(None, Committed::ByUs), Start::At(10));
    }

    #[test]
    fn what_kafka_no_longer_has_is_a_gap_and_another_log_is_not_touched() {
        assert_eq!(at(Some(3), Committed::ByUs), Start::AfterGap { from: 3, to: 10 });
        assert_eq!(at(Some(21), Committed::ByUs), Start::Nowhere { ledger: 21, high: 20 });
        let longer = Known { ledger: Some(12), topic: Topic::MadeAnew, committed: Committed::ByUs, low: 10, high: 20 };
        assert_eq!(start(longer), Start::Nowhere { ledger: 12, high: 20 });
    }

    proptest! {
        #[test]
        fn nothing_that_is_not_stored_is_ever_passed_over_in_silence(
            ledger in 0i64..40, committed in 0i64..40, low in 0i64..20, length in 0i64..20,
        ) {
            let committed = Committed::ByAnother(committed);
            match start(Known { ledger: Some(ledger), topic: Topic::Same, committed, low, high: low + length }) {
                Start::At(next) => prop_assert_eq!(next, ledger),
                Start::AfterGap { from, to } => prop_assert!(from == ledger && to == low && from < to),
                Start::Nowhere { .. } => prop_assert!(ledger > low + length),
            }
        }
    }
}
