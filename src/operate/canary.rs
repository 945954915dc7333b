//! Canary replays: one delivery, then ten, then the rest in steps. The replay stops when too many deliveries of a step
//! fail again.
//!
//! A delivery counts as failed when its first new attempt fails: a later retry may succeed, but it may also be a day
//! away. Deliveries that were replayed stay replayed.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use super::operator::Operator;
use crate::store::Backend;
use crate::store::operating::ReplayState;
use crate::types::{DeliveryFilter, DeliverySummary, Error, Result, State, setters};

/// How many deliveries of one message are examined. A message has one for each handler.
const OF_MESSAGE_MAX: u32 = 1_000;

/// How often the state of a step is polled.
const POLL_EVERY: Duration = Duration::from_millis(200);

/// How often a step is tried while other transactions have locked all its rows. Those that stay locked are not replayed.
const LOCKED_TRIES: u32 = 5;

/// How many rows beyond a step are tried, while those before them are locked.
const LOCKED_ROWS: u32 = 100;

/// The pauses before a read is tried again after a transient error.
const READ_PAUSES: [Duration; 5] = [
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(3),
    Duration::from_secs(10),
];

/// The step sizes and limits of a canary replay.
///
/// ```
/// use wharf::operate::Canary;
/// let canary = Canary::default().steps([1, 10, 100]).failure_ratio_max(0.05);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Canary {
    /// How many deliveries each step replays. The last size repeats until the end. Default: 1, 10, 500.
    pub steps: Vec<u32>,
    /// The share of a step that may fail; above it, the replay stops. Default: 0.1.
    pub failure_ratio_max: f64,
    /// How long a step may take; after that, the replay stops. Default: 5 min.
    pub step_wait_max: Duration,
}

setters!(Canary { steps: impl Into<Vec<u32>>, failure_ratio_max: f64, step_wait_max: Duration });

impl Default for Canary {
    fn default() -> Self {
        Self { steps: vec![1, 10, 500], failure_ratio_max: 0.1, step_wait_max: Duration::from_secs(300) }
    }
}

/// The progress of a canary replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct CanaryProgress {
    /// How many deliveries were replayed.
    pub replayed: u64,
    /// How many of the replayed deliveries are done or discarded.
    pub done: u64,
    /// How many of the replayed deliveries failed again.
    pub failed: u64,
    /// Why the replay stopped early, if it did.
    pub stopped: Option<CanaryStop>,
}

/// Why a canary replay stopped early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum CanaryStop {
    /// Too many deliveries of a step failed again.
    Failures,
    /// A step took too long: no process runs the handler, or the handler is slow.
    Waited,
    /// The caller's callback returned [`ControlFlow::Break`].
    Asked,
}

impl<B: Backend> Operator<B> {
    /// Replays the poisoned deliveries that match the filter, at most `limit`, step by step. A filter with a message id
    /// matches discarded deliveries too. Calls `on_progress` with the progress several times a second. When
    /// `on_progress` returns [`ControlFlow::Break`], nothing more is replayed.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use std::ops::ControlFlow;
    /// use wharf::operate::{Canary, DeliveryFilter};
    /// let failed = DeliveryFilter::default().handler_key("mail.receipt");
    /// let (operator, careful) = (store.operate().acting_as("alice"), Canary::default());
    /// let on_progress = |so_far: &wharf::operate::CanaryProgress| {
    ///     println!("{} of {} done", so_far.done, so_far.replayed);
    ///     ControlFlow::Continue(())
    /// };
    /// let progress = operator.replay_canary(&failed, 10_000, &careful, on_progress).await?;
    /// println!("{:?}", progress.stopped);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Operator::replay`]; also when `steps` is empty or has a 0. Deliveries that were replayed stay replayed.
    pub async fn replay_canary(
        &self,
        filter: &DeliveryFilter,
        limit: u32,
        canary: &Canary,
        on_progress: impl FnMut(&CanaryProgress) -> ControlFlow<()>,
    ) -> Result<CanaryProgress> {
        let began_at = Instant::now();
        // The ages refer to the time of the call, however long the replay runs.
        let aged = || {
            let since = |age: Duration| age.saturating_add(began_at.elapsed());
            let (older_than, newer_than) = (filter.older_than.map(since), filter.newer_than.map(since));
            DeliveryFilter { older_than, newer_than, ..filter.clone() }
        };
        self.replay_canary_of(aged, limit, canary, on_progress).await
    }

