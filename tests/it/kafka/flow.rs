//! The normal path of a record: read, stored together with the ledger, handled, committed.

use std::time::Duration;

use super::stage::{Stage, range};
use crate::scene::{Runs, within};

#[tokio::test(flavor = "multi_thread")]
async fn a_record_is_stored_handled_and_committed() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    stage.produce(0, 3).await;
    let running = stage.start(&runs).await;
    runs.reached(3).await;
    stage.scene.settled().await;
    within(running.shutdown(Duration::from_secs(5))).await.unwrap();
    assert_eq!(stage.positions().await, range(0, 0..3));
    assert_eq!(stage.ledger(0).await, Some(3));
    assert_eq!(stage.committed(0).await, Some(3));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_partition_is_read_including_later_records() {
    let stage = Stage::new(4).await;
    let runs = Runs::new();
    let running = stage.start(&runs).await;
    for partition in 0..4 {
        stage.produce(partition, 50).await;
    }
    runs.reached(200).await;
    stage.produce(2, 1).await;
    runs.reached(201).await;
    within(running.shutdown(Duration::from_secs(5))).await.unwrap();
    for partition in 0..4 {
        let count = if partition == 2 { 51 } else { 50 };
        assert_eq!(stage.ledger(partition).await, Some(count));
        assert_eq!(stage.committed(partition).await, Some(count));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_run_continues_where_the_first_ended() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    stage.produce(0, 5).await;
    let running = stage.start(&runs).await;
    runs.reached(5).await;
    within(running.shutdown(Duration::from_secs(5))).await.unwrap();
    stage.produce(0, 5).await;
    let running = stage.start(&runs).await;
    runs.reached(10).await;
    within(running.shutdown(Duration::from_secs(5))).await.unwrap();
    assert_eq!(stage.positions().await, range(0, 0..10));
    assert_eq!(runs.count(), 10);
}
