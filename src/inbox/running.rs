//! A running inbox: the handle to end it with.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::accept::Intake;
#[cfg(feature = "kafka")]
use crate::kafka::{Ingest, RunningRelay};
use crate::process::Loops;
use crate::store::Backend;
use crate::types::{DURATION_MAX, Error, Health, HealthReason, Result};

/// How long batches that were being accepted may take to end, when the grace is shorter.
const BATCH_WAIT_MIN: Duration = Duration::from_secs(1);

/// How long the last batches and the last commit may take, when the grace is shorter.
#[cfg(feature = "kafka")]
const INGEST_WAIT_MIN: Duration = Duration::from_secs(5);

/// Says how a running inbox is. Made by [`Running::monitor`]; cheap to clone, so that a service's endpoints can have it while another task
/// holds the [`Running`].
#[derive(Clone)]
pub struct Monitor {
    parts: Vec<Part>,
}

/// A part of an inbox that says what is not as it should be.
type Part = Arc<dyn Fn() -> Vec<HealthReason> + Send + Sync>;

impl Monitor {
    /// As [`Running::health`]. After the end of the inbox it is not ready.
    #[must_use]
    pub fn health(&self) -> Health {
        Health::of(self.parts.iter().flat_map(|part| part()).collect())
    }
}

impl fmt::Debug for Monitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Monitor")
    }
}
/// How long the relay's last batch may take, when the grace is over.
#[cfg(feature = "kafka")]
const RELAY_WAIT_MIN: Duration = Duration::from_secs(1);

/// Processing in the background. Dropping it stops at once: handlers are cancelled and their claims given back.
#[must_use = "processing stops when this is dropped"]
pub struct Running<B: Backend> {
    intake: Arc<Intake<B>>,
    loops: Option<Loops<B>>,
    monitor: Monitor,
    #[cfg(feature = "kafka")]
    ingest: Option<Ingest>,
    #[cfg(feature = "kafka")]
    relay: Option<RunningRelay>,
}

impl<B: Backend> Running<B> {
    pub(super) fn new(intake: Arc<Intake<B>>, loops: Loops<B>) -> Self {
        let monitor = Monitor { parts: vec![Arc::new(loops.health())] };
        Self {
            intake,
            loops: Some(loops),
            monitor,
            #[cfg(feature = "kafka")]
            ingest: None,
            #[cfg(feature = "kafka")]
            relay: None,
        }
    }

    #[cfg(feature = "kafka")]
    pub(super) fn with_relay(mut self, relay: RunningRelay) -> Self {
        self.monitor.parts.push(Arc::new(relay.health()));
        self.relay = Some(relay);
        self
    }

    #[cfg(feature = "kafka")]
    pub(super) fn with(mut self, ingest: Ingest) -> Self {
        self.monitor.parts.push(Arc::new(ingest.health(&self.intake)));
        self.ingest = Some(ingest);
        self
    }

    /// How the inbox is, for the service's own health endpoint. Asks neither the database nor Kafka: it costs next to nothing.
    ///
    /// ```no_run
    /// # async fn run(inbox: wharf::Inbox<wharf::Postgres>) -> wharf::Result<()> {
    /// let running = inbox.start().await?;
    /// let health = running.health();
    /// if !health.is_ready {
    ///     println!("{health}"); // not ready: the database has not answered for 12s
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn health(&self) -> Health {
        self.monitor.health()
    }

    /// A handle for endpoints that ask for the health while another task awaits [`Running::failure`]. `examples/health.rs` serves it with axum.
    #[must_use]
    pub fn monitor(&self) -> Monitor {
        self.monitor.clone()
    }

    /// Resolves with the error that ended processing or the consumption from Kafka. Stays pending while both are healthy.
    ///
    /// Nothing that passes by itself ends either of them: not a database or a broker that is away, not a handler that fails. What does
    /// is another process with the same `group.instance.id`, the end of the runtime that handlers run on, or a bug. Call
    /// [`Running::shutdown`], then end the process, so that it is started again.
    pub async fn failure(&mut self) -> Error {
        let engine = self.loops.as_ref().map(Loops::failure);
        let engine = async {
            match engine {
                Some(failure) => failure.await,
                None => std::future::pending().await,
            }
        };
        #[cfg(feature = "kafka")]
        {
            let ingest = async {
                match &mut self.ingest {
                    Some(ingest) => ingest.failure().await,
                    None => std::future::pending().await,
                }
            };
            let relay = async {
                match &mut self.relay {
                    Some(relay) => relay.failure().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                error = ingest => error,
                error = relay => error,
                error = engine => error,
            }
        }
        #[cfg(not(feature = "kafka"))]
        engine.await
    }

    /// Stops: nothing new is read from Kafka, what is stored is committed and the group is left; nothing new is claimed, running handlers have `grace` to end, the rest is cancelled and given back, due at once and with
    /// nothing counted. The relay of the outbox ends last. Takes at most the grace and seven seconds.
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
        loops.stop_bringing_in();
        self.intake.detach();
        let loops_ended = async {
            loops.brought_in(grace.max(BATCH_WAIT_MIN)).await;
            loops.end(deadline.saturating_duration_since(Instant::now())).await
        };
        let ((), ended) = tokio::join!(ingest_ended, loops_ended);
        // Last: handlers publish until they end.
        #[cfg(feature = "kafka")]
        if let Some(relay) = self.relay.take() {
            relay.end(deadline.max(Instant::now() + RELAY_WAIT_MIN)).await;
        }
        ended
    }
}

impl<B: Backend> Drop for Running<B> {
    fn drop(&mut self) {
        if let Some(loops) = self.loops.take() {
            loops.stop_bringing_in();
            self.intake.detach();
            drop(loops);
        }
    }
}

impl<B: Backend> fmt::Debug for Running<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Running")
    }
}
