//! Any panic in user code is one failed attempt of one delivery; the engine continues.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Deserializer};
use wharf::{Failure, Message, Raw, Registration, RetryPolicy, handler};

use super::effect;
use super::scene::{Db, Runs, Scene, key, record};

/// Runs one message through the handler, with the given retries, and then another message through another handler.
/// Returns `state|reason|errors|crashes|last_error` of the first.
async fn outcome_of(bad: Registration<Db>) -> String {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let good = Runs::new();
    let inbox = scene.inbox().subscribe("orders", bad).subscribe("orders", good.handler("good")).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();
    scene.settled().await;
    inbox.accept(record("b")).await.unwrap();
    scene.settled().await;
    assert_eq!(good.ids(), ["a", "b"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    let outcome = "SELECT concat_ws('|', state, reason, errors, crashes, last_error) FROM inbox_status
                   WHERE handler_key = 'bad' AND message_id = 'a'";
    scene.database.query_texts(outcome).await.concat()
}

fn one_retry() -> RetryPolicy {
    RetryPolicy::exponential().max_retries(1).delay_by(|_, _| Some(Duration::ZERO))
}

/// Panics when it is dropped, unless the thread is already panicking.
struct PanicsInDrop;

impl Drop for PanicsInDrop {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "in drop");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_with_text_is_a_failed_attempt() {
    let bad = handler(key("bad"), async |_: Message<Raw>| -> Result<(), Failure> { panic!("number {}", 7) });
    assert_eq!(outcome_of(bad.retry(one_retry())).await, "poisoned|retries exhausted|2|0|panicked: number 7");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_without_text_is_a_failed_attempt() {
    let bad = handler(key("bad"), async |_: Message<Raw>| -> Result<(), Failure> { std::panic::panic_any(7_u64) });
    assert_eq!(outcome_of(bad.retry(one_retry())).await, "poisoned|retries exhausted|2|0|panicked: (no message)");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_whose_value_panics_when_dropped_is_a_failed_attempt() {
    let bad =
        handler(key("bad"), async |_: Message<Raw>| -> Result<(), Failure> { std::panic::panic_any(PanicsInDrop) });
    assert_eq!(outcome_of(bad.retry(one_retry())).await, "poisoned|retries exhausted|2|0|panicked: (no message)");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_before_the_future_is_created_is_a_failed_attempt() {
    let bad = handler(key("bad"), |_: Message<Raw>| -> std::future::Ready<Result<(), Failure>> { panic!("early") });
    assert_eq!(outcome_of(bad.retry(one_retry())).await, "poisoned|retries exhausted|2|0|panicked: early");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_the_drop_of_a_local_is_a_failed_attempt() {
    let bad = handler(key("bad"), async |_: Message<Raw>| -> Result<(), Failure> {
        let _local = PanicsInDrop;
        tokio::task::yield_now().await;
        Ok(())
    });
    assert_eq!(outcome_of(bad.retry(one_retry())).await, "poisoned|retries exhausted|2|0|panicked: in drop");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_the_drop_of_a_timed_out_future_is_a_failed_attempt() {
    let bad = handler(key("bad"), async |_: Message<Raw>| -> Result<(), Failure> {
        let _local = PanicsInDrop;
        std::future::pending().await
    });
    let bad = bad.timeout(Duration::from_millis(50)).retry(one_retry());
    assert!(outcome_of(bad).await.starts_with("poisoned|retries exhausted|2|0|"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_the_drop_of_a_timed_out_transactional_future_is_a_failed_attempt() {
    let bad = effect::writing(&Runs::new(), "bad", |_| {
        Box::pin(async {
            let _local = PanicsInDrop;
            std::future::pending().await
        })
    });
    let bad = bad.timeout(Duration::from_millis(50)).retry(one_retry());
    assert!(outcome_of(bad).await.starts_with("poisoned|retries exhausted|2|0|"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_the_drop_of_a_stopped_future_consumes_no_retry() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let noting = runs.clone();
    let bad = handler(key("bad"), move |message: Message<Raw>| {
        noting.note(&message);
        async move {
            let _local = PanicsInDrop;
            std::future::pending::<Result<(), Failure>>().await
        }
    });
    let inbox = scene.inbox().subscribe("orders", bad).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();
    runs.reached(1).await;

    running.shutdown(Duration::ZERO).await.unwrap();

    let counters = "SELECT concat_ws('|', state, errors, crashes) FROM inbox_status";
    assert_eq!(scene.database.query_texts(counters).await, ["pending|0|0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_the_display_of_an_error_is_a_failed_attempt() {
    #[derive(Debug)]
    struct Unspeakable;
    impl fmt::Display for Unspeakable {
        fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
            panic!("words fail me")
        }
    }
    impl std::error::Error for Unspeakable {}
    let bad = handler(key("bad"), async |_: Message<Raw>| Err::<(), Unspeakable>(Unspeakable));
    assert_eq!(outcome_of(bad.retry(one_retry())).await, "poisoned|retries exhausted|2|0|panicked: words fail me");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_deserialize_is_a_failed_attempt() {
    struct Unreadable;
    impl<'de> Deserialize<'de> for Unreadable {
        fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
            panic!("cannot read")
        }
    }
    let bad = handler(key("bad"), async |_: Message<Unreadable>| Ok::<(), Failure>(()));
    assert_eq!(outcome_of(bad.retry(one_retry())).await, "poisoned|retries exhausted|2|0|panicked: cannot read");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_the_retry_policy_is_an_outcome() {
    let bad = handler(key("bad"), async |_: Message<Raw>| Err::<(), Failure>(Failure::retry("no")));
    let bad = bad.retry(RetryPolicy::exponential().delay_by(|_, _| panic!("no policy")));
    assert_eq!(outcome_of(bad).await, "poisoned|permanent|1|0|the retry policy panicked: no policy");
}
