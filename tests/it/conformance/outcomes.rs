//! The result of a handler, or its panic or timeout, decides the outcome of its own delivery and of no other.

use std::time::Duration;

use serde::Deserialize;
use wharf::{Failure, InboxBuilder, Message, Raw, Record, Registration, RetryPolicy, handler};

use super::scene::{Database, Db, Runs, Scene, key, quick, record};

/// `state|reason|last error|attempts|errors|crashes` of each delivery, by message and handler.
const ROWS: &str =
    "SELECT concat_ws('|', state, coalesce(reason, '-'), coalesce(last_error, '-'), attempts, errors, crashes)
                    FROM inbox_status ORDER BY message_id, handler_key";

/// Accepts one record for one handler and runs due deliveries once.
async fn run_once(scene: &Scene, registration: Registration<Db>) -> Vec<String> {
    let inbox = scene.inbox().subscribe("orders", registration).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    assert_eq!(inbox.run_due().await.unwrap(), 1);
    scene.database.query_texts(ROWS).await
}

/// Milliseconds until the delivery is due again, by the database's clock alone.
async fn due_in_ms(scene: &Scene) -> i64 {
    scene.database.due_in_ms().await[0]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_returns_ok_is_done() {
    let scene = Scene::new().await;
    assert_eq!(run_once(&scene, Runs::new().handler("stock")).await, ["done|-|-|1|0|0"]);
    let open = "SELECT count(*) FROM inbox_delivery WHERE locked_until IS NOT NULL OR finished_at IS NULL";
    assert_eq!(scene.database.query_one_i64(open).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_is_retried_in_the_upper_half_of_the_doubled_delay() {
    let scene = Scene::new().await;
    let failing = Runs::new().answering("stock", |_| Err(Failure::retry("the printer is on fire")));
    let policy = RetryPolicy::exponential().max_delay(Duration::from_secs(50_000));
    let inbox = scene.inbox().subscribe("orders", failing.retry(policy)).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    for errors in 1..=15 {
        let before = "UPDATE inbox_delivery SET due_at = now() - interval '1 second'";
        scene.database.execute(before).await;
        assert_eq!(inbox.run_due().await.unwrap(), 1);
        let rows = scene.database.query_texts(ROWS).await;
        assert_eq!(rows, [format!("pending|-|the printer is on fire|{errors}|{errors}|0")]);
        // Measured a moment later, so the lower bound has a tolerance for a slow machine.
        let base_ms = (1_000 << errors).min(50_000_000);
        let due_in = due_in_ms(&scene).await;
        assert!(due_in <= base_ms && due_in >= base_ms / 2 - 20_000, "{due_in} ms after failure {errors}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hopeless_delivery_is_poisoned_at_once_as_permanent() {
    let scene = Scene::new().await;
    let hopeless = Runs::new().answering("stock", |_| Err(Failure::poison("no such customer")));
    assert_eq!(run_once(&scene, hopeless).await, ["poisoned|permanent|no such customer|1|1|0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_discarded_delivery_keeps_its_reason_and_is_finished() {
    let scene = Scene::new().await;
    let unneeded = Runs::new().answering("stock", |_| Err(Failure::discard("already shipped")));
    assert_eq!(run_once(&scene, unneeded).await, ["discarded|already shipped|-|1|0|0"]);
    scene.settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snoozed_delivery_runs_again_without_consuming_a_retry() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let tired = runs.answering("stock", |message| match message.attempt() {
        1..=3 => Err(Failure::snooze(Duration::from_millis(1))),
        _ => Ok(()),
    });
    let inbox = scene.inbox().subscribe("orders", tired.retry(RetryPolicy::never())).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();

    scene.settled().await;
    assert_eq!(scene.database.query_texts(ROWS).await, ["done|-|-|4|0|0"]);
    assert_eq!(runs.count(), 4);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_time_set_by_the_handler_is_kept_and_consumes_a_retry() {
    let scene = Scene::new().await;
    let busy = Runs::new().answering("stock", |_| Err(Failure::retry_after(Duration::from_secs(7_200), "busy")));
    assert_eq!(run_once(&scene, busy).await, ["pending|-|busy|1|1|0"]);
    let due_in = due_in_ms(&scene).await;
    assert!((7_180_000..=7_200_000).contains(&due_in), "{due_in} ms");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delay_beyond_the_maximum_is_stored_as_a_distant_one() {
    let scene = Scene::new().await;
    let never = Runs::new().answering("stock", |_| Err(Failure::retry_after(Duration::MAX, "never")));
    assert_eq!(run_once(&scene, never).await, ["pending|-|never|1|1|0"]);
    let far = "SELECT count(*) FROM inbox_delivery WHERE due_at > now() + interval '9 years'";
    assert_eq!(scene.database.query_one_i64(far).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_retries_the_first_failure_poisons() {
    let scene = Scene::new().await;
    let failing = Runs::new().answering("stock", |_| Err(Failure::retry("no")));
    let rows = run_once(&scene, failing.retry(RetryPolicy::exponential().max_retries(0))).await;
    assert_eq!(rows, ["poisoned|retries exhausted|no|1|1|0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_custom_policy_gets_the_failures_and_the_error_and_can_give_up() {
    let scene = Scene::new().await;
    let failing = Runs::new().answering("stock", |message| match message.attempt() {
        1 | 2 => Err(Failure::retry("timeout")),
        _ => Err(Failure::retry("gone")),
    });
    let policy = RetryPolicy::exponential().delay_by(|errors, error| match error {
        "timeout" => Some(Duration::from_micros(u64::from(errors))),
        _ => None,
    });
    let inbox = scene.inbox().subscribe("orders", failing.retry(policy)).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 3);
    assert_eq!(scene.database.query_texts(ROWS).await, ["poisoned|retries exhausted|gone|3|3|0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_panics_poisons_its_delivery_only() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let failing = runs.answering("stock", |message| match message.id() {
        "a" => Err(Failure::retry("no")),
        _ => Ok(()),
    });
    let policy = RetryPolicy::exponential().delay_by(|_, _| panic!("divided by zero"));
    let inbox = scene.inbox().subscribe("orders", failing.retry(policy)).build().unwrap();
    inbox.accept_all([record("a"), record("b")]).await.unwrap();
    assert_eq!(inbox.run_due().await.unwrap(), 2);
    assert_eq!(
        scene.database.query_texts(ROWS).await,
        ["poisoned|permanent|the retry policy panicked: divided by zero|1|1|0", "done|-|-|1|0|0"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_is_a_failure_and_not_a_crash() {
    let scene = Scene::new().await;
    let panicking = handler(key("stock"), async |message: Message<Raw>| -> Result<(), Failure> {
        panic!("cannot divide {}", message.id())
    });
    assert_eq!(run_once(&scene, panicking).await, ["pending|-|panicked: cannot divide a|1|1|0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_takes_too_long_has_failed() {
    let scene = Scene::new().await;
    let stuck = handler(key("stock"), async |_: Message<Raw>| std::future::pending::<Result<(), Failure>>().await);
    let rows = run_once(&scene, stuck.timeout(Duration::from_millis(30))).await;
    assert_eq!(rows, ["pending|-|timed out after 30ms|1|1|0"]);
}

#[derive(Debug, Deserialize)]
struct Order {
    order: u32,
}

fn typed(runs: &Runs, scene: &Scene) -> InboxBuilder<Db> {
    let decoded = async |message: Message<Order>| match message.payload.order {
        17 => Ok::<(), Failure>(()),
        other => Err(Failure::poison(format!("decoded {other}"))),
    };
    scene.inbox().subscribe("orders", handler(key("typed"), decoded)).subscribe("orders", runs.handler("raw"))
}

// One undecodable record for one handler delays neither its other records nor other handlers.
#[tokio::test(flavor = "multi_thread")]
async fn an_undecodable_payload_is_poisoned_for_the_typed_handler_only() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = typed(&runs, &scene).build().unwrap();
    let good = Record::new("orders").with_id("good").json(&serde_json::json!({ "order": 17 }));
    let bad = Record::new("orders").with_id("bad").with_payload("{\"order\": \"seventeen\"}");
    let binary = Record::new("orders").with_id("binary").with_payload(vec![0xff, 0x00]);
    inbox.accept_all([good, bad, binary]).await.unwrap();
    inbox.drain().await.unwrap();

    let rows = scene.database.query_texts(ROWS).await;
    let expected = ["done", "poisoned|undecodable", "done", "poisoned|undecodable", "done", "done"];
    assert_eq!(rows.len(), 6);
    for (row, start) in rows.iter().zip(expected) {
        assert!(row.starts_with(start), "{rows:?}");
    }
    assert!(rows.iter().all(|row| row.ends_with("|1|0|0")), "{rows:?}");
    assert_eq!(runs.sorted(), ["bad", "binary", "good"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tombstone_is_none_for_an_optional_payload_and_undecodable_for_others() {
    let scene = Scene::new().await;
    let optional = async |message: Message<Option<Order>>| match message.payload {
        None => Ok::<(), Failure>(()),
        Some(order) => Err(Failure::poison(format!("{order:?}"))),
    };
    let raw = async |message: Message<Raw>| match message.payload.0 {
        None => Ok::<(), Failure>(()),
        Some(_) => Err(Failure::poison("not a tombstone")),
    };
    let runs = Runs::new();
    let inbox = typed(&runs, &scene)
        .subscribe("orders", handler(key("optional"), optional))
        .subscribe("orders", handler(key("bytes"), raw))
        .build()
        .unwrap();
    inbox.accept(Record::new("orders").with_id("gone")).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.states().await, ["gone bytes done", "gone optional done", "gone raw done", "gone typed poisoned"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_without_its_message_is_poisoned_as_missing() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept_all([record("a"), record("b")]).await.unwrap();
    scene.database.execute("DELETE FROM inbox_message WHERE message_id = 'a'").await;
    assert_eq!(inbox.run_due().await.unwrap(), 2);
    let rows = scene.database.query_texts(&ROWS.replace("message_id,", "message_seq,")).await;
    assert_eq!(rows, ["poisoned|message missing|-|1|0|0", "done|-|-|1|0|0"]);
    assert_eq!(runs.ids(), ["b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_any_length_and_any_characters_is_kept_readable() {
    let scene = Scene::new().await;
    let text = format!("\u{1b}[31mred\0{}", "é".repeat(100_000));
    let failing = Runs::new().answering("stock", move |_| Err(Failure::retry(text.clone())));
    let limits = quick().error_chars_max(50);
    let inbox = scene.inbox().limits(limits).subscribe("orders", failing).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    assert_eq!(inbox.run_due().await.unwrap(), 1);
    let kept = scene.database.query_texts("SELECT last_error FROM inbox_delivery").await;
    assert!(kept[0].starts_with("\u{fffd}[31mred\u{fffd}é") && kept[0].chars().count() == 51, "{kept:?}");
}
