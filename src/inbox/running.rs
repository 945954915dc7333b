//! A running inbox: the handle to end it with.

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tokio::time::timeout;

use super::Shared;
#[cfg(feature = "kafka")]
use crate::kafka::Ingest;
use crate::process::Loops;
use crate::store::Backend;
use crate::types::{DURATION_MAX, Error, Result};

/// How long batches that were being accepted may take to end, when the grace is shorter.
const GATE_WAIT_MIN: Duration = Duration::from_secs(1);

/// How long the last batches and the last commit may take, when the grace is shorter.
#[cfg(feature = "kafka")]
const INGEST_WAIT_MIN: Duration = Duration::from_secs(5);

/// Processing in the background. Dropping it stops at once: handlers are cancelled and their claims given back.
#[must_use = "processing stops when this is dropped"]
pub struct Running<B: Backend> {
    shared: Arc<Shared<B>>,
    loops: Option<Loops<B>>,
    #[cfg(feature = "kafka")]
    ingest: Option<Ingest>,
}

impl<B: Backend> Running<B> {
    pub(super) fn new(shared: Arc<Shared<B>>, loops: Loops<B>) -> Self {
        Self {
            shared,
            loops: Some(loops),
            #[cfg(feature = "kafka")]
            ingest: None,
        }
    }

    #[cfg(feature = "kafka")]
    pub(super) fn with(mut self, ingest: Ingest) -> Self {
        self.ingest = Some(ingest);
        self
    }

    /// Waits until consuming from Kafka cannot go on, and says why; for ever, as long as it can. Only what a restart or a person can put
    /// right ends it, such as another process with the same `group.instance.id`. Handlers go on meanwhile: shut down, then end the process.
    #[cfg(feature = "kafka")]
    pub async fn failure(&mut self) -> Error {
        match &mut self.ingest {
            Some(ingest) => ingest.failure().await,
            None => std::future::pending().await,
        }
    }

    /// Stops: nothing new is read from Kafka, what is stored is committed and the group is left; nothing new is claimed, running handlers have `grace` to end, the rest is cancelled and given back, due at once and with
    /// nothing counted. Takes at most the grace and six seconds.
    ///
    /// # Errors
    /// When outcomes could not be written because the database was away. Those deliveries run again when their claims have run out.
    pub async fn shutdown(mut self, grace: Duration) -> Result<()> {
        let Some(loops) = self.loops.take() else { return Ok(()) };
        let grace = grace.min(DURATION_MAX);
        let deadline = Instant::now() + grace;
        #[cfg(feature = "kafka")]
        let ingest = self.ingest.take();
        let ingest_ended = async {
            #[cfg(feature = "kafka")]
            if let Some(ingest) = ingest {
                ingest.end(Instant::now() + grace.max(INGEST_WAIT_MIN)).await;
            }
        };
        // Hand-over ends here, before anything else: accept goes on as into an inbox that is not running.
        loops.engine.stop_bringing_in();
        self.detach(&loops);
        // Batches that were already under way have brought in their last deliveries when the gate is free.
        let loops_ended = async {
            drop(timeout(grace.max(GATE_WAIT_MIN), loops.engine.starting.write()).await);
            loops.end(deadline.saturating_duration_since(Instant::now())).await
        };
        let ((), ended) = tokio::join!(ingest_ended, loops_ended);
        ended
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
