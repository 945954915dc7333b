//! `quarantine`: lists records that could not become messages, lets a running inbox accept them again, or deletes them.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use clap::Subcommand;
use serde_json::json;
use wharf::operate::{QuarantineFilter, QuarantineSummary};
use wharf::store::Backend;

use crate::decoded::DecodingOptions;
use crate::exit::{Exit, Failure};
use crate::filter::{self, QuarantineOptions};
use crate::meant::{Action, Meant, rows_to_read};
use crate::output::{Output, brief, cell, maybe, number, text, word};
use crate::record::{self, PayloadOption};
use crate::replay::Acting;
use crate::session::Session;
use crate::when;

const REPLAY: Action = Action { verb: "replay", rows: "records" };
const DISCARD: Action = Action { verb: "discard", rows: "records" };

/// How often the result of a replay is polled.
const POLL_EVERY: Duration = Duration::from_millis(200);
/// How many records each poll examines.
const READ_ROWS_MAX: u32 = 10_000;

#[derive(Debug, Subcommand)]
pub enum QuarantineCommand {
    /// List quarantined records, the oldest first
    List {
        #[command(flatten)]
        options: QuarantineOptions,
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
        #[command(flatten)]
        decoding: DecodingOptions,
    },
    /// Ask a running inbox to accept records again, with its current identity policy and limits
    Replay {
        #[command(flatten)]
        options: QuarantineOptions,
        #[command(flatten)]
        acting: Acting,
        /// How long to wait for the result; 0s does not wait
        #[arg(long, value_name = "TIME", default_value = "5s", value_parser = humantime::parse_duration)]
        wait: Duration,
    },
    /// Delete records with their payloads
    Discard {
        #[command(flatten)]
        options: QuarantineOptions,
        #[command(flatten)]
        acting: Acting,
    },
}

pub async fn run<B: Backend>(session: &Session<B>, command: QuarantineCommand) -> Result<Exit, Failure> {
    match command {
        QuarantineCommand::List { options, limit } => list(session, &options.filter(), limit).await,
        QuarantineCommand::Show { id, payload, decoding } => show(session, id, payload, &decoding).await,
        QuarantineCommand::Replay { options, acting, wait } => {
            let Some(meant) = agreed(session, options.filter(), &acting, REPLAY).await? else {
                return Ok(Exit::Well);
            };
            let operator = session.acting(acting.confirming.because.as_ref());
            let asked = operator.replay_quarantined(&meant.filter, meant.records.limit()).await?;
            let results = replay_results(session, &meant, wait).await?;
            report(session.output, &meant.records, asked, &results)
        }
        QuarantineCommand::Discard { options, acting } => {
            let Some(meant) = agreed(session, options.filter(), &acting, DISCARD).await? else {
                return Ok(Exit::Well);
            };
            let operator = session.acting(acting.confirming.because.as_ref());
            let discarded = operator.discard_quarantined(&meant.filter, meant.records.limit()).await?;
            meant.records.report(session.output, DISCARD, discarded)
        }
    }
}

