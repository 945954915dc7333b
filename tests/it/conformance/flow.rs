//! The path of a record from accept to its outcomes.

use std::time::Duration;

use wharf::{Failure, Receipt, RetryPolicy};

use super::scene::{Runs, Scene, record};

#[tokio::test(flavor = "multi_thread")]
async fn a_record_is_accepted_once_and_handled_by_each_handler() {
    let scene = Scene::new().await;
    let (stock, mail) = (Runs::new(), Runs::new());
    let inbox = scene
        .inbox()
        .subscribe("orders", stock.handler("stock"))
        .subscribe("orders", mail.handler("mail"))
        .build()
        .unwrap();
    let running = inbox.start().await.unwrap();

    assert_eq!(inbox.accept(record("a")).await.unwrap(), Receipt::Accepted { deliveries: 2 });
    assert_eq!(inbox.accept(record("a")).await.unwrap(), Receipt::Duplicate { added: 0 });

    scene.settled().await;
    assert_eq!(scene.states().await, ["a mail done", "a stock done"]);
    assert_eq!((stock.ids(), mail.ids()), (vec!["a".to_owned()], vec!["a".to_owned()]));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_handler_is_poisoned_while_the_other_is_done() {
    let scene = Scene::new().await;
    let (good, bad) = (Runs::new(), Runs::new());
    let retry = RetryPolicy::exponential().max_retries(2).delay_by(|_, _| Some(Duration::from_millis(20)));
    let inbox = scene
        .inbox()
        .subscribe("orders", good.handler("good"))
        .subscribe("orders", bad.answering("bad", |_| Err(Failure::retry("the printer is on fire"))).retry(retry))
        .build()
        .unwrap();
    let running = inbox.start().await.unwrap();

    inbox.accept(record("a")).await.unwrap();

    scene.settled().await;
    assert_eq!(scene.states().await, ["a bad poisoned", "a good done"]);
    assert_eq!((good.count(), bad.count()), (1, 3));
    let poisoned =
        "SELECT concat_ws('|', message_id, handler_key, reason, last_error, errors, payload) FROM inbox_poisoned";
    assert_eq!(
        scene.database.query_texts(poisoned).await,
        ["a|bad|retries exhausted|the printer is on fire|3|payload of a"]
    );
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_background_work_drain_runs_due_deliveries() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock").concurrency(4)).build().unwrap();
    inbox.accept_all(super::scene::records(10)).await.unwrap();

    assert_eq!(inbox.run_due().await.unwrap(), 4);
    assert_eq!(inbox.drain().await.unwrap(), 6);
    assert_eq!(inbox.drain().await.unwrap(), 0);
    assert_eq!(runs.count(), 10);
}
