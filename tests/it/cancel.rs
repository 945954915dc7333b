//! Futures that are dropped, tasks that are aborted, handlers that are stopped or cannot be stopped: no transaction is
//! left open, no statement is left running on the server, no delivery is lost and no retry is consumed.

use std::time::Duration;

use wharf::store::PostgresOptions;
use wharf::{Failure, Inbox, Message, Postgres, Raw, RetryPolicy, Store, handler, tx_handler};

use crate::effect::{self, Connection, effects};
use crate::scene::{Runs, Scene, key, quick, record, records};
use support::events::Events;

/// An inbox with two connections and two handlers, one of them transactional.
struct Cramped {
    scene: Scene,
    inbox: Inbox<Postgres>,
    plain: Runs,
}

impl Cramped {
    async fn new() -> Cramped {
        let scene = Scene::new().await;
        effect::prepare(&scene).await;
        let options = PostgresOptions::default().pool_size(2).handler_connections(1);
        let store = Store::connect_with(&scene.database.url(), options).await.unwrap();
        let plain = Runs::new();
        let inbox = Inbox::builder(store)
            .limits(quick().lease(Duration::from_secs(1)))
            .subscribe("orders", plain.handler("plain"))
            .subscribe("orders", effect::writing_for(&Runs::new(), "transactional", Duration::from_millis(1)))
            .build()
            .unwrap();
        Cramped { scene, inbox, plain }
    }

    /// Every accepted message is done, once where this is guaranteed, and no transaction is left open.
    async fn assert_well(self) {
        let _running = self.inbox.start().await.unwrap();
        self.scene.settled().await;
        let accepted = self.scene.database.query_texts("SELECT message_id FROM inbox_message ORDER BY 1").await;
        assert_eq!(effects(&self.scene).await, accepted);
        let mut ran = self.plain.sorted();
        ran.dedup();
        assert_eq!(ran, accepted);
        assert_eq!(self.scene.count_done_uncharged().await, i64::try_from(2 * accepted.len()).unwrap());
        assert_nothing_open(&self.scene).await;
    }
}

async fn assert_nothing_open(scene: &Scene) {
    scene
        .until(&format!(
            "SELECT (count(*) = 0)::int::bigint FROM pg_stat_activity
             WHERE datname = '{}' AND state LIKE 'idle in transaction%'
               AND state_change < clock_timestamp() - interval '500 ms'",
            scene.database.name()
        ))
        .await;
}

/// Polls the future for a random time, then drops it.
async fn cut_short<T>(future: impl Future<Output = T>) -> Option<T> {
    let moment = Duration::from_micros(rand::random_range(0..8_000));
    tokio::time::timeout(moment, future).await.ok()
}

