//! Releasing a stuck run: the delivery runs elsewhere, the result of the old run is ignored, and only a running
//! delivery can be released.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, watch};
use wharf::operate::{DeliveryFilter, DeliverySummary};
use wharf::order::OrderKey;
use wharf::{Failure, Limits, Message, Raw, Registration, handler};

use super::scene::{Database, Db, Runs, Scene, State, key, quick, record, within};

/// Longer than a test: no claim expires, and no renewal happens.
fn slow() -> Limits {
    quick().lease(Duration::from_secs(600))
}

async fn running(scene: &Scene) -> DeliverySummary {
    scene.until("SELECT count(*) FROM inbox_status WHERE state = 'running'").await;
    let found = scene.store.operate().deliveries(&DeliveryFilter::default(), Some(State::Running), 10).await.unwrap();
    found.into_iter().next().expect("one is running")
}

/// On its first attempt the handler waits for the gate and then fails permanently; later attempts succeed.
fn stuck(runs: &Runs, gate: &Arc<Semaphore>) -> Registration<Db> {
    let (runs, gate) = (runs.clone(), Arc::clone(gate));
    handler(key("stock"), move |message: Message<Raw>| {
        runs.note(&message);
        let gate = Arc::clone(&gate);
        async move {
            if message.attempt() > 1 {
                return Ok(());
            }
            gate.acquire().await?.forget();
            Err(Failure::poison("too late"))
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_released_run_is_run_elsewhere_and_its_own_result_changes_nothing() {
    let (scene, runs, gate) = (Scene::new().await, Runs::new(), Arc::new(Semaphore::new(0)));
    let old = scene.inbox().limits(slow()).subscribe("orders", stuck(&runs, &gate).concurrency(1)).build().unwrap();
    let old = (old.start().await.unwrap(), old);
    old.1.accept(record("a")).await.unwrap();
    runs.reached(1).await;
    let run = running(&scene).await;
    let operator = scene.store.operate().acting_as("alice").because("it hangs");
    assert!(operator.release(&run).await.unwrap());
    assert!(!operator.release(&run).await.unwrap(), "it was released already");

    let other = scene.another_inbox().await.limits(slow()).subscribe("orders", stuck(&runs, &gate)).build().unwrap();
    let other = other.start().await.unwrap();
    scene.settled().await;
    // The old run returns now, and its process tries to write the outcome before it ends.
    gate.add_permits(1);
    old.0.shutdown(Duration::from_secs(20)).await.unwrap();
    let row = "SELECT concat_ws('|', state, attempts, errors, crashes) FROM inbox_status";
    assert_eq!(scene.database.query_texts(row).await, ["done|2|0|0"]);
    assert_eq!((runs.count(), scene.count("inbox_attempt").await), (2, 0));
    let audit = "SELECT concat_ws('|', action, affected, actor, because, filter->>'message_id', filter->>'attempt') FROM inbox_audit";
    let audit = scene.database.query_texts(&format!("{audit} ORDER BY id")).await;
    assert_eq!(audit, ["release|1|alice|it hangs|a|1", "release|0|alice|it hangs|a|1"]);
    let details = operator.delivery(&run).await.unwrap().unwrap();
    let history: Vec<_> = details.history.iter().map(|entry| (entry.state, entry.attempts)).collect();
    assert_eq!(history, [(State::Running, 1)]);
    other.shutdown(Duration::from_secs(5)).await.unwrap();
}

// The old run may still be active beside the new one. Whatever it answers, it neither lets the next delivery of the key
// start nor holds the key.
#[tokio::test(flavor = "multi_thread")]
async fn a_released_head_of_a_key_runs_again_before_the_next_and_its_old_run_decides_nothing() {
    let old_answers: [fn() -> Result<(), Failure>; 3] =
        [|| Ok(()), || Err(Failure::poison("too late")), || Err(Failure::discard("too late"))];
    for old_answer in old_answers {
        let (scene, runs) = (Scene::new().await, Runs::new());
        let gates = [(); 2].map(|()| Arc::new(Semaphore::new(0)));
        let head_waits = || {
            let (runs, gates) = (runs.clone(), gates.clone());
            let work = move |message: Message<Raw>| {
                runs.note(&message);
                let gates = gates.clone();
                async move {
                    match (message.id(), message.attempt()) {
                        ("a1", 1) => gates[0].acquire().await?.forget(),
                        ("a1", _) => gates[1].acquire().await?.forget(),
                        _ => {}
                    }
                    if message.attempt() == 1 && message.id() == "a1" { old_answer() } else { Ok(()) }
                }
            };
            handler(key("stock"), work).ordered_by(OrderKey::record_key()).concurrency(1)
        };
        let old = scene.inbox().limits(slow()).subscribe("orders", head_waits()).build().unwrap();
        old.accept_all(["a1", "a2", "a3"].map(|id| record(id).with_key("a"))).await.unwrap();
        let old = old.start().await.unwrap();
        runs.reached(1).await;
        assert!(scene.store.operate().release(&running(&scene).await).await.unwrap());
        let other = scene.another_inbox().await.limits(slow()).subscribe("orders", head_waits()).build().unwrap();
        let other = other.start().await.unwrap();
        runs.reached(2).await;

        // The old run returns while the new one is active, and its process tries to write the outcome before it ends.
        gates[0].add_permits(1);
        old.shutdown(Duration::from_secs(20)).await.unwrap();
        assert_eq!(scene.states().await, ["a1 stock running", "a2 stock pending", "a3 stock pending"]);
        assert_eq!(runs.ids(), ["a1", "a1"]);

        gates[1].add_permits(1);
        scene.settled().await;
        assert_eq!(runs.ids(), ["a1", "a1", "a2", "a3"]);
        assert_eq!(scene.count_done_uncharged().await, 3);
        other.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}

// A result that leaves the delivery open would match the row as the release has left it.
#[tokio::test(flavor = "multi_thread")]
async fn a_released_run_that_fails_consumes_no_retry_even_if_it_was_not_claimed_since() {
    let (scene, gate) = (Scene::new().await, Arc::new(Semaphore::new(0)));
    let (runs, opened) = (Runs::new(), Arc::clone(&gate));
    let noting = runs.clone();
    let failing = handler(key("stock"), move |message: Message<Raw>| {
        noting.note(&message);
        let opened = Arc::clone(&opened);
        async move {
            opened.acquire().await?.forget();
            Err::<(), Failure>(Failure::retry("too late"))
        }
    });
    let inbox = scene.inbox().limits(slow()).subscribe("orders", failing.concurrency(1)).build().unwrap();
    let started = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();
    runs.reached(1).await;
    let operator = scene.store.operate();
    operator.pause("stock").await.unwrap();
    assert!(operator.release(&running(&scene).await).await.unwrap());
    gate.add_permits(1);
    started.shutdown(Duration::from_secs(20)).await.unwrap();
    let row = "SELECT concat_ws('|', state, attempts, errors, crashes, coalesce(last_error, '-')) FROM inbox_status";
    assert_eq!(scene.database.query_texts(row).await, ["pending|1|0|0|-"]);
    assert_eq!(scene.count("inbox_attempt").await, 0);
}

/// Signals when it is dropped.
struct Dropped(watch::Sender<bool>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.send_replace(true);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_handler_of_a_released_run_is_stopped_by_the_next_renewal() {
    let (scene, runs, stopped) = (Scene::new().await, Runs::new(), watch::channel(false).0);
    let (noting, telling) = (runs.clone(), stopped.clone());
    let hanging = handler(key("stock"), move |message: Message<Raw>| {
        noting.note(&message);
        let guard = (message.attempt() == 1).then(|| Dropped(telling.clone()));
        async move {
            if guard.is_some() {
                std::future::pending::<()>().await;
            }
            Ok::<(), Failure>(())
        }
    });
    let inbox = scene.inbox().subscribe("orders", hanging).build().unwrap();
    let started = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();
    runs.reached(1).await;
    // Released with SQL.
    assert_eq!(scene.database.release("a", "stock", Some(2)).await, 0);
    assert_eq!(scene.database.release("a", "stock", Some(1)).await, 1);
    within(stopped.subscribe().wait_for(|is_stopped| *is_stopped)).await.unwrap();
    scene.settled().await;
    let row = "SELECT concat_ws('|', state, attempts, errors, crashes) FROM inbox_status";
    assert_eq!(scene.database.query_texts(row).await, ["done|2|0|0"]);
    started.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_running_delivery_is_released() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.obeying("stock")).build().unwrap();
    inbox.accept_all(["done", "poison", "discard"].map(record)).await.unwrap();
    inbox.drain().await.unwrap();
    inbox.accept(record("pending")).await.unwrap();
    // Its process crashed a while ago: it is claimable, not running.
    inbox.accept(record("dead")).await.unwrap();
    let dead = "UPDATE inbox_delivery SET locked_until = now() - interval '1 second', locked_by = 1, attempts = 1
                WHERE message_seq = (SELECT seq FROM inbox_message WHERE message_id = 'dead')";
    scene.database.execute(dead).await;
    let before = scene.states().await;
    let operator = scene.store.operate();
    for one in operator.deliveries(&DeliveryFilter::default(), None, 10).await.unwrap() {
        assert!(!operator.release(&one).await.unwrap(), "{one:?}");
        assert_eq!(scene.database.release(&one.message_id.unwrap(), "stock", None).await, 0);
    }
    assert_eq!(scene.states().await, before);
    assert_eq!((scene.count("inbox_history").await, scene.count("inbox_audit WHERE affected > 0").await), (0, 0));
}
