//! Deliveries that share a transaction on PostgreSQL: a killed process, lost answers, a lost claim, a lost session. SQLite has none of these while a
//! handler has its writer, except the killed process.

use std::time::Duration;

use tokio::sync::watch;
use wharf::{Failure, Inbox, Limits, Message, Raw, Registration, RetryPolicy, tx_handler, with_state};

use crate::effect::{self, Connection, effects};
use crate::scene::{Runs, Scene, key, quick, records, within};
use crate::worker::{Worker, accept, order};
use support::proxy::Fault;

const SHARED: usize = 16;
/// Runs after which the handler is held until enough wait behind it to share a transaction.
const KNOWN_AFTER: usize = 40;
const WAITING: &str = "SELECT (count(*) > 24)::int::bigint FROM inbox_delivery WHERE locked_until IS NOT NULL";

/// Lets the first `KNOWN_AFTER` runs pass and holds the next one until it is opened.
#[derive(Clone)]
struct Gate(watch::Sender<bool>);

impl Gate {
    fn new() -> Self {
        Self(watch::Sender::new(false))
    }

    /// A transactional handler that writes, waits at the gate, and ends as `then` does.
    fn handler<F>(&self, runs: &Runs, then: F) -> Registration<wharf::Postgres>
    where
        F: Fn(&Message<Raw>) -> Result<(), Failure> + Clone + Send + Sync + 'static,
    {
        let (gate, counted) = (self.0.clone(), runs.clone());
        let handler = effect::writing(runs, "stock", move |message| {
            let (mut opened, counted, then) = (gate.subscribe(), counted.clone(), then.clone());
            Box::pin(async move {
                if counted.count() > KNOWN_AFTER {
                    let _ = opened.wait_for(|is_open| *is_open).await;
                }
                then(&message)
            })
        });
        handler.concurrency(1).share_transaction(SHARED).retry(RetryPolicy::never())
    }

    /// Opens when so many deliveries are claimed that the next transactions are shared by as many as can be.
    async fn open_when_others_wait(&self, scene: &Scene) {
        scene.until(WAITING).await;
        self.0.send_replace(true);
    }
}

/// What waits is not given back while the test holds the handler.
fn patient() -> Limits {
    quick().claim_ahead(Duration::from_secs(10)).backoff_max(Duration::from_millis(200))
}

async fn scene() -> Scene {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    scene
}

