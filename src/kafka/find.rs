//! Finds where partitions begin: asks the ledger, then Kafka, decides, and puts into the ledger what it did not have.
//!
//! A partition is read only after its place in the ledger is durable. The database is asked until it answers. Kafka is asked once, in
//! bounded time: each leader about all of its partitions in one request, all leaders at the same time. The answer of a leader is used as
//! soon as it comes, so a partition without a leader, or behind a broker that does not answer, holds up no other. The group's coordinator is
//! waited for only where there is no ledger.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rdkafka::Offset;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use tokio::task::{JoinError, JoinSet, spawn_blocking};

use super::desk::{Asked, TopicPartition};
use super::for_ever::for_ever;
use super::native;
use super::native::leader::{self, Answers};
use super::position::{self, At, Begin, Committed, Known, Topic};
use super::rebalance::{COMMITTED_BY_US, Context, Notice, partitions};
use crate::accept::Intake;
use crate::store::Backend;
use crate::store::ledger::{LedgerRow, Opening, Reader, Stopping};
use crate::telemetry::events;

/// How long Kafka may take for each answer.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// How long the ids of topics may take where no ledger has one to compare: brokers before Kafka 2.8 know none, and others may not answer.
const NEW_IDS_WAIT: Duration = Duration::from_millis(500);

/// Where a partition begins; `None` when Kafka did not say.
#[derive(Debug)]
pub(super) struct Located {
    pub(super) asked: Asked,
    pub(super) start: Option<Begin>,
}

/// A partition, with what the ledger says of it.
struct Sought {
    asked: Asked,
    ledger: Option<LedgerRow>,
}

/// With what it was found by.
struct Looked {
    found: Located,
    ledger: Option<LedgerRow>,
    topic_id: Option<String>,
}

/// Sends what it finds to `tell`, leader by leader. The consumer is held only where blocking is allowed: whoever drops it last waits until
/// it is closed, and that must not be the store's thread.
pub(super) async fn find<B: Backend>(
    intake: Arc<Intake<B>>,
    consumer: Weak<BaseConsumer<Context>>,
    asked: Vec<Asked>,
    tell: Sender<Notice>,
) {
    let asking = consumer.clone();
    let Some(reader) = joined(spawn_blocking(move || reader(&asking)).await) else { return };
    let Some(reader) = reader else {
        let unanswered = asked.into_iter().map(|asked| Located { asked, start: None }).collect();
        return drop(tell.send(Notice::Located(unanswered)));
    };
    let (stopped, sought) = with_ledger(&intake, &reader, asked).await;
    open(&intake, &reader, &stopped).await;
    drop(tell.send(Notice::Located(stopped.into_iter().map(|looked| looked.found).collect())));
    let asking = consumer.clone();
    let Some(Led { by_leader, leaderless }) = joined(spawn_blocking(move || led(&asking, sought)).await) else {
        return;
    };
    drop(tell.send(Notice::Located(leaderless)));
    let mut looking = JoinSet::new();
    for ((leader, _), sought) in by_leader {
        let (intake, reader, consumer) = (Arc::clone(&intake), Arc::clone(&reader), consumer.clone());
        let tell = tell.clone();
        looking.spawn(async move {
            let asking = consumer.clone();
            let Some(looked) = joined(spawn_blocking(move || look(&asking, leader, sought)).await) else { return };
            open(&intake, &reader, &looked).await;
            let begun = begun(&looked);
            drop(tell.send(Notice::Located(looked.into_iter().map(|looked| looked.found).collect())));
            joined(spawn_blocking(move || warn_of_group(&consumer, &begun)).await);
        });
    }
    while let Some(looked) = looking.join_next().await {
        joined(looked);
    }
}

/// A panic is passed on to whoever joins this task; `None` when the runtime is being shut down.
fn joined<T>(joined: Result<T, JoinError>) -> Option<T> {
    match joined.map_err(JoinError::try_into_panic) {
        Ok(done) => Some(done),
        Err(Ok(panic)) => resume_unwind(panic),
        Err(Err(_)) => None,
    }
}

/// Whose ledger it is. Without the cluster's id nothing begins: positions of two clusters must not be mixed. Blocks.
fn reader(consumer: &Weak<BaseConsumer<Context>>) -> Option<Arc<Reader>> {
    let consumer = consumer.upgrade()?;
    let context = consumer.context();
    context.reader().or_else(|| native::epoch::cluster_id(&consumer, ANSWER_WAIT).map(|id| context.read_from(id)))
}

/// Partitions that the ledger alone decides about, because they are stopped, and those that Kafka has to be asked about.
async fn with_ledger<B: Backend>(intake: &Intake<B>, reader: &Reader, asked: Vec<Asked>) -> (Vec<Looked>, Vec<Sought>) {
    let places: Vec<_> = asked.iter().map(|asked| asked.place.clone()).collect();
    let (backend, places) = (&intake.store.backend, places.as_slice());
    let reading = move || backend.ledger(reader, places);
    let ledger = for_ever(intake.limits.backoff_max, "read the ledger", reading).await;
    let (mut stopped, mut sought) = (Vec::new(), Vec::new());
    for (asked, ledger) in asked.into_iter().zip(ledger) {
        match ledger.as_ref().and_then(|ledger| position::stopped(ledger, asked.cut)) {
            Some(start) => {
                stopped.push(Looked { found: Located { asked, start: Some(start) }, ledger, topic_id: None });
            }
            None => sought.push(Sought { asked, ledger }),
        }
    }
    (stopped, sought)
}

