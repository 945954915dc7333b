//! Looks at the database for everybody: one task, however many tabs are open. Keeps the last hour in memory.
//!
//! Begins when the first visitor comes and ends with the dashboard. Looks less often while nobody has a page open. When the database does
//! not answer, the last that was seen stays, with the error.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::{Notify, watch};

use super::plot::Point;
use crate::operate::Diagnosis;
use crate::store::{Backend, Store};
use crate::types::{DeliveryFilter, ErrorSummary};

/// What is shown as plots.
const KEPT: Duration = Duration::from_secs(3_600);
/// A page that was open no longer ago counts as open.
const WATCHED: Duration = Duration::from_secs(60);
/// How much less often it looks while nobody watches.
const UNWATCHED_FACTOR: u32 = 6;
/// How long a request waits for a look that it needs.
const LOOK_WAIT_MAX: Duration = Duration::from_secs(10);
/// Poisoned deliveries of each handler that are looked at to name what fails most.
const GROUPS_LOOKED_MAX: u32 = 1_000;
/// Groups are counted again after so many looks, or when the number of poisoned deliveries has changed.
const GROUPS_EVERY: u64 = 6;

/// What one look found.
#[derive(Clone)]
pub(super) struct Snapshot {
    /// Looks are numbered.
    pub(super) number: u64,
    begun: Instant,
    pub(super) taken_at: SystemTime,
    pub(super) diagnosis: Option<Arc<Diagnosis>>,
    /// What fails most, of each handler.
    pub(super) groups: Arc<Vec<ErrorSummary>>,
    groups_of: Option<(u64, u64)>,
    /// Why the newest look found nothing.
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

    /// What was found last, however it was; waits for the first look.
    pub(super) async fn latest(self: &Arc<Self>) -> Option<Arc<Snapshot>> {
        self.watch();
        let newest = self.latest.borrow().clone();
        match newest {
            // Nobody has watched for a while.
            Some(snapshot) if snapshot.begun.elapsed() > self.every * 2 => self.refreshed().await.or(Some(snapshot)),
            Some(snapshot) => Some(snapshot),
            None => self.refreshed().await,
        }
    }

    /// What is found by a look that begins now: for somebody who has changed something.
    pub(super) async fn refreshed(self: &Arc<Self>) -> Option<Arc<Snapshot>> {
        self.watch();
        let (now, mut looks) = (Instant::now(), self.latest.subscribe());
        self.wake.notify_one();
        let is_newer = |look: &Option<Arc<Snapshot>>| look.as_ref().is_some_and(|look| look.begun >= now);
        let found = tokio::time::timeout(LOOK_WAIT_MAX, looks.wait_for(is_newer)).await.ok()?.ok()?;
        found.clone()
    }

    /// Every look from now on.
    pub(super) fn looks(self: &Arc<Self>) -> watch::Receiver<Option<Arc<Snapshot>>> {
        self.watch();
        self.latest.subscribe()
    }

    /// Says that somebody has a page open, and starts the task if it is not there.
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
                    match operator.poisoned_groups(&DeliveryFilter::all(), GROUPS_LOOKED_MAX).await {
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
    /// The task ends now, not at its next look.
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
