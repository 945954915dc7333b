//! Decides which records are sent together, and what the replies mean for each of them. Pure.
//!
//! A broker rejects a batch as a whole, so the record that causes it is found by sending each record alone. A record
//! that is sent alone and rejected is poisoned. While a record must be sent alone, no later record of its slot is sent,
//! so the order of its key is kept.

use std::collections::HashSet;
use std::time::Instant;

use super::topics::{HeldTopics, Unknown};
use super::wire::SendResult;
use crate::store::outbound::{Outgoing, Refused, Sent};
use crate::types::sanitize;

/// The most characters of an error that are stored with a record.
const ERROR_CHARS_MAX: usize = 500;

/// Selects the records to send now, in order per slot: all of them, or those before the first suspect of each slot, or
/// one suspect alone if it is the first of its slot.
pub(super) fn choose(rows: Vec<Outgoing>, suspects: &HashSet<i64>) -> Vec<Outgoing> {
    if suspects.is_empty() {
        return rows;
    }
    let mut blocked: HashSet<i16> = HashSet::new();
    let mut begun: HashSet<i16> = HashSet::new();
    let mut chosen = Vec::new();
    for row in rows {
        if suspects.contains(&row.id) {
            if !begun.contains(&row.slot) && !blocked.contains(&row.slot) {
                return vec![row];
            }
            blocked.insert(row.slot);
        }
        if !blocked.contains(&row.slot) {
            begun.insert(row.slot);
            chosen.push(row);
        }
    }
    chosen
}

/// The results of a batch.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    pub(super) sent: Vec<Sent>,
    pub(super) poisoned: Vec<Refused>,
    /// Records that must be sent alone from now on.
    pub(super) suspects: Vec<i64>,
    /// The error of the first record that was neither acknowledged nor poisoned.
    pub(super) problem: Option<String>,
    /// Whether a topic was held or released, so that floors are not valid any more.
    pub(super) are_topics_changed: bool,
}

/// Decides what the replies to a batch mean. `topics` is updated.
pub(super) fn judge(rows: &[Outgoing], results: Vec<SendResult>, topics: &mut HeldTopics, now: Instant) -> Verdict {
    let mut verdict = Verdict::default();
    let is_alone = rows.len() == 1;
    for (row, result) in rows.iter().zip(results) {
        let refused = |reason, error: &str| {
            let error = sanitize::text(error, ERROR_CHARS_MAX);
            Refused { id: row.id, slot: row.slot, reason, error }
        };
        match result {
            SendResult::Acknowledged { partition, offset } => {
                verdict.are_topics_changed |= topics.works(&row.topic);
                verdict.sent.push(Sent { id: row.id, partition, offset });
            }
            SendResult::Refused { reason, error, is_its_own } if is_alone || is_its_own => {
                verdict.poisoned.push(refused(reason, &error));
            }
            SendResult::Refused { error, .. } => {
                verdict.suspects.push(row.id);
                verdict.problem.get_or_insert(error);
            }
            SendResult::UnknownTopic { error } => {
                verdict.are_topics_changed = true;
                match topics.is_unknown(&row.topic, now) {
                    Unknown::Waits => drop(verdict.problem.get_or_insert(error)),
                    Unknown::GivenUp => verdict.poisoned.push(refused("unknown topic", &error)),
                }
            }
            SendResult::Denied { error } => {
                verdict.are_topics_changed = true;
                topics.is_denied(&row.topic, now);
                verdict.problem.get_or_insert(error);
            }
            SendResult::Unknown { error } => drop(verdict.problem.get_or_insert(error)),
        }
    }
    verdict
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::types::Headers;

    fn row(id: i64, slot: i16) -> Outgoing {
        let headers = Headers::default();
        Outgoing { id, slot, topic: "t".into(), recorded_at: None, key: None, headers, payload: None }
    }

    fn ids(rows: &[Outgoing]) -> Vec<i64> {
        rows.iter().map(|row| row.id).collect()
    }

    fn chosen(rows: &[(i64, i16)], suspects: &[i64]) -> Vec<i64> {
        let rows = rows.iter().map(|&(id, slot)| row(id, slot)).collect();
        ids(&choose(rows, &suspects.iter().copied().collect()))
    }

    #[test]
    fn a_suspect_is_sent_alone_and_in_order() {
        let rows = [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)];
        assert_eq!(chosen(&rows, &[]), [1, 2, 3, 4, 5]);
        assert_eq!(chosen(&rows, &[2]), [1, 4, 5]);
        assert_eq!(chosen(&rows[1..], &[2]), [2]);
        assert_eq!(chosen(&rows, &[2, 4]), [4]);
        assert_eq!(chosen(&rows, &[2, 3]), [1, 4, 5], "3 is behind 2");
    }

    fn refused() -> SendResult {
        SendResult::Refused { reason: "too large", error: "no".to_owned(), is_its_own: false }
    }

    #[test]
    fn a_record_is_poisoned_only_if_it_was_refused_alone() {
        let mut topics = HeldTopics::new(Duration::from_secs(60));
        let rows = [row(1, 0), row(2, 0)];
        let acknowledged = SendResult::Acknowledged { partition: 3, offset: 4 };
        let together = judge(&rows, vec![refused(), acknowledged], &mut topics, Instant::now());
        assert_eq!((together.suspects, together.poisoned.len()), (vec![1], 0));
        assert_eq!(together.sent, [Sent { id: 2, partition: 3, offset: 4 }]);
        let alone = judge(&rows[..1], vec![refused()], &mut topics, Instant::now());
        assert_eq!((alone.suspects.len(), alone.poisoned[0].reason), (0, "too large"));
        let own = SendResult::Refused { reason: "too large", error: "no".to_owned(), is_its_own: true };
        let surely = judge(&rows, vec![own, refused()], &mut topics, Instant::now());
        assert_eq!((surely.poisoned[0].id, surely.suspects), (1, vec![2]));
    }

    #[test]
    fn transient_errors_poison_nothing() {
        let mut topics = HeldTopics::new(Duration::from_secs(60));
        let error = || "no".to_owned();
        let results = vec![
            SendResult::Unknown { error: error() },
            SendResult::UnknownTopic { error: error() },
            SendResult::Denied { error: error() },
        ];
        let rows = [row(1, 0), row(2, 0), row(3, 0)];
        let verdict = judge(&rows, results, &mut topics, Instant::now());
        assert!(verdict.sent.is_empty() && verdict.poisoned.is_empty() && verdict.suspects.is_empty());
        assert_eq!(verdict.problem.as_deref(), Some("no"));
    }
}
