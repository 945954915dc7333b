//! The types of the metric table in `table.rs`, public as `wharf::observe`.

use serde::Serialize;

/// One metric that a service exports with the feature `metrics`. See [`metrics`](super::metrics).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Metric {
    /// The name in Prometheus' text format.
    pub name: &'static str,
    /// How its values behave.
    pub kind: MetricKind,
    /// The unit of its values.
    pub unit: MetricUnit,
    /// Whether each process has its own value, or all processes read the same one.
    pub scope: MetricScope,
    /// Labels with varying values, in the order in which they are exported.
    pub labels: &'static [&'static str],
    /// The possible values of the last label, if they are a fixed set; otherwise empty.
    pub values: &'static [&'static str],
    /// Labels that always have the same value.
    pub fixed: &'static [(&'static str, &'static str)],
    /// Upper bounds of the buckets of a histogram. Empty for other kinds.
    pub buckets: &'static [f64],
    /// The name of this metric in OpenTelemetry's messaging conventions, if it is one of them.
    pub opentelemetry: Option<&'static str>,
    /// A description, as exporters show it.
    pub meaning: &'static str,
}

/// How the values of a metric behave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum MetricKind {
    /// Only increases while the process runs.
    Counter,
    /// The current value.
    Gauge,
    /// How many values fell into each bucket.
    Histogram,
}

impl MetricKind {
    /// The word in Prometheus' text format: `counter`, `gauge` or `histogram`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// The unit of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum MetricUnit {
    /// A number of records, deliveries or connections; also 0 and 1 for no and yes.
    Count,
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
}

impl MetricUnit {
    /// `count`, `seconds` or `bytes`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Count => "count",
            Self::Seconds => "seconds",
            Self::Bytes => "bytes",
        }
    }
}

/// How the values of several processes are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum MetricScope {
    /// Each process has its own value: add them up.
    Process,
    /// All processes read the same value from the database: take the maximum, never the sum.
    Database,
}

impl MetricScope {
    /// `process` or `database`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Database => "database",
        }
    }
}
