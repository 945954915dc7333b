//! Where a partition begins: the ledger decides, whatever became of the group's offset.

use std::time::Duration;

use wharf::operate::LedgerFilter;

use super::stage::{Stage, range};
use crate::scene::{Runs, within};
use support::events::Events;

const GRACE: Duration = Duration::from_secs(5);

/// A stage with `count` records of partition 0 stored, and nothing running.
async fn stored(count: usize) -> Stage {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    stage.produce(0, count).await;
    let running = stage.start(&runs).await;
    runs.reached(count).await;
    within(running.shutdown(GRACE)).await.unwrap();
    stage
}

// Kafka deletes the offsets of a group that was idle for long. That must not move the position.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_whose_offsets_are_gone_goes_on_at_the_ledger() {
    let stage = stored(5).await;
    stage.kafka.delete_group(&stage.group).await;
    stage.produce(0, 3).await;
    let runs = Runs::new();
    let running = stage.start(&runs).await;
    runs.reached(3).await;
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(runs.count(), 3);
    assert_eq!(stage.committed(0).await, Some(8));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_offset_ahead_of_the_ledger_skips_nothing() {
    let stage = stored(5).await;
    stage.produce(0, 5).await;
    stage.kafka.commit(&stage.group, &stage.topic, 0, 9).await;
    let (runs, events) = (Runs::new(), Events::capture());
    let running = stage.start(&runs).await;
    runs.reached(5).await;
    let is_told = |event: &support::events::Event| {
        event.message.starts_with("group ahead of the ledger by another") && event.has("topic", &stage.topic)
    };
    let told = events.wait_for(is_told).await;
    assert!(told.has("ledger", "5") && told.has("committed", "9"), "{told:?}");
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(stage.positions().await, range(0, 0..10));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_from_before_the_inbox_goes_on_where_it_was() {
    let stage = Stage::new(1).await;
    stage.produce(0, 5).await;
    stage.kafka.commit(&stage.group, &stage.topic, 0, 3).await;
    let runs = Runs::new();
    let running = stage.start(&runs).await;
    runs.reached(2).await;
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(stage.positions().await, range(0, 3..5));
}

// A database that was set back, as by a failover that lost its latest commits, is refilled from Kafka.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_lost_everything_is_refilled_from_kafka() {
    let stage = stored(5).await;
    stage
        .scene
        .database
        .execute("DELETE FROM inbox_message; DELETE FROM inbox_delivery; DELETE FROM inbox_ledger")
        .await;
    let (runs, events) = (Runs::new(), Events::capture());
    let running = stage.start(&runs).await;
    runs.reached(5).await;
    // The group's offset is an inbox's own, and so there was a ledger.
    let told = events.matching(|event| event.message.starts_with("ledger lost") && event.has("topic", &stage.topic));
    assert_eq!(told.len(), 1, "{told:?}");
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(stage.positions().await, range(0, 0..5));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_set_back_under_a_running_inbox_is_refilled() {
    let stage = Stage::new(1).await;
    let events = Events::capture();
    let runs = Runs::new();
    stage.produce(0, 10).await;
    let running = stage.start(&runs).await;
    runs.reached(10).await;
    stage.scene.settled().await;
    // A failover to a standby that was behind.
    let set_back =
        "DELETE FROM inbox_delivery WHERE message_seq IN (SELECT seq FROM inbox_message WHERE kafka_offset >= 4);
                    DELETE FROM inbox_message WHERE kafka_offset >= 4; UPDATE inbox_ledger SET next_offset = 4";
    stage.scene.database.execute(set_back).await;
    stage.produce(0, 1).await;
    events.wait_for(|event| event.message.starts_with("ledger behind") && event.has("topic", &stage.topic)).await;
    stage.stored(11).await;
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(stage.positions().await, range(0, 0..11));
    assert_eq!(stage.ledger(0).await, Some(11));
}

// No record comes: the ledger itself is compared with what this process wrote.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_set_back_under_a_running_inbox_is_refilled_though_the_topic_is_quiet() {
    let stage = Stage::new(1).await;
    let events = Events::capture();
    let runs = Runs::new();
    stage.produce(0, 10).await;
    let running = stage.start(&runs).await;
    runs.reached(10).await;
    stage.scene.settled().await;
    let set_back =
        "DELETE FROM inbox_delivery WHERE message_seq IN (SELECT seq FROM inbox_message WHERE kafka_offset >= 4);
                    DELETE FROM inbox_message WHERE kafka_offset >= 4; UPDATE inbox_ledger SET next_offset = 4";
    stage.scene.database.execute(set_back).await;
    events.wait_for(|event| event.message.starts_with("ledger behind") && event.has("topic", &stage.topic)).await;
    stage.stored(10).await;
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(stage.positions().await, range(0, 0..10));
    assert_eq!(stage.ledger(0).await, Some(10));
}

