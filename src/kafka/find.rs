//! Finds the positions of partitions: reads the ledger, asks Kafka, decides, and writes new positions to the ledger.
//!
//! A partition is read only after its position in the ledger is durable. Database calls are retried until they succeed.
//! Kafka is asked once, with a timeout: each leader about all of its partitions at once, all leaders concurrently. The
//! answer of a leader is used as soon as it comes, so a partition without a leader, or on a broker that does not
//! answer, does not hold up others. Only new topics that begin at their end or at a time are decided before that, one
//! after the other. The group coordinator is asked only about partitions without a ledger.

mod beginning;

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rdkafka::Offset;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use tokio::task::{JoinError, JoinSet, spawn_blocking};

use super::assigned::{Asked, TopicPartition};
use super::native;
use super::native::leader::{self, Answers};
use super::position::{self, At, Committed, Known, Start, Topic};
use super::rebalance::{COMMITTED_BY_US, Context, Notice, partitions};
use super::retry_forever::retry_forever;
use crate::accept::Intake;
use crate::store::Backend;
use crate::store::ledger::{LedgerRow, Opening, Reader, Stopping};
use crate::telemetry::events;

/// The timeout for each answer of Kafka.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// The timeout for topic ids when no ledger has one to compare them with. Short, because brokers before Kafka 2.8 have
/// no ids. Without an answer the ledger gets the id when the position is next requested; until then, a topic that is
/// deleted and created again is noticed only if its log ends before the ledger.
const NEW_IDS_WAIT: Duration = Duration::from_millis(500);

/// The position of a partition; `None` when Kafka did not answer, or the ledger has moved since it was read. Then the
/// position is requested again.
#[derive(Debug)]
pub(super) struct Located {
    pub(super) asked: Asked,
    pub(super) start: Option<Start>,
}

/// A partition and its ledger row.
struct PartitionToFind {
    asked: Asked,
    ledger: Option<LedgerRow>,
    /// Used in place of the group's offset, if [`beginning::decide`] has decided the topic.
    decided: Option<Committed>,
}

/// A position and the facts that it was derived from.
struct DerivedPosition {
    found: Located,
    /// The row before the position was found.
    ledger: Option<LedgerRow>,
    /// The current id of the topic, if a broker has reported it.
    topic_id: Option<String>,
}

/// Sends the positions to `tell`, leader by leader. Runs on the store's thread, so it upgrades the consumer only inside
/// `spawn_blocking`: dropping the last reference waits until the consumer is closed.
pub(super) async fn find<B: Backend>(
    intake: Arc<Intake<B>>,
    consumer: Weak<BaseConsumer<Context>>,
    context: Arc<Context>,
    asked: Vec<Asked>,
    tell: Sender<Notice>,
) {
    let asking = consumer.clone();
    let Some(reader) = joined(spawn_blocking(move || reader(&asking)).await) else { return };
    let Some(reader) = reader else {
        let unanswered = asked.into_iter().map(|asked| Located { asked, start: None }).collect();
        return drop(tell.send(Notice::Located(unanswered)));
    };
    let (mut stopped, sought) = with_ledger(&intake, &context, &reader, asked).await;
    open(&intake, &reader, &mut stopped).await;
    drop(tell.send(Notice::Located(stopped.into_iter().map(|derived| derived.found).collect())));
    let (sought, undecided) = beginning::decide(&intake, &consumer, &context, &reader, sought).await;
    drop(tell.send(Notice::Located(undecided)));
    let asking = consumer.clone();
    let Some(ByLeader { by_leader, leaderless }) = joined(spawn_blocking(move || led(&asking, sought)).await) else {
        return;
    };
    drop(tell.send(Notice::Located(leaderless)));
    let mut asking_leaders = JoinSet::new();
    for ((leader, _), sought) in by_leader {
        let (intake, reader, consumer) = (Arc::clone(&intake), Arc::clone(&reader), consumer.clone());
        let (tell, context) = (tell.clone(), Arc::clone(&context));
        asking_leaders.spawn(async move {
            let asking = consumer.clone();
            let derived = joined(spawn_blocking(move || derive(&asking, leader, sought)).await);
            let Some(mut derived) = derived else { return };
            open(&intake, &reader, &mut derived).await;
            beginning::tell(&context, &derived);
            let begun = begun(&derived);
            drop(tell.send(Notice::Located(derived.into_iter().map(|derived| derived.found).collect())));
            joined(spawn_blocking(move || warn_of_group(&consumer, &begun)).await);
        });
    }
    while let Some(derived) = asking_leaders.join_next().await {
        joined(derived);
    }
}

