//! The outbox: records that are sent to Kafka after the transaction that stored them has committed.
//!
//! `publish.rs` stores a record with the caller's own writes; `compose.rs` says with which id and headers (pure). `relay.rs` sends: it holds
//! slots of keys for a lease (`tenure.rs`), reads what waits in them (`floors.rs` says from where on, pure), sends it by a wire and marks what
//! the broker has acknowledged (`judge.rs` decides what each answer means, pure; `topics.rs` which topics wait, pure).
//!
//! Nothing here knows Kafka's client: `wire.rs` says what the relay needs of one, and `kafka/` has it.

mod compose;
#[cfg(feature = "kafka")]
mod floors;
#[cfg(feature = "kafka")]
mod handle;
#[cfg(feature = "kafka")]
mod judge;
mod publish;
#[cfg(feature = "kafka")]
mod relay;
#[cfg(feature = "kafka")]
mod tenure;
#[cfg(feature = "kafka")]
mod topics;
#[cfg(feature = "kafka")]
mod wire;

#[cfg(feature = "kafka")]
pub(crate) use handle::{RelayHandle, RelaySettings};
pub use publish::Outbox;
#[cfg(feature = "kafka")]
pub(crate) use wire::{Fate, Wire, WireTrouble};
