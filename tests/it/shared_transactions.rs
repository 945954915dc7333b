//! Deliveries that share a transaction on PostgreSQL: a killed process, lost replies, a lost claim, a lost session. On
//! SQLite only the killed process can happen while a handler holds the writer.

use std::time::Duration;

use tokio::sync::watch;
use wharf::{Failure, Inbox, Limits, Message, Raw, Registration, RetryPolicy, tx_handler, with_state};

use crate::effect::{self, Connection, effects};
use crate::scene::{Runs, Scene, key, quick, records, within};
use crate::worker::{Worker, accept, order};
use support::events::{Event, Events};
use support::proxy::Fault;

const SHARED: usize = 16;
/// The number of runs after which the handler is held until enough deliveries wait to share a transaction.
const KNOWN_AFTER: usize = 40;
const WAITING: &str = "SELECT (count(*) > 24)::int::bigint FROM inbox_delivery WHERE locked_until IS NOT NULL";

/// Lets the first `KNOWN_AFTER` runs pass and holds the next one until it is opened.
#[derive(Clone)]
struct Gate(watch::Sender<bool>);

impl Gate {
    fn new() -> Self {
        Self(watch::Sender::new(false))
    }

    /// A transactional handler that writes, waits at the gate, and returns the result of `then`.
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

    /// Opens when a run is held and enough deliveries are claimed to fill the next shared transactions.
    async fn open_when_others_wait(&self, scene: &Scene, runs: &Runs) {
        until_held(scene, runs).await;
        self.0.send_replace(true);
    }
}

/// Waits until a run is held at the gate and others wait for it. Enough deliveries can be claimed before the first run
/// is held, so the claims alone do not show that the handler has stopped.
async fn until_held(scene: &Scene, runs: &Runs) {
    runs.reached(KNOWN_AFTER + 1).await;
    scene.until(WAITING).await;
}

/// Waiting deliveries are not released while the test holds the handler.
fn patient() -> Limits {
    quick().claim_ahead(Duration::from_secs(10)).backoff_max(Duration::from_millis(200))
}

async fn scene() -> Scene {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    scene
}

/// Accepts 100 messages and runs them until all are settled; the gate is opened when enough of them wait.
async fn run_all(scene: &Scene, runs: &Runs, gate: &Gate, handler: Registration<wharf::Postgres>) {
    let inbox = scene.inbox().limits(patient()).subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(100)).await.unwrap();
    let running = inbox.start().await.unwrap();
    gate.open_when_others_wait(scene, runs).await;
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

