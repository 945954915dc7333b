//! The requests of an audit: each leader is asked about all of its partitions at once. Where few offsets are left, or a
//! transaction is open, the next record is read. Every call blocks.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::Message;
use rdkafka::{ClientConfig, Offset};

use super::super::assigned::TopicPartition;
use super::super::native;
use super::super::native::leader::{self, LogEnd};
use super::super::rebalance::{offsets, partitions};
use super::super::token::Token;
use super::{KafkaAnswers, KnownPartition, PartitionAudit};

/// The timeout for each answer of Kafka.
const ANSWER_WAIT: Duration = Duration::from_secs(10);
/// Only partitions with a lag up to this are checked for transaction markers: a longer lag is assumed to have records.
const FEW: i64 = 100;

/// Asks Kafka about these partitions, and about the other partitions of their topics. Partitions of other clusters are
/// left out.
pub(super) fn query(
    consumer: BaseConsumer,
    config: &ClientConfig,
    token: Option<&Token>,
    known: Vec<KnownPartition>,
) -> KafkaResult<KafkaAnswers> {
    authenticate(&consumer, token);
    // The group may read other clusters into the same database.
    let cluster_id = consumer.client().fetch_cluster_id(ANSWER_WAIT);
    let is_here =
        |one: &KnownPartition| one.cluster_id.is_empty() || cluster_id.as_ref().is_none_or(|id| *id == one.cluster_id);
    let known: Vec<KnownPartition> = known.into_iter().filter(is_here).collect();
    let topic_ids: HashMap<TopicPartition, String> =
        known.iter().filter_map(|one| Some((place(&one.audit), one.topic_id.clone()?))).collect();
    let mut audited: Vec<PartitionAudit> = known.into_iter().map(|one| one.audit).collect();
    let mut topics: Vec<String> = audited.iter().map(|partition| partition.topic.clone()).collect();
    topics.sort_unstable();
    topics.dedup();
    if topics.is_empty() && cluster_id.is_none() {
        // Without an answer nothing can be compared, so the audit returns an error instead of an empty result.
        return Err(KafkaError::MetadataFetch(RDKafkaErrorCode::AllBrokersDown));
    }
    let mut by_leader: HashMap<i32, Vec<TopicPartition>> = HashMap::new();
    for topic in topics {
        let metadata = consumer.fetch_metadata(Some(&topic), ANSWER_WAIT)?;
        let topic: Arc<str> = topic.into();
        for partition in metadata.topics().iter().flat_map(|topic| topic.partitions()) {
            if !audited.iter().any(|known| *known.topic == *topic && known.partition == partition.id()) {
                audited.push(PartitionAudit::unknown(&topic, partition.id()));
            }
            if partition.leader() >= 0 {
                by_leader.entry(partition.leader()).or_default().push((Arc::clone(&topic), partition.id()));
            }
        }
    }
    audited.sort_unstable_by(|a, b| (&a.topic, a.partition).cmp(&(&b.topic, b.partition)));
    for (leader, places) in by_leader {
        ask(&consumer, leader, &places, &mut audited, &topic_ids);
    }
    committed(&consumer, &mut audited)?;
    drop(consumer);
    peek_at_ends(config, token, &mut audited)?;
    Ok(KafkaAnswers { cluster_id, partitions: audited })
}

/// Sets the token. If that fails, the client has none, and Kafka does not answer, which is an error of the audit.
fn authenticate(consumer: &BaseConsumer, token: Option<&Token>) {
    let _ = token.map(|token| native::token::set(consumer.client(), token));
}

fn place(audit: &PartitionAudit) -> TopicPartition {
    (audit.topic.as_str().into(), audit.partition)
}

/// Asks one leader about the partitions that it leads, and sets the answers.
fn ask(
    consumer: &BaseConsumer,
    leader: i32,
    places: &[TopicPartition],
    audited: &mut [PartitionAudit],
    topic_ids: &HashMap<TopicPartition, String>,
) {
    let answers = leader::ask(consumer, leader, places, ANSWER_WAIT, ANSWER_WAIT);
    let stable = leader::log_ends(consumer, places, LogEnd::Committed, ANSWER_WAIT);
    let stable: HashMap<&TopicPartition, i64> =
        places.iter().zip(stable).filter_map(|(place, end)| Some((place, end.ok()?))).collect();
    for audit in audited {
        let place = place(audit);
        let Some(Ok(watermarks)) = answers.watermarks.get(&place) else { continue };
        audit.watermarks = Some((watermarks.low, watermarks.high));
        audit.open_transaction = stable.get(&place).copied().filter(|stable| *stable < watermarks.high);
        let there = answers.topic_ids.get(&place.0).and_then(Option::as_ref);
        audit.is_recreated = there.zip(topic_ids.get(&place)).is_some_and(|(there, read)| there != read);
    }
}

