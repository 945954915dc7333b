//! Claims due deliveries: one statement for all handlers, as many as there are places (`slots.rs`), at most a batch of each.
//!
//! Places are taken before the statement is sent, so what comes back can start at once or soon. Under load the next claim is sent when half of
//! what may wait is gone, while the handlers work on the rest; idle, it is a poll. What must not crash once more goes to `solo.rs`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;

use super::engine::Engine;
use super::gate::{Brought, Purpose, Starting};
use super::lane::Lane;
use super::looks::{Look, Looks};
use super::run::Run;
use super::setbacks::Setbacks;
use super::slots::{Need, Place};
use super::solo;
use crate::store::Backend;
use crate::store::seam::{Ask, ClaimScope, Claimed, Claims, LookFrom, Stamp};
use crate::telemetry::events;
use crate::types::{Backoff, Error, Kind, Result, jittered};

/// Claims sent at a time while there is a backlog: the server works on one while the other is being fsynced or read.
const CLAIMS_MAX: usize = 2;
/// How long freed slots are collected before a claim, while others are still busy: claims of single rows would cost a statement each.
const COLLECT: Duration = Duration::from_millis(4);

/// Processes that wait for the same rate limit come so far apart.
const LOOK_JITTER: Duration = Duration::from_millis(10);

/// The claim loop's memory.
pub(super) struct Claimer<B: Backend> {
    pub(super) engine: Arc<Engine<B>>,
    /// Per handler id, up to where the index was walked. Later claims need not pass over what is finished since.
    floors: HashMap<i16, Stamp>,
    /// How much of the index to look at.
    looks: Looks,
    /// Until then suspects and expired locks are left alone: after a suspect has had its turn, and after our own outage, when the
    /// owners of expired locks get the chance to settle first.
    spared_until: Option<Instant>,
    /// The last round left something behind, so more than one claim is worth it.
    is_backlog: bool,
    /// Counts claims, to share slots fairly between the ids of one handler.
    round: usize,
    /// Handlers whose claims failed while others' did not.
    setbacks: Setbacks,
    /// Rate limits over all processes allow more then.
    limited_until: Option<Instant>,
}

/// One claim of a round.
struct Part<B: Backend> {
    /// Never empty when it is sent.
    room: Vec<Place<B>>,
    asks: Vec<Ask>,
}

/// What was claimed, with a place each.
struct Sorted<B: Backend> {
    brought: Vec<Brought<B>>,
    /// These have to run alone.
    suspects: Vec<Claimed>,
    trouble: Option<Error>,
}

/// What a round of claiming led to.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) claimed: usize,
    /// Why some of the handlers could not be asked for. It is reported already, and they are left out for a while.
    pub(super) setback: Option<Error>,
    next: NextRound,
}

/// When another round makes sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NextRound {
    /// There may be more, or not everything was looked at.
    AtOnce,
    /// Some handler had no place to ask with, or had enough: when it needs more, there may be more.
    WhenNeeded,
    /// Nothing was left behind.
    WhenWoken,
}

pub(super) async fn claim_loop<B: Backend>(engine: Arc<Engine<B>>) {
    let mut claimer = Claimer::new(Arc::clone(&engine));
    let mut backoff = Backoff::new(engine.limits.backoff_max);
    let mut trouble_since: Option<Instant> = None;
    let noticeable = engine.limits.lease / 3;
    // The owners of locks that ran out during an outage may be in their longest pause before they can settle.
    let mercy = engine.limits.lease.max(engine.limits.backoff_max * 2);
    while engine.is_running() {
        match claimer.round().await {
            Ok(round) => {
                backoff.reset();
                engine.pulse.store_answered();
                if let Some(since) = trouble_since.take() {
                    events::store_recovered("claim");
                    if since.elapsed() >= noticeable {
                        claimer.spare_suspects_for(mercy);
                    }
                }
                claimer.pause(&round).await;
            }
            Err(error) => {
                events::store_trouble("claim", &error);
                engine.pulse.store_failed();
                // Before the first claim that succeeds: it would take every lock that ran out meanwhile. A single broken claim lets
                // no lock run out, and sparing after each would spare for ever.
                if trouble_since.get_or_insert_with(Instant::now).elapsed() >= noticeable {
                    claimer.spare_suspects_for(mercy);
                }
                tokio::select! {
                    () = backoff.pause() => {}
                    () = engine.stopping() => {}
                }
            }
        }
    }
}

