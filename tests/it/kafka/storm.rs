//! Many rebalances in a row: readers join and leave, shut down or killed, while records arrive. No record is lost, the
//! ledger never moves back, and no offset is committed before the records before it are stored, with each of Kafka's
//! three assignment protocols.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::reader::Reader;
use super::stage::Stage;
use crate::scene::within;
use support::child::Child;

const PARTITIONS: i32 = 8;
const MEMBERS: usize = 3;
/// In each change a reader joins and another leaves.
const CHANGES: usize = 6;
/// Records of one partition that are produced together, and the maximum number of such portions.
const PORTION: usize = 50;
const PORTIONS_MAX: usize = 30 * PARTITIONS as usize;

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_eager_rebalances_loses_nothing() {
    let stage = Arc::new(Stage::new(PARTITIONS).await);
    let reader = Reader::on(&stage).soon_missed().set("partition.assignment.strategy", "range");
    storm(stage, reader).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_cooperative_rebalances_loses_nothing_and_keeps_the_order_of_each_key() {
    let stage = Arc::new(Stage::new(PARTITIONS).await);
    // In the order in which the transactions of the handler wrote.
    let table = "CREATE TABLE history (kafka_partition integer, kafka_offset bigint,
                                       written_as bigint GENERATED ALWAYS AS IDENTITY)";
    stage.scene.database.execute(table).await;
    let reader = Reader::on(&stage).soon_missed().set("partition.assignment.strategy", "cooperative-sticky");
    storm(Arc::clone(&stage), reader.in_order()).await;

    let out_of_order = "(SELECT kafka_offset <= lag(kafka_offset) OVER key AS is_late FROM history
                         WINDOW key AS (PARTITION BY kafka_partition, kafka_offset % 10 ORDER BY written_as)) h WHERE is_late";
    assert_eq!(stage.scene.count(out_of_order).await, 0);
    assert_eq!(stage.scene.count("history").await, stage.scene.count("inbox_message").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_under_the_consumer_protocol_loses_nothing() {
    let stage = Arc::new(Stage::new(PARTITIONS).await);
    // With this protocol the session timeout belongs to the group, not to the member.
    let settings = [("consumer.session.timeout.ms", "1500"), ("consumer.heartbeat.interval.ms", "300")];
    stage.kafka.alter_group(&stage.group, &settings).await;
    let reader = Reader::on(&stage).set("group.protocol", "consumer");
    storm(stage, reader).await;
}

async fn storm(stage: Arc<Stage>, reader: Reader) {
    let observer = stage.observed();
    let is_over = Arc::new(AtomicBool::new(false));
    let producing = tokio::spawn(produce_until(Arc::clone(&stage), Arc::clone(&is_over)));
    let mut members: Vec<Child> = (0..MEMBERS).map(|_| reader.spawn()).collect();
    let mut stored = 0;
    for change in 0..CHANGES {
        stored = moved_on(&stage, stored).await;
        members.push(reader.spawn());
        let leaving = members.remove(0);
        if change % 2 == 0 {
            leaving.kill9().await;
        } else {
            leaving.await_said("at work").await;
            leaving.term();
        }
        // A reader that is shut down leaves while the next one joins.
        tokio::spawn(async move { leaving.wait().await });
    }
    is_over.store(true, Ordering::Relaxed);
    let produced = within(producing).await.unwrap();
    stage.caught_up(&produced).await;
    for member in members {
        member.await_said("at work").await;
        member.term();
        assert!(member.wait().await.success(), "{:?}", member.lines());
    }
    observer.finish().await;
    stage.assert_whole(&produced).await;
}

/// Waits until the ledger has moved, so that every change happens while the group is working.
async fn moved_on(stage: &Stage, stored: i64) -> i64 {
    let ledger = "SELECT coalesce(sum(next_offset), 0)::bigint FROM inbox_ledger";
    stage.scene.until(&format!("SELECT (({ledger}) > {stored})::int::bigint")).await;
    stage.scene.database.query_one_i64(ledger).await
}

/// Produces to the partitions in turn. Returns the number of records per partition.
async fn produce_until(stage: Arc<Stage>, is_over: Arc<AtomicBool>) -> Vec<i64> {
    let mut produced = vec![0; usize::try_from(PARTITIONS).unwrap()];
    for portion in 0..PORTIONS_MAX {
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        let partition = portion % produced.len();
        stage.produce(i32::try_from(partition).unwrap(), PORTION).await;
        produced[partition] += i64::try_from(PORTION).unwrap();
    }
    produced
}
