//! A running inbox: the handle to end it with.

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tokio::time::timeout;

use super::Shared;
use crate::error::Result;
use crate::limits::DURATION_MAX;
use crate::process::Loops;
use crate::store::Backend;

/// How long batches that were being accepted may take to end, when the grace is shorter.
const GATE_WAIT_MIN: Duration = Duration::from_secs(1);

/// Processing in the background. Dropping it stops at once: handlers are cancelled and their claims given back.
#[must_use = "processing stops when this is dropped"]
pub struct Running<B: Backend> {
    shared: Arc<Shared<B>>,
    loops: Option<Loops<B>>,
}

impl<B: Backend> Running<B> {
    pub(super) fn new(shared: Arc<Shared<B>>, loops: Loops<B>) -> Self {
        Self { shared, loops: Some(loops) }
    }

    /// Stops: nothing new is claimed, running handlers have `grace` to end, the rest is cancelled and given back, due at once and with
    /// nothing counted. Takes at most the grace and six seconds.
    ///
    /// # Errors
    /// When outcomes could not be written because the database was away. Those deliveries run again when their claims have run out.
    pub async fn shutdown(mut self, grace: Duration) -> Result<()> {
        let Some(loops) = self.loops.take() else { return Ok(()) };
        let grace = grace.min(DURATION_MAX);
        let deadline = Instant::now() + grace;
        // Hand-over ends here, before anything else: accept goes on as into an inbox that is not running.
        loops.engine.stop_bringing_in();
        self.detach(&loops);
        // Batches that were already under way have brought in their last deliveries when the gate is free.
        drop(timeout(grace.max(GATE_WAIT_MIN), loops.engine.starting.write()).await);
        loops.end(deadline.saturating_duration_since(Instant::now())).await
    }

    fn detach(&self, loops: &Loops<B>) {
        let mut engine = self.shared.engine.write().unwrap_or_else(PoisonError::into_inner);
        if engine.as_ref().is_some_and(|engine| Arc::ptr_eq(engine, &loops.engine)) {
            *engine = None;
        }
    }
}

impl<B: Backend> Drop for Running<B> {
    fn drop(&mut self) {
        if let Some(loops) = self.loops.take() {
            loops.engine.stop_bringing_in();
            self.detach(&loops);
            drop(loops);
        }
    }
}

impl<B: Backend> fmt::Debug for Running<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Running")
    }
}