    /// The same with a filter that is computed for each step, because its ages grow while the replay runs.
    pub(crate) async fn replay_canary_of(
        &self,
        filter: impl Fn() -> DeliveryFilter + Send + Sync,
        limit: u32,
        canary: &Canary,
        on_progress: impl FnMut(&CanaryProgress) -> ControlFlow<()>,
    ) -> Result<CanaryProgress> {
        filter().refuse_empty()?;
        let (seen, replays) = (HashSet::new(), HashMap::new());
        in_steps(DeliverySteps { operator: self, filter, seen, replays }, limit, canary, on_progress).await
    }
}

/// The rows of a canary: how the next ones are found and replayed, and what becomes of them.
pub(super) trait Steps: Send {
    /// Replays at most `step` further rows. Returns how many; none at the end.
    fn next(&mut self, step: u32) -> impl Future<Output = Result<usize>> + Send;

    /// What has become of the rows of the last step.
    fn look(&self) -> impl Future<Output = Result<Vec<Became>>> + Send;
}

/// What has become of a replayed row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Became {
    Waiting,
    Done,
    Failed,
}

/// Replays rows step by step, until there are no more or a step fails.
pub(super) async fn in_steps(
    mut rows: impl Steps,
    limit: u32,
    canary: &Canary,
    mut on_progress: impl FnMut(&CanaryProgress) -> ControlFlow<()>,
) -> Result<CanaryProgress> {
    let Some(&last) = canary.steps.last().filter(|_| canary.steps.iter().all(|step| *step > 0)) else {
        return Err(Error::configuration("`steps` must not be empty, and each step must be greater than 0"));
    };
    let mut progress = CanaryProgress::default();
    for step in canary.steps.iter().copied().chain(std::iter::repeat(last)) {
        let left = u64::from(limit).saturating_sub(progress.replayed);
        let step = step.min(u32::try_from(left).unwrap_or(u32::MAX));
        if step == 0 || rows.next(step).await? == 0 {
            return Ok(progress);
        }
        let so_far = progress;
        let (deadline, mut patience) = (Instant::now() + canary.step_wait_max, Patience::default());
        loop {
            let became = match rows.look().await {
                Ok(became) => became,
                Err(error) => {
                    patience.wait(error).await?;
                    continue;
                }
            };
            patience = Patience::default();
            progress = so_far.and(&became);
            let ended = progress.done + progress.failed - so_far.done - so_far.failed;
            let (failed, total) = (progress.failed - so_far.failed, became.len() as u64);
            if failed as f64 > canary.failure_ratio_max * total as f64 {
                progress.stopped = Some(CanaryStop::Failures);
            } else if ended < total && Instant::now() >= deadline {
                progress.stopped = Some(CanaryStop::Waited);
            }
            if on_progress(&progress).is_break() && progress.stopped.is_none() {
                progress.stopped = Some(CanaryStop::Asked);
            }
            match (progress.stopped, ended >= total) {
                (Some(_), _) => return Ok(progress),
                (None, true) => break,
                (None, false) => tokio::time::sleep(POLL_EVERY).await,
            }
        }
    }
    Ok(progress)
}

struct DeliverySteps<'a, B: Backend, F> {
    operator: &'a Operator<B>,
    filter: F,
    /// All that were replayed, by message and handler.
    seen: HashSet<(i64, i16)>,
    /// Those of the last step, with the number of replays before it.
    replays: HashMap<(i64, i16), i32>,
}

