//! What is wrong with reading from Kafka, as the processes that read it have written down. No broker is asked.

use std::collections::BTreeMap;

use super::{Symptoms, secs};
use crate::types::{Facts, INTAKE_STOPPED, IngestFacts};

/// A process that reads writes every few seconds; after this long it is taken for dead.
const SILENT_SECS_MAX: f64 = 60.0;

/// A process whose ingest lives says so every five seconds: after this long its ingest has ended.
const ENDED_SECS_MIN: f64 = 20.0;

/// What to do about a process that lives and reads nothing.
pub(super) fn advice_for_closed(name: &str, ingests: &[IngestFacts]) -> &'static str {
    let newest = ingests.iter().filter(|ingest| ingest.name == name);
    let newest = newest.min_by(|a, b| a.seen_secs_ago.total_cmp(&b.seen_secs_ago));
    match newest {
        Some(ingest) if is_stopped(ingest) => {
            "it goes on when its topic's quarantined records are dealt with, as said below"
        }
        Some(ingest) if ingest.seen_secs_ago < ENDED_SECS_MIN => {
            "it goes on by itself: the database is slow or away, or the backlog is over its limits"
        }
        Some(_) | None => "its ingest has ended: look for `ingest failed` in its log, and restart the process",
    }
}

/// Whether intake is stopped because everything that came was quarantined.
fn is_stopped(ingest: &IngestFacts) -> bool {
    ingest.trouble.as_deref().is_some_and(|trouble| trouble.starts_with(INTAKE_STOPPED))
}

impl Symptoms {
    pub(super) fn of_kafka(&mut self, facts: &Facts) {
        for one in &facts.partitions {
            let (group, topic, partition) = (&one.consumer_group, &one.topic, one.partition);
            let why = one.why.as_deref().map_or_else(String::new, |why| format!(": {why}"));
            let what = format!("{topic}[{partition}] of group {group}, for {}{why}", secs(one.secs));
            match one.standing.as_str() {
                "stopped" => {
                    let position = format!("--group {group} --topic {topic} --partition {partition} --to OFFSET");
                    let advice =
                        format!("wharf ledger reset {position} reads on there; wharf ledger skip leaves records out");
                    self.problem("partition stopped", what, advice);
                }
                "standing still" => {
                    let advice = "its next records are damaged or compressed in an unknown way: repair the log, or wharf ledger skip";
                    self.problem("partition stands still", what, advice);
                }
                _ => self.problem(
                    "partition waits",
                    what,
                    "Kafka does not tell where its log begins and ends: look for its leader",
                ),
            }
        }
        let mut groups: BTreeMap<&str, Vec<&IngestFacts>> = BTreeMap::new();
        for ingest in &facts.ingests {
            groups.entry(&ingest.consumer_group).or_default().push(ingest);
        }
        for (group, ingests) in groups {
            let (alive, silent): (Vec<_>, Vec<_>) =
                ingests.into_iter().partition(|ingest| ingest.seen_secs_ago <= SILENT_SECS_MAX);
            for ingest in &alive {
                if let Some(trouble) = &ingest.trouble {
                    let since = secs(ingest.trouble_secs.unwrap_or_default());
                    let what = format!("{} cannot read for group {group}, for {since}: {trouble}", ingest.name);
                    let (code, advice) = match is_stopped(ingest) {
                        true => (
                            "intake stopped",
                            "wharf quarantine list tells why: correct the identity policy or the records' producer, then replay or discard them",
                        ),
                        false => ("kafka trouble", "look at the brokers, the credentials and the names of the topics"),
                    };
                    self.problem(code, what, advice);
                }
            }
            if let (true, Some(last)) = (alive.is_empty(), silent.iter().map(|one| one.seen_secs_ago).reduce(f64::min))
            {
                let what =
                    format!("no process reads from Kafka for group {group}; the last was seen {} ago", secs(last));
                self.problem("ingest dead", what, "start the service, or look why its ingest ended");
            }
        }
    }
}
