//! Transactional handlers share the connections of a store: a slow one never takes all of them, and no handler waits
//! forever for one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{Semaphore, watch};
use wharf::flow::Priority;
use wharf::store::PostgresOptions;
use wharf::{Failure, Inbox, Message, Postgres, Raw, Record, Registration, Store};

use crate::effect::{self, effects};
use crate::scene::{Runs, Scene, quick, record, records, within};

async fn store(scene: &Scene, handler_connections: usize) -> Store<Postgres> {
    let options = PostgresOptions::default().handler_connections(handler_connections);
    Store::<Postgres>::connect_with(&scene.database.url(), options).await.unwrap()
}

/// A transactional handler that returns when the gate opens.
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
async fn a_slow_transactional_handler_does_not_delay_another() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let (slow, quick_runs, gate) = (Runs::new(), Runs::new(), Arc::new(Semaphore::new(0)));
    let inbox = Inbox::builder(store(&scene, 2).await)
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
    // A delivery that waits for a connection is not claimed: another process could run it.
    let claimed = "inbox_delivery WHERE finished_at IS NULL AND locked_until IS NOT NULL";
    assert_eq!(scene.count(claimed).await, 1);
    gate.add_permits(30);
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!((slow.count(), effects(&scene).await.len()), (30, 60));
}

// Ten connections are for transactional handlers. Five of them are kept: four for the handler of high priority, one for the other.
#[tokio::test(flavor = "multi_thread")]
async fn connections_are_reserved_for_other_handlers_by_priority() {
    for (first, is_first, then, is_then) in
        [(Priority::Low, 6, Priority::High, 4), (Priority::High, 9, Priority::Low, 1)]
    {
        let scene = Scene::new().await;
        effect::prepare(&scene).await;
        let (early, late, gate) = (Runs::new(), Runs::new(), Arc::new(Semaphore::new(0)));
        let inbox = Inbox::builder(store(&scene, 10).await)
            .limits(quick())
            .subscribe("orders", held(&early, "early", &gate).priority(first))
            .subscribe("returns", held(&late, "late", &gate).priority(then))
            .build()
            .unwrap();
        let running = inbox.start().await.unwrap();
        inbox.accept_all(records(20)).await.unwrap();
        early.reached(is_first).await;
        inbox.accept_all((0..20).map(|n| Record::new("returns").with_id(format!("r{n}")))).await.unwrap();
        late.reached(is_then).await;
        let claimed = "inbox_delivery WHERE finished_at IS NULL AND locked_until IS NOT NULL";
        assert_eq!(scene.count(claimed).await, 10);
        assert_eq!((early.count(), late.count()), (is_first, is_then));

        gate.add_permits(40);
        scene.settled().await;
        running.shutdown(Duration::from_secs(5)).await.unwrap();
        assert_eq!(effects(&scene).await.len(), 40);
    }
}

/// Records the maximum number of concurrent runs.
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
    let store = store(&scene, 3).await;
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
    assert!(gauge.most.load(Ordering::SeqCst) <= 3, "each run holds one of the three connections");
}

// A handler's connection is not one of the engine's, so a handler may wait for the engine.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_accepts_while_it_runs_finds_a_connection() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let options = PostgresOptions::default().pool_size(1).handler_connections(1);
    let store = Store::<Postgres>::connect_with(&scene.database.url(), options).await.unwrap();
    let mails = Runs::new();
    let elsewhere = Inbox::builder(store.clone()).limits(quick());
    let elsewhere = elsewhere.subscribe("mails", mails.handler("mail")).build().unwrap();
    let accepting = elsewhere.clone();
    let handler = effect::writing(&Runs::new(), "stock", move |message: Message<Raw>| {
        let accepting = accepting.clone();
        Box::pin(async move {
            accepting.accept(Record::new("mails").with_id(message.id().to_owned())).await?;
            Ok(())
        })
    });
    let inbox = Inbox::builder(store).limits(quick()).subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(20)).await.unwrap();
    assert_eq!(within(inbox.drain()).await.unwrap(), 20);
    assert_eq!(within(elsewhere.drain()).await.unwrap(), 20);
    assert_eq!(effects(&scene).await.len(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_accept_that_gets_no_connection_in_time_fails_with_the_reason() {
    let scene = Scene::new().await;
    let options = PostgresOptions::default().pool_size(1).connect_timeout(Duration::from_secs(1));
    let store = Store::<Postgres>::connect_with(&scene.database.url(), options).await.unwrap();
    let inbox = |topic: &str| {
        let limits = quick().accept_patience(Duration::ZERO);
        Inbox::builder(store.clone()).limits(limits).subscribe(topic, Runs::new().handler("stock")).build().unwrap()
    };
    let (first, other) = (inbox("orders"), inbox("mails"));
    other.accept(Record::new("mails").with_id("before")).await.unwrap();
    let somebody = support::postgres::connect(&scene.database.url()).await;
    somebody.batch_execute("BEGIN; LOCK TABLE inbox_message IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let waiting = tokio::spawn(async move { first.accept(record("a")).await });
    scene.until("SELECT count(*) FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())").await;

    let refused = other.accept(Record::new("mails").with_id("second")).await.unwrap_err();
    assert!(refused.is_transient() && refused.to_string().contains("raise pool_size"), "{refused}");
    somebody.batch_execute("ROLLBACK").await.unwrap();
    waiting.await.unwrap().unwrap();
}

// There are fewer connections than handlers. What a process cannot start, another one can.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_without_a_connection_claims_nothing() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let (runs, there, gate) = (Runs::new(), Runs::new(), Arc::new(Semaphore::new(0)));
    let inbox = Inbox::builder(store(&scene, 1).await)
        .limits(quick())
        .subscribe("busy", held(&runs, "busy", &gate))
        .subscribe("late", effect::writing_only(&runs, "late"))
        .build()
        .unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(Record::new("busy").with_id("busy")).await.unwrap();
    runs.reached(1).await;
    inbox.accept_all((0..5).map(|number| Record::new("late").with_id(format!("late-{number}")))).await.unwrap();
    let other = scene.another_inbox().await.subscribe("late", effect::writing_only(&there, "late")).build().unwrap();

    let elsewhere = other.start().await.unwrap();

    there.reached(5).await;
    gate.add_permits(1);
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    elsewhere.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!((runs.count(), scene.count_done_at_first().await), (1, 6));
}
