//! Processes that are killed while they run a batch: nothing is lost, transactional handlers have one effect per
//! message, and a message that kills every process that runs it is poisoned without harm to the others.

use std::time::Duration;

use super::effect::effects;
use super::scene::{Scene, State, records};
use super::worker::{Worker, accept, order};

const MESSAGES: usize = 10;

/// A worker whose batches hold all messages, and run only when they are full.
async fn with_full_batches(scene: &Scene, messages: usize) -> Worker {
    let hour = Duration::from_secs(3_600);
    Worker { batch: messages, batch_wait: hour, ..Worker::on(scene).await }
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_whose_process_is_killed_before_the_call_is_called_once_by_another() {
    let scene = Scene::new().await;
    let first = with_full_batches(&scene, MESSAGES + 1).await;
    accept(&scene, &["stock"], records(MESSAGES)).await;
    let child = first.spawn();
    let held = "SELECT count(*) FROM inbox_delivery WHERE locked_until IS NOT NULL";
    scene.until(&format!("SELECT (({held}) = {MESSAGES})::int::bigint")).await;
    child.kill9().await;

    let _second = Worker { batch_wait: Duration::from_millis(20), ..first }.spawn();

    scene.settled().await;
    assert_eq!(scene.count_done_uncharged().await, number(MESSAGES));
    assert_eq!(scene.count("run").await, number(MESSAGES));
}

async fn killed_in_the_middle(is_transactional: bool) -> Scene {
    let scene = Scene::new().await;
    let worker = Worker { is_transactional, ..with_full_batches(&scene, MESSAGES + 1).await };
    let mut orders = records(MESSAGES);
    orders.insert(MESSAGES / 2, order("hanging", "hang once"));
    accept(&scene, &["stock"], orders).await;
    let child = worker.spawn();
    child.await_said("hanging").await;
    child.kill9().await;

    let _second = worker.spawn();

    scene.settled().await;
    assert_eq!(scene.count_done_uncharged().await, number(MESSAGES + 1));
    // Deliveries that were part of the crash run alone, so nothing waits for a full batch.
    assert_eq!(scene.count("run").await, number(2 * (MESSAGES + 1)));
    scene
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_whose_process_is_killed_in_the_middle_is_run_again_message_by_message() {
    killed_in_the_middle(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transactional_batch_whose_process_is_killed_in_the_middle_has_one_effect_each() {
    let scene = killed_in_the_middle(true).await;
    let mut expected: Vec<String> = (0..MESSAGES).map(|number| format!("m{number:06}")).collect();
    expected.insert(0, "hanging".to_owned());
    assert_eq!(effects(&scene).await, expected);
}

// The first crash hits whole batches. After it, deliveries run one by one, so the second crash makes few suspects.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_kills_its_process_poisons_no_other_message_of_its_batch() {
    let scene = Scene::new().await;
    let mut orders = records(300);
    orders.insert(100, order("killer", "abort"));
    accept(&scene, &["stock"], orders).await;

    let worker = Worker { batch: 50, concurrency: 4, ..Worker::on(&scene).await };
    let deaths = worker.supervise(&scene).await;

    assert!(deaths <= 5, "{deaths} deaths");
    let crashed = "SELECT concat_ws('|', message_id, reason, crashes, errors) FROM inbox_poisoned";
    assert_eq!(scene.database.query_texts(crashed).await, ["killer|crashed|3|0"]);
    assert_eq!(scene.count_in(State::Done).await, 300);
}
