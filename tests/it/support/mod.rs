//! What the tests stand on: real servers, real processes, switchable faults, captured events.
//!
//! A missing server is a failed test with instructions, never a skipped one. Everything started here ends with the
//! test process, however that ends.
#![allow(dead_code, reason = "a helper set: not every test run uses every helper")]
#![allow(unreachable_pub, reason = "nothing of a test binary is reachable from outside")]
#![allow(clippy::expect_used, clippy::panic, reason = "to fail is how a test reports")]

// In reading order: what the tests use, then what that is built on.
pub mod child;
pub mod database;
pub mod events;
pub mod kafka;
pub mod kafka_admin;
pub mod kafka_records;
pub mod kafka_transactions;
pub mod mock_kafka;
pub mod pgbouncer;
pub mod postgres;
pub mod proxy;
pub mod sqlite;
pub mod tls;

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
