//! Operator actions on the quarantine: list records, accept them again, discard them.

use super::Operator;
use crate::store::Backend;
use crate::store::operating::{Act, Verb};
use crate::types::{QuarantineDetails, QuarantineFilter, QuarantineSummary, Result};

#[cfg(feature = "dashboard")]
mod steps;

impl<B: Backend> Operator<B> {
    /// Lists quarantined records, the oldest first.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::operate::QuarantineFilter;
    ///
    /// for record in store.operate().quarantined(&QuarantineFilter::default().topic("orders"), 100).await? {
    ///     println!("{}: {} ({:?})", record.id, record.reason, record.detail);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn quarantined(&self, filter: &QuarantineFilter, limit: u32) -> Result<Vec<QuarantineSummary>> {
        self.store.backend.quarantined(filter, limit).await
    }

    /// Returns a quarantined record with its payload.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn quarantined_record(&self, id: i64) -> Result<Option<QuarantineDetails>> {
        self.store.backend.quarantined_record(id).await
    }

    /// Requests that quarantined records are accepted again, with the current identity policy and limits. A running
    /// inbox that subscribes to their topic does so within a third of the lease. Accepted records leave the quarantine;
    /// rejected ones stay with an updated reason. Returns how many of the matching records were not requested
    /// before.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::operate::QuarantineFilter;
    ///
    /// let operator = store.operate().acting_as("alice").because("the identity policy of orders is fixed");
    /// operator.replay_quarantined(&QuarantineFilter::default().topic("orders"), 1_000).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the filter is empty, or the database does not answer.
    pub async fn replay_quarantined(&self, filter: &QuarantineFilter, limit: u32) -> Result<u64> {
        filter.refuse_empty()?;
        self.act(Act::Quarantined { verb: Verb::Replay, filter: filter.clone(), limit }).await
    }

    /// Deletes quarantined records with their payloads. Returns how many were deleted.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::operate::QuarantineFilter;
    ///
    /// let operator = store.operate().acting_as("alice").because("test records");
    /// operator.discard_quarantined(&QuarantineFilter::default().topic("test"), 1_000).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Operator::replay_quarantined`].
    pub async fn discard_quarantined(&self, filter: &QuarantineFilter, limit: u32) -> Result<u64> {
        filter.refuse_empty()?;
        self.act(Act::Quarantined { verb: Verb::Discard, filter: filter.clone(), limit }).await
    }
}
