//! One background action: what it does to which rows, its progress and its end.
//!
//! It changes what its preview showed and nothing else. Poisoned deliveries and quarantined records are bound by their
//! age, and pending and running deliveries by the list of those that were previewed, each with its attempt: see
//! `bound.rs`.

use std::collections::HashSet;
use std::future::Future;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use tokio::sync::watch;

use super::bound::Bound;
use super::sampler::Sampler;
use crate::operate::{Canary, CanaryProgress, CanaryStop, Operator};
use crate::store::Backend;
use crate::store::operating::SeenDelivery;
use crate::types::{DeliveryFilter, HandlerStatus, QuarantineFilter, Result, State};

/// The maximum number of rows of one action.
const TAKEN_MAX: u32 = 1_000_000;
/// How many rows one statement discards, deletes or replays.
const PORTION: u32 = 1_000;
/// The maximum number of pending or running deliveries of one action: its form lists them.
pub(super) const SEEN_MAX: u32 = HandlerStatus::COUNT_MAX as u32;

/// What to do with which rows.
pub(super) enum Work {
    /// Poisoned deliveries.
    Replay { filter: DeliveryFilter, canary: Canary },
    /// Poisoned deliveries.
    Discard { filter: DeliveryFilter },
    /// Pending deliveries.
    DiscardSeen { filter: DeliveryFilter, seen: Vec<SeenDelivery> },
    /// The claims of running deliveries.
    Release { filter: DeliveryFilter, seen: Vec<SeenDelivery> },
    /// Quarantined records.
    Accept { filter: QuarantineFilter, canary: Canary },
    /// Quarantined records.
    Delete { filter: QuarantineFilter },
}

/// The words of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Words {
    pub(super) name: &'static str,
    pub(super) rows: &'static str,
    /// What has been done to the rows.
    pub(super) changed: &'static str,
    /// What the rest of the rows is called.
    pub(super) left: &'static str,
    /// What has become of replayed rows. None if the change is the result.
    pub(super) became: Option<BecameWords>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BecameWords {
    pub(super) done: &'static str,
    pub(super) failed: &'static str,
    pub(super) waiting: &'static str,
    /// As in "3 failed again".
    pub(super) again: &'static str,
    /// What to ask when a step takes too long.
    pub(super) question: &'static str,
}

/// One, then ten, then 500 at a time; stops when too many fail again.
pub(super) fn carefully() -> Canary {
    Canary::default()
}

/// In portions, regardless of failures.
pub(super) fn at_once() -> Canary {
    Canary::default().steps(vec![PORTION]).failure_ratio_max(1.0)
}

impl Work {
    pub(super) fn words(&self) -> Words {
        let name = |canary: &Canary| if canary.failure_ratio_max < 1.0 { "Canary replay" } else { "Replay" };
        let (deliveries, records) = ("deliveries", "records");
        let (poisoned, quarantined) = ("Still poisoned", "Still in quarantine");
        match self {
            Self::Replay { canary, .. } => {
                let became = BecameWords {
                    done: "Done",
                    failed: "Failed again",
                    waiting: "Not run yet",
                    again: "failed again",
                    question: "does a process run the handler?",
                };
                Words {
                    name: name(canary),
                    rows: deliveries,
                    changed: "Replayed",
                    left: poisoned,
                    became: Some(became),
                }
            }
            Self::Accept { canary, .. } => {
                let became = BecameWords {
                    done: "Accepted",
                    failed: "Rejected again",
                    waiting: "Requested",
                    again: "were rejected again",
                    question: "does a process subscribe to the topic?",
                };
                Words {
                    name: name(canary),
                    rows: records,
                    changed: "Replayed",
                    left: quarantined,
                    became: Some(became),
                }
            }
            Self::Discard { .. } => {
                Words { name: "Discard", rows: deliveries, changed: "Discarded", left: poisoned, became: None }
            }
            Self::DiscardSeen { .. } => {
                Words { name: "Discard", rows: deliveries, changed: "Discarded", left: "Still pending", became: None }
            }
            Self::Release { .. } => {
                Words { name: "Release", rows: deliveries, changed: "Released", left: "Still running", became: None }
            }
            Self::Delete { .. } => {
                Words { name: "Delete", rows: records, changed: "Deleted", left: quarantined, became: None }
            }
        }
    }
}

