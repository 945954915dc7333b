//! Whatever Kafka, its producers and its operators do: hostile records, requests that fail, logs of odd shape, back-pressure, endings,
//! settings, audits. On PostgreSQL: what is tried here stands before the store, or takes a proxy and a process of its own.

mod audit;
mod broken_log;
mod broker_trouble;
mod clusters;
mod ending;
mod hostile;
mod identity;
pub mod ingester;
mod leaders;
mod log_shapes;
mod memory;
mod pressure;
mod quarantine_run;
mod secure;
mod skew;
mod truncation;

use crate::kafka::stage;
