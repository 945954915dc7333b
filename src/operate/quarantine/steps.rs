//! A canary replay of quarantined records: one record, then ten, then the rest in steps.
//!
//! A record that is rejected again keeps its id and its place in the list, so a step begins behind the last record of
//! the step before. Records that were requested stay so when the replay stops.

use std::collections::HashMap;
use std::ops::ControlFlow;

use crate::operate::Operator;
use crate::operate::canary::{Became, Canary, CanaryProgress, Steps, in_steps, patiently};
use crate::store::Backend;
use crate::types::{QuarantineFilter, Result};

impl<B: Backend> Operator<B> {
    /// Replays the records that match, at most `limit`. A record is done when it has left the quarantine, and has
    /// failed when it was rejected again. Each step asks for the filter, because its ages grow while the replay runs.
    pub(crate) async fn replay_quarantined_canary_of(
        &self,
        filter: impl Fn() -> QuarantineFilter + Send + Sync,
        limit: u32,
        canary: &Canary,
        on_progress: impl FnMut(&CanaryProgress) -> ControlFlow<()>,
    ) -> Result<CanaryProgress> {
        filter().refuse_empty()?;
        let rows = QuarantineSteps { operator: self, filter, after_id: None, replays: HashMap::new() };
        in_steps(rows, limit, canary, on_progress).await
    }
}

struct QuarantineSteps<'a, B: Backend, F> {
    operator: &'a Operator<B>,
    filter: F,
    /// The last record of the last step.
    after_id: Option<i64>,
    /// The records of the last step, with the number of replays before it.
    replays: HashMap<i64, i32>,
}

impl<B: Backend, F: Fn() -> QuarantineFilter + Send + Sync> QuarantineSteps<'_, B, F> {
    /// The filter for the records that were not replayed yet.
    fn rest(&self) -> QuarantineFilter {
        QuarantineFilter { after_id: self.after_id, ..(self.filter)() }
    }
}

impl<B: Backend, F: Fn() -> QuarantineFilter + Send + Sync> Steps for QuarantineSteps<'_, B, F> {
    async fn next(&mut self, step: u32) -> Result<usize> {
        let fresh = patiently(|| async { self.operator.quarantined(&self.rest(), step).await }).await?;
        let Some(last) = fresh.last() else { return Ok(0) };
        self.operator.replay_quarantined(&self.rest(), u32::try_from(fresh.len()).unwrap_or(step)).await?;
        self.after_id = Some(last.id);
        self.replays = fresh.iter().map(|found| (found.id, found.replays)).collect();
        Ok(fresh.len())
    }

    async fn look(&self) -> Result<Vec<Became>> {
        let ids: Vec<i64> = self.replays.keys().copied().collect();
        let there = self.operator.store.backend.quarantine_states(&ids).await?;
        let stays: HashMap<i64, i32> = there.iter().map(|row| (row.id, row.replays)).collect();
        let became = |(id, before): (&i64, &i32)| match stays.get(id) {
            None => Became::Done,
            Some(replays) if replays > before => Became::Failed,
            Some(_) => Became::Waiting,
        };
        Ok(self.replays.iter().map(became).collect())
    }
}
