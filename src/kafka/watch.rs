//! Compares the ledger with what this process wrote, and writes down what the process is doing, every few seconds.
//!
//! A database that was set back under a running service (a failover, a restored copy) is noticed without a record having to come: the
//! partition finds its position anew and is read again. So is a position that a person has moved. People who look without a broker find
//! the state of each partition in `inbox_partition` and that of the process in `inbox_ingest`. Costs two statements a round, whatever is read.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::RDKafkaErrorCode;
use tokio::task::spawn_blocking;

use super::desk::{TopicPartition, Watched};
use super::native::{self, leader};
use super::rebalance::Context;
use crate::accept::Intake;
use crate::store::Backend;
use crate::store::ledger::{IngestReport, LedgerRow, PartitionReport};
use crate::telemetry::events;
use crate::types::process_name;

/// How often the ledger is compared and what has changed is written.
const WATCH_EVERY: Duration = Duration::from_secs(5);
/// How often everything is written, with the lag as it is then, and Kafka is asked for the topics' ids.
const REPORT_ALL_EVERY: Duration = Duration::from_secs(60);
/// How long Kafka may take for an answer.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// How long the database may take to note that the ingest ended.
const END_WAIT: Duration = Duration::from_secs(1);

/// What was written last of each partition: its standing, and why.
type Reported = HashMap<TopicPartition, (&'static str, Option<Box<str>>)>;

struct Watch<B: Backend> {
    intake: Arc<Intake<B>>,
    context: Arc<Context>,
    /// Held only where blocking is allowed: whoever drops it last waits until it is closed.
    consumer: Weak<BaseConsumer<Context>>,
    /// The process, for people.
    name: Arc<str>,
}

/// Runs until it is aborted.
pub(super) fn run<B: Backend>(
    intake: Arc<Intake<B>>,
    consumer: &Arc<BaseConsumer<Context>>,
) -> impl Future<Output = ()> + Send + use<B> {
    let (context, consumer) = (Arc::clone(consumer.context()), Arc::downgrade(consumer));
    Watch { intake, context, consumer, name: process_name().into() }.run()
}

impl<B: Backend> Watch<B> {
    async fn run(self) {
        let mut told = Reported::new();
        let mut topics = TopicAnswers::default();
        let mut all_at = Instant::now();
        loop {
            let is_all = all_at <= Instant::now();
            if is_all {
                all_at = Instant::now() + REPORT_ALL_EVERY;
                told.clear();
                topics = self.ask_topics().await;
            }
            let watched = self.context.desk().watched();
            if self.compare(&watched, &topics).await {
                self.report(&watched, &topics, &mut told).await;
            }
            tokio::time::sleep(WATCH_EVERY).await;
        }
    }

    /// Sends partitions back whose ledger is not where this process left it. Returns whether the database answered.
    async fn compare(&self, watched: &[Watched], topics: &TopicAnswers) -> bool {
        let Some(reader) = self.context.reader() else { return true };
        let places: Vec<_> = watched.iter().map(|watched| watched.place.clone()).collect();
        let ledger = match self.intake.store.backend.ledger(&reader, &places).await {
            Ok(ledger) => ledger,
            Err(error) => {
                events::store_trouble("compare the ledger", &error);
                return false;
            }
        };
        let is_other = |row: &Option<LedgerRow>, topic: &str| {
            let read = row.as_ref().and_then(|row| row.topic_id.as_deref());
            read.zip(topics.ids.get(topic).map(String::as_str)).is_some_and(|(read, there)| read != there)
        };
        let compared = watched.iter().zip(&ledger);
        let compared: Vec<_> = compared.map(|(one, row)| (one, row.as_ref(), is_other(row, &one.place.0))).collect();
        let sent_back = self.context.desk().compare(&compared, Instant::now());
        for ((topic, partition), is_behind) in sent_back {
            match is_behind {
                true => events::kafka::ledger_behind(&self.context.group, &topic, partition),
                false => events::kafka::ledger_moved(&self.context.group, &topic, partition),
            }
        }
        true
    }

    /// Writes what has changed since it was last written.
    async fn report(&self, watched: &[Watched], topics: &TopicAnswers, told: &mut Reported) {
        let reader = self.context.reader();
        let is_new = |one: &&Watched| told.get(&one.place) != Some(&(one.standing, one.why.clone()));
        let changed: Vec<&Watched> = watched.iter().filter(is_new).collect();
        let lags = self.lags(&changed).await;
        let partitions = changed.iter().zip(lags).map(|(one, lag)| PartitionReport {
            topic: Arc::clone(&one.place.0),
            partition: one.place.1,
            standing: one.standing,
            why: one.why.as_deref().map(str::to_owned),
            lag,
        });
        let report = IngestReport {
            group: Arc::clone(&self.context.group),
            cluster_id: reader.map_or_else(|| "".into(), |reader| Arc::clone(&reader.cluster_id)),
            name: Arc::clone(&self.name),
            trouble: self.intake.stopped_why().or_else(|| self.context.trouble()).or_else(|| topics.trouble.clone()),
            partitions: partitions.collect(),
        };
        match self.intake.store.backend.report_ingest(&report).await {
            Ok(()) => told.extend(changed.into_iter().map(|one| (one.place.clone(), (one.standing, one.why.clone())))),
            Err(error) => events::store_trouble("report the ingest", &error),
        }
    }

    /// Records that Kafka had at the last fetch and that are not stored. Asks no broker.
    async fn lags(&self, watched: &[&Watched]) -> Vec<Option<i64>> {
        let stored: Vec<_> = watched.iter().map(|one| (one.place.clone(), one.stored)).collect();
        let consumer = self.consumer.clone();
        // The consumer must not be dropped on the store's thread.
        let looking = spawn_blocking(move || {
            let consumer = consumer.upgrade();
            let lag = |((topic, partition), stored): (TopicPartition, Option<i64>)| {
                let (_, high) = native::watermarks(consumer.as_ref()?, &topic, partition)?;
                Some((high - stored?).max(0))
            };
            stored.into_iter().map(lag).collect()
        });
        looking.await.unwrap_or_else(|_| vec![None; watched.len()])
    }

    /// What Kafka says of the topics that are read: their ids, and what is wrong with those that it does not know.
    async fn ask_topics(&self) -> TopicAnswers {
        let names: Vec<String> = self.intake.rules.topics().map(str::to_owned).collect();
        let consumer = self.consumer.clone();
        spawn_blocking(move || ask_topics(&consumer, &names)).await.unwrap_or_default()
    }
}

/// The process no longer reads, because it was asked to end. Waits for a moment; a row that stays is that of a process that was killed.
pub(super) fn end<B: Backend>(intake: &Intake<B>, group: &str) {
    let (backend, name) = (&intake.store.backend, process_name());
    let ending = async { tokio::time::timeout(END_WAIT, backend.end_ingest(group, &name)).await };
    if let Ok(Err(error)) = backend.reactor().block_on(ending) {
        events::store_trouble("report the end of the ingest", &error);
    }
}

#[derive(Default)]
struct TopicAnswers {
    ids: HashMap<String, String>,
    trouble: Option<String>,
}

/// Blocks.
fn ask_topics(consumer: &Weak<BaseConsumer<Context>>, names: &[String]) -> TopicAnswers {
    let mut topics = TopicAnswers::default();
    for name in names {
        let Some(consumer) = consumer.upgrade().filter(|consumer| !consumer.context().is_closing()) else { break };
        let Ok(metadata) = consumer.fetch_metadata(Some(name), ANSWER_WAIT) else { break };
        let error = metadata.topics().iter().find_map(|topic| topic.error());
        if let Some(error) = error {
            let error = RDKafkaErrorCode::from(error);
            topics.trouble.get_or_insert(format!("topic {name}: {error}"));
        } else if let Some(broker) = metadata.brokers().first() {
            let ids = leader::topic_ids_by(&consumer, broker.id(), &[name.as_str().into()], ANSWER_WAIT);
            topics.ids.extend(ids.into_iter().filter_map(|(name, id)| Some((name.to_string(), id?))));
        }
    }
    topics
}
