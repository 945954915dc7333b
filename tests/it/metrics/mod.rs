//! Metrics: what a running service exports is what the table lists, and documents, dashboard and alert rules use nothing else.

mod exported;
mod generated;
mod promql;
pub mod service;
