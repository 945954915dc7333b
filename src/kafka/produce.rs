//! The wire of the outbox: an idempotent producer that keeps the order of every partition, or stops.
//!
//! With `enable.gapless.guarantee` librdkafka ends the producer when a batch fails for good, so that nothing behind that batch is
//! acknowledged. A producer with a failure is never used again. Whoever drops it throws away what has not left.

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
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::outage::{Outage, Say};
use super::rebalance::without_values;
use super::settings;
use crate::outbox::{Fate, Wire, WireTrouble};
use crate::store::outbound::Outgoing;
use crate::telemetry::events;
use crate::types::{Headers, Result};

/// How long a broker may take to say which topics there are.
const METADATA_WAIT: Duration = Duration::from_secs(5);

pub(super) struct Producing {
    producer: Option<Arc<ThreadedProducer<ProducerCallbacks>>>,
    /// Topics that the brokers have.
    known: HashSet<Arc<str>>,
    is_usable: bool,
}

impl Producing {
    pub(super) fn new(config: &ClientConfig, trouble: WireTrouble) -> Result<Self> {
        let context = ProducerCallbacks { trouble, outage: Outage::default() };
        let producer = config.create_with_context(context).map_err(settings::cannot_produce)?;
        Ok(Self { producer: Some(Arc::new(producer)), known: HashSet::new(), is_usable: true })
    }

    /// Asks about topics of which nothing is known. Returns what is wrong with those that cannot be sent to.
    async fn ask(&mut self, records: &[Outgoing]) -> Vec<(Arc<str>, Fate)> {
        let mut unknown: Vec<Arc<str>> = Vec::new();
        for record in records {
            if !self.known.contains(&record.topic) && !unknown.contains(&record.topic) {
                unknown.push(Arc::clone(&record.topic));
            }
        }
        let Some(producer) = self.producer.clone().filter(|_| !unknown.is_empty()) else { return Vec::new() };
        // A blocking call: not on the store's thread.
        let asking = move || unknown.into_iter().map(|topic| (Arc::clone(&topic), state(&producer, &topic))).collect();
        let answers: Vec<(Arc<str>, Option<Fate>)> = tokio::task::spawn_blocking(asking).await.unwrap_or_default();
        let mut wrong = Vec::new();
        for (topic, state) in answers {
            match state {
                None => drop(self.known.insert(topic)),
                Some(fate) => wrong.push((topic, fate)),
            }
        }
        wrong
    }

    /// Hands the records to librdkafka. The fates of those that do not leave are set; the others are told to `tell`.
    fn hand_over(&self, records: &[Outgoing], fates: &mut [Option<Fate>], tell: &UnboundedSender<Told>) -> usize {
        let Some(producer) = &self.producer else { return 0 };
        let mut handed_over = 0;
        let mut is_stopped = None;
        for (index, record) in records.iter().enumerate() {
            if fates[index].is_some() {
                continue;
            }
            // Nothing is sent behind a record that could not be.
            if let Some(error) = &is_stopped {
                fates[index] = Some(Fate::Unknown { error: String::clone(error) });
                continue;
            }
            match producer.send(base_record(record, Box::new(Ticket { index, tell: tell.clone() }))) {
                Ok(()) => handed_over += 1,
                Err((error, _)) => {
                    let fate = fate(&error, IsItsOwn::Yes);
                    if !matches!(fate, Fate::Refused { .. }) {
                        is_stopped = Some(error.to_string());
                    }
                    fates[index] = Some(fate);
                }
            }
        }
        handed_over
    }
}

impl Wire for Producing {
    async fn send(&mut self, records: &[Outgoing]) -> Vec<Fate> {
        let wrong = self.ask(records).await;
        let of_topic = |topic: &Arc<str>| wrong.iter().find(|(name, _)| name == topic).map(|(_, fate)| fate.clone());
        let mut fates: Vec<Option<Fate>> = records.iter().map(|record| of_topic(&record.topic)).collect();
        let (tell, mut told) = unbounded_channel();
        let mut left = self.hand_over(records, &mut fates, &tell);
        self.is_usable &= !fates.iter().any(|fate| matches!(fate, Some(Fate::Unknown { .. })));
        drop(tell);
        while left > 0
            && let Some(Told { index, fate }) = told.recv().await
        {
            left -= 1;
            if self.is_usable && !matches!(fate, Fate::Acknowledged { .. }) {
                self.is_usable = false;
                // The rest would wait for ever behind a fatal error.
                if let Some(producer) = &self.producer {
                    producer.purge(PurgeConfig::default().queue().inflight());
                }
            }
            fates[index] = Some(fate);
        }
        let unheard = || Fate::Unknown { error: "the producer has ended".to_owned() };
        if fates.iter().any(|fate| matches!(fate, Some(Fate::Acknowledged { .. }))) {
            self.producer.iter().for_each(|producer| producer.context().heard());
        }
        fates.into_iter().map(|fate| fate.unwrap_or_else(unheard)).collect()
    }

