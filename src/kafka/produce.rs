//! Sends the records of the outbox: an idempotent producer that keeps the order of every partition, or stops.
//!
//! With `enable.gapless.guarantee`, librdkafka ends the producer when a batch fails for good, so no record after that
//! batch is acknowledged. A producer that has failed is never used again: the relay creates another one. Dropping it
//! discards unsent records.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::mpsc as std_mpsc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{DeliveryResult, Header, Message, OwnedHeaders};
use rdkafka::producer::{BaseRecord, Producer, ProducerContext, PurgeConfig, ThreadedProducer};
use rdkafka::{ClientConfig, ClientContext, Statistics};
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::{JoinHandle, JoinSet, spawn_blocking};

use super::access::{Access, Refused};
use super::outage::{Outage, Say};
use super::rebalance::{is_of_credentials, told_of_credentials, without_values};
use super::settings;
use super::token::{self, TokenProvider};
use crate::outbox::{SendResult, Wire, WireProblem};
use crate::store::outbound::Outgoing;
use crate::telemetry::events;
use crate::types::{Headers, Result};

/// The timeout for the metadata of a topic.
const METADATA_WAIT: Duration = Duration::from_secs(5);

/// The timeout of a call that asks whether a broker answers.
const CALL_WAIT: Duration = Duration::from_secs(1);

/// A producer, until its first failure.
pub(super) struct Producing {
    /// `None` only while it is dropped.
    producer: Option<Arc<ThreadedProducer<ProducerCallbacks>>>,
    /// Topics that exist and may be written to. Brokers are asked about others before their records are sent.
    known: HashSet<Arc<str>>,
    /// False once a delivery has failed, or the result of a record is unknown. Records that are refused before they are
    /// sent do not count.
    is_usable: bool,
    /// A call that asks whether a broker answers. Kept while it runs, so that there is one at a time.
    call: Option<JoinHandle<bool>>,
    /// Keeps the producer's token valid; aborted with it.
    _tokens: JoinSet<()>,
}

impl Producing {
    pub(super) fn new(
        config: &ClientConfig,
        problem: WireProblem,
        tokens: Option<&(TokenProvider, Handle)>,
    ) -> Result<Self> {
        let context = ProducerCallbacks { problem, outage: Outage::default(), access: Access::default() };
        let producer: ThreadedProducer<ProducerCallbacks> =
            config.create_with_context(context).map_err(settings::cannot_produce)?;
        let producer = Arc::new(producer);
        let mut keeping = JoinSet::new();
        if let Some((provider, reactor)) = tokens {
            let is_refused = Arc::clone(&producer.context().access.needs_token);
            keeping.spawn_on(token::keep(provider.clone(), Arc::downgrade(&producer), is_refused), reactor);
        }
        Ok(Self { producer: Some(producer), known: HashSet::new(), is_usable: true, call: None, _tokens: keeping })
    }

    /// Asks the brokers about unknown topics. Returns those that cannot be sent to, with the reason.
    async fn ask(&mut self, records: &[Outgoing]) -> Vec<(Arc<str>, SendResult)> {
        let mut unknown: Vec<Arc<str>> = Vec::new();
        for record in records {
            if !self.known.contains(&record.topic) && !unknown.contains(&record.topic) {
                unknown.push(Arc::clone(&record.topic));
            }
        }
        let Some(producer) = self.producer.clone().filter(|_| !unknown.is_empty()) else { return Vec::new() };
        // A blocking call must not run on the store's thread.
        let asking = move || unknown.into_iter().map(|topic| (Arc::clone(&topic), state(&producer, &topic))).collect();
        let answers: Vec<(Arc<str>, Option<SendResult>)> = spawn_blocking(asking).await.unwrap_or_default();
        let mut wrong = Vec::new();
        for (topic, state) in answers {
            match state {
                None => drop(self.known.insert(topic)),
                Some(result) => wrong.push((topic, result)),
            }
        }
        wrong
    }

    /// Passes the records to librdkafka; returns how many. Sets the results of records that are not sent; the results
    /// of the others come through `reports`.
    fn hand_over(
        &self,
        records: &[Outgoing],
        results: &mut [Option<SendResult>],
        reports: &UnboundedSender<RecordReport>,
    ) -> usize {
        let Some(producer) = &self.producer else { return 0 };
        let mut handed_over = 0;
        let mut is_stopped = None;
        for (index, record) in records.iter().enumerate() {
            if results[index].is_some() {
                continue;
            }
            // After a record that could not be sent, no later one is sent: it might overtake a record of its key.
            if let Some(error) = &is_stopped {
                results[index] = Some(SendResult::Unknown { error: String::clone(error) });
                continue;
            }
            match producer.send(base_record(record, Box::new(Ticket { index, reports: reports.clone() }))) {
                Ok(()) => handed_over += 1,
                Err((error, _)) => {
                    let result = result_of(&error, IsItsOwn::Yes);
                    if !matches!(result, SendResult::Refused { .. }) {
                        is_stopped = Some(error.to_string());
                    }
                    results[index] = Some(result);
                }
            }
        }
        handed_over
    }

