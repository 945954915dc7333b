//! Lanes: one per handler, with its own slots, so that a slow or failing handler holds up no other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::batching::Batching;
use super::breaker::LaneBreaker;
use super::observe::observed;
use super::pace::Pace;
use super::rate::Throttle;
use super::slots::Slots;
use super::waiting::Waiting;
use crate::handler::{Body, HandlerKey, Registration, RetryPolicy};
use crate::store::Backend;
use crate::store::permits::{Permits, Share};
use crate::store::seam::HandlerIds;
use crate::types::Outcome;

/// Takes out of an error what must not be kept.
pub(crate) type Redact = Arc<dyn Fn(&str) -> String + Send + Sync>;

/// A handler at work in this process.
pub(crate) struct Lane<B: Backend> {
    pub(super) key: HandlerKey,
    pub(super) ids: HandlerIds,
    pub(super) body: Body<B::Connection>,
    pub(super) timeout: Option<Duration>,
    pub(super) retry: RetryPolicy,
    /// Deliveries of messages that were accepted longer ago do not run.
    pub(super) expires_after: Option<Duration>,
    pub(super) concurrency: usize,
    /// Deliveries in one transaction at the most.
    pub(super) share: usize,
    /// Set for a batch handler: `concurrency` is of its calls.
    pub(super) batching: Option<Batching>,
    /// One that is finished makes the next of its key due.
    pub(super) is_ordered: bool,
    /// Its handler commits `done` itself, with a client of its own.
    pub(super) settles_itself: bool,
    pub(super) redact: Option<Redact>,
    pub(super) slots: Slots,
    /// What is claimed and has no slot yet.
    pub(super) waiting: Waiting<B>,
    /// How much of that there may be.
    pub(super) pace: Pace,
    /// Its part of the connections that transactional handlers may hold.
    pub(super) connections: Option<Share>,
    pub(super) breaker: Arc<LaneBreaker>,
    /// Its rate limit in this process.
    pub(super) throttle: Option<Throttle>,
    /// It has a rate limit over all processes, as of the last sign of life.
    is_rated: AtomicBool,
    /// As of the last sign of life; the claim statement looks for itself, hand-over goes by this.
    is_paused: AtomicBool,
    /// The last claim brought deliveries that may not wait because of their crashes.
    is_careful: AtomicBool,
    /// Since they were last taken.
    done: AtomicU64,
    failed: AtomicU64,
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
            Body::Transactional(_) | Body::TxBatch(_) => Some(permits.share()),
        };
        let batching = match &registration.body {
            Body::Plain(_) | Body::Transactional(_) => None,
            Body::Batch(_) | Body::TxBatch(_) => Some(Batching::new(registration.batch.unwrap_or_default())),
        };
        Self {
            key: registration.key.clone(),
            ids,
            body: registration.body.clone().layered_alone(&registration.key, Arc::new(observed)),
            timeout: registration.timeout,
            retry: registration.retry.clone(),
            expires_after: registration.expires_after,
            concurrency: registration.concurrency,
            share: registration.share.unwrap_or(1),
            batching,
            is_ordered: registration.order.is_some(),
            settles_itself: registration.settles_itself,
            redact,
            slots: Slots::new(registration.concurrency),
            waiting: Waiting::default(),
            pace: Pace::default(),
            connections,
            breaker: Arc::new(LaneBreaker::new(registration.flow.breaker.clone())),
            throttle: registration.flow.rate_per_process.map(Throttle::new),
            is_rated: AtomicBool::new(registration.flow.rate.is_some()),
            is_paused: AtomicBool::new(false),
            is_careful: AtomicBool::new(false),
            done: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }
    }

    /// Counts an outcome, for the next report.
    pub(super) fn count(&self, outcome: &Outcome) {
        match outcome {
            Outcome::Done | Outcome::Discarded { .. } => self.done.fetch_add(1, Ordering::Relaxed),
            Outcome::Retry { .. } | Outcome::Unavailable { .. } | Outcome::Poisoned { .. } => {
                self.failed.fetch_add(1, Ordering::Relaxed)
            }
            Outcome::Snoozed { .. } | Outcome::Troubled { .. } | Outcome::Expired | Outcome::Released => return,
        };
    }

    /// Deliveries done and attempts failed since the last call.
    pub(super) fn take_counts(&self) -> (u64, u64) {
        (self.done.swap(0, Ordering::Relaxed), self.failed.swap(0, Ordering::Relaxed))
    }

    pub(super) fn is_transactional(&self) -> bool {
        self.connections.is_some()
    }

    pub(super) fn is_careful(&self) -> bool {
        self.is_careful.load(Ordering::Relaxed)
    }

    pub(super) fn set_careful(&self, is_careful: bool) {
        self.is_careful.store(is_careful, Ordering::Relaxed);
    }

    pub(super) fn is_rated(&self) -> bool {
        self.is_rated.load(Ordering::Relaxed)
    }

    pub(super) fn set_rated(&self, is_rated: bool) {
        self.is_rated.store(is_rated, Ordering::Relaxed);
    }

    pub(super) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Relaxed)
    }

    pub(super) fn set_paused(&self, is_paused: bool) {
        self.is_paused.store(is_paused, Ordering::Relaxed);
    }
}