/// Writes what has to be in the ledger before the partitions are read, or are reported as stopped.
async fn open<B: Backend>(intake: &Intake<B>, reader: &Reader, looked: &[Looked]) {
    let openings: Vec<Opening> = looked.iter().filter_map(opening).collect();
    if !openings.is_empty() {
        let (backend, openings) = (&intake.store.backend, openings.as_slice());
        let writing = move || backend.open_ledger(reader, openings);
        for_ever(intake.limits.backoff_max, "write the ledger", writing).await;
    }
    let stops: Vec<Stopping> = looked.iter().filter_map(stopping).collect();
    if !stops.is_empty() {
        let (backend, stops) = (&intake.store.backend, stops.as_slice());
        let writing = move || backend.stop_partitions(reader, stops);
        for_ever(intake.limits.backoff_max, "write the ledger", writing).await;
    }
}

/// Partitions by the broker that leads them, and those that have no leader now.
#[derive(Default)]
struct Led {
    /// By leader, those with a ledger apart from those without: the latter wait for the group's coordinator too.
    by_leader: HashMap<(i32, bool), Vec<Sought>>,
    leaderless: Vec<Located>,
}

/// Blocks: asks once for all topics.
fn led(consumer: &Weak<BaseConsumer<Context>>, sought: Vec<Sought>) -> Led {
    let mut led = Led::default();
    let Some(consumer) = consumer.upgrade() else { return led };
    // Nobody waits for it any more.
    if sought.is_empty() || consumer.context().is_closing() {
        return led;
    }
    let leaders = leader::leaders(&consumer, ANSWER_WAIT);
    let mut troubles = Vec::new();
    for one in sought {
        let (topic, partition) = &one.asked.place;
        let error = match leaders.as_ref().map(|leaders| leaders.get(&**topic).and_then(|led| led.get(partition))) {
            Ok(Some(&leader)) => {
                led.by_leader.entry((leader, one.ledger.is_some())).or_default().push(one);
                continue;
            }
            Ok(None) => KafkaError::MetadataFetch(RDKafkaErrorCode::LeaderNotAvailable),
            Err(error) => error.clone(),
        };
        troubles.push((one.asked.place.clone(), error));
        led.leaderless.push(Located { asked: one.asked, start: None });
    }
    tell_trouble(&consumer, &troubles);
    led
}

/// Asks one leader about its partitions. Blocks.
fn look(consumer: &Weak<BaseConsumer<Context>>, leader: i32, sought: Vec<Sought>) -> Vec<Looked> {
    let consumer = match consumer.upgrade() {
        Some(consumer) if !consumer.context().is_closing() => consumer,
        // Nobody waits for it any more.
        Some(_) | None => return Vec::new(),
    };
    let places: Vec<TopicPartition> = sought.iter().map(|one| one.asked.place.clone()).collect();
    // A ledger that has an id needs the answer.
    let has_id = |one: &Sought| one.ledger.as_ref().is_some_and(|ledger| ledger.topic_id.is_some());
    let ids_wait = if sought.iter().any(has_id) { ANSWER_WAIT } else { NEW_IDS_WAIT };
    let mut answers = leader::ask(&consumer, leader, &places, ANSWER_WAIT, ids_wait);
    let is_wanted = |one: &&Sought| one.ledger.is_none() && !one.asked.has_ledger;
    let wanted = sought.iter().filter(is_wanted).map(|one| one.asked.place.clone()).collect();
    let committed = committed(&consumer, wanted);
    let mut troubles = Vec::new();
    let mut looked = Vec::with_capacity(sought.len());
    for one in sought {
        let known = known(&one, &mut answers, &committed);
        if let Ok(Known { ledger: None, committed: Committed::ByUs, .. }) = &known
            && !one.asked.has_ledger
        {
            let (topic, partition) = &one.asked.place;
            events::kafka::ledger_lost(&consumer.context().group, topic, *partition);
        }
        let start = known.map(position::start);
        let topic_id = answers.topic_ids.get(&one.asked.place.0).cloned().flatten();
        let Sought { asked, ledger } = one;
        let start = start.map_err(|error| troubles.push((asked.place.clone(), error))).ok();
        looked.push(Looked { found: Located { asked, start }, ledger, topic_id });
    }
    tell_trouble(&consumer, &troubles);
    looked
}

/// One event for all: a broker that is away leads many partitions.
fn tell_trouble(consumer: &BaseConsumer<Context>, troubles: &[(TopicPartition, KafkaError)]) {
    let Some((((topic, partition), error), others)) = troubles.split_first() else { return };
    if !consumer.context().is_closing() {
        let error = format!("{error} ({topic}[{partition}] and {} other partitions)", others.len());
        consumer.context().tell_trouble("find the position of partitions", &error);
    }
}

