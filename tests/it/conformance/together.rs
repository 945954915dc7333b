//! Options of one handler that act together: turns of tenants, breaker, rate limit, delay, expiry, retries and replays.
//!
//! As in `breaker.rs` and `rate.rs`, no test waits for a probe or for a limit: they move the times in the database.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use wharf::flow::{FairKey, RateLimit};
use wharf::operate::DeliveryFilter;
use wharf::{Failure, Record, Registration};

use super::breaker::{ALL_DUE, IS_OPEN, PROBE_NOW, Service, breaking};
use super::scene::{Database, Db, Runs, Scene, State, record, records};

const HOUR: Duration = Duration::from_secs(3_600);
const ALLOW_MORE: &str = "UPDATE inbox_handler SET rate_next_at = NULL";
const ATTEMPTS: &str = "SELECT coalesce(sum(attempts), 0) FROM inbox_delivery";
/// As if everything that waits had been accepted two hours ago and had been due since.
const HAS_WAITED: &str = "UPDATE inbox_message SET received_at = received_at - interval '120 minutes';
                          UPDATE inbox_delivery SET due_at = due_at - interval '120 minutes' WHERE locked_until IS NULL AND finished_at IS NULL";

fn fair(registration: Registration<Db>) -> Registration<Db> {
    registration.fair_by(FairKey::header("tenant"))
}

/// Records of two tenants: many of one and four of the other.
fn of_two_tenants() -> Vec<Record> {
    let of = |tenant: &'static str, count| {
        (0..count).map(move |n| record(&format!("{tenant}-{n:03}")).with_header("tenant", tenant))
    };
    of("burst", 20).chain(of("small", 4)).collect()
}

fn of_small(runs: &Runs) -> usize {
    runs.ids().iter().filter(|id| id.starts_with("small")).count()
}

