//! Starts the loops of an engine. Ends them in order: first the loops that start work, then the handlers, then the
//! loops that settle.
//!
//! Every loop of the engine is started in `start` and joined in `end`; handlers' tasks are awaited through the
//! in-flight list. Ending is bounded: a process exits even if the database is unavailable, and the claims that it could
//! not release expire.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::alarm::alarm_loop;
use super::claim::{Claimer, Round, claim_loop};
use super::decide::StopReason;
use super::engine::{Engine, Phase};
use super::heartbeat::{alive_for, handler_ids, heartbeat_loop, note_blocked};
use super::lane::Lane;
use super::probe::asking;
use super::renew::{renew_loop, watch_loop};
use super::retain::retain_loop;
use super::sample::sample_loop;
use super::settle::settle_loop;
use super::upkeep::{return_parked, upkeep_loop};
use crate::accept::HandOver;
use crate::handler::PoisonHook;
use crate::operate::Retention;
use crate::store::seam::ProcessorInfo;
use crate::store::{Backend, Store};
use crate::types::process_name;
use crate::types::{Error, HealthReason, Kind, Limits, Result, panic_text};

/// How long outcomes may take to be written after the handlers have ended, beyond the grace. Also bounds how long a
/// process takes to exit while the database is unavailable.
const SETTLE_WAIT: Duration = Duration::from_secs(5);
/// How often a drain checks whether the last slot is free.
const SLOT_POLL: Duration = Duration::from_millis(1);
/// How long a drain waits at its start for slots that a previous drain still holds.
const SLOTS_PATIENCE: Duration = Duration::from_secs(1);

/// What triggers a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClaimMode {
    /// The claim loop, continuously.
    InBackground,
    /// The caller, with [`Loops::rounds`].
    OnDemand,
}

/// When [`Loops::rounds`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// After the first round that claimed something, or when nothing is due.
    Once,
    /// After the rounds that show that nothing is due any more.
    UntilNothingIsDue,
}

/// A running engine.
pub(crate) struct Loops<B: Backend> {
    engine: Arc<Engine<B>>,
    /// The loops that start work. They are joined before the deliveries that they brought in are released.
    bringing_in: JoinSet<()>,
    /// The heartbeat, which goes on while handlers finish. Joined before the entry of this process is removed.
    beating: JoinSet<()>,
    /// The loops that run until everything is settled.
    settling: JoinSet<()>,
}

impl<B: Backend> Loops<B> {
    /// Registers this process and starts the loops that `mode` needs. `retention` and `hook` are used in the background
    /// mode only.
    pub(crate) async fn start(
        store: Store<B>,
        limits: Limits,
        lanes: Arc<[Arc<Lane<B>>]>,
        mode: ClaimMode,
        retention: Option<Retention>,
        hook: Option<PoisonHook>,
    ) -> Result<Self> {
        let name: Arc<str> = process_name().into();
        let (handler_ids, ttl) = (handler_ids(&lanes), alive_for(&limits));
        let info = ProcessorInfo { name: Arc::clone(&name), handler_ids, ttl, report: "{}".to_owned() };
        let (processor, blocked) = store.backend.register_processor(&info).await?;
        // This comes before anything can be handed over.
        note_blocked(&lanes, &asking(&lanes), &blocked);
        let engine = Arc::new(Engine::new(store, limits, mode, lanes, processor));
        // Before anything is claimed, for callers of `drain`; upkeep does it again later.
        return_parked(&engine, &name).await;
        let mut loops = Self { engine, bringing_in: JoinSet::new(), beating: JoinSet::new(), settling: JoinSet::new() };
        let engine = &loops.engine;
        for (name, settling) in [
            ("settle", settle_loop(Arc::clone(engine)).boxed()),
            ("renew", renew_loop(Arc::clone(engine)).boxed()),
            ("watch", watch_loop(Arc::clone(engine)).boxed()),
        ] {
            let reactor = engine.store.backend.reactor();
            loops.settling.spawn_on(supervised(Arc::clone(engine), name, Phase::Closed, settling), reactor);
        }
        let beating = heartbeat_loop(Arc::clone(engine), Arc::clone(&name));
        let beating = supervised(Arc::clone(engine), "heartbeat", Phase::Closing, beating);
        loops.beating.spawn_on(beating, engine.store.backend.reactor());
        loops.bring_in("upkeep", |engine| upkeep_loop(engine, name));
        match mode {
            ClaimMode::InBackground => {
                loops.bring_in("sample", sample_loop);
                loops.bring_in("claim", claim_loop);
                if let Some(hook) = hook {
                    loops.bring_in("alarm", |engine| alarm_loop(engine, hook));
                }
                if let Some(retention) = retention {
                    loops.bring_in("retention", |engine| retain_loop(engine, retention));
                }
            }
            ClaimMode::OnDemand => {}
        }
        Ok(loops)
    }

