//! Positions in Kafka, looked at and moved by a person: how a stopped partition goes on.

use super::Operator;
use crate::store::Backend;
use crate::store::operating::Act;
use crate::types::{Error, LedgerFilter, LedgerStatus, Result};

impl<B: Backend> Operator<B> {
    /// Positions in Kafka, sorted by consumer group, cluster, topic and partition.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn positions(&self, filter: &LedgerFilter, limit: u32) -> Result<Vec<LedgerStatus>> {
        self.store.backend.positions(filter, limit).await
    }

    /// Sets positions to an offset, or without one to the first record that Kafka has. Stopped partitions are read again. Records that are
    /// stored already are duplicates, as far as their identity is not their position. Running processes follow within a minute. Returns how
    /// many partitions it changed.
    ///
    /// # Errors
    /// When the filter names no group, no topic, an offset without a partition, or partitions of several clusters; or the database does not
    /// answer.
    pub async fn reset_ledger(&self, filter: &LedgerFilter, to_offset: Option<i64>) -> Result<u64> {
        filter.check_act(to_offset)?;
        self.check_cluster(filter).await?;
        self.act(Act::ResetLedger { filter: filter.clone(), to_offset }).await
    }

    /// Moves a position forward and leaves out the records in between, which are noted as a gap. A stopped partition is read again from
    /// there. Returns whether it moved: it does not where the offset is not ahead of the ledger.
    ///
    /// # Errors
    /// As [`Operator::reset_ledger`]; the filter must name a partition.
    pub async fn skip_ledger(&self, filter: &LedgerFilter, to_offset: i64) -> Result<bool> {
        filter.check_act(Some(to_offset))?;
        self.check_cluster(filter).await?;
        Ok(self.act(Act::SkipLedger { filter: filter.clone(), to_offset }).await? > 0)
    }

    /// One group may read topics of one name in several clusters: an act must say which it means.
    async fn check_cluster(&self, filter: &LedgerFilter) -> Result<()> {
        let mut clusters: Vec<String> =
            self.positions(filter, u32::MAX).await?.into_iter().map(|position| position.cluster_id).collect();
        clusters.dedup();
        match clusters.len() {
            0 | 1 => Ok(()),
            _ => Err(Error::configuration(format!(
                "these are positions of several clusters: name one of {}",
                clusters.join(", ")
            ))),
        }
    }
}