/// Fails once and is retried at once, is then poisoned, and succeeds when it is replayed.
fn retried_and_replayed(runs: &Runs) -> Registration<Db> {
    runs.answering("mail", |message| match message.attempt() {
        1 if message.id() == "a" => Err(Failure::retry_after(Duration::ZERO, "no")),
        2 => Err(Failure::poison("no")),
        _ => Ok(()),
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_breaker_lets_a_fair_handler_claim_one_delivery_for_a_probe_and_nothing_else() {
    let (scene, service, runs) = (Scene::new().await, Service::default(), Runs::new());
    let inbox = scene.inbox().subscribe("orders", fair(breaking(service.plain(&runs)))).build().unwrap();
    inbox.accept_all(of_two_tenants()).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.database.query_one_i64(IS_OPEN).await, 1);
    let attempts = scene.database.query_one_i64(ATTEMPTS).await;
    scene.database.execute(ALL_DUE).await;
    assert_eq!(inbox.drain().await.unwrap(), 0);

    scene.database.execute(PROBE_NOW).await;
    assert_eq!(inbox.drain().await.unwrap(), 1);

    assert_eq!(scene.database.query_one_i64(ATTEMPTS).await, attempts + 1);
    service.returns();
    scene.database.execute(PROBE_NOW).await;
    scene.database.execute(ALL_DUE).await;
    assert_eq!(inbox.drain().await.unwrap(), 24);
    assert_eq!(scene.count_done_uncharged().await, 24);
}

#[tokio::test(flavor = "multi_thread")]
async fn delayed_deliveries_of_a_fair_handler_wait_and_then_take_turns() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let mail = fair(runs.handler("mail")).delay(HOUR).concurrency(4);
    let inbox = scene.inbox().subscribe("orders", mail).build().unwrap();
    inbox.accept_all(of_two_tenants()).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 0);

    scene.database.execute(ALL_DUE).await;

    assert_eq!(inbox.run_due().await.unwrap(), 4);
    assert_eq!((runs.count(), of_small(&runs)), (4, 2));
    assert_eq!(inbox.drain().await.unwrap(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_waits_for_the_rate_limit_and_takes_from_it() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let limit = RateLimit::per_hour(1).burst(2);
    let inbox = scene.inbox().subscribe("orders", breaking(runs.handler("mail")).rate(limit)).build().unwrap();
    inbox.accept_all(records(10)).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 2);
    assert!(scene.store.operate().open_breaker("mail").await.unwrap());
    scene.database.execute(PROBE_NOW).await;

    assert_eq!(inbox.drain().await.unwrap(), 0);
    assert_eq!(scene.database.query_one_i64(IS_OPEN).await, 1);

    scene.database.execute(ALLOW_MORE).await;
    scene.database.execute(PROBE_NOW).await;
    // The probe, and the one delivery that the limit allows after it.
    assert_eq!(inbox.drain().await.unwrap(), 2);
    assert_eq!((scene.database.query_one_i64(IS_OPEN).await, runs.count()), (0, 4));
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_and_replays_take_from_the_rate_limit() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let limit = RateLimit::per_hour(1).burst(3);
    let inbox = scene.inbox().subscribe("orders", retried_and_replayed(&runs).rate(limit)).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!((runs.count(), scene.count_in(State::Poisoned).await), (2, 1));
    assert_eq!(scene.database.replay("a", "mail", None).await, 1);
    inbox.drain().await.unwrap();
    assert_eq!((runs.count(), scene.count_in(State::Done).await), (3, 1));
    inbox.accept(record("b")).await.unwrap();

    assert_eq!(inbox.drain().await.unwrap(), 0);

    scene.database.execute(ALLOW_MORE).await;
    assert_eq!(inbox.drain().await.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_and_replays_are_not_delayed() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let delayed = retried_and_replayed(&runs).delay(HOUR);
    let inbox = scene.inbox().subscribe("orders", delayed).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 0);
    scene.database.execute(ALL_DUE).await;

    inbox.drain().await.unwrap();
    assert_eq!((runs.count(), scene.count_in(State::Poisoned).await), (2, 1));
    assert_eq!(scene.database.replay("a", "mail", None).await, 1);
    inbox.drain().await.unwrap();

    assert_eq!((runs.count(), scene.states().await), (3, vec!["a mail done".to_owned()]));
}

// The only slot is taken, so only the bulk can expire anything.
#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_delivery_does_not_expire_in_bulk_with_the_others() {
    let (scene, runs, gate) = (Scene::new().await, Runs::new(), Arc::new(Semaphore::new(0)));
    let held = runs.held("stock", &gate).concurrency(1).expires_after(HOUR);
    let inbox = scene.inbox().subscribe("orders", held).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("running")).await.unwrap();
    runs.reached(1).await;
    inbox.accept_all([record("replayed"), record("waiting")]).await.unwrap();
    let replayed = DeliveryFilter::default().message_id("replayed");
    assert_eq!(scene.store.operate().discard(&replayed, 1).await.unwrap(), 1);
    assert_eq!(scene.store.operate().replay(&replayed, 1).await.unwrap(), 1);

    scene.database.execute(HAS_WAITED).await;

    scene.until("SELECT count(*) FROM inbox_status WHERE reason = 'expired' AND attempts = 0").await;
    assert_eq!(scene.states().await, ["replayed stock pending", "running stock running", "waiting stock discarded"]);
    gate.add_permits(2);
    scene.settled().await;
    assert_eq!(runs.ids(), ["running", "replayed"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_expire_while_the_breaker_of_their_handler_is_open() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", breaking(runs.handler("stock")).expires_after(HOUR)).build().unwrap();
    inbox.accept_all(records(3)).await.unwrap();
    assert!(scene.store.operate().open_breaker("stock").await.unwrap());
    // No probe is due while the test runs.
    scene.database.execute("UPDATE inbox_handler SET breaker_probe_at = now() + interval '60 minutes'").await;
    scene.database.execute(HAS_WAITED).await;

    let running = inbox.start().await.unwrap();

    scene.settled().await;
    assert_eq!(scene.count("inbox_status WHERE reason = 'expired' AND attempts = 0").await, 3);
    assert_eq!((runs.count(), scene.database.query_one_i64(IS_OPEN).await), (0, 1));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}
