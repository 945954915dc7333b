//! The inbox: a store and its handlers, ready to accept and to process.
//!
//! Building checks everything that can be checked without the database and names every problem at once. Handler ids are fetched on
//! first use. Several inboxes can live in one process; nothing is global.

mod builder;
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

use crate::accept::{Acceptor, Intake, Unfit, accept_in, replay_loop};
use crate::handler::{PoisonHook, Registration};
#[cfg(feature = "kafka")]
use crate::kafka::{Ingest, Kafka, Relay};
use crate::operate::{Manifest, Retention};
use crate::process::{ClaimMode, Extent, Lane, Loops, Redact};
use crate::store::seam::HandlerIds;
use crate::store::transacts::Transacts;
use crate::store::{Backend, Store};
use crate::types::{Error, Receipt, Record, Result};

/// A durable inbox. Cheap to clone; clones are the same inbox.
pub struct Inbox<B: Backend> {
    shared: Arc<Shared<B>>,
}

/// What clones share: the parts that an inbox is composed of.
struct Shared<B: Backend> {
    intake: Arc<Intake<B>>,
    acceptor: Acceptor,
    registrations: Vec<Registration<B>>,
    redact: Option<Redact>,
    retention: Option<Retention>,
    hook: Option<PoisonHook>,
    #[cfg(feature = "kafka")]
    relay: Option<Relay>,
    manifest: Manifest,
    /// The handlers at work, in the order of registration. Empty until the first use.
    lanes: OnceCell<Arc<[Arc<Lane<B>>]>>,
}

impl<B: Backend> Inbox<B> {
    /// Begins an inbox in `store`.
    pub fn builder(store: Store<B>) -> InboxBuilder<B> {
        InboxBuilder::new(store)
    }

    /// Accepts one record: when this returns a receipt, it is stored with one delivery for each handler that wants it.
    ///
    /// Calls from many tasks share statements. Dropping the future does not take the record back.
    ///
    /// # Errors
    /// When the record cannot become a message ([`Error::is_refused`](crate::Error::is_refused)): it has no identity, its identity or
    /// its payload is too large, it is a broken CloudEvent; nothing is stored then. When its identity belongs to a message with another
    /// payload, or the database does not take its content: the error says so, and the record is kept in quarantine for a person.
    ///
    /// When the database stayed away for longer than [`Limits::accept_patience`](crate::Limits::accept_patience), or its schema is not this build's. Calling again
    /// with the same record is safe.
    pub async fn accept(&self, record: Record) -> Result<Receipt> {
        let mut receipts = self.accept_all([record]).await?;
        receipts.pop().ok_or_else(|| Error::stopped("the record was not accepted"))
    }

    /// Accepts many records, any number, in as few statements as the limits allow; one receipt each, in order.
    ///
    /// # Errors
    /// As [`Inbox::accept`]; the error names the first record that is refused. A record without usable identity or of a size that is
    /// not allowed is found before anything is written, so nothing is stored then. After every other error some of the records may have
    /// been accepted; calling again with all of them is safe.
    pub async fn accept_all(&self, records: impl IntoIterator<Item = Record>) -> Result<Vec<Receipt>> {
        self.shared.intake.handlers().await?;
        self.shared.acceptor.accept(&self.shared.intake, records.into_iter().collect(), Unfit::Refuse).await
    }

    /// As [`Inbox::accept_all`], but a record that cannot become a message is kept in quarantine, as it is when it comes from Kafka. For
    /// sources that cannot be told that a record is bad: the receipts say which, and somebody has to look at the quarantine.
    ///
    /// # Errors
    /// When the database does not answer, as [`Inbox::accept`]. Calling again with all records is safe.
    pub async fn accept_or_quarantine(&self, records: impl IntoIterator<Item = Record>) -> Result<Vec<Receipt>> {
        self.shared.intake.handlers().await?;
        self.shared.acceptor.accept(&self.shared.intake, records.into_iter().collect(), Unfit::Quarantine).await
    }

    /// Accepts records in a transaction of your own, on a connection of the store's kind: their messages appear with your writes when you commit, or
    /// not at all. One receipt each, in order; they hold if you commit.
    ///
    /// The transaction may be that of a transactional handler, or any other on the inbox's database. On PostgreSQL its role needs no rights
    /// on tables but the right to call `inbox_accept_prepared` (the role `client` in `docs/roles.sql`), and its `search_path` has to lead to the inbox. All records of a call are
    /// stored or none; after an error your transaction can go on. From other languages and clients: the SQL function `inbox_accept`.
    ///
    /// Nobody sees the messages before you commit, so call [`Inbox::wake`] after it: otherwise they are found by the next poll ([`Limits::poll`](crate::Limits::poll)). In a
    /// handler nothing has to be called. Keep the transaction short: who accepts the same identity meanwhile waits for its end. Messages of one key of an ordered
    /// handler are in the order in which they were accepted here, not in that of the commits.
    ///
    /// ```
    /// # use wharf::{Failure, Inbox, Message, Postgres, Raw, Record};
    /// # use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
    /// async fn place_order(inbox: &Inbox<Postgres>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
    ///     conn.transaction::<_, Failure, _>(async |conn| {
    ///         conn.batch_execute("INSERT INTO orders (id) VALUES (17)").await?;
    ///         inbox.accept_in(conn, [Record::new("orders").with_id("order-17/placed")]).await?;
    ///         Ok(())
    ///     })
    ///     .await?;
    ///     inbox.wake();
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// When a record cannot become a message, or its identity belongs to a message with another payload ([`Error::is_refused`](crate::Error::is_refused)); nothing is
    /// kept in quarantine. When no transaction is open on the connection, it leads to another inbox, or the database refuses. Nothing of the call is stored then.
    pub async fn accept_in<C>(&self, conn: &mut C, records: impl IntoIterator<Item = Record>) -> Result<Vec<Receipt>>
    where
        B: Transacts<C>,
    {
        accept_in(&self.shared.intake, conn, records.into_iter().collect()).await
    }

