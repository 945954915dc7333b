//! The store's clock, and its stamps: microseconds since 1970.
//!
//! There is one clock, the view `inbox_now`, and every act reads it once, in its transaction. It ticks in milliseconds. It is the host's,
//! so all processes that can share the file have it in common, moved by `inbox_clock.offset_us`: who changes that row moves time for
//! everybody, views included.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::statement::{only_row, statements};
use crate::store::rows::DatabaseStamp;
use crate::store::seam::Stamp;

/// Year 9999: later stamps are only odd, but few who read them know them.
const MICROS_MAX: i64 = 253_402_300_799_999_999;

statements! {
    Now("SELECT at FROM inbox_now") -> i64 {}
}

pub(super) fn now(conn: &mut SqliteConnection) -> QueryResult<i64> {
    Now {}.load::<i64>(conn).and_then(only_row)
}

/// An interval as it is added to the clock's stamps: cut to the clock's ticks, so that what is due in less than one is due now.
pub(super) fn micros(duration: Duration) -> i64 {
    saturating(duration.as_millis() * 1_000)
}

/// Saturating: a hostile record timestamp is only odd. Nothing is before 1970.
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
