//! Looks at many things at once: who acted, what Kafka had lost, and what waits for a person, in groups.

use super::Operator;
use crate::store::Backend;
use crate::types::Result;
use crate::types::{
    AuditEntry, DeliveryFilter, ErrorSummary, LedgerFilter, LedgerGap, QuarantineFilter, QuarantineGroup,
};

impl<B: Backend> Operator<B> {
    /// What people did, the newest first; with `before`, only acts with a lower number, to go on with where a list ended.
    ///
    /// ```no_run
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

    /// Records that Kafka no longer had when they were to be read, or that a person skipped; those noticed last come first.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn gaps(&self, filter: &LedgerFilter, limit: u32) -> Result<Vec<LedgerGap>> {
        self.store.backend.gaps(filter, limit).await
    }

    /// What [`Operator::replay`] and [`Operator::discard`] would take, by handler, reason and error; the most frequent first. Of each handler
    /// the `looked_max` deliveries that have been poisoned longest are looked at, so the cost is bounded: when the counts of a handler add
    /// up to `looked_max`, there may be more.
    ///
    /// ```no_run
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
    /// When the filter names a handler that there is not, or the database does not answer.
    pub async fn poisoned_groups(&self, filter: &DeliveryFilter, looked_max: u32) -> Result<Vec<ErrorSummary>> {
        self.check_key(filter.handler_key.as_deref()).await?;
        self.store.backend.poisoned_groups(filter, looked_max).await
    }

    /// What [`Operator::replay_quarantined`] and [`Operator::discard_quarantined`] would take, by topic and reason; the most frequent first.
    /// The `looked_max` oldest are looked at.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn quarantine_groups(&self, filter: &QuarantineFilter, looked_max: u32) -> Result<Vec<QuarantineGroup>> {
        self.store.backend.quarantine_groups(filter, looked_max).await
    }
}
