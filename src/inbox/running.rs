//! A running inbox: the handle that stops it and reports its health.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(feature = "kafka")]
use futures_util::future::{join_all, select_all};

use crate::accept::Intake;
#[cfg(feature = "kafka")]
use crate::kafka::{Ingest, RunningRelay};
use crate::process::Loops;
use crate::store::Backend;
use crate::types::{DURATION_MAX, Error, Health, HealthReason, Result};

/// The shortest time for batches that are being accepted to end, even if the grace period is shorter.
const BATCH_WAIT_MIN: Duration = Duration::from_secs(1);

/// The shortest time for the last batches and the last offset commit, even if the grace period is shorter.
#[cfg(feature = "kafka")]
const INGEST_WAIT_MIN: Duration = Duration::from_secs(5);

/// Reports the health of a running inbox. [`Running::monitor`] returns it. Cloning is cheap, so that the endpoints of a
/// service can have it while another task holds the [`Running`].
///
/// ```
/// use wharf::health::Monitor;
///
/// /// The status code of a readiness endpoint.
/// fn ready(monitor: &Monitor) -> u16 {
///     if monitor.health().is_ready { 200 } else { 503 }
/// }
/// ```
#[derive(Clone)]
pub struct Monitor {
    parts: Vec<Part>,
}

/// A part of an inbox that reports its problems.
type Part = Arc<dyn Fn() -> Vec<HealthReason> + Send + Sync>;

