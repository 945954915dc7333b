//! What the tests require of their own support: a Kafka that keeps every byte when killed, and SQL that means the same
//! on both stores.

use support::kafka::Kafka;
use support::kafka_records::TestRecord;
use support::sqlite::translated;

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_broker_keeps_acknowledged_records() {
    let kafka = Kafka::start().await;
    let topic = kafka.create_unique_topic(1).await;
    let odd = TestRecord::keyed([0xff], "payload").with_header([0xfe], "value").with_null_header("none");

    assert_eq!(kafka.produce(&topic, 0, &[TestRecord::new("first"), odd, TestRecord::tombstone("gone")]).await, 0);
    kafka.kill().await;
    kafka.start_again().await;

    let watermarks = kafka.watermarks(&topic, 0).await;
    assert_eq!((watermarks.low, watermarks.high), (0, 3));
}

#[test]
fn the_compose_file_has_the_kafka_version_of_the_tests() {
    let environment = include_str!("../../scripts/environment.sh");
    let version = environment.lines().find_map(|line| line.strip_prefix("kafka_version=")).unwrap();
    assert!(include_str!("../../docker-compose.yml").contains(&format!("image: apache/kafka:{version}\n")));
}

#[test]
fn postgresql_expressions_are_translated_to_sqlite() {
    let sql = "SELECT (now() - interval '2 days' > due_at)::int::bigint, inbox_text(payload) FROM t";
    let clock = "(SELECT at FROM inbox_now)";
    let bytes = "CASE typeof(payload) WHEN 'blob' THEN '\\x' || lower(hex(payload)) ELSE payload END";
    assert_eq!(translated(sql), format!("SELECT ({clock} - 172800000000 > due_at), {bytes} FROM t"));
}
