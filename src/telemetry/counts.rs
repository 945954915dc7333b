//! Counters, gauges and histograms for the `metrics` facade. Names and labels come from `table.rs`.
//!
//! Without the feature `metrics`, every function here does nothing. With it, counting a record or a delivery is a
//! lookup in a thread-local map and an atomic addition. For rare events, the recorder is asked for the counter each
//! time, because it may drop idle metrics. Label values are topics, handler keys, sources, partitions, brokers and
//! fixed words, never a value from a record.

#[cfg(feature = "metrics")]
pub(crate) use with_metrics::{Clock, add, add_often, begin, record, record_often, set};
#[cfg(not(feature = "metrics"))]
pub(crate) use without_metrics::{Clock, add, add_often, begin, record, record_often, set};

#[cfg(feature = "metrics")]
mod with_metrics {
    use std::cell::RefCell;
    use std::collections::HashMap;
    use std::time::{Duration, Instant};

    use metrics::{Counter, Histogram, Label, Unit};

    use super::super::metric::{Metric, MetricKind, MetricUnit};
    use super::super::table;

    /// A metric and the value of its second label, by their addresses: hashing addresses is cheaper than hashing texts.
    /// A text with two addresses gets two handles of the same counter, which does no harm.
    type Place = (usize, usize, usize);

    /// Handles by the value of their first label.
    type ByFirst<H> = HashMap<Place, HashMap<Box<str>, H>>;

    /// The counters and histograms that a thread has used.
    #[derive(Default)]
    struct Handles {
        counters: ByFirst<Counter>,
        histograms: ByFirst<Histogram>,
    }

    // Thread-local, so that counting takes no lock.
    thread_local! {
        static KNOWN: RefCell<Handles> = RefCell::default();
    }

