//! Replays and discards poisoned deliveries: first what is meant, then a question, then the act, then what is left.
//!
//! Bounded by `--limit`, the longest poisoned first. Repeating a command does nothing more: what was replayed is no longer poisoned.

use std::ops::ControlFlow;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use wharf::operate::{Canary, CanaryProgress, CanaryStop, DeliveryFilter, DeliverySummary, State};
use wharf::store::Backend;

use crate::confirm::Confirming;
use crate::deliveries::poisoned_table;
use crate::exit::{Exit, Failure};
use crate::filter;
use crate::progress;
use crate::session::Session;

/// Rows that are shown before the question; `--dry-run` shows all.
const SHOWN_MAX: usize = 10;
/// What is left is counted up to this.
const COUNT_MAX: u32 = 10_000;

/// A change of many.
#[derive(Debug, Args)]
pub struct Acting {
    /// All there are, where no filter is given
    #[arg(long = "all")]
    pub is_all: bool,
    /// At most so many
    #[arg(long, value_name = "ROWS", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub limit: u32,
    #[command(flatten)]
    pub confirming: Confirming,
}

/// How a replay is watched.
#[derive(Debug, Args)]
pub struct CanaryArguments {
    /// One, then ten, then the rest in steps; stop when too many of a step fail again
    #[arg(long = "canary")]
    is_canary: bool,
    /// The share of a step that may fail
    #[arg(long, value_name = "RATIO", default_value_t = 0.1, value_parser = ratio, requires = "is_canary")]
    max_failure_ratio: f64,
    /// How long to wait for what becomes of them; with --canary, of each step (default 5m)
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    wait: Option<Duration>,
}

/// The deliveries that an act would take now.
struct MeantDeliveries {
    deliveries: Vec<DeliverySummary>,
    /// Beyond the limit, counted up to a bound.
    beyond: usize,
    is_counted: bool,
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
    let Some(canary) = canary.watch(acting.limit) else {
        let replayed = operator.replay(&filter, acting.limit).await?;
        return meant.tell(session, "replay", replayed, None);
    };
    let bar = progress::of(session.output, Some(meant.deliveries.len() as u64), "replayed");
    let on_look = |progress: &CanaryProgress| {
        bar.set_position(progress.done + progress.failed);
        bar.set_message(format!("{} done, {} failed", progress.done, progress.failed));
        ControlFlow::Continue(())
    };
    let progress = operator.replay_canary(&filter, acting.limit, &canary, on_look).await?;
    bar.finish_and_clear();
    meant.tell(session, "replay", progress.replayed, Some(&progress))
}

pub async fn discard<B: Backend>(
    session: &Session<B>,
    mut filter: DeliveryFilter,
    acting: &Acting,
) -> Result<Exit, Failure> {
    let states = [State::Poisoned, State::Pending];
    let Some(meant) = agreed(session, &mut filter, acting, "discard", &states).await? else { return Ok(Exit::Well) };
    let operator = session.acting(acting.confirming.because.as_ref());
    let discarded = operator.discard(&filter, acting.limit).await?;
    meant.tell(session, "discard", discarded, None)
}

/// What is meant, once it is agreed to; nothing, when there is nothing to do.
async fn agreed<B: Backend>(
    session: &Session<B>,
    filter: &mut DeliveryFilter,
    acting: &Acting,
    verb: &str,
    states: &[State],
) -> Result<Option<MeantDeliveries>, Failure> {
    filter.all = acting.is_all;
    filter::refuse_empty(filter)?;
    acting.confirming.check()?;
    let meant = MeantDeliveries::find(session, filter, acting.limit, states).await?;
    let output = session.output;
    let count = meant.deliveries.len();
    if acting.confirming.is_dry_run || count == 0 {
        match output.is_json {
            true => output.document(&json!({
                "action": verb, "dry_run": acting.confirming.is_dry_run, "meant": count, "remaining": meant.beyond, "deliveries": meant.deliveries,
            }))?,
            false if count == 0 => output.line(format!("there is nothing to {verb}"))?,
            false => {
                poisoned_table(output, &meant.deliveries)?;
                output.line(format!("would {verb} {count}; {} more remain", meant.left(meant.beyond)))?;
            }
        }
        return Ok(None);
    }
    if !output.is_json {
        poisoned_table(output, &meant.deliveries[..count.min(SHOWN_MAX)])?;
        if count > SHOWN_MAX {
            output.line(format!("… and {} more", count - SHOWN_MAX))?;
        }
    }
    acting.confirming.ask(&format!("{verb} {count} deliveries?"))?;
    Ok(Some(meant))
}

