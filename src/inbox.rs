//! The inbox: a store and its handlers, ready to accept and to process.
//!
//! Building checks everything that can be checked without the database and reports every problem at once. Handler ids
//! are fetched on first use. One process can have several inboxes; they share only metrics and the trace bridge.

mod accepting;
mod builder;
mod decoders;
mod problems;
mod running;

use std::fmt;
#[cfg(feature = "testing")]
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OnceCell;

pub use builder::InboxBuilder;
pub use running::{Monitor, Running};

use crate::accept::{Acceptor, Intake, replay_loop};
use crate::handler::{PoisonHook, Registration};
#[cfg(feature = "kafka")]
use crate::kafka::{Ingest, Kafka, Relay, duplicate_names, source_problems};
use crate::operate::{Manifest, Retention};
use crate::process::{ClaimMode, Extent, Lane, Loops, Redact};
use crate::store::seam::HandlerIds;
use crate::store::{Backend, Store};
use crate::types::{Error, Result};

/// A durable inbox: it stores records as messages and delivers each message to its handlers. Cloning is cheap; clones
/// are the same inbox.
///
/// [`Inbox::builder`] configures it. [`Inbox::accept`] stores a record from your own code; [`Inbox::start_from`] reads
/// records from Kafka. [`Inbox::start`] runs handlers in the background, and [`Inbox::drain`] runs them once, for tests
/// and jobs.
///
/// ```
/// use wharf::{Failure, HandlerKey, Inbox, Message, Record, Sqlite, Store, handler};
///
/// async fn send_receipt(order: Message<u32>) -> Result<(), Failure> {
///     println!("a receipt for order {}", order.payload);
///     Ok(())
/// }
///
/// # #[tokio::main]
/// # async fn main() -> wharf::Result<()> {
/// let store = Store::<Sqlite>::in_memory().await?;
/// store.migrate().await?;
/// let inbox = Inbox::builder(store)
///     .subscribe("orders", handler(HandlerKey::new("mail.receipt"), send_receipt))
///     .build()?;
/// inbox.accept(Record::new("orders").with_id("order-17/placed").json(&17)).await?;
/// assert_eq!(inbox.drain().await?, 1); // one delivery ran
/// # Ok(()) }
/// ```
pub struct Inbox<B: Backend> {
    shared: Arc<Shared<B>>,
}

/// The state that clones share.
struct Shared<B: Backend> {
    intake: Arc<Intake<B>>,
    acceptor: Acceptor,
    /// The handlers with their options, in the order of registration.
    registrations: Vec<Registration<B>>,
    /// Removes secrets from the errors of handlers.
    redact: Option<Redact>,
    retention: Option<Retention>,
    /// The function to call for each poisoned delivery.
    hook: Option<PoisonHook>,
    /// Sends the outbox while the inbox is running.
    #[cfg(feature = "kafka")]
    relay: Option<Relay>,
    /// The Kafka sources of the builder.
    #[cfg(feature = "kafka")]
    sources: Vec<Kafka>,
    manifest: Manifest,
    /// The handlers with their ids, in the order of registration. Empty until the first use.
    lanes: OnceCell<Arc<[Arc<Lane<B>>]>>,
}

impl<B: Backend> Inbox<B> {
    /// Starts to build an inbox in `store`.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Inbox, Message, Raw, Sqlite, Store, handler};
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// let store = Store::<Sqlite>::in_memory().await?;
    /// let inbox = Inbox::builder(store)
    ///     .subscribe("orders", handler(HandlerKey::new("mail.receipt"), send_receipt))
    ///     .build()?;
    /// # Ok(()) }
    /// ```
    pub fn builder(store: Store<B>) -> InboxBuilder<B> {
        InboxBuilder::new(store)
    }

    /// Returns the handler keys of this build. [`Manifest::plan`] compares them with the keys in the database, to check
    /// a deploy. [`InboxBuilder::manifest`] needs no database.
    ///
    /// ```
    /// # async fn example(inbox: wharf::Inbox<wharf::Postgres>, store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// let plan = inbox.manifest().plan(&store.operate().handlers().await?);
    /// assert!(plan.iter().all(|handler| handler.is_safe()));
    /// # Ok(()) }
    /// ```
    pub fn manifest(&self) -> Manifest {
        self.shared.manifest.clone()
    }

