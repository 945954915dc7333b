//! Explains why work is not moving. Pure: turns facts that were read from the database into symptoms, sorted by what to
//! fix first.

mod kafka;
mod outbox;

use std::borrow::Cow;
use std::fmt;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::store::operating::SchemaVersion;
use crate::types::{Facts, HandlerStatus, HeldKeys, ProcessorReport, ProcessorStatus, State};

/// A transaction that stays open for longer is reported: it keeps vacuum from removing dead rows.
const TRANSACTION_SECS_MAX: f64 = 600.0;
/// A handler is reported as slow when its oldest delivery has been due for longer although a process runs the handler.
const DUE_SECS_MAX: f64 = 300.0;
/// A run without a timeout that takes longer is reported: it may hang forever and occupies a slot.
const RUN_SECS_MAX: f64 = 600.0;
/// A requested quarantine replay that waits longer is reported: a running inbox starts it within seconds.
const REPLAY_SECS_MAX: f64 = 60.0;
/// Dead rows are reported above this number, when they also outnumber the live rows: every statement has to step over
/// them.
const DEAD_ROWS_MAX: u64 = 200_000;

/// What [`Operator::doctor`](crate::operate::Operator::doctor) found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Diagnosis {
    /// What is wrong or worth knowing: problems first, then warnings.
    pub symptoms: Vec<Symptom>,
    /// The handlers that were examined.
    pub handlers: Vec<HandlerStatus>,
    /// The processes that were examined.
    pub processors: Vec<ProcessorStatus>,
    /// What else was examined. None when the database has no inbox schema, or an older one.
    pub facts: Option<Facts>,
}

impl Diagnosis {
    /// Whether nothing keeps work from moving and nothing waits for a person.
    pub fn is_well(&self) -> bool {
        self.symptoms.iter().all(|symptom| symptom.severity != Severity::Problem)
    }
}

/// Something that is wrong or worth knowing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Symptom {
    /// The severity.
    pub severity: Severity,
    /// A stable code for programs. It does not change between versions.
    pub code: Cow<'static, str>,
    /// What is wrong, with the name of the handler, process or table.
    pub what: String,
    /// What to do.
    pub advice: String,
    /// The current key of the handler concerned, if the symptom concerns one.
    #[serde(default)]
    pub handler_key: Option<String>,
}

/// The severity of a symptom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Severity {
    /// Work does not move, or waits for a person's decision.
    Problem,
    /// It may become a problem.
    Warning,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Problem => "problem",
            Self::Warning => "warning",
        })
    }
}

/// Returns every symptom, problems before warnings.
pub(super) fn judge(
    schema: SchemaVersion,
    facts: Option<&Facts>,
    handlers: &[HandlerStatus],
    processors: &[ProcessorStatus],
    now: SystemTime,
) -> Vec<Symptom> {
    let mut symptoms = Symptoms::default();
    symptoms.of_schema(schema);
    if let Some(facts) = facts {
        symptoms.of_database(facts);
    }
    let alive: Vec<_> = processors.iter().filter(|processor| processor.is_alive).collect();
    for handler in handlers {
        symptoms.about(&handler.handler_key, |symptoms| symptoms.of_handler(handler, alive.is_empty(), now));
    }
    for processor in alive {
        symptoms.of_processor(processor, facts);
    }
    if let Some(facts) = facts {
        symptoms.of_leftovers(facts, now);
    }
    symptoms.0.sort_by_key(|symptom| symptom.severity);
    symptoms.0
}

/// The symptoms found so far.
#[derive(Default)]
struct Symptoms(Vec<Symptom>);

impl Symptoms {
    /// Adds a problem. `code` is part of the API: programs compare it.
    fn problem(&mut self, code: &'static str, what: String, advice: impl Into<String>) {
        self.0.push(Symptom {
            severity: Severity::Problem,
            code: code.into(),
            what,
            advice: advice.into(),
            handler_key: None,
        });
    }

    /// Adds a warning, with a code as for a problem.
    fn warning(&mut self, code: &'static str, what: String, advice: impl Into<String>) {
        self.0.push(Symptom {
            severity: Severity::Warning,
            code: code.into(),
            what,
            advice: advice.into(),
            handler_key: None,
        });
    }

    /// Adds symptoms that concern this handler.
    fn about(&mut self, handler_key: &str, add: impl FnOnce(&mut Self)) {
        let before = self.0.len();
        add(self);
        for symptom in &mut self.0[before..] {
            symptom.handler_key = Some(handler_key.to_owned());
        }
    }

    /// With an older schema or none, nothing else can be examined.
    fn of_schema(&mut self, SchemaVersion { found, known }: SchemaVersion) {
        match found {
            None => self.problem("no inbox", "there is no inbox in this database".to_owned(), "wharf migrate"),
            Some(found) if found < known => self.problem(
                "migrations pending",
                format!("the schema has version {found}, this build needs {known}"),
                "wharf migrate",
            ),
            Some(found) if found > known => self.warning(
                "newer schema",
                format!("the schema has version {found}, this tool knows {known}"),
                "use a newer wharf",
            ),
            Some(_) => {}
        }
    }

