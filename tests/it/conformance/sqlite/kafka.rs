//! The Kafka tests that depend on the store; the others concern groups, brokers and servers.

#[path = "../../kafka/flow.rs"]
mod flow;
#[path = "../../kafka/position.rs"]
mod position;
#[allow(dead_code, reason = "parts of it are for PostgreSQL only")]
#[path = "../../kafka/stage.rs"]
mod stage;
