//! The outbox: what is published leaves after the commit, in order, and is never lost, whatever dies. Real brokers where a real one can do it.

mod chain;
mod dead_letters;
pub mod link;
mod order;
mod post;
mod publish;
mod refused;
pub mod sender;
mod takeover;
