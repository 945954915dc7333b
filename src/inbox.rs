//! The inbox: a store and its handlers, ready to accept and to process.
//!
//! Building checks everything that can be checked without the database and names every problem at once. Handler ids are fetched on
//! first use. Several inboxes can live in one process; nothing is global.

mod builder;
mod running;

use std::collections::HashMap;
use std::fmt;
#[cfg(feature = "sqlite")]
use std::future::Future;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

pub use builder::InboxBuilder;
pub use running::Running;

use crate::accept::{self, Acceptor, Receipt, TopicRules};
use crate::handler::Registration;
#[cfg(feature = "kafka")]
use crate::kafka::{Ingest, Kafka};
use crate::operate::{Manifest, ManifestHandler, Retention};
use crate::process::{Engine, Extent, Lane, Loops, Redact, Work};
use crate::store::seam::{Few, WantedHandler};
use crate::store::{Backend, Store};
use crate::types::{Error, Limits, Record, Result};

/// A durable inbox. Cheap to clone; clones are the same inbox.
pub struct Inbox<B: Backend> {
    pub(crate) shared: Arc<Shared<B>>,
    acceptor: Arc<Acceptor>,
}

/// What accepting and processing share.
pub(crate) struct Shared<B: Backend> {
    pub(crate) store: Store<B>,
    pub(crate) limits: Limits,
    pub(crate) retention: Option<Retention>,
    pub(crate) registrations: Vec<Registration<B>>,
    pub(crate) redact: Option<Redact>,
    /// Every topic that a handler subscribes to.
    pub(crate) topics: HashMap<String, TopicRules>,
    /// Handlers with their ids, in the order of registration. Empty until the first use.
    lanes: tokio::sync::OnceCell<Arc<[Arc<Lane<B>>]>>,
    /// The engine while the inbox is running. A std lock: nothing awaits while holding it.
    engine: RwLock<Option<Arc<Engine<B>>>>,
}

impl<B: Backend> Inbox<B> {
    /// Begins an inbox in `store`.
    pub fn builder(store: Store<B>) -> InboxBuilder<B> {
        InboxBuilder::new(store)
    }

    /// Accepts one record: when this returns, it is stored with one delivery for each handler that wants it, or quarantined.
    ///
    /// Calls from many tasks share statements. Dropping the future does not take the record back.
    ///
    /// # Errors
    /// When the database stayed away for longer than [`Limits::accept_patience`], or its schema is not this build's. Calling again
    /// with the same record is safe.
    pub async fn accept(&self, record: Record) -> Result<Receipt> {
        let mut receipts = self.accept_all([record]).await?;
        receipts.pop().ok_or_else(|| Error::stopped("the record was not accepted"))
    }

    /// Accepts many records, any number, in as few statements as the limits allow; one receipt each, in order.
    ///
    /// # Errors
    /// As [`Inbox::accept`]. Some of the records may have been accepted then; calling again with all of them is safe.
    pub async fn accept_all(&self, records: impl IntoIterator<Item = Record>) -> Result<Vec<Receipt>> {
        self.shared.lanes().await?;
        self.acceptor.accept(&self.shared, records.into_iter().collect()).await
    }

    /// The keys of this build's handlers, for [`Manifest::plan`]: what a deploy of it would mean for what is stored.
    pub fn manifest(&self) -> Manifest {
        let entry = |registration: &Registration<B>| ManifestHandler {
            key: registration.key.as_str().to_owned(),
            formerly: registration.former_keys.clone(),
        };
        Manifest { handlers: self.shared.registrations.iter().map(entry).collect() }
    }

    /// Starts processing in the background, until [`Running::shutdown`].
    ///
    /// # Errors
    /// When the database does not answer, its schema is not this build's, or the inbox is running already.
    pub async fn start(&self) -> Result<Running<B>> {
        let mut loops = self.open(Work::InBackground).await?;
        loops.bring_in(accept::replay_loop(Arc::clone(&self.shared), Arc::clone(&loops.engine)));
        let mut engine = self.shared.engine.write().unwrap_or_else(PoisonError::into_inner);
        // Looked at again: another call may have been quicker.
        if engine.is_some() {
            return Err(already_running());
        }
        *engine = Some(Arc::clone(&loops.engine));
        Ok(Running::new(Arc::clone(&self.shared), loops))
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
        let prepared = Ingest::prepare(&self.shared, &kafka)?;
        let running = self.start().await?;
        Ok(running.with(prepared.start()?))
    }

