//! A topic whose records are all quarantined stops intake, instead of moving into the quarantine record by record.

use wharf::operate::QuarantineFilter;
use wharf::{Identity, Limits};

use super::stage::{Stage, end};
use crate::scene::{Runs, quick};
use support::events::Events;
use support::kafka_records::TestRecord;

/// Stops after ten quarantined records in a row; a batch has five.
fn limits() -> Limits {
    quick().quarantine_run_max(10).accept_batch_rows(5)
}

/// Waits until intake has stopped and several attempts were refused. Returns how many records are in quarantine.
async fn stopped(stage: &Stage, events: &Events) -> i64 {
    events.wait_for(|event| event.message == "intake stopped" && event.has("topic", &stage.topic)).await;
    let is_refused = |error: &str| error.contains("intake is stopped") && error.contains(&stage.topic);
    events.wait_for_count(2, |event| event.field("error").is_some_and(is_refused)).await;
    let quarantined = stage.scene.count("inbox_quarantine").await;
    assert!((10..15).contains(&quarantined), "{quarantined}");
    quarantined
}

/// Discards everything in quarantine, as an operator does.
async fn discard_all(stage: &Stage) {
    stage.scene.store.operate().discard_quarantined(&QuarantineFilter::all(), 100).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn intake_stops_after_too_many_quarantined_records_in_a_row_until_an_operator_acts() {
    let (stage, runs) = (Stage::new(1).await, Runs::new());
    let events = Events::capture();
    let mut records: Vec<TestRecord> = (0..18).map(|number| TestRecord::new(format!("no id {number}"))).collect();
    records.push(TestRecord::new("good").with_header("id", "m1"));
    stage.kafka.produce(&stage.topic, 0, &records).await;
    let running = stage.start_with(Identity::header("id"), limits(), &runs).await;

    let quarantined = stopped(&stage, &events).await;
    assert_eq!(stage.ledger(0).await, Some(quarantined));
    stage.scene.until("SELECT count(*) FROM inbox_ingest WHERE problem LIKE 'intake is stopped%'").await;
    let diagnosis = stage.scene.store.operate().doctor().await.unwrap();
    assert!(diagnosis.symptoms.iter().any(|symptom| symptom.code == "intake stopped"), "{diagnosis:?}");

    discard_all(&stage).await;

    runs.reached(1).await;
    assert_eq!((stage.scene.count("inbox_quarantine").await, stage.ledger(0).await), (18 - quarantined, Some(19)));
    end(running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_constraint_that_refuses_every_record_stops_intake() {
    let (stage, runs, events) = (Stage::new(1).await, Runs::new(), Events::capture());
    stage.scene.database.execute("ALTER TABLE inbox_message ADD CONSTRAINT nothing CHECK (topic = '')").await;
    stage.produce(0, 30).await;
    let running = stage.start_with(Identity::position(), limits(), &runs).await;

    let quarantined = stopped(&stage, &events).await;
    assert_eq!(stage.ledger(0).await, Some(quarantined));

    stage.scene.database.execute("ALTER TABLE inbox_message DROP CONSTRAINT nothing").await;
    discard_all(&stage).await;
    runs.reached(30 - usize::try_from(quarantined).unwrap()).await;
    end(running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn conflicts_in_a_row_stop_intake() {
    let (stage, runs, events) = (Stage::new(1).await, Runs::new(), Events::capture());
    let of_one_id = |number| TestRecord::new(format!("payload {number}")).with_header("id", "the same");
    stage.kafka.produce(&stage.topic, 0, &(0..20).map(of_one_id).collect::<Vec<_>>()).await;
    // Only the database knows the conflicts: a batch that follows early would be stored before the run is seen.
    let running = stage.start_with(Identity::header("id"), limits().accept_batches(1), &runs).await;

    let quarantined = stopped(&stage, &events).await;
    // The first record was accepted.
    assert_eq!(stage.ledger(0).await, Some(1 + quarantined));

    discard_all(&stage).await;
    stage.scene.until("SELECT count(*) FROM inbox_ledger WHERE next_offset = 20").await;
    end(running).await;
}
