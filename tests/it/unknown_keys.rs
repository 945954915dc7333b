//! Deliveries whose handler this process, or every live process, does not have: they are left alone, reported, and
//! poisoned only after the grace period, so that a rolling deploy and a rollback poison nothing.

use std::time::Duration;

use wharf::{Inbox, InboxBuilder, Limits, Message, Raw, Receipt, handler};

use super::scene::{Database, Db, Runs, Scene, State, key, quick, record, records};
use support::events::Events;

const NO_GRACE: Duration = Duration::ZERO;
const AN_HOUR: Duration = Duration::from_secs(3_600);

fn with_grace(grace: Duration) -> Limits {
    quick().unknown_key_grace(grace)
}

/// The version that has only `a`.
async fn v1(scene: &Scene, runs: &Runs, grace: Duration) -> Inbox<Db> {
    scene.another_inbox().await.limits(with_grace(grace)).subscribe("orders", runs.handler("a")).build().unwrap()
}

/// The version that also has `b`. Each test has its own `b`, to distinguish its events from those of others.
async fn v2(scene: &Scene, runs: &Runs, b: &'static str) -> InboxBuilder<Db> {
    let builder = scene.another_inbox().await.limits(with_grace(AN_HOUR));
    builder.subscribe("orders", runs.handler("a")).subscribe("orders", runs.handler(b))
}

async fn rows_of(scene: &Scene, b: &str) -> Vec<String> {
    let sql = format!(
        "SELECT concat_ws(' ', message_seq, due_at, locked_until, locked_by, finished_at, attempts, errors, crashes, status)
         FROM inbox_delivery d JOIN inbox_handler_key k ON k.handler_id = d.handler_id
         WHERE k.key = '{b}' ORDER BY 1"
    );
    scene.database.query_texts(&sql).await
}

