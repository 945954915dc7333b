//! Converts PostgreSQL's timestamps (microseconds since 2000). Saturating, because a record's timestamp may hold any
//! value.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::pg::data_types::PgTimestamp;

use crate::store::rows::DatabaseStamp;
use crate::store::seam::Stamp;

/// From 1970 to 2000.
const POSTGRES_EPOCH_SECS: u64 = 946_684_800;
/// Year 9999: PostgreSQL allows later timestamps, but many clients cannot read them.
const MICROS_MAX: i64 = 252_455_615_999_999_999;

/// Times before 1970 are stored as 1970: no record is older.
pub(super) fn to_postgres(time: SystemTime) -> PgTimestamp {
    let epoch = UNIX_EPOCH + Duration::from_secs(POSTGRES_EPOCH_SECS);
    let micros = |duration: Duration| i64::try_from(duration.as_micros()).unwrap_or(MICROS_MAX).min(MICROS_MAX);
    PgTimestamp(match time.duration_since(epoch) {
        Ok(after) => micros(after),
        Err(before) => -micros(before.duration()).min(POSTGRES_EPOCH_SECS.cast_signed() * 1_000_000),
    })
}

impl DatabaseStamp for PgTimestamp {
    fn to_stamp(self) -> Stamp {
        Stamp(self.0)
    }

    fn to_time(self) -> SystemTime {
        from_postgres(self)
    }
}

/// A time that `SystemTime` cannot represent becomes the epoch of PostgreSQL.
fn from_postgres(PgTimestamp(micros): PgTimestamp) -> SystemTime {
    let epoch = UNIX_EPOCH + Duration::from_secs(POSTGRES_EPOCH_SECS);
    let distance = Duration::from_micros(micros.unsigned_abs());
    let moved = if micros >= 0 { epoch.checked_add(distance) } else { epoch.checked_sub(distance) };
    moved.unwrap_or(epoch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stamps_come_back_to_the_microsecond(millis in 0u64..250_000_000_000_000) {
            let time = UNIX_EPOCH + Duration::from_millis(millis);
            prop_assert_eq!(from_postgres(to_postgres(time)), time);
        }
    }
}
