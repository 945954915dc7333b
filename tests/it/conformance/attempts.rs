//! The failures of attempts are kept: one per attempt, at most the limit per delivery, and as long as the message
//! exists.

use std::time::Duration;

use wharf::flow::Breaker;
use wharf::operate::{DeliveryFilter, FailedAttempt};
use wharf::{Failure, Limits, Message, Raw, Retention, RetryPolicy, handler};

use super::scene::{Database, Runs, Scene, key, quick, record};

/// `attempt why error` of each failure, as in the view.
const FAILURES: &str = "SELECT concat_ws(' ', message_id, handler_key, attempt, why, error) FROM inbox_failures ORDER BY attempt";

async fn failures(scene: &Scene) -> Vec<FailedAttempt> {
    let operator = scene.store.operate();
    let found = operator.deliveries(&DeliveryFilter::default(), None, 10).await.unwrap().remove(0);
    operator.delivery(&found).await.unwrap().unwrap().failures
}

/// Retries at once, this many times.
fn at_once(retries: u32) -> RetryPolicy {
    RetryPolicy::exponential().max_retries(retries).delay_by(|_, _| Some(Duration::ZERO))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_failed_attempt_is_kept_with_its_error() {
    let scene = Scene::new().await;
    let failing = handler(key("stock"), async |message: Message<Raw>| match message.attempt() {
        1 => Err(Failure::retry("no connection")),
        2 => panic!("divided by zero"),
        3 => std::future::pending().await,
        4 => Err(Failure::snooze(Duration::ZERO)),
        _ => Err(Failure::poison("no such customer")),
    });
    let failing = failing.timeout(Duration::from_millis(30)).retry(at_once(9));
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    let expected = [
        "a stock 1 failed no connection",
        "a stock 2 panicked panicked: divided by zero",
        "a stock 3 timed out timed out after 30ms",
        "a stock 5 permanent no such customer",
    ];
    assert_eq!(scene.database.query_texts(FAILURES).await, expected);
    let shown = failures(&scene).await;
    let shown: Vec<_> = shown.iter().map(|one| (one.attempt, one.why.as_str(), one.error.as_deref())).collect();
    assert_eq!(shown[0], (1, "failed", Some("no connection")));
    assert_eq!((shown.len(), shown[3]), (4, (5, "permanent", Some("no such customer"))));
}

// With a breaker the attempt consumes no retry, and without one it does. People see the same word.
#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_whose_dependency_was_unavailable_is_kept_with_that_word_also_if_it_does_not_poison() {
    for (breaker, errors) in [(None, 1), (Some(Breaker::new()), 0)] {
        let (scene, runs) = (Scene::new().await, Runs::new());
        let away = runs.answering("mail", |message| match message.attempt() {
            1 => Err(Failure::unavailable("the mail server is away")),
            _ => Ok(()),
        });
        let away = away.retry(at_once(1));
        let away = match breaker {
            Some(breaker) => away.breaker(breaker),
            None => away,
        };
        let inbox = scene.inbox().subscribe("orders", away).build().unwrap();
        inbox.accept(record("a")).await.unwrap();
        inbox.drain().await.unwrap();
        assert_eq!(scene.count("inbox_poisoned").await, 0);
        let [shown] = &failures(&scene).await[..] else { panic!("one failure") };
        let expected = (1, "unavailable", Some("the mail server is away"));
        assert_eq!((shown.attempt, shown.why.as_str(), shown.error.as_deref()), expected);

        scene.database.execute("UPDATE inbox_delivery SET due_at = now() WHERE finished_at IS NULL").await;
        inbox.drain().await.unwrap();

        let done = format!("inbox_status WHERE state = 'done' AND attempts = 2 AND errors = {errors}");
        assert_eq!(scene.count(&done).await, 1);
        let kept = scene.database.query_texts(FAILURES).await;
        assert_eq!(kept, ["a mail 1 unavailable the mail server is away"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_attempt_of_a_poisoned_delivery_is_kept_and_a_replay_adds_to_it() {
    let scene = Scene::new().await;
    let failing = Runs::new().answering("stock", |message| Err(Failure::retry(format!("no {}", message.attempt()))));
    let inbox = scene.inbox().subscribe("orders", failing.retry(at_once(1))).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.database.replay("a", "stock", None).await, 1);
    inbox.drain().await.unwrap();
    let expected = ["a stock 1 failed no 1", "a stock 2 failed no 2", "a stock 3 failed no 3", "a stock 4 failed no 4"];
    assert_eq!(scene.database.query_texts(FAILURES).await, expected);
    assert_eq!(scene.states().await, ["a stock poisoned"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_attempts_the_first_and_the_newest_are_kept() {
    let scene = Scene::new().await;
    let failing = Runs::new().answering("stock", |_| Err(Failure::retry("no")));
    let limits = quick().attempt_rows_max(4);
    let inbox = scene.inbox().limits(limits).subscribe("orders", failing.retry(at_once(10))).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 11);
    let kept: Vec<i32> = failures(&scene).await.into_iter().map(|failure| failure.attempt).collect();
    assert_eq!(kept, [1, 9, 10, 11]);
}

#[tokio::test(flavor = "multi_thread")]
async fn successful_attempts_are_not_kept_and_errors_pass_the_redactor() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let builder = scene.inbox().redact(|error| error.replace("s3cret", "***"));
    let secret = runs.answering("secret", |_| Err(Failure::poison("the password s3cret is wrong")));
    let inbox = builder.subscribe("orders", runs.obeying("stock")).subscribe("secrets", secret).build().unwrap();
    inbox.accept_all(["done", "snooze", "discard"].map(record)).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.count("inbox_attempt").await, 0);
    inbox.accept(wharf::Record::new("secrets").with_id("b")).await.unwrap();
    inbox.drain().await.unwrap();
    let kept = scene.database.query_texts(FAILURES).await;
    assert_eq!(kept, ["b secret 1 permanent the password *** is wrong"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_are_deleted_with_their_message() {
    let scene = Scene::new().await;
    let failing = Runs::new().answering("stock", |message| match message.attempt() {
        1 => Err(Failure::retry_after(Duration::ZERO, "no")),
        _ if message.id() == "kept" => Err(Failure::poison("never")),
        _ => Ok(()),
    });
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept_all([record("gone"), record("kept")]).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.count("inbox_attempt").await, 3);
    assert_eq!(scene.store.purge(&Retention::after(Duration::ZERO), |_| {}).await.unwrap().messages, 1);
    assert_eq!(scene.database.query_texts(FAILURES).await, ["kept stock 1 failed no", "kept stock 2 permanent never"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_could_not_keep_the_first_and_the_newest_is_refused() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    for rows in [0, 1, 1_001] {
        let limits = Limits::default().attempt_rows_max(rows);
        let refused = scene.inbox().limits(limits).subscribe("orders", runs.handler("stock")).build().err().unwrap();
        assert!(refused.to_string().contains("attempt_rows_max must be 2 to 1000"), "{refused}");
    }
}
