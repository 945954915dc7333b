//! Every five seconds, compares the ledger with what this process wrote, and writes the status of the process.
//!
//! If the database of a running service loses data (a failover, a restored backup), this is noticed even if no record
//! comes: the position of the partition is determined again. The same happens when an operator moves a position. The
//! state of each partition is written to `inbox_partition` and that of the process to `inbox_ingest`, so an operator
//! needs no broker to see it. A round costs two statements, however much is read, and waits for no broker.

use std::collections::HashMap;
use std::future::pending;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rand::seq::IndexedRandom;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::metadata::{Metadata, MetadataBroker};
use tokio::task::{JoinHandle, spawn_blocking};

use super::access::Change;
use super::assigned::{TopicPartition, Watched};
use super::gauges::Gauges;
use super::native::{self, leader};
use super::rebalance::Context;
use super::sources::ReadTopics;
use crate::accept::Intake;
use crate::store::Backend;
use crate::store::ledger::{IngestReport, LedgerRow, PartitionReport};
use crate::telemetry::events;
use crate::types::{SourceName, process_name};

/// How often the ledger is compared and changes are written.
const WATCH_EVERY: Duration = Duration::from_secs(5);
/// How often everything is written, with the current lag, and Kafka is asked about the topics.
const REPORT_ALL_EVERY: Duration = Duration::from_secs(60);
/// The timeout for an answer of Kafka.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// The timeout for writing that the ingest has ended.
const END_WAIT: Duration = Duration::from_secs(1);

