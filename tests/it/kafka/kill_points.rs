//! A reader that is killed at each point between reading a record and committing its offset: the record is never lost, and the offset
//! is never ahead of it.
//!
//! The points are made by a proxy that loses a statement, or the answer to it, and by what the test can see from outside. The reader is
//! a static member: the next one has its partition at once.

use super::reader::Reader;
use super::stage::Stage;
use crate::scene::within;
use support::child::Child;
use support::proxy::{Fault, Proxy};

const ROUNDS: usize = 4;
const RECORDS: usize = 20;
/// Only the statement that accepts contains it.
const ACCEPT: &str = "INSERT INTO inbox_message";

/// A reader by way of a proxy, killed at the same point again and again. `kill` is called with a reader at work, and has produced
/// [`RECORDS`] records when it is over.
async fn killed(stage: &Stage, kill: impl AsyncFn(&Stage, &Proxy, &Child)) {
    let observer = stage.observed();
    let proxy = Proxy::start_for(&stage.scene.database.url()).await;
    let mut reader = Reader::on(stage).named("reader");
    reader.url = proxy.url(&reader.url);
    for _ in 0..ROUNDS {
        let child = reader.spawn();
        begun(&child).await;
        kill(stage, &proxy, &child).await;
        child.kill9().await;
    }
    let survivor = reader.spawn();
    let produced = [i64::try_from(ROUNDS * RECORDS).unwrap()];
    stage.caught_up(&produced).await;
    begun(&survivor).await;
    survivor.term();
    assert!(survivor.wait().await.success());
    observer.finish().await;
    stage.assert_whole(&produced).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_reading_and_before_storing_nothing_is_lost() {
    let stage = Stage::new(1).await;
    killed(&stage, async |stage, proxy, _| {
        let fault = proxy.on_next_statement(ACCEPT, Fault::LoseRequest);
        stage.produce(0, RECORDS).await;
        fault.fired().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_storing_and_before_knowing_it_nothing_is_lost() {
    let stage = Stage::new(1).await;
    killed(&stage, async |stage, proxy, _| {
        let fault = proxy.on_next_statement(ACCEPT, Fault::LoseReply);
        stage.produce(0, RECORDS).await;
        fault.fired().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_storing_and_before_the_offset_is_committed_nothing_is_lost() {
    let stage = Stage::new(1).await;
    killed(&stage, async |stage, _, _| {
        let end = stage.produce(0, RECORDS).await + i64::try_from(RECORDS).unwrap();
        stage.scene.until(&format!("SELECT (max(next_offset) >= {end})::int::bigint FROM inbox_ledger")).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_right_after_the_offset_is_committed_nothing_is_lost() {
    let stage = Stage::new(1).await;
    killed(&stage, async |stage, _, _| {
        let end = stage.produce(0, RECORDS).await + i64::try_from(RECORDS).unwrap();
        within(async { while stage.committed(0).await < Some(end) {} }).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_around_the_commit_of_records_that_come_again_nothing_is_lost() {
    let stage = Stage::new(1).await;
    stage.produce(0, RECORDS).await;
    let first = Reader::on(&stage).named("reader").spawn();
    stage.stored(RECORDS).await;
    first.kill9().await;

    for fault in [Fault::LoseRequest, Fault::LoseReply] {
        killed_while_reading_again(&stage, fault).await;
    }

    let survivor = Reader::on(&stage).named("reader").spawn();
    begun(&survivor).await;
    stage.scene.until(&format!("SELECT (max(next_offset) = {RECORDS})::int::bigint FROM inbox_ledger")).await;
    let produced = [i64::try_from(RECORDS).unwrap()];
    stage.caught_up(&produced).await;
    survivor.term();
    assert!(survivor.wait().await.success());
    stage.assert_whole(&produced).await;
}

/// Known identities take the longer way, which ends with a COMMIT.
async fn killed_while_reading_again(stage: &Stage, fault: Fault) {
    stage.scene.database.execute("UPDATE inbox_ledger SET next_offset = 0").await;
    let proxy = Proxy::start_for(&stage.scene.database.url()).await;
    let mut reader = Reader::on(stage).named("reader");
    reader.url = proxy.url(&reader.url);
    let lost = proxy.on_commit_after("FOR NO KEY UPDATE) f", fault);
    let child = reader.spawn();
    lost.fired().await;
    child.kill9().await;
}

/// Waits until the reader reads.
async fn begun(reader: &Child) {
    reader.await_line(|line| line.starts_with("partition begun")).await;
}
