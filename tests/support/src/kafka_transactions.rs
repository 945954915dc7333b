//! A producer that writes in transactions.
//!
//! Dropped without commit or abort, it leaves its transaction open on the broker, like a crashed producer: a reader of
//! committed records stops before it until the transaction times out, or a producer with the same id starts.

use std::sync::Arc;
use std::time::Duration;

use crate::kafka::Kafka;
use crate::kafka_admin::KAFKA_DEADLINE;
use crate::kafka_producer::{Producing, idempotent_config};
use crate::kafka_records::TestRecord;

/// A producer with a transactional id; creating it fences off all others with that id.
pub struct TransactionalProducer {
    producing: Arc<Producing>,
}

impl Kafka {
    /// Creates a producer whose transactions time out after a minute.
    pub async fn transactional_producer(&self, id: &str) -> TransactionalProducer {
        self.transactional_producer_with_timeout(id, Duration::from_secs(60)).await
    }

    /// Like [`Kafka::transactional_producer`]. The broker checks for timed-out transactions every ten seconds.
    pub async fn transactional_producer_with_timeout(&self, id: &str, timeout: Duration) -> TransactionalProducer {
        let mut config = idempotent_config(self);
        // librdkafka requires a message timeout that is not longer than the transaction timeout.
        let timeout_ms = timeout.as_millis().to_string();
        config.set("transactional.id", id).set("transaction.timeout.ms", &timeout_ms);
        config.set("message.timeout.ms", timeout.min(KAFKA_DEADLINE).as_millis().to_string());
        let create = move || Arc::new(Producing::create(&config));
        let producing = tokio::task::spawn_blocking(create).await.expect("a producer");
        let transactional = TransactionalProducer { producing };
        transactional.blocking(Producing::init_transactions).await;
        transactional
    }
}

impl TransactionalProducer {
    pub async fn begin(&self) {
        self.blocking(Producing::begin_transaction).await;
    }

    /// Writes records within the transaction and returns the offset of the first; the others follow it.
    pub async fn produce(&self, topic: &str, partition: i32, records: &[TestRecord]) -> i64 {
        let (topic, records) = (topic.to_owned(), records.to_vec());
        self.blocking(move |producing| {
            for record in &records {
                producing.send(&topic, partition, record);
            }
            producing.finish()
        })
        .await
    }

    /// Commits. This writes a marker, which takes one offset in each partition of the transaction.
    pub async fn commit(&self) {
        self.blocking(Producing::commit_transaction).await;
    }

    /// Aborts. The records keep their offsets, but a reader of committed records never sees them.
    pub async fn abort(&self) {
        self.blocking(Producing::abort_transaction).await;
    }

    async fn blocking<T: Send + 'static>(&self, work: impl FnOnce(&Producing) -> T + Send + 'static) -> T {
        let producing = Arc::clone(&self.producing);
        tokio::task::spawn_blocking(move || work(&producing)).await.expect("the transaction goes on")
    }
}
