//! Starts the loops of an engine and ends them in order: no new work, handlers, outcomes, then everything.
//!
//! Every loop of the engine is started in `start` and joined in `end`; handlers' tasks are joined by the in-flight list. Ending is
//! bounded: a database that is away does not keep a process from exiting, the claims it could not give back run out by themselves.

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
use super::lane::Lane;
use super::renew::{renew_loop, watch_loop};
use super::retain::retain_loop;
use super::settle::settle_loop;
use super::upkeep::{alive_for, handler_ids, note_held_back, return_parked, upkeep_loop};
use crate::accept::HandOver;
use crate::handler::PoisonHook;
use crate::operate::Retention;
use crate::store::seam::Enrolment;
use crate::store::{Backend, Store};
use crate::types::process_name;
use crate::types::{Error, HealthReason, Kind, Limits, Result, panic_text};

/// How long outcomes may take to be written after the handlers have ended, beyond the grace.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How often a drain looks whether the last slot is free.
const SLOT_LOOK: Duration = Duration::from_millis(1);
/// How long a drain waits at its beginning for slots that an earlier one has not given up yet.
const SLOTS_PATIENCE: Duration = Duration::from_secs(1);

/// Who decides when work is claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClaimMode {
    /// The claim loop, all the time.
    InBackground,
    /// The caller, by [`Loops::rounds`].
    OnDemand,
}

/// How far work on demand goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    Once,
    UntilNothingIsDue,
}

/// An engine at work.
pub(crate) struct Loops<B: Backend> {
    engine: Arc<Engine<B>>,
    /// The loops that end when no more work is wanted: joined before what they brought in is given back.
    bringing_in: JoinSet<()>,
    /// The loops that go on until everything is settled.
    settling: JoinSet<()>,
}

