//! Lag: the number of records in Kafka that the inbox has not stored. It is in the database, without a request to a
//! broker. Transaction markers do not count.

use super::stage::{Stage, end};
use crate::scene::Runs;
use support::kafka_records::TestRecord;

// The marker has its own offset, after the last record.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_marker_at_the_end_is_not_lag() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    let running = stage.start_from(stage.source().set("statistics.interval.ms", "100"), &runs).await;
    let producer = stage.kafka.transactional_producer(&stage.group).await;
    producer.begin().await;
    producer.produce(&stage.topic, 0, &[TestRecord::new("a"), TestRecord::new("b")]).await;
    producer.commit().await;
    runs.reached(2).await;
    stage.scene.until("SELECT count(*) FROM inbox_ledger WHERE next_offset = 2").await;
    stage.scene.until("SELECT count(*) FROM inbox_partition WHERE state = 'reading' AND lag = 0").await;
    assert_eq!(stage.kafka.watermarks(&stage.topic, 0).await.high, 3);
    end(running).await;
}

// No record after it can be read, and the lag must show that records wait.
#[tokio::test(flavor = "multi_thread")]
async fn records_behind_an_open_transaction_are_lag_until_it_ends() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    let producer = stage.kafka.transactional_producer(&stage.group).await;
    producer.begin().await;
    producer.produce(&stage.topic, 0, &[TestRecord::new("open")]).await;
    stage.produce(0, 4).await;
    let running = stage.start_from(stage.source().set("statistics.interval.ms", "100"), &runs).await;
    stage.scene.until("SELECT count(*) FROM inbox_partition WHERE state = 'reading' AND lag = 5").await;
    producer.abort().await;
    runs.reached(4).await;
    stage.scene.until("SELECT count(*) FROM inbox_partition WHERE state = 'reading' AND lag = 0").await;
    end(running).await;
}
