//! What people do with the outbox: look at it, have records sent again, give them up.

use super::Operator;
use crate::store::Backend;
use crate::store::operating::{Act, Verb};
use crate::types::{OutboxDetails, OutboxFilter, OutboxSummary, Result};

impl<B: Backend> Operator<B> {
    /// Records of the outbox: poisoned ones the longest poisoned first, waiting ones in the order in which they were stored, else the newest
    /// first.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn outbox(&self, filter: &OutboxFilter, limit: u32) -> Result<Vec<OutboxSummary>> {
        self.store.backend.outgoing(filter, limit).await
    }

    /// A record of the outbox, whole.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn outbox_record(&self, id: i64) -> Result<Option<OutboxDetails>> {
        self.store.backend.outgoing_record(id).await
    }

    /// Has records sent again, with the same ids: those that are poisoned; by id or state also those that were sent or discarded. They come behind what
    /// was sent of their key since.
    ///
    /// ```no_run
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::operate::OutboxFilter;
    /// let operator = store.operate().acting_as("alice").because("the topic is there now");
    /// operator.replay_outbox(&OutboxFilter::default().reason("unknown topic"), 1_000).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the filter says nothing or the database does not answer.
    pub async fn replay_outbox(&self, filter: &OutboxFilter, limit: u32) -> Result<u64> {
        filter.refuse_empty()?;
        self.act(Act::Outgoing { verb: Verb::Replay, filter: filter.clone(), limit }).await
    }

    /// Gives records up for good: those that are poisoned; by id or state also those that wait. A record that is on its way at this moment may be sent
    /// all the same.
    ///
    /// # Errors
    /// As [`Operator::replay_outbox`].
    pub async fn discard_outbox(&self, filter: &OutboxFilter, limit: u32) -> Result<u64> {
        filter.refuse_empty()?;
        self.act(Act::Outgoing { verb: Verb::Discard, filter: filter.clone(), limit }).await
    }
}