    /// Looks for work that is due at once, if the inbox is running in this process: for messages that were accepted by
    /// [`Inbox::accept_in`] or in SQL, after their transaction was committed. Otherwise they are found by the next poll.
    ///
    /// ```
    /// # fn example(inbox: &wharf::Inbox<wharf::Postgres>) {
    /// inbox.wake();
    /// # }
    /// ```
    pub fn wake(&self) {
        if let Some(hand_over) = self.shared.intake.hand_over() {
            hand_over.wake();
        }
    }

    /// The keys of this build's handlers, for [`Manifest::plan`]: what a deploy of it would mean for what is stored. Without a
    /// database: [`InboxBuilder::manifest`].
    pub fn manifest(&self) -> Manifest {
        self.shared.manifest.clone()
    }

    /// Starts processing in the background, until [`Running::shutdown`].
    ///
    /// # Errors
    /// When the database does not answer, its schema is not this build's, or the inbox is running already.
    pub async fn start(&self) -> Result<Running<B>> {
        let mut loops = self.open(ClaimMode::InBackground).await?;
        let intake = Arc::clone(&self.shared.intake);
        loops.spawn_beside("replay", |stopping| replay_loop(intake, stopping));
        // Another call may have been quicker.
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

    /// Starts processing in the background and consuming from Kafka: the topics that handlers subscribe to. Kafka need not be there yet.
    ///
    /// An offset is committed only after its record is a message, a quarantine row or unwanted by every handler. Where reading begins is
    /// decided by the ledger in the database, not by the group's offset; without a ledger, the group goes on where it was, and a new
    /// group begins at the earliest record.
    ///
    /// # Errors
    /// As [`Inbox::start`]; and when settings of Kafka cannot be used, all of them named.
    #[cfg(feature = "kafka")]
    pub async fn start_from(&self, kafka: Kafka) -> Result<Running<B>> {
        let window = self.shared.retention.as_ref().map(Retention::window);
        let prepared = Ingest::prepare(&self.shared.intake, &kafka, window)?;
        let running = self.start().await?;
        Ok(running.with(prepared.start()?))
    }

    /// Runs what is due now, once, without background work: for tests and serverless functions. Returns how many deliveries ran, at most as
    /// many of a handler as it has slots and one claim takes ([`Limits::claim_batch_rows`](crate::Limits::claim_batch_rows)).
    ///
    /// Between calls no processor knows the handlers' keys. Where another process runs other handlers of the same inbox, set
    /// [`Limits::unknown_key_grace`](crate::Limits::unknown_key_grace) there to longer than the calls are apart.
    ///
    /// # Errors
    /// When the database does not answer or its schema is not this build's.
    pub async fn run_due(&self) -> Result<usize> {
        self.rounds(Extent::Once).await
    }

    /// Runs until nothing is due. Retries that are due later stay. Returns how many deliveries ran.
    ///
    /// # Errors
    /// When the database does not answer or its schema is not this build's.
    pub async fn drain(&self) -> Result<usize> {
        self.rounds(Extent::UntilNothingIsDue).await
    }

    /// As [`Inbox::drain`], but when `death` comes every claim is abandoned, as if the process were gone.
    #[cfg(feature = "testing")]
    pub(crate) async fn drain_dying(&self, death: impl Future<Output = ()>) -> Result<usize> {
        let loops = self.open(ClaimMode::OnDemand).await?;
        let ran = tokio::select! {
            ran = loops.rounds(Extent::UntilNothingIsDue) => ran,
            () = death => {
                loops.abandon_all();
                Ok(0)
            }
        };
        let ended = loops.end(Duration::ZERO).await;
        ran.and_then(|ran| ended.map(|()| ran))
    }

    async fn rounds(&self, extent: Extent) -> Result<usize> {
        let loops = self.open(ClaimMode::OnDemand).await?;
        // On the store's thread, to its end: a caller that goes away in the middle of a claim must not leave it behind. It is told to
        // stop then.
        let _stop = loops.stop_on_drop();
        let working = self.shared.intake.store.backend.reactor().spawn(async move {
            let ran = loops.rounds(extent).await;
            let ended = loops.end(Duration::ZERO).await;
            ran.and_then(|ran| ended.map(|()| ran))
        });
        working.await.unwrap_or_else(|_| Err(Error::stopped("the store was closed while deliveries were run")))
    }

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
    /// The handlers at work, with their ids; registers them on first use.
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
