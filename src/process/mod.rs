//! The process stage: claims due deliveries, runs their handlers and settles the outcomes.
//!
//! Each file is one task. `engine.rs` holds the shared state, `gate.rs` starts every run, `loops.rs` starts and ends
//! the loops. The loops run on the store's thread and survive database outages. Handlers run on the user's runtime;
//! none can stop a loop or another handler.

mod alarm;
mod batch;
mod batch_transact;
mod batching;
mod breaker;
mod claim;
mod claim_backoff;
mod confirm;
mod connections;
mod decide;
mod engine;
mod floors;
mod gate;
mod hand_over;
mod heartbeat;
mod in_flight;
mod lane;
mod large;
mod liveness;
mod loops;
mod next_round;
mod observe;
mod outcomes;
mod pace;
mod patience;
mod precedence;
mod probe;
mod rate;
mod ready;
mod refused;
mod renew;
mod retain;
mod run;
mod sample;
mod scans;
mod settle;
mod shared_transaction;
mod slots;
mod stop_signal;
mod store_errors;
mod suspects;
mod transact;
mod upkeep;
mod waiting;

pub(crate) use lane::{Lane, Redact};
pub(crate) use loops::{ClaimMode, Extent, Loops};
