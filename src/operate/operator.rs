//! The operator: looks and acts on a store, in somebody's name.
//!
//! An act is fenced against running work, takes at most as many rows as it is told, and leaves a row in `inbox_audit`. Repeated, it does
//! nothing more. A filter that says nothing, or names a handler that there is not, is refused before anything is touched.

use std::fmt;
use std::time::SystemTime;

use bytes::Bytes;

use super::doctor::{self, Diagnosis};
use crate::store::operating::{Act, Corrected, SchemaVersion, Signed, Verb};
use crate::store::{Backend, Store};
use crate::types::Facts;
use crate::types::{
    DeliveryDetails, DeliverySummary, ErrorSummary, HandlerStatus, HeldKey, ProcessorStatus, QuarantineDetails,
    QuarantineSummary,
};
use crate::types::{DeliveryFilter, QuarantineFilter, State};
use crate::types::{Error, Result};

/// As large as `Limits::payload_bytes_max` can be.
const PAYLOAD_BYTES_MAX: usize = 256 << 20;

/// Looks at an inbox and acts on it. See [`Store::operate`].
///
/// ```no_run
/// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
/// use wharf::operate::DeliveryFilter;
/// let operator = store.operate().acting_as("alice").because("the mail server is back");
/// let failed = DeliveryFilter::default().handler_key("mail.receipt");
/// let replayed = operator.replay(&failed, 1_000).await?;
/// # Ok(()) }
/// ```
#[must_use = "an operator does nothing by itself"]
pub struct Operator<B: Backend> {
    pub(super) store: Store<B>,
    pub(super) signed: Signed,
}

impl<B: Backend> Store<B> {
    /// What people do with an inbox: look, replay, discard, pause.
    pub fn operate(&self) -> Operator<B> {
        Operator { store: self.clone(), signed: Signed::default() }
    }

    /// The version of the schema in the database, and the one this build knows.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn schema_version(&self) -> Result<SchemaVersion> {
        self.backend.schema_version().await
    }

    /// The SQL of the migrations with their versions, for those who run it themselves.
    pub fn migrations() -> Vec<(i32, &'static str)> {
        B::MIGRATIONS.iter().map(|migration| (migration.version, migration.sql)).collect()
    }
}

impl<B: Backend> Operator<B> {
    /// The person who acts, for the audit. PostgreSQL's user is recorded beside it (`database_user`).
    pub fn acting_as(mut self, actor: impl Into<String>) -> Self {
        self.signed.actor = Some(actor.into());
        self
    }

    /// Why that person acts, for the audit.
    pub fn because(mut self, because: impl Into<String>) -> Self {
        self.signed.because = Some(because.into());
        self
    }

