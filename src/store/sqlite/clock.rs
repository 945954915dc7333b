//! The store's clock and its timestamps: microseconds since 1970.
//!
//! There is one clock, the view `inbox_now`, and every operation reads it once, in its transaction. It has a resolution
//! of a millisecond. It is the host's clock plus `inbox_clock.offset_us`, so all processes that share the file have the
//! same clock. Changing that row moves the time for all of them, including the views.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::statement::{only_row, statements};
use crate::store::rows::DatabaseStamp;
use crate::store::seam::Stamp;

/// Year 9999: many programs cannot read later timestamps.
const MICROS_MAX: i64 = 253_402_300_799_999_999;

statements! {
    Now("SELECT at FROM inbox_now") -> i64 {}
}

/// The time of the current operation. Read once per operation, so that all its rows have the same time.
pub(super) fn now(conn: &mut SqliteConnection) -> QueryResult<i64> {
    Now {}.load::<i64>(conn).and_then(only_row)
}

/// An interval to add to a timestamp: truncated to the resolution of the clock, so that an interval below it means now.
pub(super) fn micros(duration: Duration) -> i64 {
    saturating(duration.as_millis() * 1_000)
}

/// Saturating, because a record's timestamp may hold any value. Times before 1970 become 1970.
pub(super) fn to_stamp(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| saturating(since.as_micros()))
}

fn saturating(micros: u128) -> i64 {
    i64::try_from(micros).unwrap_or(MICROS_MAX).min(MICROS_MAX)
}

impl DatabaseStamp for i64 {
    fn to_stamp(self) -> Stamp {
        Stamp(self)
    }

    fn to_time(self) -> SystemTime {
        from_stamp(self)
    }
}

fn from_stamp(micros: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(micros.clamp(0, MICROS_MAX).unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stamps_come_back_to_the_microsecond(millis in 0u64..250_000_000_000_000) {
            let time = UNIX_EPOCH + Duration::from_millis(millis);
            prop_assert_eq!(from_stamp(to_stamp(time)), time);
        }
    }
}