/// Resumes a panic of the joined task; `None` when the runtime is shutting down.
fn joined<T>(joined: Result<T, JoinError>) -> Option<T> {
    match joined.map_err(JoinError::try_into_panic) {
        Ok(done) => Some(done),
        Err(Ok(panic)) => resume_unwind(panic),
        Err(Err(_)) => None,
    }
}

/// The group and cluster of the ledger. Without the cluster id nothing begins: positions of two clusters must not be
/// mixed. Blocks.
fn reader(consumer: &Weak<BaseConsumer<Context>>) -> Option<Arc<Reader>> {
    let consumer = consumer.upgrade()?;
    let context = consumer.context();
    context.reader().or_else(|| native::epoch::cluster_id(&consumer, ANSWER_WAIT).map(|id| context.read_from(id)))
}

/// Returns the partitions that the ledger alone decides, because they are stopped, and those about which Kafka has to
/// be asked.
async fn with_ledger<B: Backend>(
    intake: &Intake<B>,
    context: &Context,
    reader: &Reader,
    asked: Vec<Asked>,
) -> (Vec<DerivedPosition>, Vec<PartitionToFind>) {
    let places: Vec<_> = asked.iter().map(|asked| asked.place.clone()).collect();
    let (backend, places) = (&intake.store.backend, places.as_slice());
    let reading = move || backend.ledger(reader, places);
    let ledger = retry_forever(intake.limits.backoff_max, "read the ledger", reading).await;
    let (mut stopped, mut sought) = (Vec::new(), Vec::new());
    for (mut asked, ledger) in asked.into_iter().zip(ledger) {
        if asked.is_behind(ledger.as_ref()) && !asked.is_told {
            asked.is_told = true;
            report_behind(context, &asked, ledger.as_ref());
        }
        match ledger.as_ref().and_then(|ledger| position::stopped(ledger, asked.cut)) {
            Some(start) => {
                stopped.push(DerivedPosition { found: Located { asked, start: Some(start) }, ledger, topic_id: None });
            }
            None => sought.push(PartitionToFind { asked, ledger, decided: None }),
        }
    }
    (stopped, sought)
}

/// Reports a ledger that is behind: a person has moved it, or the database has lost records.
fn report_behind(context: &Context, asked: &Asked, ledger: Option<&LedgerRow>) {
    let (topic, partition) = &asked.place;
    match ledger.is_some_and(|row| position::is_reset(row, asked.has_marks)) {
        true => events::kafka::ledger_moved(&context.source, topic, *partition),
        false => events::kafka::ledger_behind(&context.source, topic, *partition),
    }
}

/// Writes the ledger rows that are needed before the partitions are read or reported as stopped. A position whose row has
/// moved since it was read is dropped, so that it is requested again: a person may have set it back.
async fn open<B: Backend>(intake: &Intake<B>, reader: &Reader, derived: &mut [DerivedPosition]) {
    let (opened, openings): (Vec<_>, Vec<Opening>) =
        derived.iter_mut().filter_map(|one| opening(one).map(|opening| (one, opening))).unzip();
    if !openings.is_empty() {
        let (backend, openings) = (&intake.store.backend, openings.as_slice());
        let writing = move || backend.open_ledger(reader, openings);
        let written = retry_forever(intake.limits.backoff_max, "write the ledger", writing).await;
        for (one, _) in opened.into_iter().zip(written).filter(|(_, is_written)| !is_written) {
            one.found.start = None;
        }
    }
    let stops: Vec<Stopping> = derived.iter().filter_map(stopping).collect();
    if !stops.is_empty() {
        let (backend, stops) = (&intake.store.backend, stops.as_slice());
        let writing = move || backend.stop_partitions(reader, stops);
        retry_forever(intake.limits.backoff_max, "write the ledger", writing).await;
    }
}

