//! One partition has far more records than the others, or cannot be written at all.

use std::time::Duration;

use super::ingester::{Ingester, await_event, said};
use super::stage::Stage;
use support::child::Child;
use support::kafka_records::TestRecord;
use support::postgres::connect;
use support::proxy::Proxy;

const LIMITS: &str = "accept_queue_rows=400\naccept_batch_rows=50";
/// The latency of a database in a nearby data centre.
const EACH_WAY: Duration = Duration::from_millis(2);

async fn both_begun(child: &Child) {
    for partition in 0..2 {
        let begun = format!(" partition={partition} ");
        child.await_line(|line| line.starts_with("partition begun") && line.contains(&begun)).await;
    }
}

// Each record of the other partition ends a batch. If each batch paused both partitions, read-ahead records would be
// fetched again.
#[tokio::test(flavor = "multi_thread")]
async fn a_hot_partition_is_not_paused_for_each_record_of_another() {
    const HOT: usize = 8_000;
    const TRICKLE: usize = 100;
    // A database that stalls for a second may cause a pause. Normally there is none.
    const PAUSES_MAX: usize = 5;
    let stage = Stage::new(2).await;
    let proxy = Proxy::start_far_from(&stage.scene.database.url(), EACH_WAY).await;
    let url = proxy.url(&stage.scene.database.url());
    let child = Ingester { url, limits: LIMITS, ..Ingester::on(&stage) }.spawn(&stage);
    both_begun(&child).await;

    let hot = stage.kafka.produce_many(&stage.topic, 1, HOT, |number| TestRecord::new(format!("{number}")));
    let trickle = async {
        for _ in 0..TRICKLE {
            stage.produce(1, 1).await;
        }
    };
    tokio::join!(hot, trickle);
    stage.stored(HOT + TRICKLE).await;

    let pauses = said(&child, "partition paused") + said(&child, "intake closed");
    assert!(pauses <= PAUSES_MAX, "{pauses} pauses for {TRICKLE} records");
    assert_eq!((stage.ledger(0).await, stage.ledger(1).await), (Some(8_000), Some(100)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_cannot_be_written_is_paused_alone_and_delays_no_other() {
    let stage = Stage::new(2).await;
    let child = Ingester { limits: LIMITS, ..Ingester::on(&stage) }.spawn(&stage);
    both_begun(&child).await;

    let holder = connect(&stage.scene.database.url()).await;
    holder.batch_execute("BEGIN; SELECT FROM inbox_ledger WHERE kafka_partition = 0 FOR UPDATE").await.unwrap();
    stage.produce(0, 1_000).await;
    let paused = await_event(&child, "partition paused").await;
    assert!(paused.contains(" partition=0"), "{paused}");
    stage.produce(1, 500).await;
    stage.stored(500).await;
    assert_eq!((stage.ledger(0).await, stage.ledger(1).await), (Some(0), Some(500)));

    holder.batch_execute("COMMIT").await.unwrap();
    stage.stored(1_500).await;
    let resumed = await_event(&child, "partition resumed").await;
    assert!(resumed.contains(" partition=0"), "{resumed}");
    assert_eq!((said(&child, "partition paused"), said(&child, "intake closed")), (1, 0));
}