    /// Starts to run handlers in the background, and to read from every Kafka source of the builder
    /// ([`InboxBuilder::source`]), until [`Running::shutdown`]. The brokers need not be available yet, and a source
    /// that cannot be read does not delay the others.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use wharf::{Failure, HandlerKey, Inbox, Message, Raw, Record, Sqlite, Store, handler};
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let store = Store::<Sqlite>::in_memory().await?;
    /// # store.migrate().await?;
    /// # let send = handler(HandlerKey::new("mail.receipt"), send_receipt);
    /// # let inbox = Inbox::builder(store).subscribe("orders", send).build()?;
    /// let running = inbox.start().await?;
    /// inbox.accept(Record::new("orders").with_id("order-17/placed")).await?;
    /// running.shutdown(Duration::from_secs(20)).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// Offsets are committed only when their records are messages, are quarantined, or are unwanted by every handler.
    /// The position is read from the ledger in the database, not from the consumer group. Without a ledger, reading
    /// continues at the group's offset, and a new group begins at the earliest record;
    /// [`Kafka::begin`](crate::kafka::Kafka::begin) changes that.
    ///
    /// # Errors
    /// When the database does not answer, its schema is not the one of this build, or the inbox is running already.
    pub async fn start(&self) -> Result<Running<B>> {
        #[cfg(feature = "kafka")]
        {
            self.start_sources(&self.shared.sources).await
        }
        #[cfg(not(feature = "kafka"))]
        self.start_processing().await
    }

    /// Starts processing and the relay, but no source. If this fails after the loops were attached, dropping `Running`
    /// detaches them.
    async fn start_processing(&self) -> Result<Running<B>> {
        self.shared.intake.begin_counting();
        let mut loops = self.open(ClaimMode::InBackground).await?;
        let intake = Arc::clone(&self.shared.intake);
        loops.spawn_beside("replay", |stopping| replay_loop(intake, stopping));
        // A concurrent call may have attached its loops first.
        if !self.shared.intake.attach(loops.hand_over()) {
            return Err(already_running());
        }
        let running = Running::new(Arc::clone(&self.shared.intake), loops);
        #[cfg(feature = "kafka")]
        let running = match &self.shared.relay {
            Some(relay) => running.with_relay(relay.start(&self.shared.intake.store)?),
            None => running,
        };
        Ok(running)
    }

    /// Like [`Inbox::start`], and also reads from this Kafka. This is the short form for an inbox with one source.
    ///
    /// ```no_run
    /// # async fn run(inbox: wharf::Inbox<wharf::Postgres>) -> wharf::Result<()> {
    /// use std::time::Duration;
    /// use wharf::kafka::Kafka;
    ///
    /// let running = inbox.start_from(Kafka::new("broker-1:9092,broker-2:9092", "shop")).await?;
    /// // … until SIGTERM:
    /// running.shutdown(Duration::from_secs(20)).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Inbox::start`]; and when the configuration of the source is invalid, with every reason.
    #[cfg(feature = "kafka")]
    pub async fn start_from(&self, kafka: Kafka) -> Result<Running<B>> {
        let mut sources = self.shared.sources.clone();
        sources.push(kafka);
        let mut problems = duplicate_names(sources.iter());
        problems.extend(sources.iter().flat_map(|source| source_problems(source, &self.shared.intake.rules)));
        if !problems.is_empty() {
            return Err(Error::configuration(format!("cannot start the inbox: {}", problems.join("; "))));
        }
        self.start_sources(&sources).await
    }

    /// Prepares all sources before anything is started, so that an invalid setting starts nothing.
    #[cfg(feature = "kafka")]
    async fn start_sources(&self, sources: &[Kafka]) -> Result<Running<B>> {
        let window = self.shared.retention.as_ref().map(Retention::window);
        let prepare = |source| Ingest::prepare(&self.shared.intake, source, window);
        let prepared = sources.iter().map(prepare).collect::<Result<Vec<_>>>()?;
        let mut running = self.start_processing().await?;
        for ingest in prepared {
            running = running.with(ingest.start()?);
        }
        Ok(running)
    }

