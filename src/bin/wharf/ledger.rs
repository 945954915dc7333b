//! `ledger`: the position of each partition, and the two actions that resume a stopped partition.

use clap::{Args, Subcommand};
use serde_json::json;
use wharf::operate::{LedgerFilter, LedgerStatus};
use wharf::store::Backend;

use crate::confirm::Confirming;
use crate::exit::{Exit, Failure};
use crate::output::{Output, Tone, cell, maybe, number, text, word};
use crate::session::Session;
use crate::when;

#[derive(Debug, Subcommand)]
pub enum LedgerCommand {
    /// List positions in Kafka. Exit code 1 if a partition is stopped
    List {
        /// Only this consumer group
        #[arg(long, value_name = "GROUP")]
        group: Option<String>,
        /// Only this topic
        #[arg(long, value_name = "TOPIC")]
        topic: Option<String>,
        /// The maximum number of rows
        #[arg(long, value_name = "ROWS", default_value_t = 1000)]
        limit: u32,
    },
    /// Read from an offset, or from the first record that Kafka has; stopped partitions resume
    Reset {
        #[command(flatten)]
        position: PositionArguments,
        /// The partition; without it, all partitions of the topic
        #[arg(long, value_name = "NUMBER")]
        partition: Option<i32>,
        /// The offset; without it, the first record that Kafka has
        #[arg(long = "to", value_name = "OFFSET", requires = "partition")]
        to_offset: Option<i64>,
        #[command(flatten)]
        confirming: Confirming,
    },
    /// Resume at a later offset and record the skipped records as a gap
    Skip {
        #[command(flatten)]
        position: PositionArguments,
        /// The partition
        #[arg(long, value_name = "NUMBER")]
        partition: i32,
        /// The offset
        #[arg(long = "to", value_name = "OFFSET")]
        to_offset: i64,
        #[command(flatten)]
        confirming: Confirming,
    },
}

/// Which position a command changes.
#[derive(Debug, Args)]
pub struct PositionArguments {
    /// The consumer group
    #[arg(long, value_name = "GROUP")]
    group: String,
    /// The topic
    #[arg(long, value_name = "TOPIC")]
    topic: String,
    /// Kafka's id of the cluster; needed only if the group reads several clusters into this database
    #[arg(long, value_name = "ID")]
    cluster: Option<String>,
}

impl PositionArguments {
    fn filter(self, partition: Option<i32>) -> LedgerFilter {
        let mut filter = LedgerFilter::topic(self.group, self.topic);
        filter.partition = partition;
        filter.cluster_id = self.cluster;
        filter
    }
}

pub async fn run<B: Backend>(session: &Session<B>, command: LedgerCommand) -> Result<Exit, Failure> {
    match command {
        LedgerCommand::List { group, topic, limit } => {
            let mut filter = LedgerFilter::default();
            (filter.consumer_group, filter.topic) = (group, topic);
            list(session, &filter, limit).await
        }
        LedgerCommand::Reset { position, partition, to_offset, confirming } => {
            let filter = position.filter(partition);
            let to =
                to_offset.map_or("the first record that Kafka has".to_owned(), |offset| format!("offset {offset}"));
            let Some(meant) = agreed(session, &filter, &confirming, &format!("reset to {to}")).await? else {
                return Ok(Exit::Well);
            };
            let changed = session.acting(confirming.because.as_ref()).reset_ledger(&filter, to_offset).await?;
            report(session.output, meant, changed)
        }
        LedgerCommand::Skip { position, partition, to_offset, confirming } => {
            let filter = position.filter(Some(partition));
            let Some(meant) = agreed(session, &filter, &confirming, &format!("skip to offset {to_offset}")).await?
            else {
                return Ok(Exit::Well);
            };
            let is_moved = session.acting(confirming.because.as_ref()).skip_ledger(&filter, to_offset).await?;
            report(session.output, meant, u64::from(is_moved))
        }
    }
}

async fn list<B: Backend>(session: &Session<B>, filter: &LedgerFilter, limit: u32) -> Result<Exit, Failure> {
    let mut found = session.operator().positions(filter, limit.saturating_add(1)).await?;
    let is_all = found.len() <= limit as usize;
    found.truncate(limit as usize);
    match (session.output.is_json, found.is_empty()) {
        (true, _) => session.output.document(&found)?,
        (false, true) => session.output.line("none: nothing was read from Kafka yet")?,
        (false, false) => table(session.output, &found)?,
    }
    if !is_all && !session.output.is_json {
        session.output.line(format!("there are more than {limit}: raise --limit, or name a topic"))?;
    }
    let is_stopped = found.iter().any(|position| position.stopped_at.is_some());
    Ok(if is_stopped { Exit::Problem } else { Exit::Well })
}

pub fn table(output: Output, found: &[LedgerStatus]) -> std::io::Result<()> {
    let mut columns =
        vec![text("GROUP"), text("PARTITION"), number("NEXT"), number("EPOCH"), word("MOVED"), text("STATE")];
    // The same partition may be there on each of several clusters.
    let has_clusters = found.iter().any(|position| position.cluster_id != found[0].cluster_id);
    if has_clusters {
        columns.insert(1, text("CLUSTER"));
    }
    let row = |position: &LedgerStatus| {
        let next = match position.next_offset {
            0.. => cell(position.next_offset),
            _ => cell("beginning"),
        };
        let state = match (position.stopped_at, &position.stopped_why) {
            (Some(since), why) => {
                let why = why.as_deref().unwrap_or("unknown reason");
                cell(format!("stopped {}: {why}", when::age(since))).toned(Tone::Problem)
            }
            (None, _) => cell("-"),
        };
        let mut cells = vec![
            cell(&position.consumer_group),
            cell(format!("{}[{}]", position.topic, position.partition)),
            next,
            maybe(position.leader_epoch),
            cell(when::age(position.updated_at)),
            state,
        ];
        if has_clusters {
            cells.insert(1, cell(&position.cluster_id));
        }
        cells
    };
    output.table(&columns, found.iter().map(row).collect())
}

/// Shows what would change and asks for confirmation. Returns how many partitions match, or `None` for a dry run.
async fn agreed<B: Backend>(
    session: &Session<B>,
    filter: &LedgerFilter,
    confirming: &Confirming,
    what: &str,
) -> Result<Option<usize>, Failure> {
    confirming.check()?;
    let meant = session.operator().positions(filter, u32::MAX).await?;
    if meant.is_empty() {
        return Err(Failure::usage("the ledger has no such partition: `wharf ledger list` shows all"));
    }
    if !session.output.is_json {
        table(session.output, &meant)?;
    }
    if confirming.is_dry_run {
        if session.output.is_json {
            session.output.document(&json!({ "matching": meant.len(), "changed": 0, "is_dry_run": true }))?;
        }
        return Ok(None);
    }
    confirming.ask(&format!("{what}: {} partitions?", meant.len()))?;
    Ok(Some(meant.len()))
}

fn report(output: Output, meant: usize, changed: u64) -> Result<Exit, Failure> {
    match output.is_json {
        true => output.document(&json!({ "matching": meant, "changed": changed, "is_dry_run": false }))?,
        false if changed == 0 => output.line("nothing was changed: the position is at this offset or beyond it")?,
        false => output.line(format!("changed {changed} partitions; running processes follow within a minute"))?,
    }
    Ok(if changed == 0 { Exit::Problem } else { Exit::Well })
}