impl<B: Backend> Claimer<B> {
    pub(super) fn new(engine: Arc<Engine<B>>) -> Self {
        let (floors, looks) = (HashMap::new(), Looks::default());
        let setbacks = Setbacks::new(engine.limits.backoff_max);
        Self { engine, floors, looks, spared_until: None, is_backlog: false, round: 0, setbacks, limited_until: None }
    }

    /// Forgets whom to spare and where it has looked: for callers who want everything that is due, now.
    pub(super) fn look_anew(&mut self) {
        self.spared_until = None;
        self.looks.look_anew();
    }

    /// Leaves suspects and expired locks alone for a while.
    pub(super) fn spare_suspects_for(&mut self, duration: Duration) {
        let until = Instant::now() + duration;
        self.spared_until = Some(self.spared_until.map_or(until, |earlier| earlier.max(until)));
    }

    /// Claims once for all handlers that need more, and starts what came back.
    pub(super) async fn round(&mut self) -> Result<Round> {
        self.engine.attend_breakers().await;
        let starting = self.engine.begin(Purpose::Claim).await;
        let look = self.looks.next(Instant::now());
        let engine = Arc::clone(&self.engine);
        let limits = &engine.limits;
        let first = self.part(&starting, look, |lane| lane.need(limits) != Need::None);
        if first.room.is_empty() {
            return Ok(Round { claimed: 0, setback: None, next: NextRound::WhenNeeded });
        }
        let mut parts = vec![first];
        while self.is_backlog && parts.len() < CLAIMS_MAX {
            let part = self.part(&starting, look, |lane| lane.room(limits) >= limits.claim_batch_rows);
            if part.room.is_empty() {
                break;
            }
            parts.push(part);
        }
        self.claim(starting, parts, look).await
    }

    /// Places of every lane that is meant, and what to ask for with them.
    fn part(&mut self, starting: &Starting<B>, look: Look, is_meant: impl Fn(&Lane<B>) -> bool) -> Part<B> {
        let claim_rows = self.engine.limits.claim_batch_rows;
        // Another lane first each time: the first one has the first choice of the connections.
        let (later, first) = self.engine.lanes.split_at(self.round % self.engine.lanes.len());
        let now = Instant::now();
        let is_pausing = |lane: &Lane<B>| lane.ids.all.iter().any(|&id| self.setbacks.is_pausing(id, now));
        let lanes = first.iter().chain(later).filter(|lane| is_meant(lane) && !is_pausing(lane));
        let room: Vec<_> = lanes.filter_map(|lane| starting.places(lane, claim_rows).ok()).collect();
        let asks = room.iter().flat_map(|places| self.asks(places, look)).collect();
        // Only for what is asked: counting on without a claim would leave out the same id again and again.
        self.round = self.round.wrapping_add(usize::from(!room.is_empty()));
        Part { room, asks }
    }

