//! Replays with care: one delivery, then ten, then the rest in steps, and no further when too many of a step fail again.
//!
//! A delivery has failed when its first new attempt has: its retries may still save it, but they may also take a day. What was replayed
//! stays replayed.

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use super::operator::Operator;
use crate::store::Backend;
use crate::store::operating::ReplayState;
use crate::types::{DeliveryFilter, State};
use crate::types::{Error, Result, setters};

/// How often it is looked what became of a step.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How a canary replay goes on.
///
/// ```
/// use wharf::operate::Canary;
/// let canary = Canary::default().steps([1, 10, 100]).failure_ratio_max(0.05);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Canary {
    /// How many are replayed at a time: the steps in order, the last one over and over. Default: 1, 10, 500.
    pub steps: Vec<u32>,
    /// The share of a step that may fail before it goes no further. Default: 0.1.
    pub failure_ratio_max: f64,
    /// How long a step may take before it goes no further. Default: 5 min.
    pub step_wait_max: Duration,
}

setters!(Canary { steps: impl Into<Vec<u32>>, failure_ratio_max: f64, step_wait_max: Duration });

impl Default for Canary {
    fn default() -> Self {
        Self { steps: vec![1, 10, 500], failure_ratio_max: 0.1, step_wait_max: Duration::from_secs(300) }
    }
}

/// What became of a canary replay so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct CanaryProgress {
    /// Deliveries that were replayed.
    pub replayed: u64,
    /// Of them: done.
    pub done: u64,
    /// Of them: failed again.
    pub failed: u64,
    /// Why it went no further, if it did not.
    pub stopped: Option<CanaryStop>,
}

/// Why a canary replay went no further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum CanaryStop {
    /// Too many of a step failed again.
    Failures,
    /// A step took too long: nobody runs the handler, or it is slow.
    Waited,
    /// The caller stopped it.
    Asked,
}

impl<B: Backend> Operator<B> {
    /// Replays what the filter means, at most `limit`, step by step. Calls `on_look` after each look, several times a second, with what
    /// became of it so far. When that returns [`ControlFlow::Break`], nothing more is replayed.
    ///
    /// ```no_run
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use std::ops::ControlFlow;
    /// use wharf::operate::{Canary, DeliveryFilter};
    /// let failed = DeliveryFilter::default().handler_key("mail.receipt");
    /// let (operator, careful) = (store.operate().acting_as("alice"), Canary::default());
    /// let on_look = |so_far: &wharf::operate::CanaryProgress| {
    ///     println!("{} of {} done", so_far.done, so_far.replayed);
    ///     ControlFlow::Continue(())
    /// };
    /// let progress = operator.replay_canary(&failed, 10_000, &careful, on_look).await?;
    /// println!("{:?}", progress.stopped);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Operator::replay`]; what was replayed stays so.
    pub async fn replay_canary(
        &self,
        filter: &DeliveryFilter,
        limit: u32,
        canary: &Canary,
        mut on_look: impl FnMut(&CanaryProgress) -> ControlFlow<()>,
    ) -> Result<CanaryProgress> {
        filter.refuse_empty()?;
        let Some(&last) = canary.steps.last().filter(|_| canary.steps.iter().all(|step| *step > 0)) else {
            return Err(Error::configuration("a canary replay needs steps, and none of nothing"));
        };
        let mut progress = CanaryProgress::default();
        let mut seen = HashSet::new();
        for step in canary.steps.iter().copied().chain(std::iter::repeat(last)) {
            let left = u64::from(limit).saturating_sub(progress.replayed);
            let step = step.min(u32::try_from(left).unwrap_or(u32::MAX));
            let mut fresh =
                if step == 0 { Vec::new() } else { self.deliveries(filter, Some(State::Poisoned), step).await? };
            // What failed again stands behind all that was never tried, and is not tried once more.
            let tried = fresh.iter().position(|found| seen.contains(&(found.message_seq, found.handler_id)));
            fresh.truncate(tried.unwrap_or(fresh.len()));
            if fresh.is_empty() {
                return Ok(progress);
            }
            self.replay(filter, u32::try_from(fresh.len()).unwrap_or(step)).await?;
            let replays: HashMap<(i64, i16), i32> =
                fresh.iter().map(|found| ((found.message_seq, found.handler_id), found.replays)).collect();
            seen.extend(replays.keys().copied());
            let so_far = progress;
            let deadline = Instant::now() + canary.step_wait_max;
            loop {
                let rows: Vec<(i64, i16)> = replays.keys().copied().collect();
                let mut ours = self.store.backend.standings(&rows).await?;
                // What somebody else has changed meanwhile is not ours to judge.
                ours.retain(|row| row.replays > replays[&(row.message_seq, row.handler_id)]);
                progress = so_far.and(&ours);
                let ended = progress.done + progress.failed - so_far.done - so_far.failed;
                let (failed, total) = (progress.failed - so_far.failed, ours.len() as u64);
                if failed as f64 > canary.failure_ratio_max * total as f64 {
                    progress.stopped = Some(CanaryStop::Failures);
                } else if ended < total && Instant::now() >= deadline {
                    progress.stopped = Some(CanaryStop::Waited);
                }
                if on_look(&progress).is_break() && progress.stopped.is_none() {
                    progress.stopped = Some(CanaryStop::Asked);
                }
                match (progress.stopped, ended >= total) {
                    (Some(_), _) => return Ok(progress),
                    (None, true) => break,
                    (None, false) => tokio::time::sleep(LOOK_EVERY).await,
                }
            }
        }
        Ok(progress)
    }
}

impl CanaryProgress {
    fn and(mut self, step: &[ReplayState]) -> Self {
        for row in step {
            self.replayed += 1;
            match row.state {
                State::Done | State::Discarded => self.done += 1,
                State::Poisoned => self.failed += 1,
                State::Pending | State::Running if row.errors > 0 => self.failed += 1,
                State::Pending | State::Running => {}
            }
        }
        self
    }
}
