//! A log whose bytes have changed on the broker's disk: the place is reported, no record is skipped silently, and other
//! partitions are read.

use super::stage::{Stage, end, range};
use crate::scene::Runs;
use support::events::{Event, Events};
use support::kafka::Kafka;
use support::kafka_records::TestRecord;

// Invariants 2 and 9. The broker returns the damaged bytes; librdkafka detects that their checksum is wrong.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_with_damaged_records_is_reported_and_the_others_are_read() {
    let stage = Stage::on(Kafka::start().await, 2).await;
    for payload in ["first", "damaged later", "third"] {
        stage.kafka.produce(&stage.topic, 0, &[TestRecord::new(payload)]).await;
    }
    stage.produce(1, 3).await;
    stage.kafka.stop().await;
    stage.kafka.corrupt(&stage.topic, 0, "damaged later").await;
    stage.kafka.start_again().await;

    let (runs, events) = (Runs::new(), Events::capture());
    let running = stage.start(&runs).await;
    let names_it = |event: &Event| {
        event.has("topic", &stage.topic) && event.has("partition", "0") && event.message != "partition begun"
    };
    events.wait_for(names_it).await;
    runs.reached(4).await;
    end(running).await;

    let stored = stage.positions().await;
    assert!(stored.starts_with(&range(0, 0..1)) && stored.ends_with(&range(1, 0..3)), "{stored:?}");
    let is_passed = stage.ledger(0).await > Some(1);
    assert_eq!(is_passed, stage.gaps().await == ["0: 1 to 2"], "what is passed over is noted");
}