    /// Spawns a loop that may end when the engine stops.
    fn bring_in<L>(&mut self, name: &'static str, work: impl FnOnce(Arc<Engine<B>>) -> L)
    where
        L: Future<Output = ()> + Send + 'static,
    {
        let work = supervised(Arc::clone(&self.engine), name, Phase::Stopping, work(Arc::clone(&self.engine)));
        self.bringing_in.spawn_on(work, self.engine.store.backend.reactor());
    }

    /// Spawns a loop that stops together with the claim loop: `work` gets a future that resolves then.
    pub(crate) fn spawn_beside<L>(&mut self, name: &'static str, work: impl FnOnce(BoxFuture<'static, ()>) -> L)
    where
        L: Future<Output = ()> + Send + 'static,
    {
        self.bring_in(name, |engine| work(async move { engine.stopping().await }.boxed()));
    }

    /// The interface through which the accept stage hands deliveries over.
    pub(crate) fn hand_over(&self) -> Arc<dyn HandOver> {
        Arc::clone(&self.engine) as _
    }

    /// Returns a function that lists health problems while the engine exists.
    pub(crate) fn health(&self) -> impl Fn() -> Vec<HealthReason> + Send + Sync + use<B> {
        let engine = Arc::downgrade(&self.engine);
        move || engine.upgrade().map_or_else(|| vec![HealthReason::Stopping], |engine| engine.health())
    }

    /// Returns a guard that stops running handlers when it is dropped.
    pub(crate) fn stop_on_drop(&self) -> StopOnDrop<B> {
        StopOnDrop(Arc::clone(&self.engine))
    }

    /// Behaves as if the process had crashed: starts nothing, drops running handlers and writes no outcomes.
    #[cfg(feature = "testing")]
    pub(crate) fn abandon_all(&self) {
        self.engine.abandon_all();
    }

    /// Claims and hands over nothing from here on.
    pub(crate) fn stop_bringing_in(&self) {
        self.engine.stop_bringing_in();
    }

    /// Waits until batches that are being accepted have handed over their deliveries, at most for `wait_max`.
    pub(crate) async fn brought_in(&self, wait_max: Duration) {
        drop(tokio::time::timeout(wait_max, self.engine.nothing_starting()).await);
    }

    /// Resolves when a loop has ended that must not end, with its name. Stays pending otherwise.
    pub(crate) fn failure(&self) -> impl Future<Output = Error> + Send + use<B> {
        let engine = Arc::clone(&self.engine);
        async move { engine.failure().await }
    }

    /// Claims for all slots, runs the claimed deliveries and waits until they are settled; once, or until nothing is
    /// due. Returns how many deliveries were claimed; one that is retried meanwhile counts again. Must not be dropped
    /// before it returns: `drain` runs it in a task of the store.
    pub(crate) async fn rounds(&self, extent: Extent) -> Result<usize> {
        // With fewer slots than ids, the ids of a handler are claimed in turns, so several empty rounds are needed to
        // know that nothing is due.
        let turns = self.engine.lanes.iter().map(|lane| lane.ids.all.len()).max().unwrap_or(1);
        let mut claimer = Claimer::new(Arc::clone(&self.engine));
        self.engine.lanes.iter().for_each(|lane| lane.breaker.ask_now());
        // A previous drain that was cancelled frees its slots shortly after its end. A handler that blocks keeps its
        // slot.
        let _ = tokio::time::timeout(SLOTS_PATIENCE, self.slots_free()).await;
        let (mut total, mut empty) = (0, 0);
        while empty < turns && self.engine.is_running() {
            claimer.scan_from_beginning();
            let Round { claimed, failed_claim, is_more, .. } = claimer.round().await?;
            self.engine.in_flight.empty().await;
            self.slots_free().await;
            if let Some(error) = failed_claim {
                return Err(error);
            }
            total += claimed;
            match (claimed, extent) {
                // Not all tenants of a fair handler were checked. The number of such rounds in a row is bounded.
                (0, _) if is_more => {}
                (0, _) => empty += 1,
                (_, Extent::Once) => break,
                (_, Extent::UntilNothingIsDue) => empty = 0,
            }
        }
        // The last runs may open or close breakers.
        self.engine.report_breakers().await;
        Ok(total)
    }

