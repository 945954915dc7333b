//! Deliveries that share a transaction: whatever the outcome of one of them, each has one effect if it is done, and
//! none otherwise.
//!
//! Waiting deliveries share a transaction, and deliveries wait only once the engine knows how fast the handler is. So
//! the failing message comes late among many.

use std::time::Duration;

use wharf::{Failure, Message, Raw, Record, Registration, RetryPolicy, tx_handler};

use super::effect::{self, Connection, effects};
use super::scene::{Database, Db, Runs, Scene, key, record, records};

const MESSAGES: usize = 120;

/// The failing message, and those after it.
fn with_bad_one() -> Vec<Record> {
    let mut all = records(MESSAGES);
    all.insert(MESSAGES - 20, record("bad"));
    all
}

/// One connection, so that all waiting deliveries can share a transaction.
fn sharing(registration: Registration<Db>) -> Registration<Db> {
    registration.concurrency(1).share_transaction(16).retry(RetryPolicy::never())
}

/// Processes all messages. `bad` must end as expected, and all others as if it did not exist.
async fn assert_only_bad_ends_as(scene: &Scene, registration: Registration<Db>, expected: &str) {
    let inbox = scene.inbox().subscribe("orders", sharing(registration)).build().unwrap();
    inbox.accept_all(with_bad_one()).await.unwrap();
    let running = inbox.start().await.unwrap();
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let bad = "SELECT concat_ws('|', state, reason, errors) FROM inbox_status WHERE message_id = 'bad'";
    assert_eq!(scene.database.query_texts(bad).await, [expected]);
    let others = "inbox_status WHERE message_id <> 'bad' AND state = 'done' AND errors = 0 AND crashes = 0";
    assert_eq!(scene.count(others).await, i64::try_from(MESSAGES).unwrap());
    let all: Vec<String> = (0..MESSAGES).map(|number| format!("m{number:06}")).collect();
    assert_eq!(effects(scene).await, all, "one effect each, and none of the one that failed");
}

async fn scene() -> Scene {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    scene
}