/// Partitions by the broker that leads them, and those that have no leader now.
#[derive(Default)]
struct ByLeader {
    /// By leader, and whether there is a ledger: partitions without one also wait for the group coordinator.
    by_leader: HashMap<(i32, bool), Vec<PartitionToFind>>,
    leaderless: Vec<Located>,
}

/// Groups partitions by leader, with one request for all topics. Blocks.
fn led(consumer: &Weak<BaseConsumer<Context>>, sought: Vec<PartitionToFind>) -> ByLeader {
    let mut led = ByLeader::default();
    let Some(consumer) = consumer.upgrade() else { return led };
    // There is nothing to ask, or the consumer is being closed and the answer is not needed.
    if sought.is_empty() || consumer.context().is_closing() {
        return led;
    }
    let leaders = leader::leaders(&consumer, ANSWER_WAIT);
    let mut errors = Vec::new();
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
        errors.push((one.asked.place.clone(), error));
        led.leaderless.push(Located { asked: one.asked, start: None });
    }
    report_errors(&consumer, &errors);
    led
}

/// Asks one leader about its partitions. Blocks.
fn derive(consumer: &Weak<BaseConsumer<Context>>, leader: i32, sought: Vec<PartitionToFind>) -> Vec<DerivedPosition> {
    let consumer = match consumer.upgrade() {
        Some(consumer) if !consumer.context().is_closing() => consumer,
        // The answer is not needed: the consumer is being closed.
        Some(_) | None => return Vec::new(),
    };
    let places: Vec<TopicPartition> = sought.iter().map(|one| one.asked.place.clone()).collect();
    // A ledger with a topic id must be compared with the current id before the partition is read.
    let has_id = |one: &PartitionToFind| one.ledger.as_ref().is_some_and(|ledger| ledger.topic_id.is_some());
    let ids_wait = if sought.iter().any(has_id) { ANSWER_WAIT } else { NEW_IDS_WAIT };
    let mut answers = leader::ask(&consumer, leader, &places, ANSWER_WAIT, ids_wait);
    let is_wanted =
        |one: &&PartitionToFind| one.ledger.is_none() && one.asked.stored.is_none() && one.decided.is_none();
    let wanted = sought.iter().filter(is_wanted).map(|one| one.asked.place.clone()).collect();
    let committed = committed(&consumer, wanted);
    let context = consumer.context();
    let mut errors = Vec::new();
    let mut derived = Vec::with_capacity(sought.len());
    for one in sought {
        let begin = context.begins.of(&one.asked.place.0);
        let known = known(&one, &mut answers, &committed).map(|known| beginning::as_said(known, begin));
        if let Ok(Known { ledger: None, committed: Committed::ByUs, .. }) = &known
            && one.asked.stored.is_none()
        {
            let (topic, partition) = &one.asked.place;
            events::kafka::ledger_lost(&context.source, topic, *partition);
        }
        let start = known.map(position::start);
        let topic_id = answers.topic_ids.get(&one.asked.place.0).cloned().flatten();
        let PartitionToFind { mut asked, ledger, .. } = one;
        let start = start.map_err(|error| errors.push((asked.place.clone(), error))).ok();
        // The id is written with the position, before the partition is read.
        let is_written = matches!(start, Some(Start::At(_) | Start::AfterGap { .. })) && topic_id.is_some();
        asked.has_marks |= is_written || ledger.as_ref().is_some_and(position::has_marks);
        derived.push(DerivedPosition { found: Located { asked, start }, ledger, topic_id });
    }
    report_errors(&consumer, &errors);
    derived
}

/// Emits one event for all partitions, because a broker that is away may lead many.
fn report_errors(consumer: &BaseConsumer<Context>, errors: &[(TopicPartition, KafkaError)]) {
    let Some((((topic, partition), error), others)) = errors.split_first() else { return };
    if !consumer.context().is_closing() {
        let error = format!("{error} ({topic}[{partition}] and {} other partitions)", others.len());
        consumer.context().report_error("find the position of partitions", &error);
    }
}

