//! Runs one delivery: the handler, watched, then the decision, then on to the settler.
//!
//! A panic, a timeout or a stop from outside ends the run like any other answer; nothing a handler does ends the task without one.
//! The slot is free as soon as the handler has returned; the claim is held until the outcome is written.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;

use super::decide::{Answer, Circumstances, StopReason, decide};
use super::engine::Engine;
use super::gate::Slot;
use super::lane::Lane;
use super::leash::Leash;
use super::transact::{self, TxEnd};
use crate::handler::{Body, Failure};
use crate::store::Backend;
use crate::store::seam::{ClaimId, Claimed, Settlement};
use crate::telemetry::events;
use crate::types::{Outcome, PoisonReason, panic_text};

/// A delivery about to run. A value, not yet a future: it is moved a few times before it is one.
pub(super) struct Run<B: Backend> {
    pub(super) held: Held<B>,
    pub(super) claimed: Claimed,
    pub(super) slot: Slot<B>,
    pub(super) leash: Arc<Leash>,
}

impl<B: Backend> Run<B> {
    pub(super) async fn run(self) {
        let Self { mut held, claimed, slot, leash } = self;
        let outcome = outcome(&held.engine, &slot.lane, &claimed, &leash).await;
        held.is_answered = true;
        let engine = &held.engine;
        engine.in_flight.returned(&leash);
        if let Some(Settled::Now(outcome) | Settled::Later(outcome)) = &outcome {
            slot.lane.count(outcome);
        }
        drop(slot);
        engine.freed.notify_one();
        match outcome {
            Some(Settled::Now(outcome)) => {
                engine.troubles.work_succeeded();
                events::decided(engine.subject_of(&claimed), &outcome);
            }
            // Told by the settler, once it is written.
            Some(Settled::Later(outcome)) => held.pass_on(outcome),
            None => events::claim_lost(engine.subject_of(&claimed)),
        }
    }
}

/// Whether an outcome still has to be written.
enum Settled {
    /// Committed with the handler's own transaction.
    Now(Outcome),
    Later(Outcome),
}

async fn outcome<B: Backend>(
    engine: &Arc<Engine<B>>,
    lane: &Lane<B>,
    claimed: &Claimed,
    leash: &Arc<Leash>,
) -> Option<Settled> {
    // Stopped before it began: the handler must not see it at all.
    if let Some(reason) = leash.reason() {
        return (reason != StopReason::ClaimLost).then_some(Settled::Later(Outcome::Released));
    }
    let Some(message) = claimed.message.clone() else {
        let reason = PoisonReason::MessageMissing;
        return Some(Settled::Later(Outcome::Poisoned { reason, error: None, charged: false }));
    };
    let attempt = claimed.claim.attempt.unsigned_abs();
    let answer = match &lane.body {
        Body::Plain(handler) => watch(handler.run(message, attempt), lane.timeout, leash).await,
        Body::Transactional(handler) => {
            let handler = Arc::clone(handler);
            // Boxed, so that its size is not that of every other run as well.
            match Box::pin(transact::run(engine, lane, claimed.claim, handler, message, Arc::clone(leash))).await {
                TxEnd::Committed => return Some(Settled::Now(Outcome::Done)),
                TxEnd::Answer(answer) => answer,
            }
        }
    };
    // What most runs come to; nothing has to be decided, and no dice be thrown.
    if matches!(answer, Answer::Finished(Ok(()))) {
        return Some(Settled::Later(Outcome::Done));
    }
    let circumstances = Circumstances {
        errors: claimed.errors,
        troubles: claimed.troubles,
        trouble_limit: engine.limits.trouble_limit,
        policy: &lane.retry,
        chance: rand::random(),
        error_chars_max: engine.limits.error_chars_max,
        redact: lane.redact.as_ref(),
    };
    // A policy is the user's code too.
    let decided = std::panic::catch_unwind(AssertUnwindSafe(|| decide(answer, &circumstances)));
    let outcome = decided.unwrap_or_else(|panic| {
        let error = circumstances.clean(&format!("the retry policy panicked: {}", panic_text(panic)));
        Some(Outcome::Poisoned { reason: PoisonReason::Permanent, error: Some(error), charged: true })
    });
    outcome.map(Settled::Later)
}

/// Waits for the handler, its timeout or a word from outside, whichever is first.
pub(super) async fn watch(
    handler: impl Future<Output = Result<(), Failure>> + Unpin,
    timeout: Option<Duration>,
    leash: &Leash,
) -> Answer {
    let late = async {
        match timeout {
            Some(timeout) => tokio::time::sleep(timeout).await,
            None => std::future::pending().await,
        }
    };
    let mut handler = AssertUnwindSafe(handler).catch_unwind();
    let answer = tokio::select! {
        // In this order: an answer that is there counts, even if time is up as well.
        biased;
        answer = &mut handler => match answer {
            Ok(answer) => Answer::Finished(answer),
            Err(panic) => Answer::Panicked(panic_text(panic)),
        },
        reason = leash.pulled() => Answer::Stopped(reason),
        () = late => Answer::TimedOut(timeout.unwrap_or_default()),
    };
    // Dropping what is left of the handler runs its code too; the answer stands.
    if let Err(panic) = std::panic::catch_unwind(AssertUnwindSafe(|| drop(handler))) {
        panic_text(panic);
    }
    answer
}

/// Takes the claim off the list unless its outcome went to the settler, who then does it. A run that ends without an answer has lost the
/// runtime it was to run on: its claim runs out by itself, and no more work is brought in, because none could be run.
pub(super) struct Held<B: Backend> {
    engine: Arc<Engine<B>>,
    claim: ClaimId,
    is_answered: bool,
    is_passed_on: bool,
}

impl<B: Backend> Held<B> {
    pub(super) fn new(engine: Arc<Engine<B>>, claim: ClaimId) -> Self {
        Self { engine, claim, is_answered: false, is_passed_on: false }
    }

    fn pass_on(mut self, outcome: Outcome) {
        let settlement = Settlement { claim: self.claim, outcome };
        self.is_passed_on = self.engine.outcomes.push(settlement, self.engine.in_flight.len());
    }
}

impl<B: Backend> Drop for Held<B> {
    fn drop(&mut self) {
        if !self.is_answered {
            self.engine.fail("run", "the runtime that handlers run on has ended");
        }
        if !self.is_passed_on {
            self.engine.in_flight.remove(self.claim);
        }
    }
}