    async fn claim(&mut self, starting: Starting<B>, parts: Vec<Part<B>>, look: Look) -> Result<Round> {
        let scope = self.scope();
        self.limited_until = None;
        let engine = Arc::clone(&self.engine);
        let asked_at = Instant::now();
        let statements = parts.iter().map(async |part| {
            let request = engine.claim_request(&part.asks, scope);
            engine.store.backend.claim(&request).await
        });
        let answers = join_all(statements).await;
        for (part, answer) in parts.iter().zip(&answers) {
            self.note_answer(part, answer, look, asked_at);
        }
        // How much less was found than asked for, by handler id.
        let mut missing: HashMap<i16, i32> = HashMap::new();
        let lanes_asked = parts.first().map_or(0, |part| part.room.len());
        let mut lease_starts = Instant::now();
        let (mut claimed, mut brought, mut suspects) = (0, Vec::new(), Vec::new());
        let (mut trouble, mut setback) = (None, None);
        for (part, answer) in parts.into_iter().zip(answers) {
            for ask in &part.asks {
                *missing.entry(ask.handler_id).or_default() += ask.limit;
            }
            match answer {
                Ok(Claims { sent_at, deliveries, failed, look_again_in }) => {
                    let look_again_at = look_again_in.map(|wait| Instant::now() + wait + jittered(LOOK_JITTER));
                    self.limited_until = look_again_at.into_iter().chain(self.limited_until).min();
                    setback = failed.into_iter().next().map(|asks| asks.error).or(setback);
                    for delivery in &deliveries {
                        *missing.entry(delivery.claim.handler_id).or_default() -= 1;
                    }
                    self.raise_floors(&deliveries);
                    claimed += deliveries.len();
                    lease_starts = lease_starts.min(sent_at);
                    let mut sorted = self.sort(part.room, deliveries);
                    brought.append(&mut sorted.brought);
                    suspects.append(&mut sorted.suspects);
                    trouble = sorted.trouble.or(trouble);
                }
                Err(error) => trouble = Some(error),
            }
        }
        let left = starting.bring_in(brought, lease_starts);
        self.is_backlog = missing.values().any(|missing| *missing <= 0);
        self.give_back(left).await?;
        if !suspects.is_empty() {
            solo::take_turns(self, suspects).await?;
        }
        if let Some(error) = trouble {
            return Err(error);
        }
        Ok(Round { claimed, setback, next: self.next(look, lanes_asked) })
    }

    /// Learns from an answer how deep a look may be, and which handlers cannot be asked for.
    fn note_answer(&mut self, part: &Part<B>, answer: &Result<Claims>, look: Look, asked_at: Instant) {
        let now = Instant::now();
        let failed = answer.as_ref().map_or(&[][..], |claims| &claims.failed);
        let errors = failed.iter().map(|asks| &asks.error).chain(answer.as_ref().err());
        match (errors.map(Error::kind).find(|kind| *kind != Kind::Connection), answer) {
            (Some(_), _) => self.looks.refused(look, asked_at.elapsed(), now),
            (None, Ok(claims)) => self.looks.answered(look, claims.sent_at.elapsed(), now),
            // Without a connection nothing is learnt about how deep a look may be.
            (None, Err(_)) => return,
        }
        if answer.is_err() {
            return;
        }
        let is_failed = |handler_id: &i16| failed.iter().any(|asks| asks.handler_ids.contains(handler_id));
        for places in part.room.iter().filter(|places| !places.lane.ids.all.iter().any(is_failed)) {
            places.lane.set_careful(false);
            self.setbacks.answered(&places.lane.ids.all);
        }
        failed.iter().for_each(|asks| self.setbacks.failed(asks, now));
    }

    /// When another round makes sense.
    fn next(&mut self, look: Look, lanes_asked: usize) -> NextRound {
        match self.is_backlog {
            true => NextRound::AtOnce,
            // What was committed late, or is due again, may stand below the floor.
            false if self.looks.fell_short(look) => NextRound::AtOnce,
            false if lanes_asked < self.engine.lanes.len() => NextRound::WhenNeeded,
            false => NextRound::WhenWoken,
        }
    }

    fn raise_floors(&mut self, claimed: &[Claimed]) {
        for delivery in claimed {
            let floor = self.floors.entry(delivery.claim.handler_id).or_insert(delivery.due_at);
            *floor = delivery.due_at.max(*floor);
        }
    }

    /// Gives back what may not wait and found no slot. The next claim finds it first.
    async fn give_back(&mut self, left: Vec<Run<B>>) -> Result<()> {
        if left.is_empty() {
            return Ok(());
        }
        let left: Vec<Claimed> = left.into_iter().map(Run::take_back).collect();
        for delivery in &left {
            self.floors.entry(delivery.claim.handler_id).and_modify(|floor| *floor = delivery.due_at.min(*floor));
        }
        solo::give_back(&self.engine, &left).await
    }