    /// Symptoms of the server: its settings, connections and vacuum.
    fn of_database(&mut self, facts: &Facts) {
        if facts.is_read_only {
            let advice = "connect to the primary, or find out what made the database read-only";
            self.problem(
                "read-only",
                "the database is read-only: nothing is accepted, claimed or settled".to_owned(),
                advice,
            );
        }
        for setting in &facts.unsafe_settings {
            let advice = "switch it on: a server crash can lose acknowledged records";
            self.problem("unsafe durability", format!("{} runs with {setting}", facts.database), advice);
        }
        if let Some(connections) = &facts.connections
            && connections.used * 10 >= connections.max * 9
        {
            let what = format!("{} of {} server connections are in use", connections.used, connections.max);
            self.warning("connections", what, "run fewer processes, use smaller pools, or connect through PgBouncer");
        }
        if let Some(oldest) = facts.oldest_transaction.as_ref().filter(|oldest| oldest.secs > TRANSACTION_SECS_MAX) {
            let what = format!("a transaction has been open for {} ({})", secs(oldest.secs), oldest.who);
            self.warning(
                "held snapshot",
                what,
                "end it: until then vacuum cannot remove deleted rows, and the tables grow",
            );
        }
        for table in facts.tables.iter().filter(|table| table.dead > DEAD_ROWS_MAX.max(table.live)) {
            let what = format!("{} has {} dead rows beside {} live ones", table.name, table.dead, table.live);
            self.warning(
                "dead rows",
                what,
                format!("run VACUUM {}; find out why autovacuum does not keep up (a held snapshot?)", table.name),
            );
        }
    }

    /// Symptoms of one handler. Of the reasons why it does not progress, only the first that applies is reported.
    fn of_handler(&mut self, handler: &HandlerStatus, is_nobody_alive: bool, now: SystemTime) {
        let key = &handler.handler_key;
        let open = handler.due + handler.later + handler.held;
        if handler.poisoned > 0 {
            let what = format!(
                "{} of {key} must be replayed or discarded by a person",
                many(handler.poisoned, "poisoned delivery", "poisoned deliveries")
            );
            self.problem("poisoned", what, format!("wharf poisoned list --handler {key}"));
        }
        let is_broken = handler.breaker_opened_at.is_some();
        if is_broken {
            self.of_open_breaker(handler, now);
        }
        if handler.paused_at.is_some() {
            let what = format!("{key} is paused{}; waiting: {}", since(handler.paused_at, now), deliveries(open));
            self.problem("paused", what, format!("wharf handlers resume {key}"));
        } else if handler.processors == 0 && open > 0 {
            let advice = match is_nobody_alive {
                true => "start the service: no process is alive",
                false => "deploy a build that has the handler, or register it as a former key of its new name",
            };
            let what = format!(
                "no live process knows {key}{}; waiting: {}",
                since(handler.unknown_since, now),
                deliveries(open)
            );
            self.problem("unknown key", what, advice);
        } else if !is_broken && handler.due == 0 && handler.running == 0 && handler.later > 0 {
            let until = handler.next_due_at.map_or_else(String::new, |next| format!(" until {}", at(next)));
            let what = format!(
                "no delivery of {key} is due{until}; waiting for a retry or a delay: {}",
                deliveries(handler.later)
            );
            self.warning(
                "backoff",
                what,
                format!("wharf deliveries list --handler {key} --state pending shows when they are due, and errors"),
            );
        } else if !is_broken && handler.oldest_due_secs.is_some_and(|due| due > DUE_SECS_MAX) {
            let age = secs(handler.oldest_due_secs.unwrap_or_default());
            let what =
                format!("{} of {key} due, the oldest for {age}; running: {}", deliveries(handler.due), handler.running);
            self.warning("slow", what, "raise the handler's concurrency or add processes");
        }
    }

    /// A symptom of a handler whose breaker is open.
    fn of_open_breaker(&mut self, handler: &HandlerStatus, now: SystemTime) {
        let key = &handler.handler_key;
        let what = format!(
            "the breaker of {key} is open{}: {}; waiting: {}",
            since(handler.breaker_opened_at, now),
            handler.breaker_error.as_deref().unwrap_or("unavailable"),
            deliveries(handler.due + handler.later + handler.held)
        );
        let advice = format!("one delivery at a time is tried; to resume now: wharf handlers close-breaker {key}");
        self.problem("breaker open", what, advice);
    }

    /// Symptoms of a process that is alive and reads nothing from Kafka.
    fn of_closed_intake(&mut self, name: &str, report: &ProcessorReport, facts: Option<&Facts>) {
        let ingests = facts.map_or(&[][..], |facts| &facts.ingests);
        match (report.is_intake_open, &report.closed_sources[..]) {
            // Its only source, or a report without names.
            (Some(false), [] | [_]) => {
                let advice = kafka::advice_for_closed(name, None, ingests);
                self.problem("intake closed", format!("{name} reads nothing from Kafka"), advice);
            }
            (_, closed) => {
                for source in closed {
                    let advice = kafka::advice_for_closed(name, Some(source), ingests);
                    self.problem("intake closed", format!("{name} reads nothing from source {source}"), advice);
                }
            }
        }
    }

