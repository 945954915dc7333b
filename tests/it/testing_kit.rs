//! The kit for users' tests: the clock moves on request, simulated crashes behave like real ones, and a handler that is
//! not idempotent is reported.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use diesel_async::RunQueryDsl;
use futures_util::FutureExt;
use wharf::flow::RateLimit;
use wharf::store::AsyncSqliteConnection;
use wharf::testing::{CrashPoint, State, TestInbox, assert_idempotent};
use wharf::{Failure, HandlerKey, Message, Raw, Record, Registration, RetryPolicy, Sqlite, handler, tx_handler};

const KEY: HandlerKey = HandlerKey::new("mail.receipt");

fn order() -> Record {
    Record::new("orders").with_id("order-17")
}

/// What handlers did, in order.
type Effects = Arc<Mutex<Vec<u32>>>;

fn noting(effects: &Effects) -> Registration<Sqlite> {
    let effects = Arc::clone(effects);
    handler(KEY, move |order: Message<Raw>| {
        effects.lock().unwrap().push(order.attempt());
        async { Ok::<(), Failure>(()) }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_are_due_when_the_clock_has_been_advanced() {
    let failing = handler(KEY, async |_: Message<Raw>| Err::<(), _>(Failure::retry("no")))
        .retry(RetryPolicy::exponential().max_retries(2).max_delay(Duration::from_secs(3_600)));
    let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", failing)).await.unwrap();
    inbox.accept(order()).await.unwrap();

    assert_eq!(inbox.drain().await.unwrap(), 1);
    let first = inbox.assert_state("order-17", KEY, State::Pending).await;
    assert_eq!((first.attempts, first.errors), (1, 1));
    assert!(!first.due_in.is_zero());
    assert_eq!(inbox.drain().await.unwrap(), 0);

    inbox.advance(first.due_in).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 1);
    inbox.advance(Duration::from_secs(3_600)).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 1);
    let last = inbox.assert_state("order-17", KEY, State::Poisoned).await;
    assert_eq!((last.reason.as_deref(), last.last_error.as_deref()), (Some("retries exhausted"), Some("no")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_crashes_after_the_handler_leaves_a_claim_and_the_handler_runs_again() {
    let effects = Effects::default();
    let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", noting(&effects))).await.unwrap();
    inbox.accept(order()).await.unwrap();
    inbox.crash_at(CrashPoint::AfterHandler);
    inbox.drain().await.unwrap();
    inbox.assert_state("order-17", KEY, State::Running).await;
    assert_eq!(inbox.drain().await.unwrap(), 0);

    inbox.advance_past_lease().await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 1);
    let delivery = inbox.assert_state("order-17", KEY, State::Done).await;
    assert_eq!(delivery.attempts, 2);
    assert_eq!(*effects.lock().unwrap(), [1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_crashes_before_the_handler_leaves_no_effect() {
    let effects = Effects::default();
    let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", noting(&effects))).await.unwrap();
    inbox.accept(order()).await.unwrap();
    inbox.crash_at(CrashPoint::BeforeHandler);
    inbox.drain().await.unwrap();
    assert!(effects.lock().unwrap().is_empty());

    inbox.advance_past_lease().await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(*effects.lock().unwrap(), [2]);
}

async fn insert(_: Message<Raw>, conn: &mut AsyncSqliteConnection) -> Result<(), Failure> {
    diesel::sql_query("INSERT INTO inbox_audit (action, filter, affected) VALUES ('effect', '{}', 1)")
        .execute(conn)
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transactional_handler_leaves_no_writes_when_the_process_crashes() {
    let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", tx_handler(KEY, insert))).await.unwrap();
    inbox.accept(order()).await.unwrap();
    inbox.crash_at(CrashPoint::AfterHandler);
    inbox.drain().await.unwrap();
    inbox.advance_past_lease().await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(inbox.assert_state("order-17", KEY, State::Done).await.attempts, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_is_not_idempotent_is_reported() {
    let effects = Effects::default();
    let seen = async || effects.lock().unwrap().len();
    let proven = AssertUnwindSafe(assert_idempotent(noting(&effects), order(), seen)).catch_unwind().await;
    let panic = proven.unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains("mail.receipt is not idempotent: after one run 1, after two 2"), "{text}");
}

/// Fails every run after the first, of `order-17` only.
fn failing_again(key: HandlerKey) -> Registration<Sqlite> {
    handler(key, async |order: Message<Raw>| match order.id() == "order-17" && order.attempt() > 1 {
        true => Err(Failure::poison("it is there already")),
        false => Ok(()),
    })
}

async fn why_not_idempotent(inbox: &TestInbox<Sqlite>) -> String {
    let proven = AssertUnwindSafe(inbox.assert_idempotent(order(), async || 0)).catch_unwind().await;
    proven.unwrap_err().downcast_ref::<String>().unwrap().clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_run_that_fails_is_reported_also_after_other_messages() {
    let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", failing_again(KEY))).await.unwrap();
    inbox.accept(Record::new("orders").with_id("order-16")).await.unwrap();
    inbox.drain().await.unwrap();
    let text = why_not_idempotent(&inbox).await;
    assert!(text.contains("did not succeed in the second run") && text.contains("it is there already"), "{text}");
}

/// Its first run ends with the crash, after the other handler has returned. Its second run succeeds.
fn interrupted() -> Registration<Sqlite> {
    handler(HandlerKey::new("stock.reserve"), async |order: Message<Raw>| match order.attempt() {
        1 => std::future::pending::<Result<(), Failure>>().await,
        _ => Ok(()),
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_run_that_fails_is_reported_for_each_handler_of_the_message() {
    let first = TestInbox::<Sqlite>::new(|inbox| {
        inbox.subscribe("orders", failing_again(KEY)).subscribe("orders", interrupted())
    });
    let last = TestInbox::<Sqlite>::new(|inbox| {
        inbox.subscribe("orders", interrupted()).subscribe("orders", failing_again(KEY))
    });
    for inbox in [first.await.unwrap(), last.await.unwrap()] {
        let text = why_not_idempotent(&inbox).await;
        assert!(text.contains("did not succeed in the second run") && text.contains("it is there already"), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_uses_the_id_as_its_key_is_idempotent() {
    let ids: Arc<Mutex<std::collections::HashSet<String>>> = Arc::default();
    let sent = Arc::clone(&ids);
    let send = handler(KEY, move |order: Message<Raw>| {
        sent.lock().unwrap().insert(order.id().to_owned());
        async { Ok::<(), Failure>(()) }
    });
    assert_idempotent(send, order(), async || ids.lock().unwrap().len()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_expectation_reports_the_actual_state() {
    let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", noting(&Effects::default()))).await.unwrap();
    inbox.accept(order()).await.unwrap();
    let asserted = AssertUnwindSafe(inbox.assert_state("order-17", KEY, State::Done)).catch_unwind().await;
    let text = asserted.unwrap_err().downcast_ref::<String>().unwrap().clone();
    assert!(text.contains("is not Done") && text.contains("Pending"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_crash_around_a_call_of_a_batch_handler_each_message_runs_again() {
    for (point, calls) in [(CrashPoint::BeforeHandler, vec![1; 5]), (CrashPoint::AfterHandler, vec![5, 1, 1, 1, 1, 1])]
    {
        let sizes = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&sizes);
        let noting = wharf::batch::batch_handler(KEY, move |orders: Vec<Message<Raw>>| {
            noted.lock().unwrap().push(orders.len());
            async { Ok::<(), Failure>(()) }
        });
        let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", noting)).await.unwrap();
        for number in 0..5 {
            inbox.accept(Record::new("orders").with_id(format!("order-{number}"))).await.unwrap();
        }
        inbox.crash_at(point);
        inbox.drain().await.unwrap();
        inbox.assert_state("order-0", KEY, State::Running).await;
        inbox.advance_past_lease().await.unwrap();
        assert_eq!(inbox.drain().await.unwrap(), 5);
        assert_eq!(*sizes.lock().unwrap(), calls);
        inbox.assert_state("order-4", KEY, State::Done).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_limit_allows_more_when_the_clock_has_moved() {
    let limited = handler(KEY, async |_: Message<Raw>| Ok::<(), Failure>(())).rate(RateLimit::per_hour(1).burst(3));
    let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", limited)).await.unwrap();
    for number in 0..20 {
        inbox.accept(Record::new("orders").with_id(format!("order-{number}"))).await.unwrap();
    }
    let hour = Duration::from_secs(3_600);
    assert_eq!(inbox.drain().await.unwrap(), 3);
    assert_eq!(inbox.drain().await.unwrap(), 0);
    for hours in [1, 2, 1] {
        inbox.advance(hour * hours).await.unwrap();
        assert_eq!(inbox.drain().await.unwrap(), usize::try_from(hours).unwrap());
    }
    // At most a burst is saved up.
    inbox.advance(hour * 100).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 3);
}