/// Every message is done, consumed no retry, and has one effect.
async fn assert_one_effect_each(scene: &Scene, messages: usize) {
    scene.settled().await;
    assert_eq!(scene.count_done_uncharged().await, i64::try_from(messages).unwrap());
    let expected: Vec<String> = (0..messages).map(|number| format!("m{number:06}")).collect();
    assert_eq!(effects(scene).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_deliveries_are_committed_together() {
    let scene = scene().await;
    let (runs, gate) = (Runs::new(), Gate::new());
    scene.database.execute("ALTER TABLE effect ADD tx text DEFAULT pg_current_xact_id()::text").await;
    let inbox = scene.inbox().limits(patient()).subscribe("orders", gate.handler(&runs, |_| Ok(()))).build().unwrap();
    inbox.accept_all(records(100)).await.unwrap();
    let running = inbox.start().await.unwrap();
    gate.open_when_others_wait(&scene, &runs).await;
    assert_one_effect_each(&scene, 100).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let most = "SELECT max(number) FROM (SELECT count(*) AS number FROM effect GROUP BY tx) t";
    assert_eq!(scene.database.query_one_i64(most).await, i64::try_from(SHARED).unwrap());
    assert_eq!(runs.count(), 100, "each ran once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shared_commit_without_a_reply_is_recognized_and_a_lost_one_is_repeated() {
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
        until_held(&scene, &runs).await;
        // First the transaction that is held, then a full one.
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
async fn a_lost_claim_of_one_delivery_rolls_back_all_and_the_others_run_again() {
    let scene = scene().await;
    let (runs, gate) = (Runs::new(), Gate::new());
    let inbox = scene.inbox().limits(patient()).subscribe("orders", gate.handler(&runs, |_| Ok(()))).build().unwrap();
    inbox.accept_all(records(100)).await.unwrap();
    let running = inbox.start().await.unwrap();
    until_held(&scene, &runs).await;
    // Another process has claimed one of the waiting deliveries, as after an expired lease, and has completed it.
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
async fn a_lost_session_rolls_back_all_and_consumes_no_retry() {
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
    gate.open_when_others_wait(&scene, &runs).await;
    assert_one_effect_each(&scene, 100).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert!(runs.count() > 100, "{} runs", runs.count());
}

// A delivery that is set apart runs alone until its next outcome. An outage sets apart only deliveries that ran in the
// lost transaction.
#[tokio::test(flavor = "multi_thread")]
async fn an_outage_sets_apart_only_what_was_in_the_lost_transaction() {
    let events = Events::capture();
    let scene = scene().await;
    let note = "CREATE TABLE apart (message_seq bigint);
                CREATE FUNCTION note_apart() RETURNS trigger LANGUAGE plpgsql AS $$
                BEGIN
                    INSERT INTO apart VALUES (NEW.message_seq);
                    RETURN NULL;
                END $$;
                CREATE TRIGGER note_apart AFTER UPDATE ON inbox_delivery FOR EACH ROW
                WHEN (NEW.store_errors > 0) EXECUTE FUNCTION note_apart()";
    scene.database.execute(note).await;
    let (proxy, store) = scene.store_behind_a_proxy().await;
    let (runs, gate) = (Runs::new(), Gate::new());
    let handler = gate.handler(&runs, |_| Ok(()));
    let inbox = Inbox::builder(store).limits(patient()).subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(100)).await.unwrap();
    let running = inbox.start().await.unwrap();
    until_held(&scene, &runs).await;
    let committed = effects(&scene).await;
    proxy.refuse().await;
    proxy.reset_all().await;

    gate.0.send_replace(true);
    // If COMMIT was sent before the client noticed the reset, the row is read back until the server answers.
    let is_outage = |event: &Event| event.has("operation", "transact") || event.has("operation", "read back");
    events.wait_for_count(10, |event| event.message == "store error" && is_outage(event)).await;
    // The lost transaction contains what ran and is not committed: the delivery that is held, those before it, and the
    // one after it if it was called before the client noticed the reset. No other can begin while the server is away.
    let in_transaction: Vec<String> = runs.ids().into_iter().filter(|id| !committed.contains(id)).collect();
    assert!((1..=SHARED).contains(&in_transaction.len()), "{in_transaction:?}");
    proxy.pass().await;

    assert_one_effect_each(&scene, 100).await;
    let apart = "SELECT DISTINCT message_id FROM apart JOIN inbox_message ON seq = message_seq";
    for id in scene.database.query_texts(apart).await {
        assert!(
            in_transaction.contains(&id),
            "{id} was set apart, and the lost transaction contained {in_transaction:?}"
        );
    }
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// An error that a handler ignores aborts the whole transaction. Only the delivery of that handler consumes a retry.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_a_handler_ignores_fails_only_its_own_delivery() {
    async fn careless(state: (Runs, Gate), message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        let (runs, gate) = state;
        runs.note(&message);
        // Returns another failure than retry, whatever the database reports.
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
    let handler = tx_handler(key("stock"), with_state((runs.clone(), gate.clone()), careless));
    let handler = handler.concurrency(1).share_transaction(SHARED).retry(RetryPolicy::never());
    run_all(&scene, &runs, &gate, handler).await;

    let poisoned = "SELECT concat_ws('|', message_id, reason) FROM inbox_poisoned";
    assert_eq!(scene.database.query_texts(poisoned).await, ["m000050|retries exhausted"]);
    assert_eq!((scene.count_done_uncharged().await, effects(&scene).await.len()), (99, 99));
}

// The handler after it is called before its savepoint is known to exist: without a transaction it must not write.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_ends_the_shared_transaction_fails_only_its_own_delivery() {
    type State = (Runs, Gate, &'static [&'static str]);
    async fn ending(state: State, message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        let (runs, gate, statements) = state;
        runs.note(&message);
        effect::write(conn, message.id()).await?;
        if runs.count() > KNOWN_AFTER {
            let _ = gate.0.subscribe().wait_for(|is_open| *is_open).await;
        }
        for statement in statements.iter().filter(|_| message.id() == "m000050") {
            effect::execute(conn, statement).await?;
        }
        Ok(())
    }
    let endings: [&[&str]; 3] = [&["ROLLBACK"], &["ROLLBACK", "BEGIN"], &["ROLLBACK", "BEGIN READ WRITE"]];
    for statements in endings {
        let scene = scene().await;
        let (runs, gate) = (Runs::new(), Gate::new());
        let handler = tx_handler(key("stock"), with_state((runs.clone(), gate.clone(), statements), ending));
        let handler = handler.concurrency(1).share_transaction(SHARED).retry(RetryPolicy::never());
        run_all(&scene, &runs, &gate, handler).await;

        let poisoned = "SELECT message_id FROM inbox_poisoned";
        assert_eq!(scene.database.query_texts(poisoned).await, ["m000050"], "after {statements:?}");
        let others = (0..100).filter(|number| *number != 50).map(|number| format!("m{number:06}"));
        assert_eq!(effects(&scene).await, others.collect::<Vec<_>>(), "after {statements:?}");
        assert_eq!(scene.count_done_uncharged().await, 99, "after {statements:?}");
    }
}

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
    // The deliveries before it are quick, so that it is not the first of its transaction.
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
