//! Decides where a new topic begins that is configured to begin at its end or at a time.
//!
//! The end of a topic moves. So the offsets of all partitions are requested at once and written in one statement before
//! anything of the topic is read: after a crash, another process or a restart finds the same beginning. If the ledger
//! has other partitions of the topic, a partition without a ledger was added later, and begins at its earliest record.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Weak};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use tokio::task::spawn_blocking;

use super::super::assigned::TopicPartition;
use super::super::begin::{Begin, millis};
use super::super::native::leader::{self, LogEnd};
use super::super::position::{Committed, Known};
use super::super::rebalance::Context;
use super::super::retry_forever::retry_forever;
use super::{ANSWER_WAIT, DerivedPosition, Located, PartitionToFind, committed, joined};
use crate::accept::Intake;
use crate::store::Backend;
use crate::store::ledger::{Opening, Reader};
use crate::telemetry::events;

/// Where a topic begins whose partitions have no ledger.
enum Beginning {
    /// At these offsets, one for each partition.
    At(Vec<Opening>),
    /// An inbox has committed offsets for the group, so there was a ledger.
    LedgerLost,
}

/// Decides where topics begin that are new and need one decision for all of their partitions, and writes that to the
/// ledger. Returns the partitions that can continue, and those of topics that Kafka did not answer about.
pub(super) async fn decide<B: Backend>(
    intake: &Intake<B>,
    consumer: &Weak<BaseConsumer<Context>>,
    context: &Context,
    reader: &Reader,
    mut sought: Vec<PartitionToFind>,
) -> (Vec<PartitionToFind>, Vec<Located>) {
    let topics = new_topics(context, &sought);
    if topics.is_empty() {
        return (sought, Vec::new());
    }
    let (backend, asked) = (&intake.store.backend, topics.as_slice());
    let known =
        retry_forever(intake.limits.backoff_max, "read the ledger", move || backend.has_ledger(reader, asked)).await;
    let mut undecided = HashSet::new();
    let mut lost = HashSet::new();
    for (topic, _) in topics.iter().zip(known).filter(|(_, is_known)| !is_known) {
        let begin = context.begins.of(topic);
        let (asking, name) = (consumer.clone(), Arc::clone(topic));
        match joined(spawn_blocking(move || derive(&asking, &name, begin)).await).flatten() {
            None => drop(undecided.insert(Arc::clone(topic))),
            Some(Beginning::LedgerLost) => drop(lost.insert(Arc::clone(topic))),
            Some(Beginning::At(openings)) => {
                let openings = openings.as_slice();
                let writing = move || backend.begin_topic(reader, openings);
                retry_forever(intake.limits.backoff_max, "write the ledger", writing).await;
                events::kafka::topic_begins(&context.source, topic, &begin, openings.len());
            }
        }
    }
    read_again(intake, reader, &topics, &mut sought).await;
    for one in sought.iter_mut().filter(|one| one.ledger.is_none() && topics.contains(&one.asked.place.0)) {
        let is_lost = lost.contains(&one.asked.place.0);
        one.decided = Some(if is_lost { Committed::ByUs } else { Committed::Nothing });
    }
    let (waiting, decided): (Vec<_>, Vec<_>) =
        sought.into_iter().partition(|one| one.ledger.is_none() && undecided.contains(&one.asked.place.0));
    (decided, waiting.into_iter().map(|one| Located { asked: one.asked, start: None }).collect())
}

/// Applies [`Begin::Earliest`]: the group's offset is ignored, unless an inbox has committed it.
pub(super) fn as_said(known: Known, begin: Begin) -> Known {
    match (begin, known.committed) {
        (Begin::Earliest, Committed::ByAnother(_)) => Known { committed: Committed::Nothing, ..known },
        (Begin::Group | Begin::Earliest | Begin::Latest | Begin::At(_), _) => known,
    }
}

/// Reports where new topics begin. [`decide`] reports those that it decided.
pub(super) fn tell(context: &Context, derived: &[DerivedPosition]) {
    let is_new =
        |one: &&DerivedPosition| one.ledger.is_none() && one.found.asked.stored.is_none() && one.found.start.is_some();
    let mut begun: BTreeMap<&Arc<str>, usize> = BTreeMap::new();
    for one in derived.iter().filter(is_new) {
        *begun.entry(&one.found.asked.place.0).or_default() += 1;
    }
    for (topic, partitions) in begun {
        let begin = match context.begins.of(topic) {
            Begin::Group => Begin::Group,
            // With `Latest` and `At`, these partitions were added to the topic later, or their ledger was lost.
            Begin::Earliest | Begin::Latest | Begin::At(_) => Begin::Earliest,
        };
        events::kafka::topic_begins(&context.source, topic, &begin, partitions);
    }
}

