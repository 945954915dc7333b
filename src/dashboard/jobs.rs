//! Background actions on many deliveries or quarantined records: replays in steps, discards in portions. They continue
//! when the browser is closed. Every visitor can watch them, and visitors with the right to act can stop them.
//!
//! They run in this process and end with it. What was changed by then stays so, and the rest is not changed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;

use super::long_act::{LongAct, LongActEnd, Plan};
use super::refusal::Refusal;
use super::sampler::Sampler;
use crate::operate::Operator;
use crate::store::Backend;

/// The maximum number of actions that run at a time.
const RUNNING_MAX: usize = 8;
/// How many actions are listed. When it is exceeded, the oldest finished one is dropped.
const KEPT_MAX: usize = 100;

/// Records that an action has ended without saying how: it has panicked, or was aborted.
struct Ends<'a>(&'a LongAct);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.end(LongActEnd::Failed("it ended unexpectedly: see the log of the dashboard's process".to_owned()));
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
    /// Starts the action in the background. Returns its id.
    pub(super) fn start<B: Backend>(
        &self,
        operator: Operator<B>,
        sampler: &Arc<Sampler<B>>,
        plan: Plan,
    ) -> Result<u64, Refusal> {
        let mut list = self.lock();
        let running = list.jobs.values().filter(|(job, _)| job.progress.borrow().ended.is_none()).count();
        if running >= RUNNING_MAX {
            return Err(Refusal::wrong(format!("{running} actions are running already: wait for one, or stop it")));
        }
        list.last_id += 1;
        let id = list.last_id;
        let job = Arc::new(LongAct::new(id, plan));
        let (runner, sampler) = (Arc::clone(&job), Arc::clone(sampler));
        let task = tokio::spawn(async move {
            // If its end were not recorded, an action that panics would always count as one of `RUNNING_MAX`.
            let ends = Ends(&runner);
            runner.run(&operator, &sampler).await;
            drop(ends);
        });
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
            Refusal::missing(format!("there is no action {id}: its entry was dropped, or the dashboard was restarted"))
        })
    }

    /// All actions, the newest first.
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

#[cfg(test)]
mod tests {
    use super::super::bound::Bound;
    use super::super::long_act::Work;
    use super::*;
    use crate::types::DeliveryFilter;

    fn job() -> Arc<LongAct> {
        let plan = Plan {
            work: Work::Discard { filter: DeliveryFilter::all() },
            about: Vec::new(),
            left: String::new(),
            actor: String::new(),
            because: String::new(),
            expected: 0,
            bound: Bound::new(None, None),
        };
        Arc::new(LongAct::new(1, plan))
    }

    #[tokio::test]
    async fn an_action_that_panics_has_ended() {
        let job = job();
        let runner = Arc::clone(&job);
        let panicked = tokio::spawn(async move {
            let _ends = Ends(&runner);
            std::panic::resume_unwind(Box::new("a bug"));
        });
        assert!(panicked.await.is_err());
        assert!(matches!(job.progress.borrow().ended, Some(LongActEnd::Failed(_))));
    }

    #[test]
    fn the_first_end_is_kept() {
        let job = job();
        job.end(LongActEnd::Well);
        drop(Ends(&job));
        assert_eq!(job.progress.borrow().ended, Some(LongActEnd::Well));
    }
}