    /// Every handler with what is still to be done for it.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn handlers(&self) -> Result<Vec<HandlerStatus>> {
        let mut handlers = self.store.backend.handlers().await?;
        add_rates(&mut handlers, &self.processors().await?);
        Ok(handlers)
    }

    /// Every process that runs handlers, and those that died within a day.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn processors(&self) -> Result<Vec<ProcessorStatus>> {
        self.store.backend.processors().await
    }

    /// Deliveries: poisoned ones the oldest first, pending and running ones the longest due first, else the newest first.
    ///
    /// # Errors
    /// When the filter names a handler that there is not, or the database does not answer.
    pub async fn deliveries(
        &self,
        filter: &DeliveryFilter,
        state: Option<State>,
        limit: u32,
    ) -> Result<Vec<DeliverySummary>> {
        self.check_key(filter.handler_key.as_deref()).await?;
        self.store.backend.deliveries(filter, state, limit).await
    }

    /// Keys of an ordered handler on which deliveries wait, with the delivery that they wait for: those that wait for a person first, then
    /// by how many wait. Looks at the thousand oldest deliveries that wait, and at the thousand that have been poisoned longest.
    ///
    /// # Errors
    /// When there is no such handler, or the database does not answer.
    pub async fn held_keys(&self, handler_key: &str, limit: u32) -> Result<Vec<HeldKey>> {
        self.check_key(Some(handler_key)).await?;
        self.store.backend.held_keys(handler_key, limit).await
    }

    /// A delivery with its record and its history.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn delivery(&self, of: &DeliverySummary) -> Result<Option<DeliveryDetails>> {
        self.store.backend.delivery(of.message_seq, of.handler_id).await
    }

    /// Poisoned deliveries by what went wrong, the most frequent first.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn poisoned_errors(&self) -> Result<Vec<ErrorSummary>> {
        self.store.backend.poisoned_errors().await
    }

    /// Gives poisoned deliveries a fresh set of retries, due now, the longest poisoned first; by message id also discarded ones. What they
    /// had come to stays in their history.
    ///
    /// # Errors
    /// When the filter says nothing or names a handler that there is not, or the database does not answer.
    pub async fn replay(&self, filter: &DeliveryFilter, limit: u32) -> Result<u64> {
        filter.refuse_empty()?;
        self.check_key(filter.handler_key.as_deref()).await?;
        self.act(Act::Deliveries { verb: Verb::Replay, filter: filter.clone(), limit }).await
    }

    /// Gives up poisoned deliveries for good; by message id also pending ones. Running ones are left alone.
    ///
    /// # Errors
    /// As [`Operator::replay`].
    pub async fn discard(&self, filter: &DeliveryFilter, limit: u32) -> Result<u64> {
        filter.refuse_empty()?;
        self.check_key(filter.handler_key.as_deref()).await?;
        self.act(Act::Deliveries { verb: Verb::Discard, filter: filter.clone(), limit }).await
    }

    /// Forgets the identity of a purged message, which retention keeps ([`Retention::keep_identities`](crate::Retention::keep_identities)): its
    /// record is accepted once more when it comes again. Returns whether it was kept.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn forget_identity(&self, message_id: &str, source: &str) -> Result<bool> {
        let (message_id, source) = (message_id.to_owned(), source.to_owned());
        Ok(self.act(Act::ForgetIdentity { message_id, source }).await? > 0)
    }

    /// Runs a poisoned or discarded delivery again with a corrected payload, for its handler only. The message keeps the payload that it came
    /// with, byte for byte, for its other handlers and for deduplication; the corrected one is kept beside it, and later replays of
    /// this delivery use it too. [`Message::is_corrected`](crate::Message::is_corrected) tells the handler. The audit has the hash of the
    /// payload, not the payload. Returns false when the delivery is not given up any more, or has had an attempt since it was looked at.
    ///
    /// ```no_run
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
            return Err(Error::configuration("a corrected payload has at most 268435456 bytes"));
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

    /// Takes the claim of a running delivery away, as it was looked at: of that attempt and no later one. The delivery is due at once and runs
    /// elsewhere; what the released run comes to changes nothing any more, and its handler is told to stop within a third of the lease.
    /// Nothing is charged. Returns false when that attempt is not running any more, or its outcome is being written at this moment.
    ///
    /// A handler that does not yield cannot be stopped, only made irrelevant: what it does from here on happens beside the next run. On
    /// SQLite a transactional handler cannot be released, because it has the only writer.
    ///
    /// ```no_run
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
    /// When the message is gone, or the database does not answer.
    pub async fn release(&self, run: &DeliverySummary) -> Result<bool> {
        let filter = one(run)?;
        Ok(self.act(Act::Release { filter, attempt: run.attempts }).await? > 0)
    }

    /// Quarantined records, the oldest first.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn quarantined(&self, filter: &QuarantineFilter, limit: u32) -> Result<Vec<QuarantineSummary>> {
        self.store.backend.quarantined(filter, limit).await
    }

    /// A quarantined record, whole.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn quarantined_record(&self, id: i64) -> Result<Option<QuarantineDetails>> {
        self.store.backend.quarantined_record(id).await
    }

    /// Asks for quarantined records to be accepted anew, identity and all. A running inbox that subscribes to their topic does so within a
    /// third of the lease: what is accepted leaves the quarantine, what is not stays, with its reason of now.
    ///
    /// # Errors
    /// When the filter says nothing or the database does not answer.
    pub async fn replay_quarantined(&self, filter: &QuarantineFilter, limit: u32) -> Result<u64> {
        filter.refuse_empty()?;
        self.act(Act::Quarantined { verb: Verb::Replay, filter: filter.clone(), limit }).await
    }

    /// Deletes quarantined records. What they held is gone.
    ///
    /// # Errors
    /// As [`Operator::replay_quarantined`].
    pub async fn discard_quarantined(&self, filter: &QuarantineFilter, limit: u32) -> Result<u64> {
        filter.refuse_empty()?;
        self.act(Act::Quarantined { verb: Verb::Discard, filter: filter.clone(), limit }).await
    }

    /// What the database knows about itself and about work that does not move.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn facts(&self) -> Result<Facts> {
        self.store.backend.facts().await
    }

    /// Everything that keeps work from moving, waits for a person, or will.
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

    pub(super) async fn act(&self, act: Act) -> Result<u64> {
        self.store.backend.act(act, self.signed.clone()).await
    }

    /// A mistyped key must not be an answer of nothing.
    pub(super) async fn check_key(&self, handler_key: Option<&str>) -> Result<()> {
        let Some(wanted) = handler_key else { return Ok(()) };
        let keys = self.store.backend.handler_keys().await?;
        if keys.iter().any(|(key, _)| key == wanted) {
            return Ok(());
        }
        let mut known: Vec<&str> = keys.iter().map(|(_, current)| current.as_str()).collect();
        known.sort_unstable();
        known.dedup();
        Err(Error::configuration(format!("there is no handler key {wanted:?}; there are: {}", known.join(", "))))
    }
}

/// A filter that means this delivery and no other.
fn one(delivery: &DeliverySummary) -> Result<DeliveryFilter> {
    let DeliverySummary { message_id, source, handler_key, .. } = delivery;
    if message_id.is_none() || handler_key.is_none() {
        return Err(Error::configuration("the message of this delivery is gone, or its handler"));
    }
    Ok(DeliveryFilter {
        message_id: message_id.clone(),
        source: source.clone(),
        handler_key: handler_key.clone(),
        ..DeliveryFilter::default()
    })
}

/// Adds up what live processes report.
fn add_rates(handlers: &mut [HandlerStatus], processors: &[ProcessorStatus]) {
    let alive = processors.iter().filter(|processor| processor.is_alive);
    for (key, rate) in alive.filter_map(|processor| processor.report.as_ref()).flat_map(|report| &report.rates) {
        let is_of = |handler: &&mut HandlerStatus| handler.handler_key == *key || handler.former_keys.contains(key);
        if let Some(handler) = handlers.iter_mut().find(is_of) {
            handler.done_per_sec += rate.done_per_sec;
            handler.failed_per_sec += rate.failed_per_sec;
        }
    }
}

impl<B: Backend> fmt::Debug for Operator<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operator").field("signed", &self.signed).finish_non_exhaustive()
    }
}
