//! Forms batches from the waiting deliveries of a batch handler.
//!
//! A call is made when its batch is full, or when its first delivery has waited long enough. It takes a slot, like a
//! run of any other handler. Free slots count as room for whole batches (`slots.rs`), so a batch fills even before the
//! handler's pace is known, within the bounds of claiming ahead. A delivery that was part of a crash, met a store error
//! or is a probe is called alone, without waiting.

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

/// The batch settings of a handler.
pub(super) struct Batching {
    /// The options of the registration.
    pub(super) size: BatchSize,
    /// Whether a task is scheduled that checks again when a wait is over. One task is enough for all waiting
    /// deliveries.
    is_timed: AtomicBool,
}

/// When a batch is complete.
#[derive(Debug, Clone, Copy)]
pub(super) struct Form {
    /// A batch with this many deliveries is full.
    rows: usize,
    /// A batch ends before the payload that exceeds this sum. A single larger payload is a batch of one.
    bytes_max: usize,
    /// How long the first delivery waits for others.
    wait: Duration,
}

/// The deliveries of one call.
pub(super) struct WaitingBatch<B: Backend> {
    /// There is always one.
    pub(super) first: Run<B>,
    pub(super) others: Vec<Run<B>>,
}

impl Batching {
    pub(super) fn new(size: BatchSize) -> Self {
        Self { size, is_timed: AtomicBool::new(false) }
    }
}

impl Form {
    /// How many of these deliveries form a batch; 0 while they wait for others.
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
    /// Whether it may be called together with others. If it may crash the process or the store, the others must not be
    /// charged for that.
    pub(super) fn joins_others(&self) -> bool {
        self.claimed.crashes == 0 && self.claimed.store_errors == 0 && self.probe.is_none()
    }
}

impl<B: Backend> Lane<B> {
    /// The maximum of deliveries that run at a time.
    pub(super) fn side_by_side(&self) -> usize {
        self.batching.as_ref().map_or(self.concurrency, |batching| self.concurrency.saturating_mul(batching.size.up_to))
    }

    /// How many deliveries fill `calls` calls. Deliveries for future calls are bounded like those claimed ahead.
    pub(super) fn filling(&self, calls: usize, limits: &Limits) -> usize {
        let Some(BatchSize { up_to, .. }) = self.batching.as_ref().map(|batching| batching.size) else { return calls };
        // Deliveries that were part of a crash are called alone.
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

    /// How long deliveries wait for others to fill a batch.
    pub(super) fn batch_wait(&self) -> Duration {
        self.batching.as_ref().map_or(Duration::ZERO, |batching| batching.size.wait)
    }
}

impl<B: Backend> Engine<B> {
    /// The rules for the lane's next batch. They change with the pace of the handler, so they are computed for each
    /// check.
    fn form(&self, lane: &Lane<B>) -> Form {
        // During a drain, no further deliveries arrive. With a low crash limit, nothing waits: a crash would count
        // against waiting deliveries.
        let waits = self.mode == ClaimMode::InBackground && self.limits.starts_at_once_from() > 0;
        Form {
            rows: lane.batch_rows(&self.limits),
            bytes_max: self.limits.claim_ahead_bytes,
            wait: if waits { lane.batch_wait() } else { Duration::ZERO },
        }
    }

    /// Whether a delivery or a batch of the lane can be called now.
    pub(super) fn has_startable(&self, lane: &Lane<B>) -> bool {
        match &lane.batching {
            None => !lane.waiting.is_empty(),
            Some(_) => lane.waiting.has_batch(self.form(lane)),
        }
    }

    /// The next batch that may be called now.
    pub(super) fn next_batch(self: &Arc<Self>, lane: &Lane<B>) -> Option<WaitingBatch<B>> {
        if lane.waiting.is_empty() || self.is_blocked(lane) {
            return None;
        }
        self.take_batch(lane)
    }

    /// Takes the next batch without checking whether it may start.
    fn take_batch(&self, lane: &Lane<B>) -> Option<WaitingBatch<B>> {
        let mut taken = lane.waiting.take_batch(self.form(lane)).into_iter();
        Some(WaitingBatch { first: taken.next()?, others: taken.collect() })
    }

    /// Starts complete batches while there are slots.
    pub(super) fn start_batches(self: &Arc<Self>, lane: &Arc<Lane<B>>, batching: &Batching) {
        let mut runners = Vec::new();
        loop {
            // As in `start_waiting`: checked again after a slot was freed.
            fence(Ordering::SeqCst);
            if lane.waiting.is_empty() || self.is_blocked(lane) {
                break;
            }
            if !self.has_startable(lane) {
                self.start_when_waited(lane, batching);
                break;
            }
            let Some(slot) = Slot::take(lane, 1) else { break };
            if let Some(WaitingBatch { first, others }) = self.take_batch(lane) {
                runners.push(Runner { slot, run: first, others });
            }
        }
        self.run(runners);
    }

    /// Checks again when the first delivery has waited long enough. The others came later, so no earlier check is
    /// needed.
    fn start_when_waited(self: &Arc<Self>, lane: &Arc<Lane<B>>, batching: &Batching) {
        let Some(at) = lane.waiting.first_since().and_then(|since| since.checked_add(batching.size.wait)) else {
            return;
        };
        if batching.is_timed.swap(true, Ordering::AcqRel) {
            return;
        }
        // Weak references: this task must not keep the engine alive.
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
