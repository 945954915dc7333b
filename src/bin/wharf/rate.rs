//! `handlers rate`: shows or changes how many deliveries of a handler start per second, over all processes.

use clap::Args;
use serde_json::{Value, json};
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
    Limit { per_sec: f64, burst: u32, limit: RateLimit },
    Lift,
    Reset,
}

impl RateArguments {
    fn change(&self) -> Option<Change> {
        let of = |starts: Option<u32>, period_secs: u32, limit: fn(u32) -> RateLimit| {
            starts.map(|starts| {
                let burst = self.burst.unwrap_or((starts / period_secs).max(1));
                let per_sec = f64::from(starts) / f64::from(period_secs);
                Change::Limit { per_sec, burst, limit: limit(starts).burst(burst) }
            })
        };
        let per_sec = of(self.per_sec, 1, RateLimit::per_second);
        let per_min = of(self.per_min, 60, RateLimit::per_minute);
        let per_hour = of(self.per_hour, 3_600, RateLimit::per_hour);
        match per_sec.or(per_min).or(per_hour) {
            Some(limit) => Some(limit),
            None if self.no_limit => Some(Change::Lift),
            None if self.as_registered => Some(Change::Reset),
            None => None,
        }
    }
}

impl Change {
    /// The limit after the change. That of the registration is not known here.
    fn text(&self) -> String {
        match self {
            Self::Limit { per_sec, burst, .. } => limit_text(Some(*per_sec), Some(*burst)),
            Self::Lift => limit_text(None, None),
            Self::Reset => "the limit of the registration".to_owned(),
        }
    }

    fn document(&self) -> Value {
        match self {
            Self::Limit { per_sec, burst, .. } => {
                json!({ "rate_per_sec": per_sec, "burst": burst, "is_rate_set": true })
            }
            Self::Lift => json!({ "rate_per_sec": null, "burst": null, "is_rate_set": true }),
            Self::Reset => json!({ "is_rate_set": false }),
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
    let old = limit_text(before.rate_per_sec, before.rate_burst);
    let from_to = change.as_ref().map(|change| format!("from {old} to {}", change.text()));
    let wanted = change.as_ref().map(Change::document);
    let mut is_changed = false;
    if let (Some(change), Some(from_to), false) = (change, &from_to, confirming.is_dry_run) {
        confirming.ask(&format!("change the rate limit of this handler {from_to}?"))?;
        let operator = session.acting(confirming.because.as_ref());
        is_changed = match change {
            Change::Limit { limit, .. } => operator.limit_rate(key, limit).await?,
            Change::Lift => operator.lift_rate(key).await?,
            Change::Reset => operator.reset_rate(key).await?,
        };
    }
    let now = status(session, key).await?;
    match (session.output.is_json, from_to) {
        (true, _) => session.output.document(&json!({
            "action": "rate", "handler_key": now.handler_key, "dry_run": confirming.is_dry_run, "affected": u8::from(is_changed),
            "rate_per_sec": now.rate_per_sec, "burst": now.rate_burst, "is_rate_set": now.is_rate_set, "wanted": wanted,
        }))?,
        (false, Some(from_to)) if confirming.is_dry_run => {
            session.output.line(format!("would change {} {from_to}", now.handler_key))?;
        }
        (false, _) => {
            let by = if now.is_rate_set { ", set by an operator" } else { "" };
            let limit = limit_text(now.rate_per_sec, now.rate_burst);
            session.output.line(format!("{}: {limit}{by}", now.handler_key))?;
        }
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

fn limit_text(per_sec: Option<f64>, burst: Option<u32>) -> String {
    match (per_sec, burst) {
        (Some(per_sec), Some(burst)) => format!("{}, {burst} at once", starts(per_sec)),
        _ => "no limit".to_owned(),
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
