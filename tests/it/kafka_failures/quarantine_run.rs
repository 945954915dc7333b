//! A topic whose records are all quarantined stops intake, instead of moving into the quarantine record by record.

use wharf::Identity;
use wharf::operate::QuarantineFilter;

use super::stage::{Stage, end};
use crate::scene::{Runs, quick};
use support::events::Events;
use support::kafka_records::TestRecord;

#[tokio::test(flavor = "multi_thread")]
async fn intake_stops_after_too_many_quarantined_records_in_a_row_until_an_operator_acts() {
    let (stage, runs) = (Stage::new(1).await, Runs::new());
    let events = Events::capture();
    let mut records: Vec<TestRecord> = (0..18).map(|number| TestRecord::new(format!("no id {number}"))).collect();
    records.push(TestRecord::new("good").with_header("id", "m1"));
    stage.kafka.produce(&stage.topic, 0, &records).await;
    let limits = quick().quarantine_run_max(10).accept_batch_rows(5);
    let running = stage.start_with(Identity::header("id"), limits, &runs).await;

    events.wait_for(|event| event.message == "intake stopped" && event.has("topic", &stage.topic)).await;
    // After several attempts.
    let is_refused = |error: &str| error.contains("intake is stopped") && error.contains(&stage.topic);
    events.wait_for_count(2, |event| event.field("error").is_some_and(is_refused)).await;
    let quarantined = stage.scene.count("inbox_quarantine").await;
    assert!((10..15).contains(&quarantined), "{quarantined}");
    assert_eq!(stage.ledger(0).await, Some(quarantined));
    stage.scene.until("SELECT count(*) FROM inbox_ingest WHERE problem LIKE 'intake is stopped%'").await;
    let diagnosis = stage.scene.store.operate().doctor().await.unwrap();
    assert!(diagnosis.symptoms.iter().any(|symptom| symptom.code == "intake stopped"), "{diagnosis:?}");

    let all = QuarantineFilter::all();
    stage.scene.store.operate().discard_quarantined(&all, 100).await.unwrap();

    runs.reached(1).await;
    assert_eq!((stage.scene.count("inbox_quarantine").await, stage.ledger(0).await), (18 - quarantined, Some(19)));
    end(running).await;
}
