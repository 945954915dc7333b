//! Checks continuously, while the test runs: committed offset <= ledger <= first offset that is not stored.
//!
//! It reads the committed offsets before the ledger, and ledger and messages in one snapshot, so a change between the
//! reads can only make the invariant easier to hold. It also checks that the ledger never moves back. The records of
//! the topic must be contiguous from offset 0, and each must become its own message.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::topic_partition_list::Offset;
use tokio::task::JoinHandle;
use tokio_postgres::NoTls;

use support::kafka::Kafka;

/// The pause between two checks.
const PAUSE: Duration = Duration::from_millis(50);
/// The time limit of one request to a broker that may be unavailable.
const ANSWER_WAIT: Duration = Duration::from_secs(2);

/// The group, topic and database to observe.
#[derive(Clone)]
pub struct Watched {
    pub kafka: Kafka,
    pub database_url: String,
    pub group: String,
    pub topic: String,
    pub partitions: i32,
}

/// A running observer.
pub struct Observer {
    is_over: Arc<AtomicBool>,
    task: JoinHandle<usize>,
}

/// The state of a partition in the database: its next offset, and how many offsets before that are stored.
struct Stored {
    partition: i32,
    next_offset: i64,
    before_it: i64,
}

const STORED: &str = "
    SELECT l.kafka_partition, l.next_offset, count(DISTINCT r.kafka_offset)
    FROM inbox_ledger l
    LEFT JOIN (SELECT kafka_partition, kafka_offset FROM inbox_message
               UNION ALL SELECT kafka_partition, kafka_offset FROM inbox_quarantine) r
      ON r.kafka_partition = l.kafka_partition AND r.kafka_offset < l.next_offset
    WHERE l.consumer_group = $1 AND l.topic = $2
    GROUP BY 1, 2";

impl Observer {
    pub fn watch(watched: Watched) -> Observer {
        let is_over = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(observe(watched, Arc::clone(&is_over)));
        Observer { is_over, task }
    }

    /// Ends the observer. Panics if the invariant was ever broken, or never observed.
    pub async fn finish(self) {
        self.is_over.store(true, Ordering::Relaxed);
        let looks = self.task.await.unwrap();
        assert!(looks >= 2, "the observer could look only {looks} times");
    }
}

/// Returns the number of completed checks.
async fn observe(watched: Watched, is_over: Arc<AtomicBool>) -> usize {
    let mut config = watched.kafka.client_config();
    let consumer: Arc<BaseConsumer> = Arc::new(config.set("group.id", &watched.group).create().unwrap());
    let mut ledger_before: HashMap<i32, i64> = HashMap::new();
    let mut looks = 0;
    loop {
        // One more check after the end.
        let is_last = is_over.load(Ordering::Relaxed);
        if let Some(committed) = committed(&consumer, &watched).await
            && let Some(stored) = stored(&watched).await
        {
            check(&committed, &stored, &mut ledger_before);
            looks += 1;
        }
        if is_last {
            // Dropping the consumer may wait for a broker that is gone.
            std::thread::spawn(move || drop(consumer));
            return looks;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn check(committed: &HashMap<i32, i64>, stored: &[Stored], ledger_before: &mut HashMap<i32, i64>) {
    let ledger: HashMap<i32, i64> = stored.iter().map(|stored| (stored.partition, stored.next_offset)).collect();
    for (partition, offset) in committed {
        let next = ledger.get(partition);
        assert!(next >= Some(offset), "partition {partition}: {offset} is committed, the ledger is at {next:?}");
    }
    for Stored { partition, next_offset, before_it } in stored {
        assert_eq!(next_offset, before_it, "partition {partition}: the ledger is ahead of what is stored");
        let before = ledger_before.insert(*partition, *next_offset).unwrap_or_default();
        assert!(before <= *next_offset, "partition {partition}: the ledger went back from {before} to {next_offset}");
    }
}

/// The group's offset of each partition that has one; `None` while the broker is unavailable.
async fn committed(consumer: &Arc<BaseConsumer>, watched: &Watched) -> Option<HashMap<i32, i64>> {
    let (consumer, topic, partitions) = (Arc::clone(consumer), watched.topic.clone(), watched.partitions);
    let ask = move || {
        let mut list = TopicPartitionList::new();
        list.add_partition_range(&topic, 0, partitions - 1);
        let list = consumer.committed_offsets(list, ANSWER_WAIT).ok()?;
        let known = list.elements().into_iter().filter_map(|element| match (element.error(), element.offset()) {
            (Ok(()), Offset::Offset(offset)) => Some((element.partition(), offset)),
            _ => None,
        });
        Some(known.collect())
    };
    tokio::task::spawn_blocking(ask).await.unwrap()
}

/// `None` while the database is unavailable.
async fn stored(watched: &Watched) -> Option<Vec<Stored>> {
    let (client, connection) = tokio_postgres::connect(&watched.database_url, NoTls).await.ok()?;
    tokio::spawn(connection);
    let rows = client.query(STORED, &[&watched.group, &watched.topic]).await.ok()?;
    let stored =
        rows.iter().map(|row| Stored { partition: row.get(0), next_offset: row.get(1), before_it: row.get(2) });
    Some(stored.collect())
}