fn known(sought: &Sought, answers: &mut Answers, committed: &Offsets) -> KafkaResult<Known> {
    let Sought { asked, ledger } = sought;
    let unanswered = KafkaError::MetadataFetch(RDKafkaErrorCode::OperationTimedOut);
    let watermarks = answers.watermarks.remove(&asked.place).unwrap_or_else(|| Err(unanswered.clone()))?;
    let committed = match (ledger, committed.get(&asked.place)) {
        (None, _) if asked.has_ledger => Committed::ByUs,
        (None, Some(committed)) => committed.clone()?,
        // The ledger decides, whatever the group says.
        (Some(_), _) | (None, None) => Committed::Nothing,
    };
    let read = ledger.as_ref().and_then(|ledger| ledger.topic_id.as_deref());
    let topic = match (read, answers.topic_ids.get(&asked.place.0)) {
        // Without an answer nobody knows whether this is the topic that was read: it is asked again.
        (Some(_), None) => return Err(unanswered),
        (Some(read), Some(Some(there))) if read != there => Topic::MadeAnew,
        (Some(_) | None, _) => Topic::Same,
    };
    let (low, high) = (watermarks.low, watermarks.high);
    let ledger = ledger.as_ref().map(|ledger| At { offset: ledger.next_offset, epoch: ledger.leader_epoch });
    Ok(Known { ledger, topic, committed, low, high })
}

/// Partitions that begin in this process for the first time and that the ledger knows, with the ledger's offset.
fn begun(looked: &[Looked]) -> Vec<(TopicPartition, i64)> {
    let is_first = |one: &&Looked| one.found.start.is_some() && !one.found.asked.has_ledger;
    let position = |one: &Looked| Some((one.found.asked.place.clone(), one.ledger.as_ref()?.next_offset));
    looked.iter().filter(is_first).filter_map(position).collect()
}

/// Says what a person may not expect: records that another consumer of the group has passed are going to be read again. Nothing waits for it.
/// Blocks.
fn warn_of_group(consumer: &Weak<BaseConsumer<Context>>, begun: &[(TopicPartition, i64)]) {
    let Some(consumer) = consumer.upgrade().filter(|consumer| !consumer.context().is_closing()) else { return };
    let offsets = committed(&consumer, begun.iter().map(|(place, _)| place.clone()).collect());
    for ((topic, partition), ledger) in begun {
        if let Some(Ok(Committed::ByAnother(committed))) = offsets.get(&(Arc::clone(topic), *partition))
            && committed > ledger
        {
            events::kafka::group_ahead(&consumer.context().group, topic, *partition, *ledger, *committed);
        }
    }
}

/// What the group has committed.
type Offsets = HashMap<TopicPartition, KafkaResult<Committed>>;

/// In one request.
fn committed(consumer: &BaseConsumer<Context>, places: Vec<TopicPartition>) -> Offsets {
    let Some(list) = partitions(&places) else { return Offsets::new() };
    let list = match consumer.committed_offsets(list, ANSWER_WAIT) {
        Ok(list) => list,
        Err(error) => return places.into_iter().map(|place| (place, Err(error.clone()))).collect(),
    };
    let elements = list.elements();
    let offsets = elements.iter().enumerate().map(|(index, element)| {
        let committed = element.error().map(|()| match element.offset() {
            Offset::Offset(_) if native::has_metadata(&list, index, COMMITTED_BY_US) => Committed::ByUs,
            Offset::Offset(offset) => Committed::ByAnother(offset),
            _ => Committed::Nothing,
        });
        ((element.topic().into(), element.partition()), committed)
    });
    offsets.collect()
}

/// What has to be written before the partition is read.
fn opening(looked: &Looked) -> Option<Opening> {
    let Looked { found, ledger, topic_id } = looked;
    let (topic, partition) = &found.asked.place;
    let (at, gap_from) = match (found.start.as_ref()?, ledger) {
        (Begin::Nowhere(_) | Begin::Stopped { .. }, _) => return None,
        // A ledger that does not know its topic's id yet learns it.
        (Begin::At(at), Some(row))
            if row.next_offset == at.offset && (row.topic_id.is_some() || topic_id.is_none()) =>
        {
            return None;
        }
        (Begin::At(at), Some(_) | None) => (at.offset, None),
        (Begin::AfterGap { from, to }, _) => (*to, Some(*from)),
    };
    Some(Opening { topic: Arc::clone(topic), topic_id: topic_id.clone(), partition: *partition, at, gap_from })
}

/// What has to be written before the partition is reported as stopped.
fn stopping(looked: &Looked) -> Option<Stopping> {
    let Some(Begin::Nowhere(stop)) = &looked.found.start else { return None };
    let (topic, partition) = looked.found.asked.place.clone();
    Some(Stopping { topic, partition, next_offset: stop.ledger().offset, why: stop.to_string() })
}

#[cfg(test)]
mod tests;
