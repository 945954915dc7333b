//! `audit`: the ledger and the rows beside what Kafka has; what the database knows, when Kafka does not answer. Secrets for Kafka come from a file, never from the command line.

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

/// Which Kafka.
#[derive(Debug, Args)]
pub struct KafkaArguments {
    /// Brokers as host:port, separated by commas
    #[arg(long, value_name = "BROKERS")]
    brokers: Option<String>,
    /// The consumer group
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// A setting of librdkafka, name=value; secrets are refused here
    #[arg(long = "set", value_name = "SETTING")]
    settings: Vec<String>,
    /// A file of settings, name=value on each line, for secrets too; it may have bootstrap.servers and group.id
    #[arg(long, value_name = "FILE")]
    kafka_config_file: Option<PathBuf>,
}

pub async fn run<B: Backend>(session: &Session<B>, arguments: &KafkaArguments) -> Result<Exit, Failure> {
    let Some((kafka, group)) = arguments.kafka()? else {
        return Err(Failure::usage("which Kafka? Give --brokers and --group, or --kafka-config-file"));
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
            number("KAFKA HAS"),
            number("TO"),
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
            true => output.line("all is as it should be")?,
            false => findings.iter().try_for_each(|finding| output.line(format!("- {finding}")))?,
        }
    }
    Ok(if findings.is_empty() { Exit::Well } else { Exit::Problem })
}

/// What the database knows of the group: its positions, and what the processes that read have written down.
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
        output.line(format!("the ledger has no entry of group {group}"))?;
    } else {
        crate::ledger::table(output, &ledger)?;
    }
    output.line("")?;
    for one in partitions {
        let why = one.why.map_or_else(String::new, |why| format!(": {why}"));
        let standing = format!("{} for {}{why}", one.standing, when::secs(one.secs));
        output.line(format!("- {}[{}]: {standing}", one.topic, one.partition))?;
    }
    for one in ingests {
        let trouble = one.trouble.map_or_else(String::new, |trouble| format!(": cannot read: {trouble}"));
        output.line(format!("- {} was seen {} ago{trouble}", one.name, when::secs(one.seen_secs_ago)))?;
    }
    output.line(format!("- {error}: this is what the database knows"))?;
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

/// A word for programs.
fn code(finding: &Finding) -> &'static str {
    match finding {
        Finding::Stopped(_) => "stopped",
        Finding::CommittedAhead(_) => "committed ahead",
        Finding::Deleted(_) => "deleted",
        Finding::LogEndsBefore(_) => "log ends before",
        Finding::NeverRead(_) => "never read",
        Finding::Unanswered(_) => "unanswered",
        Finding::TopicMadeAnew(_) => "topic made anew",
        Finding::HangingTransaction(_) => "hanging transaction",
        Finding::UnknownGroup(_) => "unknown group",
        Finding::Gap(_) => "gap",
        _ => "other",
    }
}

impl KafkaArguments {
    /// The Kafka that is meant, and the group; none when nothing is said of one.
    pub fn kafka(&self) -> Result<Option<(Kafka, String)>, Failure> {
        let mut settings = self.of_file()?;
        for setting in &self.settings {
            // What was given is not quoted: it may be a secret.
            let Some((name, value)) = setting.split_once('=') else {
                return Err(Failure::usage("--set takes name=value"));
            };
            if is_secret(name) {
                return Err(Failure::usage(format!(
                    "--set {name}: others see secrets in `ps`, and the shell's history keeps them. \
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
            _ => Err(Failure::usage("Kafka takes both, --brokers and --group")),
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

/// Settings of librdkafka that hold a secret in their value. Paths of files do not.
fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let parts = ["password", "secret", "jaas", "oauthbearer.config", ".pem", "token"];
    parts.iter().any(|part| name.contains(part))
}
