//! Methods of a stage on PostgreSQL for the tests of the consumer group: wait until it is caught up, assert that it is
//! complete, observe it meanwhile.

use std::time::Duration;

use super::observer::{Observer, Watched};
use super::stage::{Stage, range};
use crate::scene::within;

impl Stage {
    /// Waits until every produced record of each partition is stored, committed and handled.
    pub async fn caught_up(&self, produced: &[i64]) {
        within(async {
            for (partition, &count) in (0..).zip(produced) {
                while self.committed(partition).await != Some(count) {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        })
        .await;
        self.scene.settled().await;
    }

    /// Asserts that everything before the ledger's offset is committed too, and that each record is its own message.
    pub async fn assert_whole(&self, produced: &[i64]) {
        for (partition, &count) in (0..).zip(produced) {
            let ledger = (self.ledger(partition).await, self.committed(partition).await);
            assert_eq!(ledger, (Some(count), Some(count)), "ledger and group of partition {partition}");
        }
        let expected: Vec<String> =
            (0..).zip(produced).flat_map(|(partition, &count)| range(partition, 0..count)).collect();
        assert!(self.positions().await == expected, "records were lost or stored twice");
        assert_eq!(self.scene.count("inbox_status WHERE state <> 'done'").await, 0);
        assert_eq!(self.scene.count("inbox_delivery").await, produced.iter().sum::<i64>());
    }

    /// Checks from now on that committed offset <= ledger <= first offset that is not stored.
    pub fn observed(&self) -> Observer {
        Observer::watch(Watched {
            kafka: self.kafka.clone(),
            database_url: self.scene.database.url(),
            group: self.group.clone(),
            topic: self.topic.clone(),
            partitions: self.partitions,
        })
    }
}
