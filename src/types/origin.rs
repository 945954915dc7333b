//! The message that the current handler processes, so that records that it publishes name their origin.
//!
//! It is set only while the handler's future is polled, in a thread-local variable. A task that the handler spawns has
//! no origin.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::StoredMessage;

thread_local! {
    static CURRENT: RefCell<Option<Arc<StoredMessage>>> = const { RefCell::new(None) };
}

/// The message of the handler that is being polled.
pub(crate) fn current() -> Option<Arc<StoredMessage>> {
    CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()
}

/// Wraps a future: while `work` is polled, [`current`] returns `message`.
pub(crate) fn within<F: Future + Unpin>(message: Arc<StoredMessage>, work: F) -> Within<F> {
    Within { message, work }
}

/// A future that sets the origin for each of its polls.
pub(crate) struct Within<F> {
    message: Arc<StoredMessage>,
    work: F,
}

impl<F: Future + Unpin> Future for Within<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let _before = Before(set(Some(Arc::clone(&self.message))));
        Pin::new(&mut self.work).poll(cx)
    }
}

/// Restores the previous value, also when the work panics.
struct Before(Option<Arc<StoredMessage>>);

impl Drop for Before {
    fn drop(&mut self) {
        drop(set(self.0.take()));
    }
}

/// Sets the origin and returns the previous one. Does nothing on a thread that is ending.
fn set(message: Option<Arc<StoredMessage>>) -> Option<Arc<StoredMessage>> {
    CURRENT.try_with(|current| current.replace(message)).ok().flatten()
}
