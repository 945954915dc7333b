//! `audit`: compares the ledger and the stored rows with Kafka. When Kafka does not answer, it shows what the database
//! knows.
//!
//! Secrets for Kafka come from a file, never from the command line.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};
use wharf::kafka::{Audit, Finding, Kafka, PartitionAudit};
use wharf::operate::LedgerFilter;
use wharf::store::Backend;

use crate::exit::{Exit, Failure};
use crate::output::{cell, maybe, number, text};
use crate::session::Session;
use crate::when;

/// How to reach Kafka.
#[derive(Debug, Args)]
pub struct KafkaArguments {
    /// Brokers as host:port, separated by commas
    #[arg(long, value_name = "BROKERS")]
    brokers: Option<String>,
    /// The consumer group
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// A librdkafka setting as name=value; secrets are refused here
    #[arg(long = "set", value_name = "SETTING")]
    settings: Vec<String>,
    /// A file with librdkafka settings, one name=value per line; it may hold secrets, bootstrap.servers and group.id
    #[arg(long, value_name = "FILE")]
    kafka_config_file: Option<PathBuf>,
}

pub async fn run<B: Backend>(session: &Session<B>, arguments: &KafkaArguments) -> Result<Exit, Failure> {
    let Some((kafka, group)) = arguments.kafka()? else {
        return Err(Failure::usage("no Kafka is given: use --brokers and --group, or --kafka-config-file"));
    };
    let audit = match kafka.audit(&session.store).await {
        Ok(audit) => audit,
        Err(error) if error.is_transient() => return without_kafka(session, &group, &error.to_string()).await,
        Err(error) => return Err(error.into()),
    };
    let findings = audit.findings();
    let output = session.output;
    if output.is_json {
        output.document(&document(&audit))?;
    } else {
        let columns = [
            text("PARTITION"),
            number("LEDGER"),
            number("GROUP"),
            number("LOW"),
            number("HIGH"),
            number("LAG"),
            number("STORED"),
        ];
        let row = |one: &PartitionAudit| {
            vec![
                cell(format!("{}[{}]", one.topic, one.partition)),
                maybe(one.next_offset),
                maybe(one.committed),
                maybe(one.watermarks.map(|(low, _)| low)),
                maybe(one.watermarks.map(|(_, high)| high)),
                maybe(one.lag()),
                cell(one.stored),
            ]
        };
        output.table(&columns, audit.partitions.iter().map(row).collect())?;
        output.line("")?;
        match findings.is_empty() {
            true => output.line("no problems found")?,
            false => findings.iter().try_for_each(|finding| output.line(format!("- {finding}")))?,
        }
    }
    Ok(if findings.is_empty() { Exit::Well } else { Exit::Problem })
}

/// Shows what the database knows about the group: its positions, and the reports of the processes that read.
async fn without_kafka<B: Backend>(session: &Session<B>, group: &str, error: &str) -> Result<Exit, Failure> {
    let mut of_group = LedgerFilter::default();
    of_group.consumer_group = Some(group.to_owned());
    let ledger = session.operator().positions(&of_group, u32::MAX).await?;
    let facts = session.operator().doctor().await?.facts;
    let (mut partitions, mut ingests) = facts.map_or_else(Default::default, |facts| (facts.partitions, facts.ingests));
    partitions.retain(|one| one.consumer_group == group);
    ingests.retain(|one| one.consumer_group == group);
    let output = session.output;
    if output.is_json {
        output.document(&json!({
            "is_well": false, "kafka_error": error, "ledger": ledger, "partitions": partitions, "ingests": ingests,
        }))?;
        return Ok(Exit::Connection);
    }
    if ledger.is_empty() {
        output.line(format!("the ledger has no entry for group {group}"))?;
    } else {
        crate::ledger::table(output, &ledger)?;
    }
    output.line("")?;
    for one in partitions {
        let why = one.why.map_or_else(String::new, |why| format!(": {why}"));
        let state = format!("{} for {}{why}", one.state, when::secs(one.secs));
        output.line(format!("- {}[{}]: {state}", one.topic, one.partition))?;
    }
    for one in ingests {
        let problem = one.problem.map_or_else(String::new, |problem| format!(": cannot read: {problem}"));
        let source = if one.source.is_empty() || one.source == group {
            String::new()
        } else {
            format!(", source {}", one.source)
        };
        output.line(format!("- {}{source} was seen {} ago{problem}", one.name, when::secs(one.seen_secs_ago)))?;
    }
    output.line(format!("- {error}: only the database was read"))?;
    Ok(Exit::Connection)
}

