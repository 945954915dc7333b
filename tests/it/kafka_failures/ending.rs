//! Shutdown ends whatever the broker, the database or the group are doing, and it loses no record.

use std::time::Duration;

use super::ingester::Ingester;
use super::stage::{Stage, end, range};
use crate::scene::{Runs, within};
use support::kafka::Kafka;
use support::kafka_admin::unique_name;
use support::mock_kafka::{MockBrokers, MockKafka};
use support::proxy::Proxy;

// One broker for the three cases, because each takes seconds to start.
#[tokio::test(flavor = "multi_thread")]
async fn shutdown_ends_with_a_frozen_or_killed_broker() {
    let stage = Stage::on(Kafka::start().await, 2).await;
    let runs = Runs::new();
    let child = Ingester::on(&stage).spawn(&stage);
    let (first, second) = (stage.start(&runs).await, stage.start(&runs).await);
    stage.produce(0, 10).await;
    stage.produce(1, 10).await;
    stage.stored(20).await;

    stage.kafka.freeze().await;
    child.term();
    assert!(child.wait().await.success());
    within(first.shutdown(Duration::ZERO)).await.unwrap();

    stage.kafka.kill().await;
    within(second.shutdown(Duration::ZERO)).await.unwrap();
    assert_eq!(stage.positions().await, [range(0, 0..10), range(1, 0..10)].concat());
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_ends_with_brokers_that_never_existed() {
    let mock = MockKafka::start(1);
    let stage = Stage::about(Kafka::at(mock.brokers()), unique_name("topic")).await;
    mock.take_down(MockBrokers::All);
    let running = stage.start(&Runs::new()).await;
    within(running.shutdown(Duration::ZERO)).await.unwrap();
}

// A child whose brokers are gone while it finds its positions.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_ends_on_sigterm_with_its_brokers_gone() {
    let mock = MockKafka::start(1);
    let topic = unique_name("topic");
    mock.create_topic(&topic, 4);
    let stage = Stage::about(Kafka::at(mock.brokers()), topic).await;
    let child = Ingester::on(&stage).spawn(&stage);
    child.await_line(|line| line.starts_with("partitions assigned")).await;
    mock.take_down(MockBrokers::All);
    child.term();
    assert!(child.wait().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_during_a_rebalance_loses_nothing() {
    let stage = Stage::new(4).await;
    let runs = Runs::new();
    let running = stage.start(&runs).await;
    for round in 1..=4 {
        let joining = stage.start(&Runs::new()).await;
        let produced = async {
            for partition in 0..4 {
                stage.produce(partition, 5).await;
            }
        };
        tokio::join!(produced, end(joining));
        stage.stored(round * 20).await;
    }
    end(running).await;
    let all: Vec<String> = (0..4).flat_map(|partition| range(partition, 0..20)).collect();
    assert_eq!(stage.positions().await, all);
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_with_an_unavailable_database_ends_and_loses_nothing() {
    let stage = Stage::new(1).await;
    let proxy = Proxy::start_for(&stage.scene.database.url()).await;
    let child = Ingester {
        url: proxy.url(&stage.scene.database.url()),
        limits: "accept_queue_rows=5\naccept_batch_rows=5",
        ..Ingester::on(&stage)
    }
    .spawn(&stage);
    stage.produce(0, 1).await;
    stage.stored(1).await;

    proxy.black_hole().await;
    stage.produce(0, 20).await;
    child.await_line(|line| line.starts_with("intake closed")).await;
    child.term();
    assert!(child.wait().await.success());
    assert!(stage.committed(0).await.is_none_or(|offset| offset <= 1));
    proxy.pass().await;

    let running = stage.start(&Runs::new()).await;
    stage.stored(21).await;
    end(running).await;
    assert_eq!(stage.positions().await, range(0, 0..21));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_is_dropped_without_shutdown_leaves_the_group_and_the_next_continues() {
    let stage = Stage::new(2).await;
    let runs = Runs::new();
    stage.produce(0, 3).await;
    let running = stage.start(&runs).await;
    runs.reached(3).await;
    drop(running);

    stage.produce(0, 3).await;
    stage.produce(1, 3).await;
    let running = stage.start(&runs).await;
    stage.stored(9).await;
    stage.scene.settled().await;
    end(running).await;
    assert_eq!(stage.positions().await, [range(0, 0..6), range(1, 0..3)].concat());
}

// A runtime that is dropped with a running inbox neither hangs nor panics.
#[test]
fn a_runtime_that_is_dropped_with_a_running_inbox_in_it_ends() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let running = runtime.block_on(async {
        let stage = Stage::new(1).await;
        let runs = Runs::new();
        let running = stage.start(&runs).await;
        stage.produce(0, 1).await;
        runs.reached(1).await;
        running
    });
    drop(runtime);
    drop(running);
}
