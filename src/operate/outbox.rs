//! Operator actions on the outbox: list records, send them again, discard them.

use super::Operator;
use crate::store::Backend;
use crate::store::operating::{Act, Verb};
use crate::types::{OutboxDetails, OutboxFilter, OutboxSummary, Result};

impl<B: Backend> Operator<B> {
    /// Lists records of the outbox in the order in which they were stored; on PostgreSQL, poisoned ones the longest
    /// poisoned first.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::operate::OutboxFilter;
    ///
    /// for record in store.operate().outbox(&OutboxFilter::default().topic("stock.reserved"), 100).await? {
    ///     println!("{}: {:?} ({:?})", record.id, record.reason, record.last_error);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn outbox(&self, filter: &OutboxFilter, limit: u32) -> Result<Vec<OutboxSummary>> {
        self.store.backend.outgoing(filter, limit).await
    }

    /// Returns a record of the outbox with its payload.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn outbox_record(&self, id: i64) -> Result<Option<OutboxDetails>> {
        self.store.backend.outgoing_record(id).await
    }

    /// Sends poisoned records again, with the same ids. A filter with an id or a state matches sent and discarded
    /// records too. A record that is sent again arrives after later records of its key. Returns how many records
    /// will be sent again.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::operate::OutboxFilter;
    /// let operator = store.operate().acting_as("alice").because("the topic is there now");
    /// operator.replay_outbox(&OutboxFilter::default().reason("unknown topic"), 1_000).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the filter is empty, or the database does not answer.
    pub async fn replay_outbox(&self, filter: &OutboxFilter, limit: u32) -> Result<u64> {
        filter.refuse_empty()?;
        self.act(Act::Outgoing { verb: Verb::Replay, filter: filter.clone(), limit }).await
    }

    /// Discards poisoned records. A filter with an id or a state matches waiting records too. A record that is being
    /// sent at this moment may still reach Kafka. Returns how many records were discarded.
    ///
    /// # Errors
    /// As [`Operator::replay_outbox`].
    pub async fn discard_outbox(&self, filter: &OutboxFilter, limit: u32) -> Result<u64> {
        filter.refuse_empty()?;
        self.act(Act::Outgoing { verb: Verb::Discard, filter: filter.clone(), limit }).await
    }
}