    /// Describes every metric to the recorder, and creates the counters of these handlers and topics with 0: Prometheus
    /// does not see an increase in a counter that first appears with 1. Idempotent.
    pub(crate) fn begin<'a>(handlers: impl Iterator<Item = &'a str>, topics: impl Iterator<Item = &'a str>) {
        describe();
        let add_zeros = |metric: &'static Metric, of: &str| {
            metric.values.iter().for_each(|value| add(metric, &[of, value], 0));
        };
        for handler in handlers {
            [&table::CLAIMS, &table::OUTCOMES, &table::POISONED, &table::BREAKERS]
                .into_iter()
                .for_each(|metric| add_zeros(metric, handler));
        }
        for topic in topics {
            [&table::RECORDS, &table::MISSING_IDENTITIES].into_iter().for_each(|metric| add_zeros(metric, topic));
            ["conflict", "missing identity"].iter().for_each(|reason| add(&table::QUARANTINED, &[topic, reason], 0));
        }
        table::PURGED.values.iter().for_each(|rows| add(&table::PURGED, &[rows], 0));
        ["accept", "claim", "settle"].iter().for_each(|operation| add(&table::ERRORS, &["store", operation], 0));
    }

    fn describe() {
        for metric in table::metrics() {
            let unit = match metric.unit {
                MetricUnit::Count => Unit::Count,
                MetricUnit::Seconds => Unit::Seconds,
                MetricUnit::Bytes => Unit::Bytes,
            };
            match metric.kind {
                MetricKind::Counter => metrics::describe_counter!(metric.name, unit, metric.meaning),
                MetricKind::Gauge => metrics::describe_gauge!(metric.name, unit, metric.meaning),
                MetricKind::Histogram => metrics::describe_histogram!(metric.name, unit, metric.meaning),
            }
        }
    }

    /// Adds to a counter. `values` are the values of the metric's labels, in order; likewise in the functions below.
    pub(crate) fn add(metric: &'static Metric, values: &[&str], number: u64) {
        metrics::counter!(metric.name, labels(metric, values)).increment(number);
    }

    /// Like [`add`] with 1, for frequent events. `of` is the value of the first label, and `what` of the second one, if
    /// there is one.
    pub(crate) fn add_often(metric: &'static Metric, of: &str, what: &'static str) {
        let ask = || metrics::counter!(metric.name, labels(metric, &[of, what][..metric.labels.len()]));
        with_known(|known| known_or(&mut known.counters, place(metric, what), of, ask).increment(1));
    }

    /// Sets a gauge.
    pub(crate) fn set(metric: &'static Metric, values: &[&str], value: f64) {
        metrics::gauge!(metric.name, labels(metric, values)).set(value);
    }

    /// Adds a value to a histogram.
    pub(crate) fn record(metric: &'static Metric, values: &[&str], value: f64) {
        metrics::histogram!(metric.name, labels(metric, values)).record(value);
    }

    /// Like [`record`], for frequent durations; labels as in [`add_often`].
    pub(crate) fn record_often(metric: &'static Metric, of: &str, what: &'static str, took: Duration) {
        let ask = || metrics::histogram!(metric.name, labels(metric, &[of, what][..metric.labels.len()]));
        with_known(|known| known_or(&mut known.histograms, place(metric, what), of, ask).record(took));
    }

    /// All labels of a metric with these values.
    fn labels(metric: &'static Metric, values: &[&str]) -> Vec<Label> {
        debug_assert_eq!(metric.labels.len(), values.len(), "{}", metric.name);
        let given = metric.labels.iter().zip(values).map(|(label, value)| Label::new(*label, (*value).to_owned()));
        given.chain(metric.fixed.iter().map(|(label, value)| Label::from_static_parts(label, value))).collect()
    }

    /// The key of a metric in the thread-local map. `what` needs its length too: a text and its prefix share an
    /// address.
    fn place(metric: &'static Metric, what: &'static str) -> Place {
        (std::ptr::from_ref(metric) as usize, what.as_ptr() as usize, what.len())
    }

    /// Calls `counting` with the handles of this thread, unless that is impossible: then the event is not counted.
    fn with_known(counting: impl FnOnce(&mut Handles)) {
        // A thread that is ending has no map any more. The map is borrowed if the recorder, which is user code, calls
        // back into this function.
        let _ = KNOWN.try_with(|known| known.try_borrow_mut().map(|mut known| counting(&mut known)));
    }

    /// The handle of a metric; the recorder is asked only the first time.
    fn known_or<'k, H>(known: &'k mut ByFirst<H>, place: Place, of: &str, ask: impl FnOnce() -> H) -> &'k H {
        let known = known.entry(place).or_default();
        if !known.contains_key(of) {
            known.insert(of.into(), ask());
        }
        &known[of]
    }

    /// Measures a duration. Without metrics it does not read the clock.
    #[derive(Clone, Copy)]
    pub(crate) struct Clock(Instant);

    impl Clock {
        pub(crate) fn start() -> Self {
            Self(Instant::now())
        }

        pub(crate) fn elapsed(self) -> Duration {
            self.0.elapsed()
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod without_metrics {
    use std::time::Duration;

    use super::super::metric::Metric;

    pub(crate) fn begin<'a>(_handlers: impl Iterator<Item = &'a str>, _topics: impl Iterator<Item = &'a str>) {}

    pub(crate) fn add(_: &'static Metric, _values: &[&str], _number: u64) {}

    pub(crate) fn add_often(_: &'static Metric, _of: &str, _what: &'static str) {}

    pub(crate) fn set(_: &'static Metric, _values: &[&str], _value: f64) {}

    pub(crate) fn record(_: &'static Metric, _values: &[&str], _value: f64) {}

    pub(crate) fn record_often(_: &'static Metric, _of: &str, _what: &'static str, _took: Duration) {}

    #[derive(Clone, Copy)]
    pub(crate) struct Clock;

    impl Clock {
        pub(crate) fn start() -> Self {
            Self
        }

        pub(crate) fn elapsed(self) -> Duration {
            let Self = self;
            Duration::ZERO
        }
    }
}