/// Combines the ledger and the answers of Kafka about a partition. An error means that Kafka has to be asked again.
fn known(sought: &PartitionToFind, answers: &mut Answers, committed: &Offsets) -> KafkaResult<Known> {
    let PartitionToFind { asked, ledger, decided } = sought;
    let unanswered = KafkaError::MetadataFetch(RDKafkaErrorCode::OperationTimedOut);
    let watermarks = answers.watermarks.remove(&asked.place).unwrap_or_else(|| Err(unanswered.clone()))?;
    let committed = match (ledger, decided, committed.get(&asked.place)) {
        (None, _, _) if asked.stored.is_some() => Committed::ByUs,
        (None, Some(decided), _) => *decided,
        (None, None, Some(committed)) => committed.clone()?,
        // With a ledger, the group's offset is not used.
        (Some(_), _, _) | (None, None, None) => Committed::Nothing,
    };
    let read = ledger.as_ref().and_then(|ledger| ledger.topic_id.as_deref());
    let topic = match (read, answers.topic_ids.get(&asked.place.0)) {
        // Without an answer it is unknown whether this is the topic that was read before, so Kafka is asked again.
        (Some(_), None) => return Err(unanswered),
        (Some(read), Some(Some(there))) if read != there => Topic::Recreated,
        (Some(_) | None, _) => Topic::Same,
    };
    let (low, high) = (watermarks.low, watermarks.high);
    let ledger = ledger.as_ref().map(|ledger| At { offset: ledger.next_offset, epoch: ledger.leader_epoch });
    Ok(Known { ledger, topic, committed, low, high })
}

/// Partitions that begin in this process for the first time and have a ledger, with its offset.
fn begun(derived: &[DerivedPosition]) -> Vec<(TopicPartition, i64)> {
    let is_first = |one: &&DerivedPosition| one.found.start.is_some() && one.found.asked.stored.is_none();
    let position = |one: &DerivedPosition| Some((one.found.asked.place.clone(), one.ledger.as_ref()?.next_offset));
    derived.iter().filter(is_first).filter_map(position).collect()
}

/// Warns that records which another consumer of the group has committed will be read again. No partition waits for
/// this check. Blocks.
fn warn_of_group(consumer: &Weak<BaseConsumer<Context>>, begun: &[(TopicPartition, i64)]) {
    let Some(consumer) = consumer.upgrade().filter(|consumer| !consumer.context().is_closing()) else { return };
    let offsets = committed(&consumer, begun.iter().map(|(place, _)| place.clone()).collect());
    for ((topic, partition), ledger) in begun {
        if let Some(Ok(Committed::ByAnother(committed))) = offsets.get(&(Arc::clone(topic), *partition))
            && committed > ledger
        {
            events::kafka::group_ahead(&consumer.context().source, topic, *partition, *ledger, *committed);
        }
    }
}

/// The committed offsets of the group, and who committed each.
type Offsets = HashMap<TopicPartition, KafkaResult<Committed>>;

/// Asks the group coordinator about all partitions in one request.
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

/// The ledger row to write before the partition is read; `None` if it is up to date.
fn opening(derived: &DerivedPosition) -> Option<Opening> {
    let DerivedPosition { found, ledger, topic_id } = derived;
    let (topic, partition) = &found.asked.place;
    let (at, gap_from) = match (found.start.as_ref()?, ledger) {
        (Start::Nowhere(_) | Start::Stopped { .. }, _) => return None,
        // A row at this offset is complete, unless it has no topic id and the id is known now.
        (Start::At(at), Some(row))
            if row.next_offset == at.offset && (row.topic_id.is_some() || topic_id.is_none()) =>
        {
            return None;
        }
        (Start::At(at), Some(_) | None) => (at.offset, None),
        (Start::AfterGap { from, to }, _) => (*to, Some(*from)),
    };
    let (topic, topic_id, partition) = (Arc::clone(topic), topic_id.clone(), *partition);
    let read = ledger.as_ref().map(|row| row.next_offset);
    Some(Opening { topic, topic_id, partition, read, at, gap_from })
}

/// The ledger row to write before the partition is reported as stopped; `None` if the partition is not newly stopped.
fn stopping(derived: &DerivedPosition) -> Option<Stopping> {
    let Some(Start::Nowhere(stop)) = &derived.found.start else { return None };
    let (topic, partition) = derived.found.asked.place.clone();
    Some(Stopping { topic, partition, next_offset: stop.ledger().offset, why: stop.to_string() })
}

#[cfg(test)]
mod tests;
