//! Ingest from Kafka: nothing lost, nothing stalled. Real brokers where a real one can do it, librdkafka's mock broker where requests
//! have to fail on purpose.

mod flow;
mod kill_points;
mod observer;
mod pipeline;
mod position;
mod power_cut;
pub mod reader;
mod retention;
mod service;
pub mod stage;
mod static_member;
mod storm;
mod supervised;
mod watched;
mod zombie;
