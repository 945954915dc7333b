//! The position where reading of a partition begins: the ledger decides, whatever the group's offset is.

use std::time::Duration;

use wharf::Identity;
use wharf::operate::LedgerFilter;

use super::stage::{Stage, range};
use crate::kafka_failures::sources::until;
use crate::scene::{Runs, within};
use support::events::Events;
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;

const GRACE: Duration = Duration::from_secs(5);

/// A stage with `count` stored records of partition 0, and no running inbox.
async fn stored(count: usize) -> Stage {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    stage.produce(0, count).await;
    let running = stage.start(&runs).await;
    runs.reached(count).await;
    within(running.shutdown(GRACE)).await.unwrap();
    stage
}

// Kafka deletes the offsets of a group that was idle for long. The position must not change because of that.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_without_offsets_continues_at_the_ledger() {
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
        event.message.starts_with("group offset is ahead of the ledger") && event.has("topic", &stage.topic)
    };
    let told = events.wait_for(is_told).await;
    assert!(told.has("ledger", "5") && told.has("committed", "9"), "{told:?}");
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(stage.positions().await, range(0, 0..10));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_of_an_earlier_consumer_continues_at_its_offset() {
    let stage = Stage::new(1).await;
    stage.produce(0, 5).await;
    stage.kafka.commit(&stage.group, &stage.topic, 0, 3).await;
    let runs = Runs::new();
    let running = stage.start(&runs).await;
    runs.reached(2).await;
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(stage.positions().await, range(0, 3..5));
}

// A database that has lost its latest commits, as after a failover, is refilled from Kafka.
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
    // The metadata of the group's offset shows that an inbox committed it, so a ledger existed.
    let told = events.matching(|event| event.message.starts_with("ledger lost") && event.has("topic", &stage.topic));
    assert_eq!(told.len(), 1, "{told:?}");
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(stage.positions().await, range(0, 0..5));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_loses_commits_under_a_running_inbox_is_refilled() {
    let stage = Stage::new(1).await;
    let events = Events::capture();
    let runs = Runs::new();
    stage.produce(0, 10).await;
    let running = stage.start(&runs).await;
    runs.reached(10).await;
    stage.scene.settled().await;
    // The failover is to a standby that lags.
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
    // The new record was not stored before those that were lost, so ordered handlers see them in the order of offsets.
    let in_order = "SELECT (count(*) = 0)::int::bigint FROM
                    (SELECT seq > lag(seq, 1, 0) OVER (ORDER BY kafka_offset) AS is_later FROM inbox_message) m WHERE NOT is_later";
    assert_eq!(stage.scene.database.query_one_i64(in_order).await, 1);
}

// No record arrives: the ledger itself is compared with what this process wrote.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_loses_commits_is_refilled_even_if_the_topic_is_idle() {
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

// An operator moves the position while a process runs.
#[tokio::test(flavor = "multi_thread")]
async fn a_running_process_follows_a_reset_of_its_ledger() {
    let stage = Stage::new(1).await;
    let (runs, events) = (Runs::new(), Events::capture());
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
    assert_eq!(moves_of_the_ledger(&stage, &events), ["ledger moved"]);
}

// The next record finds the moved position before the comparison does, or the other way round.
#[tokio::test(flavor = "multi_thread")]
async fn a_reset_while_records_arrive_is_not_reported_as_lost_data() {
    let stage = Stage::new(1).await;
    let (runs, events) = (Runs::new(), Events::capture());
    stage.produce(0, 5).await;
    let running = stage.start(&runs).await;
    runs.reached(5).await;
    stage.scene.settled().await;
    // The ledger was compared, so the process knows that it has the topic's id.
    stage.scene.until("SELECT count(*) FROM inbox_partition WHERE state = 'reading' AND lag = 0").await;
    let filter = LedgerFilter::topic(&stage.group, &stage.topic).partition(0);
    for to_offset in [None, Some(2)] {
        assert_eq!(stage.scene.store.operate().reset_ledger(&filter, to_offset).await.unwrap(), 1);
        let next = stage.produce(0, 1).await;
        stage.scene.until(&format!("SELECT count(*) FROM inbox_ledger WHERE next_offset = {}", next + 1)).await;
    }
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(stage.positions().await, range(0, 0..7));
    assert_eq!(moves_of_the_ledger(&stage, &events), ["ledger moved"; 2]);
}

