//! Shared code of the tests and benches: real servers, child processes, faults that can be switched on, captured
//! events, measurements.
//!
//! A test whose server is not installed fails with instructions to install it; it is never skipped. Every process
//! started here ends with the test process, however that ends.
//!
//! Nothing here uses Wharf itself, so a change in `src/` does not recompile this crate.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test reports by panicking")]
#![allow(clippy::missing_errors_doc, clippy::missing_panics_doc, reason = "for tests and benches only")]
#![allow(missing_docs, missing_debug_implementations, reason = "used by this repository's tests and benches only")]

// In reading order: first the modules that tests use, then those that they are built on.
pub mod browser;
pub mod child;
pub mod database;
pub mod events;
pub mod http;
pub mod kafka;
pub mod kafka_acls;
pub mod kafka_admin;
pub mod kafka_reading;
pub mod kafka_records;
pub mod kafka_transactions;
pub mod mock_kafka;
pub mod pgbouncer;
pub mod postgres;
pub mod proxy;
pub mod registry;
pub mod sdk;
pub mod sqlite;
pub mod tls;

pub mod bench;

pub mod cache;
pub mod database_server;
pub mod folder;
pub mod ports;
pub mod postgres_binaries;
pub mod process;
pub mod url;

mod kafka_binaries;
mod kafka_producer;
mod kafka_settings;
mod kafka_wire;
mod proxy_connection;
mod proxy_fault;
mod proxy_protocol;
