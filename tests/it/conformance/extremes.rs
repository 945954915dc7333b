//! Claims and retries at the extremes: counters near overflow, thousands of expired locks, outages of a day, late
//! commits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use wharf::{Failure, RetryPolicy};

use super::scene::{Database, Runs, Scene, record, records};

// Ids are 64 bits wide everywhere.
#[tokio::test(flavor = "multi_thread")]
async fn messages_are_handled_at_any_value_of_the_sequence() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    let running = inbox.start().await.unwrap();
    for start in [(1_i64 << 31) - 20, (1 << 53) - 20, i64::MAX - 1_000] {
        scene.database.restart_sequence(start).await;
        // One by one for the hand-over, all at once for claims.
        for number in 0..20 {
            inbox.accept(record(&format!("{start}-{number}"))).await.unwrap();
        }
        inbox.accept_all((20..120).map(|number| record(&format!("{start}-{number}")))).await.unwrap();
        inbox.accept_all((0..120).map(|number| record(&format!("{start}-{number}")))).await.unwrap();
    }
    scene.settled().await;
    assert_eq!(runs.count(), 360);
    assert_eq!(scene.count_done_at_first().await, 360);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// Delays have a random part, so that deliveries which failed together do not all retry at the same instant.
#[tokio::test(flavor = "multi_thread")]
async fn deliveries_that_failed_together_are_retried_at_different_times() {
    let scene = Scene::new().await;
    let failing = Runs::new().answering("stock", |_| Err(Failure::retry("down"))).concurrency(2_000);
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept_all(records(2_000)).await.unwrap();
    // The tenth failure: 1,024 s, of which the upper half is the range of the jitter.
    scene.database.execute("UPDATE inbox_delivery SET errors = 9").await;
    assert_eq!(inbox.drain().await.unwrap(), 2_000);

    // Measured a moment later, so the lower bound has a tolerance for a slow machine.
    let due_in = scene.database.due_in_ms().await;
    assert!(due_in.iter().all(|ms| (452_000..=1_024_000).contains(ms)), "{:?} {:?}", due_in.iter().min(), due_in.iter().max());
    let mut parts = [0_usize; 8];
    for ms in due_in {
        parts[usize::try_from((ms - 512_000).clamp(0, 511_999) / 64_000).unwrap()] += 1;
    }
    // 250 are expected in each part, with a standard deviation of 15.
    assert!(parts.iter().all(|count| (125..=450).contains(count)), "{parts:?}");
}

// The default retry policy outlasts an outage of hours, so that an outage does not poison the backlog.
#[tokio::test(flavor = "multi_thread")]
async fn by_default_an_outage_of_most_of_a_day_poisons_nothing() {
    /// The factor by which time is compressed here.
    const COMPRESSION: f64 = 25_000.0;
    let scene = Scene::new().await;
    let is_up = Arc::new(AtomicBool::new(false));
    let dependency = Arc::clone(&is_up);
    let runs = Runs::new();
    let calling = runs.answering("stock", move |_| match dependency.load(Ordering::SeqCst) {
        true => Ok(()),
        false => Err(Failure::retry("connection refused")),
    });
    // The delays of the default policy, in the middle of their jitter; the number of retries is that of the policy.
    let policy = RetryPolicy::exponential().delay_by(|errors, _| {
        let secs = 2f64.powi(i32::try_from(errors).unwrap_or(i32::MAX)).min(3_600.0) * 0.75;
        Some(Duration::from_secs_f64(secs / COMPRESSION))
    });
    let inbox = scene.inbox().subscribe("orders", calling.retry(policy)).build().unwrap();
    inbox.accept_all(records(50)).await.unwrap();
    let running = inbox.start().await.unwrap();

    tokio::time::sleep(Duration::from_secs_f64(20.0 * 3_600.0 / COMPRESSION)).await;
    scene.until("SELECT (min(errors) > 5)::int::bigint FROM inbox_delivery").await;
    assert_eq!(scene.database.query_one_i64("SELECT count(*) FROM inbox_poisoned").await, 0);
    is_up.store(true, Ordering::SeqCst);
    scene.settled().await;
    assert_eq!(scene.count("inbox_status WHERE state = 'done' AND errors > 5").await, 50);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

/// Accepts `odd` and `neighbour`, sets counters of the first, and lets both run; `odd` always fails, and ends
/// in this state.
async fn with_counters(set: &str, end: &str) {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let failing = runs.answering("stock", |message| match message.id() {
        "odd" => Err(Failure::retry("no")),
        _ => Ok(()),
    });
    let policy = RetryPolicy::exponential().max_retries(2).delay_by(|_, _| Some(Duration::ZERO));
    let inbox = scene.inbox().subscribe("orders", failing.retry(policy)).build().unwrap();
    inbox.accept_all([record("odd"), record("neighbour")]).await.unwrap();
    let odd = "WHERE message_seq = (SELECT seq FROM inbox_message WHERE message_id = 'odd')";
    scene.database.execute(&format!("UPDATE inbox_delivery SET {set} {odd}")).await;
    let running = inbox.start().await.unwrap();
    scene.until("SELECT count(*) FROM inbox_status WHERE message_id = 'neighbour' AND state = 'done'").await;
    // This record is accepted later: claims continue.
    inbox.accept(record("next")).await.unwrap();
    scene.until("SELECT count(*) FROM inbox_status WHERE message_id = 'next' AND state = 'done'").await;
    scene.until(&format!("SELECT count(*) FROM inbox_status WHERE message_id = 'odd' AND state = '{end}'")).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// No counter overflows: the arithmetic saturates.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_count_at_its_maximum_ends_poisoned() {
    with_counters("errors = 2147483646", "poisoned").await;
    with_counters("errors = 2147483647", "poisoned").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_count_near_its_maximum_changes_nothing() {
    with_counters("attempts = 2147483637", "poisoned").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_count_at_its_maximum_delays_no_other_delivery() {
    with_counters("attempts = 2147483647", "pending").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_count_at_its_maximum_ends_poisoned() {
    let dead = "crashes = 2147483647, locked_by = 999, locked_until = now() - interval '1 second'";
    with_counters(dead, "poisoned").await;
}
