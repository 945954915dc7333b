//! Ingest from Kafka: nothing lost, nothing stalled. Real brokers where a real one can do it, librdkafka's mock broker where requests
//! have to fail on purpose.

mod flow;
mod position;
mod stage;