// A person moves the position under a running process.
#[tokio::test(flavor = "multi_thread")]
async fn a_running_process_follows_a_reset_of_its_ledger() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    stage.produce(0, 5).await;
    let running = stage.start(&runs).await;
    runs.reached(5).await;
    stage.scene.settled().await;
    stage.scene.database.execute("DELETE FROM inbox_delivery; DELETE FROM inbox_message").await;
    let filter = LedgerFilter::topic(&stage.group, &stage.topic);
    assert_eq!(stage.scene.store.operate().reset_ledger(&filter, None).await.unwrap(), 1);
    stage.stored(5).await;
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(stage.ledger(0).await, Some(5));
}

// What people see without a broker: what is read, and a topic that does not exist.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_process_reads_and_what_keeps_it_from_reading_is_in_the_database() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    stage.produce(0, 3).await;
    let running = stage.start(&runs).await;
    runs.reached(3).await;
    stage.scene.until("SELECT count(*) FROM inbox_partition WHERE standing = 'reading' AND lag = 0").await;
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(stage.scene.database.query_one_i64("SELECT count(*) FROM inbox_ingest").await, 0);

    let mistyped = Stage::about(stage.kafka.clone(), "wharf-test-no-such-topic".to_owned()).await;
    let running = mistyped.start(&runs).await;
    mistyped.scene.until("SELECT count(*) FROM inbox_ingest WHERE trouble LIKE '%no-such-topic%'").await;
    let diagnosis = mistyped.scene.store.operate().doctor().await.unwrap();
    assert!(diagnosis.symptoms.iter().any(|symptom| symptom.code == "kafka trouble"), "{diagnosis:?}");
    within(running.shutdown(GRACE)).await.unwrap();
}

// What Kafka no longer has is recorded and reported, never skipped in silence.
#[tokio::test(flavor = "multi_thread")]
async fn records_that_kafka_deleted_before_they_were_read_are_noted_as_a_gap() {
    let stage = stored(5).await;
    let events = Events::capture();
    stage.produce(0, 10).await;
    stage.kafka.delete_records(&stage.topic, 0, 12).await;
    let runs = Runs::new();
    let running = stage.start(&runs).await;
    runs.reached(3).await;
    within(running.shutdown(GRACE)).await.unwrap();
    let gap = events.wait_for(|event| event.message == "gap" && event.has("topic", &stage.topic)).await;
    assert!(gap.has("from_offset", "5") && gap.has("to_offset", "12"), "{gap:?}");
    let rows = stage.scene.database.query_texts("SELECT from_offset || ' to ' || to_offset FROM inbox_gap").await;
    assert_eq!(rows, ["5 to 12"]);
}

// Offsets of the old topic say nothing about the new one: reading on would skip or repeat records.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_was_made_anew_stops_its_partition_until_a_person_has_put_it_right() {
    let stage = stored(5).await;
    let events = Events::capture();
    stage.kafka.delete_topic(&stage.topic).await;
    stage.kafka.create_topic(&stage.topic, 1, &[]).await;
    stage.produce(0, 2).await;
    let runs = Runs::new();
    let running = stage.start(&runs).await;
    let stopped = |event: &support::events::Event| {
        event.message.starts_with("partition stopped") && event.has("topic", &stage.topic)
    };
    let event = events.wait_for(stopped).await;
    assert!(event.has("ledger", "5") && event.field("why").unwrap().contains("ends at offset 2"), "{event:?}");
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!((runs.count(), stage.ledger(0).await), (0, Some(5)));

    // The same identities: the new topic's positions were seen before, so the person removes what was stored of the old one too.
    stage.scene.database.execute("DELETE FROM inbox_message").await;
    let filter = LedgerFilter::topic(&stage.group, &stage.topic);
    assert_eq!(stage.scene.store.operate().reset_ledger(&filter, None).await.unwrap(), 1);
    let running = stage.start(&runs).await;
    runs.reached(2).await;
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(stage.ledger(0).await, Some(2));
}
