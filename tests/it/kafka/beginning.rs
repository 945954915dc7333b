//! Where reading begins for a topic without a ledger: at the earliest record, at the end, at a time, or at the group's
//! offset. This is decided once.

use std::time::{Duration, SystemTime};

use wharf::kafka::Begin;

use super::stage::{Stage, end, range};
use crate::scene::{Runs, within};
use support::events::{Event, Events};
use support::kafka_records::TestRecord;

const HOUR_MS: i64 = 3_600_000;

/// The events about the stage's topic: where it begins, and for how many partitions.
fn told(events: &Events, stage: &Stage) -> Vec<(String, String)> {
    let is_told = |event: &Event| event.message == "topic begins" && event.has("topic", &stage.topic);
    let said = |event: &Event| (event.fields["begin"].clone(), event.fields["partitions"].clone());
    events.matching(is_told).iter().map(|event| said(event)).collect()
}

/// Starts from this beginning and reads one more record of every partition.
async fn read_one_more(stage: &Stage, begin: Begin) -> Events {
    let (runs, events) = (Runs::new(), Events::capture());
    let running = stage.start_from(stage.source().begin(&*stage.topic, begin), &runs).await;
    for partition in 0..stage.partitions {
        stage.scene.until(&format!("SELECT count(*) FROM inbox_ledger WHERE kafka_partition = {partition}")).await;
        stage.produce(partition, 1).await;
    }
    runs.reached(usize::try_from(stage.partitions).unwrap()).await;
    end(running).await;
    events
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_begins_at_its_end_has_only_later_records() {
    let stage = Stage::new(2).await;
    stage.produce(0, 5).await;
    // The group's offset does not matter: the user's setting takes precedence.
    stage.kafka.commit(&stage.group, &stage.topic, 0, 3).await;
    let events = read_one_more(&stage, Begin::Latest).await;
    assert_eq!(stage.positions().await, ["0/5", "1/0"]);
    assert_eq!(told(&events, &stage), [("latest".to_owned(), "2".to_owned())]);
}

// The process crashes after the decision and before the first record. Records that arrive meanwhile come after the
// decision.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_is_decided_once_and_a_later_start_reads_all_records_since() {
    let stage = Stage::new(2).await;
    stage.produce(0, 5).await;
    let source = || stage.source().begin_all(Begin::Latest);
    let running = stage.start_from(source(), &Runs::new()).await;
    stage.scene.until("SELECT count(*) / 2 FROM inbox_ledger").await;
    drop(running);
    assert_eq!((stage.ledger(0).await, stage.ledger(1).await), (Some(5), Some(0)));
    stage.produce(0, 2).await;
    stage.produce(1, 2).await;
    let (runs, events) = (Runs::new(), Events::capture());
    let running = stage.start_from(source(), &runs).await;
    runs.reached(4).await;
    end(running).await;
    assert_eq!(stage.positions().await, ["0/5", "0/6", "1/0", "1/1"]);
    assert_eq!(told(&events, &stage), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_added_to_a_topic_that_began_at_its_end_begin_at_their_first_record() {
    let stage = Stage::new(1).await;
    stage.produce(0, 3).await;
    read_one_more(&stage, Begin::Latest).await;
    stage.kafka.grow_topic(&stage.topic, 2).await;
    stage.produce(1, 4).await;
    let (runs, events) = (Runs::new(), Events::capture());
    let running = stage.start_from(stage.source().begin(&*stage.topic, Begin::Latest), &runs).await;
    runs.reached(4).await;
    end(running).await;
    assert_eq!(stage.positions().await, [range(0, 3..4), range(1, 0..4)].concat());
    assert_eq!(told(&events, &stage), [("earliest".to_owned(), "1".to_owned())]);
}

// Records that become visible after the decision are not skipped.
#[tokio::test(flavor = "multi_thread")]
async fn records_of_a_transaction_that_is_open_at_the_decision_are_read_when_it_commits() {
    let stage = Stage::new(1).await;
    stage.produce(0, 2).await;
    let producer = stage.kafka.transactional_producer(&stage.group).await;
    producer.begin().await;
    producer.produce(&stage.topic, 0, &[TestRecord::new("later")]).await;
    let runs = Runs::new();
    let running = stage.start_from(stage.source().begin_all(Begin::Latest), &runs).await;
    stage.scene.until("SELECT count(*) FROM inbox_ledger").await;
    producer.commit().await;
    runs.reached(1).await;
    end(running).await;
    assert_eq!(stage.positions().await, ["0/2"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_begins_at_a_time_begins_at_its_first_later_record_or_at_the_end() {
    let stage = Stage::new(2).await;
    let now = SystemTime::now();
    let now_ms = i64::try_from(now.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis()).unwrap();
    let of_hours_ago = |hours: i64| TestRecord::new("x").at(now_ms - hours * HOUR_MS);
    stage.kafka.produce(&stage.topic, 0, &[5, 4, 3, 1].map(of_hours_ago)).await;
    // No record of this partition is that recent.
    stage.kafka.produce(&stage.topic, 1, &[5, 4].map(of_hours_ago)).await;
    let begin = Begin::At(now - Duration::from_secs(3 * 3_600 + 1_800));
    let (runs, events) = (Runs::new(), Events::capture());
    let running = stage.start_from(stage.source().begin(&*stage.topic, begin), &runs).await;
    runs.reached(2).await;
    stage.produce(1, 1).await;
    runs.reached(3).await;
    end(running).await;
    assert_eq!(stage.positions().await, ["0/2", "0/3", "1/2"]);
    assert_eq!(told(&events, &stage), [(begin.to_string(), "2".to_owned())]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_begins_at_the_earliest_record_ignores_the_groups_offset() {
    let stage = Stage::new(1).await;
    stage.produce(0, 5).await;
    stage.kafka.commit(&stage.group, &stage.topic, 0, 3).await;
    let (runs, events) = (Runs::new(), Events::capture());
    let running = stage.start_from(stage.source().begin_all(Begin::Earliest), &runs).await;
    runs.reached(5).await;
    end(running).await;
    assert_eq!(stage.positions().await, range(0, 0..5));
    assert_eq!(told(&events, &stage), [("earliest".to_owned(), "1".to_owned())]);
}

// The group's offset shows that an inbox has read here. Its stored records are lost with the ledger, and skipping to
// the end would lose the rest too.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_ledger_is_refilled_from_the_earliest_record_even_for_a_topic_that_begins_at_its_end() {
    let stage = Stage::new(1).await;
    stage.produce(0, 3).await;
    read_one_more(&stage, Begin::Latest).await;
    let lost = "DELETE FROM inbox_message; DELETE FROM inbox_delivery; DELETE FROM inbox_ledger";
    stage.scene.database.execute(lost).await;
    let (runs, events) = (Runs::new(), Events::capture());
    let running = stage.start_from(stage.source().begin_all(Begin::Latest), &runs).await;
    runs.reached(4).await;
    end(running).await;
    let is_told = |event: &Event| event.message.starts_with("ledger lost") && event.has("topic", &stage.topic);
    assert_eq!(events.matching(is_told).len(), 1);
    assert_eq!(stage.positions().await, range(0, 0..4));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_beginning_for_a_topic_without_a_subscription_is_refused() {
    let stage = Stage::new(1).await;
    let source = stage.source().begin(&*stage.topic, Begin::Latest).begin("orderz", Begin::Latest);
    let error = within(stage.inbox(&Runs::new()).start_from(source)).await.unwrap_err();
    assert!(error.is_configuration(), "{error}");
    let text = error.to_string();
    assert!(text.contains("orderz") && !text.contains(&stage.topic), "{text}");
}
