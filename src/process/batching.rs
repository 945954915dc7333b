//! Makes batches out of what waits for a batch handler.
//!
//! A call is made when it is full, or when the wait of its first delivery is over; then it takes a slot, like a run of any other handler. Free
//! slots count as room for whole batches (`slots.rs`), so a batch fills although nothing is known of the handler's pace, within the bounds of
//! what may be claimed ahead. A delivery that was part of a crash, that the store made fail, or that probes, is a batch of its own and waits for nobody.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::lane::Lane;
use super::loops::ClaimMode;
use super::run::{Run, Runner};
use super::slots::Slot;
use crate::handler::BatchSize;
use crate::store::Backend;
use crate::types::Limits;

/// How the deliveries of a batch handler are called.
pub(super) struct Batching {
    pub(super) size: BatchSize,
    /// Somebody looks again when a wait is over.
    is_timed: AtomicBool,
}

/// What makes a batch now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Form {
    /// So many are enough.
    rows: usize,
    bytes_max: usize,
    /// So long after the first has come it is not waited for others.
    wait: Duration,
}

/// The deliveries of one call.
pub(super) struct WaitingBatch<B: Backend> {
    pub(super) first: Run<B>,
    pub(super) others: Vec<Run<B>>,
}

impl Batching {
    pub(super) fn new(size: BatchSize) -> Self {
        Self { size, is_timed: AtomicBool::new(false) }
    }
}

impl Form {
    /// How many of these deliveries are a batch; 0 if it is to be waited for others.
    pub(super) fn count<'r, B: Backend>(
        &self,
        mut waiting: impl ExactSizeIterator<Item = &'r Run<B>> + Clone,
    ) -> usize {
        let is_over = |first: &Run<B>| first.waits_since.elapsed() >= self.wait;
        if waiting.len() < self.rows && !waiting.clone().next().is_some_and(is_over) {
            return 0;
        }
        let mut bytes = 0_usize;
        let mut fits = |run: &Run<B>| {
            bytes = bytes.saturating_add(run.claimed.message.as_ref().map_or(0, |message| message.size_bytes()));
            bytes <= self.bytes_max
        };
        let all = waiting.len();
        waiting.position(|run| !fits(run)).unwrap_or(all).clamp(1, self.rows)
    }
}

impl<B: Backend> Run<B> {
    /// Whether it may be called together with others: what it does to the process or to the store must not be counted for them.
    pub(super) fn joins_others(&self) -> bool {
        self.claimed.crashes == 0 && self.claimed.troubles == 0 && self.probe.is_none()
    }
}

impl<B: Backend> Lane<B> {
    /// Deliveries that run at a time at the most.
    pub(super) fn side_by_side(&self) -> usize {
        self.batching.as_ref().map_or(self.concurrency, |batching| self.concurrency.saturating_mul(batching.size.up_to))
    }

    /// How many deliveries fill so many calls. What is claimed for calls that are not made yet is bounded like what is claimed ahead.
    pub(super) fn filling(&self, calls: usize, limits: &Limits) -> usize {
        let Some(BatchSize { up_to, .. }) = self.batching.as_ref().map(|batching| batching.size) else { return calls };
        // What was part of a crash is called alone.
        if self.is_careful() {
            return calls;
        }
        let rows_max = limits.claim_ahead_rows.max(up_to).min(self.pace.rows_of_bytes(limits));
        calls.saturating_mul(up_to).min(rows_max).max(calls)
    }

    /// How many deliveries are enough for a call.
    pub(super) fn batch_rows(&self, limits: &Limits) -> usize {
        let rows = self.batching.as_ref().map_or(1, |batching| batching.size.up_to);
        rows.min(self.pace.rows_of_bytes(limits)).max(1)
    }

    /// How long deliveries wait for others beside them.
    pub(super) fn batch_wait(&self) -> Duration {
        self.batching.as_ref().map_or(Duration::ZERO, |batching| batching.size.wait)
    }
}

impl<B: Backend> Engine<B> {
    fn form(&self, lane: &Lane<B>) -> Form {
        // A caller who drains has nothing more to come. A crash would be held against what waits.
        let waits = self.mode == ClaimMode::InBackground && self.limits.starts_at_once_from() > 0;
        Form {
            rows: lane.batch_rows(&self.limits),
            bytes_max: self.limits.claim_ahead_bytes,
            wait: if waits { lane.batch_wait() } else { Duration::ZERO },
        }
    }

    /// Whether something waits for the lane that need not wait for others.
    pub(super) fn has_startable(&self, lane: &Lane<B>) -> bool {
        match &lane.batching {
            None => !lane.waiting.is_empty(),
            Some(_) => lane.waiting.has_batch(self.form(lane)),
        }
    }

    /// The next batch that may be called now.
    pub(super) fn next_batch(self: &Arc<Self>, lane: &Lane<B>) -> Option<WaitingBatch<B>> {
        if lane.waiting.is_empty() || self.is_held_back(lane) {
            return None;
        }
        self.take_batch(lane)
    }

    fn take_batch(&self, lane: &Lane<B>) -> Option<WaitingBatch<B>> {
        let mut taken = lane.waiting.take_batch(self.form(lane)).into_iter();
        Some(WaitingBatch { first: taken.next()?, others: taken.collect() })
    }

    /// Starts the batches that are complete, as far as there are slots.
    pub(super) fn start_batches(self: &Arc<Self>, lane: &Arc<Lane<B>>, batching: &Batching) {
        let mut runners = Vec::new();
        loop {
            // As in `start_waiting`: looked at again after a slot was given up.
            fence(Ordering::SeqCst);
            if lane.waiting.is_empty() || self.is_held_back(lane) {
                break;
            }
            if !self.has_startable(lane) {
                self.look_when_waited(lane, batching);
                break;
            }
            let Some(slot) = Slot::take(lane, 1) else { break };
            if let Some(WaitingBatch { first, others }) = self.take_batch(lane) {
                runners.push(Runner { slot, run: first, others });
            }
        }
        self.run(runners);
    }

    /// Looks again when the wait of the first delivery is over. Those behind it came later, so nobody has to be looked at earlier.
    fn look_when_waited(self: &Arc<Self>, lane: &Arc<Lane<B>>, batching: &Batching) {
        let Some(at) = lane.waiting.first_since().and_then(|since| since.checked_add(batching.size.wait)) else {
            return;
        };
        if batching.is_timed.swap(true, Ordering::AcqRel) {
            return;
        }
        // Does not keep the engine; when it is gone, nothing waits any more.
        let (engine, lane) = (Arc::downgrade(self), Arc::downgrade(lane));
        drop(self.store.backend.reactor().spawn(async move {
            tokio::time::sleep_until(Instant::into(at)).await;
            let (Some(engine), Some(lane)) = (engine.upgrade(), lane.upgrade()) else { return };
            if let Some(batching) = &lane.batching {
                batching.is_timed.store(false, Ordering::Release);
                engine.start_batches(&lane, batching);
            }
        }));
    }
}
