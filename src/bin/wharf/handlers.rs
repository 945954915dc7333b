//! `handlers`: lists handlers and the order keys on which deliveries wait for an earlier one, pauses and resumes
//! handlers, backfills old messages, and compares a build's keys with the stored ones.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Subcommand;
use serde_json::json;
use wharf::operate::{Backfill, HandlerStatus, HeldKey, KeyChange, Manifest, PlannedHandler, State};
use wharf::store::Backend;

use crate::confirm::Confirming;
use crate::exit::{Exit, Failure};
use crate::output::{Cell, Output, Tone, cell, counted, number, text, word};
use crate::progress;
use crate::rate::{RateArguments, rate};
use crate::record::PayloadOption;
use crate::session::Session;
use crate::when;

/// The library stops counting the deliveries behind a key here.
const BEHIND_MAX: u64 = 1_000;

#[derive(Debug, Subcommand)]
pub enum HandlersCommand {
    /// List every handler with its former keys
    List,
    /// Stop claiming deliveries of a handler in all processes; runs in progress finish
    Pause {
        /// The handler's key
        key: String,
        #[command(flatten)]
        confirming: Confirming,
    },
    /// Claim deliveries of a handler again
    Resume {
        /// The handler's key
        key: String,
        #[command(flatten)]
        confirming: Confirming,
    },
    /// Stop claiming deliveries of a handler in all processes, except for one at a time as a probe; a successful probe
    /// closes the breaker
    OpenBreaker {
        /// The handler's key
        key: String,
        #[command(flatten)]
        confirming: Confirming,
    },
    /// Claim deliveries of a handler again, without waiting for a probe
    CloseBreaker {
        /// The handler's key
        key: String,
        #[command(flatten)]
        confirming: Confirming,
    },
    /// Show or change the rate limit of a handler across all processes, while they run
    Rate(RateArguments),
    /// List the order keys on which deliveries wait for an earlier one, each with the delivery that blocks it
    Keys {
        /// The handler's key
        key: String,
        /// The maximum number of rows
        #[arg(long, default_value_t = 50)]
        limit: u32,
        #[command(flatten)]
        payload: PayloadOption,
    },
    /// Compare a build's keys with the stored ones. Exit code 1 if deliveries would be abandoned or run again
    RenamePlan {
        /// The build's manifest: `inbox.manifest()` as JSON; use - for stdin
        #[arg(long, value_name = "FILE")]
        manifest: PathBuf,
        /// A key that is removed and not renamed to a new one; can be repeated
        #[arg(long, value_name = "KEY")]
        removed: Vec<String>,
    },
    /// Create deliveries for messages that were accepted before the handler was registered
    Backfill {
        /// The handler's key
        key: String,
        /// A topic whose messages the handler gets; can be repeated
        #[arg(long = "topic", value_name = "TOPIC", required = true)]
        topics: Vec<String>,
        /// Only messages accepted within this time; without it, all retained messages
        #[arg(long, value_name = "AGE", value_parser = humantime::parse_duration)]
        since: Option<Duration>,
        /// The maximum number of deliveries created per second
        #[arg(long, value_name = "ROWS", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..))]
        rows_per_sec: u32,
        /// Do not ask for confirmation
        #[arg(long = "yes", short = 'y')]
        is_yes: bool,
        /// The reason, for the audit
        #[arg(long, value_name = "TEXT")]
        because: Option<String>,
    },
}

pub async fn run<B: Backend>(session: &Session<B>, command: HandlersCommand) -> Result<Exit, Failure> {
    match command {
        HandlersCommand::List => list(session).await,
        HandlersCommand::Keys { key, limit, payload } => keys(session, &key, limit, payload).await,
        HandlersCommand::Pause { key, confirming } => change(session, &key, &confirming, Change::Pause).await,
        HandlersCommand::Resume { key, confirming } => change(session, &key, &confirming, Change::Resume).await,
        HandlersCommand::OpenBreaker { key, confirming } => {
            change(session, &key, &confirming, Change::OpenBreaker).await
        }
        HandlersCommand::CloseBreaker { key, confirming } => {
            change(session, &key, &confirming, Change::CloseBreaker).await
        }
        HandlersCommand::Rate(arguments) => rate(session, &arguments).await,
        HandlersCommand::RenamePlan { manifest, removed } => rename_plan(session, &manifest, &removed).await,
        HandlersCommand::Backfill { key, topics, since, rows_per_sec, is_yes, because } => {
            let confirming = Confirming { is_dry_run: false, is_yes, because };
            let mut backfill_of = Backfill::new(key, topics).rows_per_sec_max(rows_per_sec);
            backfill_of.newer_than = since;
            backfill(session, &backfill_of, &confirming).await
        }
    }
}

