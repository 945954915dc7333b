//! Lets the process "die" at a chosen point of a delivery.
//!
//! The handler is wrapped: at the point it strikes the switch and never returns. Whoever drains sees the strike and abandons every claim as a
//! killed process would: nothing is settled, nothing given back.

use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use crate::handler::{Body, ErasedHandler, ErasedTxHandler, Failure};
use crate::types::StoredMessage;

/// Where in a delivery the process dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CrashPoint {
    /// It is claimed, and the handler has not begun.
    BeforeHandler,
    /// The handler has ended, and nothing is written of its outcome; a transactional one is not committed.
    AfterHandler,
}

/// Shared by the wrapped handlers and who drains.
#[derive(Debug, Clone, Default)]
pub(super) struct CrashSwitch(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// A std mutex: nothing awaits while holding it.
    armed: Mutex<Option<CrashPoint>>,
    struck: Notify,
}

impl CrashSwitch {
    pub(super) fn arm(&self, point: CrashPoint) {
        *self.armed() = Some(point);
    }

    /// Waits until a delivery has died.
    pub(super) async fn struck(&self) {
        self.0.struck.notified().await;
    }

    pub(super) fn guard<C: Send + 'static>(&self, body: Body<C>) -> Body<C> {
        match body {
            Body::Plain(inner) => Body::Plain(Arc::new(Guarded { inner, switch: self.clone() })),
            Body::Transactional(inner) => Body::Transactional(Arc::new(Guarded { inner, switch: self.clone() })),
        }
    }

    /// Dies here, if this is where. Once.
    async fn pass(&self, point: CrashPoint) {
        let is_here = self.armed().take_if(|armed| *armed == point).is_some();
        if is_here {
            self.0.struck.notify_one();
            std::future::pending::<()>().await;
        }
    }

    fn armed(&self) -> std::sync::MutexGuard<'_, Option<CrashPoint>> {
        self.0.armed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Guarded<H: ?Sized> {
    switch: CrashSwitch,
    inner: Arc<H>,
}

impl ErasedHandler for Guarded<dyn ErasedHandler> {
    fn run(&self, message: Arc<StoredMessage>, attempt: u32) -> BoxFuture<'_, Result<(), Failure>> {
        async move {
            self.switch.pass(CrashPoint::BeforeHandler).await;
            let answer = self.inner.run(message, attempt).await;
            self.switch.pass(CrashPoint::AfterHandler).await;
            answer
        }
        .boxed()
    }
}

impl<C: Send + 'static> ErasedTxHandler<C> for Guarded<dyn ErasedTxHandler<C>> {
    fn run<'c>(
        &'c self,
        message: Arc<StoredMessage>,
        attempt: u32,
        conn: &'c mut C,
    ) -> BoxFuture<'c, Result<(), Failure>> {
        async move {
            self.switch.pass(CrashPoint::BeforeHandler).await;
            let answer = self.inner.run(message, attempt, conn).await;
            self.switch.pass(CrashPoint::AfterHandler).await;
            answer
        }
        .boxed()
    }
}
