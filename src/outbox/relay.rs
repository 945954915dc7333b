//! The relay: sends what waits in the slots that it holds, one batch after the other, and marks what the broker has acknowledged.
//!
//! Whatever dies, a record is marked only after it was acknowledged, and it is sent before every later record of its key. A relay that dies or
//! loses its slots leaves records unmarked that were sent; whoever has the slots next sends them again, in order, with the same ids.
//!
//! One batch is on its way at a time, bounded in rows and bytes. While it waits for the broker, slots are renewed; when they cannot be, what has not
//! left is thrown away before the lease ends.

use std::collections::HashSet;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::{sleep, sleep_until, timeout};

use super::floors::Floors;
use super::handle::{RelaySettings, stopped};
use super::judge::{Verdict, choose, judge};
use super::tenure::Tenure;
use super::topics::HeldTopics;
use super::wire::{Fate, Wire, WireTrouble};
use crate::store::outbound::{Look, Marking, Outgoing};
use crate::store::{Backend, Store};
use crate::telemetry::events;
use crate::types::{Backoff, Error, Result, jittered, process_name};

/// The first pause when nothing waits; doubled each time.
const PAUSE_MIN: Duration = Duration::from_millis(2);
/// How long the last batch may take when the relay ends.
const LAST_BATCH: Duration = Duration::from_secs(5);
/// How long it may take to give up the slots at the end.
const LAST_WORDS: Duration = Duration::from_secs(2);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

pub(super) async fn relay_loop<B: Backend, W: Wire>(
    store: Store<B>,
    settings: RelaySettings,
    trouble: WireTrouble,
    make: impl Fn() -> Result<W> + Send + Sync,
    stopping: watch::Receiver<bool>,
) {
    let name: Arc<str> = process_name().into();
    let enrolled = async {
        let mut backoff = Backoff::new(BACKOFF_MAX);
        loop {
            match store.backend.enroll_relay(&name, settings.lease).await {
                Ok(relay) => return relay,
                Err(error) => events::store_trouble("enroll the relay", &error),
            }
            backoff.pause().await;
        }
    };
    let relay = tokio::select! {
        relay = enrolled => relay,
        () = stopped(&stopping) => return,
    };
    let mut work = Relaying {
        tenure: Tenure::new(relay, Arc::clone(&name), settings.lease, trouble.clone()),
        floors: Floors::new(Instant::now()),
        topics: HeldTopics::new(settings.unknown_topic_grace),
        suspects: HashSet::new(),
        wire: None,
        pause: PAUSE_MIN,
        backoff: Backoff::new(BACKOFF_MAX),
        store,
        settings,
        trouble,
        make,
        stopping,
    };
    while !work.is_stopping() {
        work.step().await;
    }
    // If it fails, the slots are free when the lease has run out.
    let _ = timeout(LAST_WORDS, work.store.backend.withdraw_relay(relay)).await;
}

struct Relaying<B: Backend, W, M> {
    store: Store<B>,
    settings: RelaySettings,
    tenure: Tenure,
    floors: Floors,
    topics: HeldTopics,
    /// Records that were refused together with others: each of them is sent alone.
    suspects: HashSet<i64>,
    wire: Option<W>,
    make: M,
    trouble: WireTrouble,
    /// How long to wait when nothing is found.
    pause: Duration,
    backoff: Backoff,
    stopping: watch::Receiver<bool>,
}

/// Why a batch was not waited for.
enum Cut {
    /// Its slots are lost: somebody else sends it.
    SlotsLost,
    Stopping,
}

impl<B: Backend, W: Wire, M: Fn() -> Result<W> + Send + Sync> Relaying<B, W, M> {
    fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// One round: renew if it is time, look, send, mark.
    async fn step(&mut self) {
        if Instant::now() >= self.tenure.renew_at() {
            let held = match self.tenure.hold(&self.store).await {
                Ok(()) => self.tenure.give_up_surplus(&self.store).await,
                Err(error) => Err(error),
            };
            if let Err(error) = held {
                return self.rest("hold slots of the outbox", &error).await;
            }
        }
        if Instant::now() >= self.tenure.until() {
            self.tenure.lose();
        }
        match self.look().await {
            Ok(rows) if rows.is_empty() => self.idle().await,
            Ok(rows) => {
                self.pause = PAUSE_MIN;
                self.send(rows).await;
            }
            Err(error) => self.rest("read the outbox", &error).await,
        }
    }

    async fn look(&mut self) -> Result<Vec<Outgoing>> {
        let now = Instant::now();
        let slots: Vec<_> = self.tenure.take_turn().into_iter().map(|slot| (slot, self.floors.of(slot, now))).collect();
        if slots.is_empty() {
            return Ok(Vec::new());
        }
        let look = Look {
            relay: self.tenure.relay(),
            slots,
            held_topics: self.topics.held(now),
            rows: self.settings.batch_rows,
            bytes: self.settings.batch_bytes,
        };
        let looked = self.store.backend.look_outgoing(&look).await?;
        self.backoff.reset();
        // What was left out for its topic is not known to the floors.
        if let Some(horizon) = looked.horizon.filter(|_| self.topics.is_empty()) {
            self.floors.looked(&looked.rows, horizon);
        }
        Ok(looked.rows)
    }

