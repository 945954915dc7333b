//! The rows that an action on many would change: those up to its limit, and how many match beyond it.
//!
//! The action is limited to as many rows as were counted here. Its ages refer to the time of the count, so rows that come
//! to match while a person reads take no place of counted ones. An action on one message names each of its rows.

use std::time::{Duration, Instant};

/// Counting of the matching rows stops here, or at the limit of the action if that is larger.
const COUNT_MAX: u32 = 10_000;

pub struct Meant<T> {
    /// Those that the action would change.
    pub rows: Vec<T>,
    /// How many match beyond the limit, as far as they were counted.
    pub beyond: usize,
    /// Whether counting reached the end of the matches.
    is_counted: bool,
    /// Taken before the rows were read.
    read_at: Instant,
}

/// How many rows to read for an action with this limit: one more than are counted shows whether there are more.
pub fn rows_to_read(limit: u32) -> u32 {
    limit.max(COUNT_MAX).saturating_add(1)
}

impl<T> Meant<T> {
    /// Of the first [`rows_to_read`] rows that match, those that the action can change. `read_at` was taken before they
    /// were read.
    pub fn of(found: Vec<T>, limit: u32, read_at: Instant, can_change: impl Fn(&T) -> bool) -> Self {
        let is_counted = found.len() < rows_to_read(limit) as usize;
        let mut rows = found;
        rows.retain(can_change);
        let beyond = rows.len().saturating_sub(limit as usize);
        rows.truncate(limit as usize);
        Self { rows, beyond, is_counted, read_at }
    }

    /// The ages of a filter for an action that begins now: a row that was too young or too old for them when the rows
    /// were read still is. Without an age, the action takes no row that came after the count.
    pub fn age(&self, older: &mut Option<Duration>, newer: &mut Option<Duration>) {
        let since = self.read_at.elapsed();
        *older = Some(older.unwrap_or_default().saturating_add(since));
        *newer = newer.map(|newer| newer.saturating_add(since));
    }

    /// The limit of the action: no more than the person has confirmed.
    pub fn limit(&self) -> u32 {
        u32::try_from(self.rows.len()).unwrap_or(u32::MAX)
    }

    /// Says that this number of rows remains.
    pub fn remain(&self, left: usize) -> String {
        format!("{left} {} remain", if self.is_counted { "more" } else { "or more" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_beyond_a_limit_of_the_size_of_the_count_are_not_overlooked() {
        let rows = |there: u32, limit| (0..there.min(rows_to_read(limit))).collect();
        let read = |there, limit| Meant::of(rows(there, limit), limit, Instant::now(), |_| true);
        for (there, limit, beyond, remain) in [
            (10_000, 10_000, 0, "0 more remain"),
            (10_001, 10_000, 1, "1 or more remain"),
            (30_000, 20_000, 1, "1 or more remain"),
            (10_000, 4, 9_996, "9996 more remain"),
        ] {
            let meant = read(there, limit);
            assert_eq!((meant.beyond, &*meant.remain(meant.beyond)), (beyond, remain));
            assert_eq!(meant.limit(), there.min(limit));
        }
    }
}
