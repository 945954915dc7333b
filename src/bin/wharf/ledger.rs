//! `ledger`: where each partition stands, and the two acts by which a stopped partition goes on.

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
    /// Positions in Kafka. Exit code 1 when a partition is stopped
    List {
        /// Of this consumer group
        #[arg(long, value_name = "GROUP")]
        group: Option<String>,
        /// Of this topic
        #[arg(long, value_name = "TOPIC")]
        topic: Option<String>,
        /// As many at the most
        #[arg(long, value_name = "ROWS", default_value_t = 1000)]
        limit: u32,
    },
    /// Read from an offset, or from the first record that Kafka has; stopped partitions are read again
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
    /// Go on at a later offset and note the records in between as a gap
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
    /// Kafka's id of the cluster; needed only where the group reads several clusters into this database
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
            tell(session.output, meant, changed)
        }
        LedgerCommand::Skip { position, partition, to_offset, confirming } => {
            let filter = position.filter(Some(partition));
            let Some(meant) = agreed(session, &filter, &confirming, &format!("skip to offset {to_offset}")).await?
            else {
                return Ok(Exit::Well);
            };
            let is_moved = session.acting(confirming.because.as_ref()).skip_ledger(&filter, to_offset).await?;
            tell(session.output, meant, u64::from(is_moved))
        }
    }
}

async fn list<B: Backend>(session: &Session<B>, filter: &LedgerFilter, limit: u32) -> Result<Exit, Failure> {
    let mut found = session.operator().positions(filter, limit.saturating_add(1)).await?;
    let is_all = found.len() <= limit as usize;
    found.truncate(limit as usize);
    match (session.output.is_json, found.is_empty()) {
        (true, _) => session.output.document(&found)?,
        (false, true) => session.output.line("none: nothing has been read from Kafka")?,
        (false, false) => table(session.output, &found)?,
    }
    if !is_all && !session.output.is_json {
        session.output.line(format!("there are more than these {limit}: raise --limit, or name a topic"))?;
    }
    let is_stopped = found.iter().any(|position| position.stopped_at.is_some());
    Ok(if is_stopped { Exit::Problem } else { Exit::Well })
}

pub fn table(output: Output, found: &[LedgerStatus]) -> std::io::Result<()> {
    let columns = [text("GROUP"), text("PARTITION"), number("NEXT"), number("EPOCH"), word("MOVED"), text("STATE")];
    let row = |position: &LedgerStatus| {
        let next = match position.next_offset {
            0.. => cell(position.next_offset),
            _ => cell("beginning"),
        };
        let state = match (position.stopped_at, &position.stopped_why) {
            (Some(since), why) => {
                let why = why.as_deref().unwrap_or("no reason is known");
                cell(format!("stopped {}: {why}", when::age(since))).toned(Tone::Problem)
            }
            (None, _) => cell("-"),
        };
        vec![
            cell(&position.consumer_group),
            cell(format!("{}[{}]", position.topic, position.partition)),
            next,
            maybe(position.leader_epoch),
            cell(when::age(position.updated_at)),
            state,
        ]
    };
    output.table(&columns, found.iter().map(row).collect())
}

/// Shows what would change and asks; returns how many partitions are meant, `None` when this was only a dry run.
async fn agreed<B: Backend>(
    session: &Session<B>,
    filter: &LedgerFilter,
    confirming: &Confirming,
    what: &str,
) -> Result<Option<usize>, Failure> {
    confirming.check()?;
    let meant = session.operator().positions(filter, u32::MAX).await?;
    if meant.is_empty() {
        return Err(Failure::usage("the ledger has no such partition: `wharf ledger list` shows which there are"));
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

fn tell(output: Output, meant: usize, changed: u64) -> Result<Exit, Failure> {
    match output.is_json {
        true => output.document(&json!({ "matching": meant, "changed": changed, "is_dry_run": false }))?,
        false if changed == 0 => output.line("nothing was changed: the ledger is at this offset or beyond it")?,
        false => output.line(format!("changed {changed} partitions; running processes follow within a minute"))?,
    }
    Ok(if changed == 0 { Exit::Problem } else { Exit::Well })
}