impl MeantDeliveries {
    async fn find<B: Backend>(
        session: &Session<B>,
        filter: &DeliveryFilter,
        limit: u32,
        states: &[State],
    ) -> Result<Self, Failure> {
        // By its message also what is not poisoned is meant, and they are few.
        let state = if filter.message_id.is_some() { None } else { Some(State::Poisoned) };
        let rows_max = limit.max(COUNT_MAX).saturating_add(1);
        let mut deliveries = session.operator().deliveries(filter, state, rows_max).await?;
        let is_counted = deliveries.len() < rows_max as usize;
        deliveries.retain(|one| states.contains(&one.state));
        let beyond = deliveries.len().saturating_sub(limit as usize);
        deliveries.truncate(limit as usize);
        Ok(Self { deliveries, beyond, is_counted })
    }

    fn left(&self, left: usize) -> String {
        format!("{left}{}", if self.is_counted { "" } else { " or more" })
    }

    fn tell<B: Backend>(
        &self,
        session: &Session<B>,
        verb: &str,
        affected: u64,
        watched: Option<&CanaryProgress>,
    ) -> Result<Exit, Failure> {
        let affected = usize::try_from(affected).unwrap_or(usize::MAX);
        let left = (self.deliveries.len() + self.beyond).saturating_sub(affected);
        let stopped = watched.and_then(|progress| progress.stopped);
        let has_failed = watched.is_some_and(|progress| progress.failed > 0);
        let exit = if left > 0 || stopped.is_some() || has_failed { Exit::Partly } else { Exit::Well };
        if session.output.is_json {
            let mut told = json!({
                "action": verb, "dry_run": false, "meant": self.deliveries.len(), "affected": affected, "remaining": left,
            });
            if let Some(progress) = watched {
                told["done"] = progress.done.into();
                told["failed"] = progress.failed.into();
                told["stopped"] = json!(stopped);
            }
            session.output.document(&told)?;
            return Ok(exit);
        }
        session.output.line(format!("{verb}: {affected} deliveries"))?;
        if let Some(CanaryProgress { replayed, done, failed, .. }) = watched {
            let waiting = replayed - done - failed;
            session.output.line(format!("{done} done, {failed} failed again, {waiting} not run yet"))?;
        }
        match stopped {
            Some(CanaryStop::Failures) => {
                session.output.line("stopped: too many failed again; the rest was not touched")?;
            }
            Some(CanaryStop::Waited) => session.output.line("waited no longer: does a process run the handler?")?,
            Some(_) | None => {}
        }
        if left > 0 {
            session.output.line(format!("{} more remain", self.left(left)))?;
        }
        Ok(exit)
    }
}

impl CanaryArguments {
    /// How to watch, if at all. To wait without a canary is one step that may fail.
    fn watch(&self, limit: u32) -> Option<Canary> {
        let step_wait_max = self.wait.unwrap_or(Canary::default().step_wait_max);
        match (self.is_canary, self.wait) {
            (true, _) => Some(Canary::default().failure_ratio_max(self.max_failure_ratio).step_wait_max(step_wait_max)),
            (false, None | Some(Duration::ZERO)) => None,
            (false, Some(_)) => {
                Some(Canary::default().steps(vec![limit]).failure_ratio_max(1.0).step_wait_max(step_wait_max))
            }
        }
    }
}

fn ratio(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        Ok(_) | Err(_) => Err("a number from 0 to 1".to_owned()),
    }
}
