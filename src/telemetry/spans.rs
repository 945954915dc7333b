//! The spans: one for each run of a handler, each call with a batch, each accepted batch and each written batch of
//! outcomes.
//!
//! As `tracing` spans they have a few short fields, which log lines repeat. The attributes of OpenTelemetry's messaging
//! conventions go only to the bridge (`traces.rs`). They are built only if there is a bridge and the span is enabled.
//!
//! The first run of a recent message is a child of the producer's span. Every other run begins a trace that is linked
//! to that span: otherwise a trace would stay open for as long as a delivery is retried. Payloads and keys are never
//! attributes.

use std::time::{Duration, SystemTime};

use tracing::{Span, field, info_span};

use super::counts::{self, Clock};
use super::events::Shown;
use super::table;
use super::traces::{self, Attribute, SpanEnd, SpanError, SpanKind, SpanParent, SpanStart};
use crate::types::{
    Error, FailedBy, Headers, Kind, Outcome, PoisonReason, Position, Record, StoredMessage, TraceContext,
};

/// The most links of one span: the default limit of OpenTelemetry's SDKs.
const LINKS_MAX: usize = 128;

// The names of attributes. Those that begin with `messaging.` are OpenTelemetry's.
const SYSTEM: &str = "messaging.system";
const OPERATION: &str = "messaging.operation.name";
const OPERATION_TYPE: &str = "messaging.operation.type";
const DESTINATION: &str = "messaging.destination.name";
const PARTITION: &str = "messaging.destination.partition.id";
const OFFSET: &str = "messaging.kafka.offset";
const TOMBSTONE: &str = "messaging.kafka.message.tombstone";
const GROUP: &str = "messaging.consumer.group.name";
const CLUSTER: &str = "messaging.kafka.cluster.id";
const MESSAGE_ID: &str = "messaging.message.id";
const MESSAGE_COUNT: &str = "messaging.batch.message_count";
const OUTCOME: &str = "wharf.outcome";
const FAILED: &str = "wharf.messages.failed";

/// The parts of a record that a span about several records needs. Never the key or the payload.
pub(crate) struct Seen<'a> {
    pub(crate) topic: &'a str,
    pub(crate) position: Option<Position>,
    pub(crate) recorded_at: Option<SystemTime>,
    pub(crate) headers: &'a Headers,
}

impl<'a> From<&'a StoredMessage> for Seen<'a> {
    fn from(message: &'a StoredMessage) -> Self {
        let StoredMessage { topic, position, recorded_at, headers, .. } = message;
        Self { topic, position: *position, recorded_at: *recorded_at, headers }
    }
}

impl<'a> From<&'a Record> for Seen<'a> {
    fn from(record: &'a Record) -> Self {
        let Record { topic, position, recorded_at, headers, .. } = record;
        Self { topic, position: *position, recorded_at: *recorded_at, headers }
    }
}

/// The span of one run of a handler. `age` returns how long ago the message was accepted, if that is known; it is used
/// for messages whose record has no timestamp.
pub(crate) fn run(
    message: &StoredMessage,
    handler: &str,
    attempt: u32,
    age: impl FnOnce() -> Option<Duration>,
) -> Span {
    let span = info_span!(
        target: "wharf::process", "run", message_id = %Shown(&message.id), handler, attempt,
        otel.name = field::Empty, otel.kind = field::Empty
    );
    if traces::is_wanted(&span) {
        begin_run(&span, message, attempt, age());
    }
    span
}

