//! `outbox`: lists published records, sends them again, or discards them.

use std::time::Instant;

use clap::{Args, Subcommand, ValueEnum};
use serde_json::json;
use wharf::operate::{OutboxFilter, OutboxState, OutboxSummary};
use wharf::store::Backend;

use crate::exit::{Exit, Failure};
use crate::filter::{self, AgeOptions};
use crate::meant::{Action, Meant, rows_to_read};
use crate::output::{Output, brief, cell, maybe, number, text, word};
use crate::record::{self, PayloadOption};
use crate::replay::Acting;
use crate::session::Session;
use crate::when;

const REPLAY: Action = Action { verb: "replay", rows: "records" };
const DISCARD: Action = Action { verb: "discard", rows: "records" };

#[derive(Debug, Subcommand)]
pub enum OutboxCommand {
    /// List records that Kafka refused, or those in another state
    List {
        #[command(flatten)]
        options: OutboxOptions,
        /// The maximum number of rows
        #[arg(long, value_name = "ROWS", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
        limit: u32,
    },
    /// Show one record
    Show {
        /// The id of the record
        id: i64,
        #[command(flatten)]
        payload: PayloadOption,
    },
    /// Send records again, with the same ids
    Replay {
        #[command(flatten)]
        options: OutboxOptions,
        #[command(flatten)]
        acting: Acting,
    },
    /// Discard records: they are not sent
    Discard {
        #[command(flatten)]
        options: OutboxOptions,
        #[command(flatten)]
        acting: Acting,
    },
}

/// A filter for records of the outbox: those that match every given option; without --id or --state, poisoned ones.
#[derive(Debug, Args)]
pub struct OutboxOptions {
    /// The id of the record
    #[arg(long, value_name = "NUMBER")]
    id: Option<i64>,
    /// The state of the record
    #[arg(long, value_name = "STATE")]
    state: Option<OutboxStateOption>,
    /// The topic of the record
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// The message id of the record
    #[arg(long, value_name = "ID")]
    message: Option<String>,
    /// Why the record was poisoned, e.g. "too large"
    #[arg(long, value_name = "REASON")]
    reason: Option<String>,
    /// Text that the last error must contain
    #[arg(long, value_name = "TEXT")]
    error: Option<String>,
    #[command(flatten)]
    age: AgeOptions,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum OutboxStateOption {
    Waiting,
    Sent,
    Poisoned,
    Discarded,
}

impl OutboxOptions {
    fn filter(&self) -> OutboxFilter {
        let mut filter = OutboxFilter::default();
        filter.id = self.id;
        filter.state = self.state.map(|state| match state {
            OutboxStateOption::Waiting => OutboxState::Waiting,
            OutboxStateOption::Sent => OutboxState::Sent,
            OutboxStateOption::Poisoned => OutboxState::Poisoned,
            OutboxStateOption::Discarded => OutboxState::Discarded,
        });
        filter.topic.clone_from(&self.topic);
        filter.message_id.clone_from(&self.message);
        filter.reason.clone_from(&self.reason);
        filter.error.clone_from(&self.error);
        (filter.older_than, filter.newer_than) = self.age.bounds();
        filter
    }
}

pub async fn run<B: Backend>(session: &Session<B>, command: OutboxCommand) -> Result<Exit, Failure> {
    match command {
        OutboxCommand::List { options, limit } => list(session, &options.filter(), limit).await,
        OutboxCommand::Show { id, payload } => show(session, id, payload).await,
        OutboxCommand::Replay { options, acting } => act(session, options.filter(), &acting, REPLAY).await,
        OutboxCommand::Discard { options, acting } => act(session, options.filter(), &acting, DISCARD).await,
    }
}

async fn list<B: Backend>(session: &Session<B>, filter: &OutboxFilter, limit: u32) -> Result<Exit, Failure> {
    let mut found = session.operator().outbox(filter, limit.saturating_add(1)).await?;
    let is_all = found.len() <= limit as usize;
    found.truncate(limit as usize);
    match (session.output.is_json, found.is_empty()) {
        (true, _) => session.output.document(&found)?,
        (false, true) => session.output.line("none")?,
        (false, false) => table(session.output, &found)?,
    }
    if !is_all && !session.output.is_json {
        session.output.line(format!("there are more than {limit}: raise --limit, or use a filter"))?;
    }
    Ok(Exit::Well)
}

fn table(output: Output, found: &[OutboxSummary]) -> std::io::Result<()> {
    let columns = [
        number("ID"),
        text("TOPIC"),
        word("STATE"),
        text("MESSAGE"),
        text("REASON"),
        text("ERROR"),
        number("BYTES"),
        word("AGE"),
    ];
    let row = |one: &OutboxSummary| {
        vec![
            cell(one.id),
            cell(&one.topic),
            cell(one.state.as_str()),
            brief(Some(&one.message_id), 40),
            maybe(one.reason.as_deref()),
            brief(one.last_error.as_deref(), 100),
            maybe(one.payload_bytes),
            cell(when::age(one.finished_at.unwrap_or(one.stored_at))),
        ]
    };
    output.table(&columns, found.iter().map(row).collect())
}

async fn show<B: Backend>(session: &Session<B>, id: i64, payload: PayloadOption) -> Result<Exit, Failure> {
    let Some(details) = session.operator().outbox_record(id).await? else {
        return Err(Failure::problem(format!("there is no record {id} in the outbox")));
    };
    let (output, summary) = (session.output, &details.summary);
    if output.is_json {
        let record = record::document(&details.record, payload);
        output.document(&json!({ "outbox": summary, "record": record }))?;
        return Ok(Exit::Well);
    }
    let mut fields = vec![
        ("id", cell(summary.id)),
        ("state", cell(summary.state.as_str())),
        ("reason", maybe(summary.reason.as_deref())),
        ("last error", maybe(summary.last_error.as_deref())),
        ("stored", cell(when::at(summary.stored_at))),
        ("finished", maybe(summary.finished_at.map(when::at))),
        ("replays", cell(summary.replays)),
    ];
    fields.extend(record::fields(&details.record, payload));
    output.fields(fields)?;
    record::payload(&details.record, payload, output)?;
    Ok(Exit::Well)
}

/// Shows the matching records, asks for confirmation, then acts.
async fn act<B: Backend>(
    session: &Session<B>,
    mut filter: OutboxFilter,
    acting: &Acting,
    action: Action,
) -> Result<Exit, Failure> {
    filter.all = acting.is_all;
    filter::refuse_empty(&filter)?;
    acting.confirming.check()?;
    let (output, is_replay) = (session.output, action == REPLAY);
    let read_at = Instant::now();
    let found = session.operator().outbox(&filter, rows_to_read(acting.limit)).await?;
    let meant = Meant::of(found, acting.limit, read_at, |record| match is_replay {
        true => record.state != OutboxState::Waiting,
        false => matches!(record.state, OutboxState::Waiting | OutboxState::Poisoned),
    });
    if !meant.is_agreed(output, action, &acting.confirming, |rows| table(output, rows))? {
        return Ok(Exit::Well);
    }
    meant.age(&mut filter.older_than, &mut filter.newer_than);
    let operator = session.acting(acting.confirming.because.as_ref());
    let changed = match is_replay {
        true => operator.replay_outbox(&filter, meant.limit()).await?,
        false => operator.discard_outbox(&filter, meant.limit()).await?,
    };
    meant.report(output, action, changed)
}
