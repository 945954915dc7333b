//! The operator: inspects a store and acts on it in a person's name.
//!
//! An action is fenced against running work, changes at most `limit` rows, and writes a row to `inbox_audit`. Repeating
//! it changes nothing more. An empty filter or one with an unknown handler key is refused before anything changes.

use std::fmt;
use std::time::SystemTime;

use bytes::Bytes;

use super::doctor::{self, Diagnosis};
use crate::store::operating::{Act, Corrected, SchemaVersion, Signed, Verb};
use crate::store::{Backend, Store};
use crate::types::Facts;
use crate::types::{
    DeliveryDetails, DeliveryFilter, DeliverySummary, Error, ErrorSummary, HandlerStatus, HeldKey, ProcessorStatus,
    Result, State,
};

/// The largest value that `Limits::payload_bytes_max` allows.
const PAYLOAD_BYTES_MAX: usize = 256 << 20;

/// Inspects an inbox and acts on it. [`Store::operate`] returns it. The `wharf` command line and the dashboard offer
/// the same actions.
///
/// ```
/// # use wharf::{Failure, HandlerKey, Inbox, Message, Raw, Record, Sqlite, Store, handler};
/// # #[tokio::main]
/// # async fn main() -> wharf::Result<()> {
/// # let store = Store::<Sqlite>::in_memory().await?;
/// # store.migrate().await?;
/// # let send = |_: Message<Raw>| async { Err(Failure::poison("the mail server is down")) };
/// # let send = handler(HandlerKey::new("mail.receipt"), send);
/// # let inbox = Inbox::builder(store.clone()).subscribe("orders", send).build()?;
/// # inbox.accept(Record::new("orders").with_id("order-17")).await?;
/// # inbox.drain().await?;
/// use wharf::operate::{DeliveryFilter, State};
///
/// let operator = store.operate().acting_as("alice").because("the mail server is back");
/// let failed = DeliveryFilter::default().handler_key("mail.receipt");
/// for delivery in operator.deliveries(&failed, Some(State::Poisoned), 100).await? {
///     println!("{:?}: {:?}", delivery.message_id, delivery.last_error);
/// }
/// let replayed = operator.replay(&failed, 1_000).await?;
/// # assert_eq!(replayed, 1);
/// # Ok(()) }
/// ```
#[must_use = "an operator does nothing by itself"]
pub struct Operator<B: Backend> {
    pub(super) store: Store<B>,
    pub(super) signed: Signed,
}

impl<B: Backend> Store<B> {
    /// Returns an [`Operator`], which inspects the inbox, replays, discards and pauses.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// let diagnosis = store.operate().doctor().await?;
    /// # Ok(()) }
    /// ```
    pub fn operate(&self) -> Operator<B> {
        Operator { store: self.clone(), signed: Signed::default() }
    }

    /// Returns the schema version of the database and the one that this build knows.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// let store = wharf::Store::<wharf::Sqlite>::in_memory().await?;
    /// assert_eq!(store.schema_version().await?.found, None); // before `migrate`
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn schema_version(&self) -> Result<SchemaVersion> {
        self.backend.schema_version().await
    }

    /// Returns the SQL of the migrations with their versions, for your own migration tool.
    ///
    /// ```
    /// use wharf::{Postgres, Store};
    ///
    /// for (version, sql) in Store::<Postgres>::migrations() {
    ///     println!("-- version {version}: {} bytes", sql.len());
    /// }
    /// ```
    pub fn migrations() -> Vec<(i32, &'static str)> {
        B::MIGRATIONS.iter().map(|migration| (migration.version, migration.sql)).collect()
    }
}