/// Sets the offsets that the group has committed.
fn committed(consumer: &BaseConsumer, audited: &mut [PartitionAudit]) -> KafkaResult<()> {
    let places: Vec<TopicPartition> = audited.iter().map(place).collect();
    let Some(list) = partitions(&places) else { return Ok(()) };
    let committed = consumer.committed_offsets(list, ANSWER_WAIT)?;
    for (partition, element) in audited.iter_mut().zip(committed.elements()) {
        partition.committed = match element.offset() {
            Offset::Offset(offset) => Some(offset),
            _ => None,
        };
    }
    Ok(())
}

/// Checks whether the last few offsets of a partition are records, and how long a transaction has been open.
fn peek_at_ends(config: &ClientConfig, token: Option<&Token>, audited: &mut [PartitionAudit]) -> KafkaResult<()> {
    // What can be read ends at the log's end, or at the oldest open transaction.
    let few_left = |one: &PartitionAudit| {
        let (low, high) = one.watermarks?;
        let next = one.next_offset?.max(low);
        let left = one.open_transaction.unwrap_or(high) - next;
        (1..=FEW).contains(&left).then(|| (place(one), next))
    };
    let left: Vec<(TopicPartition, i64)> =
        audited.iter().filter(|one| !one.is_recreated).filter_map(few_left).collect();
    let open: Vec<(TopicPartition, i64)> =
        audited.iter().filter_map(|one| Some((place(one), one.open_transaction?))).collect();
    let left = peek(config, token, "read_committed", &left)?;
    let open = peek(config, token, "read_uncommitted", &open)?;
    for audit in audited {
        let place = place(audit);
        let is_nothing_left = matches!(left.get(&place), Some(Peeked::End));
        audit.is_read_out = is_nothing_left && audit.open_transaction.is_none();
        audit.is_open_next = is_nothing_left && audit.open_transaction.is_some();
        audit.open_since = match open.get(&place) {
            Some(Peeked::Record(at)) => *at,
            Some(Peeked::End) | None => None,
        };
    }
    Ok(())
}

/// What a consumer gets next from a partition.
enum Peeked {
    /// A record, with its timestamp.
    Record(Option<SystemTime>),
    /// The end of the log: only markers and aborted records were left.
    End,
}

/// Reads what comes next at each of these offsets. Partitions without an answer in time are missing. Topics are read
/// one after the other, because librdkafka reports the end of a partition without its topic.
fn peek(
    config: &ClientConfig,
    token: Option<&Token>,
    isolation: &str,
    starts: &[(TopicPartition, i64)],
) -> KafkaResult<HashMap<TopicPartition, Peeked>> {
    let mut peeked = HashMap::new();
    let mut topics: Vec<&Arc<str>> = starts.iter().map(|((topic, _), _)| topic).collect();
    topics.sort_unstable();
    topics.dedup();
    for topic in topics {
        let mut config = config.clone();
        config.set("isolation.level", isolation).set("enable.partition.eof", "true");
        let consumer: BaseConsumer = config.create()?;
        authenticate(&consumer, token);
        let starts: Vec<_> = starts.iter().filter(|((of, _), _)| of == topic).cloned().collect();
        let list = offsets(&starts).unwrap_or_default();
        consumer.assign(&list)?;
        let deadline = Instant::now() + ANSWER_WAIT;
        let mut missing = starts.len();
        while missing > 0 && Instant::now() < deadline {
            let (partition, seen) = match consumer.poll(deadline.saturating_duration_since(Instant::now())) {
                Some(Ok(message)) => {
                    let millis = message.timestamp().to_millis().and_then(|millis| u64::try_from(millis).ok());
                    let at = millis.map(|millis| SystemTime::UNIX_EPOCH + Duration::from_millis(millis));
                    (message.partition(), Peeked::Record(at))
                }
                Some(Err(KafkaError::PartitionEOF(partition))) => (partition, Peeked::End),
                Some(Err(_)) => continue,
                None => break,
            };
            let place = (Arc::clone(topic), partition);
            if let std::collections::hash_map::Entry::Vacant(vacant) = peeked.entry(place) {
                vacant.insert(seen);
                missing -= 1;
            }
        }
    }
    Ok(peeked)
}
