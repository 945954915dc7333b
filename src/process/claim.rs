//! Claims due deliveries: one statement for all handlers, for as many deliveries as there are places (`slots.rs`), at
//! most a batch for each handler.
//!
//! Places are taken before the statement is sent, so claimed deliveries can start at once or soon. Under load, the next
//! claim is sent when half of the places are free, while the handlers work on the rest. When idle, the loop polls.
//! Deliveries that may crash the process again go to `suspects.rs`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;

use super::claim_backoff::ClaimBackoff;
use super::connections::{self, Connections};
use super::engine::Engine;
use super::floors::{Floors, asks};
use super::gate::{PlacedDelivery, Purpose, Starting};
use super::lane::Lane;
use super::large::{self, Whole};
use super::loops::ClaimMode;
use super::next_round::NextRound;
use super::precedence::in_precedence;
use super::run::Run;
use super::scans::{Scan, Scans};
use super::slots::{Need, Place};
use super::suspects;
use crate::store::Backend;
use crate::store::seam::{Ask, ClaimScope, Claimed, Claims, Turns};
use crate::telemetry::events;
use crate::types::{Backoff, Error, Kind, Result, jittered};

/// Claims that are sent at a time while there is a backlog: the server executes one while it commits the other.
const CLAIMS_MAX: usize = 2;
/// Spreads the next claims of processes that wait for the same rate limit.
const SCAN_JITTER: Duration = Duration::from_millis(10);

/// The state of the claim loop.
pub(super) struct Claimer<B: Backend> {
    pub(super) engine: Arc<Engine<B>>,
    /// Where the next claims begin in the index.
    floors: Floors,
    /// How much of the index the next claim scans.
    pub(super) scans: Scans,
    /// Until then, suspects and expired claims are not claimed, so that the owners of expired claims can settle.
    spared_until: Option<Instant>,
    /// The last round left due deliveries behind, so sending two claims pays off.
    pub(super) is_backlog: bool,
    /// Counts claims, to share slots fairly between the ids of one handler.
    round: usize,
    /// Handlers whose claims failed while others' did not.
    pub(super) claim_backoff: ClaimBackoff,
    /// When shared rate limits allow more deliveries.
    pub(super) limited_until: Option<Instant>,
    /// Handlers that ask for a connection.
    pub(super) connections: Connections,
}

/// One claim of a round.
struct Part<B: Backend> {
    /// Not empty when the claim is sent.
    room: Vec<Place<B>>,
    asks: Vec<Ask>,
}

/// Claimed deliveries, each with its place.
struct Sorted<B: Backend> {
    brought: Vec<PlacedDelivery<B>>,
    /// Deliveries that have to run alone.
    suspects: Vec<Claimed>,
    /// A violated invariant: the round fails with it after the other deliveries have started.
    failure: Option<Error>,
}

/// The result of a round of claims.
#[derive(Debug)]
pub(super) struct Round {
    /// How many deliveries were claimed, including those that were released because they found no slot.
    pub(super) claimed: usize,
    /// Why claims for some handlers failed. The error is reported already, and claims for these handlers back off.
    pub(super) failed_claim: Option<Error>,
    /// Fair handlers may have more due, although little or nothing was claimed.
    pub(super) is_more: bool,
    pub(super) next: NextRound,
    pub(super) began_at: Instant,
}

