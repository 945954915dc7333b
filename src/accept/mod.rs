//! The accept stage: finds the identity of each record, selects its handlers and stores records in batches, one
//! statement for each batch.
//!
//! `rules.rs` holds the handlers and the identity policy of each topic. `identity.rs` is that policy, `identify.rs`
//! applies it, and `prepare.rs` decides what a record becomes. `acceptor.rs` collects the records of callers into
//! batches. `write.rs` stores a batch through database outages and bad data. `following.rs` sends a batch before the
//! previous one is stored. `hand_over.rs` starts deliveries from memory, without a claim. `caller.rs` accepts in the
//! caller's transaction, `replay.rs` accepts quarantined records again, and `quarantine_run.rs` stops reading when all
//! records of a topic are quarantined.
//!
//! A record is never dropped: it becomes a message or a quarantine row, or it is counted as unwanted.

mod acceptor;
mod batch;
mod caller;
mod cloud_event;
mod field;
#[cfg(feature = "kafka")]
mod following;
mod hand_over;
mod identify;
mod identity;
mod intake;
mod json;
mod observe;
mod of_key;
mod order;
mod prepare;
#[cfg(feature = "kafka")]
mod quarantine_run;
mod ready;
mod replay;
mod rules;
mod write;

pub(crate) use acceptor::{Acceptor, Unfit};
#[cfg(feature = "kafka")]
pub(crate) use batch::{Row, RowBatch};
pub(crate) use caller::accept_in;
#[cfg(feature = "kafka")]
pub(crate) use following::{Followed, follow};
pub(crate) use hand_over::{HandOver, Reservations};
pub use identity::Identity;
pub(crate) use intake::Intake;
#[cfg(feature = "kafka")]
pub(crate) use ready::{Decision, DecoderError, Undecided};
pub(crate) use replay::replay_loop;
pub(crate) use rules::Rules;
#[cfg(feature = "kafka")]
pub(crate) use write::{Patience, write};
