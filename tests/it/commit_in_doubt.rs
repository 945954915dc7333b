//! A COMMIT whose reply is lost: the database tells whether it took effect; it is never guessed. There is one effect,
//! and no retry is consumed.

use std::time::Duration;

use wharf::store::PostgresOptions;
use wharf::{Inbox, Postgres, Receipt, Running, Store};

use crate::effect::{self, effects};
use crate::scene::{Runs, Scene, quick, record, records};
use support::proxy::{Fault, Proxy};

const ROUNDS: usize = 50;

/// A text that only the statement that settles deliveries as done contains.
const SETTLE_DONE: &str = "SET finished_at = now(), status = 2";

/// An inbox with one transactional handler behind a proxy.
struct Stage {
    scene: Scene,
    proxy: Proxy,
    inbox: Inbox<Postgres>,
    running: Running<Postgres>,
    runs: Runs,
}

impl Stage {
    async fn set() -> Stage {
        let scene = Scene::new().await;
        effect::prepare(&scene).await;
        let (proxy, store) = scene.store_behind_a_proxy().await;
        let runs = Runs::new();
        let registration = effect::writing_only(&runs, "stock");
        let limits = quick().backoff_max(Duration::from_millis(200));
        let inbox = Inbox::builder(store).limits(limits).subscribe("orders", registration).build().unwrap();
        let running = inbox.start().await.unwrap();
        Stage { scene, proxy, inbox, running, runs }
    }

