//! Metrics: a running service exports exactly the metrics of the table, and the documentation, the dashboard and the
//! alert rules use no others.

pub mod breaker;
mod exported;
mod generated;
mod promql;
pub mod service;