/// What was last written for each partition: its state, the reason, and the magnitude of its lag.
type Reported = HashMap<TopicPartition, (&'static str, Option<Box<str>>, u32)>;

/// The task that watches one ingest.
struct Watch<B: Backend> {
    intake: Arc<Intake<B>>,
    context: Arc<Context>,
    /// Upgraded only inside `spawn_blocking`: dropping the last reference waits until the consumer is closed.
    consumer: Weak<BaseConsumer<Context>>,
    /// The name of this process in `inbox_ingest`.
    name: Arc<str>,
    /// The topics that are read from this source.
    topics: Arc<ReadTopics>,
}

/// The watch as a future that never ends by itself. It holds the consumer weakly, so it does not keep it open.
pub(super) fn run<B: Backend>(
    intake: Arc<Intake<B>>,
    consumer: &Arc<BaseConsumer<Context>>,
    topics: Arc<ReadTopics>,
) -> impl Future<Output = ()> + Send + use<B> {
    let (context, consumer) = (Arc::clone(consumer.context()), Arc::downgrade(consumer));
    Watch { intake, context, consumer, name: process_name().into(), topics }.run()
}

impl<B: Backend> Watch<B> {
    /// May be aborted at any await: each round begins with new observations.
    async fn run(self) {
        let mut reported = Reported::new();
        let mut topics = TopicAnswers::default();
        let (mut all_at, mut had_problem) = (Instant::now(), false);
        // Kafka may take seconds to answer, and the rounds do not wait for it.
        let (mut asks, mut asking) = (false, None);
        let mut gauges = Gauges::new(&self.context.source.name);
        loop {
            if all_at <= Instant::now() {
                reported.clear();
                all_at = Instant::now() + REPORT_ALL_EVERY;
                asks = true;
            }
            // An answer that is still awaited may be about earlier topics, so Kafka is asked again after it.
            if asks && asking.is_none() {
                asking = Some(self.ask_topics());
                asks = false;
            }
            let mut watched = self.context.assigned().watched();
            self.mark_refused(&mut watched);
            let lags = self.lags(&watched).await;
            if cfg!(feature = "metrics") {
                gauges.set(&watched, &lags);
            }
            if self.compare(&watched, &topics).await {
                self.report(&watched, &lags, &mut reported).await;
            }
            tokio::select! {
                () = tokio::time::sleep(WATCH_EVERY) => {}
                () = self.context.check_topics.notified() => all_at = Instant::now(),
                answers = answered(&mut asking) => {
                    topics = answers;
                    self.judge_topics(&topics);
                    // A broker that is starting may not know all topics: it is asked again soon, once.
                    let has_problem = topics.problem.is_some();
                    if has_problem && !had_problem {
                        all_at = all_at.min(Instant::now() + WATCH_EVERY);
                    }
                    had_problem = has_problem;
                }
            }
        }
    }

    /// Resets partitions whose ledger is not where this process left it. Returns false if the database did not answer.
    async fn compare(&self, watched: &[Watched], topics: &TopicAnswers) -> bool {
        let Some(reader) = self.context.reader() else { return true };
        let places: Vec<_> = watched.iter().map(|watched| watched.place.clone()).collect();
        let ledger = match self.intake.store.backend.ledger(&reader, &places).await {
            Ok(ledger) => ledger,
            Err(error) => {
                events::store_error("compare the ledger", &error);
                return false;
            }
        };
        let is_other = |row: &Option<LedgerRow>, topic: &str| {
            let read = row.as_ref().and_then(|row| row.topic_id.as_deref());
            read.zip(topics.ids.get(topic).map(String::as_str)).is_some_and(|(read, there)| read != there)
        };
        let compared = watched.iter().zip(&ledger);
        let compared: Vec<_> = compared.map(|(one, row)| (one, row.as_ref(), is_other(row, &one.place.0))).collect();
        let sent_back = self.context.assigned().compare(&compared, Instant::now());
        for ((topic, partition), is_behind) in sent_back {
            match is_behind {
                true => events::kafka::ledger_behind(&self.context.source, &topic, partition),
                false => events::kafka::ledger_moved(&self.context.source, &topic, partition),
            }
        }
        true
    }

    /// Writes the state of the process and of partitions that have changed since the last report.
    async fn report(&self, watched: &[Watched], lags: &[Option<i64>], reported: &mut Reported) {
        let reader = self.context.reader();
        let state = |one: &Watched, lag| (one.state, one.why.clone(), magnitude(lag));
        let is_new = |(one, lag): &(&Watched, &Option<i64>)| reported.get(&one.place) != Some(&state(one, **lag));
        let changed: Vec<(&Watched, Option<i64>)> =
            watched.iter().zip(lags).filter(is_new).map(|(one, lag)| (one, *lag)).collect();
        let partitions = changed.iter().map(|&(one, lag)| PartitionReport {
            topic: Arc::clone(&one.place.0),
            partition: one.place.1,
            state: one.state,
            why: one.why.as_deref().map(str::to_owned),
            lag,
        });
        let stopped = reader.as_ref().and_then(|reader| self.intake.stopped_why(&reader.cluster_id));
        let report = IngestReport {
            group: Arc::clone(&self.context.source.group),
            source: Arc::clone(&self.context.source.name),
            cluster_id: reader.map_or_else(|| "".into(), |reader| Arc::clone(&reader.cluster_id)),
            name: Arc::clone(&self.name),
            problem: stopped.or_else(|| self.problem()),
            partitions: partitions.collect(),
        };
        match self.intake.store.backend.report_ingest(&report).await {
            Ok(()) => reported.extend(changed.into_iter().map(|(one, lag)| (one.place.clone(), state(one, lag)))),
            Err(error) => events::store_error("report the ingest", &error),
        }
    }

    /// Marks the partitions of topics that may not be read. librdkafka fetches nothing for them and reports no error.
    fn mark_refused(&self, watched: &mut [Watched]) {
        for one in watched.iter_mut().filter(|one| one.why.is_none()) {
            if let Some(why) = self.context.access.of_topic(&one.place.0) {
                (one.state, one.why) = ("refused", Some(why.into()));
            }
        }
    }

    /// Why this process cannot read, as one text.
    fn problem(&self) -> Option<String> {
        Some(self.context.problems().join("; ")).filter(|text| !text.is_empty())
    }

    /// Reports topics whose access has changed. The subscription may have changed since Kafka was asked.
    fn judge_topics(&self, topics: &TopicAnswers) {
        // Without all answers, a problem that is known stays.
        if topics.is_complete || topics.problem.is_some() {
            self.context.topics_judged(topics.problem.clone());
        }
        for change in self.context.access.judge_topics(topics.may_read.clone(), &self.topics.current()) {
            let source = &self.context.source;
            match change {
                Change::Refused(what, why) => events::kafka::access_refused(source, what.name(), &why),
                Change::Allowed(what) => events::kafka::access_granted(source, what.name()),
            }
        }
    }

    /// For each partition, the records that Kafka had at the last fetch and that are not stored; `None` if it is
    /// unknown. Transaction markers at the end of the log do not count. Asks no broker.
    async fn lags(&self, watched: &[Watched]) -> Vec<Option<i64>> {
        let read: Vec<_> = watched.iter().map(|one| (one.place.clone(), one.stored, one.expected)).collect();
        let (consumer, context) = (self.consumer.clone(), Arc::clone(&self.context));
        // The consumer must not be dropped on the store's thread.
        let asking = spawn_blocking(move || {
            let consumer = consumer.upgrade();
            let lag = |(place, stored, expected): (TopicPartition, Option<i64>, i64)| {
                let (_, high) = native::watermarks(consumer.as_ref()?, &place.0, place.1)?;
                Some((high - context.statistics.read_out(&place, stored?, expected)).max(0))
            };
            read.into_iter().map(lag).collect()
        });
        asking.await.unwrap_or_else(|_| vec![None; watched.len()])
    }

    /// Asks Kafka for the ids of the topics that are read, and for their errors.
    fn ask_topics(&self) -> JoinHandle<TopicAnswers> {
        let names = self.topics.current();
        let consumer = self.consumer.clone();
        spawn_blocking(move || ask_topics(&consumer, &names))
    }
}

/// Waits for the answers of Kafka; forever if it was not asked.
async fn answered(asking: &mut Option<JoinHandle<TopicAnswers>>) -> TopicAnswers {
    let answers = match asking {
        Some(asking) => asking.await.unwrap_or_default(),
        None => pending().await,
    };
    *asking = None;
    answers
}

/// The order of magnitude of a lag. The lag is written only when this changes: when it crosses a power of two, or
/// becomes known or unknown.
fn magnitude(lag: Option<i64>) -> u32 {
    lag.map_or(0, |lag| 1 + i64::BITS - lag.leading_zeros())
}

/// Removes the status row of an ingest that ends. Waits at most `END_WAIT`; a row that stays looks like that of a
/// killed process. Blocks, so it must not run on the store's thread.
pub(super) fn end<B: Backend>(intake: &Intake<B>, source: &SourceName) {
    let (backend, name) = (&intake.store.backend, process_name());
    let ending = async { tokio::time::timeout(END_WAIT, backend.end_ingest(&source.group, &source.name, &name)).await };
    if let Ok(Err(error)) = backend.reactor().block_on(ending) {
        events::store_error("report the end of the ingest", &error);
    }
}

/// The answers of Kafka about the topics that are read.
#[derive(Default)]
struct TopicAnswers {
    /// The id of each topic that has one.
    ids: HashMap<String, String>,
    /// Why a topic may not be read; `None` if it is allowed. Topics without an answer are missing.
    may_read: Vec<(String, Option<String>)>,
    /// Another problem: a topic that does not exist, or no topic that matches.
    problem: Option<String>,
    /// Whether Kafka has answered for every topic.
    is_complete: bool,
}

/// Asks one broker about all topics, at most `ANSWER_WAIT` for each of two requests. Blocks.
fn ask_topics(consumer: &Weak<BaseConsumer<Context>>, names: &[String]) -> TopicAnswers {
    let mut topics = TopicAnswers::default();
    let Some(first) = names.first() else {
        topics.problem = Some("the cluster has no topic that matches a handler's pattern".to_owned());
        topics.is_complete = true;
        return topics;
    };
    let consumer = || consumer.upgrade().filter(|consumer| !consumer.context().is_closing());
    let metadata = consumer().and_then(|consumer| consumer.fetch_metadata(Some(first), ANSWER_WAIT).ok());
    let broker = metadata.and_then(|metadata| answering(&metadata));
    let Some((consumer, broker)) = consumer().zip(broker) else { return topics };
    let names: Vec<Arc<str>> = names.iter().map(|name| name.as_str().into()).collect();
    let mut described = leader::topics_by(&consumer, broker, &names, ANSWER_WAIT);
    topics.is_complete = names.iter().all(|name| described.contains_key(name));
    for name in &names {
        match described.remove(name) {
            None => {}
            Some(Ok(described)) => {
                let refused = || format!("topic {name} may not be read: it needs READ on the topic");
                let why = described.may_read.map(|may_read| (!may_read).then(refused));
                topics.may_read.extend(why.map(|why| (name.to_string(), why)));
                topics.ids.extend(described.id.map(|id| (name.to_string(), id)));
            }
            Some(Err(error @ RDKafkaErrorCode::TopicAuthorizationFailed)) => {
                let why = format!("topic {name} may not be read: it needs READ and DESCRIBE on the topic ({error})");
                topics.may_read.push((name.to_string(), Some(why)));
            }
            Some(Err(error)) => drop(topics.problem.get_or_insert(format!("topic {name}: {error}"))),
        }
    }
    topics
}

/// The broker to ask: the one that has just answered. Its id is unknown if it was reached by an address of the
/// configuration that the cluster does not use; then any broker, because one that is away must not be asked each time.
fn answering(metadata: &Metadata) -> Option<i32> {
    let any = || metadata.brokers().choose(&mut rand::rng()).map(MetadataBroker::id);
    Some(metadata.orig_broker_id()).filter(|id| *id >= 0).or_else(any)
}
