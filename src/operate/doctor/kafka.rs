//! Symptoms of reading from Kafka, from what the ingesting processes have written to the database. No broker is
//! contacted.

use std::collections::BTreeMap;

use super::{Symptoms, secs};
use crate::types::{Facts, INTAKE_STOPPED, IngestFacts};

/// An ingest writes to the database every five seconds. After this long without a write, its process counts as dead.
const SILENT_SECS_MAX: f64 = 60.0;

/// After this long without such a write, the ingest of a process that is still alive has ended.
const ENDED_SECS_MIN: f64 = 20.0;

/// Advice for a process that is alive and reads nothing, from one source or from all of them.
pub(super) fn advice_for_closed(name: &str, source: Option<&str>, ingests: &[IngestFacts]) -> &'static str {
    let is_meant = |ingest: &&IngestFacts| ingest.name == name && source.is_none_or(|source| ingest.source == source);
    let newest = ingests.iter().filter(is_meant);
    let newest = newest.min_by(|a, b| a.seen_secs_ago.total_cmp(&b.seen_secs_ago));
    match newest {
        Some(ingest) if is_stopped(ingest) => {
            "it resumes when its topic's quarantined records are replayed or discarded, see below"
        }
        Some(ingest) if ingest.seen_secs_ago < ENDED_SECS_MIN => {
            "it resumes by itself: the database is slow or unreachable, or the backlog is over its limits"
        }
        Some(_) | None => "its ingest has ended: look for `ingest failed` in its log, and restart the process",
    }
}

/// A source by its group, and by its name where the service gave one.
fn reading(group: &str, source: &str) -> String {
    match source.is_empty() || source == group {
        true => format!("group {group}"),
        false => format!("source {source} (group {group})"),
    }
}

/// Whether intake is stopped because all recent records were quarantined.
fn is_stopped(ingest: &IngestFacts) -> bool {
    ingest.problem.as_deref().is_some_and(|problem| problem.starts_with(INTAKE_STOPPED))
}

impl Symptoms {
    /// Symptoms of partitions that cannot be read, and of groups that no process reads for.
    pub(super) fn of_kafka(&mut self, facts: &Facts) {
        for one in &facts.partitions {
            let (group, topic, partition) = (&one.consumer_group, &one.topic, one.partition);
            let why = one.why.as_deref().map_or_else(String::new, |why| format!(": {why}"));
            // Another cluster may have the same topic and partition.
            let has_clusters = facts.groups.iter().any(|facts| facts.consumer_group == *group && facts.clusters > 1);
            let on_cluster = if has_clusters { format!(" on cluster {}", one.cluster_id) } else { String::new() };
            let what = format!("{topic}[{partition}] of group {group}{on_cluster}, for {}{why}", secs(one.secs));
            match one.state.as_str() {
                "stopped" => {
                    let cluster = if has_clusters { format!(" --cluster {}", one.cluster_id) } else { String::new() };
                    let position =
                        format!("--group {group} --topic {topic} --partition {partition}{cluster} --to OFFSET");
                    let advice =
                        format!("wharf ledger reset {position} resumes there; wharf ledger skip leaves records out");
                    self.problem("partition stopped", what, advice);
                }
                "blocked" => {
                    let advice = "its next records are damaged or compressed in an unknown way: repair the log, or wharf ledger skip";
                    self.problem("partition blocked", what, advice);
                }
                "refused" => {
                    let advice = "Kafka refuses the topic: grant READ on it. Reading resumes by itself, and no record is skipped";
                    self.problem("partition refused", what, advice);
                }
                // A partition that waits for its position has no reason.
                _ if one.why.is_some() => self.problem(
                    "partition waits",
                    what,
                    "its identity cannot be decoded now: check the schema registry, its address and the credentials; it resumes by itself",
                ),
                _ => self.problem(
                    "partition waits",
                    what,
                    "Kafka does not answer where its log begins and ends: check that the partition has a leader",
                ),
            }
        }
        let mut sources: BTreeMap<(&str, &str), Vec<&IngestFacts>> = BTreeMap::new();
        for ingest in &facts.ingests {
            sources.entry((&ingest.consumer_group, &ingest.source)).or_default().push(ingest);
        }
        for ((group, source), ingests) in sources {
            let read_by = reading(group, source);
            let (alive, silent): (Vec<_>, Vec<_>) =
                ingests.into_iter().partition(|ingest| ingest.seen_secs_ago <= SILENT_SECS_MAX);
            for ingest in &alive {
                if let Some(problem) = &ingest.problem {
                    let since = secs(ingest.problem_secs.unwrap_or_default());
                    let what = format!("{} cannot read for {read_by}, for {since}: {problem}", ingest.name);
                    let (code, advice) = match is_stopped(ingest) {
                        true => (
                            "intake stopped",
                            "wharf quarantine list shows why: correct the identity policy or the producer, then replay or discard the records",
                        ),
                        false => {
                            ("kafka error", "check the brokers, the credentials, the permissions and the topic names")
                        }
                    };
                    self.problem(code, what, advice);
                }
            }
            if let (true, Some(last)) = (alive.is_empty(), silent.iter().map(|one| one.seen_secs_ago).reduce(f64::min))
            {
                let what = format!("no process reads from Kafka for {read_by}; the last was seen {} ago", secs(last));
                self.problem("ingest dead", what, "start the service, or find out why its ingest ended");
            }
        }
    }
}
