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
use crate::meant::{Meant, rows_to_read};
use crate::progress;
use crate::session::Session;

/// How many rows are shown before the confirmation. `--dry-run` shows all.
const SHOWN_MAX: usize = 10;

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
    let Some(meant) = agreed(session, &mut filter, acting, "replay", &states).await? else { return Ok(Exit::Well) };
    let operator = session.acting(acting.confirming.because.as_ref());
    if canary.is_watching() {
        return replay_watched(session, &filter, &meant, &operator, canary).await;
    }
    let mut replayed = 0;
    for (filter, limit) in actions(&filter, &meant) {
        match operator.replay(&filter, limit).await {
            Ok(changed) => replayed += changed,
            Err(error) => return ended_by(error, session, &meant, "replay", replayed, None),
        }
    }
    report(session, &meant, "replay", replayed, None)
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
            return ended_by(error, session, meant, "replay", progress.replayed, Some(&progress));
        }
        if canary.is_canary && progress.stopped.is_some() {
            break;
        }
    }
    bar.finish_and_clear();
    report(session, meant, "replay", progress.replayed, Some(&progress))
}

pub async fn discard<B: Backend>(
    session: &Session<B>,
    mut filter: DeliveryFilter,
    acting: &Acting,
) -> Result<Exit, Failure> {
    let states = [State::Poisoned, State::Pending];
    let Some(meant) = agreed(session, &mut filter, acting, "discard", &states).await? else { return Ok(Exit::Well) };
    let operator = session.acting(acting.confirming.because.as_ref());
    let mut discarded = 0;
    for (filter, limit) in actions(&filter, &meant) {
        match operator.discard(&filter, limit).await {
            Ok(changed) => discarded += changed,
            Err(error) => return ended_by(error, session, &meant, "discard", discarded, None),
        }
    }
    report(session, &meant, "discard", discarded, None)
}

/// Says what was changed before the error, if anything was.
fn ended_by<B: Backend>(
    error: wharf::Error,
    session: &Session<B>,
    meant: &Meant<DeliverySummary>,
    verb: &str,
    affected: u64,
    watched: Option<&CanaryProgress>,
) -> Result<Exit, Failure> {
    if affected > 0 {
        report(session, meant, verb, affected, watched)?;
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
    verb: &str,
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
    let count = meant.rows.len();
    if acting.confirming.is_dry_run || count == 0 {
        match output.is_json {
            true => output.document(&json!({
                "action": verb, "dry_run": acting.confirming.is_dry_run, "meant": count, "remaining": meant.beyond, "deliveries": meant.rows,
            }))?,
            false if count == 0 => output.line(format!("there is nothing to {verb}"))?,
            false => {
                poisoned_table(output, &meant.rows)?;
                output.line(format!("would {verb} {count}; {}", meant.remain(meant.beyond)))?;
            }
        }
        return Ok(None);
    }
    if !output.is_json {
        poisoned_table(output, &meant.rows[..count.min(SHOWN_MAX)])?;
        if count > SHOWN_MAX {
            output.line(format!("… and {} more", count - SHOWN_MAX))?;
        }
    }
    acting.confirming.ask(&format!("{verb} {count} deliveries?"))?;
    Ok(Some(meant))
}

/// Says what the action has changed, and what remains.
fn report<B: Backend>(
    session: &Session<B>,
    meant: &Meant<DeliverySummary>,
    verb: &str,
    affected: u64,
    watched: Option<&CanaryProgress>,
) -> Result<Exit, Failure> {
    let affected = usize::try_from(affected).unwrap_or(usize::MAX);
    let left = (meant.rows.len() + meant.beyond).saturating_sub(affected);
    let stopped = watched.and_then(|progress| progress.stopped);
    let has_failed = watched.is_some_and(|progress| progress.failed > 0);
    let exit = if left > 0 || stopped.is_some() || has_failed { Exit::Partly } else { Exit::Well };
    if session.output.is_json {
        let mut report = json!({
            "action": verb, "dry_run": false, "meant": meant.rows.len(), "affected": affected, "remaining": left,
        });
        if let Some(progress) = watched {
            report["done"] = progress.done.into();
            report["failed"] = progress.failed.into();
            report["stopped"] = json!(stopped);
        }
        session.output.document(&report)?;
        return Ok(exit);
    }
    session.output.line(format!("{verb}: {affected} deliveries"))?;
    if let Some(CanaryProgress { replayed, done, failed, .. }) = watched {
        let waiting = replayed - done - failed;
        session.output.line(format!("{done} done, {failed} failed again, {waiting} not run yet"))?;
    }
    match stopped {
        Some(CanaryStop::Failures) => {
            session.output.line("stopped: too many failed again; the rest was not changed")?;
        }
        Some(CanaryStop::Waited) => session.output.line("stopped waiting: does a process run the handler?")?,
        Some(_) | None => {}
    }
    if left > 0 {
        session.output.line(meant.remain(left))?;
    }
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
