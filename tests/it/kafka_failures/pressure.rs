//! Back-pressure: an unavailable database or slow handlers cost neither the group membership nor a record.

use std::time::Duration;

use wharf::Identity;

use super::ingester::{Ingester, await_event, said};
use super::stage::{Stage, end, range};
use crate::scene::{Runs, quick};
use support::folder::ServiceFolder;
use support::kafka_records::TestRecord;
use support::proxy::Proxy;

#[tokio::test(flavor = "multi_thread")]
async fn a_database_outage_longer_than_the_poll_interval_costs_no_membership_and_no_record() {
    let stage = Stage::new(4).await;
    let proxy = Proxy::start_for(&stage.scene.database.url()).await;
    let child = Ingester {
        url: proxy.url(&stage.scene.database.url()),
        settings: "session.timeout.ms=15000\nmax.poll.interval.ms=15000\nheartbeat.interval.ms=300",
        limits: "accept_queue_rows=100\naccept_batch_rows=50\nbackoff_max=500ms",
        ..Ingester::on(&stage)
    }
    .spawn(&stage);
    stage.produce(0, 10).await;
    stage.stored(10).await;

    proxy.black_hole().await;
    stage.kafka.produce_many(&stage.topic, 4, 2_000, |number| TestRecord::new(format!("{number}"))).await;
    await_event(&child, "intake closed").await;
    // The outage itself: twice the poll interval that a consumer may exceed before it is removed.
    tokio::time::sleep(Duration::from_secs(30)).await;
    proxy.pass().await;
    stage.stored(2_010).await;

    await_event(&child, "intake open").await;
    assert_eq!((said(&child, "partitions assigned"), said(&child, "partitions revoked")), (1, 0));
    assert_eq!(stage.positions().await.len(), 2_010);
    assert_eq!(stage.gaps().await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_offset_arrives_however_often_partitions_are_paused_and_resumed() {
    let stage = Stage::new(4).await;
    let runs = Runs::new();
    let limits = quick().accept_queue_rows(3).accept_batch_rows(2);
    stage.kafka.produce_many(&stage.topic, 4, 300, |number| TestRecord::new(format!("{number}"))).await;
    let running = stage.start_with(Identity::position(), limits, &runs).await;
    runs.reached(100).await;

    stage.kafka.produce_many(&stage.topic, 4, 300, |number| TestRecord::new(format!("{number}"))).await;
    runs.reached(600).await;
    end(running).await;

    let all: Vec<String> = (0..4).flat_map(|partition| range(partition, 0..150)).collect();
    assert_eq!(stage.positions().await, all);
    assert_eq!(runs.count(), 600);
}

// One record at a time waits, whatever its size.
#[tokio::test(flavor = "multi_thread")]
async fn every_offset_arrives_when_each_record_exceeds_the_memory_limit() {
    let stage = Stage::new(2).await;
    let runs = Runs::new();
    let limits = quick().accept_queue_bytes(100).accept_batch_bytes(100);
    stage.kafka.produce_many(&stage.topic, 2, 200, |_| TestRecord::new(vec![b'x'; 1_000])).await;

    let running = stage.start_with(Identity::position(), limits, &runs).await;
    runs.reached(200).await;
    end(running).await;

    assert_eq!(stage.positions().await, [range(0, 0..100), range(1, 0..100)].concat());
}

/// Closes the intake with a backlog of ten, deletes records from the log meanwhile, and reopens it. Nothing was read in
/// between, and the running process notices the gap.
async fn closes_and_opens_again(limits: &'static str) {
    let stage = Stage::new(1).await;
    let folder = ServiceFolder::create("gate");
    let gate = folder.path().join("open").display().to_string();
    let child = Ingester { limits, gate, ..Ingester::on(&stage) }.spawn(&stage);
    stage.produce(0, 10).await;
    await_event(&child, "intake closed").await;
    stage.scene.until("SELECT count(*) FROM inbox_processor WHERE report->>'is_intake_open' = 'false'").await;
    assert!(diagnosed(&stage, "intake closed").await);

    stage.produce(0, 20).await;
    stage.kafka.delete_records(&stage.topic, 0, 25).await;
    assert_eq!(stage.positions().await, range(0, 0..10));
    folder.write("open", "");

    stage.scene.until("SELECT count(*) FROM inbox_ledger WHERE next_offset = 30").await;
    await_event(&child, "intake open").await;
    assert_eq!(stage.positions().await, [range(0, 0..10), range(0, 25..30)].concat());
    assert_eq!(stage.gaps().await, ["0: 10 to 25"]);
    let gap = await_event(&child, "gap").await;
    assert!(gap.contains("from_offset=10") && gap.contains("to_offset=25"), "{gap}");
    assert!(diagnosed(&stage, "gaps").await);
    child.term();
    assert!(child.wait().await.success());
}

/// Whether the doctor reports this problem.
async fn diagnosed(stage: &Stage, code: &str) -> bool {
    let diagnosis = stage.scene.store.operate().doctor().await.unwrap();
    diagnosis.symptoms.iter().any(|symptom| symptom.code == code)
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_open_deliveries_close_the_intake_until_there_are_fewer() {
    closes_and_opens_again("lease=30s\nbacklog_rows_max=10").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_delivery_that_is_too_old_closes_the_intake_until_it_is_done() {
    closes_and_opens_again("lease=30s\nbacklog_age_max=1s").await;
}
