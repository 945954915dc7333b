//! How positions are found: each leader gets one request for all of its partitions, and a leader that does not answer
//! delays no other; it delays no status either. On librdkafka's mock cluster, whose brokers can be slowed down. A position
//! that a person moves meanwhile stays, on a real broker, because topics have ids there.

use std::collections::BTreeSet;
use std::time::Duration;

use rdkafka::types::RDKafkaRespErr;

use super::stage::{Stage, end, range};
use crate::scene::{Runs, within};
use support::events::{Event, Events};
use support::kafka::Kafka;
use support::kafka_admin::unique_name;
use support::mock_kafka::{MockBrokers, MockKafka};

/// Longer than the timeout for a reply from Kafka.
const NEVER: Duration = Duration::from_secs(600);

/// A topic on three brokers. The first one coordinates the group, and leads every partition that the test does not
/// assign to another.
async fn staged(partitions: i32) -> (MockKafka, Stage) {
    let mock = MockKafka::start(3);
    let topic = unique_name("topic");
    mock.create_topic(&topic, partitions);
    for partition in 0..partitions.min(8) {
        mock.set_leader(&topic, partition, Some(1));
    }
    let stage = Stage::about(Kafka::at(mock.brokers()), topic).await;
    mock.set_coordinator(&stage.group, 1);
    (mock, stage)
}

fn begun(event: &Event, stage: &Stage) -> bool {
    event.message == "partition begun" && event.has("topic", &stage.topic)
}

