//! Hand-over: deliveries that are stored already claimed and started from memory, without a claim statement.
//!
//! Accepting knows only these two traits. Who implements them decides whether a delivery may start now, and starts it.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::BoxFuture;

use crate::store::seam::NewMessage;

/// Runs deliveries in this process. Handlers are named by their places in the order of registration.
pub(crate) trait HandOver: Send + Sync {
    /// Begins to start deliveries. The answer is held from before the deliveries are stored until they are started.
    fn begin(self: Arc<Self>) -> BoxFuture<'static, Box<dyn Reservations>>;

    /// Deliveries were stored that wait to be claimed.
    fn wake(&self);

    /// Deliveries were stored in a transaction that has not ended yet: a handler that ends may have committed it.
    fn expect(&self);

    /// Gives back deliveries (message and handler) that an earlier, failed try may have stored as claimed by this process, unless they are
    /// running.
    fn release_lost(&self, deliveries: Vec<(i64, usize)>) -> BoxFuture<'_, ()>;

    /// Notes whether records are read from Kafka, for the process's report.
    #[cfg(feature = "kafka")]
    fn note_intake(&self, is_open: bool);
}

/// Slots kept free for deliveries that are about to be stored. Dropping it frees them.
pub(crate) trait Reservations: Send {
    /// The process that the deliveries are claimed for.
    fn processor(&self) -> i32;

    /// Keeps a slot of a handler for its delivery of a message. False when it cannot start now.
    fn reserve(&mut self, message: usize, handler: usize) -> bool;

    /// Starts what was reserved. `new` holds the seq of each message that was stored as new: the others' deliveries were not stored as
    /// claimed. `sent_at` is a moment before the statement was sent: the leases begin then.
    fn start(self: Box<Self>, messages: &[NewMessage], new: &[Option<i64>], sent_at: Instant);
}
