//! Quarantined records: shown, accepted again by a running inbox, or deleted.

use std::time::Duration;

use wharf::Record;

use super::scene::{Runs, Scene};
use crate::cli::program::Program;

/// Two records without an identity.
async fn scene() -> (Scene, Program) {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    for number in 0..2 {
        inbox.accept_or_quarantine([Record::new("orders").with_payload(format!("{{\"number\":{number}}}"))]).await.unwrap();
    }
    let program = Program::on(&scene);
    (scene, program)
}

#[tokio::test(flavor = "multi_thread")]
async fn quarantined_records_are_listed_and_shown() {
    let (_scene, program) = scene().await;
    let listed = program.json(&["quarantine", "list", "--topic", "orders"], 0).await;
    assert_eq!(listed.as_array().unwrap().len(), 2);
    assert!(program.well(&["quarantine", "list", "--limit", "1"]).await.contains("more than 1"));
    let id = listed[0]["id"].to_string();
    assert!(!program.well(&["quarantine", "show", &id]).await.contains("number"));
    assert!(program.well(&["quarantine", "show", &id, "--show-payload"]).await.ends_with("{\n  \"number\": 0\n}\n"));
    assert_eq!(program.json(&["quarantine", "show", &id], 0).await["record"]["payload"], serde_json::json!({ "bytes": 12 }));
    assert_eq!(program.run(&["quarantine", "show", "999"]).await.code, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_waits_for_the_outcome_of_the_records() {
    let (scene, program) = scene().await;
    let nobody = program.json(&["quarantine", "replay", "--all", "--limit", "1", "--yes", "--wait", "0s"], 4).await;
    assert_eq!((&nobody["affected"], &nobody["waiting"], &nobody["remaining"]), (&1.into(), &1.into(), &1.into()));

    // An inbox with another identity policy accepts one; the other is requested now, and is accepted too.
    let identity = wharf::Identity::json_pointer("/number");
    let builder = scene.inbox().subscribe("orders", Runs::new().handler("stock")).identity("orders", identity);
    let running = builder.build().unwrap().start().await.unwrap();
    let replayed = program.json(&["quarantine", "replay", "--all", "--yes", "--wait", "30s"], 0).await;
    assert_eq!((&replayed["waiting"], &replayed["stayed"]), (&0.into(), &serde_json::json!([])));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!(program.well(&["quarantine", "list"]).await, "none\n");
    assert_eq!(scene.count("inbox_message").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_is_rejected_again_stays_and_a_discard_deletes_it() {
    let (scene, program) = scene().await;
    let running =
        scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap().start().await.unwrap();
    let replayed = program.json(&["quarantine", "replay", "--all", "--yes", "--wait", "30s"], 4).await;
    assert_eq!((replayed["stayed"].as_array().unwrap().len(), &replayed["waiting"]), (2, &0.into()));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert!(program.well(&["quarantine", "discard", "--all", "--dry-run"]).await.contains("would discard 2"));
    assert!(program.well(&["quarantine", "discard", "--all", "--yes"]).await.contains("discard: 2 records"));
    assert_eq!(program.well(&["quarantine", "discard", "--all", "--yes"]).await, "there is nothing to discard\n");
    assert_eq!(scene.count("inbox_quarantine").await, 0);
    assert_eq!(scene.count("inbox_audit WHERE action = 'discard quarantined' AND affected = 2").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_beyond_the_largest_count_are_reported_as_left() {
    let (scene, program) = scene().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    let more: Vec<u32> = (2..10_001).collect();
    for numbers in more.chunks(1_000) {
        let unidentified = numbers.iter().map(|number| Record::new("orders").with_payload(number.to_string()));
        inbox.accept_or_quarantine(unidentified).await.unwrap();
    }
    let discard = ["quarantine", "discard", "--all", "--limit", "10000", "--yes"];
    let told = program.run(&discard).await;
    assert_eq!(told.code, 4, "{told:?}");
    assert!(told.stdout.ends_with("discard: 10000 records\n1 or more remain\n"), "{told:?}");
    assert_eq!(scene.count("inbox_quarantine").await, 1);
    assert_eq!(program.run(&discard).await.code, 0);
}
