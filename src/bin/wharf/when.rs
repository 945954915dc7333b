//! Formats times for people: durations in two units, points in time to the second.

use std::time::{Duration, SystemTime};

/// How long ago the moment was.
pub fn age(moment: SystemTime) -> String {
    // If the other clock is ahead, the age is zero. Milliseconds are left out.
    let age = SystemTime::now().duration_since(moment).unwrap_or_default();
    span(Duration::from_secs(age.as_secs()))
}

/// Formats a duration in its two largest units.
pub fn span(span: Duration) -> String {
    let secs = span.as_secs();
    let (days, hours, minutes) = (secs / 86_400, secs / 3_600 % 24, secs / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) if secs == 0 && !span.is_zero() => format!("{}ms", span.as_millis()),
        (0, 0, 0) => format!("{secs}s"),
        (0, 0, minutes) => format!("{minutes}m {}s", secs % 60),
        (0, hours, minutes) => format!("{hours}h {minutes}m"),
        (days, hours, _) => format!("{days}d {hours}h"),
    }
}

pub fn secs(secs: f64) -> String {
    span(Duration::try_from_secs_f64(secs).unwrap_or_default())
}

/// Formats a point in time to the second, in UTC.
pub fn at(moment: SystemTime) -> String {
    humantime::format_rfc3339_seconds(moment).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_two_units() {
        let shown = |secs| span(Duration::from_secs(secs));
        assert_eq!([shown(0), shown(59), shown(61), shown(11_520)], ["0s", "59s", "1m 1s", "3h 12m"]);
        assert_eq!(shown(3 * 86_400 + 7_200), "3d 2h");
        assert_eq!(span(Duration::from_millis(7)), "7ms");
    }
}
