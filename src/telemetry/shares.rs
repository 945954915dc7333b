//! Gauges of a process with several inboxes: each inbox sets its own share, and the gauge shows the shares of all.
//!
//! Counts are added up. A pool that several inboxes use counts once. Of durations, and of values that are read from the
//! database, the largest is shown, because several inboxes may use the same database. The share of an inbox ends with
//! it, and the shares of the others stay.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::counts;
use super::metric::{Metric, MetricScope, MetricUnit};

/// What one inbox, or one of its sources, adds to the gauges of its process, until it is dropped.
pub(crate) struct Share {
    /// Unique within the process.
    id: usize,
}

impl Share {
    /// A share that is still empty.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        Self { id: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    /// Sets the share of a gauge. `values` are the values of the metric's labels, in order.
    pub(crate) fn set(&self, metric: &'static Metric, values: &[&str], value: f64) {
        self.set_of(self.id, metric, values, value);
    }

    /// Like [`Share::set`], for something that several inboxes may use together, such as a pool. `of` is its address.
    pub(crate) fn set_of(&self, of: usize, metric: &'static Metric, values: &[&str], value: f64) {
        if !cfg!(feature = "metrics") {
            return;
        }
        let place = (metric.name, values.iter().map(|value| (*value).to_owned()).collect());
        let mut gauges = lock();
        let gauge = gauges.entry(place).or_insert_with(|| Gauge { metric, parts: BTreeMap::new() });
        gauge.parts.insert(self.id, Part { of, value });
        counts::set(metric, values, together(metric, &gauge.parts));
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        lock().retain(|(_, values), gauge| {
            if gauge.parts.remove(&self.id).is_some() {
                let values: Vec<&str> = values.iter().map(String::as_str).collect();
                counts::set(gauge.metric, &values, together(gauge.metric, &gauge.parts));
            }
            !gauge.parts.is_empty()
        });
    }
}

/// The gauges of this process, by the name of the metric and the values of its labels. A std mutex: nothing awaits
/// while holding it. The recorder is called under it, so that the gauge has the last value that was computed.
static GAUGES: Mutex<BTreeMap<(&'static str, Vec<String>), Gauge>> = Mutex::new(BTreeMap::new());

/// A gauge and the shares of which it consists.
struct Gauge {
    metric: &'static Metric,
    /// By the id of the share.
    parts: BTreeMap<usize, Part>,
}

/// One share of a gauge.
#[derive(Debug, Clone, Copy)]
struct Part {
    /// What the value is about. Shares of the same thing count once.
    of: usize,
    value: f64,
}

fn lock() -> MutexGuard<'static, BTreeMap<(&'static str, Vec<String>), Gauge>> {
    // A recorder that panics leaves the map consistent.
    GAUGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The value of the gauge for all shares together; 0 without any.
fn together(metric: &Metric, parts: &BTreeMap<usize, Part>) -> f64 {
    if metric.scope == MetricScope::Database || metric.unit == MetricUnit::Seconds {
        return parts.values().map(|part| part.value).fold(0.0, f64::max);
    }
    let mut things: BTreeMap<usize, f64> = BTreeMap::new();
    for part in parts.values() {
        let value = things.entry(part.of).or_default();
        *value = value.max(part.value);
    }
    // Not `sum()`, whose result without any element is -0.
    things.values().fold(0.0, |sum, value| sum + value)
}

#[cfg(all(test, feature = "metrics"))]
mod tests {
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::super::table;
    use super::*;

    /// Runs the steps with a function that returns the exported value of a gauge. The handler must be unique to the
    /// test.
    fn exported(name: &str, handler: &str, steps: impl FnOnce(&dyn Fn() -> String)) {
        let recorder = PrometheusBuilder::new().build_recorder();
        let line = || {
            let text = recorder.handle().render();
            let of_it = format!("{name}{{handler=\"{handler}\"");
            let line = text.lines().find(|line| line.starts_with(&of_it)).unwrap_or_default();
            line.rsplit(' ').next().unwrap_or_default().to_owned()
        };
        metrics::with_local_recorder(&recorder, || steps(&line));
    }

    #[test]
    fn counts_of_inboxes_are_added_up_and_an_inbox_that_ends_takes_only_its_own_away() {
        exported(table::HANDLER_SLOTS.name, "shares.slots", |value| {
            let (one, other) = (Share::new(), Share::new());
            let set = |share: &Share, slots| share.set(&table::HANDLER_SLOTS, &["shares.slots"], slots);
            set(&one, 10.0);
            set(&other, 3.0);
            assert_eq!(value(), "13");
            set(&one, 4.0);
            assert_eq!(value(), "7");
            drop(one);
            assert_eq!(value(), "3");
            drop(other);
            assert_eq!(value(), "0");
        });
    }

    #[test]
    fn of_ages_and_of_values_of_the_database_the_largest_counts() {
        for metric in [&table::HANDLER_PAUSED, &table::HANDLER_PROCESSES] {
            exported(metric.name, "shares.largest", |value| {
                let (one, other) = (Share::new(), Share::new());
                one.set(metric, &["shares.largest"], 7.0);
                other.set(metric, &["shares.largest"], 2.0);
                assert_eq!(value(), "7", "{}", metric.name);
                drop(one);
                assert_eq!(value(), "2", "{}", metric.name);
            });
        }
    }

    #[test]
    fn a_pool_that_inboxes_share_counts_once() {
        let parts = |list: &[(usize, f64)]| {
            list.iter().enumerate().map(|(id, &(of, value))| (id, Part { of, value })).collect()
        };
        assert_eq!(together(&table::POOL_WAITING, &parts(&[(1, 4.0), (1, 5.0), (2, 3.0)])).to_string(), "8");
        assert_eq!(together(&table::POOL_WAITING, &parts(&[])).to_string(), "0");
    }
}
