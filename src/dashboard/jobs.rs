//! Acts on many deliveries that take a while: a replay step by step, a discard in portions. They go on when the browser has gone, can be
//! watched by anybody and stopped.
//!
//! They live in this process: when it ends they end, what was replayed or discarded stays so, and the rest is untouched.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::query::DeliveryQuery;
use super::refusal::Refusal;
use crate::operate::{Canary, CanaryProgress, CanaryStop, Operator};
use crate::store::Backend;
use crate::types::{DeliveryFilter, Result};

/// Deliveries that one act takes at the most.
const TAKEN_MAX: u32 = 1_000_000;
/// Deliveries that are discarded, or replayed at once, by one statement.
const PORTION: u32 = 1_000;
/// Acts that run at a time.
const RUNNING_MAX: usize = 8;
/// Acts that are remembered.
const KEPT_MAX: usize = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LongActVerb {
    /// One, then ten, then the rest in steps; no further when too many of a step fail again.
    ReplayCarefully,
    /// In steps, whatever becomes of them.
    Replay,
    Discard,
}

impl LongActVerb {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::ReplayCarefully => "Canary replay",
            Self::Replay => "Replay",
            Self::Discard => "Discard",
        }
    }
}

/// What is to be done, and by whom.
pub(super) struct Plan {
    pub(super) verb: LongActVerb,
    pub(super) query: DeliveryQuery,
    pub(super) filter: DeliveryFilter,
    pub(super) actor: String,
    pub(super) because: String,
    /// How many the preview counted, up to its bound.
    pub(super) expected: u64,
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
    Stopped(CanaryStop),
    Failed(String),
}

impl LongAct {
    pub(super) fn stop(&self) {
        self.is_asked_to_stop.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_asked_to_stop.load(Ordering::SeqCst)
    }

    async fn run<B: Backend>(&self, operator: &Operator<B>) {
        let ended = match self.plan.verb {
            LongActVerb::ReplayCarefully => self.replay(operator, &Canary::default()).await,
            LongActVerb::Replay => {
                self.replay(operator, &Canary::default().steps(vec![PORTION]).failure_ratio_max(1.0)).await
            }
            LongActVerb::Discard => self.discard(operator).await,
        };
        let ended = ended.unwrap_or_else(|error| LongActEnd::Failed(format!("{error:#}")));
        self.progress.send_modify(|progress| progress.ended = Some(ended));
    }

    async fn replay<B: Backend>(&self, operator: &Operator<B>, canary: &Canary) -> Result<LongActEnd> {
        let tell = |so_far: &CanaryProgress| {
            let next =
                LongActProgress { affected: so_far.replayed, done: so_far.done, failed: so_far.failed, ended: None };
            self.progress.send_if_modified(|progress| {
                let is_changed = *progress != next;
                *progress = next;
                is_changed
            });
            if self.is_stopping() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let ended = operator.replay_canary(&self.plan.filter, TAKEN_MAX, canary, tell).await?;
        Ok(ended.stopped.map_or(LongActEnd::Well, LongActEnd::Stopped))
    }

    async fn discard<B: Backend>(&self, operator: &Operator<B>) -> Result<LongActEnd> {
        for _ in 0..TAKEN_MAX / PORTION {
            let discarded = operator.discard(&self.plan.filter, PORTION).await?;
            self.progress.send_modify(|progress| {
                progress.affected += discarded;
                progress.done += discarded;
            });
            if discarded < u64::from(PORTION) {
                break;
            }
            if self.is_stopping() {
                return Ok(LongActEnd::Stopped(CanaryStop::Asked));
            }
        }
        Ok(LongActEnd::Well)
    }
}

#[derive(Default)]
pub(super) struct Jobs(Mutex<LongActList>);

#[derive(Default)]
struct LongActList {
    last_id: u64,
    jobs: BTreeMap<u64, (Arc<LongAct>, AbortHandle)>,
}

impl Jobs {
    /// Begins it. Returns its number.
    pub(super) fn start<B: Backend>(&self, operator: Operator<B>, plan: Plan) -> Result<u64, Refusal> {
        let mut list = self.lock();
        let running = list.jobs.values().filter(|(job, _)| job.progress.borrow().ended.is_none()).count();
        if running >= RUNNING_MAX {
            return Err(Refusal::wrong(format!("{running} acts are running already: wait for one, or stop it")));
        }
        list.last_id += 1;
        let id = list.last_id;
        let progress = watch::channel(LongActProgress::default()).0;
        let is_asked_to_stop = AtomicBool::new(false);
        let job = Arc::new(LongAct { id, plan, started_at: SystemTime::now(), progress, is_asked_to_stop });
        let runner = Arc::clone(&job);
        let task = tokio::spawn(async move { runner.run(&operator).await });
        list.jobs.insert(id, (job, task.abort_handle()));
        let ended = |(_, (job, _)): &(&u64, &(Arc<LongAct>, AbortHandle))| job.progress.borrow().ended.is_some();
        if list.jobs.len() > KEPT_MAX
            && let Some(oldest) = list.jobs.iter().find(ended).map(|(id, _)| *id)
        {
            list.jobs.remove(&oldest);
        }
        Ok(id)
    }

    pub(super) fn find(&self, id: u64) -> Result<Arc<LongAct>, Refusal> {
        let found = self.lock().jobs.get(&id).map(|(job, _)| Arc::clone(job));
        found.ok_or_else(|| {
            Refusal::missing(format!("there is no act {id}: it was forgotten, or the dashboard was restarted"))
        })
    }

    /// The newest first.
    pub(super) fn all(&self) -> Vec<Arc<LongAct>> {
        self.lock().jobs.values().rev().map(|(job, _)| Arc::clone(job)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, LongActList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        for (_, task) in self.lock().jobs.values() {
            task.abort();
        }
    }
}
