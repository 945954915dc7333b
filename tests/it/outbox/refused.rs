//! Records that Kafka rejects: too large, unknown topic, fenced producer. No other record is delayed, lost or
//! overtaken.

use std::time::Duration;

use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

use super::post::{Post, end, publish_sql, relay};
use crate::scene::Scene;
use support::kafka_admin::unique_name;
use support::mock_kafka::MockKafka;

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_is_too_large_is_poisoned_and_its_neighbours_are_sent_in_order() {
    let post = Post::with_topic(&[("max.message.bytes", "200000")]).await;
    post.publish("k", &["a", "b", &"x".repeat(300_000), "c"]).await;
    let relay = post.start();
    post.sent().await;
    assert_eq!(post.payloads().await, ["a", "b", "c"]);
    let poisoned = "SELECT concat_ws('/', reason, length(payload)) FROM inbox_outbox WHERE status = 3";
    assert_eq!(post.scene.database.query_texts(poisoned).await, ["too large/300000"]);
    end(relay).await;
}

// librdkafka sends several records in one batch. The topic accepts each of them, but not all of them together.
#[tokio::test(flavor = "multi_thread")]
async fn records_that_are_rejected_only_together_are_sent_alone_and_in_order() {
    let post = Post::with_topic(&[("max.message.bytes", "3000")]).await;
    let payloads: Vec<String> = (0..40).map(|number| format!("{number:02}{}", "x".repeat(700))).collect();
    post.publish("k", &payloads.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let relay = post.start();
    post.sent().await;
    let mut read = post.payloads().await;
    // Records that were acknowledged before the producer was replaced may be on the topic twice.
    read.dedup();
    assert_eq!(read, payloads);
    assert_eq!(post.scene.count("inbox_outbox WHERE status = 3").await, 0);
    end(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn records_for_a_missing_topic_wait_and_others_are_sent() {
    let post = Post::new(1).await;
    let missing = unique_name("topic");
    let publish = |payload: &str| publish_sql(&missing, "k", payload);
    post.scene.database.execute(&publish("early")).await;
    let relay = post.start();
    post.publish("k", &["a"]).await;
    post.scene.until("SELECT (count(*) = 1)::int::bigint FROM inbox_outbox WHERE status = 2").await;
    post.scene.until("SELECT (count(*) = 1)::int::bigint FROM inbox_relay WHERE problem IS NOT NULL").await;
    post.kafka.create_topic(&missing, 1, &[]).await;
    post.scene.database.execute(&publish("late")).await;
    post.sent().await;
    let read = post.kafka.read_all(&missing, 1).await;
    assert_eq!(read.iter().map(|record| record.text()).collect::<Vec<_>>(), ["early", "late"]);
    end(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_missing_for_longer_than_the_grace_poisons_its_records() {
    let post = Post::new(1).await;
    let missing = unique_name("topic");
    post.scene.database.execute(&publish_sql(&missing, "k", "a")).await;
    let relay = post.relay().unknown_topic_grace(Duration::from_millis(100)).start(&post.scene.store).unwrap();
    post.sent().await;
    let poisoned = "SELECT reason FROM inbox_outbox WHERE status = 3";
    assert_eq!(post.scene.database.query_texts(poisoned).await, ["unknown topic"]);
    end(relay).await;
}

// The brokers report that the producer is fenced, or that earlier records are missing.
#[tokio::test(flavor = "multi_thread")]
async fn a_producer_that_is_fenced_is_replaced_and_everything_is_sent_in_order() {
    use RDKafkaRespErr::{
        RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH, RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER,
        RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
    };
    let (scene, mock) = (Scene::new().await, MockKafka::start(1));
    mock.create_topic("orders", 1);
    let errors = [
        RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH,
        RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER,
        RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
    ];
    mock.fail_requests(RDKafkaApiKey::Produce, &errors);
    for payload in 0..20 {
        scene.database.execute(&publish_sql("orders", "k", &payload.to_string())).await;
    }
    let relay = relay(mock.brokers()).batch_rows(7).start(&scene.store).unwrap();
    scene.until("SELECT (count(*) = 20)::int::bigint FROM inbox_outbox WHERE status = 2").await;
    let offsets = "SELECT (count(*) = 20 AND bool_and(is_later))::int::bigint
                   FROM (SELECT kafka_offset > lag(kafka_offset, 1, -1::bigint) OVER (ORDER BY id) AS is_later FROM inbox_outbox) o";
    assert_eq!(scene.database.query_one_i64(offsets).await, 1);
    end(relay).await;
}
