//! A running inbox: the handle to end it with.

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::Shared;
use crate::error::Result;
use crate::process::Loops;
use crate::store::Backend;

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
    /// nothing counted. Takes at most the grace and five seconds.
    ///
    /// # Errors
    /// When outcomes could not be written because the database was away. Those deliveries run again when their claims have run out.
    pub async fn shutdown(mut self, grace: Duration) -> Result<()> {
        // Hand-over ends here, before anything else: accept goes on as into an inbox that is not running.
        self.detach();
        match self.loops.take() {
            Some(loops) => loops.end(grace).await,
            None => Ok(()),
        }
    }

    fn detach(&self) {
        *self.shared.engine.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl<B: Backend> Drop for Running<B> {
    fn drop(&mut self) {
        if let Some(loops) = self.loops.take() {
            self.detach();
            loops.abandon();
        }
    }
}

impl<B: Backend> fmt::Debug for Running<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Running")
    }
}