    /// Symptoms in the last heartbeat of a live process.
    fn of_processor(&mut self, processor: &ProcessorStatus, facts: Option<&Facts>) {
        let Some(report) = &processor.report else { return };
        let name = &processor.name;
        self.of_closed_intake(name, report, facts);
        if let Some(run) = report
            .longest_run
            .as_ref()
            .filter(|run| run.secs > run.timeout_secs.map_or(RUN_SECS_MAX, |timeout| timeout * 2.0))
        {
            let message = run.message_id.as_deref().unwrap_or("a deleted message");
            let what = format!("{name} has been running {message} of {} for {}", run.handler_key, secs(run.secs));
            let advice = match run.timeout_secs {
                Some(_) => "its timeout has passed, so the handler blocks its thread: restart the process",
                None => "if it hangs, give the handler a timeout; `wharf deliveries release` runs the delivery again",
            };
            self.warning("long run", what, advice);
        }
        if report.pool_waiting > 0 && report.pool_in_use >= report.pool_size {
            let what =
                format!("{name} has all {} connections in use, {} tasks wait", report.pool_size, report.pool_waiting);
            self.warning("pool exhausted", what, "raise pool_size, or lower accept_batches");
        }
    }

    /// A symptom of an ordered handler whose keys are blocked.
    fn of_held(&mut self, held: &HeldKeys) {
        let (keys, key) = (many(held.keys, "key", "keys"), &held.handler_key);
        let are = if held.keys == 1 { "is" } else { "are" };
        let first = held.message_id.as_deref().map_or_else(String::new, |id| format!(" (message {id})"));
        let waiting = deliveries(held.behind);
        if held.state == State::Poisoned {
            let what = format!("{keys} of {key} {are} blocked by a poisoned delivery{first}; waiting: {waiting}");
            let advice = format!("wharf handlers keys {key}, then replay or discard the deliveries that block them");
            return self.problem("held keys", what, advice);
        }
        let what =
            format!("{keys} of {key} {are} blocked by a delivery that is retried later{first}; waiting: {waiting}");
        let advice = format!("wharf handlers keys {key} shows them; they continue when the retry succeeds");
        self.warning("keys wait for a retry", what, advice);
    }

    /// Symptoms of work that waits for a person, for a crashed process or for Kafka.
    fn of_leftovers(&mut self, facts: &Facts, now: SystemTime) {
        for held in &facts.held_keys {
            self.about(&held.handler_key, |symptoms| symptoms.of_held(held));
        }
        for dead in &facts.dead_claims {
            let (key, who) = (&dead.handler_key, dead.processor.as_deref().unwrap_or("an unknown process"));
            let left = dead.until.duration_since(now).unwrap_or_default();
            let what = format!("{} of {key} locked by {who}, which has crashed", deliveries(dead.claims));
            let advice = format!("they run again at {}, in {}", at(dead.until), secs(left.as_secs_f64()));
            self.about(key, |symptoms| symptoms.problem("dead process", what, advice));
        }
        if facts.quarantined > 0 {
            let count = match facts.quarantined {
                10_000.. => "10000 records or more".to_owned(),
                fewer => many(fewer, "record", "records"),
            };
            self.problem(
                "quarantine",
                format!("{count} in quarantine must be replayed or discarded by a person"),
                "wharf quarantine list",
            );
        }
        if let Some(asked) = facts.replay_asked_secs.filter(|asked| *asked > REPLAY_SECS_MAX) {
            let what = format!(
                "a replay of quarantined records was requested {} ago, and no process has done it",
                secs(asked)
            );
            self.problem("replay waits", what, "start an inbox that subscribes to their topics");
        }
        self.of_kafka(facts);
        self.of_outbox(facts);
        for group in facts.groups.iter().filter(|group| group.gaps > 0) {
            let what =
                format!("Kafka deleted records before group {} read them: {} gaps", group.consumer_group, group.gaps);
            self.warning("gaps", what, "wharf audit lists them; raise the topics' retention");
        }
    }
}

fn deliveries(count: u64) -> String {
    many(count, "delivery", "deliveries")
}

/// Stores stop counting at `COUNT_MAX`, so that value means "that many or more".
fn many(count: u64, one: &str, more: &str) -> String {
    match count {
        1 => format!("1 {one}"),
        HandlerStatus::COUNT_MAX.. => format!("10,000+ {more}"),
        _ => format!("{count} {more}"),
    }
}

/// How long ago it was, as the end of a phrase; empty if unknown.
fn since(moment: Option<SystemTime>, now: SystemTime) -> String {
    let ago = |moment| now.duration_since(moment).unwrap_or_default();
    moment.map_or_else(String::new, |moment| format!(" for {}", secs(ago(moment).as_secs_f64())))
}

fn at(moment: SystemTime) -> String {
    humantime::format_rfc3339_seconds(moment).to_string()
}

/// Rounds to whole seconds.
fn secs(secs: f64) -> String {
    humantime::format_duration(Duration::from_secs(secs.max(0.0).round() as u64)).to_string()
}

#[cfg(test)]
mod tests;
