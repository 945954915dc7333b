//! A password or a SASL secret is never printed, whatever fails, and is rejected where other users could see it.

use crate::cli::program::{Program, finish};
use support::database_server::Server;

const SECRET: &str = "canary-hunter2";

/// Runs the command with both output formats; neither shows the secret.
async fn refused(url: &str, arguments: &[&str], code: i32) {
    for shape in [&[][..], &["--json"]] {
        let mut command = Program::at(url).command();
        command.args(arguments).args(shape);
        let ran = finish(command).await;
        assert_eq!(ran.code, code, "{arguments:?} {ran:?}");
        assert!(!ran.stdout.contains(SECRET) && !ran.stderr.contains(SECRET), "{ran:?}");
        assert!(!ran.stderr.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_password_of_a_url_is_never_printed() {
    let server = Server::shared().await.url();
    let (_, address) = server.rsplit_once('@').unwrap_or(server.split_once("://").unwrap());
    let wrong_user = format!("postgres://nobody-here:{SECRET}@{address}");
    let folder = tempfile::tempdir().unwrap();
    for (url, code) in [
        (wrong_user.as_str(), 3),
        (&format!("postgres://me:{SECRET}@127.0.0.1:1/shop"), 3),
        (&format!("postgres://me:{SECRET}@no-such-host.invalid/shop"), 3),
        (&format!("postgres://me:{SECRET}@h:notaport/shop"), 2),
        (&format!("postgres://h/shop?password={SECRET}&nonsense=1"), 2),
        (&format!("mysql://me:{SECRET}@h/shop"), 2),
        (SECRET, 2),
    ] {
        refused(url, &["status"], code).await;
        let file = folder.path().join("url");
        std::fs::write(&file, format!("{url}\n")).unwrap();
        refused("", &["--database-url-file", file.to_str().unwrap(), "doctor"], code).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_on_the_command_line_is_rejected_and_not_printed() {
    let folder = migrated().await;
    let inbox = format!("sqlite:{}", folder.path().join("inbox.db").display());
    let url = format!("postgres://me:{SECRET}@h/shop");
    let password = format!("sasl.password={SECRET}");
    let pem = format!("ssl.key.pem={SECRET}");
    for arguments in [
        &["--database", url.as_str(), "status"][..],
        &["--database", &format!("postgres://h/shop?password={SECRET}"), "status"],
        &["--database-url-file", &url, "status"],
        // The argument parser does not understand this argument and quotes it.
        &[&url, "status"],
        &["status", &url],
        &["handlers", "rename-plan", "--manifest", &url],
        &["audit", "--brokers", "b", "--group", "g", "--set", &password],
        &["audit", "--brokers", "b", "--group", "g", "--set", &pem],
        &["doctor", "--brokers", "b", "--group", "g", "--set", SECRET],
    ] {
        refused(&inbox, arguments, 2).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_of_the_kafka_file_is_never_printed() {
    let folder = migrated().await;
    let url = format!("sqlite:{}", folder.path().join("inbox.db").display());
    let file = folder.path().join("kafka");
    let path = file.to_str().unwrap();
    for (lines, code) in [
        (format!("bootstrap.servers=b\ngroup.id=g\nsasl.password={SECRET}\nsecurity.protocol={SECRET}"), 2),
        (format!("bootstrap.servers=b\ngroup.id=g\n{SECRET}"), 2),
        (format!("sasl.password={SECRET}"), 2),
    ] {
        std::fs::write(&file, lines).unwrap();
        refused(&url, &["audit", "--kafka-config-file", path], code).await;
    }
}

/// A folder with an inbox file.
async fn migrated() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let store = wharf::Store::<wharf::Sqlite>::open(folder.path().join("inbox.db")).await.unwrap();
    store.migrate().await.unwrap();
    folder
}