impl<B: Backend, F: Fn() -> DeliveryFilter + Send + Sync> DeliverySteps<'_, B, F> {
    /// The deliveries that were not replayed yet, at most `rows`: the longest poisoned, or those of the filter's message.
    async fn fresh(&self, rows: u32) -> Result<Vec<DeliverySummary>> {
        let (state, rows) = match (self.filter)().message_id {
            Some(_) => (None, OF_MESSAGE_MAX),
            None => (Some(State::Poisoned), rows),
        };
        let mut fresh = patiently(|| async { self.operator.deliveries(&(self.filter)(), state, rows).await }).await?;
        if state.is_some() {
            // Deliveries that failed again sort behind all that were not replayed yet. They are not replayed twice.
            let tried = fresh.iter().position(|found| self.seen.contains(&row_of(found)));
            fresh.truncate(tried.unwrap_or(fresh.len()));
        }
        fresh.retain(|found| {
            matches!(found.state, State::Poisoned | State::Discarded) && !self.seen.contains(&row_of(found))
        });
        Ok(fresh)
    }

    /// Replays these deliveries in one action, and returns those that were replayed.
    async fn replay_at_once(&self, found: Vec<DeliverySummary>) -> Result<Vec<DeliverySummary>> {
        self.operator.replay(&(self.filter)(), u32::try_from(found.len()).unwrap_or(u32::MAX)).await?;
        let before = found.iter().map(|found| (row_of(found), found.replays)).collect();
        let states = patiently(|| self.replayed_since(&before)).await?;
        let replayed: HashSet<_> = states.iter().map(|row| (row.message_seq, row.handler_id)).collect();
        Ok(found.into_iter().filter(|found| replayed.contains(&row_of(found))).collect())
    }

    /// Replays these deliveries one by one until `step` of them were replayed, and returns those. An action on several
    /// deliveries of a message would begin again with those that failed again, and one on the longest poisoned would
    /// select locked ones again. The filter has the reason too: an action on a message also matches discarded deliveries,
    /// which may be others of this handler.
    async fn replay_each(&self, found: Vec<DeliverySummary>, step: u32) -> Result<Vec<DeliverySummary>> {
        let mut replayed = Vec::new();
        // A delivery whose message is gone cannot be named in an action.
        for found in found.into_iter().filter(|found| found.message_id.is_some() && found.handler_key.is_some()) {
            if replayed.len() >= step as usize {
                break;
            }
            let DeliverySummary { message_id, source, handler_key, reason, .. } = found.clone();
            let filter = DeliveryFilter { message_id, source, handler_key, reason, ..(self.filter)() };
            if self.operator.replay(&filter, 1).await? > 0 {
                replayed.push(found);
            }
        }
        Ok(replayed)
    }

    /// The states of those of these rows that were replayed since they had this number of replays. The others were locked,
    /// or another person or process has changed them, and do not count.
    async fn replayed_since(&self, before: &HashMap<(i64, i16), i32>) -> Result<Vec<ReplayState>> {
        let rows: Vec<(i64, i16)> = before.keys().copied().collect();
        let mut states = self.operator.store.backend.replay_states(&rows).await?;
        states.retain(|row| row.replays > before[&(row.message_seq, row.handler_id)]);
        Ok(states)
    }
}

fn row_of(found: &DeliverySummary) -> (i64, i16) {
    (found.message_seq, found.handler_id)
}

impl<B: Backend, F: Fn() -> DeliveryFilter + Send + Sync> Steps for DeliverySteps<'_, B, F> {
    /// A replay skips deliveries that another transaction has locked: accept locks the poisoned head of an order key,
    /// for example. Only those that were replayed count as seen, so the others are found again.
    async fn next(&mut self, step: u32) -> Result<usize> {
        let is_of_message = (self.filter)().message_id.is_some();
        for tries in 0..LOCKED_TRIES {
            let is_by_name = is_of_message || tries > 0;
            let fresh = self.fresh(if is_by_name { step.saturating_add(LOCKED_ROWS) } else { step }).await?;
            if fresh.is_empty() {
                return Ok(0);
            }
            let replayed =
                if is_by_name { self.replay_each(fresh, step).await? } else { self.replay_at_once(fresh).await? };
            if !replayed.is_empty() {
                self.replays = replayed.iter().map(|found| (row_of(found), found.replays)).collect();
                self.seen.extend(self.replays.keys().copied());
                return Ok(replayed.len());
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
        Ok(0)
    }

    async fn look(&self) -> Result<Vec<Became>> {
        Ok(self.replayed_since(&self.replays).await?.iter().map(Became::of).collect())
    }
}

impl Became {
    fn of(row: &ReplayState) -> Self {
        match row.state {
            State::Done | State::Discarded => Self::Done,
            State::Poisoned => Self::Failed,
            State::Pending | State::Running if row.errors > 0 => Self::Failed,
            State::Pending | State::Running => Self::Waiting,
        }
    }
}

/// Repeats a read after transient errors, a few times.
pub(super) async fn patiently<T, Read: Future<Output = Result<T>>>(read: impl Fn() -> Read) -> Result<T> {
    let mut patience = Patience::default();
    loop {
        match read().await {
            Ok(found) => return Ok(found),
            Err(error) => patience.wait(error).await?,
        }
    }
}

/// Waits after a transient error of a read, so that a short outage of the database does not end a replay that may run
/// for hours.
#[derive(Default)]
struct Patience {
    /// Errors in a row.
    waits: usize,
}

impl Patience {
    /// Waits before the next try. Returns the error if it is permanent, or the last of too many.
    async fn wait(&mut self, error: Error) -> Result<()> {
        match READ_PAUSES.get(self.waits).filter(|_| error.is_transient()) {
            Some(pause) => {
                self.waits += 1;
                tokio::time::sleep(*pause).await;
                Ok(())
            }
            None => Err(error),
        }
    }
}

impl CanaryProgress {
    fn and(mut self, step: &[Became]) -> Self {
        for became in step {
            self.replayed += 1;
            match became {
                Became::Waiting => {}
                Became::Done => self.done += 1,
                Became::Failed => self.failed += 1,
            }
        }
        self
    }
}
