//! Hand-over: a delivery is stored as claimed and started from memory, without a claim statement.
//!
//! The accept stage knows only these two traits. The engine implements them: it decides whether a delivery may start
//! now, and starts it. So `accept` does not import `process`.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::BoxFuture;

use crate::store::seam::NewMessage;

/// Runs deliveries in this process. Handlers are identified by their index in the order of registration.
pub(crate) trait HandOver: Send + Sync {
    /// Begins a hand-over. The caller holds the result from before the deliveries are stored until they are started.
    fn begin(self: Arc<Self>) -> BoxFuture<'static, Box<dyn Reservations>>;

    /// Called when deliveries were stored that wait to be claimed: the claim loop need not wait for its next poll.
    fn wake(&self);

    /// Called when deliveries were stored in the caller's transaction, which has not ended. The engine claims again
    /// when the next handler ends, because that may have committed the transaction.
    fn expect(&self);

    /// Releases deliveries (message seq and handler) that an earlier, failed try may have stored as claimed by this
    /// process, unless they are running.
    fn release_lost(&self, deliveries: Vec<(i64, usize)>) -> BoxFuture<'_, ()>;

    /// Records whether intake from a source is open, for the status of this process.
    #[cfg(feature = "kafka")]
    fn note_intake(&self, source: &str, is_open: bool);
}

/// Places that are reserved for deliveries about to be stored, to run or to wait for a slot. Dropping this frees them.
pub(crate) trait Reservations: Send {
    /// The process that the deliveries are claimed for.
    fn processor(&self) -> i32;

    /// Reserves a place of a handler for its delivery of a message (its index in the batch). Returns false when the
    /// delivery can neither start now nor wait in memory.
    fn reserve(&mut self, message: usize, handler: usize) -> bool;

    /// Starts the reserved deliveries. `new` holds the seq of each message that was stored as new; deliveries of the
    /// others were not stored as claimed. `sent_at` is a moment before the statement was sent: the leases begin then.
    fn start(self: Box<Self>, messages: &[NewMessage], new: &[Option<i64>], sent_at: Instant);
}