async fn list<B: Backend>(session: &Session<B>) -> Result<Exit, Failure> {
    let handlers = session.operator().handlers().await?;
    if session.output.is_json {
        session.output.document(&handlers)?;
        return Ok(Exit::Well);
    }
    let columns =
        [text("HANDLER"), text("FORMERLY"), word("STATE"), number("PROCESSES"), number("OPEN"), number("POISONED")];
    let row = |handler: &HandlerStatus| {
        let formerly = handler.former_keys.join(", ");
        vec![
            cell(&handler.handler_key),
            cell(if formerly.is_empty() { "-" } else { &formerly }),
            state(handler),
            cell(handler.processors),
            counted(handler.due + handler.later + handler.held + handler.running),
            Cell::count(handler.poisoned, Tone::Problem),
        ]
    };
    match handlers.is_empty() {
        true => session.output.line("none: no process has registered a handler yet")?,
        false => session.output.table(&columns, handlers.iter().map(row).collect())?,
    }
    Ok(Exit::Well)
}

async fn keys<B: Backend>(
    session: &Session<B>,
    key: &str,
    limit: u32,
    payload: PayloadOption,
) -> Result<Exit, Failure> {
    let mut keys = session.operator().held_keys(key, limit).await?;
    if !payload.is_shown {
        keys.iter_mut().for_each(|held| held.record_key = None);
    }
    if session.output.is_json {
        session.output.document(&keys)?;
        return Ok(Exit::Well);
    }
    let columns = [text("BLOCKED BY"), word("STATE"), number("BEHIND"), word("SINCE"), text("REASON")];
    let record_key = payload.is_shown.then(|| text("RECORD KEY"));
    let columns: Vec<_> = columns.into_iter().chain(record_key).collect();
    let row = |held: &HeldKey| {
        let tone = if held.state == Some(State::Poisoned) { Tone::Problem } else { Tone::Plain };
        let mut row = vec![
            cell(held.message_id.as_deref().unwrap_or("-")),
            cell(held.state.map_or("-", State::as_str)).toned(tone),
            cell(if held.behind >= BEHIND_MAX { format!("{BEHIND_MAX}+") } else { held.behind.to_string() }),
            cell(held.held_since.map_or_else(|| "-".to_owned(), when::age)),
            cell(held.reason.as_deref().unwrap_or("-")),
        ];
        row.extend(payload.is_shown.then(|| cell(held.record_key.as_deref().unwrap_or("-"))));
        row
    };
    match keys.is_empty() {
        true => session.output.line("none: no delivery waits for an earlier one of its order key")?,
        false => session.output.table(&columns, keys.iter().map(row).collect())?,
    }
    Ok(Exit::Well)
}

/// Whether processes claim deliveries of the handler. `offline` means that no live process has the handler.
pub fn state(handler: &HandlerStatus) -> Cell {
    match (handler.paused_at, handler.breaker_opened_at, handler.processors) {
        (Some(since), _, _) => cell(format!("paused {}", when::age(since))).toned(Tone::Warning),
        (None, Some(since), _) => cell(format!("breaker open {}", when::age(since))).toned(Tone::Problem),
        (None, None, 0) => cell("offline").toned(Tone::Warning),
        (None, None, _) => cell("active"),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Pause,
    Resume,
    OpenBreaker,
    CloseBreaker,
}

impl Change {
    fn verb(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::OpenBreaker => "open the breaker of",
            Self::CloseBreaker => "close the breaker of",
        }
    }

    /// The state in which the change has no effect, as the end of a sentence about the handler.
    fn already(self) -> &'static str {
        match self {
            Self::Pause => "is paused already",
            Self::Resume => "is not paused",
            Self::OpenBreaker => "has an open breaker already",
            Self::CloseBreaker => "has no open breaker",
        }
    }

    /// Whether the change would have an effect.
    fn is_needed(self, handler: &HandlerStatus) -> bool {
        match self {
            Self::Pause => handler.paused_at.is_none(),
            Self::Resume => handler.paused_at.is_some(),
            Self::OpenBreaker => handler.breaker_opened_at.is_none(),
            Self::CloseBreaker => handler.breaker_opened_at.is_some(),
        }
    }
}

async fn change<B: Backend>(
    session: &Session<B>,
    key: &str,
    confirming: &Confirming,
    change: Change,
) -> Result<Exit, Failure> {
    confirming.check()?;
    let verb = change.verb();
    let handlers = session.operator().handlers().await?;
    let is_it =
        |handler: &&HandlerStatus| handler.handler_key == key || handler.former_keys.iter().any(|former| former == key);
    let Some(handler) = handlers.iter().find(is_it) else {
        let known: Vec<&str> = handlers.iter().map(|handler| handler.handler_key.as_str()).collect();
        return Err(Failure::usage(format!("unknown handler key {key:?}; known keys: {}", known.join(", "))));
    };
    let is_changing = change.is_needed(handler);
    // What the doctor counts as waiting for a handler that is paused or has an open breaker.
    let open = handler.due + handler.later + handler.held;
    let waiting = if open >= HandlerStatus::COUNT_MAX { "10,000+".to_owned() } else { open.to_string() };
    let waiting = format!("{waiting} waiting deliveries (due, due later or held)");
    let is_changed = if !is_changing || confirming.is_dry_run {
        false
    } else {
        confirming.ask(&format!("{verb} this handler, with {waiting}?"))?;
        let operator = session.acting(confirming.because.as_ref());
        match change {
            Change::Pause => operator.pause(key).await?,
            Change::Resume => operator.resume(key).await?,
            Change::OpenBreaker => operator.open_breaker(key).await?,
            Change::CloseBreaker => operator.close_breaker(key).await?,
        }
    };
    let output = session.output;
    match (output.is_json, is_changed) {
        (true, _) => output.document(&json!({
            "action": verb, "handler_key": handler.handler_key, "dry_run": confirming.is_dry_run, "changes": is_changing,
            "affected": u8::from(is_changed), "open": open,
        }))?,
        (false, true) => output.line(format!("{verb}: {}, {waiting}", handler.handler_key))?,
        (false, false) if is_changing => output.line(format!("would {verb} {}, {waiting}", handler.handler_key))?,
        (false, false) => output.line(format!("nothing to do: {} {}", handler.handler_key, change.already()))?,
    }
    Ok(Exit::Well)
}

