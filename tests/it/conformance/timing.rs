//! Deliveries that are due later than accepted, and deliveries that are too old to run.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use support::events::{Event, Events};
use tokio::sync::Semaphore;
use wharf::order::OrderKey;
use wharf::{Failure, Receipt, Registration};

use super::scene::{Database, Db, Runs, Scene, State, record, records};

const HOUR: Duration = Duration::from_secs(3_600);

/// A key that no other test has, on any store: events are captured for the whole process.
fn unique(name: &str) -> &'static str {
    Box::leak(format!("{name}.{:016x}", rand::random::<u64>()).into_boxed_str())
}

/// Makes all accepted messages look two hours old. Their deliveries are due since now, so only the start of a run can
/// find that they are too old.
async fn age(scene: &Scene) {
    let age = "UPDATE inbox_message SET received_at = received_at - interval '120 minutes';
               UPDATE inbox_delivery SET due_at = now() WHERE finished_at IS NULL";
    scene.database.execute(age).await;
}

/// How many deliveries were discarded as expired after this many attempts.
async fn expired(scene: &Scene, attempts: u32) -> i64 {
    scene.count(&format!("inbox_status WHERE state = 'discarded' AND reason = 'expired' AND attempts = {attempts}")).await
}

fn lasting_an_hour(runs: &Runs) -> Registration<Db> {
    runs.handler("stock").expires_after(HOUR)
}

