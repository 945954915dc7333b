//! Positions in Kafka for operators: listed, reset, skipped; from the library and from SQL; audited.

use wharf::operate::LedgerFilter;

use super::scene::Scene;
use crate::databases::Database;

/// Two partitions of a topic, the first of them stopped.
async fn scene() -> Scene {
    let scene = Scene::new().await;
    for (partition, stopped) in [(0, "now(), 'the log was truncated'"), (1, "NULL, NULL")] {
        let row = format!(
            "INSERT INTO inbox_ledger (consumer_group, cluster_id, topic, kafka_partition, next_offset, updated_at, leader_epoch, topic_id, \
             stopped_at, stopped_why) VALUES ('shop', 'c1', 'orders', {partition}, 6000, now(), 3, 'id', {stopped})"
        );
        scene.database.execute(&row).await;
    }
    scene
}

fn orders() -> LedgerFilter {
    LedgerFilter::topic("shop", "orders")
}

async fn positions(scene: &Scene) -> Vec<String> {
    let sql = "SELECT concat_ws('|', kafka_partition, next_offset, leader_epoch, topic_id, stopped_why) FROM inbox_ledger \
               ORDER BY cluster_id, kafka_partition";
    scene.database.query_texts(sql).await
}

#[tokio::test(flavor = "multi_thread")]
async fn positions_are_listed_with_the_reason_of_a_stop() {
    let scene = scene().await;
    let operator = scene.store.operate();
    let found = operator.positions(&orders(), 10).await.unwrap();
    let [stopped, reading] = &found[..] else { panic!("{found:?}") };
    assert_eq!((stopped.partition, stopped.next_offset, stopped.leader_epoch), (0, 6000, Some(3)));
    assert_eq!((stopped.cluster_id.as_str(), stopped.topic_id.as_deref()), ("c1", Some("id")));
    assert_eq!(stopped.stopped_why.as_deref(), Some("the log was truncated"));
    assert!(stopped.stopped_at.is_some() && reading.stopped_at.is_none());
    assert_eq!(operator.positions(&orders().partition(1), 10).await.unwrap().len(), 1);
    assert_eq!(operator.positions(&LedgerFilter::topic("another", "orders"), 10).await.unwrap().len(), 0);
    assert_eq!(operator.positions(&LedgerFilter::default(), 1).await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_sets_the_position_clears_its_epoch_and_ends_the_stop() {
    let scene = scene().await;
    let operator = scene.store.operate().acting_as("alice").because("the tail is lost");
    assert_eq!(operator.reset_ledger(&orders().partition(0), Some(5000)).await.unwrap(), 1);
    assert_eq!(positions(&scene).await, ["0|5000", "1|6000|3|id"]);
    assert_eq!(operator.reset_ledger(&orders(), None).await.unwrap(), 2);
    assert_eq!(positions(&scene).await, ["0|-2", "1|-2"]);
    assert_eq!(operator.reset_ledger(&LedgerFilter::topic("shop", "order"), None).await.unwrap(), 0);
    let audit = "SELECT concat_ws('|', action, affected, filter->>'kafka_partition', filter->>'to_offset') FROM inbox_audit ORDER BY id";
    assert_eq!(scene.database.query_texts(audit).await, ["reset ledger|1|0|5000", "reset ledger|2", "reset ledger|0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_skip_moves_forward_only_and_records_the_gap() {
    let scene = scene().await;
    let operator = scene.store.operate();
    assert!(!operator.skip_ledger(&orders().partition(0), 6000).await.unwrap());
    assert!(operator.skip_ledger(&orders().partition(0), 7500).await.unwrap());
    assert_eq!(positions(&scene).await, ["0|7500", "1|6000|3|id"]);
    let gaps = "SELECT concat_ws('|', cluster_id, kafka_partition, from_offset, to_offset) FROM inbox_gap";
    assert_eq!(scene.database.query_texts(gaps).await, ["c1|0|6000|7500"]);
    let audit = "SELECT concat_ws('|', action, affected) FROM inbox_audit ORDER BY id";
    assert_eq!(scene.database.query_texts(audit).await, ["skip ledger|0", "skip ledger|1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_actions_exist_in_sql() {
    let scene = scene().await;
    scene.database.move_ledger("reset", "'shop', 'orders', 0, 5000").await;
    scene.database.move_ledger("skip", "'shop', 'orders', 0, 5500").await;
    assert_eq!(positions(&scene).await, ["0|5500", "1|6000|3|id"]);
    let gaps = "SELECT concat_ws('|', from_offset, to_offset) FROM inbox_gap";
    assert_eq!(scene.database.query_texts(gaps).await, ["5000|5500"]);
    scene.database.move_ledger("reset", "'shop', 'orders', NULL, NULL").await;
    assert_eq!(positions(&scene).await, ["0|-2", "1|-2"]);
    let audit = "SELECT concat_ws('|', action, affected) FROM inbox_audit ORDER BY id";
    assert_eq!(scene.database.query_texts(audit).await, ["reset ledger|1", "skip ledger|1", "reset ledger|2"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_action_that_would_affect_two_clusters_is_refused() {
    let scene = scene().await;
    let other = "INSERT INTO inbox_ledger (consumer_group, cluster_id, topic, kafka_partition, next_offset, updated_at) \
                 VALUES ('shop', 'c2', 'orders', 0, 10, now())";
    scene.database.execute(other).await;
    let operator = scene.store.operate();
    let error = operator.reset_ledger(&orders().partition(0), None).await.unwrap_err();
    assert!(error.to_string().contains("c1, c2"), "{error}");
    assert_eq!(operator.reset_ledger(&orders().partition(0).cluster("c2"), Some(4)).await.unwrap(), 1);
    assert_eq!(positions(&scene).await, ["0|6000|3|id|the log was truncated", "1|6000|3|id", "0|4"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_reports_stopped_partitions_and_unreadable_topics_without_a_broker() {
    let scene = scene().await;
    scene
        .database
        .execute(
            "INSERT INTO inbox_ingest (consumer_group, name, source, cluster_id, started_at, seen_at, problem, problem_since) \
             VALUES ('shop', 'host/7', 'eu', 'c1', now(), now(), 'authentication failed', now()), \
                    ('shop', 'host/7', 'us', 'c2', now(), now(), NULL, NULL)",
        )
        .await;
    scene
        .database
        .execute(
            "INSERT INTO inbox_partition (consumer_group, topic, kafka_partition, cluster_id, state, since, seen_at, ingest, why) \
             VALUES ('shop', 'orders', 1, 'c1', 'blocked', now(), now(), 'host/7', 'bad checksum'), \
                    ('shop', 'returns', 0, 'c1', 'refused', now(), now(), 'host/7', 'topic returns may not be read')",
        )
        .await;
    let diagnosis = scene.store.operate().doctor().await.unwrap();
    let codes: Vec<&str> = diagnosis.symptoms.iter().map(|symptom| &*symptom.code).collect();
    for code in ["partition stopped", "partition blocked", "partition refused", "kafka error"] {
        assert!(codes.contains(&code), "{codes:?}");
    }
    // It is reported once, although two sources of the process read for the group.
    assert_eq!(codes.iter().filter(|code| **code == "partition blocked").count(), 1, "{codes:?}");
    let problem = diagnosis.symptoms.iter().find(|symptom| symptom.code == "kafka error").unwrap();
    assert!(problem.what.contains("source eu (group shop)"), "{problem:?}");

    // The topics are not subscribed any more, or were deleted: no process writes their partitions.
    scene.database.execute("UPDATE inbox_partition SET seen_at = now() - interval '4 minutes'").await;
    let diagnosis = scene.store.operate().doctor().await.unwrap();
    let codes = diagnosis.symptoms.iter().map(|symptom| &*symptom.code);
    let of_partitions: Vec<&str> = codes.filter(|code| code.starts_with("partition ")).collect();
    assert_eq!(of_partitions, ["partition stopped"], "it stays stopped until a person acts");
}
