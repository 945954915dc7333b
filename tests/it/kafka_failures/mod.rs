//! Problems that Kafka, its producers and its operators can cause: hostile records, failing requests, unusual logs,
//! back-pressure, shutdown, settings, audits. On PostgreSQL only: these tests concern the code before the store, or
//! need a proxy or a separate process.

mod acls;
mod audit;
mod broken_log;
mod broker_failures;
mod clusters;
mod ending;
mod hostile;
mod identity;
pub mod ingester;
mod leaders;
mod log_shapes;
mod memory;
#[cfg(feature = "oidc")]
mod oidc;
mod patterns;
mod pressure;
mod quarantine_run;
mod racks;
mod secure;
mod skew;
pub mod sources;
pub mod tokens;
mod truncation;

use crate::kafka::stage;