/// Passes the attributes and the parent of a run to the bridge.
fn begin_run(span: &Span, message: &StoredMessage, attempt: u32, age: Option<Duration>) {
    let producer = TraceContext::of(&message.headers);
    let age = message.recorded_at.map(age_now).or(age);
    let is_young = attempt == 1 && age.is_some_and(|age| age <= traces::parent_age_max());
    let (parent, links) = match (&producer, is_young) {
        (Some(producer), true) => (SpanParent::Remote(producer), [].as_slice()),
        (Some(producer), false) => (SpanParent::None, std::slice::from_ref(producer)),
        (None, _) => (SpanParent::None, [].as_slice()),
    };
    let (id, topic) = (Shown(&message.id).to_string(), Shown(&message.topic).to_string());
    let partition = message.position.map(|at| at.partition.to_string());
    let mut attributes = vec![
        (SYSTEM, system(message.position)),
        (OPERATION, Attribute::Text("process")),
        (OPERATION_TYPE, Attribute::Text("process")),
        (DESTINATION, Attribute::Text(&topic)),
        (MESSAGE_ID, Attribute::Text(&id)),
    ];
    attributes.extend(partition.as_deref().map(|partition| (PARTITION, Attribute::Text(partition))));
    attributes.extend(message.position.map(|at| (OFFSET, Attribute::Number(at.offset))));
    if message.payload.is_none() {
        attributes.push((TOMBSTONE, Attribute::Flag(true)));
    }
    let name = format!("process {topic}");
    let baggage = producer.as_ref().and_then(TraceContext::baggage);
    let start = SpanStart { name: &name, kind: SpanKind::Consumer, attributes: &attributes, parent, links, baggage };
    traces::begin(span, &start);
}

/// The age by this machine's clock. A timestamp in the future gives 0.
fn age_now(recorded_at: SystemTime) -> Duration {
    SystemTime::now().duration_since(recorded_at).unwrap_or_default()
}

/// The span of one call of a batch handler with several messages.
pub(crate) fn call<'a, S: Iterator<Item = Seen<'a>>>(handler: &str, messages: usize, seen: impl FnOnce() -> S) -> Span {
    let span = info_span!(
        target: "wharf::process", "run", handler, messages, otel.name = field::Empty, otel.kind = field::Empty
    );
    if traces::is_wanted(&span) {
        let operation = Operation { name: "process", kind: "process", span_kind: SpanKind::Consumer, read_by: None };
        begin_many(&span, operation, messages, seen(), SpanParent::None);
    }
    span
}

/// Who accepts records: decides whether the span is part of the caller's trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AcceptedBy {
    /// A task of Wharf, which writes records of several callers together.
    Engine,
    /// The caller, in its transaction.
    Caller,
}

/// The consumer group that has read records, and Kafka's id of their cluster.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadBy<'a> {
    pub(crate) group: &'a str,
    pub(crate) cluster_id: &'a str,
}

/// The span of one batch that is accepted. `read_by` is `None` for records that do not come from Kafka.
pub(crate) fn accept<'a, S: Iterator<Item = Seen<'a>>>(
    by: AcceptedBy,
    records: usize,
    read_by: Option<ReadBy<'_>>,
    seen: impl FnOnce() -> S,
) -> Span {
    let span = info_span!(
        target: "wharf::accept", "accept", records, otel.name = field::Empty, otel.kind = field::Empty
    );
    if traces::is_wanted(&span) {
        let operation = Operation { name: "accept", kind: "receive", span_kind: SpanKind::Client, read_by };
        let parent = match by {
            AcceptedBy::Engine => SpanParent::None,
            AcceptedBy::Caller => SpanParent::Current,
        };
        begin_many(&span, operation, records, seen(), parent);
    }
    span
}

/// The span of one batch of outcomes that is written.
fn settle(deliveries: usize) -> Span {
    let span = info_span!(
        target: "wharf::process", "settle", deliveries, otel.name = field::Empty, otel.kind = field::Empty
    );
    if traces::is_wanted(&span) {
        let operation = Operation { name: "settle", kind: "settle", span_kind: SpanKind::Client, read_by: None };
        begin_many(&span, operation, deliveries, std::iter::empty(), SpanParent::None);
    }
    span
}

/// What a span about several messages does.
#[derive(Clone, Copy)]
struct Operation<'a> {
    /// The attribute `messaging.operation.name`, and the first word of the span's name.
    name: &'static str,
    /// The attribute `messaging.operation.type`.
    kind: &'static str,
    span_kind: SpanKind,
    read_by: Option<ReadBy<'a>>,
}

