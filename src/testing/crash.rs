//! Simulates a crash of the process at a chosen point of a delivery.
//!
//! A layer around the handler triggers the switch at that point and never returns. `drain` waits for the switch and
//! then abandons every claim, as a killed process would: nothing is settled or released.

use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use crate::handler::{Failure, Next};

/// Where in a delivery the process crashes. [`TestInbox::crash_at`](crate::testing::TestInbox::crash_at) takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CrashPoint {
    /// The delivery is claimed, and the handler has not begun.
    BeforeHandler,
    /// The handler has returned, and its outcome is not written. The transaction of a transactional handler is not
    /// committed.
    AfterHandler,
}

/// The switch that the wrapped handlers share with `drain`.
#[derive(Debug, Clone, Default)]
pub(super) struct CrashSwitch(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// A std mutex: nothing awaits while holding it.
    armed: Mutex<Option<CrashPoint>>,
    /// Notified when a delivery has reached the armed point.
    struck: Notify,
}

impl CrashSwitch {
    /// Sets the point at which the next delivery crashes.
    pub(super) fn arm(&self, point: CrashPoint) {
        *self.armed() = Some(point);
    }

    /// Waits until a delivery has reached the armed point.
    pub(super) async fn struck(&self) {
        self.0.struck.notified().await;
    }

    /// The layer that crashes at the armed point.
    pub(super) fn layer<'a>(&self, next: Next<'a>) -> BoxFuture<'a, Result<(), Failure>> {
        let switch = self.clone();
        Box::pin(async move {
            switch.pass(CrashPoint::BeforeHandler).await;
            let answer = next.run().await;
            switch.pass(CrashPoint::AfterHandler).await;
            answer
        })
    }

    /// Crashes here if this point is armed, and disarms it.
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