    /// Drops the records that wait; each is reported as failed. After a fatal error they would wait forever.
    fn purge(&self) -> bool {
        self.producer.iter().for_each(|producer| producer.purge(all_at_once()));
        true
    }
}

impl Wire for Producing {
    async fn send(&mut self, records: &[Outgoing]) -> Vec<SendResult> {
        // The answer of an earlier call would be out of date when `reaches_brokers` is called again.
        self.call = None;
        let wrong = self.ask(records).await;
        let of_topic =
            |topic: &Arc<str>| wrong.iter().find(|(name, _)| name == topic).map(|(_, result)| result.clone());
        let mut results: Vec<Option<SendResult>> = records.iter().map(|record| of_topic(&record.topic)).collect();
        let (reports, mut reported) = unbounded_channel();
        let mut left = self.hand_over(records, &mut results, &reports);
        self.is_usable &= !results.iter().any(|result| matches!(result, Some(SendResult::Unknown { .. })));
        drop(reports);
        // The error may have come before all records were handed over.
        let is_fatal = self.producer.as_ref().is_some_and(|producer| producer.client().fatal_error().is_some());
        self.is_usable &= !is_fatal;
        let mut is_purged = is_fatal && self.purge();
        while left > 0
            && let Some(RecordReport { index, result }) = reported.recv().await
        {
            left -= 1;
            if !is_purged && !matches!(result, SendResult::Acknowledged { .. }) {
                self.is_usable = false;
                is_purged = self.purge();
            }
            results[index] = Some(result);
        }
        let unheard = || SendResult::Unknown { error: "the producer was closed".to_owned() };
        if results.iter().any(|result| matches!(result, Some(SendResult::Acknowledged { .. }))) {
            self.producer.iter().for_each(|producer| producer.context().heard());
        }
        results.into_iter().map(|result| result.unwrap_or_else(unheard)).collect()
    }

    async fn reaches_brokers(&mut self) -> bool {
        let Some(producer) = &self.producer else { return false };
        // A blocking call must not run on the store's thread.
        let call = self.call.get_or_insert_with(|| {
            let (producer, topic) = (Arc::downgrade(producer), self.known.iter().next().cloned());
            spawn_blocking(move || producer.upgrade().is_some_and(|producer| call_brokers(&producer, topic.as_deref())))
        });
        let is_reached = call.await.unwrap_or(false);
        self.call = None;
        is_reached
    }

    fn is_usable(&self) -> bool {
        self.is_usable
    }
}

impl Drop for Producing {
    fn drop(&mut self) {
        let Some(producer) = self.producer.take() else { return };
        producer.purge(all_at_once());
        // Closing may wait for brokers, so it gets its own thread. If no thread can be created, it happens here.
        let (give, given) = std_mpsc::channel::<Arc<ThreadedProducer<ProducerCallbacks>>>();
        let ending = thread::Builder::new().name("wharf-producer-end".to_owned());
        if ending.spawn(move || drop(given.recv())).is_ok() {
            drop(give.send(producer));
        }
    }
}

/// Drops all records, and waits for no broker thread: one that resolves a host name may be blocked for minutes. It drops
/// its records before it sends anything again.
fn all_at_once() -> PurgeConfig {
    PurgeConfig::default().queue().inflight().non_blocking()
}

/// The record for librdkafka, which copies key and payload when it is sent.
fn base_record(record: &Outgoing, ticket: Box<Ticket>) -> BaseRecord<'_, [u8], [u8], Box<Ticket>> {
    let mut base = BaseRecord::with_opaque_to(&record.topic, ticket).headers(owned(&record.headers));
    base.key = record.key.as_deref();
    base.payload = record.payload.as_deref();
    let since_1970 = record.recorded_at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    base.timestamp = since_1970.and_then(|since| i64::try_from(since.as_millis()).ok());
    base
}

/// Copies the headers. Names that are not UTF-8 are sent with replacement characters.
fn owned(headers: &Headers) -> OwnedHeaders {
    headers.iter().fold(OwnedHeaders::new(), |owned, (name, value)| {
        owned.insert(Header { key: &String::from_utf8_lossy(name), value })
    })
}

/// Asks the brokers about a topic. Returns what is wrong with it; `None` when records can be sent to it. Blocks.
fn state(producer: &ThreadedProducer<ProducerCallbacks>, topic: &str) -> Option<SendResult> {
    let metadata = match producer.client().fetch_metadata(Some(topic), METADATA_WAIT) {
        Ok(metadata) => metadata,
        Err(error) => return Some(result_of(&error, IsItsOwn::No)),
    };
    let found = metadata.topics().iter().find(|found| found.name() == topic);
    let unknown = || SendResult::UnknownTopic { error: "the topic does not exist".to_owned() };
    match found {
        None => Some(unknown()),
        Some(found) => match found.error() {
            Some(error) => Some(result_of(&KafkaError::MessageProduction(error.into()), IsItsOwn::No)),
            None if found.partitions().is_empty() => Some(unknown()),
            None => None,
        },
    }
}

