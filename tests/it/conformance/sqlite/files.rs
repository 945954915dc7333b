//! Where a SQLite inbox is stored: in its own file, shared by the processes of one host, or in memory. A file that
//! cannot be opened is reported with the reason.

use std::sync::Arc;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use wharf::store::SqliteOptions;
use wharf::{Inbox, Receipt, Sqlite, Store};

use super::scene::{Runs, Scene, quick, record, records};
use support::sqlite::SqliteFile;

async fn refusal(path: &std::path::Path) -> String {
    let error = Store::<Sqlite>::open(path).await.unwrap_err();
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    format!("{error:#}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_cannot_be_opened_is_reported_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    assert!(refusal(&folder.path().join("no such folder/inbox.db")).await.contains("its directory"));
    assert!(refusal(folder.path()).await.contains("it is a directory"));
    let text = folder.path().join("text");
    std::fs::write(&text, "this is not a database, and longer than a page header of one hundred bytes".repeat(9))
        .unwrap();
    assert!(refusal(&text).await.contains("file is not a database"));
    assert_eq!(std::fs::read(&text).unwrap().len(), 74 * 9);
    let no_patience = SqliteOptions::default().busy_timeout(Duration::ZERO);
    let refused = Store::<Sqlite>::open_with(folder.path().join("inbox.db"), no_patience).await.unwrap_err();
    assert!(refused.is_configuration(), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_may_wait_for_locks_without_end() {
    let file = SqliteFile::create();
    let endless = SqliteOptions::default().busy_timeout(Duration::MAX);
    let store = Store::<Sqlite>::open_with(file.path(), endless).await.unwrap();
    store.migrate().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_path_may_contain_any_characters() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["file:inbox.db?mode=memory", "sqlite:", ":memory:", "with space and 'quotes'", "ünïcode"] {
        let path = folder.path().join(name);
        let store = Store::<Sqlite>::open(&path).await.unwrap();
        store.migrate().await.unwrap();
        assert!(path.is_file(), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_without_an_inbox_and_one_of_a_newer_build_are_refused() {
    let file = SqliteFile::create();
    let store = Store::<Sqlite>::open(file.path()).await.unwrap();
    let inbox = || Inbox::builder(store.clone()).subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    let error = inbox().accept(record("a")).await.unwrap_err();
    assert!(error.is_schema() && error.to_string().contains("store.migrate()"), "{error}");

    store.migrate().await.unwrap();
    store.migrate().await.unwrap();
    file.execute("INSERT INTO inbox_migration (version, compatible_with) VALUES (1000, 1)").await;
    inbox().accept(record("a")).await.unwrap();
    file.execute("UPDATE inbox_migration SET compatible_with = 1000").await;
    assert!(inbox().accept(record("a")).await.unwrap_err().is_schema());
    assert!(store.migrate().await.unwrap_err().is_schema());
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_concurrent_migrations_create_one_schema() {
    let file = SqliteFile::create();
    let migrations = (0..8).map(async |_| Store::<Sqlite>::open(file.path()).await.unwrap().migrate().await);
    for migrated in futures_util::future::join_all(migrations).await {
        migrated.unwrap();
    }
    assert_eq!(file.query_one_i64("SELECT count(*) FROM inbox_migration").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_records_are_in_the_file_and_synced() {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    inbox.accept_all(records(10)).await.unwrap();
    // A copy of the open files, as after a power failure.
    let copy = tempfile::tempdir().unwrap();
    for suffix in ["", "-wal"] {
        let name = format!("{}{suffix}", scene.database.path().display());
        std::fs::copy(&name, copy.path().join(format!("inbox.db{suffix}"))).unwrap();
    }

    let store = Store::<Sqlite>::open(copy.path().join("inbox.db")).await.unwrap();
    let runs = Runs::new();
    let recovered = Inbox::builder(store).limits(quick()).subscribe("orders", runs.handler("stock")).build().unwrap();

    assert_eq!(recovered.drain().await.unwrap(), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inbox_in_memory_works_and_is_not_shared() {
    let inbox = async |runs: &Runs| {
        let store = Store::<Sqlite>::in_memory().await.unwrap();
        store.migrate().await.unwrap();
        Inbox::builder(store).limits(quick()).subscribe("orders", runs.handler("stock")).build().unwrap()
    };
    let (here, there) = (Runs::new(), Runs::new());
    let (first, second) = (inbox(&here).await, inbox(&there).await);
    let running = first.start().await.unwrap();

    assert_eq!(first.accept(record("a")).await.unwrap(), Receipt::Accepted { deliveries: 1 });
    assert_eq!(first.accept(record("a")).await.unwrap(), Receipt::Duplicate { added: 0 });
    assert_eq!(second.accept(record("a")).await.unwrap(), Receipt::Accepted { deliveries: 1 });
    here.reached(1).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    assert_eq!((first.drain().await.unwrap(), second.drain().await.unwrap()), (0, 1));
}

// This is how users' tests run: without threads other than the test's own.
#[tokio::test]
async fn an_inbox_works_on_a_runtime_of_one_thread() {
    let store = Store::<Sqlite>::in_memory().await.unwrap();
    store.migrate().await.unwrap();
    let runs = Runs::new();
    let inbox = Inbox::builder(store).subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept_all(records(100)).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 100);
}

// Only the database's clock counts, and moving it affects every process.
#[tokio::test(flavor = "multi_thread")]
async fn the_clock_of_the_file_applies_to_every_process() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let later = runs.answering("stock", |message| match message.attempt() {
        1 => Err(wharf::Failure::snooze(Duration::from_secs(3_600))),
        _ => Ok(()),
    });
    let inbox = scene.inbox().subscribe("orders", later).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    assert_eq!((inbox.drain().await.unwrap(), inbox.drain().await.unwrap()), (1, 0));

    scene.database.execute("UPDATE inbox_clock SET offset_us = 3601 * 1000000").await;

    assert_eq!(inbox.drain().await.unwrap(), 1);
    assert_eq!(scene.count("inbox_status WHERE age BETWEEN 3600 AND 3700").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_view_of_headers_works_with_any_bytes() {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    let mut runner = TestRunner::deterministic();
    let any_bytes = prop::collection::vec(prop_oneof![any::<u8>(), Just(0), Just(255)], 0..40);
    let mut samples: Vec<Vec<u8>> = (0..300).map(|_| any_bytes.new_tree(&mut runner).unwrap().current()).collect();
    samples.extend([vec![], vec![0xff; 4], vec![0xff; 8], vec![0, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 1]]);
    for bytes in samples {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        scene.database.execute(&format!("UPDATE inbox_message SET headers = x'{hex}'")).await;
        assert_eq!(scene.count("inbox_headers WHERE json_valid(headers)").await, 1, "{hex}");
    }
}

// Two services and an operator's shell use the file at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn several_concurrent_writers_lose_nothing() {
    let scene = Arc::new(Scene::new().await);
    let runs = Runs::new();
    let mut running = Vec::new();
    let mut accepting = Vec::new();
    for number in 0..3 {
        let builder = scene.another_inbox().await;
        let inbox = builder.subscribe("orders", runs.handler("stock")).build().unwrap();
        running.push(inbox.start().await.unwrap());
        accepting.push(tokio::spawn(async move {
            for part in 0..20 {
                let batch = (0..10).map(|row| record(&format!("{number} {part} {row}")));
                inbox.accept_all(batch).await.unwrap();
            }
        }));
    }
    let path = scene.database.path();
    let shell = tokio::task::spawn_blocking(move || {
        let mut shell = support::sqlite::connect(&path);
        for _ in 0..50 {
            shell.batch_execute("UPDATE inbox_handler SET registered_at = registered_at + 1").unwrap();
        }
    });
    for task in accepting {
        task.await.unwrap();
    }
    shell.await.unwrap();

    scene.settled().await;
    assert_eq!((runs.count(), scene.count_done_at_first().await), (600, 600));
    for running in running {
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}
