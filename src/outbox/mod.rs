//! The outbox: records that are sent to Kafka after the transaction that stored them has committed.
//!
//! `publish.rs` stores a record together with the caller's own writes; `compose.rs` builds its id and headers (pure).
//! `relay.rs` sends: it holds slots of keys for a lease (`held_slots.rs`), reads the records that wait in them
//! (`floors.rs` decides from which id, pure), sends them through a wire, and marks those that the broker has
//! acknowledged. `judge.rs` decides what each reply means (pure), and `topics.rs` which topics wait (pure). `handle.rs`
//! starts and ends the relay.
//!
//! Nothing here depends on Kafka's client: `wire.rs` is the interface, and `kafka/` implements it.

mod compose;
#[cfg(feature = "kafka")]
mod floors;
#[cfg(feature = "kafka")]
mod handle;
#[cfg(feature = "kafka")]
mod held_slots;
#[cfg(feature = "kafka")]
mod judge;
mod publish;
#[cfg(feature = "kafka")]
mod relay;
#[cfg(feature = "kafka")]
mod topics;
#[cfg(feature = "kafka")]
mod wire;

#[cfg(feature = "kafka")]
pub(crate) use handle::{RelayHandle, RelaySettings};
pub use publish::Outbox;
#[cfg(feature = "kafka")]
pub(crate) use wire::{SendResult, Wire, WireProblem};
