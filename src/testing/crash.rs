//! Lets the process "die" at a chosen point of a delivery.
//!
//! A layer around the handler: at the point it strikes the switch and never returns. Whoever drains sees the strike and abandons every claim as a
//! killed process would: nothing is settled, nothing given back.

use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use crate::handler::{Failure, Next};

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

    /// A layer that crashes at the point.
    pub(super) fn layer<'a>(&self, next: Next<'a>) -> BoxFuture<'a, Result<(), Failure>> {
        let switch = self.clone();
        Box::pin(async move {
            switch.pass(CrashPoint::BeforeHandler).await;
            let answer = next.run().await;
            switch.pass(CrashPoint::AfterHandler).await;
            answer
        })
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
