//! Replays and discards poisoned deliveries: shows the matches, asks for confirmation, acts, and shows what remains.
//!
//! `--limit` bounds the action, the longest poisoned first. Repeating a command has no further effect: a replayed
//! delivery is no longer poisoned.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use wharf::operate::{Canary, CanaryProgress, CanaryStop, DeliveryFilter, DeliverySummary, Operator, State};
use wharf::store::Backend;

use crate::confirm::Confirming;
use crate::deliveries::poisoned_table;
use crate::exit::{Exit, Failure};
use crate::filter;
use crate::meant::{Action, Meant, rows_to_read};
use crate::output::Output;
use crate::progress;
use crate::session::Session;

const REPLAY: Action = Action { verb: "replay", rows: "deliveries" };
const DISCARD: Action = Action { verb: "discard", rows: "deliveries" };

/// An action on many rows.
#[derive(Debug, Args)]
pub struct Acting {
    /// Confirm that the action applies to everything, without a filter
    #[arg(long = "all")]
    pub is_all: bool,
    /// The maximum number of rows to change
    #[arg(long, value_name = "ROWS", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub limit: u32,
    #[command(flatten)]
    pub confirming: Confirming,
}

/// How the results of a replay are watched.
#[derive(Debug, Args)]
pub struct CanaryArguments {
    /// Replay one, then ten, then the rest in steps; stop when too many of a step fail again
    #[arg(long = "canary")]
    is_canary: bool,
    /// The share of a step that may fail before the replay stops
    #[arg(long, value_name = "RATIO", default_value_t = 0.1, value_parser = ratio, requires = "is_canary")]
    max_failure_ratio: f64,
    /// How long to wait for the results; with --canary, of each step (default 5m)
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    wait: Option<Duration>,
}

pub async fn replay<B: Backend>(
    session: &Session<B>,
    mut filter: DeliveryFilter,
    acting: &Acting,
    canary: &CanaryArguments,
) -> Result<Exit, Failure> {
    let states = [State::Poisoned, State::Discarded];
    let Some(meant) = agreed(session, &mut filter, acting, REPLAY, &states).await? else { return Ok(Exit::Well) };
    let operator = session.acting(acting.confirming.because.as_ref());
    if canary.is_watching() {
        return replay_watched(session, &filter, &meant, &operator, canary).await;
    }
    let mut replayed = 0;
    for (filter, limit) in actions(&filter, &meant) {
        match operator.replay(&filter, limit).await {
            Ok(changed) => replayed += changed,
            Err(error) => return ended_by(error, replayed, || meant.report(session.output, REPLAY, replayed)),
        }
    }
    meant.report(session.output, REPLAY, replayed)
}

/// Replays and waits for the results. A delivery that is named is a step of its own.
async fn replay_watched<B: Backend>(
    session: &Session<B>,
    filter: &DeliveryFilter,
    meant: &Meant<DeliverySummary>,
    operator: &Operator<B>,
    canary: &CanaryArguments,
) -> Result<Exit, Failure> {
    let bar = progress::of(session.output, Some(meant.rows.len() as u64), "replayed");
    let began_at = Instant::now();
    let mut progress = CanaryProgress::default();
    for (filter, limit) in actions(filter, meant) {
        let before = progress;
        let on_progress = |step: &CanaryProgress| {
            progress.replayed = before.replayed + step.replayed;
            progress.done = before.done + step.done;
            progress.failed = before.failed + step.failed;
            progress.stopped = before.stopped.or(step.stopped);
            bar.set_position(progress.done + progress.failed);
            bar.set_message(format!("{} done, {} failed", progress.done, progress.failed));
            ControlFlow::Continue(())
        };
        let watch = canary.watch(limit, began_at.elapsed());
        if let Err(error) = operator.replay_canary(&filter, limit, &watch, on_progress).await {
            bar.finish_and_clear();
            return ended_by(error, progress.replayed, || report(session.output, meant, &progress));
        }
        if canary.is_canary && progress.stopped.is_some() {
            break;
        }
    }
    bar.finish_and_clear();
    report(session.output, meant, &progress)
}

pub async fn discard<B: Backend>(
    session: &Session<B>,
    mut filter: DeliveryFilter,
    acting: &Acting,
) -> Result<Exit, Failure> {
    let states = [State::Poisoned, State::Pending];
    let Some(meant) = agreed(session, &mut filter, acting, DISCARD, &states).await? else { return Ok(Exit::Well) };
    let operator = session.acting(acting.confirming.because.as_ref());
    let mut discarded = 0;
    for (filter, limit) in actions(&filter, &meant) {
        match operator.discard(&filter, limit).await {
            Ok(changed) => discarded += changed,
            Err(error) => return ended_by(error, discarded, || meant.report(session.output, DISCARD, discarded)),
        }
    }
    meant.report(session.output, DISCARD, discarded)
}

