//! Overviews: who acted, which records Kafka had deleted, and poisoned and quarantined rows in groups.

use super::Operator;
use crate::store::Backend;
#[cfg(feature = "dashboard")]
use crate::store::operating::{Act, Grouped, OpenGroup, SeenDelivery};
#[cfg(feature = "dashboard")]
use crate::store::story::MessageStory;
use crate::types::Result;
use crate::types::{
    AuditEntry, DeliveryFilter, ErrorSummary, LedgerFilter, LedgerGap, QuarantineFilter, QuarantineGroup, Totals,
};
#[cfg(feature = "dashboard")]
use crate::types::{DeliverySummary, Record, State};

#[cfg(feature = "dashboard")]
impl<B: Backend> Operator<B> {
    /// What happened to the message of a delivery, for all its handlers, without its payload.
    pub(crate) async fn story(&self, of: &DeliverySummary) -> Result<MessageStory> {
        self.store.backend.story(of.message_seq).await
    }

    /// Counts pending and running deliveries by handler, state and error, the most frequent first: the `rows_max`
    /// longest due ones of each handler.
    pub(crate) async fn open_groups(
        &self,
        filter: &DeliveryFilter,
        state: Option<State>,
        rows_max: u32,
    ) -> Result<Grouped<OpenGroup>> {
        self.check_key(filter.handler_key.as_deref()).await?;
        self.store.backend.open_groups(filter, state, rows_max).await
    }

    /// Like [`Operator::poisoned_groups`], with the number of deliveries that it has counted.
    pub(crate) async fn poisoned_counted(
        &self,
        filter: &DeliveryFilter,
        rows_max: u32,
    ) -> Result<Grouped<ErrorSummary>> {
        self.check_key(filter.handler_key.as_deref()).await?;
        self.store.backend.poisoned_groups(filter, rows_max).await
    }

    /// Discards pending deliveries that a person has seen, unless they have had another attempt since. The filter is
    /// for the audit. Returns how many were discarded.
    pub(crate) async fn discard_seen(&self, filter: &DeliveryFilter, seen: &[SeenDelivery]) -> Result<u64> {
        filter.refuse_empty()?;
        self.act(Act::DiscardSeen { filter: filter.clone(), seen: seen.to_vec() }).await
    }

    /// The record of a delivery's message, with its payload.
    pub(crate) async fn message_record(&self, of: &DeliverySummary) -> Result<Option<Record>> {
        self.store.backend.message_record(of.message_seq).await
    }
}

impl<B: Backend> Operator<B> {
    /// Lists operator actions, the newest first. With `before`, only actions with a lower id, to fetch the next page.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// let newest = store.operate().audit(None, 100).await?;
    /// let older = store.operate().audit(newest.last().map(|entry| entry.id), 100).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn audit(&self, before: Option<i64>, limit: u32) -> Result<Vec<AuditEntry>> {
        self.store.backend.audit(before, limit).await
    }

    /// Lists gaps: records that Kafka had deleted before they were read, or that a person skipped. The latest come
    /// first.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn gaps(&self, filter: &LedgerFilter, limit: u32) -> Result<Vec<LedgerGap>> {
        self.store.backend.gaps(filter, limit).await
    }

    /// Counts the deliveries that [`Operator::replay`] and [`Operator::discard`] would change, by handler, reason and
    /// error, the most frequent first. To bound the cost, it counts only the `rows_max` longest poisoned deliveries
    /// of each handler: when the counts of a handler add up to `rows_max`, there may be more. Returns at most a thousand
    /// groups.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::operate::DeliveryFilter;
    /// let timeouts = DeliveryFilter::default().error("timeout");
    /// for group in store.operate().poisoned_groups(&timeouts, 10_000).await? {
    ///     println!("{} of {:?}", group.poisoned, group.handler_key);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the filter names an unknown handler, or the database does not answer.
    pub async fn poisoned_groups(&self, filter: &DeliveryFilter, rows_max: u32) -> Result<Vec<ErrorSummary>> {
        self.check_key(filter.handler_key.as_deref()).await?;
        Ok(self.store.backend.poisoned_groups(filter, rows_max).await?.groups)
    }

    /// Counts the records that [`Operator::replay_quarantined`] and [`Operator::discard_quarantined`] would change, by
    /// topic and reason, the most frequent first. Counts the `rows_max` oldest records only.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn quarantine_groups(&self, filter: &QuarantineFilter, rows_max: u32) -> Result<Vec<QuarantineGroup>> {
        self.store.backend.quarantine_groups(filter, rows_max).await
    }

    /// Counts the records in quarantine and in the outbox, up to 10,000 each.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// let totals = store.operate().totals().await?;
    /// println!("{} in quarantine, {} to be sent", totals.quarantined, totals.outbox_waiting);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn totals(&self) -> Result<Totals> {
        self.store.backend.totals().await
    }
}
