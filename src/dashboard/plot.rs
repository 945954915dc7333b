//! Plots as inline SVG, with the same values in text for screen readers. Pure.

use std::fmt::Write;
use std::time::{Duration, SystemTime};

use super::text;
use crate::operate::Diagnosis;

/// The size of a plot in SVG units. The page scales it.
const WIDTH: f64 = 300.0;
const HEIGHT: f64 = 64.0;
/// A longer time without a sample breaks the line.
const BREAK: Duration = Duration::from_secs(120);
/// The possible time spans of a plot.
const SPANS_SECS: [u64; 4] = [300, 900, 1_800, 3_600];

/// If the first sample is younger, the plots do not cover an hour. A little less than an hour, because older samples
/// are dropped.
const YOUNG: Duration = Duration::from_secs(3_500);

/// The plotted values of one sample.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point {
    pub(super) at: SystemTime,
    backlog: f64,
    done_per_sec: f64,
    failed_per_sec: f64,
    lag_secs: f64,
}

impl Point {
    pub(super) fn of(diagnosis: &Diagnosis, at: SystemTime) -> Self {
        let sum = |of: fn(&crate::types::HandlerStatus) -> f64| diagnosis.handlers.iter().map(of).sum();
        let oldest = diagnosis.handlers.iter().filter_map(|handler| handler.oldest_due_secs);
        Self {
            at,
            backlog: sum(|handler| (handler.due + handler.later + handler.held + handler.running) as f64),
            done_per_sec: sum(|handler| handler.done_per_sec),
            failed_per_sec: sum(|handler| handler.failed_per_sec),
            lag_secs: oldest.fold(0.0, f64::max),
        }
    }
}

/// One plot, ready for its template.
pub(super) struct Plot {
    pub(super) name: &'static str,
    /// The explanation below the name.
    pub(super) meaning: &'static str,
    pub(super) now: String,
    pub(super) highest: String,
    pub(super) span: String,
    pub(super) line: String,
    pub(super) area: String,
    /// The CSS class, which sets the colour.
    pub(super) class: &'static str,
}

struct Series {
    name: &'static str,
    meaning: &'static str,
    class: &'static str,
    value: fn(&Point) -> f64,
    shown: fn(f64) -> String,
    /// The minimum of the axis' upper end.
    top_min: f64,
}

const SERIES: [Series; 4] = [
    Series {
        name: "Backlog",
        meaning: "deliveries that are not finished",
        class: "backlog",
        value: |point| point.backlog,
        shown: |value| text::at_least(value as u64),
        top_min: 10.0,
    },
    Series {
        name: "Done",
        meaning: "deliveries done per second",
        class: "done",
        value: |point| point.done_per_sec,
        shown: text::rate,
        top_min: 1.0,
    },
    Series {
        name: "Failures",
        meaning: "failed attempts per second",
        class: "failed",
        value: |point| point.failed_per_sec,
        shown: text::rate,
        top_min: 1.0,
    },
    Series {
        name: "Lag",
        meaning: "how long the oldest delivery has been due",
        class: "lag",
        value: |point| point.lag_secs,
        shown: text::span,
        top_min: 10.0,
    },
];

/// Since when there are samples, if that is less than the whole hour: the samples of a process that was just started
/// begin with it.
pub(super) fn since(points: &[Point], now: SystemTime) -> Option<String> {
    let first = points.first()?.at;
    let is_young = now.duration_since(first).is_ok_and(|age| age < YOUNG);
    // Hours and minutes of `2026-11-18T14:03:07Z`.
    is_young.then(|| humantime::format_rfc3339_seconds(first).to_string().chars().skip(11).take(5).collect())
}

/// The four plots of the start page.
pub(super) fn plots(points: &[Point], now: SystemTime) -> Vec<Plot> {
    SERIES.iter().map(|series| plot(series, points, now)).collect()
}

fn plot(series: &Series, points: &[Point], now: SystemTime) -> Plot {
    let age = |point: &Point| now.duration_since(point.at).unwrap_or_default();
    let oldest = points.first().map_or(0, |first| age(first).as_secs());
    let span_secs = SPANS_SECS.into_iter().find(|span| *span >= oldest).unwrap_or(3_600);
    let highest = points.iter().map(series.value).fold(0.0, f64::max);
    let top = highest.max(series.top_min) * 1.08;
    let place = |point: &Point| {
        let x = WIDTH * (1.0 - age(point).as_secs_f64() / span_secs as f64).clamp(0.0, 1.0);
        (x, HEIGHT - HEIGHT * (series.value)(point) / top)
    };
    let (mut line, mut area) = (String::new(), String::new());
    for run in points.chunk_by(|one, next| next.at.duration_since(one.at).is_ok_and(|pause| pause <= BREAK)) {
        let places: Vec<(f64, f64)> = run.iter().map(place).collect();
        let (Some(first), Some(last)) = (places.first(), places.last()) else { continue };
        let _ = write!(area, "M{:.1} {HEIGHT}", first.0);
        for (number, (x, y)) in places.iter().enumerate() {
            // Writing to a String cannot fail.
            let _ = write!(line, "{}{x:.1} {y:.1}", if number == 0 { 'M' } else { 'L' });
            let _ = write!(area, "L{x:.1} {y:.1}");
        }
        // Draws a single sample as a dot.
        let _ = write!(line, "h0.01");
        let _ = write!(area, "L{:.1} {HEIGHT}Z", last.0);
    }
    let current = points.last().map_or(0.0, series.value);
    Plot {
        name: series.name,
        meaning: series.meaning,
        now: (series.shown)(current),
        highest: (series.shown)(highest),
        span: text::span(span_secs as f64),
        line,
        area,
        class: series.class,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(secs_ago_and_backlog: &[(u64, f64)], now: SystemTime) -> Vec<Point> {
        let point = |(ago, backlog): &(u64, f64)| {
            let at = now - Duration::from_secs(*ago);
            Point { at, backlog: *backlog, done_per_sec: 0.0, failed_per_sec: 0.0, lag_secs: 0.0 }
        };
        secs_ago_and_backlog.iter().map(point).collect()
    }

    #[test]
    fn a_line_is_broken_where_samples_are_missing_and_stays_within_the_plot() {
        let now = SystemTime::now();
        let drawn = plot(&SERIES[0], &points(&[(600, 5.0), (590, 20.0), (10, 0.0), (0, 40.0)], now), now);
        assert_eq!(drawn.line.matches('M').count(), 2, "{}", drawn.line);
        assert_eq!((drawn.now.as_str(), drawn.highest.as_str(), drawn.span.as_str()), ("40", "40", "15 min"));
        assert!(!drawn.line.contains('-') && !drawn.line.contains("NaN"), "{}", drawn.line);
    }

    #[test]
    fn a_young_dashboard_says_since_when_it_has_samples() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(86_400 + 14 * 3_600 + 600);
        assert_eq!(since(&points(&[(420, 1.0), (10, 1.0)], now), now).as_deref(), Some("14:03"));
        assert_eq!(since(&points(&[(3_595, 1.0), (10, 1.0)], now), now), None);
        assert_eq!(since(&[], now), None);
    }

    #[test]
    fn without_samples_a_plot_is_empty() {
        let drawn = plots(&[], SystemTime::now());
        assert_eq!((drawn.len(), drawn[1].line.as_str(), drawn[1].now.as_str()), (4, "", "0/s"));
    }
}
