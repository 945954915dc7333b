//! Finds where partitions begin: asks the ledger, then Kafka, decides, and puts into the ledger what it did not have.
//!
//! A partition is read only after its place in the ledger is durable. The database is asked for ever; Kafka once, in bounded time: what
//! it does not answer for is asked again later, so that one partition without a leader holds up no other.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::Offset;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaResult;

use super::desk::Asked;
use super::for_ever::for_ever;
use super::native;
use super::position::{self, Committed, Known, Start, Topic};
use super::rebalance::{COMMITTED_BY_US, Context, partitions};
use crate::accept::Intake;
use crate::store::Backend;
use crate::store::seam::{LedgerRow, Opening};
use crate::telemetry::events;

/// How long Kafka may take for each answer.
const ANSWER_WAIT: Duration = Duration::from_secs(5);

/// Where a partition begins; `None` when Kafka did not say.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) asked: Asked,
    pub(super) start: Option<Start>,
}

/// With what it was found by.
struct Looked {
    found: Found,
    ledger: Option<LedgerRow>,
    topic_id: Option<String>,
}

pub(super) async fn find<B: Backend>(
    intake: Arc<Intake<B>>,
    consumer: Arc<BaseConsumer<Context>>,
    asked: Vec<Asked>,
) -> Vec<Found> {
    let places: Vec<_> = asked.iter().map(|asked| asked.place.clone()).collect();
    let group = Arc::clone(&consumer.context().group);
    let (backend, group) = (&intake.store.backend, &*group);
    let backoff_max = intake.limits.backoff_max;
    let places = places.as_slice();
    let ledger = for_ever(backoff_max, "read the ledger", move || backend.ledger(group, places)).await;
    // Blocking calls: not on the store's thread.
    let unanswered: Vec<Asked> = asked.clone();
    let looking = tokio::task::spawn_blocking(move || look(&consumer, asked, ledger));
    let Ok(looked) = looking.await else {
        return unanswered.into_iter().map(|asked| Found { asked, start: None }).collect();
    };
    let openings: Vec<Opening> = looked.iter().filter_map(opening).collect();
    if !openings.is_empty() {
        let openings = openings.as_slice();
        for_ever(backoff_max, "write the ledger", move || backend.open_ledger(group, openings)).await;
    }
    looked.into_iter().map(|looked| looked.found).collect()
}

fn look(consumer: &BaseConsumer<Context>, asked: Vec<Asked>, ledger: Vec<Option<LedgerRow>>) -> Vec<Looked> {
    let mut topic_ids: HashMap<Arc<str>, Option<String>> = HashMap::new();
    let mut looked = Vec::with_capacity(asked.len());
    for (asked, ledger) in asked.into_iter().zip(ledger) {
        // Nobody waits for it any more.
        if consumer.context().is_closing() {
            looked.push(Looked { found: Found { asked, start: None }, ledger, topic_id: None });
            continue;
        }
        let topic = Arc::clone(&asked.place.0);
        let ask = || native::topic_id(consumer, &topic, ANSWER_WAIT);
        let topic_id = topic_ids.entry(Arc::clone(&topic)).or_insert_with(ask).clone();
        let start = match known(consumer, &asked, ledger.as_ref(), topic_id.as_deref()) {
            Ok(known) => Some(position::start(known)),
            Err(error) => {
                events::kafka::trouble(&consumer.context().group, "find the position of a partition", &error);
                None
            }
        };
        looked.push(Looked { found: Found { asked, start }, ledger, topic_id });
    }
    looked
}

fn known(
    consumer: &BaseConsumer<Context>,
    asked: &Asked,
    ledger: Option<&LedgerRow>,
    topic_id: Option<&str>,
) -> KafkaResult<Known> {
    let (topic, partition) = &asked.place;
    let (low, high) = consumer.fetch_watermarks(topic, *partition, ANSWER_WAIT)?;
    let committed = match ledger {
        Some(_) => Committed::Nothing,
        None if asked.has_ledger => Committed::ByUs,
        None => committed(consumer, asked)?,
    };
    let topic = match (ledger.and_then(|ledger| ledger.topic_id.as_deref()), topic_id) {
        (Some(read), Some(there)) if read != there => Topic::MadeAnew,
        (Some(_) | None, Some(_) | None) => Topic::Same,
    };
    Ok(Known { ledger: ledger.map(|ledger| ledger.next_offset), topic, committed, low, high })
}

fn committed(consumer: &BaseConsumer<Context>, asked: &Asked) -> KafkaResult<Committed> {
    let Some(list) = partitions(std::slice::from_ref(&asked.place)) else { return Ok(Committed::Nothing) };
    let list = consumer.committed_offsets(list, ANSWER_WAIT)?;
    let elements = list.elements();
    let Some(element) = elements.first() else { return Ok(Committed::Nothing) };
    element.error()?;
    Ok(match element.offset() {
        Offset::Offset(_) if native::has_metadata(&list, COMMITTED_BY_US) => Committed::ByUs,
        Offset::Offset(offset) => Committed::ByAnother(offset),
        _ => Committed::Nothing,
    })
}

/// What has to be written before the partition is read.
fn opening(looked: &Looked) -> Option<Opening> {
    let Looked { found, ledger, topic_id } = looked;
    let (topic, partition) = &found.asked.place;
    let (at, gap_from) = match (found.start?, ledger) {
        (Start::Nowhere { .. }, _) => return None,
        // A ledger that does not know its topic's id yet learns it.
        (Start::At(_), Some(LedgerRow { topic_id: read, .. })) if read.is_some() || topic_id.is_none() => return None,
        (Start::At(at), Some(_) | None) => (at, None),
        (Start::AfterGap { from, to }, _) => (to, Some(from)),
    };
    Some(Opening { topic: Arc::clone(topic), topic_id: topic_id.clone(), partition: *partition, at, gap_from })
}