impl Monitor {
    /// Like [`Running::health`]. After shutdown the inbox is not ready.
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

/// The shortest time for the relay's last batch, even if the grace period is over.
#[cfg(feature = "kafka")]
const RELAY_WAIT_MIN: Duration = Duration::from_secs(1);

/// A running inbox. [`Inbox::start`](crate::Inbox::start) returns it. Dropping it stops the inbox at once: handlers are
/// cancelled and their claims are released. Call [`Running::shutdown`] to give handlers time to finish.
///
/// ```no_run
/// # async fn run(inbox: wharf::Inbox<wharf::Postgres>) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tokio::signal::unix::{SignalKind, signal};
///
/// let mut running = inbox.start().await?;
/// let mut terminate = signal(SignalKind::terminate())?;
/// let failure = tokio::select! {
///     _ = terminate.recv() => None,
///     error = running.failure() => Some(error),
/// };
/// running.shutdown(Duration::from_secs(20)).await?;
/// if let Some(error) = failure { return Err(error.into()) } // the process must be restarted
/// # Ok(()) }
/// ```
#[must_use = "processing stops when this is dropped"]
pub struct Running<B: Backend> {
    intake: Arc<Intake<B>>,
    /// `None` after shutdown, so that dropping does not stop them twice.
    loops: Option<Loops<B>>,
    monitor: Monitor,
    #[cfg(feature = "kafka")]
    ingests: Vec<Ingest>,
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
            ingests: Vec::new(),
            #[cfg(feature = "kafka")]
            relay: None,
        }
    }

    /// Adds the relay, which is stopped last.
    #[cfg(feature = "kafka")]
    pub(super) fn with_relay(mut self, relay: RunningRelay) -> Self {
        self.monitor.parts.push(Arc::new(relay.health()));
        self.relay = Some(relay);
        self
    }

    /// Adds a Kafka source.
    #[cfg(feature = "kafka")]
    pub(super) fn with(mut self, ingest: Ingest) -> Self {
        self.monitor.parts.push(Arc::new(ingest.health(&self.intake)));
        self.ingests.push(ingest);
        self
    }

    /// Returns the health of the inbox, for the health endpoints of the service. It queries neither the database nor
    /// Kafka, so it is cheap.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Inbox, Message, Raw, Sqlite, Store, handler};
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let store = Store::<Sqlite>::in_memory().await?;
    /// # store.migrate().await?;
    /// # let send = handler(HandlerKey::new("mail.receipt"), send_receipt);
    /// # let inbox = Inbox::builder(store).subscribe("orders", send).build()?;
    /// let running = inbox.start().await?;
    /// let health = running.health();
    /// if !health.is_ready {
    ///     println!("{health}"); // not ready: the database has not answered for 12s
    /// }
    /// # assert_eq!(health.to_string(), "healthy");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn health(&self) -> Health {
        self.monitor.health()
    }

    /// Returns a handle that reports the health while another task awaits [`Running::failure`]. `examples/health.rs`
    /// serves it with axum.
    ///
    /// ```no_run
    /// # async fn run(inbox: wharf::Inbox<wharf::Postgres>) -> wharf::Result<()> {
    /// # async fn serve_health(_: wharf::health::Monitor) {}
    /// let mut running = inbox.start().await?;
    /// tokio::spawn(serve_health(running.monitor()));
    /// let error = running.failure().await;
    /// # Err(error) }
    /// ```
    #[must_use]
    pub fn monitor(&self) -> Monitor {
        self.monitor.clone()
    }

    /// Resolves with the fatal error that ended processing, the relay of the outbox, or the consumption from a Kafka
    /// source, which the error names. Stays pending while everything is healthy. Other sources continue until you call
    /// [`Running::shutdown`].
    ///
    /// Temporary conditions end nothing: an unavailable database or broker, a failing handler. A fatal error is another
    /// process with the same `group.instance.id`, the end of the runtime that handlers run on, or a bug. Call
    /// [`Running::shutdown`] and exit, so that the process is restarted. The example of [`Running`] also stops on
    /// SIGTERM.
    ///
    /// ```no_run
    /// # async fn run(inbox: wharf::Inbox<wharf::Postgres>) -> wharf::Result<()> {
    /// let mut running = inbox.start().await?;
    /// let error = running.failure().await;
    /// running.shutdown(std::time::Duration::from_secs(20)).await?;
    /// # Err(error) }
    /// ```
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
            let ingests = self.ingests.iter_mut().map(|ingest| Box::pin(ingest.failure()));
            let ingests: Vec<_> = ingests.collect();
            let ingest = async {
                match ingests.is_empty() {
                    true => std::future::pending().await,
                    false => select_all(ingests).await.0,
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

    /// Stops the inbox. No more records are read from Kafka; the offsets of stored records are committed, and the
    /// consumer leaves its group. No more deliveries are claimed; running handlers have `grace` to finish, and the
    /// others are cancelled and released, due at once and without consuming a retry. The relay of the outbox stops
    /// last. It takes at most `grace` plus seven seconds.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use wharf::{Failure, HandlerKey, Inbox, Message, Raw, Sqlite, Store, handler};
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let store = Store::<Sqlite>::in_memory().await?;
    /// # store.migrate().await?;
    /// # let send = handler(HandlerKey::new("mail.receipt"), send_receipt);
    /// # let inbox = Inbox::builder(store).subscribe("orders", send).build()?;
    /// let running = inbox.start().await?;
    /// // … on SIGTERM:
    /// running.shutdown(Duration::from_secs(20)).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When outcomes could not be stored because the database was unavailable. Their deliveries run again when their
    /// claims expire.
    pub async fn shutdown(mut self, grace: Duration) -> Result<()> {
        let Some(loops) = self.loops.take() else { return Ok(()) };
        let grace = grace.min(DURATION_MAX);
        let deadline = Instant::now() + grace;
        #[cfg(feature = "kafka")]
        let ingests = std::mem::take(&mut self.ingests);
        let ingests_ended = async {
            #[cfg(feature = "kafka")]
            {
                let until = Instant::now() + grace.max(INGEST_WAIT_MIN);
                join_all(ingests.into_iter().map(|ingest| ingest.end(until))).await;
            }
        };
        // Hand-over ends first: from here on, accept behaves as if the inbox were not running.
        loops.stop_bringing_in();
        self.intake.detach();
        let loops_ended = async {
            loops.brought_in(grace.max(BATCH_WAIT_MIN)).await;
            loops.end(deadline.saturating_duration_since(Instant::now())).await
        };
        let ((), ended) = tokio::join!(ingests_ended, loops_ended);
        // The relay stops last, because handlers publish until they end.
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