    async fn send(&mut self, rows: Vec<Outgoing>) {
        let rows = choose(rows, &self.suspects);
        let mut slots: Vec<i16> = rows.iter().map(|row| row.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        let mut wire = match self.wire.take().map_or_else(|| (self.make)(), Ok) {
            Ok(wire) => wire,
            Err(error) => {
                self.trouble.note(format!("{error:#}"));
                return self.rest("make a producer", &error).await;
            }
        };
        let fates = match self.answers(&mut wire, &rows, &slots).await {
            Ok(fates) => fates,
            // Dropping the wire throws away what has not left.
            Err(Cut::SlotsLost) => {
                self.suspects.clear();
                return self.tenure.lose();
            }
            Err(Cut::Stopping) => return,
        };
        self.wire = Some(wire).filter(W::is_usable);
        let verdict = judge(&rows, fates, &mut self.topics, Instant::now());
        self.conclude(&rows, slots, verdict).await;
    }

    /// Waits for the answers to a batch, and keeps the slots meanwhile.
    async fn answers(&mut self, wire: &mut W, rows: &[Outgoing], slots: &[i16]) -> Result<Vec<Fate>, Cut> {
        let mut sending = pin!(wire.send(rows));
        let (stopping, lapses) = (self.stopping.clone(), self.tenure.lapses());
        let mut too_late = pin!(async {
            stopped(&stopping).await;
            sleep(LAST_BATCH).await;
        });
        loop {
            tokio::select! {
                biased;
                fates = &mut sending => return Ok(fates),
                () = &mut too_late => return Err(Cut::Stopping),
                () = sleep_until(self.tenure.until().into()) => return Err(Cut::SlotsLost),
                () = sleep_until(self.tenure.renew_at().into()) => {
                    if let Err(error) = self.tenure.hold(&self.store).await {
                        events::store_trouble("hold slots of the outbox", &error);
                    }
                    if !self.tenure.holds(slots) || self.tenure.lapses() != lapses {
                        return Err(Cut::SlotsLost);
                    }
                }
            }
        }
    }

    /// Writes what the answers mean.
    async fn conclude(&mut self, rows: &[Outgoing], slots: Vec<i16>, verdict: Verdict) {
        let Verdict { sent, poisoned, suspects, trouble, are_topics_changed } = verdict;
        let decided = sent.iter().map(|sent| sent.id).chain(poisoned.iter().map(|refused| refused.id));
        decided.for_each(|id| {
            self.suspects.remove(&id);
        });
        self.suspects.extend(suspects);
        if are_topics_changed {
            self.floors.drop_all(Instant::now());
        }
        let relay = self.tenure.relay();
        if !sent.is_empty() {
            let keeps = !self.settings.keep_sent.is_zero();
            let marking = Marking { relay, slots, sent, keeps };
            let store = self.store.clone();
            if !self.written("mark records as sent", || store.backend.mark_sent(&marking)).await {
                return;
            }
            tell_sent(rows, &marking);
        }
        if !poisoned.is_empty() {
            let store = self.store.clone();
            if !self.written("poison records", || store.backend.poison_outgoing(relay, &poisoned)).await {
                return;
            }
            poisoned.iter().for_each(|refused| {
                let topic = rows.iter().find(|row| row.id == refused.id).map_or("", |row| &*row.topic);
                events::outbox::poisoned(refused.id, topic, refused.reason, &refused.error);
            });
        }
        match trouble {
            None => {
                // Records of a topic that cannot be sent to still wait.
                if self.topics.is_empty() {
                    self.trouble.clear();
                }
                self.backoff.reset();
            }
            Some(error) => {
                events::outbox::trouble("send", &error);
                self.trouble.note(error);
                self.backoff.pause().await;
            }
        }
    }

    /// Writes until it is written, or the slots are lost: then somebody else sends these records again, and marks them.
    async fn written<F: Future<Output = Result<u64>> + Send>(
        &mut self,
        doing: &'static str,
        write: impl Fn() -> F,
    ) -> bool {
        loop {
            match write().await {
                Ok(_) => return true,
                Err(error) => events::store_trouble(doing, &error),
            }
            self.backoff.pause().await;
            if Instant::now() >= self.tenure.renew_at()
                && let Err(error) = self.tenure.hold(&self.store).await
            {
                events::store_trouble("hold slots of the outbox", &error);
            }
            if Instant::now() >= self.tenure.until() || self.tenure.is_empty() {
                self.tenure.lose();
                self.suspects.clear();
                return false;
            }
        }
    }

    /// Nothing waits: looks again after a pause, or when this process has published something, or when it is time to renew.
    async fn idle(&mut self) {
        let published = Arc::clone(&self.store.published);
        tokio::select! {
            () = sleep(jittered(self.pause)) => self.pause = (self.pause * 2).min(self.settings.poll),
            () = published.notified() => self.pause = PAUSE_MIN,
            () = sleep_until(self.tenure.renew_at().into()) => {}
            () = stopped(&self.stopping) => {}
        }
    }

    /// The store is in trouble.
    async fn rest(&mut self, doing: &'static str, error: &Error) {
        events::store_trouble(doing, error);
        let stopping = self.stopping.clone();
        tokio::select! {
            () = self.backoff.pause() => {}
            () = stopped(&stopping) => {}
        }
    }
}

/// One event for each topic.
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
