//! Reading from Kafka: no record is lost, and no partition stalls. The tests use real brokers wherever a real one can
//! cause the situation, and librdkafka's mock broker where requests have to fail on purpose.

mod beginning;
mod flow;
mod kill_points;
mod lag;
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
