//! Only the database's clock counts: processes whose clocks are wrong by an hour neither steal claims nor delay
//! deliveries.

use std::path::PathBuf;
use std::time::Duration;

use crate::scene::Scene;
use crate::worker::{HANDLERS, Worker, accept, order};

/// The path of Debian's libfaketime on this architecture.
fn libfaketime() -> PathBuf {
    let folders = std::fs::read_dir("/usr/lib").unwrap().filter_map(Result::ok);
    let found = folders.map(|folder| folder.path().join("faketime/libfaketimeMT.so.1")).find(|path| path.exists());
    found.expect("libfaketime is needed: run scripts/setup, or install the package faketime")
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_with_wrong_clocks_steal_nothing_and_lose_nothing() {
    let scene = Scene::new().await;
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("gate");
    let lease = Duration::from_secs(5);
    let right = Worker { gate: gate.display().to_string(), lease, ..Worker::on(&scene).await };
    accept(&scene, &["stock"], vec![order("held", "gate")]).await;
    let holder = right.spawn();
    holder.await_said("at the gate").await;

    let orders = (0..200).map(|number| order(&format!("m{number:03}"), "work")).collect();
    accept(&scene, &HANDLERS, orders).await;
    let wrong = |by: &str| Worker {
        variables: vec![
            ("LD_PRELOAD", libfaketime().display().to_string()),
            ("FAKETIME", by.to_owned()),
            // Only the wall clock is wrong.
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ],
        ..right.clone()
    };
    let (ahead, behind) = (wrong("+1h").spawn(), wrong("-1h").spawn());
    ahead.await_said("at work").await;
    behind.await_said("at work").await;
    // Long enough that the holder's claim would have expired without renewal.
    tokio::time::sleep(right.lease + Duration::from_millis(500)).await;
    scene.until("SELECT (count(*) = 1)::int::bigint FROM inbox_delivery WHERE finished_at IS NULL").await;
    std::fs::write(&gate, "open").unwrap();

    scene.settled().await;
    assert_eq!(scene.count_done_at_first().await, 401);
    assert_eq!(scene.database.query_one_i64("SELECT count(*) FROM run").await, 401);
}
