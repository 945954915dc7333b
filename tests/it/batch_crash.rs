//! Processes that are killed while they run a batch: nothing is lost, transactional handlers have one effect per
//! message, and a message that kills every process that runs it is poisoned without harm to the others.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use wharf::batch::batch_handler;
use wharf::{Failure, Message, Raw};

use super::effect::effects;
use super::scene::{Scene, State, key, records};
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

/// A bad message makes the call of a batch fail as a whole, and the process is killed in the call of the first half,
/// which does not have that message. Nothing has an outcome then.
async fn killed_in_a_half(is_transactional: bool) -> (Scene, Worker) {
    let scene = Scene::new().await;
    let all = MESSAGES + 2;
    let worker = Worker { is_transactional, concurrency: 1, ..with_full_batches(&scene, all).await };
    let mut orders = records(MESSAGES);
    orders.insert(2, order("hanging", "hang in a part"));
    orders.insert(all - 2, order("bad", "hopeless"));
    accept(&scene, &["stock"], orders).await;
    let child = worker.spawn();
    child.await_said("hanging").await;
    child.kill9().await;

    assert_eq!(scene.count("inbox_delivery WHERE finished_at IS NULL").await, number(all));
    assert_eq!(scene.count("run").await, number(all + all / 2));
    assert_eq!(scene.count("run WHERE message_id = 'bad'").await, 1);
    // Then its claims expire as those of a crashed process.
    scene.until("SELECT (count(*) = 0)::int::bigint FROM inbox_processor WHERE alive_until > now()").await;
    (scene, worker)
}

/// The bad message alone is poisoned, by its own answer. The crash was counted for it too.
async fn assert_only_the_bad_one_is_poisoned(scene: &Scene) {
    let poisoned = "SELECT concat_ws('|', message_id, reason, crashes, errors) FROM inbox_poisoned";
    assert_eq!(scene.database.query_texts(poisoned).await, ["bad|permanent|1|1"]);
    assert_eq!(scene.count_done_uncharged().await, number(MESSAGES + 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_in_a_half_of_a_failed_batch_is_one_crash_for_each_message_and_each_is_called_alone() {
    let (scene, worker) = killed_in_a_half(false).await;
    let scene = Arc::new(scene);
    let calls = Arc::new(Mutex::new(Vec::new()));
    let (looking, noted) = (Arc::clone(&scene), Arc::clone(&calls));
    let handle = move |messages: Vec<Message<Raw>>| {
        let (scene, calls) = (Arc::clone(&looking), Arc::clone(&noted));
        async move {
            let crashes = "SELECT concat(crashes) FROM inbox_status WHERE message_id";
            for message in &messages {
                let crashes = scene.database.query_texts(&format!("{crashes} = '{}'", message.id())).await;
                calls.lock().unwrap().push((messages.len(), message.id().to_owned(), crashes));
            }
            match messages.iter().any(|message| message.id() == "bad") {
                true => Err(Failure::poison("hopeless")),
                false => Ok(()),
            }
        }
    };
    let handler = batch_handler(key("stock"), handle).batch(worker.batch, worker.batch_wait).concurrency(1);
    let inbox = scene.another_inbox().await.subscribe("orders", handler).build().unwrap();
    let running = inbox.start().await.unwrap();
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    assert_only_the_bad_one_is_poisoned(&scene).await;
    let mut calls = calls.lock().unwrap().clone();
    calls.sort();
    let alone = |id: String| (1, id, vec!["1".to_owned()]);
    let mut expected: Vec<_> = (0..MESSAGES).map(|number| alone(format!("m{number:06}"))).collect();
    expected.splice(0..0, [alone("bad".to_owned()), alone("hanging".to_owned())]);
    assert_eq!(calls, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transactional_batch_killed_in_a_half_has_one_effect_each_and_none_of_the_bad_message() {
    let (scene, worker) = killed_in_a_half(true).await;

    let _second = worker.spawn();

    scene.settled().await;
    assert_only_the_bad_one_is_poisoned(&scene).await;
    let mut expected: Vec<String> = (0..MESSAGES).map(|number| format!("m{number:06}")).collect();
    expected.insert(0, "hanging".to_owned());
    assert_eq!(effects(&scene).await, expected);
}