    /// Every message has one effect, is done, and consumed no retry.
    async fn assert_one_effect_each(&self, messages: usize) {
        self.scene.settled().await;
        let mut expected: Vec<String> = self.runs.ids();
        expected.sort();
        expected.dedup();
        assert_eq!(expected.len(), messages);
        assert_eq!(effects(&self.scene).await, expected);
        assert_eq!(self.scene.count_done_uncharged().await, i64::try_from(messages).unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_took_effect_is_recognized_when_its_reply_is_lost() {
    let stage = Stage::set().await;
    for (round, record) in records(ROUNDS).into_iter().enumerate() {
        let fault = stage.proxy.on_next_commit(Fault::LoseReply);
        stage.inbox.accept(record).await.unwrap();
        fault.fired().await;
        stage.scene.settled().await;
        assert_eq!(stage.runs.count(), round + 1);
    }
    stage.assert_one_effect_each(ROUNDS).await;
    stage.running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_whose_commit_never_arrived_runs_again() {
    let stage = Stage::set().await;
    for (round, record) in records(ROUNDS).into_iter().enumerate() {
        let fault = stage.proxy.on_next_commit(Fault::LoseRequest);
        stage.inbox.accept(record).await.unwrap();
        fault.fired().await;
        stage.scene.settled().await;
        assert_eq!(stage.runs.count(), 2 * (round + 1));
    }
    stage.assert_one_effect_each(ROUNDS).await;
    stage.running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn under_load_lost_commits_and_lost_replies_leave_one_effect_each() {
    let stage = Stage::set().await;
    let faults: Vec<_> = (0..ROUNDS)
        .map(|round| stage.proxy.on_next_commit(if round % 2 == 0 { Fault::LoseReply } else { Fault::LoseRequest }))
        .collect();

    stage.inbox.accept_all(records(400)).await.unwrap();

    for fault in faults {
        fault.fired().await;
    }
    stage.assert_one_effect_each(400).await;
    stage.running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_in_doubt_is_resolved_when_the_database_is_back() {
    for fault in [Fault::LoseReply, Fault::LoseRequest] {
        let stage = Stage::set().await;
        let lost_commit = stage.proxy.on_next_commit(fault);
        let lost_questions: Vec<_> =
            (0..5).map(|_| stage.proxy.on_next_statement("SKIP LOCKED) free", Fault::LoseRequest)).collect();

        stage.inbox.accept(record("a")).await.unwrap();

        lost_commit.fired().await;
        for question in lost_questions {
            question.fired().await;
        }
        stage.assert_one_effect_each(1).await;
        stage.running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}

// Each step of the transaction that is not the handler's own has a time limit.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_never_answers_begin_settle_or_commit_times_out() {
    for statement in ["BEGIN ISOLATION", "inbox_settle_one_in_transaction("] {
        let scene = Scene::new().await;
        effect::prepare(&scene).await;
        let proxy = Proxy::start_for(&scene.database.url()).await;
        let timeout = Duration::from_millis(1_500);
        let options = PostgresOptions::default().connect_timeout(timeout).statement_timeout(timeout);
        let store = Store::<Postgres>::connect_with(&proxy.url(&scene.database.url()), options).await.unwrap();
        let runs = Runs::new();
        let inbox = Inbox::builder(store).limits(quick()).subscribe("orders", effect::writing_only(&runs, "stock"));
        let inbox = inbox.build().unwrap();
        let running = inbox.start().await.unwrap();
        let hangs = proxy.on_next_statement(statement, Fault::Hang);

        inbox.accept(record("a")).await.unwrap();

        hangs.fired().await;
        scene.settled().await;
        assert_eq!(
            (effects(&scene).await, scene.count_done_uncharged().await),
            (vec!["a".to_owned()], 1),
            "{statement}"
        );
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}

// The claim is fenced in the same transaction, so a process in doubt cannot cause a second effect in another.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_in_doubt_for_longer_than_the_lease_leaves_one_effect() {
    for fault in [Fault::LoseReply, Fault::LoseRequest] {
        let stage = Stage::set().await;
        let runs = Runs::new();
        let there = stage.scene.inbox().subscribe("orders", effect::writing_only(&runs, "stock")).build().unwrap();
        let armed = stage.proxy.on_next_commit(fault);
        stage.inbox.accept(record("a")).await.unwrap();
        armed.fired().await;
        stage.proxy.refuse().await;
        stage.proxy.reset_all().await;

        let there = there.start().await.unwrap();
        stage.scene.settled().await;
        stage.proxy.pass().await;

        stage.running.shutdown(Duration::from_secs(5)).await.unwrap();
        there.shutdown(Duration::from_secs(5)).await.unwrap();
        assert_eq!(stage.scene.states().await, ["a stock done"]);
        assert_eq!(effects(&stage.scene).await, ["a"]);
    }
}

// The reply to a settlement can be lost as well.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_whose_settlement_reply_is_lost_does_not_run_again() {
    let scene = Scene::new().await;
    let (proxy, store) = scene.store_behind_a_proxy().await;
    let runs = Runs::new();
    let limits = quick().backoff_max(Duration::from_millis(50));
    let inbox = Inbox::builder(store).limits(limits).subscribe("orders", runs.handler("stock")).build().unwrap();
    let running = inbox.start().await.unwrap();
    for record in records(20) {
        let fault = proxy.on_next_statement(SETTLE_DONE, Fault::LoseReply);
        inbox.accept(record).await.unwrap();
        fault.fired().await;
    }
    scene.settled().await;
    assert_eq!(runs.count(), 20);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// The server replies to a statement before it commits it: an acknowledgement must wait for the commit, not only for the
// reply.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_whose_commit_fails_after_the_statement_reply_is_not_acknowledged() {
    let scene = Scene::new().await;
    let fail_twice_at_commit = "
        CREATE SEQUENCE tries;
        CREATE FUNCTION fail_twice() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF nextval('tries') <= 2 THEN RAISE EXCEPTION 'not yet' USING ERRCODE = 'query_canceled'; END IF;
            RETURN NULL;
        END $$;
        CREATE CONSTRAINT TRIGGER fail AFTER INSERT ON inbox_message DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION fail_twice()";
    scene.database.execute(fail_twice_at_commit).await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();

    let receipt = inbox.accept(record("a")).await.unwrap();

    assert_eq!(receipt, Receipt::Accepted { deliveries: 1 });
    assert_eq!(scene.states().await, ["a stock pending"]);
}
