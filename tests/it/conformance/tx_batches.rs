//! Transactional batch handlers: whatever the outcome of one message of a batch, each message has one effect if it is
//! done, and none otherwise.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use wharf::batch::{Answers, TxBatchHandler, tx_batch_handler};
use wharf::{Failure, Message, Raw, Record, Registration, RetryPolicy, with_state};

use super::batch_charges::refused;
use super::effect::{self, Connection, effects};
use super::scene::{Database, Db, Scene, key, quick, record, records};

const MESSAGES: usize = 40;

/// The number of calls.
#[derive(Clone, Default)]
struct Calls(Arc<AtomicUsize>);

impl Calls {
    fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

fn is_bad(message: &Message<Raw>) -> bool {
    message.id() == "bad"
}

/// The failing message among others.
fn with_bad_one() -> Vec<Record> {
    let mut all = records(MESSAGES);
    all.insert(MESSAGES / 3, record("bad"));
    all
}

async fn scene() -> Scene {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    scene
}

/// Processes all messages in one batch. `bad` must end as expected, and all others as if it did not exist. Returns the
/// number of calls.
async fn assert_only_bad_ends_as(scene: &Scene, calls: &Calls, handler: impl TxBatchHandler<Raw, Connection>, expected: &str) -> usize {
    let handler: Registration<Db> = tx_batch_handler(key("stock"), handler);
    let handler = handler.batch(MESSAGES + 1, Duration::from_secs(3_600)).concurrency(1);
    let handler = handler.timeout(Duration::from_secs(3)).retry(RetryPolicy::never());
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    inbox.accept_all(with_bad_one()).await.unwrap();
    let running = inbox.start().await.unwrap();
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let bad = "SELECT concat_ws('|', state, reason, errors) FROM inbox_status WHERE message_id = 'bad'";
    assert_eq!(scene.database.query_texts(bad).await, [expected]);
    assert_eq!(scene.count_done_at_first().await, i64::try_from(MESSAGES).unwrap());
    let all: Vec<String> = (0..MESSAGES).map(|number| format!("m{number:06}")).collect();
    assert_eq!(effects(scene).await, all, "one effect each, and none of the one that failed");
    calls.count()
}

/// Writes the effects of all messages.
async fn write_all(calls: &Calls, messages: &[Message<Raw>], conn: &mut Connection) -> Result<(), Failure> {
    calls.0.fetch_add(1, Ordering::SeqCst);
    for message in messages {
        effect::write(conn, message.id()).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_message_has_exactly_one_effect_and_many_share_a_call() {
    async fn write(calls: Calls, messages: Vec<Message<Raw>>, conn: &mut Connection) -> Result<(), Failure> {
        write_all(&calls, &messages, conn).await
    }
    let (scene, calls) = (scene().await, Calls::default());
    let handler = tx_batch_handler(key("stock"), with_state(calls.clone(), write)).batch(32, Duration::from_millis(20));
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(500)).await.unwrap();
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let all: Vec<String> = (0..500).map(|number| format!("m{number:06}")).collect();
    assert_eq!((effects(&scene).await, scene.count_done_at_first().await), (all, 500));
    assert!(calls.count() < 250, "{} calls", calls.count());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_with_a_failed_answer_is_settled_and_the_others_are_called_again_without_it() {
    async fn each(state: (Calls, fn(&'static str) -> Failure), messages: Vec<Message<Raw>>, conn: &mut Connection) -> Answers {
        let (calls, wish) = state;
        if let Err(failure) = write_all(&calls, &messages, conn).await {
            return Answers::all(Err(failure));
        }
        messages.iter().map(|message| if is_bad(message) { Err(wish("no")) } else { Ok(()) }).collect::<Vec<_>>().into()
    }
    for (wish, outcome) in [
        (Failure::retry as fn(&'static str) -> Failure, "poisoned|retries exhausted|1"),
        (Failure::discard as fn(&'static str) -> Failure, "discarded|no|0"),
    ] {
        let (scene, calls) = (scene().await, Calls::default());
        let handler = with_state((calls.clone(), wish), each);
        assert_eq!(assert_only_bad_ends_as(&scene, &calls, handler, outcome).await, 2);
    }
}

// On PostgreSQL a failed statement makes every later one fail. Those failures are not caused by their messages.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_statement_counts_only_for_its_message_although_later_statements_fail_too() {
    async fn each(calls: Calls, messages: Vec<Message<Raw>>, conn: &mut Connection) -> Vec<Result<(), diesel::result::Error>> {
        calls.0.fetch_add(1, Ordering::SeqCst);
        let mut answers = Vec::new();
        for message in &messages {
            answers.push(match is_bad(message) {
                true => effect::execute(conn, "SELECT no_such_function()").await,
                false => effect::write(conn, message.id()).await,
            });
        }
        answers
    }
    let (scene, calls) = (scene().await, Calls::default());
    let handler = with_state(calls.clone(), each);
    let calls = assert_only_bad_ends_as(&scene, &calls, handler, "poisoned|retries exhausted|1").await;
    assert!(calls <= 13, "{calls} calls");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_fails_as_a_whole_is_rolled_back_and_its_halves_are_called() {
    async fn whole(calls: Calls, messages: Vec<Message<Raw>>, conn: &mut Connection) -> Result<(), Failure> {
        write_all(&calls, &messages, conn).await?;
        if messages.iter().any(is_bad) { Err("no".into()) } else { Ok(()) }
    }
    let (scene, calls) = (scene().await, Calls::default());
    let handler = with_state(calls.clone(), whole);
    let calls = assert_only_bad_ends_as(&scene, &calls, handler, "poisoned|retries exhausted|1").await;
    assert!((11..=13).contains(&calls), "{calls} calls");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panicking_message_is_rolled_back_and_consumes_a_retry_alone() {
    async fn panicking(calls: Calls, messages: Vec<Message<Raw>>, conn: &mut Connection) -> Result<(), Failure> {
        write_all(&calls, &messages, conn).await?;
        assert!(!messages.iter().any(is_bad), "on purpose");
        Ok(())
    }
    let (scene, calls) = (scene().await, Calls::default());
    let handler = with_state(calls.clone(), panicking);
    assert_only_bad_ends_as(&scene, &calls, handler, "poisoned|retries exhausted|1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_constraint_violated_at_commit_fails_one_message_and_the_others_are_called_again() {
    async fn write(calls: Calls, messages: Vec<Message<Raw>>, conn: &mut Connection) -> Result<(), Failure> {
        write_all(&calls, &messages, conn).await
    }
    let (scene, calls) = (scene().await, Calls::default());
    scene.database.refuse_effects_at_commit().await;
    let allowed: Vec<String> = (0..MESSAGES).map(|number| format!("('m{number:06}')")).collect();
    scene.database.execute(&format!("INSERT INTO nobody VALUES {}", allowed.join(", "))).await;
    let handler = with_state(calls.clone(), write);
    let calls = assert_only_bad_ends_as(&scene, &calls, handler, "poisoned|retries exhausted|1").await;
    assert!(calls <= 13, "{calls} calls");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_the_store_refuses_to_settle_delays_no_other() {
    async fn write(calls: Calls, messages: Vec<Message<Raw>>, conn: &mut Connection) -> Result<(), Failure> {
        write_all(&calls, &messages, conn).await
    }
    let (scene, calls) = (scene().await, Calls::default());
    scene.database.refuse_done_of_bad().await;
    let handler = tx_batch_handler(key("stock"), with_state(calls, write)).batch(64, Duration::ZERO);
    let inbox = scene.inbox().limits(quick().store_error_limit(2)).subscribe("orders", handler).build().unwrap();
    inbox.accept_all(with_bad_one()).await.unwrap();
    let running = inbox.start().await.unwrap();
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let others = "inbox_status WHERE message_id <> 'bad' AND state = 'done' AND errors = 0";
    assert_eq!(scene.count(others).await, i64::try_from(MESSAGES).unwrap());
    assert_eq!(effects(&scene).await.len(), MESSAGES);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undecodable_payload_is_poisoned_alone_and_the_others_commit_in_one_call() {
    async fn write(calls: Calls, messages: Vec<Message<u32>>, conn: &mut Connection) -> Result<(), Failure> {
        calls.0.fetch_add(1, Ordering::SeqCst);
        for message in &messages {
            effect::write(conn, message.id()).await?;
        }
        Ok(())
    }
    let (scene, calls) = (scene().await, Calls::default());
    let handler = tx_batch_handler(key("stock"), with_state(calls.clone(), write));
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    let mut all: Vec<Record> = records(9).into_iter().map(|record| record.with_payload("17")).collect();
    all.insert(4, record("bad"));
    inbox.accept_all(all).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 10);
    let poisoned = "SELECT concat_ws('|', message_id, reason, errors) FROM inbox_poisoned";
    assert_eq!(scene.database.query_texts(poisoned).await, ["bad|undecodable|0"]);
    assert_eq!((calls.count(), effects(&scene).await.len()), (1, 9));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_rolls_back_the_call_and_releases_its_messages_without_consuming_a_retry() {
    async fn hang(begun: Arc<tokio::sync::Notify>, messages: Vec<Message<Raw>>, conn: &mut Connection) -> Result<(), Failure> {
        for message in &messages {
            effect::write(conn, message.id()).await?;
        }
        begun.notify_one();
        std::future::pending().await
    }
    let (scene, begun) = (scene().await, Arc::new(tokio::sync::Notify::new()));
    let handler = tx_batch_handler(key("stock"), with_state(Arc::clone(&begun), hang));
    let inbox = scene.inbox().subscribe("orders", handler.concurrency(1)).build().unwrap();
    inbox.accept_all(records(MESSAGES)).await.unwrap();
    let running = inbox.start().await.unwrap();
    begun.notified().await;

    running.shutdown(Duration::ZERO).await.unwrap();

    let unharmed = "inbox_status WHERE state = 'pending' AND errors = 0 AND crashes = 0";
    assert_eq!(scene.count(unharmed).await, i64::try_from(MESSAGES).unwrap());
    assert_eq!((effects(&scene).await.len(), scene.count("inbox_delivery WHERE locked_until IS NOT NULL").await), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_connection_is_refused_is_not_made_again_in_halves() {
    async fn refusing(calls: Calls, _: Vec<Message<Raw>>, _: &mut Connection) -> Result<(), Failure> {
        calls.0.fetch_add(1, Ordering::SeqCst);
        Err(refused())
    }
    let (scene, calls) = (scene().await, Calls::default());
    let handler: Registration<Db> = tx_batch_handler(key("stock"), with_state(calls.clone(), refusing));
    let handler = handler.concurrency(1).retry(RetryPolicy::exponential().max_retries(1));
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(16)).await.unwrap();

    inbox.drain().await.unwrap();

    assert_eq!((calls.count(), scene.count("inbox_status WHERE state = 'pending' AND errors = 1").await), (1, 16));
    // The next one would poison them, so each is called alone.
    scene.database.execute("UPDATE inbox_delivery SET due_at = now()").await;
    inbox.drain().await.unwrap();
    assert_eq!((calls.count(), scene.count("inbox_poisoned WHERE errors = 2").await), (1 + 1 + 16, 16));
}