// A future dropped at any await point must not return a connection with an open transaction to the pool.
#[tokio::test(flavor = "multi_thread")]
async fn dropped_accepts_leave_no_transaction_open() {
    let cramped = Cramped::new().await;
    let running = cramped.inbox.start().await.unwrap();
    for record in records(300) {
        let _ = cut_short(cramped.inbox.accept(record)).await;
    }
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    cramped.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_rounds_leave_no_transaction_open() {
    let cramped = Cramped::new().await;
    cramped.inbox.accept_all(records(100)).await.unwrap();
    for round in 0..100 {
        let _ = match round % 2 {
            0 => cut_short(cramped.inbox.run_due()).await,
            _ => cut_short(cramped.inbox.drain()).await,
        };
    }
    cramped.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn aborted_tasks_leave_no_transaction_open() {
    let cramped = Cramped::new().await;
    for records in records(200).chunks(10) {
        let (inbox, records) = (cramped.inbox.clone(), records.to_vec());
        let task = tokio::spawn(async move {
            inbox.accept_all(records).await.unwrap();
            inbox.drain().await.unwrap();
        });
        let _ = cut_short(std::future::pending::<()>()).await;
        task.abort();
    }
    cramped.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inbox_that_is_dropped_while_it_runs_leaves_no_transaction_open() {
    let cramped = Cramped::new().await;
    cramped.inbox.accept_all(records(100)).await.unwrap();
    for _ in 0..30 {
        let running = cramped.inbox.start().await.unwrap();
        let _ = cut_short(std::future::pending::<()>()).await;
        drop(running);
    }
    cramped.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_shutdown_leaves_no_transaction_open() {
    let cramped = Cramped::new().await;
    cramped.inbox.accept_all(records(100)).await.unwrap();
    for _ in 0..30 {
        let running = cramped.inbox.start().await.unwrap();
        let _ = cut_short(running.shutdown(Duration::from_secs(1))).await;
    }
    cramped.assert_well().await;
}

// A serverless function that times out does not count as a crash of its messages.
#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_round_releases_its_claims_and_consumes_no_retry() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let noting = runs.clone();
    let hanging = handler(key("stock"), move |message: Message<Raw>| {
        noting.note(&message);
        async move { if message.attempt() <= 5 { std::future::pending().await } else { Ok::<(), Failure>(()) } }
    });
    // The lease is so long that no claim expires during the test.
    let limits = quick().lease(Duration::from_secs(600));
    let inbox = scene.inbox().limits(limits).subscribe("orders", hanging).build().unwrap();
    inbox.accept(record("a")).await.unwrap();

    for dropped in 1..=5 {
        tokio::select! {
            _ = inbox.drain() => panic!("it hangs"),
            () = runs.reached(dropped) => {}
        }
        scene.until("SELECT (locked_until IS NULL)::int::bigint FROM inbox_delivery").await;
    }

    assert_eq!(inbox.drain().await.unwrap(), 1);
    let counters = "SELECT concat_ws(' ', state, errors, crashes) FROM inbox_status";
    assert_eq!(scene.database.query_texts(counters).await, ["done 0 0"]);
}

// A statement that has no caller any more must not keep its locks or its connection on the server.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_whose_handler_timed_out_is_ended_on_the_server() {
    async fn sleeping(_: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::execute(conn, "SELECT pg_sleep(600)").await?;
        Ok(())
    }
    let scene = Scene::new().await;
    let sleeping = tx_handler(key("stock"), sleeping).timeout(Duration::from_millis(300)).retry(RetryPolicy::never());
    let inbox = scene.inbox().subscribe("orders", sleeping).build().unwrap();
    let _running = inbox.start().await.unwrap();

    inbox.accept(record("a")).await.unwrap();

    scene.settled().await;
    assert_eq!(scene.states().await, ["a stock poisoned"]);
    assert_no_statement_sleeps(&scene).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_whose_handler_was_stopped_is_ended_on_the_server() {
    async fn sleeping(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        if message.attempt() == 1 {
            effect::execute(conn, "SELECT pg_sleep(600)").await?;
        }
        Ok(())
    }
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", tx_handler(key("stock"), sleeping)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();
    until_a_statement_sleeps(&scene).await;

    running.shutdown(Duration::ZERO).await.unwrap();

    assert_no_statement_sleeps(&scene).await;
    assert_eq!(inbox.drain().await.unwrap(), 1);
}

#[test]
fn a_statement_whose_runtime_has_ended_is_ended_on_the_server() {
    async fn sleeping(_: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::execute(conn, "SELECT pg_sleep(600)").await?;
        Ok(())
    }
    let [outside, inside] = [(); 2].map(|()| tokio::runtime::Runtime::new().unwrap());
    let scene = outside.block_on(Scene::new());
    let inbox = scene.inbox().subscribe("orders", tx_handler(key("stock"), sleeping)).build().unwrap();
    let _running = inside.block_on(async {
        inbox.accept(record("a")).await.unwrap();
        inbox.start().await.unwrap()
    });
    outside.block_on(until_a_statement_sleeps(&scene));

    drop(inside);

    outside.block_on(assert_no_statement_sleeps(&scene));
}

async fn until_a_statement_sleeps(scene: &Scene) {
    scene.until(&format!("SELECT (count(*) > 0)::int::bigint {}", sleepers(scene))).await;
}

/// Long before the statement timeout, which would also end it.
async fn assert_no_statement_sleeps(scene: &Scene) {
    let nobody = format!("SELECT (count(*) = 0)::int::bigint {}", sleepers(scene));
    let ended = tokio::time::timeout(Duration::from_secs(20), scene.until(&nobody)).await;
    ended.expect("the statement runs on");
}

fn sleepers(scene: &Scene) -> String {
    format!("FROM pg_stat_activity WHERE datname = '{}' AND wait_event = 'PgSleep'", scene.database.name())
}

// A timeout cannot stop blocking code. Here the handler blocks both threads of the runtime for longer than two leases.
#[test]
fn a_handler_that_blocks_every_thread_keeps_its_claim_and_is_reported() {
    let outside = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let blocked = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let limits = || quick().lease(Duration::from_secs(3));
    let blocking = |runs: &Runs| {
        let runs = runs.clone();
        handler(key("blocking.threads"), move |message: Message<Raw>| {
            runs.note(&message);
            async {
                std::thread::sleep(Duration::from_secs(7));
                Ok::<(), Failure>(())
            }
        })
        .concurrency(4)
        .timeout(Duration::from_millis(200))
    };
    let events = Events::capture();
    let runs = Runs::new();
    let scene = outside.block_on(Scene::new());
    let inbox = scene.inbox().limits(limits()).subscribe("orders", blocking(&runs)).build().unwrap();
    let _running = blocked.block_on(async {
        inbox.accept_all(records(4)).await.unwrap();
        inbox.start().await.unwrap()
    });

    // Another processor is ready to reclaim expired claims.
    outside.block_on(async {
        runs.reached(2).await;
        let store = Store::connect(&scene.database.url()).await.unwrap();
        let other = Inbox::builder(store).limits(limits()).subscribe("orders", blocking(&runs)).build().unwrap();
        let _other = other.start().await.unwrap();
        scene.settled().await;
        events
            .wait_for(|event| {
                event.has("handler", "blocking.threads") && event.message.starts_with("handler overran its timeout")
            })
            .await;
    });

    // Each was blocked past its timeout but did return: its result counts.
    assert_eq!(runs.count(), 4);
    assert_eq!(outside.block_on(scene.count_done_at_first()), 4);
}