/// Every message is done, was charged nothing, and has one effect.
async fn assert_one_effect_each(scene: &Scene, messages: usize) {
    scene.settled().await;
    assert_eq!(scene.count_done_uncharged().await, i64::try_from(messages).unwrap());
    let expected: Vec<String> = (0..messages).map(|number| format!("m{number:06}")).collect();
    assert_eq!(effects(scene).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_is_committed_together() {
    let scene = scene().await;
    let (runs, gate) = (Runs::new(), Gate::new());
    scene.database.execute("ALTER TABLE effect ADD tx text DEFAULT pg_current_xact_id()::text").await;
    let inbox = scene.inbox().limits(patient()).subscribe("orders", gate.handler(&runs, |_| Ok(()))).build().unwrap();
    inbox.accept_all(records(100)).await.unwrap();
    let running = inbox.start().await.unwrap();
    gate.open_when_others_wait(&scene).await;
    assert_one_effect_each(&scene, 100).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let most = "SELECT max(number) FROM (SELECT count(*) AS number FROM effect GROUP BY tx) t";
    assert_eq!(scene.database.query_one_i64(most).await, i64::try_from(SHARED).unwrap());
    assert_eq!(runs.count(), 100, "each ran once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_whose_answer_is_lost_is_recognised_and_one_that_never_arrived_is_run_again() {
    for fault in [Fault::LoseReply, Fault::LoseRequest, Fault::Hang] {
        let scene = scene().await;
        let proxy = support::proxy::Proxy::start_for(&scene.database.url()).await;
        let timeout = Duration::from_secs(2);
        let options = wharf::store::PostgresOptions::default().connect_timeout(timeout).statement_timeout(timeout);
        let store = wharf::Store::connect_with(&proxy.url(&scene.database.url()), options).await.unwrap();
        let (runs, gate) = (Runs::new(), Gate::new());
        let handler = gate.handler(&runs, |_| Ok(()));
        let inbox = Inbox::builder(store).limits(patient()).subscribe("orders", handler).build().unwrap();
        inbox.accept_all(records(100)).await.unwrap();
        let running = inbox.start().await.unwrap();
        scene.until(WAITING).await;
        // The transaction that is held, then one that is full.
        let faults = [proxy.on_next_commit(fault), proxy.on_next_commit(fault)];
        gate.0.send_replace(true);
        for fault in faults {
            fault.fired().await;
        }
        assert_one_effect_each(&scene, 100).await;
        match fault {
            Fault::LoseReply => assert_eq!(runs.count(), 100, "what was committed does not run again"),
            Fault::LoseRequest | Fault::Hang => assert!(runs.count() > 100, "what was not committed runs again"),
        }
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_claim_of_one_undoes_all_and_the_others_run_again() {
    let scene = scene().await;
    let (runs, gate) = (Runs::new(), Gate::new());
    let inbox = scene.inbox().limits(patient()).subscribe("orders", gate.handler(&runs, |_| Ok(()))).build().unwrap();
    inbox.accept_all(records(100)).await.unwrap();
    let running = inbox.start().await.unwrap();
    scene.until(WAITING).await;
    // Another process has claimed one of those that wait, as after a lease that ran out, and has done it.
    let stolen = "UPDATE inbox_delivery SET attempts = attempts + 1, locked_until = NULL, locked_by = NULL, finished_at = now(), status = 2
                  WHERE message_seq = (SELECT seq FROM inbox_message WHERE message_id = 'm000050')";
    scene.database.execute(stolen).await;
    gate.0.send_replace(true);
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let expected: Vec<String> = (0..100).filter(|number| *number != 50).map(|number| format!("m{number:06}")).collect();
    assert_eq!(effects(&scene).await, expected, "the other process had the only right to that effect");
    assert_eq!(scene.count_done_uncharged().await, 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_is_lost_undoes_all_and_nothing_is_charged() {
    async fn ending(state: (Runs, Gate, String), message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        let (runs, gate, url) = state;
        runs.note(&message);
        effect::write(conn, message.id()).await?;
        if runs.count() > KNOWN_AFTER {
            let _ = gate.0.subscribe().wait_for(|is_open| *is_open).await;
        }
        let is_first = runs.ids().iter().filter(|id| *id == message.id()).count() == 1;
        if message.id() == "m000050" && is_first {
            let other = support::postgres::connect(&url).await;
            let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = current_database()";
            other.batch_execute(end).await?;
        }
        Ok(())
    }
    let scene = scene().await;
    let (runs, gate) = (Runs::new(), Gate::new());
    let state = (runs.clone(), gate.clone(), scene.database.url());
    let handler = tx_handler(key("stock"), with_state(state, ending)).concurrency(1).share_transaction(SHARED);
    let inbox = scene.inbox().limits(patient()).subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(100)).await.unwrap();
    let running = inbox.start().await.unwrap();
    gate.open_when_others_wait(&scene).await;
    assert_one_effect_each(&scene, 100).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert!(runs.count() > 100, "{} runs", runs.count());
}

// An error that a handler swallows takes the whole transaction away. It is held against that handler's delivery alone.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_one_swallows_is_its_own_failure_and_of_no_other() {
    async fn careless(state: (Runs, Gate), message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        let (runs, gate) = state;
        runs.note(&message);
        // Another answer than retry, to whatever the database says.
        effect::write(conn, message.id()).await.map_err(|_| Failure::poison("the database said no"))?;
        if runs.count() > KNOWN_AFTER {
            let _ = gate.0.subscribe().wait_for(|is_open| *is_open).await;
        }
        if message.id() == "m000050" {
            let _ = effect::execute(conn, "SELECT 1 / 0").await;
        }
        Ok(())
    }
    let scene = scene().await;
    let (runs, gate) = (Runs::new(), Gate::new());
    let handler = tx_handler(key("stock"), with_state((runs, gate.clone()), careless));
    let handler = handler.concurrency(1).share_transaction(SHARED).retry(RetryPolicy::never());
    let inbox = scene.inbox().limits(patient()).subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(100)).await.unwrap();
    let running = inbox.start().await.unwrap();
    gate.open_when_others_wait(&scene).await;
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let poisoned = "SELECT concat_ws('|', message_id, reason) FROM inbox_poisoned";
    assert_eq!(scene.database.query_texts(poisoned).await, ["m000050|retries exhausted"]);
    assert_eq!((scene.count_done_uncharged().await, effects(&scene).await.len()), (99, 99));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_has_set_does_not_reach_the_next() {
    async fn setting(_: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        let seen = "INSERT INTO effect SELECT concat_ws(' ', current_setting('work_mem'), current_setting('TimeZone'), current_user)";
        effect::execute(conn, seen).await?;
        let set =
            ["SET work_mem = '7MB'", "SET LOCAL TIME ZONE 'Asia/Tokyo'", "SET ROLE pg_monitor", "SET LOCAL ROLE NONE"];
        for set in set {
            effect::execute(conn, set).await?;
        }
        Ok(())
    }
    let scene = scene().await;
    let handler = tx_handler(key("stock"), setting).concurrency(1).share_transaction(SHARED);
    let inbox = scene.inbox().limits(patient()).subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(100)).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 100);

    let mut seen = effects(&scene).await;
    assert_eq!(seen.len(), 100);
    seen.dedup();
    let fresh = "SELECT concat_ws(' ', current_setting('work_mem'), 'UTC', current_user)";
    assert_eq!(seen, scene.database.query_texts(fresh).await);
}

// A statement that hangs is cancelled with its handler, and the others go on in the same transaction.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_hangs_is_cancelled_with_its_handler() {
    async fn hanging(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::write(conn, message.id()).await?;
        if message.id() == "m000080" {
            effect::execute(conn, "SELECT pg_sleep(3600)").await?;
        }
        Ok(())
    }
    let scene = scene().await;
    let handler = tx_handler(key("stock"), hanging).concurrency(1).share_transaction(SHARED);
    let handler = handler.retry(RetryPolicy::never()).timeout(Duration::from_secs(4));
    let inbox = scene.inbox().limits(patient()).subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(100)).await.unwrap();
    let running = inbox.start().await.unwrap();
    within(scene.settled()).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    assert_eq!((scene.count_done_uncharged().await, effects(&scene).await.len()), (99, 99));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_killed_in_a_shared_transaction_leaves_one_effect_each() {
    let scene = Scene::new().await;
    let worker = Worker { is_transactional: true, concurrency: 1, share: SHARED, ..Worker::on(&scene).await };
    // Those before it are quick, so that it is not the first of its transaction.
    let mut orders = records(100);
    orders.insert(60, order("hanging", "hang once"));
    accept(&scene, &["stock"], orders).await;
    let first = worker.spawn();
    first.await_said("hanging").await;
    first.kill9().await;

    let _second = worker.spawn();

    scene.settled().await;
    assert_eq!(scene.count("inbox_status WHERE state = 'done'").await, 101);
    let effects = effects(&scene).await;
    let mut once = effects.clone();
    once.dedup();
    assert_eq!((effects.len(), once.len()), (101, 101));
}
