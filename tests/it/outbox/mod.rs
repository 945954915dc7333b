//! The outbox: a published record is sent after the commit, in order, and is never lost, whatever crashes. The tests
//! use real brokers wherever a real one can cause the situation.

mod chain;
mod dead_letters;
pub mod link;
mod order;
pub mod post;
mod publish;
mod refused;
pub mod sender;
mod takeover;