async fn reported(events: &Events, b: &'static str) {
    events.wait_for(|event| event.message == "unknown key" && event.has("handler", b)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_process_reports_deliveries_with_unknown_keys_and_leaves_them_unchanged() {
    let scene = Scene::new().await;
    let events = Events::capture();
    let runs = Runs::new();
    let newer = v2(&scene, &runs, "b.untouched").await.build().unwrap();
    newer.accept_all(records(30)).await.unwrap();
    let before = rows_of(&scene, "b.untouched").await;

    let older = v1(&scene, &runs, AN_HOUR).await;
    let running = older.start().await.unwrap();
    older.accept_all(records(60)).await.unwrap();
    runs.reached(60).await;
    reported(&events, "b.untouched").await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    older.drain().await.unwrap();

    assert_eq!(rows_of(&scene, "b.untouched").await, before);
    assert_eq!(before.len(), 30);
    assert_eq!(newer.drain().await.unwrap(), 30);
}

// Even without a grace period, because a live process has the key.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_process_does_not_touch_deliveries_of_a_new_one() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let (gate, opened) = tokio::sync::watch::channel(false);
    let slow = handler(key("b.beside"), move |_: Message<Raw>| {
        let mut opened = opened.clone();
        async move {
            opened.wait_for(|is_open| *is_open).await?;
            Ok::<(), wharf::Failure>(())
        }
    });
    let alive = quick().lease(Duration::from_secs(600));
    let newer = scene.inbox().limits(alive).subscribe("orders", slow.concurrency(1)).build().unwrap();
    let newer_running = newer.start().await.unwrap();
    newer.accept_all(records(5)).await.unwrap();

    let older = v1(&scene, &runs, NO_GRACE).await;
    let older_running = older.start().await.unwrap();
    // After several checks of the old process.
    let looked =
        "SELECT (seen_at > started_at + interval '3 s')::int::bigint FROM inbox_processor ORDER BY id DESC LIMIT 1";
    scene.until(looked).await;
    gate.send_replace(true);

    scene.settled().await;
    assert_eq!(scene.count_in(State::Done).await, 5);
    for running in [newer_running, older_running] {
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deploys_and_rollbacks_under_load_poison_nothing() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let mut accepted = 0;
    for roll in 0..10 {
        let older = v1(&scene, &runs, AN_HOUR).await;
        let newer = v2(&scene, &runs, "b.rolls").await.build().unwrap();
        let (out, into) = if roll % 2 == 0 { (&older, &newer) } else { (&newer, &older) };
        let ending = out.start().await.unwrap();
        out.accept_all((0..20).map(|n| record(&format!("{roll} out {n}")))).await.unwrap();
        let starting = into.start().await.unwrap();
        into.accept_all((0..20).map(|n| record(&format!("{roll} in {n}")))).await.unwrap();
        ending.shutdown(Duration::ZERO).await.unwrap();
        starting.shutdown(Duration::ZERO).await.unwrap();
        accepted += 40;
    }

    v2(&scene, &runs, "b.rolls").await.build().unwrap().drain().await.unwrap();

    assert_eq!(scene.count("inbox_status WHERE state <> 'done'").await, 0);
    // Each message for `a`; those that the newer version accepted also for `b`.
    assert_eq!(scene.count("inbox_delivery").await, accepted + accepted / 2);
    assert_eq!(scene.count("inbox_delivery WHERE crashes > 0 OR errors > 0").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_grace_an_unknown_key_is_poisoned_at_once_and_can_be_replayed() {
    let scene = Scene::new().await;
    let events = Events::capture();
    let runs = Runs::new();
    let newer = v2(&scene, &runs, "b.poisoned").await.build().unwrap();
    newer.accept_all(records(10)).await.unwrap();

    let older = v1(&scene, &runs, NO_GRACE).await;
    let running = older.start().await.unwrap();

    scene.settled().await;
    let poisoned = "inbox_poisoned WHERE handler_key = 'b.poisoned' AND reason = 'unknown key' AND attempts = 0";
    assert_eq!(scene.count(poisoned).await, 10);
    let event = events.wait_for(|event| event.has("handler", "b.poisoned") && event.has("poisoned", "10")).await;
    assert_eq!(event.message, "unknown key");
    assert_eq!(scene.count("inbox_status WHERE handler_key = 'a' AND state = 'done'").await, 10);
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    for message_id in scene.database.query_texts("SELECT message_id FROM inbox_message").await {
        assert_eq!(scene.database.replay(&message_id, "b.poisoned", None).await, 1);
    }
    assert_eq!(newer.drain().await.unwrap(), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_of_an_unknown_key_is_poisoned_to_the_last_delivery() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let newer = scene.inbox().subscribe("orders", runs.handler("b.backlog")).build().unwrap();
    newer.accept_all(records(1_300)).await.unwrap();

    let older = v1(&scene, &runs, NO_GRACE).await;
    let running = older.start().await.unwrap();

    scene.settled().await;
    assert_eq!(scene.count("inbox_poisoned WHERE reason = 'unknown key'").await, 1_300);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// As after a service was down for longer than the grace period: its backlog is handled without an operator.
#[tokio::test(flavor = "multi_thread")]
async fn deliveries_poisoned_as_unknown_return_when_a_process_has_the_key_again() {
    let scene = Scene::new().await;
    let events = Events::capture();
    let runs = Runs::new();
    let newer = scene.another_inbox().await.subscribe("orders", runs.handler("b.returns")).build().unwrap();
    newer.accept_all(records(1_300)).await.unwrap();
    scene.database.execute("UPDATE inbox_delivery SET errors = 2, attempts = 2, last_error = 'no answer'").await;
    let older = v1(&scene, &Runs::new(), NO_GRACE).await.start().await.unwrap();
    scene.settled().await;
    older.shutdown(Duration::from_secs(5)).await.unwrap();
    // One that was poisoned for another reason stays.
    scene
        .database
        .execute(
            "UPDATE inbox_delivery SET reason = 'hopeless' WHERE message_seq = (SELECT max(seq) FROM inbox_message)",
        )
        .await;
    assert_eq!(scene.count("inbox_poisoned WHERE reason = 'unknown key'").await, 1_299);

    let running = newer.start().await.unwrap();

    runs.reached(1_299).await;
    scene.settled().await;
    assert_eq!(scene.count("inbox_status WHERE state = 'done' AND errors = 2 AND attempts = 3").await, 1_299);
    assert_eq!(scene.count("inbox_status WHERE state = 'poisoned' AND reason = 'hopeless'").await, 1);
    let audit = "SELECT concat_ws('|', filter->>'handler_key', filter->>'reason', sum(affected)) FROM inbox_audit
                 WHERE action = 'return' GROUP BY filter->>'handler_key', filter->>'reason'";
    assert_eq!(scene.database.query_texts(audit).await, ["b.returns|unknown key|1299"]);
    let before = "inbox_history WHERE reason = 'unknown key' AND errors = 2 AND finished_at IS NOT NULL";
    assert_eq!(scene.count(before).await, 1_299);
    let is_told = |event: &support::events::Event| event.message == "unknown key is known again";
    events.wait_for(move |event| is_told(event) && event.has("handler", "b.returns")).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// Instead of waiting an hour, the test moves the timestamps an hour into the past.
#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_key_is_poisoned_after_the_grace_and_not_before() {
    let scene = Scene::new().await;
    let events = Events::capture();
    let runs = Runs::new();
    let newer = scene.inbox().subscribe("orders", runs.handler("b.grace")).build().unwrap();
    newer.accept_all(records(10)).await.unwrap();
    // The process checks about every second only when the grace period is short, so the test starts a process for each
    // check.
    let look = async || {
        let seen = events.matching(|event| event.has("handler", "b.grace")).len();
        let running = v1(&scene, &runs, AN_HOUR).await.start().await.unwrap();
        events.wait_for_count(seen + 1, |event| event.has("handler", "b.grace")).await;
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    };

    look().await;
    assert_eq!(scene.count("inbox_poisoned").await, 0);
    scene.database.execute("UPDATE inbox_handler SET unknown_since = unknown_since - interval '59 minutes'").await;
    look().await;
    assert_eq!(scene.count("inbox_poisoned").await, 0);
    scene.database.execute("UPDATE inbox_handler SET unknown_since = unknown_since - interval '2 minutes'").await;
    look().await;
    assert_eq!(scene.count("inbox_poisoned WHERE reason = 'unknown key'").await, 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_returns_with_the_key_within_the_grace_prevents_poisoning() {
    let scene = Scene::new().await;
    let events = Events::capture();
    let runs = Runs::new();
    let blocked = runs.answering("b.saved", |_| Err(wharf::Failure::snooze(Duration::from_millis(10))));
    let newer = scene.inbox().limits(with_grace(AN_HOUR)).subscribe("orders", blocked).build().unwrap();
    newer.accept_all(records(10)).await.unwrap();
    let first = v1(&scene, &runs, AN_HOUR).await.start().await.unwrap();
    reported(&events, "b.saved").await;
    first.shutdown(Duration::from_secs(5)).await.unwrap();
    scene.database.execute("UPDATE inbox_handler SET unknown_since = unknown_since - interval '59 minutes'").await;

    let back = newer.start().await.unwrap();
    scene.until("SELECT (count(*) = 0)::int::bigint FROM inbox_handler WHERE unknown_since IS NOT NULL").await;
    back.shutdown(Duration::from_secs(5)).await.unwrap();

    // The hour starts again.
    let again = Events::capture();
    let second = v1(&scene, &runs, AN_HOUR).await.start().await.unwrap();
    reported(&again, "b.saved").await;
    assert_eq!(scene.count("inbox_handler WHERE unknown_since < now() - interval '30 minutes'").await, 0);
    assert_eq!(scene.count("inbox_poisoned").await, 0);
    second.shutdown(Duration::from_secs(5)).await.unwrap();
}

// A process that only drains, without background work, also renews its row while it runs.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_drains_for_longer_than_its_lease_counts_as_alive() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let (gate, opened) = tokio::sync::watch::channel(false);
    let noted = runs.clone();
    let slow = handler(key("b.drains"), move |message: Message<Raw>| {
        noted.note(&message);
        let mut opened = opened.clone();
        async move {
            opened.wait_for(|is_open| *is_open).await?;
            Ok::<(), wharf::Failure>(())
        }
    });
    let draining = scene.inbox().limits(quick());
    let draining = draining.subscribe("orders", slow.concurrency(1)).build().unwrap();
    draining.accept_all(records(5)).await.unwrap();
    let drain = tokio::spawn({
        let draining = draining.clone();
        async move { draining.drain().await }
    });
    runs.reached(1).await;

    let other = v1(&scene, &Runs::new(), NO_GRACE).await;
    let running = other.start().await.unwrap();
    let looked =
        "SELECT (seen_at > started_at + interval '8 s')::int::bigint FROM inbox_processor ORDER BY id DESC LIMIT 1";
    scene.until(looked).await;
    gate.send_replace(true);

    assert_eq!(drain.await.unwrap().unwrap(), 5);
    assert_eq!(scene.count("inbox_poisoned").await, 0);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// An old process delivers what it accepts to the handlers that it has. The new handler gets the messages that a new
// process accepts or that are redelivered to one, and nothing twice.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_added_while_old_processes_accept_gets_redelivered_messages() {
    let scene = Scene::new().await;
    let (a, b) = (Runs::new(), Runs::new());
    let older = v1(&scene, &a, AN_HOUR).await;
    let newer =
        scene.another_inbox().await.subscribe("orders", a.handler("a")).subscribe("orders", b.handler("b.added"));
    let newer = newer.build().unwrap();
    let both = [older.start().await.unwrap(), newer.start().await.unwrap()];

    let of_older = older.accept_all(records(50)).await.unwrap();
    let redelivered = newer.accept_all(records(60)).await.unwrap();
    let to_older = older.accept_all(records(60)).await.unwrap();

    scene.settled().await;
    assert_eq!(of_older, vec![Receipt::Accepted { deliveries: 1 }; 50]);
    assert_eq!(redelivered[..50], vec![Receipt::Duplicate { added: 1 }; 50]);
    assert_eq!(redelivered[50..], vec![Receipt::Accepted { deliveries: 2 }; 10]);
    assert_eq!(to_older, vec![Receipt::Duplicate { added: 0 }; 60]);
    assert_eq!((a.count(), b.count()), (60, 60));
    for running in both {
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}
