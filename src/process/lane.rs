//! Lanes: one per handler, with its own slots, so that a slow or failing handler holds up no other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use super::batching::Batching;
use super::breaker::LaneBreaker;
use super::pace::Pace;
use super::rate::Throttle;
use super::slots::Slots;
use super::waiting::Waiting;
use crate::handler::{Body, HandlerKey, Priority, Registration, RetryPolicy};
use crate::store::Backend;
use crate::store::permits::{Permits, Share};
use crate::store::seam::HandlerIds;
use crate::telemetry::events;
use crate::types::Outcome;

/// Removes secrets from an error text.
pub(crate) type Redact = Arc<dyn Fn(&str) -> String + Send + Sync>;

/// A handler and its state in this process.
pub(crate) struct Lane<B: Backend> {
    /// The key under which the handler is registered.
    pub(super) key: HandlerKey,
    /// The ids of the current key and of the former keys: deliveries of all of them run here.
    pub(super) ids: HandlerIds,
    /// What to call: a plain, transactional or batch handler.
    pub(super) body: Body<B::Connection>,
    /// A run that takes longer is cancelled, and fails.
    pub(super) timeout: Option<Duration>,
    /// Decides when a failed delivery runs again. It may contain user code.
    pub(super) retry: RetryPolicy,
    /// Deliveries of messages that were accepted longer ago expire instead of running.
    pub(super) expires_after: Option<Duration>,
    /// The maximum of runs at a time.
    pub(super) concurrency: usize,
    /// The maximum of deliveries in one transaction.
    pub(super) share: usize,
    /// Set for a batch handler; `concurrency` then counts calls.
    pub(super) batching: Option<Batching>,
    /// Deliveries with the same ordering key run one after another.
    pub(super) is_ordered: bool,
    /// Deliveries take turns by tenant.
    pub(super) is_fair: bool,
    /// The handler commits `done` itself, with its own client.
    pub(super) settles_itself: bool,
    pub(super) redact: Option<Redact>,
    /// How many deliveries may run and be claimed now.
    pub(super) slots: Slots,
    /// Deliveries that are claimed and have no slot yet.
    pub(super) waiting: Waiting<B>,
    /// The measured pace, which bounds how many deliveries may wait.
    pub(super) pace: Pace,
    /// Which lane takes connections first.
    pub(super) priority: Priority,
    /// Its share of the connections that transactional handlers may hold.
    pub(super) connections: Option<Share>,
    /// Shared with the probes, which report to it when they are dropped.
    pub(super) breaker: Arc<LaneBreaker>,
    /// Its rate limit in this process.
    pub(super) throttle: Option<Throttle>,
    /// Whether it has a rate limit over all processes, as of the last heartbeat.
    is_rated: AtomicBool,
    /// As of the last heartbeat. Hand-over uses this; the claim statement reads the current state.
    is_paused: AtomicBool,
    /// The last claim returned deliveries that may not wait because of their crashes.
    is_careful: AtomicBool,
    /// Deliveries done or discarded by the handler, and attempts failed, since the last `take_counts`.
    done: AtomicU64,
    failed: AtomicU64,
    /// The longest effective lag since then in milliseconds, plus 1; 0 if there was none.
    lag_ms: AtomicU64,
}

/// What a lane has counted for a heartbeat.
pub(super) struct Counted {
    /// Deliveries done, or discarded by the handler.
    pub(super) done: u64,
    /// Attempts failed.
    pub(super) failed: u64,
    /// The longest time from a record's timestamp to done.
    pub(super) lag: Option<Duration>,
}

