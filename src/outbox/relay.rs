//! The relay: sends the waiting records of the slots that it holds, one batch after another, and marks those that the
//! broker has acknowledged.
//!
//! Even after a crash, a record is marked only after it was acknowledged, and it is sent before every later record of
//! its key. A relay that crashes or loses its slots leaves sent records unmarked; the next holder of the slots sends
//! them again, in order, with the same ids.
//!
//! One batch at a time is being sent, bounded in rows and bytes. While it waits for the broker, the slots are renewed;
//! if they cannot be renewed, unsent records are dropped before the lease ends.

use std::collections::HashSet;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::{sleep, sleep_until, timeout, timeout_at};

use super::floors::Floors;
use super::handle::{RelaySettings, stopped};
use super::held_slots::HeldSlots;
use super::judge::{Verdict, choose, judge};
use super::topics::HeldTopics;
use super::wire::{SendResult, Wire, WireProblem};
use crate::store::outbound::{Marking, OutboxQuery, Outgoing};
use crate::store::{Backend, Store};
use crate::telemetry::events;
use crate::types::{Backoff, Error, Result, jittered, process_name};

/// The first pause when no record waits. It is doubled up to `RelaySettings::poll`.
const PAUSE_MIN: Duration = Duration::from_millis(2);
/// How long the last batch may take at shutdown.
const LAST_BATCH_TIMEOUT: Duration = Duration::from_secs(5);
/// How long releasing the slots may take at shutdown.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
/// How often an idle relay with a problem asks the brokers for an answer.
const CALL_EVERY: Duration = Duration::from_secs(1);
/// The longest pause after an error.
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// Registers the relay and sends until `stopping`. Errors of the database and of the brokers never end it. Cancelling
/// it is safe: unmarked records are sent again.
pub(super) async fn relay_loop<B: Backend, W: Wire>(
    store: Store<B>,
    settings: RelaySettings,
    problem: WireProblem,
    make: impl Fn() -> Result<W> + Send + Sync,
    stopping: watch::Receiver<bool>,
) {
    let name: Arc<str> = process_name().into();
    let registered = async {
        let mut backoff = Backoff::new(BACKOFF_MAX);
        loop {
            match store.backend.register_relay(&name, settings.lease).await {
                Ok(relay) => return relay,
                Err(error) => events::store_error("register the relay", &error),
            }
            backoff.pause().await;
        }
    };
    let relay = tokio::select! {
        relay = registered => relay,
        () = stopped(&stopping) => return,
    };
    let mut work = Relaying {
        held_slots: HeldSlots::new(relay, Arc::clone(&name), settings.lease, problem.clone()),
        floors: Floors::new(Instant::now()),
        topics: HeldTopics::new(settings.unknown_topic_grace),
        suspects: HashSet::new(),
        wire: None,
        call_at: Instant::now(),
        pause: PAUSE_MIN,
        backoff: Backoff::new(BACKOFF_MAX),
        store,
        settings,
        problem,
        make,
        stopping,
    };
    while !work.is_stopping() {
        work.step().await;
    }
    // If this fails, the slots are free when the lease expires.
    let _ = timeout(RELEASE_TIMEOUT, work.store.backend.remove_relay(relay)).await;
}

/// The state of a relay.
struct Relaying<B: Backend, W, M> {
    store: Store<B>,
    settings: RelaySettings,
    held_slots: HeldSlots,
    floors: Floors,
    topics: HeldTopics,
    /// Records that were rejected together with others. Each of them is sent alone, to find the one that causes it.
    suspects: HashSet<i64>,
    /// The producer. `None` until it is needed, and after a failure.
    wire: Option<W>,
    /// When the brokers may be asked for an answer again.
    call_at: Instant,
    /// Creates a producer.
    make: M,
    problem: WireProblem,
    /// How long to wait when no record is found.
    pause: Duration,
    backoff: Backoff,
    stopping: watch::Receiver<bool>,
}

/// Why the relay stopped waiting for a batch.
enum Interrupted {
    /// Its slots are lost: another relay sends it again.
    SlotsLost,
    /// The relay is ending, and the batch takes too long.
    Stopping,
}

impl<B: Backend, W: Wire, M: Fn() -> Result<W> + Send + Sync> Relaying<B, W, M> {
    fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// One round: renews the lease if it is time, reads, sends and marks.
    async fn step(&mut self) {
        if Instant::now() >= self.held_slots.renew_at() {
            let held = match self.held_slots.hold(&self.store).await {
                Ok(()) => self.held_slots.give_up_surplus(&self.store).await,
                Err(error) => Err(error),
            };
            if let Err(error) = held {
                return self.rest("hold slots of the outbox", &error).await;
            }
        }
        if Instant::now() >= self.held_slots.until() {
            self.held_slots.lose();
        }
        match self.read().await {
            Ok(rows) if rows.is_empty() => self.idle().await,
            Ok(rows) => {
                self.pause = PAUSE_MIN;
                self.send(rows).await;
            }
            Err(error) => self.rest("read the outbox", &error).await,
        }
    }

