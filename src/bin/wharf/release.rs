//! `deliveries release`: revokes the claim of a stuck run. It shows the run, asks for confirmation, and revokes that
//! run or nothing.

use clap::Args;
use serde_json::json;
use wharf::operate::{DeliverySummary, State};
use wharf::store::Backend;

use crate::confirm::Confirming;
use crate::deliveries::{self, Which};
use crate::exit::{Exit, Failure};
use crate::session::Session;

#[derive(Debug, Args)]
pub struct ReleaseArguments {
    #[command(flatten)]
    which: Which,
    /// The attempt to release, as `show` numbers attempts; without it, the one shown before the confirmation
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(i32).range(1..))]
    attempt: Option<i32>,
    #[command(flatten)]
    confirming: Confirming,
}

pub async fn release<B: Backend>(session: &Session<B>, arguments: &ReleaseArguments) -> Result<Exit, Failure> {
    let ReleaseArguments { which, attempt, confirming } = arguments;
    confirming.check()?;
    let running = session.operator().deliveries(&which.filter(), Some(State::Running), 100).await?;
    let Some(run) = deliveries::only(running)? else {
        return Err(Failure::problem("it is not running: nothing was done"));
    };
    if let Some(meant) = attempt.filter(|attempt| *attempt != run.attempts) {
        let text = format!("attempt {meant} is not running, attempt {} is: nothing was done", run.attempts);
        return Err(Failure::problem(text));
    }
    if confirming.is_dry_run {
        return would(session, &run);
    }
    if !session.output.is_json {
        deliveries::any_table(session.output, std::slice::from_ref(&run))?;
    }
    confirming.ask(&format!("release attempt {}?", run.attempts))?;
    let is_released = session.acting(confirming.because.as_ref()).release(&run).await?;
    match (is_released, session.output.is_json) {
        (false, _) => Err(Failure::problem("that run has just ended: nothing was done")),
        (true, true) => {
            let report = json!({ "action": "release", "dry_run": false, "attempt": run.attempts, "affected": 1 });
            session.output.document(&report)?;
            Ok(Exit::Well)
        }
        (true, false) => {
            session.output.line(format!("released attempt {}: the delivery is due now", run.attempts))?;
            Ok(Exit::Well)
        }
    }
}

fn would<B: Backend>(session: &Session<B>, run: &DeliverySummary) -> Result<Exit, Failure> {
    match session.output.is_json {
        true => session.output.document(&json!({
            "action": "release", "dry_run": true, "attempt": run.attempts, "meant": 1, "deliveries": [run],
        }))?,
        false => {
            deliveries::any_table(session.output, std::slice::from_ref(run))?;
            session.output.line(format!("would release attempt {}", run.attempts))?;
        }
    }
    Ok(Exit::Well)
}
