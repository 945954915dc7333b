//! What the results of a batch handler count for: a result for one message counts for that message. A failure of the
//! whole call counts for no message until a call has one message.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use wharf::batch::batch_handler;
use wharf::{Failure, Message, Raw, Record, Registration, RetryPolicy, with_state};

use super::calls::Calls;
use super::scene::{Db, Runs, Scene, key, record, records};

const HOUR: Duration = Duration::from_secs(3_600);
const BAD: &str = "SELECT concat_ws('|', message_id, reason, errors) FROM inbox_poisoned";

fn with_bad_one(count: usize) -> Vec<Record> {
    let mut all = records(count - 1);
    all.insert(count / 3, record("bad"));
    all
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_answer_counts_for_its_message_alone() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let answer = |message: &Message<Raw>| match message.id() {
        "retry" if message.attempt() == 1 => Err(Failure::retry_after(Duration::ZERO, "no")),
        "snooze" if message.attempt() == 1 => Err(Failure::snooze(Duration::ZERO)),
        "discard" => Err(Failure::discard("not needed")),
        "poison" => Err(Failure::poison("hopeless")),
        _ => Ok(()),
    };
    let handler = calls.answering(move |messages| messages.iter().map(answer).collect::<Vec<_>>());
    let handler = handler.retry(RetryPolicy::exponential());
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    inbox.accept_all(Runs::ORDERS.map(record)).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 7);
    assert_eq!(calls.sizes()[0], 5);
    let expected =
        ["discard stock discarded", "done stock done", "poison stock poisoned", "retry stock done", "snooze stock done"];
    assert_eq!(scene.states().await, expected);
    let charged = "SELECT concat_ws(' ', message_id, errors) FROM inbox_status WHERE errors > 0 ORDER BY 1";
    assert_eq!(scene.database.query_texts(charged).await, ["poison 1", "retry 1"]);
}

/// Processes a batch in which one message makes every call fail that contains it. Only this message consumes a retry.
async fn assert_bad_is_found(messages: usize, calls_expected: usize, calls: Calls, handler: Registration<Db>) {
    let scene = Scene::new().await;
    let handler = handler.retry(RetryPolicy::never()).batch(messages, HOUR).concurrency(1);
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    inbox.accept_all(with_bad_one(messages)).await.unwrap();
    let running = inbox.start().await.unwrap();
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    assert_eq!(scene.database.query_texts(BAD).await, ["bad|retries exhausted|1"]);
    assert_eq!(scene.count_done_at_first().await, number(messages - 1));
    assert_eq!(calls.sizes().len(), calls_expected, "{:?}", calls.sizes());
}

