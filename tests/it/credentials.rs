//! PostgreSQL credentials and hosts: client certificates, passwords that change while the pool is open, and several
//! hosts of which one accepts writes.

use std::net::TcpListener;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use wharf::store::PostgresOptions;
use wharf::{Error, Inbox, Postgres, Store};

use crate::effect;
use crate::scene::{Runs, quick, record, within};
use support::database::TestDatabase;
use support::postgres::{Cluster, ClusterOptions, connect};
use support::tls::Certificates;

/// The superuser of the tests connects without a password; all other users need one.
const PASSWORDS: &str = "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n";

async fn server_with_passwords() -> Cluster {
    let hba = Some(PASSWORDS.to_owned());
    let server = Cluster::start(ClusterOptions { hba, ..ClusterOptions::default() }).await;
    server.execute("CREATE ROLE shop LOGIN PASSWORD 'first'").await;
    server.execute("CREATE SCHEMA shop AUTHORIZATION shop").await;
    server
}

/// Changes the password and ends every session that was opened with the previous one.
async fn rotate(server: &Cluster, password: &str) {
    server.execute(&format!("ALTER ROLE shop PASSWORD '{password}'")).await;
    server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'shop'").await;
}

fn url(server: &Cluster, more: &str) -> String {
    format!("postgres://shop@127.0.0.1:{}/postgres?{more}", server.port())
}

async fn count(server: &Cluster, rows: &str) -> i64 {
    let client = connect(&server.url("postgres")).await;
    client.query_one(&format!("SELECT count(*) FROM {rows}"), &[]).await.unwrap().get(0)
}

