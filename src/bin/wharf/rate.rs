//! `handlers rate`: shows or changes how many deliveries of a handler start per second, over all processes.

use clap::Args;
use serde_json::json;
use wharf::flow::RateLimit;
use wharf::operate::HandlerStatus;
use wharf::store::Backend;

use crate::confirm::Confirming;
use crate::exit::{Exit, Failure};
use crate::session::Session;

#[derive(Debug, Args)]
pub struct RateArguments {
    /// The handler's key
    key: String,
    /// The maximum number of starts per second; overrides the registration
    #[arg(long, value_name = "STARTS", value_parser = clap::value_parser!(u32).range(1..=1_000_000), groups = ["change", "limit"])]
    per_sec: Option<u32>,
    /// The maximum number of starts per minute; overrides the registration
    #[arg(long, value_name = "STARTS", value_parser = clap::value_parser!(u32).range(1..=1_000_000), groups = ["change", "limit"])]
    per_min: Option<u32>,
    /// The maximum number of starts per hour; overrides the registration
    #[arg(long, value_name = "STARTS", value_parser = clap::value_parser!(u32).range(1..=1_000_000), groups = ["change", "limit"])]
    per_hour: Option<u32>,
    /// How many deliveries may start at once, with one of the three above; without it, as many as one second allows
    #[arg(long, value_name = "STARTS", value_parser = clap::value_parser!(u32).range(1..=1_000_000), requires = "limit")]
    burst: Option<u32>,
    /// Remove the limit; overrides the registration
    #[arg(long, group = "change")]
    no_limit: bool,
    /// Restore the limit of the registration
    #[arg(long, group = "change")]
    as_registered: bool,
    #[command(flatten)]
    confirming: Confirming,
}

enum Change {
    Limit(RateLimit),
    Lift,
    Reset,
}

impl RateArguments {
    fn change(&self) -> Option<Change> {
        let per_sec = self.per_sec.map(RateLimit::per_second);
        let limit = per_sec.or(self.per_min.map(RateLimit::per_minute)).or(self.per_hour.map(RateLimit::per_hour));
        match limit {
            Some(limit) => Some(Change::Limit(self.burst.map_or(limit, |burst| limit.burst(burst)))),
            None if self.no_limit => Some(Change::Lift),
            None if self.as_registered => Some(Change::Reset),
            None => None,
        }
    }
}

/// Shows the limit, and changes it if an option asks for it.
pub async fn rate<B: Backend>(session: &Session<B>, arguments: &RateArguments) -> Result<Exit, Failure> {
    let (key, confirming) = (&arguments.key, &arguments.confirming);
    let change = arguments.change();
    if change.is_some() {
        confirming.check()?;
    }
    let before = status(session, key).await?;
    let mut is_changed = false;
    if let Some(change) = change.filter(|_| !confirming.is_dry_run) {
        confirming.ask(&format!("change the rate limit of this handler, currently {}?", rate_text(&before)))?;
        let operator = session.acting(confirming.because.as_ref());
        is_changed = match change {
            Change::Limit(limit) => operator.limit_rate(key, limit).await?,
            Change::Lift => operator.lift_rate(key).await?,
            Change::Reset => operator.reset_rate(key).await?,
        };
    }
    let now = status(session, key).await?;
    match session.output.is_json {
        true => session.output.document(&json!({
            "action": "rate", "handler_key": now.handler_key, "dry_run": confirming.is_dry_run, "affected": u8::from(is_changed),
            "rate_per_sec": now.rate_per_sec, "burst": now.rate_burst, "is_rate_set": now.is_rate_set,
        }))?,
        false => session.output.line(format!("{}: {}", now.handler_key, rate_text(&now)))?,
    }
    Ok(Exit::Well)
}

async fn status<B: Backend>(session: &Session<B>, key: &str) -> Result<HandlerStatus, Failure> {
    let handlers = session.operator().handlers().await?;
    let known: Vec<String> = handlers.iter().map(|handler| handler.handler_key.clone()).collect();
    let is_it =
        |handler: &HandlerStatus| handler.handler_key == key || handler.former_keys.iter().any(|former| former == key);
    let found = handlers.into_iter().find(is_it);
    found.ok_or_else(|| Failure::usage(format!("unknown handler key {key:?}; known keys: {}", known.join(", "))))
}

fn rate_text(handler: &HandlerStatus) -> String {
    let by = if handler.is_rate_set { ", set by an operator" } else { "" };
    match (handler.rate_per_sec, handler.rate_burst) {
        (Some(per_sec), Some(burst)) => format!("{}, {burst} at once{by}", starts(per_sec)),
        _ => format!("no limit{by}"),
    }
}

/// The starts in the shortest unit that allows one, so that a low limit is not shown as zero.
fn starts(per_sec: f64) -> String {
    let (starts, unit) = match per_sec {
        often if often >= 1.0 => (often, "second"),
        sometimes if sometimes * 60.0 >= 1.0 => (sometimes * 60.0, "minute"),
        rarely => (rarely * 3_600.0, "hour"),
    };
    // The database keeps the time between two starts in whole microseconds, hence the rounding.
    format!("{} per {unit}", (starts * 1_000.0).round() / 1_000.0)
}
