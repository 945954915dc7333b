//! Transactional handlers share the connections of a store: a slow one never takes all of them, and nobody waits for ever for one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{Semaphore, watch};
use wharf::store::PostgresOptions;
use wharf::{Failure, Inbox, Message, Postgres, Raw, Registration, Store};

use crate::effect::{self, effects};
use crate::scene::{Runs, Scene, quick, record, records, within};

async fn store(scene: &Scene, pool_size: usize) -> Store<Postgres> {
    let options = PostgresOptions::default().pool_size(pool_size).connect_timeout(Duration::from_secs(2));
    Store::<Postgres>::connect_with(&scene.database.url(), options).await.unwrap()
}

/// A transactional handler that ends when the gate lets it.
fn held(runs: &Runs, name: &'static str, gate: &Arc<Semaphore>) -> Registration<Postgres> {
    let gate = Arc::clone(gate);
    effect::writing(runs, name, move |_| {
        let gate = Arc::clone(&gate);
        Box::pin(async move {
            gate.acquire().await?.forget();
            Ok(())
        })
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_transactional_handler_does_not_hold_up_another() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    // Two of the four connections are for transactional handlers.
    let (slow, quick_runs, gate) = (Runs::new(), Runs::new(), Arc::new(Semaphore::new(0)));
    let inbox = Inbox::builder(store(&scene, 4).await)
        .limits(quick())
        .subscribe("orders", held(&slow, "slow", &gate))
        .subscribe("orders", effect::writing_only(&quick_runs, "quick"))
        .build()
        .unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(30)).await.unwrap();
    quick_runs.reached(30).await;
    scene.until("SELECT (count(*) = 30)::int::bigint FROM inbox_delivery WHERE finished_at IS NOT NULL").await;
    assert_eq!(slow.count(), 1, "no more is started than has a connection");
    // What waits for a connection is not claimed: another process could run it.
    let claimed = "inbox_delivery WHERE finished_at IS NULL AND locked_until IS NOT NULL";
    assert_eq!(scene.count(claimed).await, 1);
    gate.add_permits(30);
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!((slow.count(), effects(&scene).await.len()), (30, 60));
}

/// Notes how many runs are under way at the most.
#[derive(Clone, Default)]
struct Gauge {
    now: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

impl Gauge {
    fn running(&self, open: &watch::Sender<bool>) -> BoxFuture<'static, Result<(), Failure>> {
        let (gauge, mut opened) = (self.clone(), open.subscribe());
        Box::pin(async move {
            gauge.most.fetch_max(gauge.now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let _ = opened.wait_for(|is_open| *is_open).await;
            gauge.now.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_inboxes_on_one_store_hold_no_more_connections_than_it_has_for_handlers() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let store = store(&scene, 5).await;
    let (gauge, runs, open) = (Gauge::default(), Runs::new(), watch::channel(false).0);
    let mut running = Vec::new();
    for name in ["one", "other"] {
        let (of_this, open) = (gauge.clone(), open.clone());
        let handler = effect::writing(&runs, name, move |_: Message<Raw>| of_this.running(&open));
        let inbox = Inbox::builder(store.clone()).limits(quick()).subscribe("orders", handler).build().unwrap();
        inbox.accept_all(records(10)).await.unwrap();
        running.push(inbox.start().await.unwrap());
    }
    runs.reached(3).await;
    open.send_replace(true);
    scene.settled().await;
    for running in running {
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
    assert_eq!((runs.count(), effects(&scene).await.len()), (20, 20));
    assert!(gauge.most.load(Ordering::SeqCst) <= 3, "two of five connections are for the engine");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_holds_the_only_connection_and_accepts_gets_an_error_that_says_so() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let store = store(&scene, 1).await;
    let limits = quick().accept_patience(Duration::ZERO);
    let elsewhere =
        Inbox::builder(store.clone()).limits(limits).subscribe("mails", Runs::new().handler("mail")).build().unwrap();
    elsewhere.accept(wharf::Record::new("mails").with_id("first")).await.unwrap();
    let (runs, told) = (Runs::new(), watch::channel(String::new()).0);
    let (accepting, tell) = (elsewhere.clone(), told.clone());
    let handler = effect::writing(&runs, "stock", move |_| {
        let (accepting, tell) = (accepting.clone(), tell.clone());
        Box::pin(async move {
            let refused = accepting.accept(wharf::Record::new("mails").with_id("second")).await.unwrap_err();
            assert!(refused.is_transient());
            tell.send_replace(refused.to_string());
            Ok(())
        })
    });
    let inbox = Inbox::builder(store).limits(quick()).subscribe("orders", handler).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    assert_eq!(within(inbox.drain()).await.unwrap(), 1);
    assert!(told.borrow().contains("raise pool_size"), "{}", *told.borrow());
    assert_eq!(effects(&scene).await, ["a"]);
}