/// Begins a span about several messages, linked to the span of each of their producers. If it accepts recent records
/// that all come from one producer's span, and it has no other parent, it is a child of that span instead. A record
/// without a trace comes from no span.
fn begin_many<'a>(
    span: &Span,
    operation: Operation<'_>,
    count: usize,
    seen: impl Iterator<Item = Seen<'a>>,
    parent: SpanParent<'_>,
) {
    let mut producers: Vec<TraceContext> = Vec::new();
    let mut about = About::default();
    let mut are_all_traced = true;
    for seen in seen {
        about.add(&seen);
        if producers.len() == LINKS_MAX {
            continue;
        }
        match TraceContext::of(seen.headers) {
            Some(producer) if producers.contains(&producer) => {}
            Some(producer) => producers.push(producer),
            None => are_all_traced = false,
        }
    }
    // The span that all of the messages come from, if there is one.
    let origin = match producers.as_slice() {
        [only] if are_all_traced => Some(only),
        _ => None,
    };
    let may_be_child = operation.span_kind == SpanKind::Client && about.oldest <= traces::parent_age_max();
    let (parent, links) = match (parent, origin) {
        (SpanParent::None, Some(origin)) if may_be_child => (SpanParent::Remote(origin), [].as_slice()),
        (parent, _) => (parent, producers.as_slice()),
    };
    let baggage = origin.and_then(TraceContext::baggage);
    let topic = about.topic.map(|topic| Shown(topic).to_string()).filter(|_| !about.has_several_topics);
    let partition = about.partition.filter(|_| !about.has_several_partitions).map(|partition| partition.to_string());
    let mut attributes = vec![
        (SYSTEM, if about.is_from_kafka { Attribute::Text("kafka") } else { Attribute::Text("wharf") }),
        (OPERATION, Attribute::Text(operation.name)),
        (OPERATION_TYPE, Attribute::Text(operation.kind)),
        (MESSAGE_COUNT, Attribute::Number(i64::try_from(count).unwrap_or(i64::MAX))),
    ];
    attributes.extend(topic.as_deref().map(|topic| (DESTINATION, Attribute::Text(topic))));
    if topic.is_some() {
        attributes.extend(partition.as_deref().map(|partition| (PARTITION, Attribute::Text(partition))));
    }
    if let Some(ReadBy { group, cluster_id }) = operation.read_by {
        attributes.push((GROUP, Attribute::Text(group)));
        attributes.push((CLUSTER, Attribute::Text(cluster_id)));
    }
    let name = topic.as_deref().map(|topic| format!("{} {topic}", operation.name));
    let name = name.as_deref().unwrap_or(operation.name);
    let kind = operation.span_kind;
    traces::begin(span, &SpanStart { name, kind, attributes: &attributes, parent, links, baggage });
}

/// What several messages have in common.
#[derive(Default)]
struct About<'a> {
    topic: Option<&'a str>,
    has_several_topics: bool,
    partition: Option<i32>,
    has_several_partitions: bool,
    is_from_kafka: bool,
    /// The age of the oldest record that has a timestamp.
    oldest: Duration,
}

impl<'a> About<'a> {
    fn add(&mut self, seen: &Seen<'a>) {
        self.has_several_topics |= *self.topic.get_or_insert(seen.topic) != seen.topic;
        self.is_from_kafka |= seen.position.is_some();
        self.oldest = self.oldest.max(seen.recorded_at.map(age_now).unwrap_or_default());
        if let Some(Position { partition, .. }) = seen.position {
            self.has_several_partitions |= *self.partition.get_or_insert(partition) != partition;
        }
    }
}

fn system(position: Option<Position>) -> Attribute<'static> {
    Attribute::Text(if position.is_some() { "kafka" } else { "wharf" })
}

/// Ends the span of a run. `outcome` is `None` when the claim was lost.
pub(crate) fn run_ended(span: &Span, outcome: Option<&Outcome>) {
    if !traces::is_wanted(span) {
        return;
    }
    let name = outcome.map_or("claim lost", Outcome::name);
    let error = match outcome {
        None => Some(SpanError { kind: "claim lost", text: "" }),
        Some(outcome) => error_of(outcome),
    };
    traces::end(span, &SpanEnd { attributes: &[(OUTCOME, Attribute::Text(name))], error });
}

/// Ends the span of a run that was rolled back because of others in its transaction. It runs again.
pub(crate) fn run_undone(span: &Span) {
    if traces::is_wanted(span) {
        traces::end(span, &SpanEnd { attributes: &[(OUTCOME, Attribute::Text("undone"))], error: None });
    }
}

