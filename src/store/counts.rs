//! Numbers of rows on their way into a statement and out of one.

/// The bound of a statement. More than it can express is as good as no bound.
pub(super) fn limit(rows: u32) -> i32 {
    i32::try_from(rows).unwrap_or(i32::MAX)
}

/// A count that a statement answered; it is never negative.
pub(super) fn count(rows: i64) -> u64 {
    debug_assert!(rows >= 0, "a database counted {rows} rows");
    u64::try_from(rows).unwrap_or_default()
}
