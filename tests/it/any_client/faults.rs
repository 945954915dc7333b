//! The commit of a handler with its own client counts once, whatever is lost between the handler, the engine and the
//! database.

use std::time::Duration;

use crate::any_client::child::Settler;
use crate::any_client::settling;
use crate::effect::{self, effects};
use crate::scene::{Runs, Scene, State, record, records};
use support::events::Events;
use support::proxy::{Fault, Proxy};

const ROUNDS: usize = 20;

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_whose_handler_gets_no_commit_reply_is_done_and_runs_once() {
    let events = Events::capture();
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let (proxy, runs) = (Proxy::start_for(&scene.database.url()).await, Runs::new());
    let settling = settling(&runs, "any.reply", &proxy.url(&scene.database.url()));
    let inbox = scene.inbox().subscribe("orders", settling).build().unwrap();
    let running = inbox.start().await.unwrap();

    for record in records(ROUNDS) {
        let fault = proxy.on_next_commit(Fault::LoseReply);
        inbox.accept(record).await.unwrap();
        fault.fired().await;
        scene.settled().await;
    }

    // The handlers have returned errors, but all deliveries were settled before.
    let told = |event: &support::events::Event| {
        event.message == "settled before it failed" && event.has("handler", "any.reply")
    };
    events.wait_for_count(ROUNDS, told).await;
    assert_eq!((runs.count(), effects(&scene).await.len()), (ROUNDS, ROUNDS));
    assert_eq!(scene.count_done_at_first().await, i64::try_from(ROUNDS).unwrap());
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_whose_handler_commit_never_arrived_runs_again() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let (proxy, runs) = (Proxy::start_for(&scene.database.url()).await, Runs::new());
    let settling = settling(&runs, "stock", &proxy.url(&scene.database.url()));
    let inbox = scene.inbox().subscribe("orders", settling).build().unwrap();
    let running = inbox.start().await.unwrap();

    for record in records(ROUNDS) {
        let fault = proxy.on_next_commit(Fault::LoseRequest);
        inbox.accept(record).await.unwrap();
        fault.fired().await;
        scene.settled().await;
    }

    assert_eq!((runs.count(), effects(&scene).await.len()), (2 * ROUNDS, ROUNDS));
    assert_eq!(scene.count_in(State::Done).await, i64::try_from(ROUNDS).unwrap());
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_query_for_the_settled_state_is_sent_again() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let ((proxy, store), runs) = (scene.store_behind_a_proxy().await, Runs::new());
    let settling = settling(&runs, "stock", &scene.database.url());
    let limits = crate::scene::quick().backoff_max(Duration::from_millis(50));
    let inbox = wharf::Inbox::builder(store).limits(limits).subscribe("orders", settling).build().unwrap();
    let running = inbox.start().await.unwrap();
    let lost: Vec<_> = [Fault::LoseReply, Fault::LoseRequest]
        .map(|fault| proxy.on_next_statement("SKIP LOCKED) free", fault))
        .into_iter()
        .collect();

    inbox.accept(record("a")).await.unwrap();

    for fault in lost {
        fault.fired().await;
    }
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!((runs.count(), effects(&scene).await), (1, vec!["a".to_owned()]));
    assert_eq!(scene.count_done_at_first().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_after_the_commit_of_its_handler_leaves_one_effect() {
    let scene = Scene::new().await;
    let settler = Settler::on(&scene).await;
    let first = settler.spawn();
    first.await_said("at work").await;
    settler.accept(&scene, vec![record("a").with_payload("hang")]).await;

    first.await_said("committed a").await;
    first.kill9().await;

    assert_eq!(scene.states().await, ["a stock done"]);
    let second = settler.spawn();
    second.await_said("at work").await;
    // It claims a later message, so it has already scanned for the earlier one.
    settler.accept(&scene, vec![record("b")]).await;
    second.await_said("committed b").await;
    scene.settled().await;
    assert_eq!(effects(&scene).await, ["a", "b"]);
    assert_eq!(scene.count_done_at_first().await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_storm_of_kills_each_message_has_one_effect() {
    const MESSAGES: usize = 300;
    const KILLS: usize = 8;
    let scene = Scene::new().await;
    let settler = Settler::on(&scene).await;
    settler.accept(&scene, records(MESSAGES)).await;

    for kill in 1..=KILLS {
        let child = settler.spawn();
        let enough = i64::try_from(kill * MESSAGES / (KILLS + 2)).unwrap();
        scene.until(&format!("SELECT (count(*) >= {enough})::int::bigint FROM effect")).await;
        child.kill9().await;
    }
    let _survivor = settler.spawn();
    scene.settled().await;

    let expected: Vec<String> = (0..MESSAGES).map(|number| format!("m{number:06}")).collect();
    assert_eq!(effects(&scene).await, expected);
    assert_eq!(scene.count_in(State::Done).await, i64::try_from(MESSAGES).unwrap());
}
