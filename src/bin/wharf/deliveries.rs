//! `deliveries`, and what `poisoned` shares with it: lists deliveries, and shows one of them with its record and
//! history.

use clap::{Args, Subcommand};
use serde_json::json;
use wharf::operate::{DeliveryDetails, DeliveryFilter, DeliverySummary, FailedAttempt, HistoryEntry, State};
use wharf::store::Backend;

use crate::decoded::DecodingOptions;
use crate::exit::{Exit, Failure};
use crate::filter::{DeliveryOptions, StateOption};
use crate::output::{Cell, Output, Tone, brief, cell, maybe, number, text, word};
use crate::record::{self, PayloadOption};
use crate::release::{self, ReleaseArguments};
use crate::session::Session;
use crate::when;

/// How much of an error a list shows, enough to recognize it. `show` prints all of it.
const ERROR_CHARS_MAX: usize = 100;

#[derive(Debug, Subcommand)]
pub enum DeliveriesCommand {
    /// List deliveries: with --state pending or running the longest due first, with --state poisoned the longest
    /// poisoned first, otherwise the newest first
    List {
        #[command(flatten)]
        options: DeliveryOptions,
        /// Only deliveries in this state
        #[arg(long)]
        state: Option<StateOption>,
        /// The maximum number of rows
        #[arg(long, value_name = "ROWS", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
        limit: u32,
    },
    /// Show one delivery with its record, failed attempts and history
    Show(ShowArguments),
    /// Revoke the claim of a stuck run: the delivery is due at once, and the outcome of that run is ignored
    Release(ReleaseArguments),
}

/// One delivery.
#[derive(Debug, Args)]
pub struct Which {
    /// The id of the message
    message_id: String,
    /// The handler, if the message has several
    #[arg(long, value_name = "KEY")]
    handler: Option<String>,
    /// The source, if several use the same id
    #[arg(long, value_name = "SOURCE")]
    source: Option<String>,
}

#[derive(Debug, Args)]
pub struct ShowArguments {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    payload: PayloadOption,
    #[command(flatten)]
    decoding: DecodingOptions,
}

pub async fn run<B: Backend>(session: &Session<B>, command: DeliveriesCommand) -> Result<Exit, Failure> {
    match command {
        DeliveriesCommand::List { options, state, limit } => {
            let found = session
                .operator()
                .deliveries(&options.filter(), state.map(State::from), limit.saturating_add(1))
                .await?;
            list(session.output, found, limit, any_table)
        }
        DeliveriesCommand::Show(arguments) => show(session, &arguments, None).await,
        DeliveriesCommand::Release(arguments) => release::release(session, &arguments).await,
    }
}

/// Prints a list that was queried with one row more than its limit, and says when there are more rows.
pub fn list(
    output: Output,
    mut found: Vec<DeliverySummary>,
    limit: u32,
    table: fn(Output, &[DeliverySummary]) -> std::io::Result<()>,
) -> Result<Exit, Failure> {
    let is_all = found.len() <= limit as usize;
    found.truncate(limit as usize);
    if output.is_json {
        output.document(&found)?;
        return Ok(Exit::Well);
    }
    match found.is_empty() {
        true => output.line("none")?,
        false => table(output, &found)?,
    }
    if !is_all {
        output.line(format!("there are more than {limit}: raise --limit, or use a filter"))?;
    }
    Ok(Exit::Well)
}

pub fn any_table(output: Output, found: &[DeliverySummary]) -> std::io::Result<()> {
    let columns =
        [text("MESSAGE"), text("HANDLER"), word("STATE"), number("ATTEMPT"), text("WHEN"), text("LAST ERROR")];
    let row = |one: &DeliverySummary| {
        let tone = if one.state == State::Poisoned { Tone::Problem } else { Tone::Plain };
        let error = one.last_error.as_deref().or(one.reason.as_deref());
        vec![
            maybe(one.message_id.as_deref()),
            maybe(one.handler_key.as_deref()),
            cell(one.state.as_str()).toned(tone),
            cell(one.attempts),
            cell(moment(one)),
            brief(error, ERROR_CHARS_MAX),
        ]
    };
    output.table(&columns, found.iter().map(row).collect())
}

/// The time that matters in the current state.
fn moment(one: &DeliverySummary) -> String {
    match (one.finished_at, one.state) {
        (Some(finished_at), _) => format!("{} ago", when::age(finished_at)),
        (None, State::Running) => "now".to_owned(),
        (None, _) => match one.due_at.map(|due_at| (due_at.duration_since(std::time::SystemTime::now()), due_at)) {
            None => "held".to_owned(),
            Some((Ok(left), _)) => format!("in {}", when::span(left)),
            Some((Err(_), due_at)) => format!("due {}", when::age(due_at)),
        },
    }
}

pub fn poisoned_table(output: Output, found: &[DeliverySummary]) -> std::io::Result<()> {
    let columns = [text("HANDLER"), text("MESSAGE"), text("REASON"), text("ERROR"), word("FINGERPRINT"), word("AGE")];
    let row = |one: &DeliverySummary| {
        vec![
            maybe(one.handler_key.as_deref()),
            maybe(one.message_id.as_deref()),
            maybe(one.reason.as_deref()),
            brief(one.last_error.as_deref(), ERROR_CHARS_MAX),
            maybe(one.fingerprint.as_deref()),
            maybe(one.finished_at.map(when::age)),
        ]
    };
    output.table(&columns, found.iter().map(row).collect())
}

