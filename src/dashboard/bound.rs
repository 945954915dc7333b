//! Binds an action to its preview: it changes what the preview showed, and nothing that came to match later.
//!
//! The form carries when the preview was made and how many rows it counted. A filter's ages then refer to that time,
//! however long the visitor reads or the action runs. They are durations on the database's clock, so the clocks of the
//! two machines need not agree. An age excludes later rows only if it begins when a row comes to match, as that of a
//! poisoned delivery or a quarantined record does. For an action on one message, the form also carries a digest of the
//! previewed rows. For pending and running deliveries of many messages, it lists them, each with its attempt.

use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};

use super::refusal::Refusal;
use crate::store::operating::SeenDelivery;
use crate::types::{DeliveryFilter, DeliverySummary, HandlerStatus, QuarantineFilter};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bound {
    previewed_at: SystemTime,
    /// None if a program acts without a preview, or if the preview stopped counting.
    count: Option<u64>,
}

impl Bound {
    /// An action without a preview is bound to the time of its request.
    pub(super) fn new(previewed_micros: Option<u64>, count: Option<u64>) -> Self {
        Self {
            previewed_at: previewed_micros
                .and_then(|micros| UNIX_EPOCH.checked_add(Duration::from_micros(micros)))
                .unwrap_or_else(SystemTime::now),
            count: count.filter(|count| *count < HandlerStatus::COUNT_MAX),
        }
    }

    /// How many rows the action may change in all.
    pub(super) fn limit(self, max: u32) -> u32 {
        self.count.map_or(max, |count| u32::try_from(count).unwrap_or(max).min(max))
    }

    /// The filter for a statement that is about to run.
    pub(super) fn deliveries(self, filter: &DeliveryFilter) -> DeliveryFilter {
        let mut bound = filter.clone();
        (bound.older_than, bound.newer_than) = self.ages(filter.older_than, filter.newer_than);
        bound
    }

    pub(super) fn quarantined(self, filter: &QuarantineFilter) -> QuarantineFilter {
        let mut bound = filter.clone();
        (bound.older_than, bound.newer_than) = self.ages(filter.older_than, filter.newer_than);
        bound
    }

    /// A row that is older than an hour now may have been younger in the preview, so the time since then is added.
    fn ages(self, older: Option<Duration>, newer: Option<Duration>) -> (Option<Duration>, Option<Duration>) {
        let since = SystemTime::now().duration_since(self.previewed_at).unwrap_or_default();
        (Some(older.unwrap_or_default().saturating_add(since)), newer.map(|newer| newer.saturating_add(since)))
    }
}

/// The time of a preview, for its form.
pub(super) fn micros(at: SystemTime) -> u64 {
    u64::try_from(at.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros()).unwrap_or(u64::MAX)
}

/// Identifies these deliveries in their present state: another attempt, outcome or delivery gives another digest.
pub(super) fn digest(rows: &[DeliverySummary]) -> String {
    let mut rows: Vec<_> = rows
        .iter()
        .map(|row| (row.message_seq, row.handler_id, row.attempts, row.replays, row.state.as_str()))
        .collect();
    rows.sort_unstable();
    Sha256::digest(format!("{rows:?}")).iter().take(16).fold(String::new(), |mut hex, byte| {
        // Writing to a String cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// A delivery at its present attempt.
pub(super) fn seen(row: &DeliverySummary) -> SeenDelivery {
    SeenDelivery { message_seq: row.message_seq, handler_id: row.handler_id, attempts: row.attempts }
}

/// The list of previewed deliveries, for the form.
pub(super) fn list(rows: &[SeenDelivery]) -> String {
    let each = |row: &SeenDelivery| format!("{}-{}-{}", row.message_seq, row.handler_id, row.attempts);
    rows.iter().map(each).collect::<Vec<_>>().join(".")
}

/// Reads such a list.
pub(super) fn read_list(list: &str) -> Result<Vec<SeenDelivery>, Refusal> {
    let each = |one: &str| {
        let mut parts = one.splitn(3, '-');
        let (message_seq, handler_id) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some(SeenDelivery { message_seq, handler_id, attempts: parts.next()?.parse().ok()? })
    };
    let rows: Option<Vec<SeenDelivery>> = list.split('.').filter(|one| !one.is_empty()).map(each).collect();
    rows.ok_or_else(|| Refusal::wrong("the list of previewed deliveries cannot be parsed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_refer_to_the_preview_and_a_count_is_a_limit() {
        let (hour, minute) = (Duration::from_secs(3_600), Duration::from_secs(60));
        let bound = Bound::new(Some(micros(SystemTime::now() - hour)), Some(7));
        let all = bound.deliveries(&DeliveryFilter::all());
        assert!(all.older_than.is_some_and(|age| age >= hour) && all.newer_than.is_none() && all.all);
        let some = bound.deliveries(&DeliveryFilter::default().older_than(minute).newer_than(hour));
        assert!(some.older_than.is_some_and(|age| age >= hour + minute));
        assert!(some.newer_than.is_some_and(|age| age >= hour + hour));
        assert_eq!(bound.limit(1_000), 7);
        assert_eq!(Bound::new(None, Some(HandlerStatus::COUNT_MAX)).limit(1_000_000), 1_000_000);
        assert_eq!(Bound::new(None, Some(50_000)).limit(10_000), 10_000);
    }

    #[test]
    fn a_list_is_read_as_it_was_written() {
        let one = |message_seq, attempts| SeenDelivery { message_seq, handler_id: 3, attempts };
        for rows in [vec![], vec![one(17, 0)], vec![one(17, 2), one(i64::MAX, 1)]] {
            assert_eq!(read_list(&list(&rows)).unwrap(), rows);
        }
        for odd in ["17", "17-3", "17-3-x", "1-2-3.4", "1-2-3;4-5-6"] {
            assert!(read_list(odd).is_err(), "{odd}");
        }
    }
}
