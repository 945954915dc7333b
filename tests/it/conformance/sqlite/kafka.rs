//! Of the ingest, what a store has a part in: the rest is about groups, brokers and servers.

#[path = "../../kafka/flow.rs"]
mod flow;
#[path = "../../kafka/position.rs"]
mod position;
#[allow(dead_code, reason = "some of it is for what only PostgreSQL can do")]
#[path = "../../kafka/stage.rs"]
mod stage;
