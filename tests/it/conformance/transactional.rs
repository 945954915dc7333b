//! Transactional handlers: their writes and the outcome `done` commit together, or not at all.

use std::sync::Arc;
use std::time::Duration;

use diesel_async::AsyncConnection;
use wharf::{Failure, Message, Raw, Registration, RetryPolicy, TxHandler, tx_handler, with_state};

use super::effect::{self, Connection, effects};
use super::scene::{Database, Db, Runs, Scene, key, record, records};

/// One retry, at once.
pub(super) fn once_more() -> RetryPolicy {
    RetryPolicy::exponential().max_retries(1).delay_by(|_, _| Some(Duration::ZERO))
}

pub(super) async fn scene() -> Scene {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    scene
}

/// Accepts one message for the handler and waits for its outcome. Returns `state reason errors`.
pub(super) async fn outcome_of(scene: &Scene, registration: Registration<Db>) -> String {
    let inbox = scene.inbox().subscribe("orders", registration).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    let outcome = "SELECT concat_ws('|', state, reason, errors) FROM inbox_status";
    scene.database.query_texts(outcome).await.concat()
}

async fn write_effect(message: Message<Raw>, conn: &mut Connection) -> Result<(), diesel::result::Error> {
    effect::write(conn, message.id()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_async_function_commits_its_writes_with_the_outcome() {
    let scene = scene().await;
    assert_eq!(outcome_of(&scene, tx_handler(key("stock"), write_effect)).await, "done|0");
    assert_eq!(effects(&scene).await, ["a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_type_commits_its_writes_with_the_outcome() {
    struct Writer {
        prefix: String,
    }
    impl TxHandler<Raw, Connection> for Writer {
        async fn handle(&self, message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
            effect::write(conn, &format!("{}{}", self.prefix, message.id())).await?;
            Ok(())
        }
    }
    let scene = scene().await;
    let writer = Writer { prefix: "order ".to_owned() };
    assert_eq!(outcome_of(&scene, tx_handler(key("stock"), writer)).await, "done|0");
    assert_eq!(effects(&scene).await, ["order a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_with_state_and_async_closures_commit_their_writes_with_the_outcome() {
    async fn write_after(prefix: Arc<str>, message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        Ok(effect::write(conn, &format!("{prefix}{}", message.id())).await?)
    }
    let scene = scene().await;
    let function = tx_handler(key("function"), with_state(Arc::from("function "), write_after));
    let closure = tx_handler(key("closure"), async |message: Message<Raw>, conn: &mut Connection| {
        effect::write(conn, &format!("closure {}", message.id())).await
    });
    let held = async |prefix: String, message: Message<Raw>, conn: &mut Connection| {
        effect::write(conn, &format!("{prefix}{}", message.id())).await
    };
    let held = tx_handler(key("held"), with_state("held ".to_owned(), held));
    let inbox = scene.inbox().subscribe("orders", function).subscribe("orders", closure).subscribe("orders", held);
    let inbox = inbox.build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 3);
    let mut written = effects(&scene).await;
    written.sort_unstable();
    assert_eq!(written, ["closure a", "function a", "held a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_typed_payload_that_cannot_be_read_is_poisoned_without_an_effect() {
    async fn typed(message: Message<u32>, conn: &mut Connection) -> Result<(), Failure> {
        effect::write(conn, message.id()).await?;
        Ok(())
    }
    let scene = scene().await;
    assert_eq!(outcome_of(&scene, tx_handler(key("stock"), typed)).await, "poisoned|undecodable|0");
    assert!(effects(&scene).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_message_has_exactly_one_effect_under_load() {
    let scene = scene().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", effect::writing_only(&runs, "stock")).build().unwrap();
    let running = inbox.start().await.unwrap();

    inbox.accept_all(records(300)).await.unwrap();

    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!(effects(&scene).await, runs.sorted());
    assert_eq!(runs.count(), 300);
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_runs_transactional_handlers_too() {
    let scene = scene().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", effect::writing_only(&runs, "stock")).build().unwrap();
    inbox.accept_all(records(20)).await.unwrap();

    assert_eq!(inbox.drain().await.unwrap(), 20);
    assert_eq!(effects(&scene).await.len(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_rolls_the_writes_back() {
    let scene = scene().await;
    let failing = effect::writing(&Runs::new(), "stock", |_| Box::pin(async { Err(Failure::retry("no")) }));
    assert_eq!(outcome_of(&scene, failing.retry(once_more())).await, "poisoned|retries exhausted|2");
    assert!(effects(&scene).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_attempt_that_succeeds_has_an_effect() {
    let scene = scene().await;
    let runs = Runs::new();
    let second_time = effect::writing(&runs, "stock", |message| {
        Box::pin(async move { if message.attempt() == 1 { Err(Failure::retry("not yet")) } else { Ok(()) } })
    });
    assert_eq!(outcome_of(&scene, second_time.retry(once_more())).await, "done|1");
    assert_eq!((runs.count(), effects(&scene).await), (2, vec!["a".to_owned()]));
}

#[tokio::test(flavor = "multi_thread")]
async fn poison_and_discard_roll_the_writes_back() {
    for (wish, outcome) in [
        (Failure::poison as fn(&'static str) -> Failure, "poisoned|permanent|1"),
        (Failure::discard as fn(&'static str) -> Failure, "discarded|nothing to do|0"),
    ] {
        let scene = scene().await;
        let ending =
            effect::writing(&Runs::new(), "stock", move |_| Box::pin(async move { Err(wish("nothing to do")) }));
        assert_eq!(outcome_of(&scene, ending).await, outcome);
        assert!(effects(&scene).await.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_rolls_the_writes_back() {
    let scene = scene().await;
    let panicking = effect::writing(&Runs::new(), "stock", |_| Box::pin(async { panic!("on purpose") }));
    assert_eq!(outcome_of(&scene, panicking.retry(once_more())).await, "poisoned|retries exhausted|2");
    assert!(effects(&scene).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_rolls_the_writes_back() {
    let scene = scene().await;
    let hanging = effect::writing(&Runs::new(), "stock", |_| Box::pin(std::future::pending()));
    let hanging = hanging.timeout(Duration::from_millis(100)).retry(once_more());
    assert_eq!(outcome_of(&scene, hanging).await, "poisoned|retries exhausted|2");
    assert!(effects(&scene).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_rolls_the_writes_back() {
    let scene = scene().await;
    let runs = Runs::new();
    let hanging = effect::writing(&runs, "stock", |_| Box::pin(std::future::pending()));
    let inbox = scene.inbox().subscribe("orders", hanging).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();
    runs.reached(1).await;

    running.shutdown(Duration::ZERO).await.unwrap();

    assert_eq!(scene.states().await, ["a stock pending"]);
    assert!(effects(&scene).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_constraint_violated_at_commit_is_a_failure_and_rolls_the_writes_back() {
    let scene = scene().await;
    scene.database.refuse_effects_at_commit().await;
    let registration = tx_handler(key("stock"), write_effect).retry(once_more());
    assert_eq!(outcome_of(&scene, registration).await, "poisoned|retries exhausted|2");
    assert!(effects(&scene).await.is_empty());
    let errors = scene.database.query_texts("SELECT last_error FROM inbox_poisoned").await;
    assert!(errors[0].to_lowercase().contains("foreign key constraint"), "{errors:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nested_transactions_are_savepoints() {
    async fn nesting(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::write(conn, message.id()).await?;
        let refused = conn
            .transaction(async |conn| {
                effect::write(conn, "rolled back").await?;
                effect::execute(conn, "SELECT no_such_function()").await
            })
            .await;
        assert!(refused.is_err());
        conn.transaction(async |conn| effect::write(conn, "nested").await).await?;
        Ok(())
    }
    let scene = scene().await;
    assert_eq!(outcome_of(&scene, tx_handler(key("stock"), nesting)).await, "done|0");
    assert_eq!(effects(&scene).await, ["a", "nested"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nested_transaction_does_not_outlive_a_failure() {
    async fn nesting(_: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        conn.transaction(async |conn| effect::write(conn, "nested").await).await?;
        Err(Failure::poison("after all"))
    }
    let scene = scene().await;
    assert_eq!(outcome_of(&scene, tx_handler(key("stock"), nesting)).await, "poisoned|permanent|1");
    assert!(effects(&scene).await.is_empty());
}