#[tokio::test(flavor = "multi_thread")]
async fn every_message_has_exactly_one_effect() {
    let scene = scene().await;
    let runs = Runs::new();
    let handler = effect::writing_only(&runs, "stock").share_transaction(16);
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    let running = inbox.start().await.unwrap();

    inbox.accept_all(records(500)).await.unwrap();

    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!(effects(&scene).await, runs.sorted());
    assert_eq!((runs.count(), scene.count_done_at_first().await), (500, 500));
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_shares_transactions_too() {
    let scene = scene().await;
    let runs = Runs::new();
    let handler = effect::writing_only(&runs, "stock").share_transaction(16);
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(200)).await.unwrap();

    assert_eq!(inbox.drain().await.unwrap(), 200);
    assert_eq!(effects(&scene).await.len(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_delivery_is_settled_alone() {
    for (wish, outcome) in [
        (Failure::retry as fn(&'static str) -> Failure, "poisoned|retries exhausted|1"),
        (Failure::poison as fn(&'static str) -> Failure, "poisoned|permanent|1"),
        (Failure::discard as fn(&'static str) -> Failure, "discarded|no|0"),
    ] {
        let scene = scene().await;
        let failing = effect::writing(&Runs::new(), "stock", move |message| {
            Box::pin(async move { if message.id() == "bad" { Err(wish("no")) } else { Ok(()) } })
        });
        assert_only_bad_ends_as(&scene, failing, outcome).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_whose_statement_fails_is_settled_alone() {
    async fn refused(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::write(conn, message.id()).await?;
        if message.id() == "bad" {
            effect::execute(conn, "SELECT no_such_function()").await?;
        }
        Ok(())
    }
    let scene = scene().await;
    assert_only_bad_ends_as(&scene, tx_handler(key("stock"), refused), "poisoned|retries exhausted|1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panicking_delivery_is_settled_alone() {
    let scene = scene().await;
    let panicking = effect::writing(&Runs::new(), "stock", |message| {
        Box::pin(async move {
            assert!(message.id() != "bad", "on purpose");
            Ok(())
        })
    });
    assert_only_bad_ends_as(&scene, panicking, "poisoned|retries exhausted|1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_times_out_is_settled_alone() {
    let scene = scene().await;
    let hanging = effect::writing(&Runs::new(), "stock", |message| {
        Box::pin(async move {
            if message.id() == "bad" {
                std::future::pending::<()>().await;
            }
            Ok(())
        })
    });
    let hanging = hanging.timeout(Duration::from_secs(4));
    assert_only_bad_ends_as(&scene, hanging, "poisoned|retries exhausted|1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_times_out_in_a_nested_transaction_is_settled_alone() {
    use diesel_async::AsyncConnection;
    async fn nesting(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        let id = message.id().to_owned();
        conn.transaction(async move |conn| {
            effect::write(conn, &id).await?;
            if id == "bad" {
                std::future::pending::<()>().await;
            }
            Ok::<(), diesel::result::Error>(())
        })
        .await?;
        Ok(())
    }
    let scene = scene().await;
    let nesting = tx_handler(key("stock"), nesting).timeout(Duration::from_secs(4));
    assert_only_bad_ends_as(&scene, nesting, "poisoned|retries exhausted|1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_constraint_violated_at_commit_fails_one_delivery_and_the_others_run_again() {
    let scene = scene().await;
    scene.database.refuse_effects_at_commit().await;
    let allowed: Vec<String> = (0..MESSAGES).map(|number| format!("('m{number:06}')")).collect();
    scene.database.execute(&format!("INSERT INTO nobody VALUES {}", allowed.join(", "))).await;
    let handler = effect::writing_only(&Runs::new(), "stock");
    assert_only_bad_ends_as(&scene, handler, "poisoned|retries exhausted|1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_the_store_refuses_to_settle_delays_no_other() {
    let scene = scene().await;
    scene.database.refuse_done_of_bad().await;
    let inbox = scene.inbox().limits(super::scene::quick().store_error_limit(2));
    let inbox = inbox.subscribe("orders", sharing(effect::writing_only(&Runs::new(), "stock"))).build().unwrap();
    inbox.accept_all(with_bad_one()).await.unwrap();
    let running = inbox.start().await.unwrap();
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let others = "inbox_status WHERE message_id <> 'bad' AND state = 'done' AND errors = 0";
    assert_eq!(scene.count(others).await, i64::try_from(MESSAGES).unwrap());
    assert_eq!(effects(&scene).await.len(), MESSAGES);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_rolls_back_the_running_transaction_and_keeps_committed_ones() {
    let scene = scene().await;
    let runs = Runs::new();
    let hanging = effect::writing(&runs, "stock", |message| {
        Box::pin(async move {
            if message.id() == "bad" {
                std::future::pending::<()>().await;
            }
            Ok(())
        })
    });
    let inbox = scene.inbox().subscribe("orders", sharing(hanging)).build().unwrap();
    inbox.accept_all(with_bad_one()).await.unwrap();
    let running = inbox.start().await.unwrap();
    runs.reached(MESSAGES - 19).await;

    running.shutdown(Duration::ZERO).await.unwrap();

    let done = "SELECT message_id FROM inbox_status WHERE state = 'done' ORDER BY 1";
    assert_eq!(effects(&scene).await, scene.database.query_texts(done).await);
    let pending = "inbox_status WHERE state = 'pending' AND errors = 0 AND crashes = 0";
    let done = scene.count("inbox_status WHERE state = 'done'").await;
    assert_eq!(scene.count(pending).await + done, i64::try_from(MESSAGES + 1).unwrap());
    let locked = "inbox_delivery WHERE locked_until IS NOT NULL";
    assert_eq!(scene.count(locked).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn handlers_that_cannot_share_a_transaction_are_refused_with_the_reason() {
    let scene = scene().await;
    let plain = Runs::new().handler::<Db>("mail").share_transaction(8);
    let none = effect::writing_only(&Runs::new(), "none").share_transaction(0);
    let many = effect::writing_only(&Runs::new(), "many").share_transaction(65);
    let inbox = scene.inbox().subscribe("orders", plain).subscribe("orders", none).subscribe("orders", many);
    let refused = inbox.build().unwrap_err().to_string();
    for reason in [
        "mail is not transactional: it has no transaction that deliveries could share",
        "share_transaction of none must be 1 to 64",
        "share_transaction of many must be 1 to 64",
    ] {
        assert!(refused.contains(reason), "{refused}");
    }
}
