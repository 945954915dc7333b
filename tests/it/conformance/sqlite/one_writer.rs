//! One writer at a time: operations that wait for the writer do not wait forever, are not stopped and do not run twice
//! because of it.

use std::sync::Arc;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel_async::RunQueryDsl;
use futures_util::FutureExt;
use tokio::sync::{Semaphore, watch};
use wharf::store::SqliteOptions;
use wharf::{
    Failure, Inbox, Limits, Message, Raw, Receipt, Registration, RetryPolicy, Sqlite, Store, TxHandler, tx_handler,
};

use super::effect::{self, Connection, effects};
use super::scene::{Db, Runs, Scene, key, quick, record, records, within};
use super::transactional::{once_more, outcome_of, scene};
use support::events::Events;

#[tokio::test(flavor = "multi_thread")]
async fn an_sql_error_that_the_handler_ignores_undoes_only_its_statement() {
    async fn careless(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::write(conn, message.id()).await?;
        assert!(effect::execute(conn, "INSERT INTO effect SELECT no_such_function()").await.is_err());
        Ok(())
    }
    let scene = scene().await;
    assert_eq!(outcome_of(&scene, tx_handler(key("stock"), careless)).await, "done|0");
    assert_eq!(effects(&scene).await, ["a"]);
}

// SQLite does this when the disk is full: later statements would commit separately.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_ended_during_the_handler_is_a_failure() {
    async fn ending(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::write(conn, message.id()).await?;
        effect::execute(conn, "ROLLBACK").await?;
        Ok(())
    }
    let scene = scene().await;
    let outcome = outcome_of(&scene, tx_handler(key("stock"), ending).retry(once_more())).await;
    assert_eq!(outcome, "poisoned|retries exhausted|2");
    assert!(effects(&scene).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_is_stopped_in_a_statement_releases_the_writer() {
    async fn counting(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::write(conn, message.id()).await?;
        if message.attempt() == 1 {
            use diesel_async::AsyncConnection;
            let slow = "WITH RECURSIVE n (i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 3000000) SELECT max(i) FROM n";
            // In a nested transaction, which then stays open.
            conn.transaction(async |conn| diesel::sql_query(slow).execute(conn).await).await?;
        }
        Ok(())
    }
    let scene = scene().await;
    // On a slow machine later runs may be stopped as well.
    let again = RetryPolicy::exponential().max_retries(1_000).delay_by(|_, _| Some(Duration::ZERO));
    let stopped = tx_handler(key("stock"), counting).timeout(Duration::from_millis(50)).retry(again);
    let outcome = outcome_of(&scene, stopped).await;
    assert!(outcome.starts_with("done|") && outcome != "done|0", "{outcome}");
    assert_eq!(effects(&scene).await, ["a"]);
}

/// A transactional handler that signals when it has the writer and keeps it until it may end.
struct Holding {
    has_it: watch::Sender<bool>,
    may_end: Arc<Semaphore>,
}

impl Holding {
    fn new() -> Self {
        Self { has_it: watch::Sender::new(false), may_end: Arc::new(Semaphore::new(0)) }
    }

    fn handler(&self, name: &'static str) -> Registration<Db> {
        tx_handler(key(name), Self { has_it: self.has_it.clone(), may_end: Arc::clone(&self.may_end) })
    }

    async fn began(&self) {
        within(self.has_it.subscribe().wait_for(|has_it| *has_it)).await.unwrap();
    }
}

impl TxHandler<Raw, Connection> for Holding {
    async fn handle(&self, message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::write(conn, message.id()).await?;
        self.has_it.send_replace(true);
        self.may_end.acquire().await?.forget();
        Ok(())
    }
}

// No process can take a claim meanwhile, so no handler has to be stopped.
#[tokio::test(flavor = "multi_thread")]
async fn while_a_transactional_handler_takes_three_leases_the_others_keep_their_claims() {
    let scene = scene().await;
    let limits = quick().lease(Duration::from_secs(3));
    let (runs, gate, holding) = (Runs::new(), watch::Sender::new(false), Holding::new());
    let inbox = scene
        .inbox()
        .limits(limits.clone())
        .subscribe("orders", runs.gated("plain", &gate).concurrency(20))
        .subscribe("holds", holding.handler("transactional"))
        .build()
        .unwrap();
    let there = scene.another_inbox().await.limits(limits.clone());
    let there = there.subscribe("orders", runs.gated("plain", &gate).concurrency(1)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(20)).await.unwrap();
    runs.reached(20).await;
    inbox.accept(wharf::Record::new("holds").with_id("h")).await.unwrap();
    holding.began().await;

    let there = there.start();
    tokio::time::sleep(limits.lease * 3).await;
    holding.may_end.add_permits(1);
    // Another process looks for expired locks as soon as it can.
    let there = there.await.unwrap();
    tokio::time::sleep(limits.lease / 2).await;
    gate.send_replace(true);

    scene.settled().await;
    assert_eq!((runs.count(), scene.count_not_done_at_first().await), (20, 0));
    for running in [running, there] {
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}

// The same if the transaction is rolled back in the end.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_transaction_that_fails_leaves_the_claims_of_others_valid() {
    let scene = scene().await;
    let limits = quick().lease(Duration::from_secs(3));
    let (runs, gate) = (Runs::new(), watch::Sender::new(false));
    let failing = effect::writing(&Runs::new(), "transactional", |_| {
        Box::pin(async {
            tokio::time::sleep(Duration::from_secs(9)).await;
            Err(Failure::poison("after all"))
        })
    });
    let inbox = scene
        .inbox()
        .limits(limits)
        .subscribe("orders", runs.gated("plain", &gate).concurrency(20))
        .subscribe("fails", failing)
        .build()
        .unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(20)).await.unwrap();
    runs.reached(20).await;
    inbox.accept(wharf::Record::new("fails").with_id("f")).await.unwrap();

    scene.until("SELECT count(*) FROM inbox_poisoned").await;
    gate.send_replace(true);

    scene.settled().await;
    assert_eq!(runs.count(), 20);
    assert_eq!(scene.count_not_done_at_first().await, 1);
    assert!(effects(&scene).await.is_empty());
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// The claim is no longer current when the outcome is written, so the handler's writes must not be committed. No process
// can take a claim while this one has the writer, so the handler invalidates it itself; this write is rolled back with
// the rest.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_lost_before_the_commit_rolls_the_writes_back() {
    let scene = scene().await;
    let runs = Runs::new();
    struct Robbed(Runs);
    impl TxHandler<Raw, Connection> for Robbed {
        async fn handle(&self, message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
            self.0.note(&message);
            effect::write(conn, message.id()).await?;
            if self.0.count() == 1 {
                diesel::sql_query("UPDATE inbox_delivery SET attempts = attempts + 1").execute(conn).await?;
            }
            Ok(())
        }
    }
    let inbox = scene
        .inbox()
        .limits(quick().lease(Duration::from_secs(1)))
        .subscribe("orders", tx_handler(key("stock"), Robbed(runs.clone())))
        .build()
        .unwrap();
    inbox.accept(record("a")).await.unwrap();
    let running = inbox.start().await.unwrap();

    scene.settled().await;
    assert_eq!((runs.count(), effects(&scene).await), (2, vec!["a".to_owned()]));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

fn impatient() -> Limits {
    quick().accept_patience(Duration::from_millis(500)).backoff_max(Duration::from_millis(100))
}

async fn impatient_store(scene: &Scene, busy_timeout: Duration) -> Store<Sqlite> {
    let options = SqliteOptions::default().busy_timeout(busy_timeout);
    Store::<Sqlite>::open_with(scene.database.path(), options).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn accepting_within_a_transactional_handler_fails_in_time_and_blocks_no_other() {
    struct Accepting(Arc<std::sync::OnceLock<Inbox<Sqlite>>>);
    impl TxHandler<Raw, Connection> for Accepting {
        async fn handle(&self, message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
            effect::write(conn, message.id()).await?;
            let error = self.0.get().unwrap().accept(record("from within")).await.unwrap_err();
            assert!(error.is_transient() && error.to_string().contains("busy"), "{error}");
            Ok(())
        }
    }
    let scene = scene().await;
    let itself = Arc::new(std::sync::OnceLock::new());
    let accepting = tx_handler(key("stock"), Accepting(Arc::clone(&itself)));
    let store = impatient_store(&scene, Duration::from_secs(2)).await;
    let limits = impatient().accept_patience(Duration::from_secs(5)).lease(Duration::from_secs(60));
    let builder = Inbox::builder(store).limits(limits);
    let inbox = builder.subscribe("orders", accepting).build().unwrap();
    itself.set(inbox.clone()).unwrap();
    inbox.accept(record("a")).await.unwrap();

    assert_eq!(within(inbox.drain()).await.unwrap(), 1);

    assert_eq!(effects(&scene).await, ["a"]);
    assert_eq!(scene.states().await, ["a stock done"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_accept_that_waits_for_the_writer_is_reported_and_succeeds_later() {
    let scene = scene().await;
    let (events, holding, runs) = (Events::capture(), Holding::new(), Runs::new());
    let builder = Inbox::builder(impatient_store(&scene, Duration::from_millis(200)).await)
        .limits(impatient().accept_patience(Duration::from_secs(60)));
    let inbox = builder
        .subscribe("holds", holding.handler("holds.the.writer"))
        .subscribe("orders", runs.handler("stock"))
        .build()
        .unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(wharf::Record::new("holds").with_id("h")).await.unwrap();
    holding.began().await;

    let accepting = tokio::spawn({
        let inbox = inbox.clone();
        async move { inbox.accept(record("a")).await }
    });
    events
        .wait_for(|event| event.message == "store error" && event.field("error").is_some_and(|e| e.contains("busy")))
        .await;
    holding.may_end.add_permits(1);

    assert_eq!(within(accepting).await.unwrap().unwrap(), Receipt::Accepted { deliveries: 1 });
    scene.settled().await;
    assert_eq!((runs.count(), effects(&scene).await), (1, vec!["h".to_owned()]));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// This happens with a transaction that an operator has left open, or with another process that was stopped during one.
#[tokio::test(flavor = "multi_thread")]
async fn another_process_that_holds_the_writer_costs_no_record() {
    let scene = Scene::new().await;
    let (events, runs) = (Events::capture(), Runs::new());
    let builder = Inbox::builder(impatient_store(&scene, Duration::from_millis(200)).await)
        .limits(impatient().accept_patience(Duration::from_secs(60)));
    let inbox = builder.subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept(record("first")).await.unwrap();
    let mut other = scene.database.client();
    other.batch_execute("BEGIN IMMEDIATE; UPDATE inbox_handler SET registered_at = 0").unwrap();

    let accepting = tokio::spawn({
        let inbox = inbox.clone();
        async move { inbox.accept(record("a")).await }
    });
    let is_locked = |error: &str| error.contains("database is locked");
    events.wait_for_count(5, |event| event.field("error").is_some_and(is_locked)).await;
    other.batch_execute("ROLLBACK").unwrap();

    assert_eq!(within(accepting).await.unwrap().unwrap(), Receipt::Accepted { deliveries: 1 });
    assert_eq!(scene.count("inbox_quarantine").await, 0);
    let patient = scene.another_inbox().await.subscribe("orders", runs.handler("stock")).build().unwrap();
    assert_eq!(patient.drain().await.unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_dropped_midway_leaves_no_transaction_open() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let mut other = scene.database.client();
    for round in 0..30 {
        let inbox = scene.another_inbox().await.subscribe("orders", runs.handler("stock")).build().unwrap();
        other.batch_execute("BEGIN IMMEDIATE").unwrap();
        assert!(inbox.start().now_or_never().is_none());
        let call = tokio::spawn({
            let inbox = inbox.clone();
            async move { inbox.accept(record(&format!("r{round}"))).await }
        });
        tokio::time::sleep(Duration::from_millis(round % 7)).await;
        call.abort();
        other.batch_execute("ROLLBACK").unwrap();
        within(inbox.drain()).await.unwrap();
    }
    // An open transaction would still hold the lock.
    other.batch_execute("PRAGMA busy_timeout = 5000; BEGIN IMMEDIATE; ROLLBACK").unwrap();
}
