//! Batch handlers: when a call is made and with which messages, and what happens to the others when one of a batch
//! fails.

use std::time::Duration;

use tokio::sync::watch;
use wharf::batch::batch_handler;
use wharf::flow::Breaker;
use wharf::order::OrderKey;
use wharf::{Failure, Limits, Message, Raw};

use super::calls::Calls;
use super::scene::{Runs, Scene, key, quick, record, records};
use support::events::Events;

const HOUR: Duration = Duration::from_secs(3_600);
const HELD: &str = "inbox_delivery WHERE locked_until IS NOT NULL";

/// Deliveries may wait for longer than any test takes.
fn patient() -> Limits {
    quick().claim_ahead(Duration::from_secs(10))
}

async fn held_are(scene: &Scene, count: usize) {
    scene.until(&format!("SELECT (count(*) = {count})::int::bigint FROM {HELD}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_handler_is_called_when_its_batch_is_full() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let inbox = scene.inbox().subscribe("orders", calls.handler().batch(10, HOUR)).build().unwrap();
    let running = inbox.start().await.unwrap();
    let mut all = records(10);
    let last = all.pop().unwrap();
    inbox.accept_all(all).await.unwrap();
    held_are(&scene, 9).await;
    assert_eq!(calls.sizes(), [0; 0], "nine of ten wait");

    inbox.accept(last).await.unwrap();

    scene.settled().await;
    assert_eq!((calls.sizes(), scene.count_done_at_first().await), (vec![10], 10));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_handler_is_called_when_the_wait_of_its_batch_ends() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let handler = calls.handler().batch(10, Duration::from_millis(500));
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    let running = inbox.start().await.unwrap();

    inbox.accept_all(records(3)).await.unwrap();

    scene.settled().await;
    assert_eq!((calls.sizes().iter().sum::<usize>(), scene.count_done_at_first().await), (3, 3));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// With one call at a time and a new handler, claims fetch whole batches.
#[tokio::test(flavor = "multi_thread")]
async fn batches_of_a_backlog_are_full_from_the_first_one_on() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let handler = calls.handler().batch(64, HOUR).concurrency(1);
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(256)).await.unwrap();
    let running = inbox.start().await.unwrap();

    scene.settled().await;

    assert_eq!((calls.sizes(), scene.count_done_at_first().await), (vec![64; 4], 256));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_bounded_by_the_concurrency_and_by_their_bytes() {
    let (scene, calls, gate) = (Scene::new().await, Calls::default(), watch::Sender::new(false));
    let limits = patient().claim_ahead_bytes(100_000);
    let handler = calls.gated(&gate).batch(64, Duration::ZERO).concurrency(2);
    let inbox = scene.inbox().limits(limits).subscribe("orders", handler).build().unwrap();
    let large = |number| record(&format!("m{number:06}")).with_payload(vec![b'x'; 20_000]);
    inbox.accept_all((0..64).map(large)).await.unwrap();
    let running = inbox.start().await.unwrap();
    calls.reached(2).await;
    let running_calls = calls.sizes();
    gate.send_replace(true);
    scene.settled().await;

    assert_eq!(running_calls.len(), 2);
    // With their ids, five messages exceed 100,000 bytes.
    assert!(calls.sizes().iter().all(|size| *size <= 4), "{:?}", calls.sizes());
    assert_eq!((calls.ids().len(), scene.count_done_at_first().await), (64, 64));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_does_not_wait_for_full_batches() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let inbox = scene.inbox().subscribe("orders", calls.handler().batch(64, HOUR)).build().unwrap();
    inbox.accept_all(records(70)).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 70);
    let mut sizes = calls.sizes();
    sizes.sort_unstable();
    assert_eq!(sizes, [6, 64]);
}

#[tokio::test(flavor = "multi_thread")]
async fn suspect_deliveries_are_called_alone() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let inbox = scene.inbox().subscribe("orders", calls.handler().batch(64, HOUR)).build().unwrap();
    inbox.accept_all(records(40)).await.unwrap();
    scene.database.execute("UPDATE inbox_delivery SET crashes = 1").await;
    let running = inbox.start().await.unwrap();
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!((calls.sizes(), scene.count_done_uncharged().await), (vec![1; 40], 40));
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_releases_waiting_deliveries_without_consuming_a_retry() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let inbox = scene.inbox().subscribe("orders", calls.handler().batch(64, HOUR)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(10)).await.unwrap();
    held_are(&scene, 10).await;

    running.shutdown(Duration::from_secs(60)).await.unwrap();

    let unharmed = "inbox_status WHERE state = 'pending' AND errors = 0 AND crashes = 0";
    assert_eq!((scene.count(unharmed).await, scene.count(HELD).await, calls.sizes().len()), (10, 0, 0));
}

