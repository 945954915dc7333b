//! `outbox`: lists published records, sends them again, or discards them.

use std::time::Instant;

use clap::{Args, Subcommand, ValueEnum};
use serde_json::json;
use wharf::operate::{OutboxFilter, OutboxState, OutboxSummary};
use wharf::store::Backend;

use crate::exit::{Exit, Failure};
use crate::filter::{self, AgeOptions};
use crate::meant::{Meant, rows_to_read};
use crate::output::{Output, brief, cell, maybe, number, text, word};
use crate::record::{self, PayloadOption};
use crate::replay::Acting;
use crate::session::Session;
use crate::when;

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
        OutboxCommand::Replay { options, acting } => act(session, options.filter(), &acting, "replay").await,
        OutboxCommand::Discard { options, acting } => act(session, options.filter(), &acting, "discard").await,
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
    verb: &str,
) -> Result<Exit, Failure> {
    filter.all = acting.is_all;
    filter::refuse_empty(&filter)?;
    acting.confirming.check()?;
    let read_at = Instant::now();
    let found = session.operator().outbox(&filter, rows_to_read(acting.limit)).await?;
    let meant = Meant::of(found, acting.limit, read_at, |record| match verb {
        "replay" => record.state != OutboxState::Waiting,
        _ => matches!(record.state, OutboxState::Waiting | OutboxState::Poisoned),
    });
    let (output, count, is_dry_run) = (session.output, meant.rows.len(), acting.confirming.is_dry_run);
    if is_dry_run || count == 0 {
        match (output.is_json, count) {
            (true, _) => output.document(&json!({
                "action": verb, "dry_run": is_dry_run, "meant": count, "remaining": meant.beyond, "records": meant.rows,
            }))?,
            (false, 0) => output.line(format!("there is nothing to {verb}"))?,
            (false, _) => {
                table(output, &meant.rows)?;
                output.line(format!("would {verb} {count}; {}", meant.remain(meant.beyond)))?;
            }
        }
        return Ok(Exit::Well);
    }
    if !output.is_json {
        table(output, &meant.rows[..count.min(10)])?;
    }
    acting.confirming.ask(&format!("{verb} {count} records?"))?;
    meant.age(&mut filter.older_than, &mut filter.newer_than);
    let operator = session.acting(acting.confirming.because.as_ref());
    let changed = match verb {
        "replay" => operator.replay_outbox(&filter, meant.limit()).await?,
        _ => operator.discard_outbox(&filter, meant.limit()).await?,
    };
    match output.is_json {
        true => {
            output.document(
                &json!({ "action": verb, "dry_run": false, "affected": changed, "remaining": meant.beyond }),
            )?;
        }
        false => {
            output.line(format!("{verb}: {changed} records"))?;
            if meant.beyond > 0 {
                output.line(meant.remain(meant.beyond))?;
            }
        }
    }
    Ok(if meant.beyond > 0 { Exit::Partly } else { Exit::Well })
}
