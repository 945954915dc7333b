//! Runs the example with two clusters as a user does: Avro from a cluster that requires tokens, JSON from another one.

use std::time::Duration;

use support::child::Child;
use support::kafka::Kafka;
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;

use super::{fixture, started};
use crate::kafka_failures::tokens;
use crate::scene::{Scene, within};

#[tokio::test(flavor = "multi_thread")]
async fn the_example_reads_avro_from_one_cluster_with_tokens_and_json_from_another() {
    let (scene, registry, folder) = (Scene::new().await, started(), tempfile::tempdir().unwrap());
    let (guarded, other) = (tokens::guarded().await, Kafka::shared().await);
    let (orders, payments) = (guarded.create_unique_topic(1).await, other.create_unique_topic(1).await);
    let token_file = folder.path().join("token");
    std::fs::write(&token_file, tokens::jwt("admin", Duration::from_secs(3_600))).unwrap();
    let avro = TestRecord::new(fixture("avro").payload().unwrap().to_vec());
    guarded.produce(&orders, 0, &[avro]).await;
    let payment = r#"{"id": "payment-1", "order": -17, "cents": 1250}"#;
    other.produce(&payments, 0, &[TestRecord::new(payment), TestRecord::new(payment)]).await;

    let service = Child::spawn_example(
        "two_clusters",
        &[
            ("DATABASE_URL", &scene.database.url()),
            ("ORDERS_BROKERS", &guarded.token_brokers()),
            ("ORDERS_SECURITY_PROTOCOL", "sasl_plaintext"),
            ("ORDERS_TOPIC", &orders),
            ("REGISTRY_URL", &registry.url()),
            ("TOKEN_FILE", token_file.to_str().unwrap()),
            ("PAYMENTS_BROKERS", other.brokers()),
            ("PAYMENTS_TOPIC", &payments),
            ("KAFKA_GROUP", &unique_name("group")),
            ("RUST_LOG", "info"),
            ("NO_COLOR", "1"),
        ],
    );
    let receipt = service.await_printed("receipt sent").await;
    assert!(receipt.contains("order=-17") && receipt.contains("Ännchen"), "{receipt}");
    let booked = service.await_printed("payment booked").await;
    assert!(booked.contains("order=-17 cents=1250"), "{booked}");
    scene.until("SELECT (count(*) = 2)::int::bigint FROM inbox_status WHERE state = 'done'").await;
    service.term();
    assert!(within(service.wait()).await.success(), "{}", service.last_printed(60));

    let ledger = "SELECT topic || ' ' || next_offset FROM inbox_ledger ORDER BY 1";
    let mut expected = [format!("{orders} 1"), format!("{payments} 2")];
    expected.sort();
    assert_eq!(scene.database.query_texts(ledger).await, expected);
    assert_eq!(scene.count("(SELECT DISTINCT cluster_id FROM inbox_ledger) c").await, 2);
    assert_eq!(scene.count("inbox_message").await, 2, "the payment that was produced twice is one message");
}