fn unfound(event: &Event, stage: &Stage) -> bool {
    event.has("group", &stage.group) && event.has("operation", "find the position of partitions")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_does_not_answer_delays_only_its_own_partitions() {
    let (mock, stage) = staged(6).await;
    for partition in 0..6 {
        stage.produce(partition, 1).await;
    }
    for partition in [1, 3, 5] {
        mock.set_leader(&stage.topic, partition, Some(3));
    }
    mock.set_round_trip(MockBrokers::One(3), NEVER);
    let events = Events::capture();
    let runs = Runs::new();
    let running = stage.start(&runs).await;

    events.wait_for(|event| unfound(event, &stage)).await;

    // These events come before the request to the third broker times out.
    let told = events.matching(|event| begun(event, &stage) || unfound(event, &stage));
    let before: BTreeSet<_> =
        told.iter().take_while(|event| begun(event, &stage)).map(|event| event.fields["partition"].clone()).collect();
    assert_eq!(before, ["0", "2", "4"].map(str::to_owned).into(), "{told:?}");
    within(runs.reached(3)).await;
    for partition in [1, 3, 5] {
        mock.set_leader(&stage.topic, partition, Some(2));
    }
    within(runs.reached(6)).await;
    end(running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_without_a_leader_delay_no_other_and_begin_when_they_have_one() {
    let (mock, stage) = staged(6).await;
    for partition in 0..6 {
        stage.produce(partition, 1).await;
    }
    for partition in [1, 3, 5] {
        mock.set_leader(&stage.topic, partition, None);
    }
    let events = Events::capture();
    let runs = Runs::new();
    let running = stage.start(&runs).await;

    within(runs.reached(3)).await;

    // There is one event for all three.
    let told = events.wait_for(|event| unfound(event, &stage)).await;
    assert!(told.fields["error"].contains("and 2 other partitions"), "{told:?}");
    for partition in [1, 3, 5] {
        mock.set_leader(&stage.topic, partition, Some(2));
    }
    within(runs.reached(6)).await;
    end(running).await;
}

// The group's offsets matter only for partitions without a ledger.
#[tokio::test(flavor = "multi_thread")]
async fn a_coordinator_that_does_not_answer_delays_only_partitions_without_a_ledger() {
    let (mock, stage) = staged(4).await;
    mock.set_coordinator(&stage.group, 3);
    let runs = Runs::new();
    let running = stage.start(&runs).await;
    stage.scene.until("SELECT (count(*) = 4)::int::bigint FROM inbox_ledger").await;
    end(running).await;
    // The lock delays the search until the coordinator no longer answers.
    let client = stage.scene.database.client().await;
    let hold = "DELETE FROM inbox_ledger WHERE kafka_partition IN (1, 3); BEGIN; LOCK TABLE inbox_ledger";
    client.batch_execute(hold).await.unwrap();
    let events = Events::capture();
    let running = stage.start(&runs).await;
    events.wait_for(|event| event.message == "partitions assigned" && event.has("group", &stage.group)).await;
    mock.set_round_trip(MockBrokers::One(3), NEVER);
    client.batch_execute("COMMIT").await.unwrap();

    events.wait_for(|event| unfound(event, &stage)).await;

    // These events come before the request to the coordinator times out.
    let told = events.matching(|event| begun(event, &stage) || unfound(event, &stage));
    let before: BTreeSet<_> =
        told.iter().take_while(|event| begun(event, &stage)).map(|event| event.fields["partition"].clone()).collect();
    assert_eq!(before, ["0", "2"].map(str::to_owned).into(), "{told:?}");
    // Without its coordinator, the group cannot be left properly.
    drop(running);
}

/// One round trip per partition would take longer than any test may.
#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_partitions_are_found_without_a_round_trip_for_each() {
    let (mock, stage) = staged(2_000).await;
    let events = Events::capture();
    let running = stage.start(&Runs::new()).await;
    events.wait_for(|event| event.message == "partitions assigned" && event.has("group", &stage.group)).await;
    mock.set_round_trip(MockBrokers::All, Duration::from_millis(200));

    within(events.wait_for_count(2_000, |event| begun(event, &stage))).await;

    end(running).await;
}

/// A timeout per topic would take longer than any test may.
#[tokio::test(flavor = "multi_thread")]
async fn the_status_does_not_wait_for_a_broker_that_does_not_answer_and_another_one_describes_the_topics() {
    let (mock, prefix) = (MockKafka::start(3), unique_name("topic"));
    let topics: Vec<String> = (0..60).map(|number| format!("{prefix}.{number}")).collect();
    for topic in &topics {
        mock.create_topic(topic, 1);
        mock.set_leader(topic, 0, Some(2));
    }
    mock.fail_topic(&topics[59], RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED);
    mock.set_round_trip(MockBrokers::One(1), NEVER);
    let stage = Stage::about(Kafka::at(mock.brokers()), format!(r"^{prefix}\.")).await;
    mock.set_coordinator(&stage.group, 2);
    let running = stage.start(&Runs::new()).await;

    let reading = "SELECT (count(*) = 59)::int::bigint FROM inbox_partition WHERE state = 'reading'";
    stage.scene.until(reading).await;
    let refused = format!("problem LIKE '%topic {} may not be read: it needs READ and DESCRIBE%'", topics[59]);
    stage.scene.until(&format!("SELECT count(*) FROM inbox_ingest WHERE {refused}")).await;
    end(running).await;
}

// The process has read the position, and writes the topic's id to its row before it reads records.
#[tokio::test(flavor = "multi_thread")]
async fn a_reset_while_a_position_is_found_is_not_undone() {
    let (stage, runs) = (Stage::new(1).await, Runs::new());
    stage.produce(0, 5).await;
    let running = stage.start(&runs).await;
    within(runs.reached(5)).await;
    stage.scene.settled().await;
    end(running).await;
    let person = stage.scene.database.client().await;
    let forget = "DELETE FROM inbox_delivery; DELETE FROM inbox_message; UPDATE inbox_ledger SET topic_id = NULL";
    person.batch_execute(forget).await.unwrap();
    person.batch_execute("BEGIN; UPDATE inbox_ledger SET next_offset = 2, leader_epoch = NULL").await.unwrap();

    let running = stage.start(&Runs::new()).await;
    let waits = "SELECT (count(*) > 0)::int::bigint FROM pg_locks l JOIN pg_stat_activity a USING (pid)
                 WHERE NOT l.granted AND a.query LIKE '%inbox_ledger%'";
    stage.scene.until(waits).await;
    person.batch_execute("COMMIT").await.unwrap();

    stage.stored(3).await;
    stage.scene.settled().await;
    end(running).await;
    assert_eq!((stage.positions().await, stage.ledger(0).await), (range(0, 2..5), Some(5)));
}