/// What was reported about a ledger that is not where it was left, without the explanation.
fn moves_of_the_ledger(stage: &Stage, events: &Events) -> Vec<String> {
    let is_told = |event: &support::events::Event| {
        ["ledger behind", "ledger moved"].iter().any(|told| event.message.starts_with(told))
            && event.has("topic", &stage.topic)
    };
    let told = events.matching(is_told);
    told.iter().filter_map(|event| Some(event.message.split_once(':')?.0.to_owned())).collect()
}

// Operators can see without a broker which topics are read, and that a topic does not exist.
#[tokio::test(flavor = "multi_thread")]
async fn the_database_shows_the_topics_of_a_process_and_its_read_errors() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    stage.produce(0, 3).await;
    let running = stage.start(&runs).await;
    runs.reached(3).await;
    stage.scene.until("SELECT count(*) FROM inbox_partition WHERE state = 'reading' AND lag = 0").await;
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(stage.scene.database.query_one_i64("SELECT count(*) FROM inbox_ingest").await, 0);

    let mistyped = Stage::about(stage.kafka.clone(), "wharf-test-no-such-topic".to_owned()).await;
    let running = mistyped.start(&runs).await;
    mistyped.scene.until("SELECT count(*) FROM inbox_ingest WHERE problem LIKE '%no-such-topic%'").await;
    let diagnosis = mistyped.scene.store.operate().doctor().await.unwrap();
    assert!(diagnosis.symptoms.iter().any(|symptom| symptom.code == "kafka error"), "{diagnosis:?}");
    within(running.shutdown(GRACE)).await.unwrap();
}

// librdkafka reports a missing topic once, and records of other topics must not end the problem.
#[tokio::test(flavor = "multi_thread")]
async fn health_names_a_topic_that_does_not_exist_while_another_has_traffic() {
    let (stage, runs, missing) = (Stage::new(1).await, Runs::new(), unique_name("missing"));
    let inbox = stage.scene.inbox().subscribe(&*missing, runs.handler("b")).identity(&*missing, Identity::position());
    let source = stage.source().set("topic.metadata.refresh.interval.ms", "500");
    let running = within(stage.build(inbox, &runs).start_from(source)).await.unwrap();
    let monitor = running.monitor();
    until(&monitor, |health| health.to_string().contains(&missing)).await;

    stage.produce(0, 5).await;
    runs.reached(5).await;
    // Not only records have come from the broker, but also answers to commits.
    within(async {
        while stage.committed(0).await != Some(5) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let health = running.health();
    assert!(health.is_ready && health.to_string().contains(&missing), "{health}");

    stage.kafka.create_topic(&missing, 1, &[]).await;
    stage.kafka.produce(&missing, 0, &[TestRecord::new("first")]).await;
    runs.reached(6).await;
    until(&monitor, |health| !health.is_degraded()).await;
    within(running.shutdown(GRACE)).await.unwrap();
}

// Records that Kafka has deleted are recorded and reported as a gap, never skipped silently.
#[tokio::test(flavor = "multi_thread")]
async fn records_that_kafka_deleted_unread_are_recorded_as_a_gap() {
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

// Offsets of the old topic do not apply to the new one: reading on would skip or repeat records.
#[tokio::test(flavor = "multi_thread")]
async fn a_recreated_topic_stops_its_partition_until_an_operator_acts() {
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

    // The new topic has the same identities (topic and offset), so the operator also removes the messages of the old
    // topic.
    stage.scene.database.execute("DELETE FROM inbox_message").await;
    let filter = LedgerFilter::topic(&stage.group, &stage.topic);
    assert_eq!(stage.scene.store.operate().reset_ledger(&filter, None).await.unwrap(), 1);
    let running = stage.start(&runs).await;
    runs.reached(2).await;
    within(running.shutdown(GRACE)).await.unwrap();
    assert_eq!(stage.ledger(0).await, Some(2));
}
