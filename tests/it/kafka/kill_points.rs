//! A reader is killed at each point between reading a record and committing its offset: the record is never lost, and
//! the committed offset is never ahead of the stored records.
//!
//! A proxy that loses a statement or its reply makes most of these points; the test observes the others from outside.
//! The reader is a static member, so the next one gets its partition at once.

use super::reader::Reader;
use super::stage::Stage;
use crate::scene::within;
use support::child::Child;
use support::proxy::{Fault, Proxy};

const ROUNDS: usize = 4;
const RECORDS: usize = 20;
/// Only the accept statement contains this text.
const ACCEPT: &str = "INSERT INTO inbox_message";

/// Kills a reader behind a proxy at the same point again and again. `kill` gets a working reader, and has produced
/// [`RECORDS`] records when it returns.
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
async fn a_kill_after_reading_and_before_storing_loses_nothing() {
    let stage = Stage::new(1).await;
    killed(&stage, async |stage, proxy, _| {
        let fault = proxy.on_next_statement(ACCEPT, Fault::LoseRequest);
        stage.produce(0, RECORDS).await;
        fault.fired().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_after_storing_and_before_the_reply_loses_nothing() {
    let stage = Stage::new(1).await;
    killed(&stage, async |stage, proxy, _| {
        let fault = proxy.on_next_statement(ACCEPT, Fault::LoseReply);
        stage.produce(0, RECORDS).await;
        fault.fired().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_after_storing_and_before_the_offset_commit_loses_nothing() {
    let stage = Stage::new(1).await;
    killed(&stage, async |stage, _, _| {
        let end = stage.produce(0, RECORDS).await + i64::try_from(RECORDS).unwrap();
        stage.scene.until(&format!("SELECT (max(next_offset) >= {end})::int::bigint FROM inbox_ledger")).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_right_after_the_offset_commit_loses_nothing() {
    let stage = Stage::new(1).await;
    killed(&stage, async |stage, _, _| {
        let end = stage.produce(0, RECORDS).await + i64::try_from(RECORDS).unwrap();
        within(async { while stage.committed(0).await < Some(end) {} }).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_around_the_commit_of_redelivered_records_loses_nothing() {
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

/// Known identities take the longer path, which ends with a COMMIT.
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
