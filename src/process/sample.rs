//! Sets the gauges of an inbox every few seconds: the state of this process, and the state of the database.
//!
//! The state of the process comes from counters that the engine keeps anyway, so gauges cost nothing while deliveries
//! run. Rows in the database are counted up to a bound, so a sample costs the same however large the tables are. Each
//! process samples the database itself, and uses at most a hundredth of the time of one connection for it. A process
//! may have several inboxes, so each sets only its share of a gauge. Without the feature `metrics`, nothing is sampled.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::engine::Engine;
use crate::store::Backend;
use crate::telemetry::shares::Share;
use crate::telemetry::{counts, events, table};
use crate::types::{HandlerStatus, Result, Totals, jittered};

/// How often the gauges of the process are set.
const PROCESS_EVERY: Duration = Duration::from_secs(5);
/// The minimum time between two samples of the database.
const DATABASE_EVERY: Duration = Duration::from_secs(15);
/// The pause after a sample is this many times as long as the sample took: a slow database is sampled less often.
const DATABASE_PAUSE_FACTOR: u32 = 100;

/// Runs until the engine stops. Then its share of the gauges ends: a process that goes on without this inbox must not
/// report old values.
pub(super) async fn sample_loop<B: Backend>(engine: Arc<Engine<B>>) {
    if !cfg!(feature = "metrics") {
        engine.stopping().await;
        return;
    }
    let share = Share::new();
    let mut sampled = Sampled { share: &share, handlers: BTreeSet::new() };
    tokio::select! {
        () = sample_process(&engine, &share) => {}
        () = sampled.sample_database(&engine) => {}
        () = engine.stopping() => {}
    }
}

/// Sets the gauges of the process, until it is dropped.
async fn sample_process<B: Backend>(engine: &Engine<B>, share: &Share) {
    // Clones of a store share its connections.
    let pool_address = Arc::as_ptr(&engine.store.backend).addr();
    loop {
        for lane in engine.lanes.iter() {
            let handler = lane.key.as_str();
            share.set(&table::HANDLER_SLOTS, &[handler], lane.concurrency as f64);
            share.set(&table::HANDLER_RUNNING, &[handler], lane.running() as f64);
            share.set(&table::HANDLER_WAITING, &[handler], lane.waiting.len() as f64);
        }
        share.set(&table::IN_FLIGHT, &[], engine.in_flight.len() as f64);
        share.set(&table::UNSETTLED, &[], engine.in_flight.unsettled() as f64);
        let stuck_for = engine.stuck_for().map(|(_, lasts)| lasts);
        share.set(&table::NO_PROGRESS, &[], stuck_for.unwrap_or_default().as_secs_f64());
        share.set(&table::DATABASE_UNAVAILABLE, &[], engine.liveness.away_for().unwrap_or_default().as_secs_f64());
        let pool = engine.store.backend.pool_status();
        share.set_of(pool_address, &table::POOL, &["in use"], pool.in_use as f64);
        share.set_of(pool_address, &table::POOL, &["max"], pool.size as f64);
        share.set_of(pool_address, &table::POOL_WAITING, &[], pool.waiting as f64);
        tokio::time::sleep(PROCESS_EVERY).await;
    }
}

/// The handlers whose gauges were set.
struct Sampled<'s> {
    share: &'s Share,
    handlers: BTreeSet<String>,
}

impl Sampled<'_> {
    /// Sets the gauges of the database, until it is dropped. If a sample fails, the gauges keep their last values.
    async fn sample_database<B: Backend>(&mut self, engine: &Engine<B>) {
        loop {
            let begun = Instant::now();
            match read(engine).await {
                Ok((handlers, totals)) => self.set(&handlers, &totals),
                Err(error) => events::store_error("sample", &error),
            }
            tokio::time::sleep(jittered((begun.elapsed() * DATABASE_PAUSE_FACTOR).max(DATABASE_EVERY))).await;
        }
    }

    /// Sets all gauges of the database from one sample.
    fn set(&mut self, handlers: &[HandlerStatus], totals: &Totals) {
        let now = SystemTime::now();
        for handler in handlers {
            self.set_handler(handler, now);
        }
        let keys: BTreeSet<String> = handlers.iter().map(|handler| handler.handler_key.clone()).collect();
        // A renamed handler has another key now.
        self.handlers.difference(&keys).for_each(|gone| self.forget_handler(gone));
        self.handlers = keys;
        self.set_totals(totals);
        // No share: after an inbox has ended, it is still true when this process last read the metrics.
        let since_1970 = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        counts::set(&table::DATABASE_SAMPLED, &[], since_1970.as_secs_f64());
    }

    /// Ages (paused, breaker open) are computed with the clock of this process.
    fn set_handler(&self, handler: &HandlerStatus, now: SystemTime) {
        let key = handler.handler_key.as_str();
        let secs_since =
            |at: Option<SystemTime>| at.map_or(0.0, |at| now.duration_since(at).unwrap_or_default().as_secs_f64());
        let HandlerStatus { due, later, held, running, poisoned, .. } = *handler;
        for (state, count) in
            [("due", due), ("later", later), ("held", held), ("running", running), ("poisoned", poisoned)]
        {
            self.share.set(&table::DELIVERIES, &[key, state], count as f64);
        }
        self.share.set(&table::OLDEST_DUE, &[key], handler.oldest_due_secs.unwrap_or_default());
        self.share.set(&table::HANDLER_PROCESSES, &[key], handler.processors as f64);
        self.share.set(&table::HANDLER_PAUSED, &[key], secs_since(handler.paused_at));
        self.share.set(&table::BREAKER_OPEN, &[key], secs_since(handler.breaker_opened_at));
    }

    /// Sets the gauges of a handler that the database no longer lists to 0.
    fn forget_handler(&self, key: &str) {
        table::DELIVERIES.values.iter().for_each(|state| self.share.set(&table::DELIVERIES, &[key, state], 0.0));
        for metric in [&table::OLDEST_DUE, &table::HANDLER_PROCESSES, &table::HANDLER_PAUSED, &table::BREAKER_OPEN] {
            self.share.set(metric, &[key], 0.0);
        }
    }

    fn set_totals(&self, totals: &Totals) {
        self.share.set(&table::QUARANTINE, &[], totals.quarantined as f64);
        self.share.set(&table::OUTBOX_RECORDS, &["waiting"], totals.outbox_waiting as f64);
        self.share.set(&table::OUTBOX_RECORDS, &["poisoned"], totals.outbox_poisoned as f64);
        self.share.set(&table::OUTBOX_OLDEST, &[], totals.outbox_oldest_secs.unwrap_or_default());
    }
}

/// One sample of the database.
async fn read<B: Backend>(engine: &Engine<B>) -> Result<(Vec<HandlerStatus>, Totals)> {
    let backend = &engine.store.backend;
    Ok((backend.handlers().await?, backend.totals().await?))
}
