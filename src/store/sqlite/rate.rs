//! Rate limits over all processes, in `inbox_handler`. There is no other writer in the meantime, so the limit does not
//! change during a claim.

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

/// The current state of a handler's limit.
pub(super) struct Rate {
    id: i16,
    now: i64,
    interval_us: i64,
    burst: i32,
    /// Not earlier than now.
    next_at: i64,
}

impl Rate {
    /// Returns `None` if the handler no longer has a limit.
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

    /// How many starts are allowed now.
    pub(super) fn allowed(&self) -> i32 {
        rate::allowed(self.next_at - self.now, self.interval_us, self.burst)
    }

    /// Consumes the limit for the claimed deliveries.
    pub(super) fn take(&self, conn: &mut SqliteConnection, claimed: usize) -> QueryResult<()> {
        if claimed == 0 {
            return Ok(());
        }
        Move { id: self.id, next_at: self.after(claimed) }.execute(conn).map(drop)
    }

    /// When more starts are allowed, after this many were claimed.
    pub(super) fn scan_again_in(&self, claimed: usize) -> Option<Duration> {
        rate::scan_again_in(self.after(claimed) - self.now, self.interval_us, self.burst)
    }

    /// The schedule after this many starts.
    fn after(&self, claimed: usize) -> i64 {
        let claimed = i64::try_from(claimed).unwrap_or(i64::MAX);
        self.next_at.saturating_add(self.interval_us.saturating_mul(claimed))
    }
}
