//! The work of a crashed process is done by the next one: no delivery is lost, and a message that kills its process is
//! poisoned without harm to the others.
//!
//! The processes and the crashes are real: SIGKILL from outside; abort, exit and a stack overflow from inside.

use std::time::Duration;

use super::scene::{Scene, State, records};
use super::worker::{HANDLERS, Worker, accept, order};
use support::child::Child;

const CRASHED: &str =
    "SELECT concat_ws('|', message_id, handler_key, reason, crashes, errors) FROM inbox_poisoned ORDER BY 1";

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_whose_process_is_killed_runs_again_in_another() {
    let scene = Scene::new().await;
    let worker = Worker::on(&scene).await;
    accept(&scene, &["stock"], vec![order("a", "hang once")]).await;
    let first = worker.spawn();
    first.await_said("hanging").await;
    let _second = worker.spawn();

    first.kill9().await;

    scene.settled().await;
    assert_eq!(scene.states().await, ["a stock done"]);
    assert_eq!(scene.database.query_one_i64("SELECT count(*) FROM run").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_transactional_handler_leaves_one_effect() {
    let scene = Scene::new().await;
    let worker = Worker { is_transactional: true, ..Worker::on(&scene).await };
    worker.killed_while_it_runs(&scene, "a").await;

    let _second = worker.spawn();

    scene.settled().await;
    assert_eq!(scene.states().await, ["a stock done"]);
    assert_eq!(scene.database.query_texts("SELECT message_id FROM effect").await, ["a"]);
}

// The attempt is counted before the handler runs. Otherwise a message that kills its process would do so forever.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_aborts_the_process_is_poisoned_after_three_crashes() {
    killer_is_poisoned("abort").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_exits_the_process_is_poisoned_after_three_crashes() {
    killer_is_poisoned("exit").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_overflows_the_stack_is_poisoned_after_three_crashes() {
    killer_is_poisoned("overflow").await;
}

async fn killer_is_poisoned(way: &str) {
    let scene = Scene::new().await;
    let mut orders = records(20);
    orders.push(order("killer", way));
    accept(&scene, &["stock"], orders).await;

    let deaths = Worker::on(&scene).await.supervise(&scene).await;

    assert_eq!(deaths, 3);
    assert_eq!(scene.database.query_texts(CRASHED).await, ["killer|stock|crashed|3|0"]);
    assert_eq!(scene.count_done_uncharged().await, 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_crash_count_is_reset_once_the_delivery_has_an_outcome() {
    let scene = Scene::new().await;
    let worker = Worker::on(&scene).await;
    worker.killed_while_it_runs(&scene, "a").await;

    let _second = worker.spawn();

    scene.settled().await;
    let counters =
        "SELECT concat_ws(' ', state, CASE WHEN attempts >= 2 THEN 'again' END, errors, crashes) FROM inbox_status";
    assert_eq!(scene.database.query_texts(counters).await, ["done again 0 0"]);
}

// A crash is not counted against the deliveries that ran beside the one that caused it: suspects run again alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_kills_its_process_poisons_none_of_a_thousand_others() {
    let scene = Scene::new().await;
    let mut orders = records(1_000);
    orders.insert(300, order("killer", "abort"));
    accept(&scene, &["stock"], orders).await;

    let deaths = Worker::on(&scene).await.supervise(&scene).await;

    assert!(deaths <= 5, "{deaths} crashes");
    assert_eq!(scene.database.query_texts(CRASHED).await, ["killer|stock|crashed|3|0"]);
    assert_eq!(scene.count_in(State::Done).await, 1_000);
    // Hundreds were claimed and waited at each crash. They did not run, and only those that ran at a crash had to run
    // alone.
    let extra = scene.database.query_one_i64("SELECT count(*) FROM run").await - 1_000;
    assert!(extra <= 100 * i64::try_from(deaths).unwrap(), "{extra} runs too many after {deaths} crashes");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_messages_that_kill_their_process_are_both_poisoned() {
    let scene = Scene::new().await;
    let mut orders = records(100);
    orders.push(order("killer", "abort"));
    accept(&scene, &HANDLERS, orders).await;

    let deaths = Worker::on(&scene).await.supervise(&scene).await;

    // Each has three crashes of its own; the first crash of one may also count for the other.
    assert!(deaths <= 6, "{deaths} crashes");
    assert_eq!(scene.database.query_texts(CRASHED).await, ["killer|mail|crashed|3|0", "killer|stock|crashed|3|0"]);
}

// At least once: a delivery that runs at a kill, or whose outcome is not yet written, runs again; a waiting one does
// not.
#[tokio::test(flavor = "multi_thread")]
async fn after_many_kills_everything_is_done_and_little_is_done_twice() {
    const MESSAGES: i64 = 2_000;
    const CONCURRENCY: usize = 16;
    const KILLS: u32 = 15;
    let scene = Scene::new().await;
    // The kills have another cause, so they must not poison any delivery.
    let worker = Worker {
        concurrency: CONCURRENCY,
        lease: Duration::from_secs(2),
        crash_limit: KILLS + 1,
        ..Worker::on(&scene).await
    };
    let orders = (0..MESSAGES).map(|number| order(&format!("m{number:06}"), "work")).collect();
    accept(&scene, &HANDLERS, orders).await;

    let mut kills = 0;
    while kills < KILLS && kill_at_random(&scene, worker.spawn()).await {
        kills += 1;
    }
    let _survivor = worker.spawn();
    scene.settled().await;

    let deliveries = MESSAGES * 2;
    assert_eq!(scene.count_done_uncharged().await, deliveries);
    assert_eq!(
        scene.database.query_one_i64("SELECT count(*) FROM (SELECT DISTINCT message_id, handler_key FROM run) t").await,
        deliveries
    );
    let runs = scene.database.query_one_i64("SELECT count(*) FROM run").await;
    // Running, or returned and about to be settled.
    let extra_max = 2 * i64::from(kills) * i64::try_from(CONCURRENCY * HANDLERS.len()).unwrap();
    assert!(runs - deliveries <= extra_max, "{} runs too many after {kills} kills", runs - deliveries);
}

/// Kills the worker after a random number of runs; returns false if it finished before that.
async fn kill_at_random(scene: &Scene, child: Child) -> bool {
    let runs = scene.database.query_one_i64("SELECT count(*) FROM run").await + rand::random_range(1..300);
    let is_open = "SELECT count(*) FROM inbox_delivery WHERE finished_at IS NULL";
    scene.until(&format!("SELECT ((SELECT count(*) FROM run) >= {runs} OR ({is_open}) = 0)::int::bigint")).await;
    child.kill9().await;
    scene.database.query_one_i64(is_open).await > 0
}
