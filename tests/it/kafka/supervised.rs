//! No part of a process ends silently: whatever panics, `running.failure()` has the error, an ERROR event names it, and
//! another member of the group continues.

use super::reader::Reader;
use super::stage::Stage;

/// The first reader panics at the event. The second one stores everything in the end.
async fn a_panic_at(event: &'static str, says: &str, told_as: [&str; 2]) {
    let stage = Stage::new(2).await;
    for partition in 0..2 {
        stage.produce(partition, 10).await;
    }
    let panicking = Reader::on(&stage).soon_missed().panics_at(event).spawn();

    let error = panicking.await_line(|line| line.starts_with("failed: ")).await;

    assert!(error.contains(says) && error.contains(&format!("at {event}")), "{error}");
    let health = panicking.await_line(|line| line.starts_with("health: ")).await;
    assert!(health.starts_with("health: failed: ") && health.contains(says), "{health}");
    let told = panicking.lines();
    assert!(told.iter().any(|line| line.starts_with(told_as[0]) && line.contains(told_as[1])), "{told:?}");
    panicking.wait().await;
    let reader = Reader::on(&stage).soon_missed().spawn();
    stage.caught_up(&[10, 10]).await;
    reader.term();
    assert!(reader.wait().await.success());
    stage.assert_whole(&[10, 10]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_the_reading_thread_is_reported() {
    a_panic_at("partition begun", "the ingest thread panicked", ["ingest failed ", "the ingest thread panicked"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_the_task_that_writes_a_batch_is_reported() {
    a_panic_at("accepted", "an ingest task panicked", ["ingest failed ", "an ingest task panicked"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_the_settle_loop_is_reported() {
    a_panic_at("done", "settle has ended", ["engine failed ", "what=settle"]).await;
}