/// Asks for metadata: librdkafka does not report that a broker is back. Returns whether one has answered and accepts the
/// client. Asks about one topic, if there is one, because the list of all topics may be long. Blocks.
fn call_brokers(producer: &ThreadedProducer<ProducerCallbacks>, topic: Option<&str>) -> bool {
    let is_answered = producer.client().fetch_metadata(topic, CALL_WAIT).is_ok();
    if is_answered {
        producer.context().heard();
    }
    // An open connection may still answer after its token has expired.
    is_answered && !producer.context().access.is_shut_out()
}

/// Whether an error is certainly about one record, and not about the batch or the topic that it is in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IsItsOwn {
    Yes,
    No,
}

/// What an error means for a record: whether Kafka has rejected it for good, or it can be sent again.
fn result_of(error: &KafkaError, own: IsItsOwn) -> SendResult {
    use RDKafkaErrorCode as Code;
    let text = error.to_string();
    let refused = |reason| SendResult::Refused { reason, error: error.to_string(), is_its_own: own == IsItsOwn::Yes };
    match error.rdkafka_error_code() {
        Some(Code::MessageSizeTooLarge | Code::InvalidMessageSize) => refused("too large"),
        Some(Code::InvalidRecord | Code::InvalidTimestamp | Code::PolicyViolation) => refused("invalid record"),
        Some(Code::InvalidTopic) => refused("invalid topic"),
        Some(Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownPartition) => {
            SendResult::UnknownTopic { error: text }
        }
        Some(Code::TopicAuthorizationFailed) => SendResult::Denied { error: text },
        Some(_) | None => SendResult::Unknown { error: text },
    }
}

/// Passed through librdkafka with each record, so that its delivery report can be assigned to it.
pub(super) struct Ticket {
    /// The index of the record in the batch.
    index: usize,
    reports: UnboundedSender<RecordReport>,
}

/// The result of one record of a batch, from its delivery report.
struct RecordReport {
    index: usize,
    result: SendResult,
}

/// The callbacks of a producer, which run on rdkafka's polling thread.
pub(super) struct ProducerCallbacks {
    problem: WireProblem,
    outage: Outage,
    access: Access,
}

impl ProducerCallbacks {
    /// Called when a broker has answered: ends an outage, and a refusal of the credentials.
    fn heard(&self) {
        if self.outage.is_on() {
            let _ = self.outage.heard(Instant::now());
        }
        if self.access.allow(&Refused::Credentials) {
            events::outbox::access_granted();
        }
    }

    pub(super) fn has_token(&self) {
        if self.access.allow(&Refused::Token) {
            events::outbox::access_granted();
        }
    }

    pub(super) fn has_no_token(&self, error: &str) {
        self.refused(Refused::Token, error);
    }

    /// Reports a refusal once. The reason stays in the relay's health until a broker answers.
    fn refused(&self, what: Refused, error: &str) {
        self.problem.note(error.to_owned());
        match self.access.refuse(what, || error.to_owned()) {
            true => events::outbox::access_refused(error),
            false => events::outbox::quiet_failure("send", &error),
        }
    }
}

impl ClientContext for ProducerCallbacks {
    fn log(&self, level: RDKafkaLogLevel, _facility: &str, line: &str) {
        let is_told = self.outage.is_on() || self.access.is_shut_out();
        let level = if is_told { RDKafkaLogLevel::Debug } else { level };
        events::outbox::log(level as i32, without_values(line));
    }

    fn stats(&self, _statistics: Statistics) {}

    fn error(&self, error: KafkaError, reason: &str) {
        let text = format!("{error}: {}", without_values(reason));
        if is_of_credentials(&error) {
            return self.refused(Refused::Credentials, &told_of_credentials(&text));
        }
        // librdkafka reports brokers that refuse the credentials as down.
        if self.access.is_shut_out() {
            return events::outbox::quiet_failure("send", &text);
        }
        self.problem.note(text.clone());
        match self.outage.failed(Instant::now()) {
            Say::Warning { .. } => events::outbox::failure("send", &text),
            Say::Nothing => events::outbox::quiet_failure("send", &text),
        }
    }
}

impl ProducerContext for ProducerCallbacks {
    type DeliveryOpaque = Box<Ticket>;

    fn delivery(&self, result: &DeliveryResult<'_>, ticket: Box<Ticket>) {
        let result = match result {
            Ok(message) => SendResult::Acknowledged { partition: message.partition(), offset: message.offset() },
            Err((error, _)) => result_of(error, IsItsOwn::No),
        };
        // Fails when the receiver was dropped: the relay does not wait for the batch any more.
        let _ = ticket.reports.send(RecordReport { index: ticket.index, result });
    }
}

#[cfg(test)]
mod tests;
