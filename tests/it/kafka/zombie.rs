//! A reader that is frozen for longer than its session timeout and continues after others have done its work: it stores
//! nothing twice and moves no offset back.

use super::reader::Reader;
use super::stage::Stage;
use crate::scene::{Runs, within};
use support::events::Events;
use support::postgres::connect;

const WAITING: &str = "SELECT (count(*) > 0)::int::bigint FROM pg_stat_activity
                       WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%held AS MATERIALIZED%'";
const END_WAITING: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                           WHERE datname = current_database() AND wait_event_type = 'Lock'";

/// Freezes a reader that is about to store 50 records. `end_statement` decides what happens to its statement meanwhile,
/// and `again_max` is the number of deliveries that it may have claimed with it, which others then run again.
async fn sleeps_while_another_reads(end_statement: &str, again_max: i64) {
    let stage = Stage::new(1).await;
    let observer = stage.observed();
    let zombie = Reader::on(&stage).soon_missed().spawn();
    zombie.await_line(|line| line.starts_with("partition begun")).await;
    let lock = connect(&stage.scene.database.url()).await;
    lock.batch_execute("BEGIN; LOCK TABLE inbox_message IN EXCLUSIVE MODE").await.unwrap();
    stage.produce(0, 50).await;
    stage.scene.until(WAITING).await;
    zombie.stop();
    stage.scene.database.execute(end_statement).await;
    lock.batch_execute("COMMIT").await.unwrap();

    let runs = Runs::new();
    let events = Events::capture();
    let source = stage.source().set("heartbeat.interval.ms", "300");
    let running = within(stage.inbox(&runs).start_from(source)).await.unwrap();
    stage.produce(0, 50).await;
    events.wait_for(|event| event.message == "partition begun" && event.has("topic", &stage.topic)).await;
    stage.stored(100).await;
    zombie.cont();
    zombie.await_line(|line| line.starts_with("partitions revoked")).await;
    stage.produce(0, 50).await;
    stage.caught_up(&[150]).await;

    zombie.term();
    assert!(zombie.wait().await.success(), "{:?}", zombie.lines());
    within(running.shutdown(std::time::Duration::from_secs(5))).await.unwrap();
    observer.finish().await;
    stage.assert_whole(&[150]).await;
    let again = stage.scene.count("inbox_delivery WHERE attempts > 1").await;
    assert!(again <= again_max, "{again} deliveries were run again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_zombie_whose_batch_was_not_stored_finds_it_stored_by_another() {
    sleeps_while_another_reads(END_WAITING, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_zombie_whose_batch_was_stored_without_a_reply_does_no_harm() {
    sleeps_while_another_reads("SELECT 1", 50).await;
}