impl<B: Backend> Loops<B> {
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
        let enrolment = Enrolment { name: Arc::clone(&name), handler_ids, ttl, report: "{}".to_owned() };
        let (processor, held_back) = store.backend.enroll(&enrolment).await?;
        // Before anything can be handed over.
        note_held_back(&lanes, &held_back);
        let engine = Arc::new(Engine::new(store, limits, mode, lanes, processor));
        // The first step before anything is claimed, for callers who drain; upkeep takes the others.
        return_parked(&engine, &name).await;
        let mut loops = Self { engine, bringing_in: JoinSet::new(), settling: JoinSet::new() };
        let engine = &loops.engine;
        for (name, settling) in [
            ("settle", settle_loop(Arc::clone(engine)).boxed()),
            ("renew", renew_loop(Arc::clone(engine)).boxed()),
            ("watch", watch_loop(Arc::clone(engine)).boxed()),
        ] {
            let reactor = engine.store.backend.reactor();
            loops.settling.spawn_on(supervised(Arc::clone(engine), name, Phase::Closed, settling), reactor);
        }
        loops.bring_in("upkeep", |engine| upkeep_loop(engine, name));
        match mode {
            ClaimMode::InBackground => {
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

    fn bring_in<L>(&mut self, name: &'static str, work: impl FnOnce(Arc<Engine<B>>) -> L)
    where
        L: Future<Output = ()> + Send + 'static,
    {
        let work = supervised(Arc::clone(&self.engine), name, Phase::Stopping, work(Arc::clone(&self.engine)));
        self.bringing_in.spawn_on(work, self.engine.store.backend.reactor());
    }

    /// Spawns a loop that stops together with the claim loop: it is given a future to end by.
    pub(crate) fn spawn_beside<L>(&mut self, name: &'static str, work: impl FnOnce(BoxFuture<'static, ()>) -> L)
    where
        L: Future<Output = ()> + Send + 'static,
    {
        self.bring_in(name, |engine| work(async move { engine.stopping().await }.boxed()));
    }

    /// Where accept hands deliveries over to.
    pub(crate) fn hand_over(&self) -> Arc<dyn HandOver> {
        Arc::clone(&self.engine) as _
    }

    /// Says what is not as it should be, as long as the engine is there.
    pub(crate) fn health(&self) -> impl Fn() -> Vec<HealthReason> + Send + Sync + use<B> {
        let engine = Arc::downgrade(&self.engine);
        move || engine.upgrade().map_or_else(|| vec![HealthReason::Stopping], |engine| engine.health())
    }

    /// Stops what runs when the answer is dropped.
    pub(crate) fn stop_on_drop(&self) -> StopOnDrop<B> {
        StopOnDrop(Arc::clone(&self.engine))
    }

    /// As if the process were gone: nothing new is started, what runs is dropped, and nothing of it is written.
    #[cfg(feature = "testing")]
    pub(crate) fn abandon_all(&self) {
        self.engine.abandon_all();
    }

    /// Nothing new is claimed or handed over from here on.
    pub(crate) fn stop_bringing_in(&self) {
        self.engine.stop_bringing_in();
    }

    /// Waits until batches that were already being accepted have brought in their last deliveries, at most for `wait_max`.
    pub(crate) async fn brought_in(&self, wait_max: Duration) {
        drop(tokio::time::timeout(wait_max, self.engine.nothing_starting()).await);
    }

    /// Waits until a loop of this engine has ended that must not, and tells which. Stays pending while all is well.
    pub(crate) fn failure(&self) -> impl Future<Output = Error> + Send + use<B> {
        let engine = Arc::clone(&self.engine);
        async move { engine.failure().await }
    }

    /// Claims for all slots, runs what came back and waits until it is settled; once, or until nothing is due. Returns how many
    /// deliveries that were.
    pub(crate) async fn rounds(&self, extent: Extent) -> Result<usize> {
        // With fewer slots than ids, a handler's ids are asked for in turns: nothing is due only when all have been.
        let turns = self.engine.lanes.iter().map(|lane| lane.ids.all.len()).max().unwrap_or(1);
        let mut claimer = Claimer::new(Arc::clone(&self.engine));
        self.engine.lanes.iter().for_each(|lane| lane.breaker.ask_now());
        // The slots of a drain before this one, if it was cut off, are given up shortly after its end. A handler that blocks keeps its slot.
        let _ = tokio::time::timeout(SLOTS_PATIENCE, self.slots_free()).await;
        let (mut total, mut empty) = (0, 0);
        while empty < turns && self.engine.is_running() {
            claimer.look_anew();
            let Round { claimed, setback, .. } = claimer.round().await?;
            self.engine.in_flight.empty().await;
            self.slots_free().await;
            if let Some(error) = setback {
                return Err(error);
            }
            total += claimed;
            match (claimed, extent) {
                (0, _) => empty += 1,
                (_, Extent::Once) => break,
                (_, Extent::UntilNothingIsDue) => empty = 0,
            }
        }
        // What the last runs mean for breakers.
        self.engine.attend_breakers().await;
        Ok(total)
    }

    /// Waits until every slot is free. A slot is given up shortly after the last claim that ran in it: a round in between would find no slot
    /// to claim for, and look like one that found nothing due.
    async fn slots_free(&self) {
        while self.engine.is_running() && !self.engine.lanes.iter().all(|lane| lane.is_idle()) {
            tokio::time::sleep(SLOT_LOOK).await;
        }
    }

    /// Stops claiming at once, lets handlers end within `grace`, gives back the rest, writes all outcomes.
    pub(crate) async fn end(mut self, grace: Duration) -> Result<()> {
        let engine = Arc::clone(&self.engine);
        let deadline = Instant::now() + grace;
        let last = deadline + LAST_WORDS;
        engine.stop_bringing_in();
        let _ = timeout_at(deadline, self.quiet()).await;
        engine.phase.send_replace(Phase::Closing);
        engine.in_flight.stop_all(StopReason::Shutdown);
        let _ = timeout_at(last, self.quiet()).await;
        // Being left on the list of processors harms nobody: the entry runs out.
        let _ = timeout_at(last, engine.store.backend.withdraw(engine.processor)).await;
        engine.phase.send_replace(Phase::Closed);
        // Loops end when they see the phase; one that waits for a database that does not answer is not waited for.
        let _ = timeout_at(last, joined(&mut self.settling)).await;
        self.bringing_in.abort_all();
        self.settling.abort_all();
        let left = engine.in_flight.len();
        if left == 0 {
            return Ok(());
        }
        Err(Error::new(
            Kind::Connection,
            format!(
                "shut down with {left} outcomes unwritten: those deliveries run again when their claims have run out"
            ),
        ))
    }

    /// Waits until no claim is under way and nothing is held.
    async fn quiet(&mut self) {
        joined(&mut self.bringing_in).await;
        self.engine.in_flight.empty().await;
    }
}

impl<B: Backend> Drop for Loops<B> {
    /// Ends without waiting, when the inbox or the future that works with it is dropped. Claims are given back in the background.
    fn drop(&mut self) {
        if self.engine.phase() == Phase::Closed {
            return;
        }
        let ending = Self {
            engine: Arc::clone(&self.engine),
            bringing_in: std::mem::take(&mut self.bringing_in),
            settling: std::mem::take(&mut self.settling),
        };
        // The engine holds the store and the store its reactor, so this runs.
        drop(self.engine.store.backend.reactor().spawn(ending.end(Duration::ZERO)));
    }
}

/// Runs a loop that may end only when the engine has reached `until`. Any other end is a failure of the engine.
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

/// Stops what a caller asked for when it goes away before the end.
pub(crate) struct StopOnDrop<B: Backend>(Arc<Engine<B>>);

impl<B: Backend> Drop for StopOnDrop<B> {
    fn drop(&mut self) {
        self.0.stop_now();
    }
}

async fn joined(tasks: &mut JoinSet<()>) {
    while tasks.join_next().await.is_some() {}
}