/// The error type of a run with this outcome; empty without an error. `None` stands for a lost claim.
pub(crate) fn error_type(outcome: Option<&Outcome>) -> &'static str {
    match outcome {
        None => "claim lost",
        Some(
            Outcome::Done | Outcome::Snoozed { .. } | Outcome::Discarded { .. } | Outcome::Expired | Outcome::Released,
        ) => "",
        Some(Outcome::Retry { by, .. }) => by.as_str(),
        Some(Outcome::StoreFailed { .. }) => PoisonReason::StoreError.as_str(),
        Some(Outcome::Unavailable { .. }) => FailedBy::Unavailable.as_str(),
        Some(Outcome::Poisoned { reason: PoisonReason::RetriesExhausted(by), .. }) => by.as_str(),
        Some(Outcome::Poisoned { reason, .. }) => reason.as_str(),
    }
}

/// The error of a run with this outcome, with the text that is stored with the delivery.
fn error_of(outcome: &Outcome) -> Option<SpanError<'_>> {
    let kind = error_type(Some(outcome));
    let failed = |text| Some(SpanError { kind, text });
    match outcome {
        Outcome::Done | Outcome::Snoozed { .. } | Outcome::Discarded { .. } | Outcome::Expired | Outcome::Released => {
            None
        }
        Outcome::Retry { error, .. } | Outcome::StoreFailed { error, .. } | Outcome::Unavailable { error, .. } => {
            failed(error)
        }
        Outcome::Poisoned { error, .. } => failed(error.as_deref().unwrap_or_default()),
    }
}

/// How a call of a batch handler ended.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CallEnd<'a> {
    /// There is an answer for each message; `failed` of them are failures.
    Answered { failed: usize },
    /// The call failed for all messages.
    Failed { by: FailedBy, error: &'a str },
    /// The call was stopped, and its deliveries are released.
    Stopped,
}

/// Ends the span of a call of a batch handler.
pub(crate) fn call_ended(span: &Span, ended: CallEnd<'_>) {
    if !traces::is_wanted(span) {
        return;
    }
    let (attribute, error) = match ended {
        CallEnd::Answered { failed } => ((FAILED, Attribute::Number(i64::try_from(failed).unwrap_or(i64::MAX))), None),
        CallEnd::Failed { by, error } => {
            ((OUTCOME, Attribute::Text("failed")), Some(SpanError { kind: by.as_str(), text: error }))
        }
        CallEnd::Stopped => ((OUTCOME, Attribute::Text("released")), None),
    };
    traces::end(span, &SpanEnd { attributes: &[attribute], error });
}

/// The span and the measurement of an operation that writes a batch.
#[must_use = "call `ended` when the batch is written"]
pub(crate) struct Writing {
    pub(crate) span: Span,
    /// The name of the operation, for the metric.
    name: &'static str,
    /// The label `messaging_system`.
    system: &'static str,
    clock: Clock,
}

impl Writing {
    /// A batch of records, within this span of [`accept`].
    pub(crate) fn accept(span: Span, is_from_kafka: bool) -> Self {
        Self { span, name: "accept", system: if is_from_kafka { "kafka" } else { "wharf" }, clock: Clock::start() }
    }

    /// A batch of outcomes, within a span.
    pub(crate) fn settle(deliveries: usize) -> Self {
        Self { span: settle(deliveries), name: "settle", system: "wharf", clock: Clock::start() }
    }

    /// Called when the batch was written, or failed with this error.
    pub(crate) fn ended(self, error: Option<&Error>) {
        let values = [self.system, self.name, error.map_or("", kind_of)];
        counts::record(&table::OPERATION_DURATION, &values, self.clock.elapsed().as_secs_f64());
        if traces::is_wanted(&self.span) {
            let failed = error.map(|error| (kind_of(error), format!("{error:#}")));
            let error = failed.as_ref().map(|(kind, text)| SpanError { kind, text });
            traces::end(&self.span, &SpanEnd { attributes: &[], error });
        }
    }
}

/// The value of `error.type`: one of a fixed set of words, because it is a metric label.
fn kind_of(error: &Error) -> &'static str {
    match error.kind() {
        Kind::Connection | Kind::Passing | Kind::Server => PoisonReason::StoreError.as_str(),
        Kind::Data | Kind::Refused => "refused",
        Kind::Stopped => "stopped",
        Kind::Configuration | Kind::Schema => "configuration",
        Kind::Bug => "bug",
    }
}