    /// Waits until every slot is free. A slot is freed shortly after the claim that ran in it is settled. A round in
    /// between would find no free slot, and look as if nothing were due.
    async fn slots_free(&self) {
        while self.engine.is_running() && !self.engine.lanes.iter().all(|lane| lane.is_idle()) {
            tokio::time::sleep(SLOT_POLL).await;
        }
    }

    /// Stops claiming at once, lets handlers end within `grace`, releases the rest and writes all outcomes. Takes at
    /// most `grace` plus `SETTLE_WAIT`.
    ///
    /// # Errors
    ///
    /// If outcomes could not be written in time.
    pub(crate) async fn end(mut self, grace: Duration) -> Result<()> {
        let engine = Arc::clone(&self.engine);
        let deadline = Instant::now() + grace;
        let last = deadline + SETTLE_WAIT;
        engine.stop_bringing_in();
        let _ = timeout_at(deadline, self.quiet()).await;
        engine.phase.send_replace(Phase::Closing);
        engine.in_flight.stop_all(StopReason::Shutdown);
        let _ = timeout_at(last, self.quiet()).await;
        // A heartbeat that is still under way would enter this process again.
        let _ = timeout_at(last, joined(&mut self.beating)).await;
        // An entry that stays in the list of processors does no harm: it expires.
        let _ = timeout_at(last, engine.store.backend.remove_processor(engine.processor)).await;
        engine.phase.send_replace(Phase::Closed);
        // Loops end when they see the phase. Waiting for them is bounded, because a database call may hang.
        let _ = timeout_at(last, joined(&mut self.settling)).await;
        self.bringing_in.abort_all();
        self.beating.abort_all();
        self.settling.abort_all();
        let left = engine.in_flight.len();
        if left == 0 {
            return Ok(());
        }
        Err(Error::new(
            Kind::Connection,
            format!("shut down with {left} outcomes unwritten: those deliveries run again when their claims expire"),
        ))
    }

    /// Waits until no claim statement is running and no claim is held.
    async fn quiet(&mut self) {
        joined(&mut self.bringing_in).await;
        self.engine.in_flight.empty().await;
    }
}

impl<B: Backend> Drop for Loops<B> {
    /// Runs when the inbox, or a future that uses it, is dropped. Does not wait: claims are released in the background.
    fn drop(&mut self) {
        if self.engine.phase() == Phase::Closed {
            return;
        }
        let ending = Self {
            engine: Arc::clone(&self.engine),
            bringing_in: std::mem::take(&mut self.bringing_in),
            beating: std::mem::take(&mut self.beating),
            settling: std::mem::take(&mut self.settling),
        };
        // The engine keeps the store alive, and the store its reactor, so this task runs.
        drop(self.engine.store.backend.reactor().spawn(ending.end(Duration::ZERO)));
    }
}

/// Runs a loop that may end only when the engine has reached `until`. Any earlier end fails the engine.
async fn supervised<B: Backend>(
    engine: Arc<Engine<B>>,
    name: &'static str,
    until: Phase,
    work: impl Future<Output = ()> + Send,
) {
    match AssertUnwindSafe(work).catch_unwind().await {
        Ok(()) if engine.phase() >= until || engine.has_failed() => {}
        Ok(()) => engine.fail(name, "it returned"),
        Err(panic) => engine.fail(name, &format!("it panicked: {}", panic_text(panic))),
    }
}

/// Stops the running handlers when a caller drops its future early.
pub(crate) struct StopOnDrop<B: Backend>(Arc<Engine<B>>);

impl<B: Backend> Drop for StopOnDrop<B> {
    fn drop(&mut self) {
        self.0.stop_now();
    }
}

/// Waits until all tasks have ended. Cancel-safe: tasks that were not joined stay in the set.
async fn joined(tasks: &mut JoinSet<()>) {
    while tasks.join_next().await.is_some() {}
}
