//! Shutdown: claims are released, due at once and without consuming a retry; handlers have the promised grace period;
//! and an unavailable database does not prevent a process from ending.

use std::time::Duration;

use tokio::sync::watch;
use wharf::{Inbox, Limits, Postgres, Running};

use crate::scene::{PATIENCE, Runs, Scene, State, quick, record, records, within};
use crate::worker::{Worker, accept, order};
use support::proxy::Proxy;

const COUNTERS: &str = "SELECT concat_ws(' ', state, 'errors', errors, 'crashes', crashes) FROM inbox_status";

/// The lease is so long that no claim expires during a test.
fn endless_lease() -> Limits {
    quick().lease(Duration::from_secs(600))
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_releases_claims_at_once_and_consumes_no_retry() {
    let scene = Scene::new().await;
    let (runs, gate) = (Runs::new(), watch::Sender::new(false));
    let inbox = scene.inbox().limits(endless_lease()).subscribe("orders", runs.gated("stock", &gate)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(10)).await.unwrap();
    runs.reached(10).await;

    running.shutdown(Duration::ZERO).await.unwrap();

    let due = "SELECT count(*) FROM inbox_delivery
               WHERE due_at <= now() AND locked_until IS NULL AND locked_by IS NULL AND errors = 0 AND crashes = 0";
    assert_eq!(scene.database.query_one_i64(due).await, 10);
    gate.send_replace(true);
    let there = scene
        .another_inbox()
        .await
        .limits(endless_lease())
        .subscribe("orders", runs.gated("stock", &gate))
        .build()
        .unwrap();
    let _running = there.start().await.unwrap();
    scene.settled().await;
    assert_eq!(runs.count(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn records_accepted_during_a_shutdown_are_not_left_claimed() {
    let scene = Scene::new().await;
    let (runs, gate) = (Runs::new(), watch::Sender::new(false));
    let inbox = scene.inbox().limits(endless_lease()).subscribe("orders", runs.gated("stock", &gate)).build().unwrap();
    let accepting = inbox.clone();
    let accepts = tokio::spawn(async move {
        for record in records(200) {
            accepting.accept(record).await.unwrap();
        }
    });

    while !accepts.is_finished() {
        inbox.start().await.unwrap().shutdown(Duration::ZERO).await.unwrap();
    }
    accepts.await.unwrap();

    let locked = "SELECT count(*) FROM inbox_delivery WHERE locked_until IS NOT NULL OR errors > 0 OR crashes > 0";
    assert_eq!(scene.database.query_one_i64(locked).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_deploys_consume_no_retry() {
    let scene = Scene::new().await;
    let (runs, gate) = (Runs::new(), watch::Sender::new(false));
    let inbox = scene.inbox().limits(endless_lease()).subscribe("orders", runs.gated("stock", &gate)).build().unwrap();
    inbox.accept_all(records(5)).await.unwrap();

    for deploys in 1..=30 {
        let running = inbox.start().await.unwrap();
        runs.reached(deploys * 5).await;
        running.shutdown(Duration::ZERO).await.unwrap();
    }

    gate.send_replace(true);
    let _running = inbox.start().await.unwrap();
    scene.settled().await;
    assert_eq!(scene.count_done_uncharged().await, 5);
    assert_eq!(scene.count("inbox_status WHERE attempts = 31").await, 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_ended_by_sigterm_leaves_its_work_to_the_next() {
    let scene = Scene::new().await;
    let worker = Worker { lease: Duration::from_secs(600), ..Worker::on(&scene).await };
    accept(&scene, &["stock"], vec![order("a", "hang once")]).await;
    let first = worker.spawn();
    first.await_said("hanging").await;

    first.term();
    first.await_said("ended").await;

    assert_eq!(scene.database.query_texts(COUNTERS).await, ["pending errors 0 crashes 0"]);
    let _second = worker.spawn();
    scene.settled().await;
    assert_eq!(scene.states().await, ["a stock done"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_with_grace_lets_handlers_finish_and_starts_no_new_ones() {
    let scene = Scene::new().await;
    let (runs, gate) = (Runs::new(), watch::Sender::new(false));
    let inbox = scene.inbox().subscribe("orders", runs.gated("stock", &gate).concurrency(3)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(10)).await.unwrap();
    runs.reached(3).await;

    // Polled in this order: the gate is opened after the shutdown has begun.
    let (ended, _) =
        within(async { tokio::join!(running.shutdown(PATIENCE), async { gate.send_replace(true) }) }).await;

    ended.unwrap();
    let done = scene.count_in(State::Done).await;
    assert_eq!(usize::try_from(done).unwrap(), runs.count());
    let free = "inbox_status WHERE state = 'pending' AND locked_until IS NULL AND attempts = 0";
    assert_eq!(scene.count(free).await, 10 - done);
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_with_the_database_gone_ends_with_an_error() {
    let (scene, proxy, inbox, runs) = behind_a_proxy().await;
    let running = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();
    runs.reached(1).await;

    proxy.refuse().await;
    proxy.reset_all().await;

    assert_ends_with_an_error(running).await;
    assert_eq!(scene.database.query_texts(COUNTERS).await, ["running errors 0 crashes 0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_with_a_database_that_does_not_answer_ends_with_an_error() {
    let (_scene, proxy, inbox, runs) = behind_a_proxy().await;
    let running = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();
    runs.reached(1).await;

    proxy.black_hole().await;

    assert_ends_with_an_error(running).await;
}

async fn behind_a_proxy() -> (Scene, Proxy, Inbox<Postgres>, Runs) {
    let scene = Scene::new().await;
    let (proxy, store) = scene.store_behind_a_proxy().await;
    let runs = Runs::new();
    let registration = runs.gated("stock", &watch::Sender::new(false));
    let inbox = Inbox::builder(store).limits(endless_lease()).subscribe("orders", registration).build().unwrap();
    (scene, proxy, inbox, runs)
}

/// The promise is five seconds; a busy machine gets more, but a connection's own timeout is longer still.
async fn assert_ends_with_an_error(running: Running<Postgres>) {
    let ended = tokio::time::timeout(Duration::from_secs(45), running.shutdown(Duration::ZERO)).await;
    let error = ended.expect("shutdown is bounded").unwrap_err();
    assert!(error.is_transient(), "{error}");
    assert!(error.to_string().contains("1 outcomes unwritten"), "{error}");
}

// Without heartbeats in this time, it would count as crashed two thirds of a lease after the last one.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_whose_handlers_may_still_finish_is_alive() {
    let (scene, runs, gate) = (Scene::new().await, Runs::new(), watch::Sender::new(false));
    let limits = quick().lease(Duration::from_secs(3));
    let inbox = scene.inbox().limits(limits).subscribe("orders", runs.gated("stock", &gate)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();
    runs.reached(1).await;
    let since = scene.database.query_texts("SELECT now()::text").await.remove(0);
    let ending = tokio::spawn(running.shutdown(Duration::from_secs(600)));

    let alive_later = format!(
        "SELECT (count(*) = 1)::int::bigint FROM inbox_processor
         WHERE alive_until > timestamptz '{since}' + interval '6 s' AND alive_until > now()"
    );
    scene.until(&alive_later).await;

    gate.send_replace(true);
    within(ending).await.unwrap().unwrap();
    assert_eq!(scene.states().await, ["a stock done"]);
    assert_eq!(scene.count("inbox_processor").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlimited_grace_lets_handlers_end() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();
    runs.reached(1).await;

    within(running.shutdown(Duration::MAX)).await.unwrap();

    assert_eq!(scene.states().await, ["a stock done"]);
}

#[test]
fn a_runtime_that_shuts_down_while_handlers_run_leaves_their_work_to_others() {
    let others = tokio::runtime::Runtime::new().unwrap();
    let (scene, runs) = others.block_on(async { (Scene::new().await, Runs::new()) });
    let ending = tokio::runtime::Runtime::new().unwrap();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    let running = ending.block_on(inbox.start()).unwrap();
    ending.shutdown_background();

    // Accepted and claimed by an engine that can no longer run anything.
    others.block_on(async {
        inbox.accept_all(crate::scene::records(50)).await.unwrap();
        let other = scene.another_inbox().await.subscribe("orders", runs.handler("stock")).build().unwrap();
        let _running = other.start().await.unwrap();
        scene.settled().await;
        assert_eq!(runs.sorted().len(), 50);
        drop(running);
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inbox_that_is_started_twice_concurrently_runs_once() {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();

    let (one, other) = tokio::join!(inbox.start(), inbox.start());

    let (running, refused) = if one.is_ok() { (one, other) } else { (other, one) };
    assert!(refused.unwrap_err().to_string().contains("running already"));
    running.unwrap().shutdown(Duration::from_secs(5)).await.unwrap();
    scene.until("SELECT (count(*) = 0)::int::bigint FROM inbox_processor").await;
}