/// Reports what was changed before the error, if anything was.
fn ended_by(
    error: wharf::Error,
    affected: u64,
    report: impl FnOnce() -> Result<Exit, Failure>,
) -> Result<Exit, Failure> {
    if affected > 0 {
        report()?;
    }
    Err(error.into())
}

/// The actions that change the rows that the person has confirmed: their filters, whose ages refer to the time at which
/// each is taken, and their limits. The deliveries of one message are named one by one, because another one may have
/// come to match, and the age of these begins earlier.
fn actions(filter: &DeliveryFilter, meant: &Meant<DeliverySummary>) -> impl Iterator<Item = (DeliveryFilter, u32)> {
    let rows = match filter.message_id {
        Some(_) => meant.rows.iter().map(Some).collect(),
        None => vec![None],
    };
    rows.into_iter().map(|row| {
        let mut filter = filter.clone();
        meant.age(&mut filter.older_than, &mut filter.newer_than);
        let Some(row) = row else { return (filter, meant.limit()) };
        filter.source = row.source.clone().or(filter.source);
        filter.handler_key = row.handler_key.clone().or(filter.handler_key);
        (filter, 1)
    })
}

/// The matching deliveries, once the person has confirmed. None when there is nothing to do.
async fn agreed<B: Backend>(
    session: &Session<B>,
    filter: &mut DeliveryFilter,
    acting: &Acting,
    action: Action,
    states: &[State],
) -> Result<Option<Meant<DeliverySummary>>, Failure> {
    filter.all = acting.is_all;
    filter::refuse_empty(filter)?;
    acting.confirming.check()?;
    // With a message id, deliveries in other states match too, and they are few.
    let state = if filter.message_id.is_some() { None } else { Some(State::Poisoned) };
    let read_at = Instant::now();
    let found = session.operator().deliveries(filter, state, rows_to_read(acting.limit)).await?;
    let meant = Meant::of(found, acting.limit, read_at, |one| states.contains(&one.state));
    let output = session.output;
    let is_agreed = meant.is_agreed(output, action, &acting.confirming, |rows| poisoned_table(output, rows))?;
    Ok(is_agreed.then_some(meant))
}

/// Says what a watched replay has changed, what became of it, and what remains.
fn report(output: Output, meant: &Meant<DeliverySummary>, progress: &CanaryProgress) -> Result<Exit, Failure> {
    let CanaryProgress { replayed, done, failed, stopped, .. } = *progress;
    let left = meant.left(replayed);
    let exit = if left > 0 || stopped.is_some() || failed > 0 { Exit::Partly } else { Exit::Well };
    if output.is_json {
        let mut report = meant.document(REPLAY, replayed, left);
        report["done"] = done.into();
        report["failed"] = failed.into();
        report["stopped"] = json!(stopped);
        output.document(&report)?;
        return Ok(exit);
    }
    output.line(format!("replay: {replayed} deliveries"))?;
    output.line(format!("{done} done, {failed} failed again, {} not run yet", replayed - done - failed))?;
    match stopped {
        Some(CanaryStop::Failures) => output.line("stopped: too many failed again; the rest was not changed")?,
        Some(CanaryStop::Waited) => output.line("stopped waiting: does a process run the handler?")?,
        Some(_) | None => {}
    }
    meant.report_left(output, left)?;
    Ok(exit)
}

impl CanaryArguments {
    /// Whether the command waits for the results.
    fn is_watching(&self) -> bool {
        self.is_canary || self.wait.is_some_and(|wait| !wait.is_zero())
    }

    /// The canary of one action. Waiting without a canary is one step in which everything may fail, and the time that
    /// was `waited` for earlier actions is part of its wait.
    fn watch(&self, limit: u32, waited: Duration) -> Canary {
        let canary = Canary::default();
        let wait = self.wait.unwrap_or(canary.step_wait_max);
        match self.is_canary {
            true => canary.failure_ratio_max(self.max_failure_ratio).step_wait_max(wait),
            false => canary.steps([limit]).failure_ratio_max(1.0).step_wait_max(wait.saturating_sub(waited)),
        }
    }
}

fn ratio(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        Ok(_) | Err(_) => Err("expected a number from 0 to 1".to_owned()),
    }
}
