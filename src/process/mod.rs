//! Processing: claim what is due, run each handler on its own, settle the outcome.
//!
//! One file a verb; `engine.rs` holds what they share, `gate.rs` is where every run begins, `loops.rs` starts and ends the loops. The loops live on the store's thread and
//! never end because of the database; handlers run on the user's runtime and can neither stop a loop nor each other.

mod alarm;
mod batch;
mod batch_transact;
mod batching;
mod breaker;
mod claim;
mod confirm;
mod decide;
mod engine;
mod gate;
mod hand_over;
mod in_flight;
mod lane;
mod leash;
mod looks;
mod loops;
mod observe;
mod outcomes;
mod pace;
mod probe;
mod pulse;
mod rate;
mod renew;
mod retain;
mod run;
mod setbacks;
mod settle;
mod slots;
mod solo;
mod together;
mod transact;
mod trouble;
mod upkeep;
mod waiting;

pub(crate) use lane::{Lane, Redact};
pub(crate) use loops::{ClaimMode, Extent, Loops};
