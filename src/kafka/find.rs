//! Finds where partitions begin: asks the ledger, then Kafka, decides, and puts into the ledger what it did not have.
//!
//! A partition is read only after its place in the ledger is durable. The database is asked for ever; Kafka once, in bounded time: what
//! it does not answer for is asked again later, so that one partition without a leader holds up no other.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::Offset;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaResult;

use super::desk::Asked;
use super::native;
use super::position::{self, Committed, Known, Start};
use super::rebalance::{COMMITTED_BY_US, Context, partitions};
use crate::backoff::Backoff;
use crate::error::Result;
use crate::events;
use crate::inbox::Shared;
use crate::store::Backend;
use crate::store::seam::Opening;

/// How long Kafka may take for each answer.
const ANSWER_WAIT: Duration = Duration::from_secs(5);

/// Where a partition begins; `None` when Kafka did not say.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) asked: Asked,
    pub(super) start: Option<Start>,
}

pub(super) async fn find<B: Backend>(
    shared: Arc<Shared<B>>,
    consumer: Arc<BaseConsumer<Context>>,
    group: Arc<str>,
    asked: Vec<Asked>,
) -> Vec<Found> {
    let places: Vec<_> = asked.iter().map(|asked| asked.place.clone()).collect();
    let (backend, group) = (&shared.store.backend, &*group);
    let backoff = || Backoff::new(shared.limits.backoff_max);
    let places = places.as_slice();
    let ledger = for_ever(backoff(), "read the ledger", move || backend.ledger(group, places)).await;
    // Blocking calls: not on the store's thread.
    let unanswered: Vec<Asked> = asked.clone();
    let starts = tokio::task::spawn_blocking(move || {
        asked.into_iter().zip(ledger).map(|(asked, ledger)| found(&consumer, asked, ledger)).collect::<Vec<_>>()
    });
    let Ok(found) = starts.await else {
        return unanswered.into_iter().map(|asked| Found { asked, start: None }).collect();
    };
    let openings: Vec<Opening> = found.iter().filter_map(|(found, ledger)| opening(found, *ledger)).collect();
    if !openings.is_empty() {
        let openings = openings.as_slice();
        for_ever(backoff(), "write the ledger", move || backend.open_ledger(group, openings)).await;
    }
    found.into_iter().map(|(found, _)| found).collect()
}

async fn for_ever<T, F>(mut backoff: Backoff, what: &'static str, act: impl Fn() -> F) -> T
where
    F: Future<Output = Result<T>>,
{
    loop {
        match act().await {
            Ok(done) => return done,
            Err(error) => events::store_trouble(what, &error),
        }
        backoff.pause().await;
    }
}

fn found(consumer: &BaseConsumer<Context>, asked: Asked, ledger: Option<i64>) -> (Found, Option<i64>) {
    // Nobody waits for it any more.
    if consumer.context().is_closing() {
        return (Found { asked, start: None }, ledger);
    }
    let start = match known(consumer, &asked, ledger) {
        Ok(known) => Some(position::start(known)),
        Err(error) => {
            events::kafka::trouble(&consumer.context().group, "find the position of a partition", &error);
            None
        }
    };
    (Found { asked, start }, ledger)
}

fn known(consumer: &BaseConsumer<Context>, asked: &Asked, ledger: Option<i64>) -> KafkaResult<Known> {
    let (topic, partition) = &asked.place;
    let (low, high) = consumer.fetch_watermarks(topic, *partition, ANSWER_WAIT)?;
    let committed = match ledger {
        Some(_) => Committed::Nothing,
        None if asked.has_ledger => Committed::ByUs,
        None => committed(consumer, asked)?,
    };
    Ok(Known { ledger, committed, low, high })
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
fn opening(found: &Found, ledger: Option<i64>) -> Option<Opening> {
    let (topic, partition) = &found.asked.place;
    let (at, gap_from) = match (found.start?, ledger) {
        (Start::At(_), Some(_)) | (Start::Nowhere { .. }, _) => return None,
        (Start::At(at), None) => (at, None),
        (Start::AfterGap { from, to }, _) => (to, Some(from)),
    };
    Some(Opening { topic: Arc::clone(topic), partition: *partition, at, gap_from })
}