pub fn document(audit: &Audit) -> Value {
    let partition = |one: &PartitionAudit| {
        json!({
            "topic": one.topic, "partition": one.partition, "ledger": one.next_offset, "committed": one.committed,
            "low": one.watermarks.map(|(low, _)| low), "high": one.watermarks.map(|(_, high)| high), "lag": one.lag(), "open_transaction": one.open_transaction,
            "stored": one.stored, "highest_stored": one.highest_stored,
        })
    };
    let findings: Vec<Value> =
        audit.findings().iter().map(|finding| json!({ "code": code(finding), "what": finding.to_string() })).collect();
    let partitions: Vec<Value> = audit.partitions.iter().map(partition).collect();
    json!({ "is_well": findings.is_empty(), "partitions": partitions, "findings": findings })
}

/// A stable code for programs.
fn code(finding: &Finding) -> &'static str {
    match finding {
        Finding::Stopped(_) => "stopped",
        Finding::CommittedAhead(_) => "committed ahead",
        Finding::Deleted(_) => "deleted",
        Finding::LogEndsBefore(_) => "log ends before",
        Finding::NeverRead(_) => "never read",
        Finding::Unanswered(_) => "unanswered",
        Finding::TopicRecreated(_) => "topic recreated",
        Finding::HangingTransaction(_) => "hanging transaction",
        Finding::UnknownGroup(_) => "unknown group",
        Finding::Gap(_) => "gap",
        _ => "other",
    }
}

impl KafkaArguments {
    /// The Kafka settings and the group. None when no option is given.
    pub fn kafka(&self) -> Result<Option<(Kafka, String)>, Failure> {
        let mut settings = self.of_file()?;
        for setting in &self.settings {
            // The argument is not quoted, because it may be a secret.
            let Some((name, value)) = setting.split_once('=') else {
                return Err(Failure::usage("--set must have the form name=value"));
            };
            if is_secret(name) {
                return Err(Failure::usage(format!(
                    "--set {name} holds a secret, which other users see in `ps` and the shell's history keeps. \
                     Put it into a file for --kafka-config-file"
                )));
            }
            settings.push((name.trim().to_owned(), value.trim().to_owned()));
        }
        let mut taken = |name: &str, given: &Option<String>| {
            let of_file = settings.iter().position(|(setting, _)| setting == name).map(|at| settings.remove(at).1);
            given.clone().or(of_file)
        };
        let (brokers, group) = (taken("bootstrap.servers", &self.brokers), taken("group.id", &self.group));
        match (brokers, group) {
            (None, None) if settings.is_empty() => Ok(None),
            (Some(brokers), Some(group)) => {
                let kafka = Kafka::new(brokers, &group);
                let kafka = settings.into_iter().fold(kafka, |kafka, (name, value)| kafka.set(name, value));
                Ok(Some((kafka, group)))
            }
            _ => Err(Failure::usage("--brokers and --group must be given together")),
        }
    }

    fn of_file(&self) -> Result<Vec<(String, String)>, Failure> {
        let Some(path) = &self.kafka_config_file else { return Ok(Vec::new()) };
        let text = std::fs::read_to_string(path)
            .map_err(|error| Failure::usage(format!("cannot read {}: {error}", path.display())))?;
        let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
        let settings = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).map(|(number, line)| {
            let (name, value) = line
                .split_once('=')
                .ok_or_else(|| Failure::usage(format!("line {number} of {} is not name=value", path.display())))?;
            Ok((name.trim().to_owned(), value.trim().to_owned()))
        });
        settings.collect()
    }
}

/// Whether the value of a librdkafka setting is a secret. A path of a file is not.
fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let parts = ["password", "secret", "jaas", "oauthbearer.config", ".pem", "token"];
    parts.iter().any(|part| name.contains(part))
}
