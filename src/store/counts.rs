//! Conversions of row counts for statement parameters and results.

/// The row limit of a statement. A larger value is as good as no limit.
pub(super) fn limit(rows: u32) -> i32 {
    i32::try_from(rows).unwrap_or(i32::MAX)
}

/// A count that a statement returned; it is never negative.
pub(super) fn count(rows: i64) -> u64 {
    debug_assert!(rows >= 0, "a database counted {rows} rows");
    u64::try_from(rows).unwrap_or_default()
}
