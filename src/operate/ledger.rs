//! Lists Kafka positions and lets a person move them, which is how a stopped partition resumes.

use super::Operator;
use crate::store::Backend;
use crate::store::operating::Act;
use crate::types::{Error, LedgerFilter, LedgerStatus, Result};

impl<B: Backend> Operator<B> {
    /// Lists positions in Kafka, sorted by consumer group, cluster, topic and partition.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::operate::LedgerFilter;
    ///
    /// for position in store.operate().positions(&LedgerFilter::topic("shop", "orders"), 100).await? {
    ///     println!("{}: next {}, lag {:?}", position.partition, position.next_offset, position.lag);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn positions(&self, filter: &LedgerFilter, limit: u32) -> Result<Vec<LedgerStatus>> {
        self.store.backend.positions(filter, limit).await
    }

    /// Sets positions to an offset, or without one to the first record that Kafka has. Stopped partitions resume.
    /// Records that are read again are recognized as duplicates, unless their identity is their position. Running
    /// processes follow within a minute. Returns how many partitions changed.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::operate::LedgerFilter;
    ///
    /// let operator = store.operate().acting_as("alice").because("read the topic again");
    /// operator.reset_ledger(&LedgerFilter::topic("shop", "orders"), None).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the filter names no group, no topic, an offset without a partition, or partitions of several clusters; or
    /// the database does not answer.
    pub async fn reset_ledger(&self, filter: &LedgerFilter, to_offset: Option<i64>) -> Result<u64> {
        filter.check_act(to_offset)?;
        self.check_cluster(filter).await?;
        self.act(Act::ResetLedger { filter: filter.clone(), to_offset }).await
    }

    /// Moves a position forward. The records in between are not read, and are recorded as a gap. A stopped partition
    /// resumes there. Returns false when the offset is not ahead of the position; then nothing changes.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::operate::LedgerFilter;
    ///
    /// let operator = store.operate().acting_as("alice").because("the records before 1742 are damaged");
    /// operator.skip_ledger(&LedgerFilter::topic("shop", "orders").partition(3), 1_742).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Operator::reset_ledger`]; the filter must name a partition.
    pub async fn skip_ledger(&self, filter: &LedgerFilter, to_offset: i64) -> Result<bool> {
        filter.check_act(Some(to_offset))?;
        self.check_cluster(filter).await?;
        Ok(self.act(Act::SkipLedger { filter: filter.clone(), to_offset }).await? > 0)
    }

    /// A group may read topics of the same name in several clusters, so an action must name the cluster. Positions are
    /// sorted by cluster within a group, and the filter names the group.
    async fn check_cluster(&self, filter: &LedgerFilter) -> Result<()> {
        let mut clusters: Vec<String> =
            self.positions(filter, u32::MAX).await?.into_iter().map(|position| position.cluster_id).collect();
        clusters.dedup();
        match clusters.len() {
            0 | 1 => Ok(()),
            _ => Err(Error::configuration(format!(
                "the filter matches positions of several clusters: name one of {}",
                clusters.join(", ")
            ))),
        }
    }
}
