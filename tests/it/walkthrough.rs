//! The example that a new user runs first, run as one would: to its end, killed midway, and after a rename.

use std::path::PathBuf;
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::scene::within;
use support::database::TestDatabase;

const STATES: &str = "SELECT concat_ws(' ', message_id, handler_key, state) FROM inbox_status ORDER BY 1";

#[tokio::test(flavor = "multi_thread")]
async fn the_walkthrough_ends_with_one_handler_done_and_one_poisoned() {
    let database = TestDatabase::create().await;

    let output = within(walkthrough(&database, &[]).output()).await.unwrap();

    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("Accepted { deliveries: 2 }") && said.contains("Duplicate { added: 0 }"), "{said}");
    assert_eq!(
        database.query_texts(STATES).await,
        ["order-17/placed mail.receipt poisoned", "order-17/placed stock.reserve done"]
    );
    let poisoned = "SELECT concat_ws('|', reason, errors, last_error, payload) FROM inbox_poisoned";
    let expected = r#"retries exhausted|3|connection refused by mail.example|{"order":17}"#;
    assert_eq!(database.query_texts(poisoned).await, [expected]);
    assert_eq!(database.query_one_i64("SELECT reserved::bigint FROM walkthrough_stock").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_midway_the_delivery_is_run_again_and_a_rename_changes_nothing() {
    let database = TestDatabase::create().await;
    let mut slow = walkthrough(&database, &["slow"]).spawn().unwrap();
    await_line(&mut slow, "attempt 1: a minute's work").await;
    slow.kill().await.unwrap();

    // Run to the end under the old key, then once more under the new one.
    for (arguments, key) in [(&[][..], "mail.receipt"), (&["renamed"][..], "mail.confirmation")] {
        let output = within(walkthrough(&database, arguments).output()).await.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let receipt = format!("order-17/placed {key} poisoned");
        assert_eq!(database.query_texts(STATES).await, [receipt.as_str(), "order-17/placed stock.reserve done"]);
    }
    // One killed start and three charged ones; the renamed run added none.
    let counted = "SELECT (attempts >= 4 AND errors = 3)::int::bigint FROM inbox_poisoned";
    assert_eq!(database.query_one_i64(counted).await, 1);
    assert_eq!(database.query_one_i64("SELECT reserved::bigint FROM walkthrough_stock").await, 1);
}

fn walkthrough(database: &TestDatabase, arguments: &[&str]) -> Command {
    let mut command = Command::new(example());
    command
        .args(arguments)
        .env("DATABASE_URL", database.url())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// Cargo builds the examples beside the tests.
fn example() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().and_then(|deps| deps.parent()).unwrap().join("examples");
    folder.join("walkthrough")
}

async fn await_line(child: &mut Child, text: &str) {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    within(async {
        while let Some(line) = lines.next_line().await.unwrap() {
            if line.contains(text) {
                return;
            }
        }
        panic!("the walkthrough ended without saying {text:?}");
    })
    .await;
}