/// Minutes until deliveries are due, by the database's clock, by message and handler. Measured a moment later.
async fn due_in_minutes(scene: &Scene) -> Vec<i64> {
    scene.database.due_in_ms().await.into_iter().map(|ms| (ms + 59_999).div_euclid(60_000)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_delivery_is_due_later_than_accepted_and_is_not_handed_over() {
    let (scene, now, late) = (Scene::new().await, Runs::new(), Runs::new());
    let delayed = late.handler("late").delay(2 * HOUR);
    let inbox = scene.inbox().subscribe("orders", delayed).subscribe("orders", now.handler("now")).build().unwrap();
    let running = inbox.start().await.unwrap();
    assert_eq!(inbox.accept(record("a")).await.unwrap(), Receipt::Accepted { deliveries: 2 });
    now.reached(1).await;
    scene.until("SELECT count(*) FROM inbox_status WHERE state = 'done'").await;
    assert_eq!(scene.states().await, ["a late pending", "a now done"]);
    assert_eq!(scene.count("inbox_delivery WHERE attempts = 0 AND due_at > now() + interval '110 minutes'").await, 1);
    scene.database.execute("UPDATE inbox_delivery SET due_at = now() WHERE finished_at IS NULL").await;
    scene.settled().await;
    assert_eq!((late.count(), scene.count_done_at_first().await), (1, 2));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_sets_the_due_time_and_an_unreadable_one_is_ignored() {
    let events = Events::capture();
    let (scene, runs) = (Scene::new().await, Runs::new());
    let key = unique("timing.header");
    let delayed = runs.handler(key).delay(HOUR).delay_header("due");
    let inbox = scene.inbox().subscribe("orders", delayed).build().unwrap();
    let at = humantime::format_rfc3339_seconds(SystemTime::now() + 5 * HOUR).to_string();
    let given = [("1-absent", None), ("2-duration", Some("3h")), ("3-time", Some(&*at)), ("4-past", Some("2001-01-01T00:00:00Z"))];
    for (id, due) in given.into_iter().chain([("5-bad", Some("soon")), ("6-endless", Some("9000years"))]) {
        let record = record(id);
        inbox.accept(due.map_or_else(|| record.clone(), |due| record.clone().with_header("due", due.to_owned()))).await.unwrap();
    }
    let due = due_in_minutes(&scene).await;
    assert_eq!((&due[..2], due[3], due[4]), (&[60, 180][..], 0, 0), "{due:?}");
    assert!((299..=300).contains(&due[2]) && due[5] > 5_000_000, "{due:?}");
    let warned = events.matching(|e| e.message == "delay cannot be read" && e.has("handler", key));
    let warned: Vec<_> = warned.iter().map(|e| (e.field("message_id"), e.field("header"))).collect();
    assert_eq!(warned, [(Some("5-bad"), Some("due"))]);
    // Due deliveries run; a redelivered message is a duplicate and is not delayed again.
    assert_eq!(inbox.drain().await.unwrap(), 2);
    assert_eq!(runs.sorted(), ["4-past", "5-bad"]);
    assert_eq!(inbox.accept(record("1-absent")).await.unwrap(), Receipt::Duplicate { added: 0 });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_added_to_a_known_message_is_delayed_too() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let before = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    before.accept(record("a")).await.unwrap();
    before.drain().await.unwrap();
    let late = runs.handler("late").delay(HOUR);
    let after = scene.inbox().subscribe("orders", runs.handler("stock")).subscribe("orders", late).build().unwrap();
    assert_eq!(after.accept(record("a")).await.unwrap(), Receipt::Duplicate { added: 1 });
    assert_eq!(after.drain().await.unwrap(), 0);
    assert_eq!(scene.count("inbox_delivery WHERE due_at > now() + interval '50 minutes'").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_is_too_old_at_its_start_does_not_run_even_as_a_retry() {
    let events = Events::capture();
    let (scene, runs) = (Scene::new().await, Runs::new());
    let key = unique("timing.old");
    let failing = runs.answering(key, |_| Err(Failure::retry_after(HOUR, "not now"))).expires_after(HOUR);
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept(record("retried")).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 1);
    inbox.accept(record("waiting")).await.unwrap();
    age(&scene).await;
    inbox.accept(record("young")).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(runs.ids(), ["retried", "young"]);
    // One by its second attempt, one by its first; neither consumed a retry.
    assert_eq!((expired(&scene, 2).await, expired(&scene, 1).await), (1, 1));
    assert_eq!(scene.count("inbox_status WHERE reason = 'expired' AND errors = attempts - 1").await, 2);
    let told = events.wait_for_count(2, |e| e.message == "expired" && e.has("handler", key)).await;
    assert_eq!(told.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_delivery_runs_whatever_its_age() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", lasting_an_hour(&runs)).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    age(&scene).await;
    inbox.drain().await.unwrap();
    assert_eq!((runs.count(), expired(&scene, 1).await), (0, 1));
    assert_eq!(scene.database.replay("a", "stock", None).await, 1);
    inbox.drain().await.unwrap();
    assert_eq!((runs.ids(), scene.states().await), (vec!["a".to_owned()], vec!["a stock done".to_owned()]));
}

// No claim finds deliveries that are held behind a poisoned one.
#[tokio::test(flavor = "multi_thread")]
async fn deliveries_that_wait_for_their_key_expire_in_bulk_too() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let poisoning = runs.answering("stock", |_| Err(Failure::poison("no"))).expires_after(HOUR);
    let inbox = scene.inbox().subscribe("orders", poisoning.ordered_by(OrderKey::record_key())).build().unwrap();
    inbox.accept_all(records(20).into_iter().map(|record| record.with_key("a"))).await.unwrap();
    inbox.drain().await.unwrap();
    scene.database.execute("UPDATE inbox_message SET received_at = received_at - interval '120 minutes'").await;
    inbox.accept(record("young").with_key("a")).await.unwrap();

    let running = inbox.start().await.unwrap();

    scene.until("SELECT (count(*) = 19)::int::bigint FROM inbox_status WHERE reason = 'expired' AND attempts = 0").await;
    assert_eq!((runs.count(), scene.count("inbox_status WHERE message_id = 'young' AND state = 'pending'").await), (1, 1));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// The only slot is taken, so none of them can have expired on its way to its handler.
#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_expires_in_bulk_without_a_slot_but_not_while_its_handler_is_paused() {
    let events = Events::capture();
    let (scene, runs, gate) = (Scene::new().await, Runs::new(), Arc::new(Semaphore::new(0)));
    let key = unique("timing.bulk");
    let held = runs.held(key, &gate).concurrency(1).expires_after(HOUR);
    let paused = runs.handler("paused").expires_after(HOUR);
    let inbox = scene.inbox().subscribe("paused", paused).subscribe("orders", held).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("running")).await.unwrap();
    runs.reached(1).await;
    scene.store.operate().pause("paused").await.unwrap();
    // Not handed over: another inbox, which runs nothing, accepts a batch of one.
    let other = scene.inbox().subscribe("paused", Runs::new().handler("paused")).build().unwrap();
    other.accept(wharf::Record::new("paused").with_id("waits")).await.unwrap();
    inbox.accept_all(records(2_500)).await.unwrap();
    let waited = "UPDATE inbox_delivery SET due_at = due_at - interval '120 minutes' WHERE locked_until IS NULL";
    scene.database.execute(waited).await;
    scene.until("SELECT (count(*) = 2500)::int::bigint FROM inbox_status WHERE reason = 'expired' AND attempts = 0").await;
    // Each step emits an event when it is written; the last one has the rest.
    let about = |e: &Event| e.message == "expired" && e.has("handler", key);
    events.wait_for(|e| about(e) && e.has("deliveries", "500")).await;
    let told = events.matching(about);
    let counts: Vec<u64> = told.iter().map(|e| e.field("deliveries").unwrap().parse().unwrap()).collect();
    assert_eq!((counts.iter().sum::<u64>(), counts.iter().max()), (2_500, Some(&1_000)));
    // Handlers take turns in the order of registration: the paused one had its turn before.
    assert_eq!(scene.count_in(State::Pending).await, 1);
    gate.add_permits(1);
    running.shutdown(Duration::from_secs(20)).await.unwrap();
    assert_eq!((runs.count(), scene.count_in(State::Done).await), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_times_are_refused() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let day = 24 * HOUR;
    let cases: [(Registration<Db>, &str); 5] = [
        (runs.handler("a").expires_after(Duration::ZERO), "expires_after of a must be more than zero"),
        (runs.handler("a").expires_after(366 * day), "expires_after of a must be more than zero and at most 365days"),
        (runs.handler("a").delay(Duration::ZERO), "the delay of a must be more than zero"),
        (runs.handler("a").delay(HOUR).expires_after(HOUR), "expire before they are due"),
        (runs.handler("a").delay_header(""), "the name of the header that delays a must not be empty"),
    ];
    for (registration, why) in cases {
        let refused = scene.inbox().subscribe("orders", registration).build().err().unwrap();
        assert!(refused.to_string().contains(why), "{refused}");
    }
}