/// The topics of partitions without a ledger that are configured to begin at their end or at a time.
fn new_topics(context: &Context, sought: &[PartitionToFind]) -> Vec<Arc<str>> {
    let is_new = |one: &&PartitionToFind| one.ledger.is_none() && one.asked.stored.is_none();
    let is_of_topic = |topic: &Arc<str>| match context.begins.of(topic) {
        Begin::Latest | Begin::At(_) => true,
        Begin::Group | Begin::Earliest => false,
    };
    let topics = sought.iter().filter(is_new).map(|one| Arc::clone(&one.asked.place.0));
    let mut topics: Vec<Arc<str>> = topics.filter(is_of_topic).collect();
    topics.sort_unstable();
    topics.dedup();
    topics
}

/// Reads the rows that were written meanwhile, by this process or by another one that was faster.
async fn read_again<B: Backend>(
    intake: &Intake<B>,
    reader: &Reader,
    topics: &[Arc<str>],
    sought: &mut [PartitionToFind],
) {
    let is_of_topic = |one: &&mut PartitionToFind| one.ledger.is_none() && topics.contains(&one.asked.place.0);
    let mut unread: Vec<&mut PartitionToFind> = sought.iter_mut().filter(is_of_topic).collect();
    let places: Vec<TopicPartition> = unread.iter().map(|one| one.asked.place.clone()).collect();
    let (backend, places) = (&intake.store.backend, places.as_slice());
    let rows =
        retry_forever(intake.limits.backoff_max, "read the ledger", move || backend.ledger(reader, places)).await;
    for (one, row) in unread.iter_mut().zip(rows) {
        one.ledger = row;
    }
}

/// Asks where a topic begins; `None` when Kafka did not answer. Blocks.
fn derive(consumer: &Weak<BaseConsumer<Context>>, topic: &Arc<str>, begin: Begin) -> Option<Beginning> {
    // The answer is not needed if the consumer is being closed.
    let consumer = consumer.upgrade().filter(|consumer| !consumer.context().is_closing())?;
    ask(&consumer, topic, begin)
        .inspect_err(|error| {
            let error = format!("{error} (topic {topic})");
            consumer.context().report_error("find where a topic begins", &error);
        })
        .ok()
}

/// Like `derive`, with the error. All partitions must be answered for: the beginning is written for the whole topic.
fn ask(consumer: &BaseConsumer<Context>, topic: &Arc<str>, begin: Begin) -> KafkaResult<Beginning> {
    let places = places(consumer, topic)?;
    for answer in committed(consumer, places.clone()).into_values() {
        if answer? == Committed::ByUs {
            return Ok(Beginning::LedgerLost);
        }
    }
    // Read before the search for a time: a record that is written after this and before the search is at this end or
    // behind it, so it is not skipped if the search does not find it.
    let ends = leader::log_ends(consumer, &places, LogEnd::Committed, ANSWER_WAIT);
    let offsets: Vec<KafkaResult<i64>> = match begin {
        Begin::At(time) => {
            let found = leader::offsets_at(consumer, &places, millis(time), ANSWER_WAIT);
            let at = |(end, found): (KafkaResult<i64>, KafkaResult<Option<i64>>)| found?.map_or(end, Ok);
            ends.into_iter().zip(found).map(at).collect()
        }
        Begin::Latest | Begin::Group | Begin::Earliest => ends,
    };
    let opening = |((topic, partition), offset): (TopicPartition, KafkaResult<i64>)| {
        offset.map(|at| Opening { topic, topic_id: None, partition, read: None, at, gap_from: None })
    };
    places.iter().cloned().zip(offsets).map(opening).collect::<KafkaResult<_>>().map(Beginning::At)
}

/// All partitions of the topic. Fails unless each has a leader, because only a leader knows where the log ends.
fn places(consumer: &BaseConsumer<Context>, topic: &Arc<str>) -> KafkaResult<Vec<TopicPartition>> {
    let metadata = consumer.fetch_metadata(Some(topic), ANSWER_WAIT)?;
    let unknown = || KafkaError::MetadataFetch(RDKafkaErrorCode::LeaderNotAvailable);
    let found = metadata.topics().iter().find(|found| found.name() == &**topic).ok_or_else(unknown)?;
    if let Some(error) = found.error() {
        return Err(KafkaError::MetadataFetch(error.into()));
    }
    let has_leaders = found.partitions().iter().all(|partition| partition.leader() >= 0);
    if found.partitions().is_empty() || !has_leaders {
        return Err(unknown());
    }
    Ok(found.partitions().iter().map(|partition| (Arc::clone(topic), partition.id())).collect())
}