/// Claims until the engine stops. Errors of the database are retried with backoff.
pub(super) async fn claim_loop<B: Backend>(engine: Arc<Engine<B>>) {
    let mut claimer = Claimer::new(Arc::clone(&engine));
    let mut backoff = Backoff::new(engine.limits.backoff_max);
    let mut failed_since: Option<Instant> = None;
    let noticeable = engine.limits.lease / 3;
    // The owners of claims that expired during an outage may be in their longest backoff before they settle.
    let spare_for = engine.limits.lease.max(engine.limits.backoff_max * 2);
    while engine.is_running() {
        match claimer.round().await {
            Ok(round) => {
                backoff.reset();
                engine.liveness.store_answered();
                if let Some(since) = failed_since.take() {
                    events::store_recovered("claim");
                    if since.elapsed() >= noticeable {
                        claimer.spare_suspects_for(spare_for);
                    }
                }
                claimer.pause(&round).await;
            }
            Err(error) => {
                events::store_error("claim", &error);
                engine.liveness.store_failed();
                connections::withdraw(engine.lanes.iter());
                // This comes before the first claim that succeeds, which would take every claim that expired meanwhile.
                // Only after a long outage: sparing suspects after each failed claim would spare them forever.
                if failed_since.get_or_insert_with(Instant::now).elapsed() >= noticeable {
                    claimer.spare_suspects_for(spare_for);
                }
                tokio::select! {
                    () = backoff.pause() => {}
                    () = engine.stopping() => {}
                }
            }
        }
    }
    connections::withdraw(engine.lanes.iter());
}

impl<B: Backend> Claimer<B> {
    pub(super) fn new(engine: Arc<Engine<B>>) -> Self {
        let (floors, scans) = (Floors::default(), Scans::default());
        let claim_backoff = ClaimBackoff::new(engine.limits.backoff_max);
        Self {
            engine,
            floors,
            scans,
            spared_until: None,
            is_backlog: false,
            round: 0,
            claim_backoff,
            limited_until: None,
            connections: Connections::default(),
        }
    }

    /// Forgets which claims to spare and what was scanned: for callers that want everything that is due now.
    pub(super) fn scan_from_beginning(&mut self) {
        self.spared_until = None;
        self.scans.scan_from_beginning();
    }

    /// Does not claim suspects and expired claims for `duration`.
    pub(super) fn spare_suspects_for(&mut self, duration: Duration) {
        let until = Instant::now() + duration;
        self.spared_until = Some(self.spared_until.map_or(until, |earlier| earlier.max(until)));
    }

    /// Claims once for all handlers that need more, and starts the claimed deliveries.
    pub(super) async fn round(&mut self) -> Result<Round> {
        let began_at = Instant::now();
        self.engine.update_breakers().await;
        let starting = self.engine.begin(Purpose::Claim).await;
        let scan = self.scans.next(Instant::now());
        let engine = Arc::clone(&self.engine);
        let limits = &engine.limits;
        let kept = Connections::kept(&engine);
        let first = self.part(&starting, scan, |lane| lane.need(limits) != Need::None);
        if engine.mode == ClaimMode::InBackground {
            let is_claimed = |lane: &Arc<Lane<B>>| first.room.iter().any(|places| Arc::ptr_eq(&places.lane, lane));
            self.connections.ask(&engine, &kept, is_claimed);
        }
        if first.room.is_empty() {
            return Ok(Round { claimed: 0, failed_claim: None, is_more: false, next: NextRound::WhenNeeded, began_at });
        }
        let mut parts = vec![first];
        while self.is_backlog && parts.len() < CLAIMS_MAX {
            // Two claims for a fair handler at the same time would begin with the same tenants.
            let part = self.part(&starting, scan, |lane| !lane.is_fair && lane.room(limits) >= limits.claim_batch_rows);
            if part.room.is_empty() {
                break;
            }
            parts.push(part);
        }
        let asked: Vec<_> = parts.iter().flat_map(|part| &part.room).map(|places| Arc::clone(&places.lane)).collect();
        let claimed = self.claim(starting, parts, scan, began_at).await;
        // Kept for the next round if that scans for deliveries that this one may have missed.
        if !claimed.as_ref().is_ok_and(|round| round.next == NextRound::AtOnce) {
            connections::withdraw(asked.iter());
            self.connections.expect(asked.iter().filter(|_| self.scans.is_near_owed()));
        }
        claimed
    }