    /// Reads waiting records of its slots, at most a batch.
    async fn read(&mut self) -> Result<Vec<Outgoing>> {
        let now = Instant::now();
        let slots: Vec<_> =
            self.held_slots.take_turn().into_iter().map(|slot| (slot, self.floors.of(slot, now))).collect();
        if slots.is_empty() {
            return Ok(Vec::new());
        }
        let query = OutboxQuery {
            relay: self.held_slots.relay(),
            slots,
            held_topics: self.topics.held(now),
            rows: self.settings.batch_rows,
            bytes: self.settings.batch_bytes,
        };
        let found = self.store.backend.read_outgoing(&query).await?;
        self.backoff.reset();
        if query.has_room_after(&found.rows) {
            self.topics.found_all(&found.rows, now);
        }
        // If records were left out because of their topic, the rows do not show where the waiting records begin.
        if let Some(oldest_open) = found.oldest_open.filter(|_| self.topics.is_empty()) {
            self.floors.note_read(&found.rows, oldest_open);
        }
        Ok(found.rows)
    }

    /// Sends a batch and writes its results.
    async fn send(&mut self, rows: Vec<Outgoing>) {
        let rows = choose(rows, &self.suspects);
        let mut slots: Vec<i16> = rows.iter().map(|row| row.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        let mut wire = match self.wire.take().map_or_else(|| (self.make)(), Ok) {
            Ok(wire) => wire,
            Err(error) => {
                self.problem.note(format!("{error:#}"));
                return self.rest("make a producer", &error).await;
            }
        };
        let results = match self.answers(&mut wire, &rows, &slots).await {
            Ok(results) => results,
            // The wire is dropped, and with it the unsent records, before another relay sends them.
            Err(Interrupted::SlotsLost) => {
                self.suspects.clear();
                return self.held_slots.lose();
            }
            Err(Interrupted::Stopping) => return,
        };
        self.wire = Some(wire).filter(W::is_usable);
        let verdict = judge(&rows, results, &mut self.topics, Instant::now());
        self.conclude(&rows, slots, verdict).await;
    }

    /// Waits for the replies to a batch, and renews the slots in the meantime. Returning early drops the future of the
    /// wire, which discards the replies.
    async fn answers(
        &mut self,
        wire: &mut W,
        rows: &[Outgoing],
        slots: &[i16],
    ) -> Result<Vec<SendResult>, Interrupted> {
        let mut sending = pin!(wire.send(rows));
        let (stopping, lapses) = (self.stopping.clone(), self.held_slots.lapses());
        let mut too_late = pin!(async {
            stopped(&stopping).await;
            sleep(LAST_BATCH_TIMEOUT).await;
        });
        loop {
            tokio::select! {
                biased;
                results = &mut sending => return Ok(results),
                () = &mut too_late => return Err(Interrupted::Stopping),
                () = sleep_until(self.held_slots.until().into()) => return Err(Interrupted::SlotsLost),
                () = sleep_until(self.held_slots.renew_at().into()) => {
                    // A renewal may take longer than the lease lasts.
                    let until = self.held_slots.until().into();
                    match timeout_at(until, self.held_slots.hold(&self.store)).await {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => self.store_failed("hold slots of the outbox", &error),
                        Err(_) => return Err(Interrupted::SlotsLost),
                    }
                    if !self.held_slots.holds(slots) || self.held_slots.lapses() != lapses {
                        return Err(Interrupted::SlotsLost);
                    }
                }
            }
        }
    }

    /// Writes the results of a batch: marks sent records and poisons rejected ones.
    async fn conclude(&mut self, rows: &[Outgoing], slots: Vec<i16>, verdict: Verdict) {
        let Verdict { sent, poisoned, suspects, problem, are_topics_changed } = verdict;
        let decided = sent.iter().map(|sent| sent.id).chain(poisoned.iter().map(|refused| refused.id));
        decided.for_each(|id| {
            self.suspects.remove(&id);
        });
        self.suspects.extend(suspects);
        if are_topics_changed {
            self.floors.drop_all(Instant::now());
        }
        let relay = self.held_slots.relay();
        if !sent.is_empty() {
            let keeps = !self.settings.keep_sent.is_zero();
            let marking = Marking { relay, slots, sent, keeps };
            let store = self.store.clone();
            let Some(marked) = self.written("mark records as sent", || store.backend.mark_sent(&marking)).await else {
                return;
            };
            if let Some(transaction) = marked.transaction {
                self.floors.note_marked(transaction);
            }
            tell_sent(rows, &marking);
        }
        if !poisoned.is_empty() {
            let store = self.store.clone();
            if self.written("poison records", || store.backend.poison_outgoing(relay, &poisoned)).await.is_none() {
                return;
            }
            poisoned.iter().for_each(|refused| {
                let topic = rows.iter().find(|row| row.id == refused.id).map_or("", |row| &*row.topic);
                events::outbox::poisoned(refused.id, topic, refused.reason, &refused.error);
            });
        }
        match problem {
            None => {
                // Records of held topics may still wait, so their error stays visible.
                if self.topics.is_empty() {
                    self.problem.clear();
                }
                self.backoff.reset();
            }
            Some(error) => {
                events::outbox::failure("send", &error);
                self.problem.note(error);
                self.backoff.pause().await;
            }
        }
    }

    /// Retries until it is written. Returns `None` when the slots are lost: then another relay sends these records again
    /// and marks them.
    async fn written<T, F: Future<Output = Result<T>> + Send>(
        &mut self,
        operation: &'static str,
        write: impl Fn() -> F,
    ) -> Option<T> {
        loop {
            match write().await {
                Ok(written) => return Some(written),
                Err(error) => self.store_failed(operation, &error),
            }
            self.backoff.pause().await;
            if Instant::now() >= self.held_slots.renew_at()
                && let Err(error) = self.held_slots.hold(&self.store).await
            {
                self.store_failed("hold slots of the outbox", &error);
            }
            if Instant::now() >= self.held_slots.until() || self.held_slots.is_empty() {
                self.held_slots.lose();
                self.suspects.clear();
                return None;
            }
        }
    }

    /// Waits because no record was found: for a pause, until this process has published a record, or until it is time
    /// to renew. Asks the brokers for an answer meanwhile if there is a problem: an idle producer is not told that they
    /// are back.
    async fn idle(&mut self) {
        let published = Arc::clone(&self.store.published);
        let calls = self.prepare_call();
        tokio::select! {
            is_reached = reaches_brokers(&mut self.wire), if calls => {
                self.call_at = Instant::now() + CALL_EVERY;
                if is_reached {
                    self.problem.clear();
                }
            }
            () = sleep(jittered(self.pause)) => self.pause = (self.pause * 2).min(self.settings.poll),
            () = published.notified() => self.pause = PAUSE_MIN,
            () = sleep_until(self.held_slots.renew_at().into()) => {}
            () = stopped(&self.stopping) => {}
        }
    }

    /// Whether to ask the brokers for an answer now. Creates a producer for that if there is none.
    fn prepare_call(&mut self) -> bool {
        // The problem of a held topic ends when the topic can be written to, and not when a broker answers.
        if self.problem.get().is_none() || !self.topics.is_empty() || Instant::now() < self.call_at {
            return false;
        }
        if self.wire.is_none() {
            match (self.make)() {
                Ok(wire) => self.wire = Some(wire),
                Err(error) => {
                    events::store_error("make a producer", &error);
                    self.problem.note(format!("{error:#}"));
                    self.call_at = Instant::now() + CALL_EVERY;
                }
            }
        }
        self.wire.is_some()
    }

    /// Reports an error of the database. It may have failed over and lost records, so that new ones have ids below the
    /// floors.
    fn store_failed(&mut self, operation: &'static str, error: &Error) {
        events::store_error(operation, error);
        self.floors.drop_all(Instant::now());
    }

    /// Reports an error and waits for a pause, unless the relay is ending.
    async fn rest(&mut self, operation: &'static str, error: &Error) {
        self.store_failed(operation, error);
        let stopping = self.stopping.clone();
        tokio::select! {
            () = self.backoff.pause() => {}
            () = stopped(&stopping) => {}
        }
    }
}

/// Asks the brokers for an answer, if there is a wire. Takes the wire alone, so that the relay can wait for other things
/// beside it.
async fn reaches_brokers<W: Wire>(wire: &mut Option<W>) -> bool {
    match wire {
        Some(wire) => wire.reaches_brokers().await,
        None => false,
    }
}

/// Emits one event for each topic.
fn tell_sent(rows: &[Outgoing], marking: &Marking) {
    let sent: HashSet<i64> = marking.sent.iter().map(|sent| sent.id).collect();
    let mut counts: Vec<(&str, u64)> = Vec::new();
    for row in rows.iter().filter(|row| sent.contains(&row.id)) {
        match counts.iter_mut().find(|(topic, _)| *topic == &*row.topic) {
            Some((_, count)) => *count += 1,
            None => counts.push((&row.topic, 1)),
        }
    }
    counts.into_iter().for_each(|(topic, records)| events::outbox::sent(topic, records));
}

#[cfg(test)]
mod tests;