async fn list<B: Backend>(session: &Session<B>, filter: &QuarantineFilter, limit: u32) -> Result<Exit, Failure> {
    let mut found = session.operator().quarantined(filter, limit.saturating_add(1)).await?;
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

fn table(output: Output, found: &[QuarantineSummary]) -> std::io::Result<()> {
    let columns =
        [number("ID"), text("FROM"), text("REASON"), text("DETAIL"), number("BYTES"), word("REPLAY"), word("AGE")];
    let row = |one: &QuarantineSummary| {
        let from = match (one.kafka_partition, one.kafka_offset) {
            (Some(partition), Some(offset)) => format!("{}[{partition}]@{offset}", one.topic),
            _ => one.topic.clone(),
        };
        let replay = match (one.replay_asked_at, one.replays) {
            (Some(_), _) => "requested".to_owned(),
            (None, 0) => "-".to_owned(),
            (None, replays) => format!("{replays}x"),
        };
        vec![
            cell(one.id),
            cell(from),
            cell(&one.reason),
            brief(one.detail.as_deref(), 100),
            maybe(one.payload_bytes),
            cell(replay),
            cell(when::age(one.quarantined_at)),
        ]
    };
    output.table(&columns, found.iter().map(row).collect())
}

async fn show<B: Backend>(
    session: &Session<B>,
    id: i64,
    payload: PayloadOption,
    decoding: &DecodingOptions,
) -> Result<Exit, Failure> {
    let Some(details) = session.operator().quarantined_record(id).await? else {
        return Err(Failure::problem(format!("there is no quarantined record {id}")));
    };
    let (output, summary) = (session.output, &details.summary);
    let decoded = decoding.decode(Some(&details.record), payload).await?;
    if output.is_json {
        let record = record::document(&details.record, payload);
        output.document(&json!({ "quarantine": summary, "record": record, "decoded": decoded.document() }))?;
        return Ok(Exit::Well);
    }
    let mut fields = vec![
        ("id", cell(summary.id)),
        ("reason", cell(&summary.reason)),
        ("detail", maybe(summary.detail.as_deref())),
        ("quarantined", cell(when::at(summary.quarantined_at))),
        ("replay requested", maybe(summary.replay_asked_at.map(when::at))),
        ("replays", cell(summary.replays)),
    ];
    fields.extend(record::fields(&details.record, payload));
    output.fields(fields)?;
    record::payload(&details.record, payload, output)?;
    decoded.print(output)?;
    Ok(Exit::Well)
}

/// The records that an action changes.
struct MatchingRecords {
    filter: QuarantineFilter,
    records: Meant<QuarantineSummary>,
}

/// The matching records, once the person has confirmed. None when there is nothing to do.
async fn agreed<B: Backend>(
    session: &Session<B>,
    mut filter: QuarantineFilter,
    acting: &Acting,
    action: Action,
) -> Result<Option<MatchingRecords>, Failure> {
    filter.all = acting.is_all;
    filter::refuse_empty(&filter)?;
    acting.confirming.check()?;
    let (output, read_at) = (session.output, Instant::now());
    let found = session.operator().quarantined(&filter, rows_to_read(acting.limit)).await?;
    let records = Meant::of(found, acting.limit, read_at, |_| true);
    if !records.is_agreed(output, action, &acting.confirming, |rows| table(output, rows))? {
        return Ok(None);
    }
    records.age(&mut filter.older_than, &mut filter.newer_than);
    Ok(Some(MatchingRecords { filter, records }))
}

/// The results of a requested replay.
#[derive(Default)]
struct ReplayResults {
    left: usize,
    stayed: Vec<QuarantineSummary>,
    waiting: usize,
}

async fn replay_results<B: Backend>(
    session: &Session<B>,
    meant: &MatchingRecords,
    wait: Duration,
) -> Result<ReplayResults, Failure> {
    let ids: HashSet<i64> = meant.records.rows.iter().map(|record| record.id).collect();
    let deadline = Instant::now() + wait;
    // The reason may have changed, so the filter must not contain it.
    let mut filter = QuarantineFilter::default();
    filter.topic.clone_from(&meant.filter.topic);
    filter.id = meant.filter.id;
    loop {
        let there = session.operator().quarantined(&filter, READ_ROWS_MAX).await?;
        // The state of records beyond the examined ones is unknown: they count as waiting.
        let seen_to =
            if there.len() < READ_ROWS_MAX as usize { i64::MAX } else { there.last().map_or(0, |last| last.id) };
        let ours: Vec<QuarantineSummary> = there.into_iter().filter(|record| ids.contains(&record.id)).collect();
        let left = ids.iter().filter(|id| **id <= seen_to).count() - ours.len();
        let stayed: Vec<_> = ours.into_iter().filter(|record| record.replay_asked_at.is_none()).collect();
        let waiting = ids.len() - left - stayed.len();
        if waiting == 0 || Instant::now() >= deadline {
            return Ok(ReplayResults { left, stayed, waiting });
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
}

/// Says what became of the records of a replay, and what remains.
fn report(
    output: Output,
    meant: &Meant<QuarantineSummary>,
    asked: u64,
    results: &ReplayResults,
) -> Result<Exit, Failure> {
    let ReplayResults { left, stayed, waiting } = results;
    // A replay that was requested before is not requested again.
    let before = meant.rows.iter().filter(|record| record.replay_asked_at.is_some()).count();
    let remaining = meant.left(asked.saturating_add(before as u64));
    let is_whole = stayed.is_empty() && *waiting == 0 && remaining == 0;
    let exit = if is_whole { Exit::Well } else { Exit::Partly };
    if output.is_json {
        let mut report = meant.document(REPLAY, asked, remaining);
        report["left_quarantine"] = json!(left);
        report["stayed"] = json!(stayed);
        report["waiting"] = json!(waiting);
        output.document(&report)?;
        return Ok(exit);
    }
    output.line(format!("replay: requested for {asked} records"))?;
    output
        .line(format!("{left} left the quarantine, {} could not be accepted, {waiting} are waiting", stayed.len()))?;
    if !stayed.is_empty() {
        table(output, stayed)?;
    }
    if *waiting > 0 {
        output.line("a running inbox that subscribes to their topic will accept them")?;
    }
    meant.report_left(output, remaining)?;
    Ok(exit)
}