impl<B: Backend> Operator<B> {
    /// Lists every handler with its backlog.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// for handler in store.operate().handlers().await? {
    ///     println!("{}: {} due, {} poisoned", handler.handler_key, handler.due, handler.poisoned);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn handlers(&self) -> Result<Vec<HandlerStatus>> {
        let mut handlers = self.store.backend.handlers().await?;
        add_rates(&mut handlers, &self.processors().await?);
        Ok(handlers)
    }

    /// Lists the processes that run handlers, and those that crashed within the last day.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn processors(&self) -> Result<Vec<ProcessorStatus>> {
        self.store.backend.processors().await
    }

    /// Lists deliveries. Poisoned ones are sorted by how long they are poisoned, pending and running ones by how long
    /// they are due, the longest first. Without a state or with another one, the newest come first. With a message id,
    /// PostgreSQL sorts those that are not poisoned by message and handler key.
    ///
    /// # Errors
    /// When the filter names an unknown handler, or the database does not answer.
    pub async fn deliveries(
        &self,
        filter: &DeliveryFilter,
        state: Option<State>,
        limit: u32,
    ) -> Result<Vec<DeliverySummary>> {
        self.check_key(filter.handler_key.as_deref()).await?;
        self.store.backend.deliveries(filter, state, limit).await
    }

    /// Lists order keys of an ordered handler on which deliveries wait for an earlier one, each with the delivery that
    /// blocks it. Keys blocked by a poisoned delivery come first, then those with the most waiting deliveries. Examines
    /// the 1,000 oldest waiting deliveries and the 1,000 that have been poisoned longest.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// for key in store.operate().held_keys("stock.move", 100).await? {
    ///     println!("{} wait for {:?}", key.behind, key.message_id);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When there is no such handler, or the database does not answer.
    pub async fn held_keys(&self, handler_key: &str, limit: u32) -> Result<Vec<HeldKey>> {
        self.check_key(Some(handler_key)).await?;
        self.store.backend.held_keys(handler_key, limit).await
    }

    /// Returns a delivery with its record and its history.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn delivery(&self, of: &DeliverySummary) -> Result<Option<DeliveryDetails>> {
        self.store.backend.delivery(of.message_seq, of.handler_id).await
    }

    /// Counts poisoned deliveries by error, the most frequent first.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// for error in store.operate().poisoned_errors().await? {
    ///     println!("{} × {:?}: {:?}", error.poisoned, error.handler_key, error.example);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn poisoned_errors(&self) -> Result<Vec<ErrorSummary>> {
        self.store.backend.poisoned_errors().await
    }

    /// Makes poisoned deliveries due now, with a fresh retry budget, the longest poisoned first. A filter with a
    /// message id matches discarded deliveries too. Earlier outcomes stay in the history. Returns how many deliveries
    /// were replayed.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use std::time::Duration;
    /// use wharf::operate::DeliveryFilter;
    ///
    /// // The timeouts of last night.
    /// let timeouts = DeliveryFilter::default()
    ///     .handler_key("mail.receipt")
    ///     .error("timed out")
    ///     .newer_than(Duration::from_secs(12 * 3_600));
    /// store.operate().acting_as("alice").because("the mail server is back").replay(&timeouts, 10_000).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the filter is empty or names an unknown handler, or the database does not answer.
    pub async fn replay(&self, filter: &DeliveryFilter, limit: u32) -> Result<u64> {
        filter.refuse_empty()?;
        self.check_key(filter.handler_key.as_deref()).await?;
        self.act(Act::Deliveries { verb: Verb::Replay, filter: filter.clone(), limit }).await
    }

    /// Discards poisoned deliveries. A filter with a message id matches pending deliveries too. Running deliveries are
    /// not changed. Returns how many deliveries were discarded.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::operate::DeliveryFilter;
    ///
    /// let test_order = DeliveryFilter::default().handler_key("mail.receipt").message_id("order-17/placed");
    /// store.operate().acting_as("alice").because("a test order").discard(&test_order, 1).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Operator::replay`].
    pub async fn discard(&self, filter: &DeliveryFilter, limit: u32) -> Result<u64> {
        filter.refuse_empty()?;
        self.check_key(filter.handler_key.as_deref()).await?;
        self.act(Act::Deliveries { verb: Verb::Discard, filter: filter.clone(), limit }).await
    }

    /// Deletes the retained identity of a purged message
    /// ([`Retention::keep_identities`](crate::Retention::keep_identities)), so that its record is accepted when it
    /// arrives again. Returns whether there was such an identity.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// let operator = store.operate().acting_as("alice").because("sent again on purpose");
    /// operator.forget_identity("order-17/placed", "orders").await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn forget_identity(&self, message_id: &str, source: &str) -> Result<bool> {
        let (message_id, source) = (message_id.to_owned(), source.to_owned());
        Ok(self.act(Act::ForgetIdentity { message_id, source }).await? > 0)
    }

    /// Runs a poisoned or discarded delivery again with a corrected payload, for its handler only. The message keeps
    /// its original payload, byte for byte, for other handlers and for deduplication. The corrected payload is stored
    /// beside it, and later replays of this delivery use it too. The handler can check
    /// [`Message::is_corrected`](crate::Message::is_corrected). The audit has the hash of the payload, not the payload.
    /// The delivery keeps the order key and the tenant that it got when its message was accepted.
    /// Returns false when the delivery is no longer poisoned or discarded, or has had another attempt since `of` was
    /// read.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::operate::{DeliveryFilter, State};
    /// let operator = store.operate().acting_as("alice").because("the producer wrote the amount as text");
    /// let failed = DeliveryFilter::default().message_id("order-17/placed").handler_key("mail.receipt");
    /// for delivery in operator.deliveries(&failed, Some(State::Poisoned), 1).await? {
    ///     operator.replay_corrected(&delivery, r#"{"order": 17, "amount": 9.5}"#).await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the payload is unchanged or larger than 256 MiB, the message is gone, or the database does not answer.
    pub async fn replay_corrected(&self, of: &DeliverySummary, payload: impl Into<Bytes>) -> Result<bool> {
        let (filter, payload) = (one(of)?, payload.into());
        if payload.len() > PAYLOAD_BYTES_MAX {
            return Err(Error::configuration("a corrected payload can have at most 268435456 bytes"));
        }
        let Some(details) = self.delivery(of).await? else { return Ok(false) };
        let current = details.correction.map(|correction| correction.payload);
        let original = details.record.as_ref().and_then(|record| record.payload());
        if current.as_deref().or(original) == Some(&*payload) {
            return Err(Error::configuration("the payload is unchanged"));
        }
        let act = Act::ReplayCorrected { filter, attempt: of.attempts, payload: Corrected(payload) };
        Ok(self.act(act).await? > 0)
    }

    /// Revokes the claim of a running delivery, for the attempt in `run` and no later one. The delivery is due at once
    /// and can run elsewhere. The outcome of the revoked run is ignored, and its handler is cancelled within a third of
    /// the lease. No retry is consumed. Returns false when that attempt is no longer running, or its outcome is just
    /// being written.
    ///
    /// A handler that does not yield cannot be cancelled: its remaining side effects happen concurrently with the next
    /// run. On SQLite a transactional handler cannot be released, because it holds the only writer connection.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::operate::{DeliveryFilter, State};
    /// let operator = store.operate().acting_as("alice").because("the connection to the mail server hangs");
    /// let stuck = DeliveryFilter::default().message_id("order-17/placed").handler_key("mail.receipt");
    /// for run in operator.deliveries(&stuck, Some(State::Running), 1).await? {
    ///     operator.release(&run).await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the message is deleted, or the database does not answer.
    pub async fn release(&self, run: &DeliverySummary) -> Result<bool> {
        let filter = one(run)?;
        Ok(self.act(Act::Release { filter, attempt: run.attempts }).await? > 0)
    }

    /// Returns facts about the database and about work that does not move.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn facts(&self) -> Result<Facts> {
        self.store.backend.facts().await
    }

    /// Diagnoses everything that blocks work, waits for a person's decision, or soon will. It is the same as
    /// `wharf doctor`.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// for symptom in store.operate().doctor().await?.symptoms {
    ///     println!("{}: {} ({})", symptom.severity, symptom.what, symptom.advice);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn doctor(&self) -> Result<Diagnosis> {
        let schema = self.store.schema_version().await?;
        let is_there = schema.found.is_some_and(|found| found >= schema.known);
        let (facts, mut handlers, processors) = match is_there {
            true => (Some(self.facts().await?), self.store.backend.handlers().await?, self.processors().await?),
            false => (None, Vec::new(), Vec::new()),
        };
        add_rates(&mut handlers, &processors);
        let symptoms = doctor::judge(schema, facts.as_ref(), &handlers, &processors, SystemTime::now());
        Ok(Diagnosis { symptoms, handlers, processors, facts })
    }

    /// Runs an action and writes its audit row in the same transaction.
    pub(super) async fn act(&self, act: Act) -> Result<u64> {
        self.store.backend.act(act, self.signed.clone()).await
    }

    /// Refuses an unknown key: with a mistyped one, the caller would take an empty result for an answer.
    pub(super) async fn check_key(&self, handler_key: Option<&str>) -> Result<()> {
        let Some(wanted) = handler_key else { return Ok(()) };
        let keys = self.store.backend.handler_keys().await?;
        if keys.iter().any(|(key, _)| key == wanted) {
            return Ok(());
        }
        let mut known: Vec<&str> = keys.iter().map(|(_, current)| current.as_str()).collect();
        known.sort_unstable();
        known.dedup();
        Err(Error::configuration(format!("unknown handler key {wanted:?}; known keys: {}", known.join(", "))))
    }
}

