//! Several processes replay quarantined records concurrently: each record becomes one message, even without
//! deduplication.

use std::time::Duration;

use wharf::operate::QuarantineFilter;
use wharf::{Identity, Inbox, Record};

use super::scene::{Db, Runs, Scene};

const NOTHING_IS_LEFT: &str = "SELECT (count(*) = 0)::int::bigint FROM inbox_quarantine";

/// A process that accepts records without identity each time they arrive.
async fn undeduplicated(scene: &Scene, runs: &Runs) -> Inbox<Db> {
    let identity = Identity::header("id").or_undeduplicated();
    let builder = scene.another_inbox().await.subscribe("orders", runs.handler("stock"));
    builder.identity("orders", identity).build().unwrap()
}

/// Quarantines this many records without identity and requests their replay.
async fn asked(scene: &Scene, count: u32) {
    let strict = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    let records = (0..count).map(|number| Record::new("orders").with_payload(format!("payload {number}")));
    strict.accept_or_quarantine(records).await.unwrap();
    let all = QuarantineFilter::all();
    assert_eq!(scene.store.operate().replay_quarantined(&all, count).await.unwrap(), u64::from(count));
}

#[tokio::test(flavor = "multi_thread")]
async fn records_without_identity_that_several_processes_replay_become_one_message_each() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    asked(&scene, 200).await;
    let (one, other) = (undeduplicated(&scene, &runs).await, undeduplicated(&scene, &runs).await);
    let (one, other) = tokio::join!(one.start(), other.start());

    scene.until(NOTHING_IS_LEFT).await;
    scene.settled().await;

    for running in [one.unwrap(), other.unwrap()] {
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
    assert_eq!((scene.count("inbox_message").await, runs.count()), (200, 200));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_whose_replay_was_requested_before_is_not_counted_again() {
    let scene = Scene::new().await;
    asked(&scene, 2).await;
    let strict = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    strict.accept_or_quarantine([Record::new("orders").with_payload("new")]).await.unwrap();
    for count in [1, 0] {
        let all = QuarantineFilter::all();
        assert_eq!(scene.store.operate().replay_quarantined(&all, 10).await.unwrap(), count);
    }
}

// Two records with the same content are two records: the second was quarantined after the first had left.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_equal_to_a_replayed_one_becomes_a_separate_message() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = undeduplicated(&scene, &runs).await;
    for messages in 1..=2 {
        asked(&scene, 1).await;
        let running = inbox.start().await.unwrap();
        scene.until(NOTHING_IS_LEFT).await;
        running.shutdown(Duration::from_secs(5)).await.unwrap();
        assert_eq!(scene.count("inbox_message").await, messages);
    }
}

// This happens when the process that replays it crashes and restarts before its claim on the record expires.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_another_process_has_claimed_is_left_to_it_until_the_claim_ends() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    asked(&scene, 2).await;
    let claimed_for = async |interval: &str| {
        let claim = format!(
            "UPDATE inbox_quarantine SET replay_locked_until = now() + interval '{interval}'
             WHERE id = (SELECT max(id) FROM inbox_quarantine)"
        );
        scene.database.execute(&claim).await;
    };
    claimed_for("1 day").await;
    let inbox = undeduplicated(&scene, &runs).await;
    let running = inbox.start().await.unwrap();
    scene.until("SELECT (count(*) = 1)::int::bigint FROM inbox_quarantine").await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!(scene.count("inbox_message").await, 1);

    claimed_for("0 seconds").await;
    let running = inbox.start().await.unwrap();
    scene.until(NOTHING_IS_LEFT).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!(scene.count("inbox_message").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_topics_that_only_a_pattern_matches_are_replayed() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    asked(&scene, 3).await;
    let builder = scene.another_inbox().await.subscribe("^ord", runs.handler("stock"));
    let inbox = builder.identity("^ord", Identity::header("id").or_undeduplicated()).build().unwrap();
    let running = inbox.start().await.unwrap();
    scene.until(NOTHING_IS_LEFT).await;
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!((scene.count("inbox_message").await, runs.count()), (3, 3));
}
