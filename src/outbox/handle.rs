//! The handle of a running relay: starts it on the store's thread, ends it, and reports its failure. A second task
//! deletes sent records that are old enough.

use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::sync::{oneshot, watch};
use tokio::time::sleep;

use super::relay::relay_loop;
use super::wire::{Wire, WireProblem};
use crate::store::outbound::PurgedSent;
use crate::store::{Backend, Store};
use crate::telemetry::events;
use crate::types::{Error, HealthReason, Result, jittered, panic_text};

/// The pause between two purges of sent records.
const PURGE_EVERY: Duration = Duration::from_secs(10);
/// The most records that one statement deletes.
const PURGE_ROWS: u32 = 1_000;

/// The settings of a relay. See `kafka::Relay`, which documents them for users.
#[derive(Debug, Clone)]
pub(crate) struct RelaySettings {
    pub(crate) lease: Duration,
    pub(crate) poll: Duration,
    pub(crate) batch_rows: u32,
    pub(crate) batch_bytes: u64,
    pub(crate) keep_sent: Duration,
    pub(crate) unknown_topic_grace: Duration,
}

/// A running relay. Dropping it stops it.
pub(crate) struct RelayHandle {
    stop: watch::Sender<bool>,
    /// The error that ended it, if any; `None` once it was received.
    ended: Option<oneshot::Receiver<Option<Error>>>,
    failure: Option<Error>,
    /// The error that prevents sending, for health checks.
    problem: WireProblem,
    /// The error that ended the relay, for health checks.
    failed: WireProblem,
}

impl RelayHandle {
    /// Starts a relay on the store's thread. `make` creates a wire whenever one is needed.
    /// Neither creating a wire nor dropping it may block.
    pub(crate) fn start<B: Backend, W: Wire>(
        store: &Store<B>,
        settings: RelaySettings,
        problem: WireProblem,
        make: impl Fn() -> Result<W> + Send + Sync + 'static,
    ) -> Self {
        let (stop, stopping) = watch::channel(false);
        let (end, ended) = oneshot::channel();
        let (failed, of_handle) = (WireProblem::default(), problem.clone());
        let noting = failed.clone();
        let purging = purge_loop(store.clone(), settings.keep_sent, stopping.clone());
        let relaying = relay_loop(store.clone(), settings, problem, make, stopping);
        let reactor = store.backend.reactor();
        let work = async move {
            let both = async { tokio::join!(relaying, purging) };
            let failure = AssertUnwindSafe(both).catch_unwind().await.err().map(|panic| {
                let error = Error::bug(format!("the relay of the outbox panicked: {}", panic_text(panic)));
                events::outbox::relay_failed(&error);
                noting.note(format!("{error:#}"));
                error
            });
            drop(end.send(failure));
        };
        drop(reactor.spawn(work));
        Self { stop, ended: Some(ended), failure: None, problem: of_handle, failed }
    }

    /// Returns a function that lists health problems.
    pub(crate) fn health(&self) -> impl Fn() -> Vec<HealthReason> + Send + Sync + 'static {
        let (problem, failed) = (self.problem.clone(), self.failed.clone());
        move || {
            let failed = failed.get().map(|error| HealthReason::Failed { error });
            let problem = problem.get().map(|error| HealthReason::KafkaError { source: None, error });
            failed.into_iter().chain(problem).collect()
        }
    }

    /// Ends the relay: waits until the batch that is being sent is marked and the slots are released, or until the
    /// deadline. After the deadline the relay continues by itself, for a few seconds.
    pub(crate) async fn end(mut self, deadline: Instant) {
        self.stop.send_replace(true);
        if let Some(ended) = &mut self.ended {
            let _ = tokio::time::timeout_at(deadline.into(), ended).await;
        }
    }

    /// Resolves with the error that ended the relay. Stays pending while it is healthy.
    pub(crate) async fn failure(&mut self) -> Error {
        if let Some(ended) = &mut self.ended {
            self.failure = ended.await.ok().flatten();
            self.ended = None;
        }
        match &self.failure {
            Some(error) => error.repeat(),
            None => std::future::pending().await,
        }
    }
}

impl Drop for RelayHandle {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

/// Waits until the relay must end.
pub(super) async fn stopped(stopping: &watch::Receiver<bool>) {
    // An error means that the handle was dropped, which also ends the relay.
    let _ = stopping.clone().wait_for(|stop| *stop).await;
}

/// Deletes sent records that are older than `keep`, in steps of `PURGE_ROWS`. Each step of a round begins where the one
/// before it ended.
async fn purge_loop<B: Backend>(store: Store<B>, keep: Duration, stopping: watch::Receiver<bool>) {
    loop {
        let mut from = None;
        while !*stopping.borrow() {
            match store.backend.purge_sent(keep, from, PURGE_ROWS).await {
                Ok(PurgedSent { rows, .. }) if rows < u64::from(PURGE_ROWS) => break,
                Ok(PurgedSent { to, .. }) => from = to,
                Err(error) => {
                    events::store_error("purge the outbox", &error);
                    break;
                }
            }
        }
        tokio::select! {
            () = sleep(jittered(PURGE_EVERY)) => {}
            () = stopped(&stopping) => return,
        }
    }
}
