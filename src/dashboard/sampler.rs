//! Queries the database for all visitors: one task, however many tabs are open. Keeps the last hour in memory.
//!
//! It starts with the first request and ends with the dashboard. It samples less often while no page is open. When the
//! database does not answer, pages show the last snapshot together with the error.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::{Notify, watch};

use super::plot::Point;
use crate::operate::Diagnosis;
use crate::store::{Backend, Store};
use crate::types::{DeliveryFilter, ErrorSummary};

/// How long samples are kept for the plots.
const KEPT: Duration = Duration::from_secs(3_600);
/// How long a page counts as open after its last request.
const WATCHED: Duration = Duration::from_secs(60);
/// How many times longer the pause is while no page is open.
const UNWATCHED_FACTOR: u32 = 6;
/// How long a request waits for a fresh sample.
const LOOK_WAIT_MAX: Duration = Duration::from_secs(10);
/// How many poisoned deliveries of each handler are examined to find the most frequent errors.
const GROUP_ROWS_MAX: u32 = 1_000;
/// Groups are counted again after this many samples, or when the number of poisoned deliveries has changed.
const GROUPS_EVERY: u64 = 6;

/// The result of one sample.
#[derive(Clone)]
pub(super) struct Snapshot {
    /// The number of the sample.
    pub(super) number: u64,
    begun: Instant,
    pub(super) taken_at: SystemTime,
    pub(super) diagnosis: Option<Arc<Diagnosis>>,
    /// The most frequent errors of each handler.
    pub(super) groups: Arc<Vec<ErrorSummary>>,
    /// The number of poisoned deliveries when the groups were counted, and the number of that sample.
    groups_of: Option<(u64, u64)>,
    /// Why the newest sample failed.
    pub(super) error: Option<String>,
}

pub(super) struct Sampler<B: Backend> {
    store: Store<B>,
    every: Duration,
    latest: watch::Sender<Option<Arc<Snapshot>>>,
    /// Std mutexes: nothing awaits while holding them.
    points: Mutex<VecDeque<Point>>,
    watched_at: Mutex<Instant>,
    wake: Arc<Notify>,
    is_started: AtomicBool,
}

impl<B: Backend> Sampler<B> {
    pub(super) fn new(store: Store<B>, every: Duration) -> Self {
        Self {
            store,
            every,
            latest: watch::channel(None).0,
            points: Mutex::default(),
            watched_at: Mutex::new(Instant::now()),
            wake: Arc::default(),
            is_started: AtomicBool::new(false),
        }
    }

    /// Returns the last snapshot, or waits for the first one.
    pub(super) async fn latest(self: &Arc<Self>) -> Option<Arc<Snapshot>> {
        self.watch();
        let newest = self.latest.borrow().clone();
        match newest {
            // No page was open for a while, so the snapshot is old.
            Some(snapshot) if snapshot.begun.elapsed() > self.every * 2 => self.refreshed().await.or(Some(snapshot)),
            Some(snapshot) => Some(snapshot),
            None => self.refreshed().await,
        }
    }

    /// Returns a snapshot that begins now, for a visitor who has just changed something.
    pub(super) async fn refreshed(self: &Arc<Self>) -> Option<Arc<Snapshot>> {
        self.watch();
        let (now, mut looks) = (Instant::now(), self.latest.subscribe());
        self.wake.notify_one();
        let is_newer = |look: &Option<Arc<Snapshot>>| look.as_ref().is_some_and(|look| look.begun >= now);
        let found = tokio::time::timeout(LOOK_WAIT_MAX, looks.wait_for(is_newer)).await.ok()?.ok()?;
        found.clone()
    }

    /// Every snapshot from now on.
    pub(super) fn looks(self: &Arc<Self>) -> watch::Receiver<Option<Arc<Snapshot>>> {
        self.watch();
        self.latest.subscribe()
    }

    /// Records that a page is open, and starts the task on the first call.
    pub(super) fn watch(self: &Arc<Self>) {
        *lock(&self.watched_at) = Instant::now();
        if !self.is_started.swap(true, Ordering::SeqCst) {
            tokio::spawn(run(Arc::downgrade(self)));
        }
    }

    pub(super) fn points(&self) -> Vec<Point> {
        lock(&self.points).iter().copied().collect()
    }

    fn pause(&self) -> Duration {
        if lock(&self.watched_at).elapsed() < WATCHED { self.every } else { self.every * UNWATCHED_FACTOR }
    }

    async fn look(&self) {
        let (begun, taken_at, operator) = (Instant::now(), SystemTime::now(), self.store.operate());
        let before = self.latest.borrow().clone();
        let number = before.as_ref().map_or(1, |before| before.number + 1);
        let (mut diagnosis, mut groups, mut groups_of, mut error) = (None, Arc::default(), None, None);
        if let Some(before) = &before {
            (diagnosis, groups, groups_of) = (before.diagnosis.clone(), Arc::clone(&before.groups), before.groups_of);
        }
        match operator.doctor().await {
            Ok(found) => {
                self.keep(Point::of(&found, taken_at));
                let poisoned = found.handlers.iter().map(|handler| handler.poisoned).sum();
                let is_fresh =
                    groups_of.is_some_and(|(of, at): (u64, u64)| of == poisoned && number < at + GROUPS_EVERY);
                if poisoned == 0 {
                    (groups, groups_of) = (Arc::default(), Some((0, number)));
                } else if !is_fresh {
                    match operator.poisoned_groups(&DeliveryFilter::all(), GROUP_ROWS_MAX).await {
                        Ok(found) => (groups, groups_of) = (Arc::new(found), Some((poisoned, number))),
                        Err(failed) => error = Some(format!("{failed:#}")),
                    }
                }
                diagnosis = Some(Arc::new(found));
            }
            Err(failed) => error = Some(format!("{failed:#}")),
        }
        let snapshot = Snapshot { number, begun, taken_at, diagnosis, groups, groups_of, error };
        self.latest.send_replace(Some(Arc::new(snapshot)));
    }

    fn keep(&self, point: Point) {
        let mut points = lock(&self.points);
        points.push_back(point);
        while points.front().is_some_and(|first| point.at.duration_since(first.at).is_ok_and(|age| age > KEPT)) {
            points.pop_front();
        }
    }
}

impl<B: Backend> Drop for Sampler<B> {
    /// Wakes the task, so that it ends now and not at its next sample.
    fn drop(&mut self) {
        self.wake.notify_one();
    }
}

async fn run<B: Backend>(sampler: Weak<Sampler<B>>) {
    while let Some(present) = sampler.upgrade() {
        present.look().await;
        let (pause, wake) = (present.pause(), Arc::clone(&present.wake));
        drop(present);
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = wake.notified() => {}
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
