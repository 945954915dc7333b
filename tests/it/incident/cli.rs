//! The incident is resolved with the `wharf` binary alone, as described in `docs/cli.md`.

use std::time::Duration;

use serde_json::Value;

use super::{Incident, JUNK, MENDABLE, POISONED};
use crate::cli::program::Program;

#[tokio::test(flavor = "multi_thread")]
async fn an_incident_is_found_and_resolved_with_the_command_line_alone() {
    let incident = Incident::happens().await;
    let wharf = Program::on(&incident.scene);
    let count = |count: usize| Value::from(count);

    // Find the problems.
    incident.scene.until("SELECT count(*) FROM inbox_processor WHERE alive_until < now()").await;
    let told = wharf.json(&["doctor"], 1).await;
    let symptoms = told["diagnosis"]["symptoms"].as_array().unwrap();
    let codes: Vec<&str> = symptoms.iter().map(|symptom| symptom["code"].as_str().unwrap()).collect();
    for code in ["paused", "poisoned", "dead process", "quarantine"] {
        assert!(codes.contains(&code), "{code} is not among {codes:?}");
    }
    let status = wharf.json(&["status"], 0).await;
    assert_eq!(status["handlers"][1]["poisoned"], count(POISONED));
    let errors = wharf.json(&["poisoned", "list", "--by-error"], 0).await;
    assert_eq!((errors.as_array().unwrap().len(), &errors[0]["poisoned"]), (1, &count(POISONED)));
    let fingerprint = errors[0]["fingerprint"].as_str().unwrap();
    let quarantined = wharf.json(&["quarantine", "list", "--reason", "missing identity"], 0).await;
    assert_eq!(quarantined.as_array().unwrap().len(), MENDABLE + JUNK);

    // Roll back; then replay one, then ten, then the rest.
    let running = incident.rolled_back().start().await.unwrap();
    let replay =
        ["poisoned", "replay", "--handler", "stock", "--fingerprint", fingerprint, "--limit", "20000", "--yes"];
    let canary = [&replay[..], &["--canary", "--wait", "1m", "--because", "release 42 was rolled back"]].concat();
    let replayed = wharf.json(&canary, 0).await;
    assert_eq!((&replayed["done"], &replayed["failed"]), (&count(POISONED), &0.into()));
    assert_eq!(wharf.json(&canary, 0).await["meant"], 0);

    // Records that the new build accepts leave the quarantine; the rest is discarded.
    let replay = ["quarantine", "replay", "--reason", "missing identity", "--wait", "1m", "--yes"];
    let asked = wharf.json(&[&replay[..], &["--because", "the id is in a header"]].concat(), 4).await;
    assert_eq!((&asked["left_quarantine"], asked["stayed"].as_array().unwrap().len()), (&count(MENDABLE), JUNK));
    let discard = ["quarantine", "discard", "--topic", "orders", "--yes", "--because", "junk of a test producer"];
    assert_eq!(wharf.json(&discard, 0).await["affected"], count(JUNK));

    wharf.well(&["handlers", "resume", "mail", "--yes", "--because", "the incident is over"]).await;

    // The delivery of the crashed instance runs again without an action.
    incident.is_over().await;
    assert!(wharf.well(&["doctor"]).await.lines().last() == Some("healthy"));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}