    /// Runs what is due now, once, without background work: for tests and serverless functions. Returns how many deliveries ran, at most as
    /// many of a handler as it has slots and one claim takes ([`Limits::claim_batch_rows`]).
    ///
    /// Between calls no processor knows the handlers' keys. Where another process runs other handlers of the same inbox, set
    /// [`Limits::unknown_key_grace`] there to longer than the calls are apart.
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
    #[cfg(feature = "sqlite")]
    pub(crate) async fn drain_dying(&self, death: impl Future<Output = ()>) -> Result<usize> {
        let loops = self.open(Work::OnDemand).await?;
        let ran = tokio::select! {
            ran = loops.rounds(Extent::UntilNothingIsDue) => ran,
            () = death => {
                loops.engine.abandon_all();
                Ok(0)
            }
        };
        let ended = loops.end(Duration::ZERO).await;
        ran.and_then(|ran| ended.map(|()| ran))
    }

    async fn rounds(&self, extent: Extent) -> Result<usize> {
        let loops = self.open(Work::OnDemand).await?;
        // On the store's thread, to its end: a caller that goes away in the middle of a claim must not leave it behind. It is told to
        // stop then.
        let _stop = StopOnDrop(Arc::clone(&loops.engine));
        let working = self.shared.store.backend.reactor().spawn(async move {
            let ran = loops.rounds(extent).await;
            let ended = loops.end(Duration::ZERO).await;
            ran.and_then(|ran| ended.map(|()| ran))
        });
        working.await.unwrap_or_else(|_| Err(Error::stopped("the store was closed while deliveries were run")))
    }

    async fn open(&self, work: Work) -> Result<Loops<B>> {
        if self.shared.engine().is_some() {
            return Err(already_running());
        }
        let lanes = self.shared.lanes().await?;
        let Shared { store, limits, retention, .. } = &*self.shared;
        Loops::start(store.clone(), limits.clone(), lanes, work, retention.clone()).await
    }
}

fn already_running() -> Error {
    Error::configuration("the inbox is running already")
}

/// Stops what a caller asked for when it goes away before the end.
struct StopOnDrop<B: Backend>(Arc<Engine<B>>);

impl<B: Backend> Drop for StopOnDrop<B> {
    fn drop(&mut self) {
        self.0.stop_now();
    }
}

impl<B: Backend> Shared<B> {
    /// The handlers with their ids; registers them on first use.
    pub(crate) async fn lanes(self: &Arc<Self>) -> Result<Arc<[Arc<Lane<B>>]>> {
        let registering = async || {
            let shared = Arc::clone(self);
            // On the store's thread: a caller that goes away must not leave the registration's transaction, and its lock, open.
            let registered = self.store.backend.reactor().spawn(async move { shared.register().await });
            registered
                .await
                .unwrap_or_else(|_| Err(Error::stopped("the store was closed while the handlers were registered")))
        };
        self.lanes.get_or_try_init(registering).await.cloned()
    }

    async fn register(&self) -> Result<Arc<[Arc<Lane<B>>]>> {
        self.store.backend.check_schema().await?;
        let wanted: Vec<WantedHandler> = self
            .registrations
            .iter()
            .map(|registration| WantedHandler {
                key: registration.key.as_str().to_owned(),
                former_keys: registration.former_keys.clone(),
            })
            .collect();
        let ids = self.store.backend.register(&wanted).await?;
        let lanes = self.registrations.iter().zip(ids);
        Ok(lanes.map(|(registration, ids)| Arc::new(Lane::new(registration, ids, self.redact.clone()))).collect())
    }

    pub(crate) fn lane(&self, position: usize) -> Option<&Arc<Lane<B>>> {
        self.lanes.get()?.get(position)
    }

    /// The name of a topic, shared by its messages.
    #[cfg(feature = "kafka")]
    pub(crate) fn topic(&self, name: &str) -> Arc<str> {
        self.topics.get(name).map_or_else(|| name.into(), |rules| Arc::clone(&rules.topic))
    }

    /// Positions of the registrations that want a message of this topic and type.
    pub(crate) fn wanted_by(&self, topic: &str, event_type: Option<&[u8]>) -> Few<usize> {
        let numbered = self.registrations.iter().enumerate();
        numbered
            .filter(|(_, registration)| registration.wants(topic, event_type))
            .map(|(position, _)| position)
            .collect()
    }

    pub(crate) fn engine(&self) -> Option<Arc<Engine<B>>> {
        self.engine.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl<B: Backend> Clone for Inbox<B> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), acceptor: Arc::clone(&self.acceptor) }
    }
}

impl<B: Backend> fmt::Debug for Inbox<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("handlers", &self.shared.registrations).finish_non_exhaustive()
    }
}
