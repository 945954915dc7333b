//! The audit: a healthy group has no findings, and each problem has its own finding.

use wharf::kafka::{Audit, Finding, Kafka as Source, PartitionAudit};
use wharf::operate::LedgerFilter;

use std::time::{Duration, SystemTime};

use super::stage::{Stage, end};
use crate::scene::{Runs, within};
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;
use support::mock_kafka::{MockBrokers, MockKafka};

/// A stage with five stored records per partition, and no running inbox.
async fn stored(partitions: i32) -> Stage {
    let stage = Stage::new(partitions).await;
    let runs = Runs::new();
    for partition in 0..partitions {
        stage.produce(partition, 5).await;
    }
    let running = stage.start(&runs).await;
    runs.reached(5 * usize::try_from(partitions).unwrap()).await;
    end(running).await;
    stage
}

async fn audit(stage: &Stage) -> Audit {
    within(stage.source().audit(&stage.scene.store)).await.unwrap()
}

/// The only finding, which concerns partition 0 of the stage's topic, and its text.
async fn only_finding(stage: &Stage) -> (Finding, String) {
    let findings = audit(stage).await.findings();
    let [finding] = &findings[..] else { panic!("{findings:?}") };
    let text = finding.to_string();
    assert!(text.starts_with(&format!("{}[0]: ", stage.topic)), "{text}");
    (finding.clone(), text)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_healthy_group_has_no_findings_and_its_lag_counts_unread_records() {
    let stage = stored(2).await;
    let healthy = audit(&stage).await;
    assert_eq!(healthy.findings(), Vec::new());
    assert_eq!(healthy.partitions.len(), 2);
    for partition in &healthy.partitions {
        let PartitionAudit { topic, next_offset, committed, watermarks, stored, highest_stored, .. } = partition;
        assert_eq!((topic, *stored, *highest_stored), (&stage.topic, 5, Some(4)));
        assert_eq!((*next_offset, *committed, *watermarks), (Some(5), Some(5), Some((0, 5))));
        assert_eq!(partition.lag(), Some(0));
    }

    stage.produce(1, 7).await;
    let behind = audit(&stage).await;
    let lags: Vec<_> = behind.partitions.iter().map(PartitionAudit::lag).collect();
    assert_eq!(lags, [Some(0), Some(7)]);
    assert_eq!(behind.findings(), Vec::new(), "lag alone is not a finding");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_offset_of_another_consumer_is_found() {
    let stage = stored(1).await;
    stage.produce(0, 5).await;
    stage.kafka.commit(&stage.group, &stage.topic, 0, 9).await;
    let (finding, text) = only_finding(&stage).await;
    assert!(matches!(finding, Finding::CommittedAhead(_)), "{finding:?}");
    assert!(text.contains("ledger 5, group 9, Kafka 0 to 10"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn records_deleted_unread_are_found_before_and_after_the_gap_is_recorded() {
    let stage = stored(1).await;
    stage.produce(0, 10).await;
    stage.kafka.delete_records(&stage.topic, 0, 12).await;
    let (finding, text) = only_finding(&stage).await;
    assert!(matches!(finding, Finding::Deleted(_)), "{finding:?}");
    assert!(text.contains("ledger 5, group 5, Kafka 12 to 15"), "{text}");
    assert_eq!(audit(&stage).await.partitions[0].lag(), Some(3));

    let runs = Runs::new();
    let running = stage.start(&runs).await;
    runs.reached(3).await;
    end(running).await;
    let (finding, text) = only_finding(&stage).await;
    assert!(matches!(finding, Finding::Gap(_)), "{finding:?}");
    assert!(text.contains("offsets 5 to 12"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recreated_topic_is_found() {
    let stage = stored(1).await;
    stage.kafka.delete_topic(&stage.topic).await;
    stage.kafka.create_topic(&stage.topic, 1, &[]).await;
    stage.produce(0, 2).await;
    let (finding, _) = only_finding(&stage).await;
    assert!(matches!(finding, Finding::TopicRecreated(_)), "{finding:?}");
    assert_eq!(audit(&stage).await.partitions[0].lag(), Some(0));

    // The same when the new topic has become longer.
    stage.produce(0, 10).await;
    let (finding, _) = only_finding(&stage).await;
    assert!(matches!(finding, Finding::TopicRecreated(_)), "{finding:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_without_a_ledger_is_found() {
    let stage = stored(1).await;
    let mistyped = Source::new(stage.kafka.brokers(), "shopp");
    let findings = within(mistyped.audit(&stage.scene.store)).await.unwrap().findings();
    assert_eq!(findings, [Finding::UnknownGroup("shopp".to_owned())]);
}

#[tokio::test(flavor = "multi_thread")]
async fn records_behind_an_open_transaction_are_lag_and_a_hanging_transaction_is_found() {
    let stage = stored(1).await;
    let an_hour_ago = SystemTime::now() - Duration::from_secs(3_600);
    let an_hour_ago = i64::try_from(an_hour_ago.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis()).unwrap();
    let hanging = stage.kafka.transactional_producer(&unique_name("hanging")).await;
    hanging.begin().await;
    hanging.produce(&stage.topic, 0, &[TestRecord::new("a").at(an_hour_ago)]).await;
    stage.produce(0, 2).await;

    let (finding, text) = only_finding(&stage).await;

    let Finding::HangingTransaction(partition) = finding else { panic!("{text}") };
    assert_eq!((partition.lag(), partition.open_transaction), (Some(3), Some(5)));
    hanging.abort().await;
    // The broker answers before it has written the marker that ends the transaction.
    within(async { while !audit(&stage).await.findings().is_empty() {} }).await;
}

// The ledger stays before the marker of a committed transaction, because no record comes after it.
#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_transaction_behind_a_transaction_marker_is_found() {
    let stage = Stage::new(1).await;
    let committed = stage.kafka.transactional_producer(&unique_name("committed")).await;
    committed.begin().await;
    committed.produce(&stage.topic, 0, &[TestRecord::new("a"), TestRecord::new("b")]).await;
    committed.commit().await;
    let runs = Runs::new();
    let running = stage.start(&runs).await;
    runs.reached(2).await;
    end(running).await;
    let an_hour_ago = SystemTime::now() - Duration::from_secs(3_600);
    let an_hour_ago = i64::try_from(an_hour_ago.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis()).unwrap();
    let hanging = stage.kafka.transactional_producer(&unique_name("hanging")).await;
    hanging.begin().await;
    hanging.produce(&stage.topic, 0, &[TestRecord::new("c").at(an_hour_ago)]).await;

    let (finding, text) = only_finding(&stage).await;

    let Finding::HangingTransaction(partition) = finding else { panic!("{text}") };
    assert_eq!((partition.next_offset, partition.open_transaction), (Some(2), Some(3)));
    assert_eq!(partition.lag(), Some(2));
    hanging.abort().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_to_the_beginning_is_no_finding() {
    let stage = stored(1).await;
    stage.kafka.delete_records(&stage.topic, 0, 2).await;
    let filter = LedgerFilter::topic(&stage.group, &stage.topic);
    assert_eq!(stage.scene.store.operate().reset_ledger(&filter, None).await.unwrap(), 1);
    let seen = audit(&stage).await;
    assert_eq!((seen.findings(), seen.partitions[0].lag()), (Vec::new(), Some(3)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_marker_at_the_end_is_not_lag() {
    let stage = Stage::new(1).await;
    let producer = stage.kafka.transactional_producer(&unique_name("producer")).await;
    producer.begin().await;
    producer.produce(&stage.topic, 0, &[TestRecord::new("a"), TestRecord::new("b")]).await;
    producer.commit().await;
    let runs = Runs::new();
    let running = stage.start(&runs).await;
    runs.reached(2).await;
    end(running).await;

    let partition = &audit(&stage).await.partitions[0];

    assert_eq!((partition.next_offset, partition.watermarks), (Some(2), Some((0, 3))));
    assert_eq!(partition.lag(), Some(0));
    stage.produce(0, 1).await;
    assert_eq!(audit(&stage).await.partitions[0].lag(), Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_was_never_read_is_found() {
    let stage = stored(1).await;
    stage.kafka.grow_topic(&stage.topic, 3).await;
    stage.produce(2, 4).await;
    let seen = audit(&stage).await;
    let findings = seen.findings();
    let [Finding::NeverRead(partition)] = &findings[..] else { panic!("{findings:?}") };
    assert_eq!((partition.partition, partition.next_offset, partition.lag()), (2, None, Some(4)));
    assert_eq!(seen.partitions.len(), 3, "the empty one is seen, and well");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_topic_is_found() {
    let stage = stored(1).await;
    stage.kafka.delete_topic(&stage.topic).await;
    let (finding, text) = only_finding(&stage).await;
    assert!(matches!(finding, Finding::Unanswered(_)), "{finding:?}");
    assert!(text.contains("Kafka none to none"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_audit_changes_nothing() {
    let stage = stored(1).await;
    stage.kafka.delete_group(&stage.group).await;
    audit(&stage).await;
    assert_eq!((stage.committed(0).await, stage.ledger(0).await), (None, Some(5)));
}

// An audit without brokers must not report that all is well.
#[tokio::test(flavor = "multi_thread")]
async fn an_audit_of_unavailable_brokers_is_an_error_even_for_a_group_without_positions() {
    let mock = MockKafka::start(1);
    mock.take_down(MockBrokers::All);
    let stage = Stage::new(1).await;
    let away = Source::new(mock.brokers(), &stage.group);
    let error = within(away.audit(&stage.scene.store)).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
}
