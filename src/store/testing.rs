//! The store operations for tests: move its clock, find a delivery, and remove everything.
//!
//! Internal and unstable, like `seam.rs`.

// Public in a private module: the bound of a public trait, but it cannot be named outside the crate.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::future::Future;
use std::time::Duration;

use crate::types::{Delivery, Error, Result, State};

/// Implemented by every backend that the test kit supports.
pub trait Testing: Send + Sync {
    /// Moves the clock forward for all stored data.
    fn move_clock(&self, by: Duration) -> impl Future<Output = Result<()>> + Send;

    /// The delivery of a message to a handler, by their names.
    fn find_delivery(
        &self,
        message_id: &str,
        handler_key: &str,
    ) -> impl Future<Output = Result<Option<Delivery>>> + Send;

    /// The seq of the newest message; 0 without messages.
    fn newest_message(&self) -> impl Future<Output = Result<i64>> + Send;

    /// The deliveries of the first message after this one.
    fn deliveries_after(&self, message_seq: i64) -> impl Future<Output = Result<Vec<Delivery>>> + Send;

    /// Removes everything that was created for the test.
    fn remove(&self) -> impl Future<Output = Result<()>> + Send;
}

/// A delivery as both stores return it.
#[cfg_attr(any(feature = "postgres", feature = "sqlite"), derive(diesel::Queryable))]
pub(super) struct DeliveryRow {
    state: String,
    attempts: i32,
    errors: i32,
    crashes: i32,
    due_in_us: i64,
    reason: Option<String>,
    last_error: Option<String>,
}

/// Fails for a state that this build does not know.
pub(super) fn delivery(row: DeliveryRow) -> Result<Delivery> {
    let DeliveryRow { state, attempts, errors, crashes, due_in_us, reason, last_error } = row;
    let states = [State::Pending, State::Running, State::Done, State::Discarded, State::Poisoned];
    let found = states.into_iter().find(|known| known.as_str() == state);
    Ok(Delivery {
        state: found.ok_or_else(|| Error::bug(format!("a delivery is in the unknown state {state:?}")))?,
        attempts: attempts.unsigned_abs(),
        errors: errors.unsigned_abs(),
        crashes: crashes.unsigned_abs(),
        due_in: Duration::from_micros(due_in_us.unsigned_abs()),
        reason,
        last_error,
    })
}