impl Which {
    pub fn filter(&self) -> DeliveryFilter {
        let mut filter = DeliveryFilter::default().message_id(&self.message_id);
        filter.handler_key.clone_from(&self.handler);
        filter.source.clone_from(&self.source);
        filter
    }

    /// The matching delivery. Fails with a list when several match.
    pub async fn one<B: Backend>(
        &self,
        session: &Session<B>,
        state: Option<State>,
    ) -> Result<DeliverySummary, Failure> {
        let found = session.operator().deliveries(&self.filter(), state, 100).await?;
        only(found)?.ok_or_else(|| Failure::problem("there is no such delivery"))
    }
}

/// The delivery that was found, if any. Fails with a list when there are several.
pub fn only(mut found: Vec<DeliverySummary>) -> Result<Option<DeliverySummary>, Failure> {
    if found.len() <= 1 {
        return Ok(found.pop());
    }
    let which = |one: &DeliverySummary| {
        let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        format!("--handler {} --source {}", or_dash(&one.handler_key), or_dash(&one.source))
    };
    let which: Vec<String> = found.iter().map(which).collect();
    Err(Failure::usage(format!("several deliveries match, choose one:\n  {}", which.join("\n  "))))
}

/// Shows the one delivery that matches.
pub async fn show<B: Backend>(
    session: &Session<B>,
    arguments: &ShowArguments,
    state: Option<State>,
) -> Result<Exit, Failure> {
    let one = arguments.which.one(session, state).await?;
    let Some(details) = session.operator().delivery(&one).await? else {
        return Err(Failure::problem("the delivery has just been purged"));
    };
    let decoded = arguments.decoding.decode(details.record.as_ref(), arguments.payload).await?;
    match session.output.is_json {
        true => session.output.document(&json!({
            "delivery": details.delivery,
            "failures": details.failures,
            "history": details.history,
            "correction": details.correction.as_ref().map(|one| record::corrected_document(one, arguments.payload)),
            "record": details.record.as_ref().map(|record| record::document(record, arguments.payload)),
            "decoded": decoded.document(),
        }))?,
        false => {
            print(session.output, &details, arguments.payload)?;
            decoded.print(session.output)?;
        }
    }
    Ok(Exit::Well)
}

fn print(output: Output, details: &DeliveryDetails, payload: PayloadOption) -> Result<(), Failure> {
    let DeliveryDetails { delivery: one, record, .. } = details;
    let counts = format!("{} ({} failed, {} crashed, {} replays)", one.attempts, one.errors, one.crashes, one.replays);
    let mut fields: Vec<(&'static str, Cell)> = vec![
        ("message", maybe(one.message_id.as_deref())),
        ("source", maybe(one.source.as_deref())),
        ("handler", maybe(one.handler_key.as_deref())),
        ("state", cell(one.state.as_str())),
        ("reason", maybe(one.reason.as_deref())),
        ("last error", maybe(one.last_error.as_deref())),
        ("fingerprint", maybe(one.fingerprint.as_deref())),
        ("attempts", cell(counts)),
        ("received", maybe(one.received_at.map(when::at))),
        ("due", due(one)),
        ("finished", maybe(one.finished_at.map(when::at))),
        ("claimed by", maybe(one.locked_by.as_deref())),
        ("row", cell(format!("message_seq {}, handler_id {}", one.message_seq, one.handler_id))),
    ];
    match record {
        Some(record) => fields.extend(record::fields(record, payload)),
        None => fields.push(("record", cell("the message was deleted"))),
    }
    if let Some(correction) = &details.correction {
        fields.push(("corrected payload", record::corrected_field(correction)));
    }
    output.fields(fields)?;
    if !details.failures.is_empty() {
        output.line("")?;
        let columns = [number("ATTEMPT"), text("FAILED AT"), word("WHY"), text("ERROR")];
        output.table(&columns, details.failures.iter().map(failure_row).collect())?;
    }
    if !details.history.is_empty() {
        output.line("")?;
        let columns = [text("WHEN"), word("ACTION"), text("ACTOR"), text("REASON"), text("STATE BEFORE")];
        output.table(&columns, details.history.iter().map(history_row).collect())?;
    }
    if let Some(record) = record {
        record::payload(record, payload, output)?;
    }
    if let Some(correction) = &details.correction {
        record::corrected(correction, payload, output)?;
    }
    Ok(())
}

/// When the delivery is or was due. One that was held has no such time, also after it was discarded.
fn due(one: &DeliverySummary) -> Cell {
    match (one.due_at, one.finished_at) {
        (None, None) => cell("held: it waits for an earlier delivery of its order key"),
        (due_at, _) => maybe(due_at.map(when::at)),
    }
}

fn failure_row(failure: &FailedAttempt) -> Vec<Cell> {
    vec![cell(failure.attempt), cell(when::at(failure.failed_at)), cell(&failure.why), maybe(failure.error.as_deref())]
}

fn history_row(entry: &HistoryEntry) -> Vec<Cell> {
    let error = entry.last_error.as_deref().or(entry.reason.as_deref()).unwrap_or("-");
    vec![
        maybe(entry.acted_at.map(when::at)),
        maybe(entry.action.as_deref()),
        maybe(entry.actor.as_deref().or(entry.database_user.as_deref())),
        maybe(entry.because.as_deref()),
        brief(Some(&format!("{} after {}: {error}", entry.state.as_str(), entry.attempts)), ERROR_CHARS_MAX),
    ]
}
