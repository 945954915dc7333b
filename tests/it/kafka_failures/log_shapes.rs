//! Logs that are not a simple sequence of records: transactions, compaction, added partitions, topics that are created,
//! deleted and recreated.

use wharf::Identity;
use wharf::kafka::Kafka as Source;

use super::stage::{Stage, end, range};
use crate::scene::{Runs, within};
use support::events::{Event, Events};
use support::kafka::Kafka;
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;

/// Finds new topics and partitions soon, not within five minutes.
fn watchful(stage: &Stage) -> Source {
    stage.source().set("topic.metadata.refresh.interval.ms", "200")
}

fn records(count: usize) -> Vec<TestRecord> {
    (0..count).map(|number| TestRecord::new(format!("{number}"))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn aborted_records_are_never_stored_and_markers_are_not_gaps() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    let producer = stage.kafka.transactional_producer(&unique_name("producer")).await;
    for is_committed in [true, false, true] {
        producer.begin().await;
        producer.produce(&stage.topic, 0, &records(3)).await;
        if is_committed { producer.commit().await } else { producer.abort().await }
    }

    let running = stage.start(&runs).await;
    runs.reached(6).await;
    stage.produce(0, 1).await;
    runs.reached(7).await;
    end(running).await;

    // Each transaction takes three offsets and one for its end marker.
    assert_eq!(stage.positions().await, [range(0, 0..3), range(0, 8..11), range(0, 12..13)].concat());
    assert_eq!(stage.gaps().await, Vec::<String>::new());
    assert_eq!((stage.ledger(0).await, stage.committed(0).await), (Some(13), Some(13)));
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_an_open_transaction_and_those_behind_it_wait_for_its_end() {
    let stage = Stage::new(2).await;
    let runs = Runs::new();
    let producer = stage.kafka.transactional_producer(&unique_name("producer")).await;
    producer.begin().await;
    producer.produce(&stage.topic, 0, &records(2)).await;
    stage.produce(0, 2).await;
    stage.produce(1, 1).await;

    let running = stage.start(&runs).await;
    runs.reached(1).await;
    assert_eq!(stage.positions().await, range(1, 0..1));
    producer.commit().await;
    runs.reached(5).await;
    end(running).await;

    assert_eq!(stage.positions().await, [range(0, 0..4), range(1, 0..1)].concat());
}

#[tokio::test(flavor = "multi_thread")]
async fn compaction_makes_no_gap() {
    let stage = Stage::about(Kafka::shared().await.clone(), unique_name("topic")).await;
    let compacted = [
        ("cleanup.policy", "compact"),
        ("min.cleanable.dirty.ratio", "0.001"),
        ("segment.ms", "50"),
        ("max.compaction.lag.ms", "1"),
    ];
    stage.kafka.create_topic(&stage.topic, 1, &compacted).await;
    let versions = |count: usize| vec![TestRecord::keyed("k", "version"); count];
    let runs = Runs::new();
    stage.kafka.produce(&stage.topic, 0, &versions(3)).await;
    let running = stage.start(&runs).await;
    runs.reached(3).await;
    end(running).await;

    stage.kafka.produce(&stage.topic, 0, &versions(7)).await;
    within(async {
        // The last segment is never compacted, so the test keeps producing.
        while stage.kafka.offsets(&stage.topic, 0).await.contains(&3) {
            stage.kafka.produce(&stage.topic, 0, &versions(1)).await;
        }
    })
    .await;
    let left: Vec<i64> = stage.kafka.offsets(&stage.topic, 0).await;
    let running = stage.start(&runs).await;
    let last = *left.last().unwrap();
    stage.scene.until(&format!("SELECT count(*) FROM inbox_ledger WHERE next_offset > {last}")).await;
    end(running).await;

    assert_eq!(stage.gaps().await, Vec::<String>::new());
    let stored = stage.positions().await;
    assert!(!stored.contains(&"0/3".to_owned()) && stored.contains(&format!("0/{last}")), "{stored:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn added_partitions_are_read_from_their_beginning() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    let running = stage.start_from(watchful(&stage), &runs).await;
    stage.produce(0, 2).await;
    runs.reached(2).await;

    stage.kafka.grow_topic(&stage.topic, 3).await;
    stage.produce(2, 3).await;
    stage.produce(0, 1).await;
    runs.reached(6).await;
    end(running).await;

    assert_eq!(stage.positions().await, [range(0, 0..3), range(2, 0..3)].concat());
    assert_eq!(runs.count(), 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_created_after_the_start_is_read_from_its_beginning() {
    let stage = Stage::about(Kafka::shared().await.clone(), unique_name("topic")).await;
    let runs = Runs::new();
    let running = stage.start_from(watchful(&stage), &runs).await;

    stage.kafka.create_topic(&stage.topic, 2, &[]).await;
    stage.produce(0, 2).await;
    stage.produce(1, 2).await;
    runs.reached(4).await;
    end(running).await;

    assert_eq!(stage.positions().await, [range(0, 0..2), range(1, 0..2)].concat());
}

// Offsets of the old topic do not apply to the new one: reading on would skip or repeat records.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_recreated_under_a_running_inbox_is_stopped_and_reported_and_others_continue() {
    let stage = Stage::new(1).await;
    let other = stage.kafka.create_unique_topic(1).await;
    let (runs, events) = (Runs::new(), Events::capture());
    let inbox = stage.scene.inbox().subscribe(&*stage.topic, runs.handler("a")).subscribe(&*other, runs.handler("b"));
    let inbox = inbox.identity(&*stage.topic, Identity::position()).identity(&*other, Identity::position());
    let running = within(inbox.build().unwrap().start_from(watchful(&stage))).await.unwrap();
    stage.produce(0, 5).await;
    runs.reached(5).await;

    stage.kafka.delete_topic(&stage.topic).await;
    stage.kafka.create_topic(&stage.topic, 1, &[]).await;
    stage.produce(0, 2).await;
    // It may have been detected while the new topic was still empty: then the reason is that of the first check.
    let stopped = |event: &Event| {
        event.message.starts_with("partition stopped") && event.has("topic", &stage.topic) && event.has("ledger", "5")
    };
    events.wait_for(stopped).await;
    stage.kafka.produce(&other, 0, &records(2)).await;
    runs.reached(7).await;
    end(running).await;

    assert_eq!((stage.ledger(0).await, runs.count()), (Some(5), 7));
}

// The new log has grown past the ledger before it is checked.
#[tokio::test(flavor = "multi_thread")]
async fn a_recreated_topic_that_is_longer_than_the_old_one_is_not_skipped_silently() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    stage.produce(0, 3).await;
    let running = stage.start(&runs).await;
    runs.reached(3).await;
    end(running).await;

    stage.kafka.delete_topic(&stage.topic).await;
    stage.kafka.create_topic(&stage.topic, 1, &[]).await;
    stage.produce(0, 5).await;
    let events = Events::capture();
    let running = stage.start(&runs).await;
    let is_read_or_told = |event: &Event| {
        let is_told = event.message.starts_with("partition stopped") || event.message == "gap";
        event.has("topic", &stage.topic) && (is_told || event.has("offset", "0"))
    };
    let is_past = stage.scene.until("SELECT count(*) FROM inbox_ledger WHERE next_offset = 5");
    tokio::select! {
        _ = events.wait_for(is_read_or_told) => {}
        () = is_past => assert!(!events.matching(is_read_or_told).is_empty(), "three records were skipped in silence"),
    }
    end(running).await;
}

// Afterwards it cannot be known that only a transaction marker was deleted: a gap is recorded, and nothing is lost.
#[tokio::test(flavor = "multi_thread")]
async fn the_deleted_end_of_a_transaction_counts_as_a_gap_and_the_next_record_is_read() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    let producer = stage.kafka.transactional_producer(&unique_name("producer")).await;
    producer.begin().await;
    producer.produce(&stage.topic, 0, &records(3)).await;
    producer.commit().await;
    let running = stage.start(&runs).await;
    runs.reached(3).await;

    stage.kafka.delete_records(&stage.topic, 0, 4).await;
    stage.produce(0, 1).await;
    runs.reached(4).await;
    end(running).await;

    assert_eq!(stage.positions().await, [range(0, 0..3), range(0, 4..5)].concat());
    assert_eq!(stage.gaps().await, ["0: 3 to 4"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn records_deleted_after_they_were_read_are_not_a_gap() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    stage.produce(0, 3).await;
    let running = stage.start(&runs).await;
    runs.reached(3).await;

    stage.kafka.delete_records(&stage.topic, 0, 3).await;
    stage.produce(0, 2).await;
    runs.reached(5).await;
    end(running).await;

    assert_eq!(stage.positions().await, range(0, 0..5));
    assert_eq!(stage.gaps().await, Vec::<String>::new());
}
