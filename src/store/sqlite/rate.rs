//! Rate limits over all processes, in `inbox_handler`. Nobody else writes meanwhile: what is allowed when a claim begins is when it ends.

use std::time::Duration;

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::statement::{rows, statements};
use crate::store::rate;

rows! {
    RateRow { interval_us: i64, burst: i32, next_at: Option<i64> }
}

statements! {
    Limit("SELECT rate_interval_us, rate_burst, rate_next_at FROM inbox_handler WHERE id = :id AND rate_interval_us IS NOT NULL")
    -> RateRow { id: i16 }

    Move("UPDATE inbox_handler SET rate_next_at = :next_at WHERE id = :id") { id: i16, next_at: i64 }
}

/// The limit of a handler, as it stands.
pub(super) struct Rate {
    id: i16,
    now: i64,
    interval_us: i64,
    burst: i32,
    /// Not before now.
    next_at: i64,
}

impl Rate {
    /// None where there is no limit any more.
    pub(super) fn of(conn: &mut SqliteConnection, id: i16, now: i64) -> QueryResult<Option<Self>> {
        let row = Limit { id }.load::<RateRow>(conn)?.pop();
        Ok(row.map(|RateRow { interval_us, burst, next_at }| Self {
            id,
            now,
            interval_us,
            burst,
            next_at: next_at.map_or(now, |next_at| next_at.max(now)),
        }))
    }

    pub(super) fn allowed(&self) -> i32 {
        rate::allowed(self.next_at - self.now, self.interval_us, self.burst)
    }

    /// Takes what was claimed.
    pub(super) fn take(&self, conn: &mut SqliteConnection, claimed: usize) -> QueryResult<()> {
        if claimed == 0 {
            return Ok(());
        }
        Move { id: self.id, next_at: self.after(claimed) }.execute(conn).map(drop)
    }

    /// When more is allowed, after so many were claimed.
    pub(super) fn look_again_in(&self, claimed: usize) -> Option<Duration> {
        rate::look_again_in(self.after(claimed) - self.now, self.interval_us, self.burst)
    }

    fn after(&self, claimed: usize) -> i64 {
        let claimed = i64::try_from(claimed).unwrap_or(i64::MAX);
        self.next_at.saturating_add(self.interval_us.saturating_mul(claimed))
    }
}