async fn backfill<B: Backend>(
    session: &Session<B>,
    backfill: &Backfill,
    confirming: &Confirming,
) -> Result<Exit, Failure> {
    confirming.check_without_dry_run()?;
    confirming.ask("create deliveries for all messages of these topics that the handler does not have yet?")?;
    let bar = progress::of(session.output, None, "created");
    let made = session.acting(confirming.because.as_ref()).backfill(backfill, |made| bar.set_position(made)).await?;
    bar.finish_and_clear();
    match session.output.is_json {
        true => session
            .output
            .document(&json!({ "action": "backfill", "handler_key": backfill.handler_key, "affected": made }))?,
        false => session.output.line(format!("backfill: {made} deliveries"))?,
    }
    Ok(Exit::Well)
}

async fn rename_plan<B: Backend>(session: &Session<B>, path: &Path, removed: &[String]) -> Result<Exit, Failure> {
    let manifest: Manifest = read(path)?;
    let mut plan = manifest.plan(&session.operator().handlers().await?);
    for one in plan.iter_mut().filter(|one| removed.contains(&one.handler_key)) {
        one.may_be_renamed_to.clear();
    }
    let is_safe = plan.iter().all(PlannedHandler::is_safe);
    match session.output.is_json {
        true => session.output.document(&json!({ "is_safe": is_safe, "handlers": plan }))?,
        false => print_plan(session.output, &plan, is_safe)?,
    }
    Ok(if is_safe { Exit::Well } else { Exit::Problem })
}

fn read(path: &Path) -> Result<Manifest, Failure> {
    let cannot = |why: String| Failure::usage(format!("cannot read the manifest {}: {why}", path.display()));
    let mut text = String::new();
    let read = match path == Path::new("-") {
        true => std::io::stdin().read_to_string(&mut text).map(drop),
        false => std::fs::read_to_string(path).map(|read| text = read),
    };
    read.map_err(|error| cannot(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| cannot(error.to_string()))
}

fn print_plan(output: Output, plan: &[PlannedHandler], is_safe: bool) -> std::io::Result<()> {
    let columns = [text("HANDLER"), text("CHANGE"), number("OPEN"), number("POISONED"), word("SAFE")];
    let row = |one: &PlannedHandler| {
        let change = match one.may_be_renamed_to.is_empty() {
            true => one.change.to_string(),
            false => format!("{}, or renamed to {}?", one.change, one.may_be_renamed_to.join(", ")),
        };
        let safe = if one.is_safe() { cell("yes") } else { cell("NO").toned(Tone::Problem) };
        vec![cell(&one.handler_key), cell(change), counted(one.open), counted(one.poisoned), safe]
    };
    output.table(&columns, plan.iter().map(row).collect())?;
    if is_safe {
        return output.line("safe: no delivery is abandoned");
    }
    if plan.iter().any(|one| matches!(one.change, KeyChange::Split { .. })) {
        output.line(
            "not safe: several handlers of the build have keys of one stored handler, so the build does not start. Use a new key for all but one of them",
        )?;
    }
    for one in plan.iter().filter(|one| !one.abandoned.is_empty() && !one.is_safe()) {
        let keys = one.abandoned.join(", ");
        output.line(format!(
            "not safe: handlers of several keys became {}, and no handler of the build has {keys}. Name it in .formerly(), or keep its handler",
            one.handler_key
        ))?;
    }
    if plan.iter().any(|one| one.change == KeyChange::Removed && one.open + one.poisoned > 0) {
        output.line(
            "not safe: keep the handler, or name its key in .formerly(), until no open or poisoned delivery is left",
        )?;
    }
    if plan.iter().any(|one| !one.may_be_renamed_to.is_empty()) {
        output.line(
            "not safe: one key is removed, one is new, and finished messages are kept. If this is a rename, name the old key in .formerly(): otherwise a \
             redelivery runs the handler again under the new key. If it is not a rename, use --removed KEY",
        )?;
    }
    Ok(())
}