impl<B: Backend> Lane<B> {
    pub(crate) fn new(
        registration: &Registration<B>,
        ids: HandlerIds,
        redact: Option<Redact>,
        permits: &Arc<Permits>,
    ) -> Self {
        let connections = match &registration.body {
            Body::Plain(_) | Body::Batch(_) => None,
            Body::Transactional(_) | Body::TxBatch(_) => Some(permits.share(registration.flow.priority.weight())),
        };
        let batching = match &registration.body {
            Body::Plain(_) | Body::Transactional(_) => None,
            Body::Batch(_) | Body::TxBatch(_) => Some(Batching::new(registration.batch.unwrap_or_default())),
        };
        Self {
            key: registration.key.clone(),
            ids,
            body: registration.body.clone(),
            timeout: registration.timeout,
            retry: registration.retry.clone(),
            expires_after: registration.expires_after,
            concurrency: registration.concurrency,
            share: registration.share.unwrap_or(1),
            batching,
            is_ordered: registration.order.is_some(),
            is_fair: registration.flow.fair.is_some(),
            settles_itself: registration.settles_itself,
            redact,
            slots: Slots::new(registration.concurrency),
            waiting: Waiting::default(),
            pace: Pace::default(),
            priority: registration.flow.priority,
            connections,
            breaker: Arc::new(LaneBreaker::new(registration.flow.breaker.clone())),
            throttle: registration.flow.rate_per_process.map(Throttle::new),
            is_rated: AtomicBool::new(registration.flow.rate.is_some()),
            is_paused: AtomicBool::new(false),
            is_careful: AtomicBool::new(false),
            done: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            lag_ms: AtomicU64::new(0),
        }
    }

    /// Counts an outcome, for the next heartbeat.
    pub(super) fn count(&self, outcome: &Outcome) {
        match outcome {
            Outcome::Done | Outcome::Discarded { .. } => self.done.fetch_add(1, Ordering::Relaxed),
            Outcome::Retry { .. } | Outcome::Unavailable { .. } | Outcome::Poisoned { .. } => {
                self.failed.fetch_add(1, Ordering::Relaxed)
            }
            Outcome::Snoozed { .. } | Outcome::StoreFailed { .. } | Outcome::Expired | Outcome::Released => return,
        };
    }

    /// Records that a delivery is done, of a record with this timestamp.
    pub(super) fn done_after(&self, recorded_at: Option<SystemTime>) {
        let Some(recorded_at) = recorded_at else { return };
        let lag = SystemTime::now().duration_since(recorded_at).unwrap_or_default();
        let lag_ms = u64::try_from(lag.as_millis()).unwrap_or(u64::MAX);
        self.lag_ms.fetch_max(lag_ms.saturating_add(1), Ordering::Relaxed);
        events::done_after(self.key.as_str(), lag);
    }

    /// What was counted since the last call.
    pub(super) fn take_counts(&self) -> Counted {
        let lag_ms = self.lag_ms.swap(0, Ordering::Relaxed).checked_sub(1);
        Counted {
            done: self.done.swap(0, Ordering::Relaxed),
            failed: self.failed.swap(0, Ordering::Relaxed),
            lag: lag_ms.map(Duration::from_millis),
        }
    }

    /// When a breaker or a rate limit may let more deliveries start.
    pub(super) fn deadlines(&self, now: Instant) -> impl Iterator<Item = Instant> {
        let free_at = self.throttle.as_ref().and_then(|throttle| throttle.free_at(now));
        [self.breaker.ask_at(), free_at].into_iter().flatten()
    }

    pub(super) fn is_careful(&self) -> bool {
        self.is_careful.load(Ordering::Relaxed)
    }

    /// Set when a claim returned deliveries that may not wait, cleared by the next claim without any.
    pub(super) fn set_careful(&self, is_careful: bool) {
        self.is_careful.store(is_careful, Ordering::Relaxed);
    }

    pub(super) fn is_rated(&self) -> bool {
        self.is_rated.load(Ordering::Relaxed)
    }

    /// Set by each heartbeat.
    pub(super) fn set_rated(&self, is_rated: bool) {
        self.is_rated.store(is_rated, Ordering::Relaxed);
    }

    pub(super) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Relaxed)
    }

    /// Set by each heartbeat.
    pub(super) fn set_paused(&self, is_paused: bool) {
        self.is_paused.store(is_paused, Ordering::Relaxed);
    }
}
