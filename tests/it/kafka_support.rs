//! The real Kafka that the tests start: it keeps what it is given, byte for byte, and through a kill.

use crate::support::kafka::Kafka;
use crate::support::kafka_records::TestRecord;

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_broker_still_has_what_it_acknowledged() {
    let kafka = Kafka::start().await;
    let topic = kafka.create_unique_topic(1).await;
    let odd = TestRecord::keyed([0xff], "payload").with_header([0xfe], "value").with_null_header("none");

    assert_eq!(kafka.produce(&topic, 0, &[TestRecord::new("first"), odd, TestRecord::tombstone("gone")]).await, 0);
    kafka.kill().await;
    kafka.start_again().await;

    let watermarks = kafka.watermarks(&topic, 0).await;
    assert_eq!((watermarks.low, watermarks.high), (0, 3));
}