    /// Claims and runs due deliveries once, without background work: for tests and serverless functions. Returns how
    /// many deliveries ran: for each handler at most [`Limits::claim_batch_rows`](crate::Limits::claim_batch_rows), and
    /// at most its concurrency plus those that are claimed ahead ([`Limits::claim_ahead`](crate::Limits::claim_ahead)).
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    /// # use wharf::testing::TestInbox;
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let send = handler(HandlerKey::new("mail.receipt"), send_receipt).concurrency(2);
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", send)).await?;
    /// # let inbox = inbox.inbox();
    /// # inbox.accept_all((0..3).map(|number| Record::new("orders").with_id(format!("order-{number}")))).await?;
    /// // Three deliveries are due, and the handler has a concurrency of 2.
    /// assert_eq!(inbox.run_due().await?, 2);
    /// assert_eq!(inbox.run_due().await?, 1);
    /// # Ok(()) }
    /// ```
    ///
    /// Between calls, no live process has the handlers. If another process runs other handlers of the same inbox, set
    /// its [`Limits::unknown_key_grace`](crate::Limits::unknown_key_grace) to more than the time between calls.
    ///
    /// # Errors
    /// When the database does not answer, its schema is not the one of this build, or the inbox is running already.
    pub async fn run_due(&self) -> Result<usize> {
        self.rounds(Extent::Once).await
    }

    /// Runs deliveries until none is due, without background work. Retries that are due later do not run. Returns how
    /// many deliveries ran.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    /// # use wharf::testing::TestInbox;
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let send = handler(HandlerKey::new("mail.receipt"), send_receipt);
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", send)).await?;
    /// # let inbox = inbox.inbox();
    /// inbox.accept_all((0..3).map(|number| Record::new("orders").with_id(format!("order-{number}")))).await?;
    /// assert_eq!(inbox.drain().await?, 3);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Inbox::run_due`].
    pub async fn drain(&self) -> Result<usize> {
        self.rounds(Extent::UntilNothingIsDue).await
    }

    /// Like [`Inbox::drain`], but when `crash` resolves, every claim is abandoned, as if the process had crashed.
    #[cfg(feature = "testing")]
    pub(crate) async fn drain_until(&self, crash: impl Future<Output = ()>) -> Result<usize> {
        let loops = self.open(ClaimMode::OnDemand).await?;
        let ran = tokio::select! {
            ran = loops.rounds(Extent::UntilNothingIsDue) => ran,
            () = crash => {
                loops.abandon_all();
                Ok(0)
            }
        };
        let ended = loops.end(Duration::ZERO).await;
        ran.and_then(|ran| ended.map(|()| ran))
    }

    /// Runs due deliveries without background work.
    async fn rounds(&self, extent: Extent) -> Result<usize> {
        let loops = self.open(ClaimMode::OnDemand).await?;
        // Runs on the store's thread, because claims must be settled or released even if the caller's future is
        // dropped. In that case `_stop` ends the loops early.
        let _stop = loops.stop_on_drop();
        let working = self.shared.intake.store.backend.reactor().spawn(async move {
            let ran = loops.rounds(extent).await;
            let ended = loops.end(Duration::ZERO).await;
            ran.and_then(|ran| ended.map(|()| ran))
        });
        working.await.unwrap_or_else(|_| Err(Error::stopped("the store was closed while deliveries were run")))
    }

    /// Starts the loops of this inbox, unless it is running already.
    async fn open(&self, mode: ClaimMode) -> Result<Loops<B>> {
        if self.shared.intake.hand_over().is_some() {
            return Err(already_running());
        }
        let lanes = self.shared.lanes().await?;
        let Intake { store, limits, .. } = &*self.shared.intake;
        let (retention, hook) = (self.shared.retention.clone(), self.shared.hook.clone());
        Loops::start(store.clone(), limits.clone(), lanes, mode, retention, hook).await
    }
}

fn already_running() -> Error {
    Error::configuration("the inbox is running already")
}

impl<B: Backend> Shared<B> {
    /// Returns the handlers with their ids. Registers them on first use.
    async fn lanes(&self) -> Result<Arc<[Arc<Lane<B>>]>> {
        let lane = |(registration, ids): (&Registration<B>, &HandlerIds)| {
            Arc::new(Lane::new(registration, ids.clone(), self.redact.clone(), &self.intake.store.permits))
        };
        let opened = self.lanes.get_or_try_init(async || {
            let handlers = self.intake.handlers().await?;
            Ok::<_, Error>(self.registrations.iter().zip(&*handlers).map(lane).collect())
        });
        opened.await.cloned()
    }
}

impl<B: Backend> Clone for Inbox<B> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<B: Backend> fmt::Debug for Inbox<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("handlers", &self.shared.registrations).finish_non_exhaustive()
    }
}