fn has_bad(messages: &[Message<Raw>]) -> bool {
    messages.iter().any(|message| message.id() == "bad")
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bad_message_of_64_poisons_itself_only_with_twelve_more_calls() {
    let calls = Calls::default();
    let handler = calls.answering(|messages| if has_bad(messages) { Err("no") } else { Ok(()) });
    assert_bad_is_found(64, 13, calls, handler).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_panics_poisons_itself_only() {
    let calls = Calls::default();
    let handler = calls.answering(|messages| {
        assert!(!has_bad(messages), "on purpose");
        Ok::<(), Failure>(())
    });
    assert_bad_is_found(64, 13, calls, handler).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_hangs_poisons_itself_only() {
    async fn hang(calls: Calls, messages: Vec<Message<Raw>>) -> Result<(), Failure> {
        calls.note(&messages);
        if has_bad(&messages) {
            std::future::pending::<()>().await;
        }
        Ok(())
    }
    let calls = Calls::default();
    let handler = batch_handler(key("stock"), with_state(calls.clone(), hang)).timeout(Duration::from_secs(2));
    assert_bad_is_found(4, 5, calls, handler).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_fails_as_a_whole_is_halved_until_it_has_one_message() {
    for (wish, outcome) in [
        (Failure::poison as fn(&'static str) -> Failure, "bad|poisoned|permanent|1"),
        (Failure::discard as fn(&'static str) -> Failure, "bad|discarded|no|0"),
    ] {
        let (scene, calls) = (Scene::new().await, Calls::default());
        let handler = calls.answering(move |messages| if has_bad(messages) { Err(wish("no")) } else { Ok(()) });
        let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
        inbox.accept_all(with_bad_one(20)).await.unwrap();
        assert_eq!(inbox.drain().await.unwrap(), 20);
        let not_done = "SELECT concat_ws('|', message_id, state, reason, errors) FROM inbox_status WHERE state <> 'done'";
        assert_eq!(scene.database.query_texts(not_done).await, [outcome]);
        assert_eq!(scene.count_done_at_first().await, 19);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_unavailable_answer_counts_for_each_message_and_is_not_halved() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let is_away = Arc::new(Mutex::new(true));
    let away = Arc::clone(&is_away);
    let handler = calls.answering(move |_| match *away.lock().unwrap() {
        true => Err(Failure::unavailable("connection refused")),
        false => Ok(()),
    });
    let at_once = RetryPolicy::exponential().max_retries(1).delay_by(|_, _| Some(Duration::ZERO));
    let inbox = scene.inbox().subscribe("orders", handler.retry(at_once)).build().unwrap();
    inbox.accept_all(records(20)).await.unwrap();
    assert_eq!(inbox.run_due().await.unwrap(), 20);
    assert_eq!(calls.sizes(), [20]);
    let charged = "SELECT count(*) FROM inbox_status WHERE errors = 1 AND state = 'pending'";
    assert_eq!(scene.database.query_one_i64(charged).await, 20);
    *is_away.lock().unwrap() = false;
    inbox.drain().await.unwrap();
    assert_eq!(calls.sizes(), [20, 20]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_number_of_answers_is_a_failure_that_names_the_numbers() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let handler = calls.answering(|_| Vec::<Result<(), Failure>>::new());
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(2)).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 2);
    let errors = "SELECT concat_ws('|', errors, last_error) FROM inbox_poisoned";
    let expected = "1|the batch handler returned a wrong number of answers: 0 for a batch of 1";
    assert_eq!(scene.database.query_texts(errors).await, [expected; 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undecodable_payload_is_poisoned_alone_and_the_call_has_the_others() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let noted = calls.clone();
    let handler = batch_handler(key("stock"), move |messages: Vec<Message<u32>>| {
        noted.note(&messages);
        async { Ok::<(), Failure>(()) }
    });
    let inbox = scene.inbox().subscribe("orders", handler).build().unwrap();
    let mut all: Vec<Record> = records(9).into_iter().map(|record| record.with_payload("17")).collect();
    all.insert(4, record("bad"));
    inbox.accept_all(all).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 10);
    assert_eq!(scene.database.query_texts(BAD).await, ["bad|undecodable|0"]);
    assert_eq!((calls.sizes(), scene.count_done_at_first().await), (vec![9], 9));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_sees_each_message_and_the_handler_is_called_once_with_those_it_lets_through() {
    let (scene, calls, seen) = (Scene::new().await, Calls::default(), Arc::new(Mutex::new(Vec::new())));
    let noted = Arc::clone(&seen);
    let handler = calls.handler().layer(move |attempt, next| {
        let noted = Arc::clone(&noted);
        Box::pin(async move {
            if attempt.message_id() == "bad" {
                return Err(Failure::poison("not in here"));
            }
            let answer = next.run().await;
            noted.lock().unwrap().push(attempt.message_id().to_owned());
            answer
        })
    });
    // There is also a layer of the inbox around it.
    let inbox = scene.inbox().subscribe("orders", handler).layer(|_, next| next.run()).build().unwrap();
    inbox.accept_all(with_bad_one(20)).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 20);
    assert_eq!(calls.sizes(), [19]);
    let mut seen = seen.lock().unwrap().clone();
    seen.sort();
    assert_eq!(seen, calls.ids());
    assert_eq!(scene.database.query_texts(BAD).await, ["bad|permanent|1"]);
}

pub(super) fn refused() -> Failure {
    std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into()
}

// Halves would find the same. Only what the answer would poison is called alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_connection_is_refused_is_not_made_again_in_halves() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let handler = calls.answering(|_| Err::<(), Failure>(refused())).retry(RetryPolicy::exponential().max_retries(1));
    let inbox = scene.inbox().subscribe("orders", handler.concurrency(1)).build().unwrap();
    inbox.accept_all(records(16)).await.unwrap();

    inbox.drain().await.unwrap();

    let pending = "inbox_status WHERE state = 'pending' AND errors = 1";
    assert_eq!((calls.sizes(), scene.count(pending).await), (vec![16], 16));
    scene.database.execute("UPDATE inbox_delivery SET due_at = now()").await;
    inbox.drain().await.unwrap();
    let sizes = [vec![16, 16], vec![1; 16]].concat();
    assert_eq!((calls.sizes(), scene.count("inbox_poisoned WHERE errors = 2").await), (sizes, 16));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_whose_connection_is_refused_poisons_no_other_of_its_call() {
    let (scene, calls) = (Scene::new().await, Calls::default());
    let has_bad = |messages: &[Message<Raw>]| messages.iter().any(|message| message.id() == "m000007");
    let answer = move |messages: &[Message<Raw>]| if has_bad(messages) { Err(refused()) } else { Ok(()) };
    let inbox = scene.inbox().subscribe("orders", calls.answering(answer).concurrency(1)).build().unwrap();
    inbox.accept_all(records(16)).await.unwrap();

    inbox.drain().await.unwrap();

    assert_eq!(calls.sizes(), [vec![16], vec![1; 16]].concat());
    assert_eq!(scene.database.query_texts("SELECT message_id FROM inbox_poisoned").await, ["m000007"]);
    assert_eq!(scene.count_done_at_first().await, 15);
}
