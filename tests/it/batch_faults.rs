//! Batches on PostgreSQL when the server, the connection or a claim fails while they run: a COMMIT without a reply, a
//! process killed during COMMIT or before its outcomes are written, a session that ends, a claim that another process
//! has. Each message has one effect, and no retry is consumed.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use wharf::batch::tx_batch_handler;
use wharf::store::PostgresOptions;
use wharf::{Failure, Inbox, InboxBuilder, Message, Postgres, Raw, RetryPolicy, Store, with_state};

use crate::effect::{self, Connection, effects};
use crate::scene::{Runs, Scene, key, quick, records};
use crate::worker::{Worker, accept};
use support::proxy::{Fault, Proxy};

const MESSAGES: usize = 20;
const HOUR: Duration = Duration::from_secs(3_600);

/// A text that only the statement that settles deliveries as done contains.
const SETTLE_DONE: &str = "SET finished_at = now(), status = 2";

async fn scene() -> Scene {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    scene
}

/// Every message is done, consumed no retry, and has one effect.
async fn assert_one_effect_each(scene: &Scene) {
    scene.settled().await;
    assert_eq!(scene.count_done_uncharged().await, i64::try_from(MESSAGES).unwrap());
    let expected: Vec<String> = (0..MESSAGES).map(|number| format!("m{number:06}")).collect();
    assert_eq!(effects(scene).await, expected);
}

/// The state of a test's handler.
#[derive(Clone)]
struct State {
    runs: Runs,
    /// The first call waits for it after its writes.
    gate: watch::Sender<bool>,
    begun: Arc<tokio::sync::Notify>,
}

impl State {
    fn open() -> Self {
        Self { runs: Runs::new(), gate: watch::Sender::new(true), begun: Arc::default() }
    }

    /// An inbox whose batches hold all messages.
    fn inbox(&self, inbox: InboxBuilder<Postgres>) -> Inbox<Postgres> {
        let handler = tx_batch_handler(key("stock"), with_state(self.clone(), write)).batch(MESSAGES, HOUR);
        let limits = quick().backoff_max(Duration::from_millis(200));
        inbox.limits(limits).subscribe("orders", handler.concurrency(1).retry(RetryPolicy::never())).build().unwrap()
    }
}

async fn write(state: State, messages: Vec<Message<Raw>>, conn: &mut Connection) -> Result<(), Failure> {
    for message in &messages {
        state.runs.note(message);
        effect::write(conn, message.id()).await?;
    }
    state.begun.notify_one();
    let _ = state.gate.subscribe().wait_for(|is_open| *is_open).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_without_a_reply_is_recognized_and_a_lost_one_is_repeated() {
    for fault in [Fault::LoseReply, Fault::LoseRequest, Fault::Hang] {
        let scene = scene().await;
        let proxy = Proxy::start_for(&scene.database.url()).await;
        let timeout = Duration::from_secs(2);
        let options = PostgresOptions::default().connect_timeout(timeout).statement_timeout(timeout);
        let store = Store::connect_with(&proxy.url(&scene.database.url()), options).await.unwrap();
        let state = State::open();
        let inbox = state.inbox(Inbox::builder(store));
        inbox.accept_all(records(MESSAGES)).await.unwrap();
        let lost = proxy.on_next_commit(fault);
        let running = inbox.start().await.unwrap();
        lost.fired().await;

        assert_one_effect_each(&scene).await;

        match fault {
            Fault::LoseReply => assert_eq!(state.runs.count(), MESSAGES, "what was committed does not run again"),
            Fault::LoseRequest | Fault::Hang => assert_eq!(state.runs.count(), 2 * MESSAGES, "halves were called"),
        }
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_claim_of_one_message_rolls_back_the_call_and_it_is_repeated_without_it() {
    let scene = scene().await;
    let state = State { gate: watch::Sender::new(false), ..State::open() };
    let inbox = state.inbox(scene.inbox());
    inbox.accept_all(records(MESSAGES)).await.unwrap();
    let running = inbox.start().await.unwrap();
    state.begun.notified().await;
    // Another process has claimed one of them, as after an expired lease, and has completed it.
    let stolen = "UPDATE inbox_delivery SET attempts = attempts + 1, locked_until = NULL, locked_by = NULL, finished_at = now(), status = 2
                  WHERE message_seq = (SELECT seq FROM inbox_message WHERE message_id = 'm000007')";
    scene.database.execute(stolen).await;
    state.gate.send_replace(true);
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let expected: Vec<String> =
        (0..MESSAGES).filter(|number| *number != 7).map(|number| format!("m{number:06}")).collect();
    assert_eq!(effects(&scene).await, expected, "the other process had the only right to that effect");
    assert_eq!(scene.count_done_uncharged().await, i64::try_from(MESSAGES).unwrap());
    assert_eq!(state.runs.count(), 2 * MESSAGES - 1, "one more call, with the others");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_session_rolls_back_the_call_and_consumes_no_retry() {
    let scene = scene().await;
    let state = State { gate: watch::Sender::new(false), ..State::open() };
    let inbox = state.inbox(scene.inbox());
    inbox.accept_all(records(MESSAGES)).await.unwrap();
    let running = inbox.start().await.unwrap();
    state.begun.notified().await;
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = current_database()";
    scene.database.execute(end).await;
    state.gate.send_replace(true);

    assert_one_effect_each(&scene).await;

    assert!(state.runs.count() > MESSAGES);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

/// Kills a worker when the fault is applied, and lets another worker do the rest.
async fn killed_at(is_transactional: bool, statement: &str, fault: Fault) -> Scene {
    let scene = Scene::new().await;
    let direct = Worker { is_transactional, batch: MESSAGES, batch_wait: HOUR, ..Worker::on(&scene).await };
    accept(&scene, &["stock"], records(MESSAGES)).await;
    let proxy = Proxy::start_for(&scene.database.url()).await;
    let struck = proxy.on_next_statement(statement, fault);
    let child = Worker { url: proxy.url(&scene.database.url()), ..direct.clone() }.spawn();
    struck.fired().await;
    child.kill9().await;

    let _second = direct.spawn();

    scene.settled().await;
    assert_eq!(scene.count_done_uncharged().await, i64::try_from(MESSAGES).unwrap());
    scene
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_between_handler_and_settlement_leaves_no_message_unhandled() {
    let scene = killed_at(false, SETTLE_DONE, Fault::Hang).await;
    assert_eq!(scene.count("run").await, i64::try_from(2 * MESSAGES).unwrap(), "at least once: each ran again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_in_its_commit_leaves_one_effect_each() {
    for fault in [Fault::Hang, Fault::LoseReply] {
        let scene = killed_at(true, "inbox_settle_in_transaction(", fault).await;
        assert_one_effect_each(&scene).await;
    }
}
