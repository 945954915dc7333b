//! A replay runs a poisoned or discarded delivery again, is audited, and keeps earlier claims invalid.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use wharf::{Failure, Message, Raw, RetryPolicy, handler};

use super::scene::{Database, Runs, Scene, key, quick, record, status};

#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_delivery_runs_again_with_fresh_retries_and_leaves_an_audit_row() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let failing = runs.answering("stock", |message| match message.attempt() {
        1..=5 => Err(Failure::retry("no")),
        _ => Ok(()),
    });
    let policy = RetryPolicy::exponential().max_retries(2).delay_by(|_, _| Some(Duration::ZERO));
    let inbox = scene.inbox().subscribe("orders", failing.retry(policy)).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 3);
    assert_eq!(scene.states().await, ["a stock poisoned"]);

    assert_eq!(scene.database.replay("a", "stock", None).await, 1);
    assert_eq!(scene.states().await, ["a stock pending"]);
    assert_eq!(inbox.drain().await.unwrap(), 3);

    let row = "SELECT concat_ws('|', state, attempts, errors, reason) FROM inbox_status";
    assert_eq!(scene.database.query_texts(row).await, ["done|6|2"]);
    let audit = "SELECT concat_ws('|', action, affected, filter->>'message_id', filter->>'handler_key', coalesce(database_user, '')) FROM inbox_audit";
    assert_eq!(scene.database.query_texts(audit).await, [format!("replay|1|a|stock|{}", scene.database.database_user())]);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_poisoned_and_discarded_deliveries_are_replayed() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept_all([record("done"), record("pending")]).await.unwrap();
    scene
        .database
        .execute(
            "UPDATE inbox_delivery SET due_at = now() + interval '1 day' WHERE message_seq =
        (SELECT seq FROM inbox_message WHERE message_id = 'pending')",
        )
        .await;
    inbox.drain().await.unwrap();
    for (id, handler) in [("done", "stock"), ("pending", "stock"), ("unheard", "stock"), ("done", "nobody")] {
        assert_eq!(scene.database.replay(id, handler, None).await, 0, "{id} {handler}");
    }
    assert_eq!(inbox.drain().await.unwrap(), 0);
    assert_eq!(scene.states().await, ["done stock done", "pending stock pending"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_is_found_by_a_former_key_and_by_its_source() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let hopeless = runs.answering("new", |_| Err(Failure::poison("no"))).formerly("old");
    let inbox = scene.inbox().subscribe("orders", hopeless).build().unwrap();
    inbox.accept_all([record("a").with_source("here"), record("a").with_source("there")]).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.database.replay("a", "old", Some("here")).await, 1);
    assert_eq!(inbox.drain().await.unwrap(), 1);
    assert_eq!(scene.database.replay("a", "new", None).await, 2);
    assert_eq!(inbox.drain().await.unwrap(), 2);
}

// A settlement that does not name the current attempt changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_from_before_a_replay_settles_nothing() {
    let scene = Scene::new().await;
    let (gate, runs) = (Arc::new(Semaphore::new(0)), Runs::new());
    let (opened, noted) = (Arc::clone(&gate), runs.clone());
    let held = handler(key("stock"), move |message: Message<Raw>| {
        noted.note(&message);
        let gate = Arc::clone(&opened);
        async move {
            gate.acquire().await?.forget();
            Err::<(), _>(Failure::poison("from the first life"))
        }
    });
    let unhurried = quick().lease(Duration::from_secs(600));
    let inbox = scene.inbox().limits(unhurried).subscribe("orders", held.concurrency(1)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();
    runs.reached(1).await;

    // An operator discards it while it runs and replays it; no process has claimed it yet.
    let give_up = format!(
        "UPDATE inbox_delivery SET status = {}, finished_at = now(), locked_until = NULL, locked_by = NULL",
        status::POISONED
    );
    scene.database.execute(&give_up).await;
    assert_eq!(scene.database.replay("a", "stock", None).await, 1);
    gate.add_permits(1);
    runs.reached(2).await;

    let row = "SELECT concat_ws('|', state, attempts, errors, last_error) FROM inbox_status";
    assert_eq!(scene.database.query_texts(row).await, ["running|2|0"]);
    gate.add_permits(1);
    scene.settled().await;
    assert_eq!(scene.database.query_texts(row).await, ["poisoned|2|1|from the first life"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}
