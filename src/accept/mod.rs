//! Accepting: identity, fan-out, batch, one statement; then hand-over to handlers that are free.
//!
//! `rules.rs` says what a topic means, `identity.rs` is its identity policy, `prepare.rs` decides what a record becomes, `acceptor.rs` collects
//! batches, `write.rs` stores a batch whatever the database and the data do, `following.rs` sends one before its turn, `hand_over.rs` is the way to handlers that are free. A record is
//! never dropped: it becomes a message or a quarantine row, or it is counted as unwanted.

mod acceptor;
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
mod order;
mod prepare;
#[cfg(feature = "kafka")]
mod quarantine_run;
mod replay;
mod rules;
mod write;

pub(crate) use acceptor::{Acceptor, Unfit};
pub(crate) use caller::accept_in;
#[cfg(feature = "kafka")]
pub(crate) use following::{Followed, follow};
pub(crate) use hand_over::{HandOver, Reservations};
pub use identity::Identity;
pub(crate) use intake::Intake;
pub(crate) use replay::replay_loop;
pub(crate) use rules::Rules;
#[cfg(feature = "kafka")]
pub(crate) use write::{Patience, Row, RowBatch, write};
