//! Replays of the quarantine in steps: a canary that fails leaves the rest alone, and a visitor can stop a replay.

use std::time::Duration;

use wharf::{Identity, Record};

use super::forms::{ended, form, post, send};
use super::served::Served;
use crate::conformance::sqlite::scene::Scene;
use crate::scene::{Runs, quick};

/// Quarantines one record that a later identity policy accepts, then records that stay invalid.
async fn quarantined(scene: &Scene, junk: usize) {
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    inbox.accept_or_quarantine([Record::new("orders").with_payload("{\"number\":0}")]).await.unwrap();
    let junk = (0..junk).map(|number| Record::new("orders").with_payload(format!("junk {number}")));
    inbox.accept_or_quarantine(junk).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_canary_of_the_quarantine_stops_when_a_step_is_rejected_again() {
    let scene = Scene::new().await;
    quarantined(&scene, 15).await;
    let served = Served::on(&scene).await;
    let replay = form(&served.address, "verb=accept&topic=orders").await;
    // The inbox checks for requested replays three times per lease.
    let inbox = scene.inbox().limits(quick().lease(Duration::from_secs(2)));
    let inbox = inbox.identity("orders", Identity::json_pointer("/number"));
    let running = inbox.subscribe("orders", Runs::new().handler("stock")).build().unwrap().start().await.unwrap();

    let end = ended(&served.address, &send(&served.address, &format!("{replay}&pace=canary")).await).await;
    assert_eq!(end, "stopped: too many records of a step were rejected again; the rest was not changed");
    assert_eq!(scene.count("inbox_quarantine WHERE replays = 1").await, 10, "the records of the second step");
    assert_eq!(scene.count("inbox_quarantine WHERE replays = 0 AND replay_asked_at IS NULL").await, 5, "the rest");
    assert_eq!(scene.count("inbox_message").await, 1, "the record of the first step");
    assert_eq!(scene.count("inbox_audit WHERE action = 'replay quarantined' AND actor = 'alice'").await, 2);

    // Without a canary, each record is tried once; rejected ones stay in quarantine.
    let rest = form(&served.address, "verb=accept").await;
    let end = ended(&served.address, &send(&served.address, &format!("{rest}&pace=at-once")).await).await;
    assert_eq!(end, "finished: 15 replayed, 15 were rejected again");
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_of_the_quarantine_can_be_stopped_only_from_its_own_page() {
    let scene = Scene::new().await;
    quarantined(&scene, 3).await;
    let served = Served::on(&scene).await;
    let replay = form(&served.address, "verb=accept").await;
    let foreign = post(&served.address, "/act", "http://evil.example", &replay).await;
    assert_eq!(foreign.status, 403, "{}", foreign.body);
    let sent = send(&served.address, &replay).await;
    // No process accepts records, so the first step waits.
    scene.until("SELECT count(*) FROM inbox_quarantine WHERE replay_asked_at IS NOT NULL").await;
    let stop = format!("{}/stop", sent.header("location").unwrap());
    assert_eq!(post(&served.address, &stop, "http://evil.example", "").await.status, 403);
    let page = served.get(sent.header("location").unwrap(), &[]).await.body;
    assert!(page.contains("Stop</button>") && page.contains("Rejected again"), "{page}");
    let own = format!("http://{}", served.address);
    assert_eq!(post(&served.address, &stop, &own, "").await.status, 303);
    let end = ended(&served.address, &sent).await;
    assert_eq!(end, "stopped: by a visitor; the rest was not changed");
    assert_eq!(scene.count("inbox_quarantine WHERE replay_asked_at IS NULL").await, 3);
}
