//! Observability: every decision is a `tracing` event (`events.rs`) and a count (`counts.rs`), and every operation that
//! takes time is a span (`spans.rs`). A bridge (`traces.rs`) passes spans to a tracing system; `otel.rs` is the one for
//! OpenTelemetry. `table.rs` lists every metric, with the types of `metric.rs`. `shares.rs` combines the gauges of
//! several inboxes.

pub(crate) mod counts;
pub(crate) mod events;
mod metric;
#[cfg(feature = "otel")]
pub(crate) mod otel;
pub(crate) mod shares;
pub(crate) mod spans;
pub(crate) mod table;
pub(crate) mod traces;

pub use metric::{Metric, MetricKind, MetricScope, MetricUnit};
pub use table::metrics;
