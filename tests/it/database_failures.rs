//! A database that restarts, crashes, disconnects, rejects statements or hangs: nothing is lost, no retry is
//! consumed, and the process recovers by itself afterwards.

use std::time::Duration;

use wharf::batch::tx_batch_handler;
use wharf::store::PostgresOptions;
use wharf::{
    Failure, Inbox, Message, Postgres, Raw, Registration, RetryPolicy, Store, handler, tx_handler, with_state,
};

use crate::effect;
use crate::own_server::OwnServer;
use crate::scene::{Runs, Scene, key, quick, record, records, within};
use support::pgbouncer::PgBouncer;
use support::postgres::connect;

const MESSAGES: usize = 300;

/// A plain handler that takes a moment.
fn working(runs: &Runs, name: &'static str) -> Registration<Postgres> {
    let runs = runs.clone();
    handler(key(name), move |message: Message<Raw>| {
        runs.note(&message);
        async {
            tokio::time::sleep(Duration::from_millis(5)).await;
            Ok::<(), Failure>(())
        }
    })
}

/// Accepts and processes during the outage, and asserts that it has left no trace: everything is done, with one effect
/// each, and no retry was consumed for the handlers in `innocent`. `url` is how the inbox connects.
async fn rides_out(server: &OwnServer, url: &str, innocent: &[&str], outage: impl AsyncFnOnce(&OwnServer, &Runs)) {
    let (plain, transactional) = (Runs::new(), Runs::new());
    let patient_and_prompt =
        RetryPolicy::exponential().max_retries(10_000).delay_by(|_, _| Some(Duration::from_millis(100)));
    let limits = quick().backoff_max(Duration::from_millis(500));
    let inbox = Inbox::builder(Store::connect(url).await.unwrap())
        .limits(limits)
        .subscribe("orders", working(&plain, "plain"))
        .subscribe(
            "orders",
            effect::writing_for(&transactional, "transactional", Duration::from_millis(5)).retry(patient_and_prompt),
        )
        .build()
        .unwrap();
    let running = inbox.start().await.unwrap();
    let accepting = tokio::spawn(accept_in_small_batches(inbox.clone()));
    plain.reached(30).await;
    transactional.reached(30).await;

    outage(server, &plain).await;

    within(accepting).await.unwrap();
    server.settled().await;
    server.assert_done_and_not_charged(2 * i64::try_from(MESSAGES).unwrap(), innocent).await;
    let once = "SELECT count(*) FROM (SELECT message_id FROM effect GROUP BY 1 HAVING count(*) = 1) effects";
    assert_eq!(server.one(once).await, i64::try_from(MESSAGES).unwrap());
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

/// Retries failed accepts, as the clients of a service do.
async fn accept_in_small_batches(inbox: Inbox<Postgres>) {
    for batch in records(MESSAGES).chunks(3) {
        while let Err(error) = inbox.accept_all(batch.to_vec()).await {
            assert!(error.is_transient(), "{error}");
        }
    }
}

/// Waits until the server has logged this text this many times.
async fn until_logged(server: &OwnServer, text: &str, times: usize) {
    within(async {
        while server.cluster.log().matches(text).count() < times {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

/// The handlers that must not consume a retry while the database is unavailable.
const NOBODY_TO_BLAME: &[&str] = &["plain", "transactional"];
/// If the server rejects a handler's own statement, that is a failure of the handler, which is retried like any other.
const ONLY_PLAIN: &[&str] = &["plain"];

async fn ride_out(innocent: &[&str], outage: impl AsyncFnOnce(&OwnServer, &Runs)) {
    let server = OwnServer::start().await;
    rides_out(&server, &server.cluster.url("postgres"), innocent, outage).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_leaves_no_trace() {
    ride_out(NOBODY_TO_BLAME, async |server, _| server.cluster.restart().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_immediate_stop_leaves_no_trace() {
    ride_out(NOBODY_TO_BLAME, async |server, _| {
        server.cluster.stop_immediate().await;
        server.cluster.start_again().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_leaves_no_trace() {
    ride_out(NOBODY_TO_BLAME, async |server, _| {
        server.cluster.kill().await;
        server.cluster.start_again().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_ended_sessions_leaves_no_trace() {
    ride_out(NOBODY_TO_BLAME, async |server, runs| {
        for _ in 0..8 {
            let end_all = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'wharf'";
            server.cluster.execute(end_all).await;
            let now = runs.count();
            runs.reached((now + 10).min(MESSAGES)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_read_only_for_a_while_leaves_no_trace() {
    ride_out(ONLY_PLAIN, async |server, _| {
        server.cluster.execute("ALTER SYSTEM SET default_transaction_read_only = on").await;
        server.cluster.reload().await;
        until_logged(server, "in a read-only transaction", 40).await;
        server.cluster.execute("ALTER SYSTEM RESET default_transaction_read_only").await;
        server.cluster.reload().await;
    })
    .await;
}

// Through PgBouncer, which does not forward our own statement_timeout to the server.
#[tokio::test(flavor = "multi_thread")]
async fn a_tiny_statement_timeout_for_a_while_leaves_no_trace() {
    let server = OwnServer::start().await;
    let bouncer = PgBouncer::start_with_pool(&server.cluster.url("postgres"), 5).await;
    rides_out(&server, &bouncer.url("postgres"), ONLY_PLAIN, async |server, _| {
        server.cluster.execute("ALTER SYSTEM SET statement_timeout = '1ms'").await;
        server.cluster.reload().await;
        until_logged(server, "canceling statement due to statement timeout", 20).await;
        let operator = connect(&format!("{}?options=-c%20statement_timeout%3D0", server.cluster.url("postgres"))).await;
        operator.batch_execute("ALTER SYSTEM RESET statement_timeout").await.unwrap();
        server.cluster.reload().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_lock_for_longer_than_a_lease_leaves_no_trace() {
    ride_out(NOBODY_TO_BLAME, async |server, _| {
        let somebody = connect(&server.cluster.url("postgres")).await;
        somebody.batch_execute("BEGIN; LOCK TABLE inbox_delivery IN ACCESS EXCLUSIVE MODE").await.unwrap();
        // The outage itself.
        tokio::time::sleep(quick().lease + Duration::from_secs(1)).await;
        somebody.batch_execute("COMMIT").await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_does_not_keep_other_deliveries_from_being_settled() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let gate = tokio::sync::watch::Sender::new(false);
    let inbox = scene.inbox().subscribe("orders", runs.gated("stock", &gate).concurrency(50)).build().unwrap();
    inbox.accept_all(records(50)).await.unwrap();
    let _running = inbox.start().await.unwrap();
    runs.reached(50).await;
    let somebody = scene.database.client().await;
    let held = "BEGIN; SELECT FROM inbox_delivery WHERE message_seq = (SELECT min(message_seq) FROM inbox_delivery) FOR UPDATE";
    somebody.batch_execute(held).await.unwrap();

    gate.send_replace(true);

    scene.until("SELECT (count(finished_at) = 49)::int::bigint FROM inbox_delivery").await;
    assert_eq!(scene.count_done_at_first().await, 49);
    somebody.batch_execute("COMMIT").await.unwrap();
    scene.settled().await;
    assert_eq!(scene.count_done_uncharged().await, 50);
}

// Each attempt to write the locked row takes two seconds. Later outcomes must not wait for it: few are allowed to wait
// unwritten, so these would take ten times as long as the test waits.
#[tokio::test(flavor = "multi_thread")]
async fn outcomes_of_the_same_batch_and_later_ones_do_not_wait_for_rows_that_stay_locked() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let gate = tokio::sync::watch::Sender::new(false);
    let inbox = scene
        .inbox()
        .subscribe("returns", runs.gated("gated", &gate))
        .subscribe("orders", working(&runs, "stock").concurrency(16))
        .build()
        .unwrap();
    let _running = inbox.start().await.unwrap();
    inbox.accept_all((1..=3).map(|n| wharf::Record::new("returns").with_id(format!("locked-{n}")))).await.unwrap();
    runs.reached(3).await;
    let somebody = scene.database.client().await;
    somebody.batch_execute("BEGIN; SELECT FROM inbox_delivery FOR UPDATE").await.unwrap();
    gate.send_replace(true);

    inbox.accept_all(records(5_000)).await.unwrap();

    scene.until("SELECT (count(finished_at) = 5000)::int::bigint FROM inbox_delivery").await;
    somebody.batch_execute("COMMIT").await.unwrap();
    scene.settled().await;
    assert_eq!(scene.count_done_at_first().await, 5_003);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_does_not_keep_other_claims_from_being_renewed() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let gate = tokio::sync::watch::Sender::new(false);
    let limits = quick().lease(Duration::from_secs(4));
    let here = scene.inbox().limits(limits.clone()).subscribe("orders", runs.gated("stock", &gate)).build().unwrap();
    here.accept_all(records(16)).await.unwrap();
    let _here = here.start().await.unwrap();
    runs.reached(16).await;
    let somebody = scene.database.client().await;
    let held = "BEGIN; SELECT FROM inbox_delivery WHERE message_seq = (SELECT min(message_seq) FROM inbox_delivery) FOR UPDATE";
    somebody.batch_execute(held).await.unwrap();

    // Renewed until long after the first claims would have expired.
    let renewed =
        "SELECT (count(*) FILTER (WHERE locked_until > (SELECT max(due_at) FROM inbox_delivery) + interval '10 s') = 15)
                   ::int::bigint FROM inbox_delivery WHERE attempts = 1";
    scene.until(renewed).await;

    gate.send_replace(true);
    somebody.batch_execute("COMMIT").await.unwrap();
    scene.settled().await;
    assert!(scene.count_done_at_first().await >= 15);
}

// No operation holds a connection while it waits for another one.
#[tokio::test(flavor = "multi_thread")]
async fn one_connection_is_enough() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let options = PostgresOptions::default().pool_size(1).handler_connections(1);
    let store = Store::connect_with(&scene.database.url(), options).await.unwrap();
    let (plain, transactional) = (Runs::new(), Runs::new());
    let inbox = Inbox::builder(store)
        .limits(quick().lease(Duration::from_secs(3)))
        .subscribe("orders", working(&plain, "plain"))
        // Longer than a lease, while it holds the only connection for handlers.
        .subscribe("orders", effect::writing_for(&transactional, "transactional", Duration::from_secs(4)))
        .build()
        .unwrap();
    let running = inbox.start().await.unwrap();

    for record in records(3) {
        inbox.accept(record).await.unwrap();
    }

    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!((plain.count(), transactional.count()), (3, 3));
    assert_eq!(effect::effects(&scene).await.len(), 3);
    assert_eq!(scene.count_done_at_first().await, 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_connection_is_enough_to_drain() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let options = PostgresOptions::default().pool_size(1).handler_connections(1);
    let store = Store::connect_with(&scene.database.url(), options).await.unwrap();
    let inbox = Inbox::builder(store)
        .limits(quick())
        .subscribe("orders", working(&Runs::new(), "plain"))
        .subscribe("orders", effect::writing_only(&Runs::new(), "transactional"))
        .build()
        .unwrap();
    inbox.accept_all(records(40)).await.unwrap();
    assert_eq!(within(inbox.drain()).await.unwrap(), 80);
}

// This happens when a full scan exceeds the server's `statement_timeout`, because an open snapshot makes it skip over
// millions of finished rows. Here a policy rejects every statement that reads the oldest delivery.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_scan_that_the_server_refuses_delays_no_other_claim() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let accepting = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    accepting.accept(record("ancient")).await.unwrap();
    let role = scene.database.name();
    scene
        .database
        .execute(&format!(
            "UPDATE inbox_delivery SET due_at = '1999-01-01';
             CREATE ROLE {role};
             GRANT ALL ON ALL TABLES IN SCHEMA public TO {role};
             GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role};
             ALTER TABLE inbox_delivery ENABLE ROW LEVEL SECURITY;
             CREATE POLICY no_further ON inbox_delivery
             USING (CASE WHEN due_at < '2000-01-01' THEN 1 / (handler_id - handler_id) = 0 ELSE true END)"
        ))
        .await;
    let separator = if scene.database.url().contains('?') { '&' } else { '?' };
    // For a table of six rows the planner would prefer a sequential scan to the index.
    let url = format!("{}{separator}options=-c%20role%3D{role}%20-c%20enable_seqscan%3Doff", scene.database.url());
    let inbox = Inbox::builder(Store::<Postgres>::connect(&url).await.unwrap()).limits(quick());
    let inbox = inbox.subscribe("orders", runs.handler("stock")).build().unwrap();
    let running = inbox.start().await.unwrap();

    for count in 1..=5 {
        accepting.accept(record(&format!("m{count}"))).await.unwrap();
        runs.reached(count).await;
    }
    scene.database.execute("ALTER TABLE inbox_delivery DISABLE ROW LEVEL SECURITY").await;

    runs.reached(6).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!(runs.ids().last().map(String::as_str), Some("ancient"));
    scene.database.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

const CRASH_THE_SERVER: &str = "COPY (SELECT 1) TO PROGRAM 'kill -9 $PPID'";

async fn crash_on_first(runs: Runs, message: Message<Raw>, conn: &mut effect::Connection) -> Result<(), Failure> {
    runs.note(&message);
    if message.id() == "m000000" {
        effect::execute(conn, CRASH_THE_SERVER).await?;
    }
    Ok(effect::write(conn, message.id()).await?)
}

/// Each time its first message runs, the server ends every session and recovers.
async fn the_crasher_is_poisoned(runs: Runs, crashing: Registration<Postgres>) {
    let server = OwnServer::start().await;
    let limits = quick().store_error_limit(3).backoff_max(Duration::from_millis(500));
    let inbox = Inbox::builder(server.store.clone()).limits(limits).subscribe("orders", crashing).build().unwrap();
    inbox.accept_all(records(20)).await.unwrap();
    let running = inbox.start().await.unwrap();

    server.settled().await;

    // It can be more if deliveries that ran beside it were also affected: then the first crash is not counted.
    assert!(runs.ids().iter().filter(|id| *id == "m000000").count() >= 3);
    let poisoned = "FROM inbox_poisoned WHERE message_id = 'm000000' AND reason = 'store error' AND errors = 0";
    let done = "FROM inbox_status WHERE state = 'done' AND errors = 0 AND crashes = 0";
    // Retried: its last outcome may be written before the server has noticed the crash and ends all other sessions.
    let expected = format!(
        "SELECT ((SELECT count(*) {poisoned}) = 1 AND (SELECT count(*) {done}) = 19 AND (SELECT count(*) FROM effect) = 19)::int::bigint"
    );
    server.until(&expected).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_crashes_the_server_is_poisoned_and_the_server_stays_up() {
    let runs = Runs::new();
    the_crasher_is_poisoned(runs.clone(), tx_handler(key("stock"), with_state(runs, crash_on_first))).await;
}

// The other messages of its call run alone after the first crash, which identifies the one that causes it.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_a_batch_that_crashes_the_server_is_poisoned_and_the_server_stays_up() {
    async fn crash(runs: Runs, messages: Vec<Message<Raw>>, conn: &mut effect::Connection) -> Result<(), Failure> {
        for message in messages {
            crash_on_first(runs.clone(), message, conn).await?;
        }
        Ok(())
    }
    let runs = Runs::new();
    the_crasher_is_poisoned(runs.clone(), tx_batch_handler(key("stock"), with_state(runs, crash))).await;
}
