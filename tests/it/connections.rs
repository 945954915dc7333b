//! Connections to a database: TLS by `sslmode`, PgBouncer in transaction mode, several schemas, and no secret in errors
//! or logs.

use std::time::Duration;

use wharf::{Error, Failure, Inbox, InboxBuilder, Postgres, Receipt, Retention, RetryPolicy, Store};

use crate::effect::{self, effects};
use crate::scene::{Runs, Scene, quick, record, records, within};
use crate::worker::Worker;
use support::database::TestDatabase;
use support::pgbouncer::PgBouncer;
use support::ports::free_port;
use support::postgres::{Cluster, ClusterOptions, ServerTls};
use support::tls::Certificates;

/// The server accepts only encrypted connections.
const TLS_ONLY: &str = "hostssl all all 127.0.0.1/32 trust\n";

async fn tls_server(tls: &ServerTls) -> Cluster {
    let hba = Some(TLS_ONLY.to_owned());
    Cluster::start(ClusterOptions { tls: Some(tls.clone()), hba, ..ClusterOptions::default() }).await
}

async fn try_connect(server: &Cluster, parameters: &str) -> Result<Store<Postgres>, Error> {
    within(Store::connect(&format!("{}?{parameters}", server.url("postgres")))).await
}

/// Connects, which must fail, and returns the error text.
async fn refusal(server: &Cluster, parameters: &str) -> String {
    let error = try_connect(server, parameters).await.expect_err("this must not be let through");
    format!("{error:#}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_a_valid_certificate_is_accepted() {
    let certificates = Certificates::generate();
    let server = tls_server(&certificates.server).await;
    let root = certificates.authority_path.display();
    for parameters in [
        "sslmode=require".to_owned(),
        format!("sslmode=verify-ca&sslrootcert={root}"),
        format!("sslmode=verify-full&sslrootcert={root}"),
    ] {
        let store = try_connect(&server, &parameters).await.unwrap();
        store.migrate().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inbox_works_over_tls() {
    let certificates = Certificates::generate();
    let server = tls_server(&certificates.server).await;
    let root = certificates.authority_path.display();
    let store = try_connect(&server, &format!("sslmode=verify-full&sslrootcert={root}")).await.unwrap();
    store.migrate().await.unwrap();
    let runs = Runs::new();
    let inbox = Inbox::builder(store).limits(quick()).subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept_all(records(20)).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_of_another_authority_is_refused() {
    let certificates = Certificates::generate();
    let server = tls_server(&certificates.server).await;
    let other = certificates.other_authority_path.display();
    for mode in ["verify-ca", "verify-full", "require"] {
        let said = refusal(&server, &format!("sslmode={mode}&sslrootcert={other}")).await;
        assert!(said.contains("certificate"), "{mode}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_for_another_host_is_refused_by_verify_full() {
    let certificates = Certificates::generate();
    let server = tls_server(&certificates.wrong_host).await;
    let root = certificates.authority_path.display();
    let said = refusal(&server, &format!("sslmode=verify-full&sslrootcert={root}")).await;
    assert!(said.contains("certificate"), "{said}");
    try_connect(&server, &format!("sslmode=verify-ca&sslrootcert={root}")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_certificate_is_refused() {
    let certificates = Certificates::generate();
    let server = tls_server(&certificates.expired).await;
    let root = certificates.authority_path.display();
    for mode in ["verify-ca", "verify-full"] {
        let said = refusal(&server, &format!("sslmode={mode}&sslrootcert={root}")).await;
        assert!(said.contains("expired"), "{mode}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_tls_is_refused_where_tls_is_required() {
    let certificates = Certificates::generate();
    let server = Cluster::start(ClusterOptions::default()).await;
    let root = certificates.authority_path.display();
    for parameters in ["sslmode=require".to_owned(), format!("sslmode=verify-full&sslrootcert={root}")] {
        let said = refusal(&server, &parameters).await;
        assert!(said.contains("TLS"), "{said}");
    }
    try_connect(&server, "sslmode=prefer").await.unwrap();
    try_connect(&server, "sslmode=disable").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_tls_settings_are_reported_before_connecting() {
    let server = Cluster::start(ClusterOptions::default()).await;
    let said = refusal(&server, "sslmode=perhaps").await;
    assert!(said.contains("sslmode=perhaps"), "{said}");
    let said = refusal(&server, "sslmode=verify-full&sslrootcert=/nowhere/ca.pem").await;
    assert!(said.contains("/nowhere/ca.pem"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn passwords_are_in_no_error_and_no_debug_output() {
    const SECRET: &str = "hunter2secret";
    let hba = Some("host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n".to_owned());
    let server = Cluster::start(ClusterOptions { hba, ..ClusterOptions::default() }).await;
    server.execute(&format!("CREATE ROLE owner LOGIN SUPERUSER PASSWORD '{SECRET}'")).await;
    let url = |password: &str, port: u16, rest: &str| format!("postgres://owner:{password}@127.0.0.1:{port}/{rest}");
    let store = Store::connect(&url(SECRET, server.port(), "postgres")).await.unwrap();
    let inbox = Inbox::builder(store.clone()).subscribe("orders", Runs::new().handler("stock")).build().unwrap();

    let mut said = vec![format!("{store:?} {inbox:?}")];
    for bad in [
        url(&format!("{SECRET}x"), server.port(), "postgres"),
        url(SECRET, server.port(), "nowhere"),
        url(SECRET, server.port(), "postgres?sslmode=require"),
        url(SECRET, free_port(), "postgres"),
        url(SECRET, server.port(), "postgres?sslmode=maybe"),
        url(SECRET, server.port(), "postgres?no_such_parameter=1"),
        format!("postgres://owner:{SECRET}@127.0.0.1:port/postgres"),
        format!("postgres://owner:{SECRET}%zz@127.0.0.1/postgres"),
        format!("host=127.0.0.1 port=none password={SECRET}"),
    ] {
        let error = within(Store::connect(&bad)).await.unwrap_err();
        said.push(format!("{error} {error:?} {error:#?}"));
    }
    server.stop_fast().await;
    let error = within(inbox.drain()).await.unwrap_err();
    said.push(format!("{error} {error:?}"));

    for said in said {
        assert!(!said.contains(SECRET), "{said}");
    }
}

/// Two inboxes with the same handlers, through PgBouncer: one that fails every first attempt, one that writes.
fn flow(store: Store<Postgres>, failing: &Runs, writing: &Runs) -> InboxBuilder<Postgres> {
    let at_once = RetryPolicy::exponential().delay_by(|_, _| Some(Duration::from_millis(10)));
    let second_time = |message: &wharf::Message<wharf::Raw>| {
        if message.attempt() == 1 { Err(Failure::retry("not yet")) } else { Ok(()) }
    };
    Inbox::builder(store)
        .limits(quick())
        .subscribe("orders", failing.answering("failing", second_time).retry(at_once))
        .subscribe("orders", effect::writing_only(writing, "writing"))
}

#[tokio::test(flavor = "multi_thread")]
async fn accepting_and_processing_work_through_pgbouncer() {
    let database = TestDatabase::create().await;
    let bouncer = PgBouncer::start(&database.url()).await;
    let url = bouncer.url(database.name());
    let (here, there) = (Store::connect(&url).await.unwrap(), Store::connect(&url).await.unwrap());
    let (migrated_here, migrated_there) = tokio::join!(here.migrate(), there.migrate());
    migrated_here.and(migrated_there).unwrap();
    let scene = Scene { database, store: here.clone() };
    effect::prepare(&scene).await;
    let (failing, writing) = (Runs::new(), Runs::new());
    let inboxes = [flow(here, &failing, &writing).build().unwrap(), flow(there, &failing, &writing).build().unwrap()];
    let running = (inboxes[0].start().await.unwrap(), inboxes[1].start().await.unwrap());

    let accepts = (0..4).map(|task| {
        let inbox = inboxes[task % 2].clone();
        // Each accepts the same hundred records: three of four are duplicates.
        tokio::spawn(async move { inbox.accept_all(records(100)).await.unwrap() })
    });
    let mut accepted = 0;
    for receipts in accepts.collect::<Vec<_>>() {
        let receipts = receipts.await.unwrap();
        accepted += receipts.iter().filter(|receipt| matches!(receipt, Receipt::Accepted { .. })).count();
    }

    assert_eq!(accepted, 100);
    scene.settled().await;
    assert_eq!((failing.count(), writing.count(), effects(&scene).await.len()), (200, 100, 100));
    let done = "SELECT count(*) FROM inbox_status WHERE state = 'done' AND crashes = 0
                AND errors = CASE handler_key WHEN 'failing' THEN 1 ELSE 0 END";
    assert_eq!(scene.database.query_one_i64(done).await, 200);
    running.0.shutdown(Duration::from_secs(5)).await.unwrap();
    running.1.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_of_a_crashed_process_are_reclaimed_through_pgbouncer() {
    let scene = Scene::new().await;
    let bouncer = PgBouncer::start(&scene.database.url()).await;
    let worker = Worker { url: bouncer.url(scene.database.name()), is_transactional: true, ..Worker::on(&scene).await };
    worker.killed_while_it_runs(&scene, "a").await;

    let _second = worker.spawn();

    scene.settled().await;
    assert_eq!(scene.states().await, ["a stock done"]);
    assert_eq!(effects(&scene).await, ["a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn handlers_longer_than_the_lease_run_once_through_pgbouncer() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let bouncer = PgBouncer::start(&scene.database.url()).await;
    let store = Store::connect(&bouncer.url(scene.database.name())).await.unwrap();
    let runs = Runs::new();
    let limits = quick().lease(Duration::from_secs(3));
    // As many as leave PgBouncer a session for everything else.
    let registration = effect::writing_for(&runs, "stock", Duration::from_secs(4)).concurrency(2);
    let inbox = Inbox::builder(store).limits(limits).subscribe("orders", registration).build().unwrap();
    let _running = inbox.start().await.unwrap();
    inbox.accept_all(records(4)).await.unwrap();
    scene.settled().await;
    assert_eq!((runs.count(), effects(&scene).await.len()), (4, 4));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_inboxes_in_two_schemas_of_one_database_share_nothing() {
    let database = TestDatabase::create().await;
    let mut inboxes = Vec::new();
    for schema in ["north", "south"] {
        database.execute(&format!("CREATE SCHEMA {schema}")).await;
        let url = format!("{}?options=-c%20search_path%3D{schema}", database.url());
        let store = Store::connect(&url).await.unwrap();
        store.migrate().await.unwrap();
        let runs = Runs::new();
        let inbox = Inbox::builder(store).limits(quick()).subscribe("orders", runs.handler("stock")).build().unwrap();
        inboxes.push((schema, inbox, runs));
    }
    let (_, north, north_runs) = &inboxes[0];
    let (_, south, south_runs) = &inboxes[1];

    let accepted = Receipt::Accepted { deliveries: 1 };
    assert_eq!(north.accept(record("a")).await.unwrap(), accepted);
    assert_eq!(south.accept(record("a")).await.unwrap(), accepted);
    assert_eq!(south.accept(record("b")).await.unwrap(), accepted);

    let (north_running, south_running) = (north.start().await.unwrap(), south.start().await.unwrap());
    north_runs.reached(1).await;
    south_runs.reached(2).await;
    north_running.shutdown(Duration::from_secs(5)).await.unwrap();
    south_running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!((north_runs.count(), south_runs.count()), (1, 2));
    for (schema, messages) in [("north", 1), ("south", 2)] {
        let done = format!("SELECT count(*) FROM {schema}.inbox_status WHERE state = 'done'");
        assert_eq!(database.query_one_i64(&done).await, messages);
    }
}

/// Ends the other sessions of the database, so that new ones start with the current settings.
async fn set_default_isolation(scene: &Scene, level: &str) {
    let name = scene.database.name();
    let others = "FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'wharf'";
    let set = format!("ALTER DATABASE {name} SET default_transaction_isolation = '{level}'");
    scene.database.execute(&set).await;
    scene.database.execute(&format!("SELECT pg_terminate_backend(pid) {others}")).await;
    scene.until(&format!("SELECT (count(*) = 0)::int::bigint {others}")).await;
}

// A pooler forwards no start-up settings: those of the role or the database apply.
#[tokio::test(flavor = "multi_thread")]
async fn sessions_with_another_isolation_are_refused_behind_a_pooler_and_corrected_without_one() {
    let scene = Scene::new().await;
    let bouncer = PgBouncer::start(&scene.database.url()).await;
    set_default_isolation(&scene, "repeatable read").await;

    let refused = within(Store::connect(&bouncer.url(scene.database.name()))).await.expect_err("refused");
    let direct = within(Store::connect(&scene.database.url())).await;

    let said = refused.to_string();
    assert!(
        said.contains("default_transaction_isolation = 'repeatable read'") && said.contains("ALTER ROLE"),
        "{said}"
    );
    assert!(!refused.is_transient());
    direct.unwrap();
}

// Under REPEATABLE READ a purge would decide by the snapshot of when it took its lease.
#[tokio::test(flavor = "multi_thread")]
async fn a_purge_keeps_a_message_with_a_new_delivery_under_any_default_isolation() {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    let bouncer = PgBouncer::start(&scene.database.url()).await;
    let store = Store::<Postgres>::connect(&bouncer.url(scene.database.name())).await.unwrap();
    set_default_isolation(&scene, "repeatable read").await;
    let mut client = scene.database.client().await;
    let adding = client.transaction().await.unwrap();
    adding.batch_execute("LOCK TABLE inbox_message IN ACCESS EXCLUSIVE MODE").await.unwrap();

    let purging = tokio::spawn(async move { store.purge(&Retention::after(Duration::ZERO), |_| {}).await });
    scene
        .until(
            "SELECT (count(*) > 0)::int::bigint FROM pg_stat_activity
             WHERE datname = current_database() AND wait_event_type = 'Lock'",
        )
        .await;
    let add = "INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
               SELECT message_seq, handler_id + 1, now() FROM inbox_delivery";
    adding.batch_execute(add).await.unwrap();
    adding.commit().await.unwrap();

    assert_eq!(within(purging).await.unwrap().unwrap().messages, 0);
    assert_eq!((scene.count("inbox_message").await, scene.count("inbox_delivery").await), (1, 2));
}
