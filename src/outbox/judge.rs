//! Decides which records are sent together, and what the answers mean for each of them. Pure.
//!
//! A broker refuses a batch as a whole: which of its records is to blame is found out by sending each of them alone. A record that is sent alone
//! and refused is poisoned. While a record is to be sent alone, nothing behind it in its slot is sent, so the order of its key is kept.

use std::collections::HashSet;
use std::time::Instant;

use super::topics::{HeldTopics, Unknown};
use super::wire::Fate;
use crate::store::outbound::{Outgoing, Refused, Sent};
use crate::types::sanitize;

/// Characters of an error that are kept with a record.
const ERROR_CHARS_MAX: usize = 500;

/// Which of these records are sent now, those of each slot in order: all of them; or those before one that has to be sent alone; or that one.
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

/// What the answers to a batch mean.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    pub(super) sent: Vec<Sent>,
    pub(super) poisoned: Vec<Refused>,
    /// Records that have to be sent alone.
    pub(super) suspects: Vec<i64>,
    /// Of records that were neither acknowledged nor refused: why, of the first of them.
    pub(super) trouble: Option<String>,
    /// A topic was held back or is not any more.
    pub(super) are_topics_changed: bool,
}

pub(super) fn judge(rows: &[Outgoing], fates: Vec<Fate>, topics: &mut HeldTopics, now: Instant) -> Verdict {
    let mut verdict = Verdict::default();
    let is_alone = rows.len() == 1;
    for (row, fate) in rows.iter().zip(fates) {
        let refused = |reason, error: &str| {
            let error = sanitize::text(error, ERROR_CHARS_MAX);
            Refused { id: row.id, slot: row.slot, reason, error }
        };
        match fate {
            Fate::Acknowledged { partition, offset } => {
                verdict.are_topics_changed |= topics.works(&row.topic);
                verdict.sent.push(Sent { id: row.id, partition, offset });
            }
            Fate::Refused { reason, error, is_its_own } if is_alone || is_its_own => {
                verdict.poisoned.push(refused(reason, &error));
            }
            Fate::Refused { error, .. } => {
                verdict.suspects.push(row.id);
                verdict.trouble.get_or_insert(error);
            }
            Fate::UnknownTopic { error } => {
                verdict.are_topics_changed = true;
                match topics.is_unknown(&row.topic, now) {
                    Unknown::Waits => drop(verdict.trouble.get_or_insert(error)),
                    Unknown::GivenUp => verdict.poisoned.push(refused("unknown topic", &error)),
                }
            }
            Fate::Denied { error } => {
                verdict.are_topics_changed = true;
                topics.is_denied(&row.topic, now);
                verdict.trouble.get_or_insert(error);
            }
            Fate::Unknown { error } => drop(verdict.trouble.get_or_insert(error)),
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
    fn a_suspect_is_sent_alone_after_what_comes_before_it_and_before_what_comes_behind_it() {
        let rows = [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)];
        assert_eq!(chosen(&rows, &[]), [1, 2, 3, 4, 5]);
        assert_eq!(chosen(&rows, &[2]), [1, 4, 5]);
        assert_eq!(chosen(&rows[1..], &[2]), [2]);
        assert_eq!(chosen(&rows, &[2, 4]), [4]);
        assert_eq!(chosen(&rows, &[2, 3]), [1, 4, 5], "3 is behind 2");
    }

    fn refused() -> Fate {
        Fate::Refused { reason: "too large", error: "no".to_owned(), is_its_own: false }
    }

    #[test]
    fn a_record_is_poisoned_only_when_it_was_refused_alone() {
        let mut topics = HeldTopics::new(Duration::from_secs(60));
        let rows = [row(1, 0), row(2, 0)];
        let acknowledged = Fate::Acknowledged { partition: 3, offset: 4 };
        let together = judge(&rows, vec![refused(), acknowledged], &mut topics, Instant::now());
        assert_eq!((together.suspects, together.poisoned.len()), (vec![1], 0));
        assert_eq!(together.sent, [Sent { id: 2, partition: 3, offset: 4 }]);
        let alone = judge(&rows[..1], vec![refused()], &mut topics, Instant::now());
        assert_eq!((alone.suspects.len(), alone.poisoned[0].reason), (0, "too large"));
        let own = Fate::Refused { reason: "too large", error: "no".to_owned(), is_its_own: true };
        let surely = judge(&rows, vec![own, refused()], &mut topics, Instant::now());
        assert_eq!((surely.poisoned[0].id, surely.suspects), (1, vec![2]));
    }

    #[test]
    fn nothing_is_poisoned_for_trouble_that_passes() {
        let mut topics = HeldTopics::new(Duration::from_secs(60));
        let error = || "no".to_owned();
        let fates = vec![
            Fate::Unknown { error: error() },
            Fate::UnknownTopic { error: error() },
            Fate::Denied { error: error() },
        ];
        let rows = [row(1, 0), row(2, 0), row(3, 0)];
        let verdict = judge(&rows, fates, &mut topics, Instant::now());
        assert!(verdict.sent.is_empty() && verdict.poisoned.is_empty() && verdict.suspects.is_empty());
        assert_eq!(verdict.trouble.as_deref(), Some("no"));
    }
}
