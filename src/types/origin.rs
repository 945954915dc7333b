//! The message that a handler is working on: what it publishes meanwhile is known to come from it.
//!
//! Set while the handler's future is polled, and only then. A task that the handler spawns has none.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::StoredMessage;

thread_local! {
    static CURRENT: RefCell<Option<Arc<StoredMessage>>> = const { RefCell::new(None) };
}

/// The message that the running handler was given.
pub(crate) fn current() -> Option<Arc<StoredMessage>> {
    CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()
}

/// Works on a message: [`current`] is that message while `work` is polled.
pub(crate) fn within<F: Future + Unpin>(message: Arc<StoredMessage>, work: F) -> Within<F> {
    Within { message, work }
}

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

/// Puts back what was there, also when the work panics.
struct Before(Option<Arc<StoredMessage>>);

impl Drop for Before {
    fn drop(&mut self) {
        drop(set(self.0.take()));
    }
}

fn set(message: Option<Arc<StoredMessage>>) -> Option<Arc<StoredMessage>> {
    CURRENT.try_with(|current| current.replace(message)).ok().flatten()
}