/// What to do, and in whose name.
pub(super) struct Plan {
    pub(super) work: Work,
    /// The filter in words.
    pub(super) about: Vec<(&'static str, String)>,
    /// The page that shows what is left, with its filter.
    pub(super) left: String,
    pub(super) actor: String,
    pub(super) because: String,
    /// How many rows the preview counted, up to its limit.
    pub(super) expected: u64,
    pub(super) bound: Bound,
}

pub(super) struct LongAct {
    pub(super) id: u64,
    pub(super) plan: Plan,
    pub(super) started_at: SystemTime,
    pub(super) progress: watch::Sender<LongActProgress>,
    is_asked_to_stop: AtomicBool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct LongActProgress {
    pub(super) affected: u64,
    pub(super) done: u64,
    pub(super) failed: u64,
    pub(super) ended: Option<LongActEnd>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LongActEnd {
    Well,
    /// It has changed as many rows as one action may. There may be more.
    AtLimit,
    Stopped(CanaryStop),
    Failed(String),
}

impl LongAct {
    pub(super) fn new(id: u64, plan: Plan) -> Self {
        let progress = watch::channel(LongActProgress::default()).0;
        Self { id, plan, started_at: SystemTime::now(), progress, is_asked_to_stop: AtomicBool::new(false) }
    }

    pub(super) fn stop(&self) {
        self.is_asked_to_stop.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_asked_to_stop.load(Ordering::SeqCst)
    }

    /// Runs it to its end. The database is sampled before the end is reported, so that pages show what has changed.
    pub(super) async fn run<B: Backend>(&self, operator: &Operator<B>, sampler: &Arc<Sampler<B>>) {
        let ended = self.work(operator).await.unwrap_or_else(|error| LongActEnd::Failed(format!("{error:#}")));
        let ended = match ended {
            LongActEnd::Well if self.progress.borrow().affected >= u64::from(TAKEN_MAX) => LongActEnd::AtLimit,
            ended => ended,
        };
        sampler.refreshed().await;
        self.end(ended);
    }

    /// Records how it has ended, unless that is known already.
    pub(super) fn end(&self, ended: LongActEnd) {
        self.progress.send_if_modified(|progress| {
            let is_first = progress.ended.is_none();
            if is_first {
                progress.ended = Some(ended);
            }
            is_first
        });
    }

    async fn work<B: Backend>(&self, operator: &Operator<B>) -> Result<LongActEnd> {
        let (bound, limit) = (self.plan.bound, self.plan.bound.limit(TAKEN_MAX));
        let tell = |so_far: &CanaryProgress| self.tell(so_far);
        let ended = match &self.plan.work {
            Work::Replay { filter, canary } => {
                operator.replay_canary_of(|| bound.deliveries(filter), limit, canary, tell).await?
            }
            Work::Accept { filter, canary } => {
                operator.replay_quarantined_canary_of(|| bound.quarantined(filter), limit, canary, tell).await?
            }
            Work::Discard { filter } => {
                let discard = |portion| {
                    let filter = bound.deliveries(filter);
                    async move { operator.discard(&filter, portion).await }
                };
                return self.in_portions(limit, discard).await;
            }
            Work::Delete { filter } => {
                let delete = |portion| {
                    let filter = bound.quarantined(filter);
                    async move { operator.discard_quarantined(&filter, portion).await }
                };
                return self.in_portions(limit, delete).await;
            }
            Work::DiscardSeen { filter, seen } => return self.discard_seen(operator, filter, seen).await,
            Work::Release { filter, seen } => {
                return self.release(operator, &bound.deliveries(filter), seen).await;
            }
        };
        Ok(ended.stopped.map_or(LongActEnd::Well, LongActEnd::Stopped))
    }

    /// Shows the progress of a replay, and ends it when a visitor has asked for that.
    fn tell(&self, so_far: &CanaryProgress) -> ControlFlow<()> {
        let next = LongActProgress { affected: so_far.replayed, done: so_far.done, failed: so_far.failed, ended: None };
        self.progress.send_if_modified(|progress| {
            let is_changed = *progress != next;
            *progress = next;
            is_changed
        });
        if self.is_stopping() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn add(&self, changed: u64) {
        self.progress.send_modify(|progress| {
            progress.affected += changed;
            progress.done += changed;
        });
    }

    /// Changes portions of what matches, until there is no more. A portion leaves out rows that another transaction has
    /// locked, so one that is not full is not the last.
    async fn in_portions<Change: Future<Output = Result<u64>>>(
        &self,
        limit: u32,
        change: impl Fn(u32) -> Change,
    ) -> Result<LongActEnd> {
        let mut left = limit;
        while left > 0 {
            let changed = change(left.min(PORTION)).await?;
            self.add(changed);
            if changed == 0 {
                break;
            }
            left = left.saturating_sub(u32::try_from(changed).unwrap_or(u32::MAX));
            if left > 0 && self.is_stopping() {
                return Ok(LongActEnd::Stopped(CanaryStop::Asked));
            }
        }
        Ok(LongActEnd::Well)
    }

    async fn discard_seen<B: Backend>(
        &self,
        operator: &Operator<B>,
        filter: &DeliveryFilter,
        seen: &[SeenDelivery],
    ) -> Result<LongActEnd> {
        for portion in seen.chunks(PORTION as usize) {
            if self.is_stopping() {
                return Ok(LongActEnd::Stopped(CanaryStop::Asked));
            }
            self.add(operator.discard_seen(filter, portion).await?);
        }
        Ok(LongActEnd::Well)
    }

    /// Releases the claims of the previewed runs, one by one. A run that has ended since is left alone.
    async fn release<B: Backend>(
        &self,
        operator: &Operator<B>,
        filter: &DeliveryFilter,
        seen: &[SeenDelivery],
    ) -> Result<LongActEnd> {
        let seen: HashSet<SeenDelivery> = seen.iter().copied().collect();
        let running = operator.deliveries(filter, Some(State::Running), SEEN_MAX).await?;
        for run in running.iter().filter(|run| seen.contains(&super::bound::seen(run))) {
            if self.is_stopping() {
                return Ok(LongActEnd::Stopped(CanaryStop::Asked));
            }
            self.add(u64::from(operator.release(run).await?));
        }
        Ok(LongActEnd::Well)
    }
}