    /// Gives each delivery its place, and sets apart what has to run alone.
    fn sort(&self, mut room: Vec<Place<B>>, claimed: Vec<Claimed>) -> Sorted<B> {
        let mut sorted = Sorted { brought: Vec::with_capacity(claimed.len()), suspects: Vec::new(), trouble: None };
        let limits = &self.engine.limits;
        for delivery in claimed {
            let handler_id = delivery.claim.handler_id;
            let places = room.iter_mut().find(|places| places.lane.ids.all.contains(&handler_id));
            let Some(place) = places.and_then(Place::split_off) else {
                // Its claim runs out by itself.
                let claim = delivery.claim;
                sorted.trouble =
                    Some(Error::bug(format!("{claim:?} was claimed and has no place: more than was asked for")));
                continue;
            };
            self.engine.tell_claimed(&delivery);
            if delivery.crashes >= limits.starts_at_once_from() {
                place.lane.set_careful(true);
            }
            let is_suspect = delivery.crashes >= limits.solo_from() || delivery.troubles >= limits.solo_from_troubles();
            match is_suspect {
                true => sorted.suspects.push(delivery),
                false => sorted.brought.push(Brought { claimed: delivery, place }),
            }
        }
        sorted
    }

    /// How many deliveries of each of the lane's ids to ask for: the places, shared out, beginning with another id each round.
    fn asks(&self, places: &Place<B>, look: Look) -> Vec<Ask> {
        let ids = &places.lane.ids.all;
        let free = places.count;
        let share = |position: usize| {
            let place = (position + self.round) % ids.len();
            free / ids.len() + usize::from(place < free % ids.len())
        };
        let shares = ids.iter().enumerate().map(|(position, &handler_id)| (handler_id, share(position)));
        shares
            .filter(|(_, limit)| *limit > 0)
            .map(|(handler_id, limit)| Ask {
                handler_id,
                limit: i32::try_from(limit).unwrap_or(i32::MAX),
                is_probe: places.probe.is_some(),
                is_rated: places.lane.is_rated(),
                rate_id: places.lane.ids.lowest(),
                from: match (look.depth(), self.floors.get(&handler_id).copied()) {
                    (None, _) => LookFrom::Beginning,
                    (Some(depth), floor) => LookFrom::Below { floor, depth },
                },
            })
            .collect()
    }

    /// How long to wait for news before the next look.
    fn patience(&self) -> Duration {
        let poll = jittered(self.engine.limits.poll);
        let now = Instant::now();
        let of_lane = |lane: &Arc<Lane<B>>| {
            let free_at = lane.throttle.as_ref().and_then(|throttle| throttle.free_at(now));
            [lane.breaker.ask_at(), free_at].into_iter().flatten()
        };
        let of_all = [self.looks.owed_at(), self.setbacks.next_at(), self.limited_until].into_iter().flatten();
        let awaited = self.engine.lanes.iter().flat_map(of_lane).chain(of_all);
        awaited.map(|at| at.saturating_duration_since(now)).fold(poll, Duration::min)
    }

    fn scope(&mut self) -> ClaimScope {
        match self.spared_until {
            Some(until) if Instant::now() < until => ClaimScope::Unsuspected,
            Some(_) | None => {
                self.spared_until = None;
                ClaimScope::All
            }
        }
    }

    /// Waits until another round makes sense.
    async fn pause(&self, round: &Round) {
        let engine = &self.engine;
        let is_waiting = engine.lanes.iter().any(|lane| !lane.waiting.is_empty());
        let is_any = |is_so: fn(Need) -> bool| engine.lanes.iter().any(|lane| is_so(lane.need(&engine.limits)));
        if !(round.next == NextRound::AtOnce && is_any(|need| need != Need::None)) {
            tokio::select! {
                () = engine.wake.notified() => {}
                () = engine.freed.notified(), if round.next != NextRound::WhenWoken => {}
                // Perhaps by another inbox on the same store.
                () = engine.store.permits.returned.notified(), if is_waiting || round.next != NextRound::WhenWoken => {}
                () = tokio::time::sleep(self.patience()) => return,
                () = engine.stopping() => return,
            }
        }
        engine.start_all_waiting();
        // Let slots come together while handlers are returning one by one.
        let collected_by = tokio::time::Instant::now() + COLLECT;
        while !is_any(|need| need == Need::Much) {
            tokio::select! {
                () = engine.freed.notified() => {}
                () = tokio::time::sleep_until(collected_by) => return,
                () = engine.stopping() => return,
            }
        }
    }
}
