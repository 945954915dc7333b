//! `cleanup`: purges from cron instead of in the service, in bounded steps with pauses.
//!
//! It removes finished work; poisoned deliveries and quarantined records only if their expiry is given. One process
//! purges at a time: when another one is purging, the command says so and ends.

use std::io::{self, Write as _};
use std::time::Duration;

use clap::Args;
use serde_json::json;
use wharf::Retention;
use wharf::operate::{Purgeable, Purged};
use wharf::store::Backend;

use crate::confirm::Confirming;
use crate::exit::{Exit, Failure};
use crate::progress;
use crate::session::Session;

#[derive(Debug, Args)]
pub struct CleanupArguments {
    /// Purge messages whose deliveries have all been done or discarded for this long, e.g. 30d
    #[arg(long, value_name = "AGE", value_parser = humantime::parse_duration)]
    older_than: Duration,
    /// Use another age for one handler, KEY=AGE; can be repeated
    #[arg(long = "for-handler", value_name = "KEY=AGE", value_parser = of_handler)]
    of_handlers: Vec<(String, Duration)>,
    /// Keep the identities of purged messages for this long, so that a late redelivery is still a duplicate
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    keep_identities: Option<Duration>,
    /// Purge deliveries that have been poisoned for this long; without it they are kept
    #[arg(long, value_name = "AGE", value_parser = humantime::parse_duration)]
    expire_poisoned: Option<Duration>,
    /// Purge records that have been in quarantine for this long; without it they are kept
    #[arg(long, value_name = "AGE", value_parser = humantime::parse_duration)]
    expire_quarantined: Option<Duration>,
    /// How many messages one transaction examines
    #[arg(long, value_name = "ROWS", default_value_t = 1_000)]
    batch: usize,
    #[command(flatten)]
    confirming: Confirming,
}

pub async fn run<B: Backend>(session: &Session<B>, arguments: &CleanupArguments) -> Result<Exit, Failure> {
    let (output, confirming) = (session.output, &arguments.confirming);
    confirming.check()?;
    let retention = arguments.retention();
    // Counting examines every message that is old enough, so a job with --yes does not count.
    let total = if confirming.is_dry_run || !confirming.is_yes {
        let purgeable = session.store.purgeable(&retention).await?;
        if confirming.is_dry_run {
            return report_purgeable(session, &purgeable);
        }
        confirming.ask(&question(&purgeable))?;
        Some(purgeable.messages)
    } else {
        None
    };
    let bar = progress::of(output, total, "purged");
    // The progress bar is shown on a terminal only. A log gets one line.
    let mut is_told = !bar.is_hidden() || output.is_json;
    let on_step = |purged: &Purged| {
        if purged.waiting() > 0 && !std::mem::replace(&mut is_told, true) {
            // The line is only information, so an error of stderr is ignored.
            let _ = writeln!(io::stderr(), "identities are written; their messages are removed in about two minutes");
        }
        bar.set_position(purged.messages);
        bar.set_message(waiting(purged));
    };
    let purged = session.acting(confirming.because.as_ref()).purge(&retention, on_step).await?;
    bar.finish_and_clear();
    match output.is_json {
        true => output.document(&json!({
            "action": "cleanup", "dry_run": false, "messages": purged.messages, "deliveries": purged.deliveries,
            "identities_kept": purged.identities_kept, "identities_forgotten": purged.identities_forgotten,
            "quarantined": purged.quarantined,
            "is_locked_out": purged.is_locked_out(),
        }))?,
        false => output.line(format!("cleanup: {purged}"))?,
    }
    Ok(if purged.is_locked_out() { Exit::Partly } else { Exit::Well })
}

/// Explains why no message is removed for a while.
fn waiting(purged: &Purged) -> String {
    match purged.waiting() {
        0 => String::new(),
        written => format!(
            "({written} identities written; their messages are removed in about two minutes, when no accept that may have missed one is running)"
        ),
    }
}

/// Includes the number of quarantined records, because otherwise only people delete them.
fn question(purgeable: &Purgeable) -> String {
    match purgeable.quarantined {
        0 => format!("purge {} messages?", purgeable.messages),
        records => {
            format!("purge {} messages, and {records} quarantined records with their payloads?", purgeable.messages)
        }
    }
}

fn report_purgeable<B: Backend>(session: &Session<B>, purgeable: &Purgeable) -> Result<Exit, Failure> {
    let Purgeable { messages, deliveries, identities, quarantined, .. } = purgeable;
    match session.output.is_json {
        true => session.output.document(&json!({
            "action": "cleanup", "dry_run": true, "messages": messages, "deliveries": deliveries, "identities_forgotten": identities,
            "quarantined": quarantined,
        }))?,
        false => {
            session.output.line(format!(
                "would purge {messages} messages with {deliveries} deliveries, and delete {identities} expired identities"
            ))?;
            if *quarantined > 0 {
                session.output.line(format!("would purge {quarantined} quarantined records with their payloads"))?;
            }
        }
    }
    Ok(Exit::Well)
}

impl CleanupArguments {
    fn retention(&self) -> Retention {
        let retention = Retention::after(self.older_than).batch_rows(self.batch);
        let of_handlers = self.of_handlers.iter().cloned();
        let retention = of_handlers.fold(retention, |retention, (key, age)| retention.for_handler(key, age));
        let retention = self.keep_identities.into_iter().fold(retention, Retention::keep_identities);
        let retention = self.expire_poisoned.into_iter().fold(retention, Retention::expire_poisoned);
        self.expire_quarantined.into_iter().fold(retention, Retention::expire_quarantined)
    }
}

fn of_handler(text: &str) -> Result<(String, Duration), String> {
    let (key, age) = text.split_once('=').ok_or("expected KEY=AGE")?;
    Ok((key.to_owned(), humantime::parse_duration(age).map_err(|error| error.to_string())?))
}
