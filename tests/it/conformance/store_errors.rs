//! A delivery that always causes a store error consumes no retry, and is not tried forever.

use std::time::Duration;

use wharf::{Failure, Message, Raw, Record, Registration, handler};

use super::effect::{self, effects};
use super::scene::{Database, Db, Runs, Scene, key, quick, record};

const OUTCOMES: &str = "SELECT concat_ws('|', message_id, state, reason, errors, crashes) FROM inbox_status ORDER BY 1";

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_always_causes_a_store_error_is_poisoned_and_its_neighbours_are_done() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    scene.database.refuse_done_of_bad().await;
    let limits = quick().store_error_limit(3);
    let runs = Runs::new();
    let inbox = scene.inbox().limits(limits).subscribe("orders", effect::writing_only(&runs, "stock")).build().unwrap();
    let running = inbox.start().await.unwrap();

    inbox.accept_all(["bad", "x", "y"].map(record)).await.unwrap();
    scene.settled().await;

    let expected = ["bad|poisoned|store error|0|0", "x|done|0|0", "y|done|0|0"];
    assert_eq!(scene.database.query_texts(OUTCOMES).await, expected);
    assert_eq!((runs.count(), effects(&scene).await), (5, vec!["x".to_owned(), "y".to_owned()]));
    let errors = scene.database.query_texts("SELECT last_error FROM inbox_poisoned").await;
    assert!(errors[0].contains("refused by the store"), "{errors:?}");
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

/// A handler whose runs take a while, so that few of its outcomes may be unwritten.
fn working(runs: &Runs, name: &'static str) -> Registration<Db> {
    let runs = runs.clone();
    handler(key(name), move |message: Message<Raw>| {
        runs.note(&message);
        async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            Ok::<(), Failure>(())
        }
    })
}

// They are more than deliveries may run at a time.
#[tokio::test(flavor = "multi_thread")]
async fn outcomes_that_the_store_keeps_refusing_stop_no_other_handler() {
    let scene = Scene::new().await;
    scene.database.refuse_done_of_bad().await;
    let (stuck, others) = (Runs::new(), Runs::new());
    let inbox = scene
        .inbox()
        .subscribe("orders", working(&stuck, "stock").concurrency(50))
        .subscribe("returns", working(&others, "returns").concurrency(1))
        .build()
        .unwrap();
    let _running = inbox.start().await.unwrap();
    inbox.accept_all((0..150).map(|number| record(&format!("bad {number}")))).await.unwrap();
    stuck.reached(100).await;

    inbox.accept_all((0..20).map(|number| Record::new("returns").with_id(format!("good {number}")))).await.unwrap();

    scene.until("SELECT (count(finished_at) = 20)::int::bigint FROM inbox_delivery").await;
    assert_eq!(others.count(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_resets_the_count_of_store_errors() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    scene.database.refuse_done_of_bad().await;
    let limits = quick().store_error_limit(1);
    let runs = Runs::new();
    let inbox = scene.inbox().limits(limits).subscribe("orders", effect::writing_only(&runs, "stock")).build().unwrap();
    inbox.accept(record("bad")).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 1);
    assert_eq!(scene.database.query_texts(OUTCOMES).await, ["bad|poisoned|store error|0|0"]);
    scene.database.execute("UPDATE inbox_delivery SET store_errors = 5").await;

    assert_eq!(scene.database.replay("bad", "stock", None).await, 1);

    assert_eq!(scene.count("inbox_delivery WHERE store_errors = 0").await, 1);
}
