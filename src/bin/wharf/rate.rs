//! `handlers rate`: how many deliveries of a handler start in a second, over all processes.

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
    /// Its key
    key: String,
    /// So many starts a second, whatever the registration says
    #[arg(long, value_name = "STARTS", value_parser = clap::value_parser!(u32).range(1..=1_000_000), group = "change")]
    per_sec: Option<u32>,
    /// So many starts a minute
    #[arg(long, value_name = "STARTS", value_parser = clap::value_parser!(u32).range(1..=1_000_000), group = "change")]
    per_min: Option<u32>,
    /// So many at once at the most; without it, what a second allows
    #[arg(long, value_name = "STARTS", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    burst: Option<u32>,
    /// No limit, whatever the registration says
    #[arg(long, group = "change")]
    no_limit: bool,
    /// What the registration says
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
        let limit = self.per_sec.map(RateLimit::per_second).or(self.per_min.map(RateLimit::per_minute));
        match limit {
            Some(limit) => Some(Change::Limit(self.burst.map_or(limit, |burst| limit.burst(burst)))),
            None if self.no_limit => Some(Change::Lift),
            None if self.as_registered => Some(Change::Reset),
            None => None,
        }
    }
}

/// Shows the limit; changes it where that is asked for.
pub async fn rate<B: Backend>(session: &Session<B>, arguments: &RateArguments) -> Result<Exit, Failure> {
    let (key, confirming) = (&arguments.key, &arguments.confirming);
    let change = arguments.change();
    if change.is_some() {
        confirming.check()?;
    }
    let before = look(session, key).await?;
    let mut is_changed = false;
    if let Some(change) = change.filter(|_| !confirming.is_dry_run) {
        confirming.ask(&format!("change the rate limit of this handler, which is now {}?", told(&before)))?;
        let operator = session.acting(confirming.because.as_ref());
        is_changed = match change {
            Change::Limit(limit) => operator.limit_rate(key, limit).await?,
            Change::Lift => operator.lift_rate(key).await?,
            Change::Reset => operator.reset_rate(key).await?,
        };
    }
    let now = look(session, key).await?;
    match session.output.is_json {
        true => session.output.document(&json!({
            "action": "rate", "handler_key": now.handler_key, "dry_run": confirming.is_dry_run, "affected": u8::from(is_changed),
            "rate_per_sec": now.rate_per_sec, "burst": now.rate_burst, "is_rate_set": now.is_rate_set,
        }))?,
        false => session.output.line(format!("{}: {}", now.handler_key, told(&now)))?,
    }
    Ok(Exit::Well)
}

async fn look<B: Backend>(session: &Session<B>, key: &str) -> Result<HandlerStatus, Failure> {
    let handlers = session.operator().handlers().await?;
    let known: Vec<String> = handlers.iter().map(|handler| handler.handler_key.clone()).collect();
    let is_it =
        |handler: &HandlerStatus| handler.handler_key == key || handler.former_keys.iter().any(|former| former == key);
    let found = handlers.into_iter().find(is_it);
    found.ok_or_else(|| Failure::usage(format!("there is no handler key {key:?}; there are: {}", known.join(", "))))
}

fn told(handler: &HandlerStatus) -> String {
    let by = if handler.is_rate_set { ", as a person has set it" } else { "" };
    match (handler.rate_per_sec, handler.rate_burst) {
        (Some(per_sec), Some(burst)) => {
            format!("{} a second, {burst} at once{by}", (per_sec * 1000.0).round() / 1000.0)
        }
        _ => format!("no limit{by}"),
    }
}