    /// Takes places of every selected lane, and computes what to claim with them.
    fn part(&mut self, starting: &Starting<B>, scan: Scan, is_meant: impl Fn(&Lane<B>) -> bool) -> Part<B> {
        let claim_rows = self.engine.limits.claim_batch_rows;
        // The first lane takes connections first.
        let lanes = in_precedence(&self.engine.lanes, self.round, |lane| lane.priority).into_iter();
        let now = Instant::now();
        let is_pausing = |lane: &Lane<B>| lane.ids.all.iter().any(|&id| self.claim_backoff.is_pausing(id, now));
        let lanes = lanes.filter(|lane| is_meant(lane) && !is_pausing(lane));
        let room: Vec<_> = lanes.filter_map(|lane| starting.places(lane, claim_rows).ok()).collect();
        let asks = room.iter().flat_map(|places| asks(&mut self.floors, places, self.round, scan)).collect();
        // Counts only rounds that claim: otherwise the same id could be left out every time.
        self.round = self.round.wrapping_add(usize::from(!room.is_empty()));
        Part { room, asks }
    }

    /// Sends the claims of a round at the same time, and starts what they return. An error of one part is returned only
    /// after the deliveries of the other parts have started, because those are claimed. If this future is dropped while
    /// the statements run, their claims are on no list and expire: so it runs in the claim loop, or in a task of the
    /// store (`drain`).
    async fn claim(
        &mut self,
        starting: Starting<B>,
        parts: Vec<Part<B>>,
        scan: Scan,
        began_at: Instant,
    ) -> Result<Round> {
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
            self.note_answer(part, answer, scan, asked_at);
        }
        // Per handler id: how many fewer deliveries were found than asked for.
        let mut missing: HashMap<i16, i32> = HashMap::new();
        let lanes_asked = parts.first().map_or(0, |part| part.room.len());
        let mut lease_starts = Instant::now();
        let (mut claimed, mut brought, mut suspects, mut over) = (0, Vec::new(), Vec::new(), Vec::new());
        let (mut failure, mut failed_claim, mut is_more) = (None, None, false);
        for (part, answer) in parts.into_iter().zip(answers) {
            for ask in &part.asks {
                *missing.entry(ask.handler_id).or_default() += ask.limit;
            }
            match answer {
                Ok(Claims { sent_at, deliveries, failed, turns, scan_again_in }) => {
                    let scan_again_at = scan_again_in.map(|wait| Instant::now() + wait + jittered(SCAN_JITTER));
                    self.limited_until = scan_again_at.into_iter().chain(self.limited_until).min();
                    failed_claim = failed.into_iter().next().map(|asks| asks.error).or(failed_claim);
                    for delivery in &deliveries {
                        *missing.entry(delivery.claim.handler_id).or_default() -= 1;
                    }
                    is_more |= self.note_floors(&deliveries, &turns);
                    let loaded = large::load(&engine, &part.room, deliveries).await;
                    over.extend(loaded.over);
                    failure = loaded.failure.or(failure);
                    claimed += loaded.deliveries.len();
                    lease_starts = lease_starts.min(sent_at);
                    let mut sorted = self.sort(part.room, loaded.deliveries);
                    brought.append(&mut sorted.brought);
                    suspects.append(&mut sorted.suspects);
                    failure = sorted.failure.or(failure);
                }
                Err(error) => failure = Some(error),
            }
        }
        let left = starting.bring_in(brought, lease_starts);
        self.is_backlog = is_more || missing.values().any(|missing| *missing <= 0);
        over.extend(left.into_iter().map(Run::take_back));
        let released = self.release(&over).await;
        if !suspects.is_empty() {
            suspects::take_turns(self, suspects).await?;
        }
        failure.map_or(released, Err)?;
        Ok(Round { claimed, failed_claim, is_more, next: self.next(scan, lanes_asked), began_at })
    }

    /// Learns from an answer how deep the next scans may be, and which handlers to leave out.
    fn note_answer(&mut self, part: &Part<B>, answer: &Result<Claims>, scan: Scan, asked_at: Instant) {
        let now = Instant::now();
        let failed = answer.as_ref().map_or(&[][..], |claims| &claims.failed);
        let errors = failed.iter().map(|asks| &asks.error).chain(answer.as_ref().err());
        match (errors.map(Error::kind).find(|kind| *kind != Kind::Connection), answer) {
            (Some(_), _) => self.scans.refused(scan, asked_at.elapsed(), now),
            (None, Ok(claims)) => self.scans.answered(scan, claims.sent_at.elapsed(), now),
            // A connection error says nothing about how deep a scan may be.
            (None, Err(_)) => return,
        }
        let Ok(claims) = answer else { return };
        part.room.iter().for_each(|places| self.connections.answered(&places.lane, &claims.deliveries));
        let is_failed = |handler_id: &i16| failed.iter().any(|asks| asks.handler_ids.contains(handler_id));
        for places in part.room.iter().filter(|places| !places.lane.ids.all.iter().any(is_failed)) {
            places.lane.set_careful(false);
            self.claim_backoff.answered(&places.lane.ids.all);
        }
        failed.iter().for_each(|asks| self.claim_backoff.failed(asks, now));
    }

    /// Learns where the next claims begin. Returns whether fair handlers have more due deliveries.
    fn note_floors(&mut self, claimed: &[Claimed], turns: &[Turns]) -> bool {
        let is_of = |turns: &Turns, delivery: &&Claimed| delivery.claim.handler_id == turns.handler_id;
        let in_order = claimed.iter().filter(|delivery| !turns.iter().any(|turns| is_of(turns, delivery)));
        in_order.for_each(|delivery| self.floors.raise(delivery));
        let more = turns.iter().filter(|turns| {
            let claimed = claimed.iter().filter(|delivery| is_of(turns, delivery)).count();
            self.floors.took_turns(turns, claimed)
        });
        more.count() > 0
    }

    /// Releases deliveries that may not wait and found no slot, or whose payloads are too large to wait. The next claim
    /// finds them first.
    async fn release(&mut self, claimed: &[Claimed]) -> Result<()> {
        if claimed.is_empty() {
            return Ok(());
        }
        claimed.iter().for_each(|delivery| self.floors.lower(delivery));
        suspects::release(&self.engine, claimed).await
    }

    /// Gives each delivery its place, and separates those that have to run alone.
    fn sort(&self, mut room: Vec<Place<B>>, claimed: Vec<Whole>) -> Sorted<B> {
        let mut sorted = Sorted { brought: Vec::with_capacity(claimed.len()), suspects: Vec::new(), failure: None };
        let limits = &self.engine.limits;
        for delivery in claimed {
            let handler_id = delivery.claim.handler_id;
            let places = room.iter_mut().find(|places| places.lane.ids.all.contains(&handler_id));
            let Some(place) = places.and_then(Place::split_off) else {
                // Its claim expires.
                let claim = delivery.claim;
                sorted.failure = Some(Error::bug(format!(
                    "{claim:?} was claimed, but has no place: the store returned more than was asked for"
                )));
                continue;
            };
            self.engine.emit_claimed(&delivery);
            if delivery.crashes >= limits.starts_at_once_from() {
                place.lane.set_careful(true);
            }
            let is_suspect = delivery.crashes >= limits.suspect_from_crashes()
                || delivery.store_errors >= limits.suspect_from_store_errors();
            match is_suspect {
                true => sorted.suspects.push(delivery.into_claimed()),
                false => sorted.brought.push(PlacedDelivery { claimed: delivery, place }),
            }
        }
        sorted
    }

    /// Whether the next claim may take suspects and expired claims.
    fn scope(&mut self) -> ClaimScope {
        match self.spared_until {
            Some(until) if Instant::now() < until => ClaimScope::Unsuspected,
            Some(_) | None => {
                self.spared_until = None;
                ClaimScope::All
            }
        }
    }
}
