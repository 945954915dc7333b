//! A relay at work: starts it on the store's thread, ends it, and says when it has failed. Beside it, what was sent long enough ago is deleted.

use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::sync::{oneshot, watch};
use tokio::time::sleep;

use super::relay::relay_loop;
use super::wire::{Wire, WireTrouble};
use crate::store::{Backend, Store};
use crate::telemetry::events;
use crate::types::{Error, HealthReason, Result, jittered, panic_text};

/// Between two purges of records that were sent.
const PURGE_EVERY: Duration = Duration::from_secs(10);
/// Records that one statement deletes.
const PURGE_ROWS: u32 = 1_000;

/// How a relay works. See `kafka::Relay`, which has the words for users.
#[derive(Debug, Clone)]
pub(crate) struct RelaySettings {
    pub(crate) lease: Duration,
    pub(crate) poll: Duration,
    pub(crate) batch_rows: u32,
    pub(crate) batch_bytes: u64,
    pub(crate) keep_sent: Duration,
    pub(crate) unknown_topic_grace: Duration,
}

/// A relay at work. Dropping it stops it.
pub(crate) struct RelayHandle {
    stop: watch::Sender<bool>,
    /// What it ended of, if anything; `None` once it was heard.
    ended: Option<oneshot::Receiver<Option<Error>>>,
    failure: Option<Error>,
    /// What keeps it from sending, and what it has ended of: for whoever asks how it is.
    trouble: WireTrouble,
    failed: WireTrouble,
}

impl RelayHandle {
    /// Starts a relay on the store's thread. `make` makes a wire, whenever one is needed.
    pub(crate) fn start<B: Backend, W: Wire>(
        store: &Store<B>,
        settings: RelaySettings,
        trouble: WireTrouble,
        make: impl Fn() -> Result<W> + Send + Sync + 'static,
    ) -> Self {
        let (stop, stopping) = watch::channel(false);
        let (end, ended) = oneshot::channel();
        let (failed, of_handle) = (WireTrouble::default(), trouble.clone());
        let noting = failed.clone();
        let purging = purge_loop(store.clone(), settings.keep_sent, stopping.clone());
        let relaying = relay_loop(store.clone(), settings, trouble, make, stopping);
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
        Self { stop, ended: Some(ended), failure: None, trouble: of_handle, failed }
    }

    /// What is not as it should be, whenever it is asked.
    pub(crate) fn health(&self) -> impl Fn() -> Vec<HealthReason> + Send + Sync + 'static {
        let (trouble, failed) = (self.trouble.clone(), self.failed.clone());
        move || {
            let failed = failed.get().map(|error| HealthReason::Failed { error });
            let trouble = trouble.get().map(|error| HealthReason::KafkaTrouble { error });
            failed.into_iter().chain(trouble).collect()
        }
    }

    /// Ends it: the batch that is on its way is waited for and marked, not beyond the deadline.
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

/// Waits until the relay is to end.
pub(super) async fn stopped(stopping: &watch::Receiver<bool>) {
    // Also when the sender is gone.
    let _ = stopping.clone().wait_for(|stop| *stop).await;
}

/// Deletes what was sent long enough ago, in steps.
async fn purge_loop<B: Backend>(store: Store<B>, keep: Duration, stopping: watch::Receiver<bool>) {
    loop {
        while !*stopping.borrow() {
            match store.backend.purge_sent(keep, PURGE_ROWS).await {
                Ok(purged) if purged < u64::from(PURGE_ROWS) => break,
                Ok(_) => {}
                Err(error) => {
                    events::store_trouble("purge the outbox", &error);
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