// Without renewals, the claims would end, and the deliveries would be claimed again, here or there.
#[tokio::test(flavor = "multi_thread")]
async fn deliveries_that_wait_for_their_batch_keep_their_claims_beside_another_process() {
    let (scene, calls, others) = (Scene::new().await, Calls::default(), Calls::default());
    let limits = patient().lease(Duration::from_secs(2));
    let waiting = scene.inbox().limits(limits.clone()).subscribe("orders", calls.handler().batch(10, HOUR));
    let waiting = waiting.build().unwrap();
    let running = waiting.start().await.unwrap();
    let mut all = records(10);
    let last = all.pop().unwrap();
    waiting.accept_all(all).await.unwrap();
    held_are(&scene, 9).await;
    let hasty = scene.another_inbox().await.limits(limits);
    let hasty = hasty.subscribe("orders", others.handler().batch(1, Duration::ZERO)).build().unwrap();
    let hasty = hasty.start().await.unwrap();
    let held = "SELECT min(locked_until) AS earliest, max(locked_until) AS latest FROM inbox_delivery";
    scene.database.execute(&format!("CREATE TABLE held_first AS {held}; CREATE TABLE held_last AS {held}")).await;

    for _ in 0..2 {
        let renewed = format!("({held}) h, held_last l WHERE h.earliest > l.latest");
        scene.until(&format!("SELECT (count(*) > 0)::int::bigint FROM {renewed}")).await;
        scene.database.execute(&format!("DELETE FROM held_last; INSERT INTO held_last {held}")).await;
    }
    scene.until("SELECT (count(*) > 0)::int::bigint FROM held_first WHERE latest < now()").await;
    waiting.accept(last).await.unwrap();

    scene.settled().await;
    assert_eq!((calls.sizes(), others.sizes()), (vec![10], vec![]));
    assert_eq!((calls.ids().len(), scene.count_done_at_first().await), (10, 10));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    hasty.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_call_releases_all_its_messages_without_consuming_a_retry() {
    let (scene, calls, gate) = (Scene::new().await, Calls::default(), watch::Sender::new(false));
    let inbox = scene.inbox().subscribe("orders", calls.gated(&gate).batch(10, HOUR)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(10)).await.unwrap();
    calls.reached(1).await;

    running.shutdown(Duration::ZERO).await.unwrap();

    let unharmed = "inbox_status WHERE state = 'pending' AND errors = 0 AND crashes = 0";
    assert_eq!((scene.count(unharmed).await, scene.count(HELD).await), (10, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_releases_waiting_deliveries_and_they_run_after_it() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let inbox = scene.inbox().subscribe("orders", calls.handler().batch(20, HOUR)).build().unwrap();
    let running = inbox.start().await.unwrap();
    let (mut first, all) = (records(20), 20);
    let second = first.split_off(10);
    inbox.accept_all(first).await.unwrap();
    held_are(&scene, 10).await;

    scene.database.execute("UPDATE inbox_handler SET paused_at = now()").await;

    held_are(&scene, 0).await;
    inbox.accept_all(second).await.unwrap();
    scene.database.execute("UPDATE inbox_handler SET paused_at = NULL").await;
    scene.settled().await;
    assert_eq!((calls.sizes(), scene.count_done_uncharged().await), (vec![all], 20));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_claim_of_one_message_does_not_stop_the_call_for_the_others() {
    let events = Events::capture();
    let (scene, calls, gate) = (Scene::new().await, Calls::default(), watch::Sender::new(false));
    let inbox = scene.inbox().subscribe("orders", calls.gated(&gate).batch(10, HOUR)).build().unwrap();
    let running = inbox.start().await.unwrap();
    let lost = format!("lost-{}", rand::random::<u64>());
    let mut all = records(9);
    all.insert(5, record(&lost));
    inbox.accept_all(all).await.unwrap();
    calls.reached(1).await;
    let taken = format!(
        "UPDATE inbox_delivery SET attempts = attempts + 1, locked_until = NULL, locked_by = NULL, status = 4, finished_at = due_at
         WHERE message_seq = (SELECT seq FROM inbox_message WHERE message_id = '{lost}')"
    );
    scene.database.execute(&taken).await;
    gate.send_replace(true);

    events.wait_for(|event| event.message == "claim lost" && event.has("message_id", &lost)).await;
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!((calls.sizes(), scene.count_done_at_first().await), (vec![10], 9));
    assert_eq!(scene.count("inbox_status WHERE state = 'discarded'").await, 1, "another process has decided");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_an_ordered_handler_has_one_message_of_each_key_and_keys_are_in_order() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let handler = calls.handler().batch(64, Duration::ZERO).ordered_by(OrderKey::record_key());
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    let running = inbox.start().await.unwrap();
    let of = |number: usize| record(&format!("{}-{:03}", number % 8, number / 8)).with_key(format!("{}", number % 8));
    inbox.accept_all((0..80).map(of)).await.unwrap();
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let list = calls.list.lock().unwrap().clone();
    for call in &list {
        let mut keys: Vec<&str> = call.iter().map(|id| &id[..1]).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), call.len(), "{call:?}");
    }
    for number in 0..8 {
        let of_key = list.iter().flatten().filter(|id| id.starts_with(&format!("{number}-")));
        assert!(of_key.is_sorted(), "{list:?}");
    }
    assert_eq!(scene.count_done_uncharged().await, 80);
}

// Another process may already run this message and the next one of its key.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_claim_of_one_message_stops_an_ordered_call_and_it_is_repeated_without_it() {
    let (scene, calls, gate) = (Scene::new().await, Calls::default(), watch::Sender::new(false));
    let handler = calls.gated(&gate).batch(4, HOUR).ordered_by(OrderKey::record_key());
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(4).into_iter().enumerate().map(|(key, record)| record.with_key(format!("{key}")))).await.unwrap();
    calls.reached(1).await;
    let taken = "UPDATE inbox_delivery SET attempts = attempts + 1, locked_until = NULL, locked_by = NULL, status = 4, finished_at = due_at
                 WHERE message_seq = (SELECT seq FROM inbox_message WHERE message_id = 'm000002')";
    scene.database.execute(taken).await;
    calls.reached(2).await;
    gate.send_replace(true);

    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!((calls.sizes(), scene.count_done_at_first().await), (vec![4, 3], 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_fails_as_a_whole_during_a_shutdown_is_released_without_consuming_a_retry() {
    let (scene, calls, gate) = (Scene::new().await, Calls::default(), watch::Sender::new(false));
    let (noted, opened) = (calls.clone(), gate.clone());
    let handler = batch_handler(key("stock"), move |messages: Vec<Message<Raw>>| {
        noted.note(&messages);
        let mut opened = opened.subscribe();
        async move {
            let _ = opened.wait_for(|is_open| *is_open).await;
            Err::<(), _>(Failure::poison("no"))
        }
    });
    let inbox = scene.inbox().subscribe("orders", handler.batch(10, HOUR)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(10)).await.unwrap();
    calls.reached(1).await;

    // Polled in this order: the gate is opened after the shutdown has begun.
    let (ended, _) =
        tokio::join!(running.shutdown(Duration::from_secs(60)), async { gate.send_replace(true) });

    ended.unwrap();
    let unharmed = "inbox_status WHERE state = 'pending' AND errors = 0 AND crashes = 0";
    assert_eq!((calls.sizes(), scene.count(unharmed).await), (vec![10], 10));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_delivery_joins_a_call_when_it_is_due_and_an_expired_one_joins_none() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let handler = calls.handler().batch(10, Duration::ZERO).delay_header("due").expires_after(HOUR);
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    let mut all = records(5);
    all.push(record("late").with_header("due", "30m"));
    inbox.accept_all(all).await.unwrap();
    let age = "UPDATE inbox_message SET received_at = received_at - interval '120 minutes' WHERE message_id = 'm000003'";
    scene.database.execute(age).await;
    assert_eq!(inbox.drain().await.unwrap(), 5);
    assert_eq!(calls.sizes(), [4]);
    scene.database.execute("UPDATE inbox_delivery SET due_at = now() WHERE finished_at IS NULL").await;
    assert_eq!(inbox.drain().await.unwrap(), 1);
    assert_eq!((calls.sizes(), scene.count_done_at_first().await), (vec![4, 1], 5));
    let expired = "SELECT message_id FROM inbox_status WHERE state = 'discarded' AND reason = 'expired'";
    assert_eq!(scene.database.query_texts(expired).await, ["m000003"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_batch_settings_are_refused_with_the_reason() {
    let scene = Scene::new().await;
    let named = |name: &'static str| batch_handler(key(name), async |_: Vec<Message<Raw>>| Ok::<(), Failure>(()));
    let inbox = scene
        .inbox()
        .subscribe("orders", Runs::new().handler("single").batch(8, Duration::ZERO))
        .subscribe("orders", named("none").batch(0, Duration::ZERO))
        .subscribe("orders", named("many").batch(1_001, Duration::ZERO))
        .subscribe("orders", named("long").batch(8, HOUR * 2))
        .subscribe("orders", named("sharing").share_transaction(8));
    let refused = inbox.build().unwrap_err().to_string();
    for reason in [
        "single takes one message at a time: use batch_handler or tx_batch_handler for batches",
        "the batch size of none must be 1 to 1000",
        "the batch size of many must be 1 to 1000",
        "the batch wait of long must be at most 1h",
        "sharing is a batch handler: a call has at most one transaction, so share_transaction does not apply",
    ] {
        assert!(refused.contains(reason), "{refused}");
    }
}

/// Waits until every live process has learned of the pause in a heartbeat: the second one begins when the first one has
/// been answered.
async fn paused_everywhere(scene: &Scene) {
    for _ in 0..2 {
        let pause = "UPDATE inbox_handler SET paused_at = (SELECT max(seen_at) FROM inbox_processor)";
        scene.database.execute(pause).await;
        scene.until("SELECT count(*) FROM inbox_handler h, inbox_processor p WHERE p.seen_at > h.paused_at").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_halves_of_a_failed_call_are_not_called_while_the_handler_is_paused() {
    let (scene, calls, gate) = (Scene::new().await, Calls::default(), watch::Sender::new(false));
    let handler = calls.gated_answering(&gate, || Err(Failure::retry("no"))).concurrency(1);
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(8)).await.unwrap();
    let running = inbox.start().await.unwrap();
    calls.reached(1).await;
    paused_everywhere(&scene).await;

    gate.send_replace(true);

    held_are(&scene, 0).await;
    assert_eq!(calls.sizes(), [8]);
    assert_eq!(scene.count("inbox_status WHERE state = 'pending' AND errors = 0 AND crashes = 0").await, 8);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_times_out_counts_once_for_the_breaker_and_its_halves_do_not() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let never = watch::Sender::new(false);
    let handler = calls.gated(&never).concurrency(1).timeout(Duration::from_millis(20));
    let handler = handler.breaker(Breaker::new().failures(2).probe_every(HOUR));
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(8)).await.unwrap();

    inbox.drain().await.unwrap();

    assert_eq!(calls.sizes(), [8, 4, 2, 1]);
    assert_eq!(scene.count("inbox_handler WHERE breaker_opened_at IS NOT NULL").await, 1);
    assert_eq!(scene.count("inbox_delivery WHERE status = 0 AND errors = 0").await, 8);
}
