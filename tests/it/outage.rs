//! The circuit breaker over real processes: one opens it for all, one at a time probes, and a process that crashes
//! while it probes blocks no other.

use std::path::Path;

use super::scene::{Scene, State};
use super::worker::{Worker, accept, order};

const IS_OPEN: &str = "SELECT (count(*) > 0)::int::bigint FROM inbox_handler WHERE breaker_opened_at IS NOT NULL";
const NOTHING_HELD: &str = "SELECT (count(*) = 0)::int::bigint FROM inbox_delivery WHERE locked_until IS NOT NULL";
const PROBE_NOW: &str = "UPDATE inbox_handler SET breaker_probe_at = now()";
const PROBE_HAS_FAILED: &str = "SELECT (count(*) > 0)::int::bigint FROM inbox_handler WHERE breaker_probe_at > now() AND breaker_probe_until IS NULL";
const RUNS: &str = "SELECT count(*) FROM run";

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_share_an_outage_and_its_probes() {
    const MESSAGES: i64 = 100;
    const PROBES: i64 = 5;
    let scene = Scene::new().await;
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("is back").display().to_string();
    let worker = Worker { is_breaking: true, concurrency: 4, gate: gate.clone(), ..Worker::on(&scene).await };
    let away = (0..MESSAGES).map(|number| order(&format!("m{number:06}"), "away")).collect();
    accept(&scene, &["stock"], away).await;
    let _workers = [worker.spawn(), worker.spawn()];
    scene.until(IS_OPEN).await;
    scene.until(NOTHING_HELD).await;
    let before = scene.database.query_one_i64(RUNS).await;
    assert!(before <= 2 * (5 + 4), "{before} runs");
    for _ in 0..PROBES {
        scene.database.execute(PROBE_NOW).await;
        scene.until(PROBE_HAS_FAILED).await;
    }
    assert_eq!(scene.database.query_one_i64(RUNS).await, before + PROBES);
    std::fs::write(Path::new(&gate), "").unwrap();

    scene.database.execute(PROBE_NOW).await;
    scene.until("SELECT (count(*) = 0)::int::bigint FROM inbox_handler WHERE breaker_opened_at IS NOT NULL").await;
    scene
        .database
        .execute("UPDATE inbox_delivery SET due_at = now() WHERE due_at > now() AND locked_until IS NULL")
        .await;

    scene.settled().await;
    assert_eq!(scene.count_done_uncharged().await, MESSAGES);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_crashes_while_it_probes_leaves_the_probe_to_others() {
    let scene = Scene::new().await;
    let worker = Worker { is_breaking: true, ..Worker::on(&scene).await };
    accept(&scene, &["stock"], vec![order("a", "hang once"), order("b", "work")]).await;
    scene.store.operate().open_breaker("stock").await.unwrap();
    scene.database.execute(PROBE_NOW).await;
    let first = worker.spawn();
    first.await_said("hanging").await;
    let _second = worker.spawn();

    first.kill9().await;

    scene.settled().await;
    assert_eq!(scene.count_in(State::Done).await, 2);
    assert_eq!(scene.database.query_one_i64(RUNS).await, 3);
}