/// A filter that matches this delivery only.
fn one(delivery: &DeliverySummary) -> Result<DeliveryFilter> {
    let DeliverySummary { message_id, source, handler_key, .. } = delivery;
    if message_id.is_none() || handler_key.is_none() {
        return Err(Error::configuration("the message or the handler of this delivery no longer exists"));
    }
    Ok(DeliveryFilter {
        message_id: message_id.clone(),
        source: source.clone(),
        handler_key: handler_key.clone(),
        ..DeliveryFilter::default()
    })
}

/// Adds up the rates that live processes report, and takes the longest of their lags.
fn add_rates(handlers: &mut [HandlerStatus], processors: &[ProcessorStatus]) {
    let alive = processors.iter().filter(|processor| processor.is_alive);
    for (key, rate) in alive.filter_map(|processor| processor.report.as_ref()).flat_map(|report| &report.rates) {
        let is_of = |handler: &&mut HandlerStatus| handler.handler_key == *key || handler.former_keys.contains(key);
        if let Some(handler) = handlers.iter_mut().find(is_of) {
            handler.done_per_sec += rate.done_per_sec;
            handler.failed_per_sec += rate.failed_per_sec;
            let lags = [handler.effective_lag_secs, rate.effective_lag_secs];
            handler.effective_lag_secs = lags.into_iter().flatten().reduce(f64::max);
        }
    }
}

impl<B: Backend> fmt::Debug for Operator<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operator").field("signed", &self.signed).finish_non_exhaustive()
    }
}