/// Waits until this many deliveries are done.
async fn until_done(server: &Cluster, done: i64) {
    let client = connect(&server.url("postgres")).await;
    let sql = "SELECT count(*) FROM shop.inbox_delivery WHERE status = 2";
    within(async {
        while client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) < done {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

async fn panics() -> Result<String, Error> {
    panic!("no password today")
}

/// A kind of rotation: how the store gets the password, and how it is changed.
struct Way {
    url: String,
    options: PostgresOptions,
    tell: Box<dyn Fn(&str)>,
}

fn ways(server: &Cluster, folder: &Path) -> [Way; 3] {
    let current = Arc::new(Mutex::new(String::new()));
    let asked = Arc::clone(&current);
    let provider = move || {
        let password = asked.lock().unwrap().clone();
        async move { Ok::<_, std::io::Error>(password) }
    };
    let (file, passfile) = (folder.join("password"), folder.join("passfile"));
    let (told_file, told_passfile) = (file.clone(), passfile.clone());
    let lines =
        |password: &str| format!("# for the shop\nelsewhere:*:*:*:wrong\n127.0.0.1:*:postgres:shop:{password}\n");
    [
        Way {
            url: url(server, ""),
            options: PostgresOptions::default().password_from(provider),
            tell: Box::new(move |password| password.clone_into(&mut current.lock().unwrap())),
        },
        Way {
            url: url(server, ""),
            options: PostgresOptions::default().password_file(file),
            tell: Box::new(move |password| std::fs::write(&told_file, format!("{password}\n")).unwrap()),
        },
        Way {
            url: url(server, &format!("passfile={}", passfile.display())),
            options: PostgresOptions::default(),
            tell: Box::new(move |password| std::fs::write(&told_passfile, lines(password)).unwrap()),
        },
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_changes_under_load_is_fetched_again_and_nothing_is_lost() {
    let (server, folder) = (server_with_passwords().await, tempfile::tempdir().unwrap());
    let mut expected = 0;
    for (number, way) in ways(&server, folder.path()).into_iter().enumerate() {
        rotate(&server, "first").await;
        (way.tell)("first");
        let store = Store::<Postgres>::connect_with(&way.url, way.options.clone()).await.unwrap();
        store.migrate().await.unwrap();
        let (runs, limits) = (Runs::new(), quick().backoff_max(Duration::from_millis(100)));
        let inbox =
            Inbox::builder(store.clone()).limits(limits).subscribe("orders", runs.handler("stock")).build().unwrap();
        let running = inbox.start().await.unwrap();
        for round in 0..4 {
            let accepting: Vec<_> = (0..50)
                .map(|message| {
                    let (inbox, id) = (inbox.clone(), format!("{number}-{round}-{message}"));
                    tokio::spawn(async move { inbox.accept(record(&id)).await })
                })
                .collect();
            let password = format!("{number} {round}");
            rotate(&server, &password).await;
            (way.tell)(&password);
            for accepted in accepting {
                accepted.await.unwrap().unwrap();
            }
            expected += 50;
            until_done(&server, expected).await;
        }
        assert!(!format!("{store:?} {inbox:?} {:?}", way.options).contains("first"));
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
    assert_eq!(count(&server, "shop.inbox_status WHERE state = 'done' AND errors = 0").await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_cannot_be_fetched_is_the_reported_reason_and_is_not_shown() {
    let (server, folder) = (server_with_passwords().await, tempfile::tempdir().unwrap());
    let refusal = async |url: &str, options: PostgresOptions| {
        let error: Error = within(Store::<Postgres>::connect_with(url, options)).await.unwrap_err();
        format!("{error:#} {error:?}")
    };
    let failing = PostgresOptions::default().password_from(|| async { Err::<String, _>("the vault is sealed") });
    assert!(refusal(&url(&server, ""), failing).await.contains("the vault is sealed"));
    let wrong = PostgresOptions::default().password_from(|| async { Ok::<_, Error>("hunter2secret".to_owned()) });
    let said = refusal(&url(&server, ""), wrong).await;
    assert!(said.contains("authentication failed") && !said.contains("hunter2secret"), "{said}");
    let panicking = PostgresOptions::default().password_from(panics);
    assert!(refusal(&url(&server, ""), panicking).await.contains("panicked"));
    let missing = folder.path().join("missing");
    let said = refusal(&url(&server, ""), PostgresOptions::default().password_file(&missing)).await;
    assert!(said.contains("missing"), "{said}");
    std::fs::write(&missing, "elsewhere:*:*:*:hunter2secret\n").unwrap();
    let said = refusal(&url(&server, &format!("passfile={}", missing.display())), PostgresOptions::default()).await;
    assert!(said.contains("no line of") && !said.contains("hunter2secret"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_certificate_of_the_url_is_presented_to_the_server() {
    let (certificates, folder) = (Certificates::generate(), tempfile::tempdir().unwrap());
    let authority = certificates.authority_path.display().to_string();
    let options = ClusterOptions {
        tls: Some(certificates.server.clone()),
        hba: Some("hostssl all all 127.0.0.1/32 trust clientcert=verify-ca\n".to_owned()),
        settings: vec![("ssl_ca_file".to_owned(), authority.clone())],
    };
    let server = Cluster::start(options).await;
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let certificate = write("client.pem", &certificates.client.certificate_pem);
    let key = write("client.key", &certificates.client.key_pem);
    let both = write("both.pem", &format!("{}{}", certificates.client.certificate_pem, certificates.client.key_pem));
    let foreign_key = write("foreign.key", &certificates.foreign_client.key_pem);
    let foreign = write("foreign.pem", &certificates.foreign_client.certificate_pem);
    let with = async |more: String| {
        let url = format!("{}?sslmode=verify-full&sslrootcert={authority}{more}", server.url("postgres"));
        within(Store::<Postgres>::connect(&url)).await
    };

    with(format!("&sslcert={certificate}&sslkey={key}")).await.unwrap().migrate().await.unwrap();
    with(format!("&sslcert={both}")).await.unwrap();
    for refused in [String::new(), format!("&sslcert={foreign}&sslkey={foreign_key}")] {
        assert!(with(refused.clone()).await.is_err(), "{refused}");
    }
    for unusable in [
        format!("&sslkey={key}"),
        format!("&sslcert={certificate}&sslkey={foreign_key}"),
        "&sslcert=/nowhere".to_owned(),
    ] {
        let error = with(unusable.clone()).await.unwrap_err();
        assert!(!error.is_transient(), "{unusable}: {error:#}");
    }

    // A renewed certificate applies to the next connection: with one that the server refuses, no connection can be
    // opened.
    let store = with(format!("&sslcert={certificate}&sslkey={key}")).await.unwrap();
    write("client.pem", &certificates.foreign_client.certificate_pem);
    write("client.key", &certificates.foreign_client.key_pem);
    let terminated = with(format!("&sslcert={both}")).await.unwrap().operate().doctor().await;
    assert!(terminated.is_ok());
    server.restart().await;
    let error = within(store.operate().doctor()).await.unwrap_err();
    assert!(error.is_transient(), "{error:#}");
    write("client.pem", &certificates.client.certificate_pem);
    write("client.key", &certificates.client.key_pem);
    within(store.operate().doctor()).await.unwrap();
}

// Every acknowledged commit is on the standby, because commits wait for it.
#[tokio::test(flavor = "multi_thread")]
async fn with_several_hosts_the_promoted_standby_is_found_and_every_effect_is_there_once() {
    let primary = Cluster::start(ClusterOptions::default()).await;
    let standby = primary.standby().await;
    primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'").await;
    primary.reload().await;
    primary.execute("CREATE TABLE effect (message_id text)").await;
    // The standby comes first: it is skipped while it is read-only.
    let hosts = format!("127.0.0.1:{},127.0.0.1:{}", standby.port(), primary.port());
    let url = format!("postgres://postgres@{hosts}/postgres?target_session_attrs=read-write");
    let options = PostgresOptions::default().connect_timeout(Duration::from_secs(5));
    let store = Store::<Postgres>::connect_with(&url, options).await.unwrap();
    assert!(format!("{store:?}").contains(&hosts), "{store:?}");
    store.migrate().await.unwrap();
    let (runs, limits) = (Runs::new(), quick().backoff_max(Duration::from_millis(200)));
    let inbox =
        Inbox::builder(store).limits(limits).subscribe("orders", effect::writing_only(&runs, "stock")).build().unwrap();
    let running = inbox.start().await.unwrap();
    let accepting: Vec<_> = (0..200)
        .map(|message| {
            let inbox = inbox.clone();
            tokio::spawn(async move { inbox.accept(record(&format!("m{message:03}"))).await })
        })
        .collect();
    runs.reached(40).await;

    primary.kill().await;
    standby.promote().await;
    standby.execute("ALTER SYSTEM RESET synchronous_standby_names").await;
    standby.reload().await;

    for accepted in accepting {
        accepted.await.unwrap().unwrap();
    }
    let client = connect(&standby.url("postgres")).await;
    within(async {
        while client
            .query_one("SELECT count(*) FROM inbox_delivery WHERE status = 2", &[])
            .await
            .unwrap()
            .get::<_, i64>(0)
            < 200
        {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    let effects = client.query_one("SELECT count(*), count(DISTINCT message_id) FROM effect", &[]).await.unwrap();
    assert_eq!((effects.get::<_, i64>(0), effects.get::<_, i64>(1)), (200, 200));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_host_that_accepts_and_never_answers_leaves_time_for_the_next() {
    let database = TestDatabase::create().await;
    // Connections are accepted by the system, and nobody reads from them.
    let hanging = TcpListener::bind("127.0.0.1:0").unwrap();
    let hung = format!("127.0.0.1:{}", hanging.local_addr().unwrap().port());
    let url = database.url();
    let (user, rest) = url.split_once('@').unwrap();
    let options = PostgresOptions::default().connect_timeout(Duration::from_secs(4));
    let store = Store::<Postgres>::connect_with(&format!("{user}@{hung},{rest}"), options.clone()).await.unwrap();
    store.migrate().await.unwrap();

    let error = Store::<Postgres>::connect_with(&format!("{user}@{hung},127.0.0.1:1/none"), options).await.unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains(&format!("{hung}: the server does not answer")) && text.contains("127.0.0.1:1: "), "{text}");
}
