//! The rows that an action on many would change: those up to its limit, and how many match beyond it. Shows them, asks,
//! and reports what was changed.
//!
//! The action is limited to as many rows as were counted here. Its ages refer to the time of the count, so rows that come
//! to match while a person reads take no place of counted ones. An action on one message names each of its rows.

use std::io;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use crate::confirm::Confirming;
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Counting of the matching rows stops here, or at the limit of the action if that is larger.
const COUNT_MAX: u32 = 10_000;
/// How many rows are shown before the confirmation. `--dry-run` shows all.
const SHOWN_MAX: usize = 10;

/// An action on many rows, in the words of questions and reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Action {
    pub verb: &'static str,
    /// What the rows are.
    pub rows: &'static str,
}

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

    /// How many rows remain when this many were changed: those beyond the limit, and those that somebody else has
    /// changed since the count.
    pub fn left(&self, changed: u64) -> usize {
        let changed = usize::try_from(changed).unwrap_or(usize::MAX);
        (self.rows.len() + self.beyond).saturating_sub(changed)
    }

    /// What the action has changed, for programs.
    pub fn document(&self, action: Action, affected: u64, left: usize) -> Value {
        json!({
            "action": action.verb, "dry_run": false, "meant": self.rows.len(), "affected": affected, "remaining": left,
        })
    }

    /// Says what the action has changed, and what remains.
    pub fn report(&self, output: Output, action: Action, affected: u64) -> Result<Exit, Failure> {
        let left = self.left(affected);
        match output.is_json {
            true => output.document(&self.document(action, affected, left))?,
            false => {
                output.line(format!("{}: {affected} {}", action.verb, action.rows))?;
                self.report_left(output, left)?;
            }
        }
        Ok(if left > 0 { Exit::Partly } else { Exit::Well })
    }

    /// Says how many rows remain, if any.
    pub fn report_left(&self, output: Output, left: usize) -> io::Result<()> {
        match left {
            0 => Ok(()),
            _ => output.line(self.remain(left)),
        }
    }

    fn remain(&self, left: usize) -> String {
        format!("{left} {} remain", if self.is_counted { "more" } else { "or more" })
    }
}

impl<T: Serialize> Meant<T> {
    /// Shows the rows and asks for confirmation. Returns whether there is something to do: not in a dry run, and not
    /// without rows.
    pub fn is_agreed(
        &self,
        output: Output,
        action: Action,
        confirming: &Confirming,
        table: impl Fn(&[T]) -> io::Result<()>,
    ) -> Result<bool, Failure> {
        let (Action { verb, rows }, count) = (action, self.rows.len());
        if confirming.is_dry_run || count == 0 {
            match (output.is_json, count) {
                (true, _) => output.document(&json!({
                    "action": verb, "dry_run": confirming.is_dry_run, "meant": count, "remaining": self.beyond, rows: self.rows,
                }))?,
                (false, 0) => output.line(format!("there is nothing to {verb}"))?,
                (false, _) => {
                    table(&self.rows)?;
                    output.line(format!("would {verb} {count}; {}", self.remain(self.beyond)))?;
                }
            }
            return Ok(false);
        }
        if !output.is_json {
            table(&self.rows[..count.min(SHOWN_MAX)])?;
            if count > SHOWN_MAX {
                output.line(format!("… and {} more", count - SHOWN_MAX))?;
            }
        }
        confirming.ask(&format!("{verb} {count} {rows}?"))?;
        Ok(true)
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

    #[test]
    fn rows_that_somebody_else_has_changed_are_reported_as_left() {
        for (there, limit, changed, left) in [(3, 3, 3, 0), (3, 3, 1, 2), (5, 3, 3, 2), (5, 3, 0, 5), (3, 3, 4, 0)] {
            let meant = Meant::of((0..there).collect(), limit, Instant::now(), |_| true);
            assert_eq!(meant.left(changed), left);
        }
    }
}