    fn is_usable(&self) -> bool {
        self.is_usable
    }
}

impl Drop for Producing {
    fn drop(&mut self) {
        let Some(producer) = self.producer.take() else { return };
        producer.purge(PurgeConfig::default().queue().inflight());
        // Its end may wait for brokers: on a thread of its own. If there is none, here.
        let (give, given) = std_mpsc::channel::<Arc<ThreadedProducer<ProducerCallbacks>>>();
        let ending = thread::Builder::new().name("wharf-producer-end".to_owned());
        if ending.spawn(move || drop(given.recv())).is_ok() {
            drop(give.send(producer));
        }
    }
}

fn base_record(record: &Outgoing, ticket: Box<Ticket>) -> BaseRecord<'_, [u8], [u8], Box<Ticket>> {
    let mut base = BaseRecord::with_opaque_to(&record.topic, ticket).headers(owned(&record.headers));
    base.key = record.key.as_deref();
    base.payload = record.payload.as_deref();
    let since_1970 = record.recorded_at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    base.timestamp = since_1970.and_then(|since| i64::try_from(since.as_millis()).ok());
    base
}

/// Names that are not text are sent as text, with what cannot be read replaced.
fn owned(headers: &Headers) -> OwnedHeaders {
    headers.iter().fold(OwnedHeaders::new(), |owned, (name, value)| {
        owned.insert(Header { key: &String::from_utf8_lossy(name), value })
    })
}

/// What is wrong with a topic; nothing when records can be sent to it.
fn state(producer: &ThreadedProducer<ProducerCallbacks>, topic: &str) -> Option<Fate> {
    let metadata = match producer.client().fetch_metadata(Some(topic), METADATA_WAIT) {
        Ok(metadata) => metadata,
        Err(error) => return Some(fate(&error, IsItsOwn::No)),
    };
    let found = metadata.topics().iter().find(|found| found.name() == topic);
    let unknown = || Fate::UnknownTopic { error: "the brokers do not have the topic".to_owned() };
    match found {
        None => Some(unknown()),
        Some(found) => match found.error() {
            Some(error) => Some(fate(&KafkaError::MessageProduction(error.into()), IsItsOwn::No)),
            None if found.partitions().is_empty() => Some(unknown()),
            None => None,
        },
    }
}

/// Whether an error is surely about one record.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IsItsOwn {
    Yes,
    No,
}

fn fate(error: &KafkaError, own: IsItsOwn) -> Fate {
    use RDKafkaErrorCode as Code;
    let text = error.to_string();
    let refused = |reason| Fate::Refused { reason, error: error.to_string(), is_its_own: own == IsItsOwn::Yes };
    match error.rdkafka_error_code() {
        Some(Code::MessageSizeTooLarge | Code::InvalidMessageSize) => refused("too large"),
        Some(Code::InvalidRecord | Code::InvalidTimestamp | Code::PolicyViolation) => refused("invalid record"),
        Some(Code::InvalidTopic) => refused("invalid topic"),
        Some(Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownPartition) => {
            Fate::UnknownTopic { error: text }
        }
        Some(Code::TopicAuthorizationFailed) => Fate::Denied { error: text },
        Some(_) | None => Fate::Unknown { error: text },
    }
}

/// Which record a delivery report is about.
pub(super) struct Ticket {
    index: usize,
    tell: UnboundedSender<Told>,
}

struct Told {
    index: usize,
    fate: Fate,
}

pub(super) struct ProducerCallbacks {
    trouble: WireTrouble,
    outage: Outage,
}

impl ProducerCallbacks {
    /// A broker has acknowledged something.
    fn heard(&self) {
        if self.outage.is_on() {
            let _ = self.outage.heard(Instant::now());
        }
    }
}

impl ClientContext for ProducerCallbacks {
    fn log(&self, level: RDKafkaLogLevel, _facility: &str, line: &str) {
        let level = if self.outage.is_on() { RDKafkaLogLevel::Debug } else { level };
        events::outbox::log(level as i32, without_values(line));
    }

    fn stats(&self, _statistics: Statistics) {}

    fn error(&self, error: KafkaError, reason: &str) {
        let text = format!("{error}: {}", without_values(reason));
        self.trouble.note(text.clone());
        match self.outage.failed(Instant::now()) {
            Say::Warning { .. } => events::outbox::trouble("send", &text),
            Say::Nothing => events::outbox::quiet_trouble("send", &text),
        }
    }
}

impl ProducerContext for ProducerCallbacks {
    type DeliveryOpaque = Box<Ticket>;

    fn delivery(&self, result: &DeliveryResult<'_>, ticket: Box<Ticket>) {
        let fate = match result {
            Ok(message) => Fate::Acknowledged { partition: message.partition(), offset: message.offset() },
            Err((error, _)) => fate(error, IsItsOwn::No),
        };
        // Nobody listens any more when the batch was given up.
        let _ = ticket.tell.send(Told { index: ticket.index, fate });
    }
}
