//! The roles of `docs/roles.sql`: each can do its job and nothing else.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use wharf::operate::{Backfill, DeliveryFilter, QuarantineFilter};
use wharf::{Failure, Inbox, Postgres, Receipt, Record, Retention, Store};

use crate::scene::{Runs, Scene, quick, record};
use support::postgres_binaries::program;

/// A scene with its roles, named after its database: roles belong to the server.
pub async fn with_roles() -> Scene {
    let scene = Scene::new().await;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/roles.sql");
    let made = Command::new(program("psql"))
        .args([&scene.database.url(), "--set", "ON_ERROR_STOP=1", "--quiet", "--set"])
        .arg(format!("prefix={}", scene.database.name()))
        .arg("--file")
        .arg(script)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    scene
}

/// The URL of a user who has only this role.
pub fn url_of(scene: &Scene, role: &str) -> String {
    let separator = if scene.database.url().contains('?') { '&' } else { '?' };
    format!("{}{separator}options=-c%20role%3D{}_{role}", scene.database.url(), scene.database.name())
}

async fn store_of(scene: &Scene, role: &str) -> Store<Postgres> {
    Store::connect(&url_of(scene, role)).await.unwrap()
}

/// Asserts that a role may execute none of these.
async fn refuses(scene: &Scene, role: &str, statements: &[&str]) {
    let client = support::postgres::connect(&url_of(scene, role)).await;
    for sql in statements {
        let error = client.batch_execute(sql).await.expect_err(sql);
        let code = error.code().map(|code| code.code().to_owned());
        assert_eq!(code.as_deref(), Some("42501"), "{role}: {sql}: {error:?}");
    }
}

const DAY: Duration = Duration::from_secs(86_400);
const CHANGE_MESSAGE: &str = "UPDATE inbox_message SET payload = NULL";
const DELETE_MESSAGE: &str = "DELETE FROM inbox_message";
const DELETE_DELIVERY: &str = "DELETE FROM inbox_delivery";
const DELETE_AUDIT: &str = "DELETE FROM inbox_audit";
const FORGE_BACKFILL: &str = "INSERT INTO inbox_delivery (message_seq, handler_id, due_at) VALUES (1, 1, now())";
const FORGE_PURGE: &str = "SELECT inbox_audit_purge('{}', 1)";
const CHANGE_AUDIT: &str = "UPDATE inbox_audit SET actor = 'somebody else'";
const FORGE_AUDIT: &str =
    "INSERT INTO inbox_audit (database_user, action, filter, affected) VALUES ('somebody else', 'pause', '{}', 1)";
const CHANGE_HISTORY: &str = "DELETE FROM inbox_history";
const CHANGE_QUARANTINE: &str = "DELETE FROM inbox_quarantine";
const MOVE_LEDGER: &str = "UPDATE inbox_ledger SET next_offset = 0";
const SETTLE: &str = "UPDATE inbox_delivery SET status = 2";
const REPLAY: &str = "SELECT inbox_replay_matching('{\"all\": true}')";
const PAUSE: &str = "UPDATE inbox_handler SET paused_at = now()";
const MIGRATE: &str = "CREATE TABLE another (id int)";

#[tokio::test(flavor = "multi_thread")]
async fn the_roles_accept_and_process_handle_a_message_and_neither_can_do_the_others_work() {
    let (scene, runs) = (with_roles().await, Runs::new());
    let build =
        |store| Inbox::builder(store).limits(quick()).subscribe("orders", runs.handler("stock")).build().unwrap();
    let accepting = build(store_of(&scene, "accept").await);
    let twice =
        [record("a"), record("a"), record("a").with_payload("another"), Record::new("orders").with_payload("no id")];
    let receipts = accepting.accept_or_quarantine(twice).await.unwrap();
    assert_eq!(receipts[..2], [Receipt::Accepted { deliveries: 1 }, Receipt::Duplicate { added: 0 }]);
    assert_eq!(accepting.accept(record("a")).await.unwrap(), Receipt::Duplicate { added: 0 });
    assert_eq!(scene.count("inbox_quarantine").await, 2);
    refuses(
        &scene,
        "accept",
        &[CHANGE_MESSAGE, DELETE_MESSAGE, DELETE_DELIVERY, SETTLE, REPLAY, DELETE_AUDIT, MIGRATE],
    )
    .await;

    let processing = build(store_of(&scene, "process").await);
    assert_eq!(processing.drain().await.unwrap(), 1);
    assert_eq!(scene.states().await, ["a stock done"]);
    let failing = runs.answering("stock", |message| match message.attempt() {
        1 => Err(Failure::retry_after(Duration::ZERO, "no")),
        _ => Ok(()),
    });
    let failing = Inbox::builder(store_of(&scene, "process").await).subscribe("orders", failing).build().unwrap();
    accepting.accept(record("b")).await.unwrap();
    assert_eq!(failing.drain().await.unwrap(), 2);
    assert_eq!(scene.count("inbox_failures WHERE message_id = 'b'").await, 1);
    refuses(&scene, "process", &["UPDATE inbox_correction SET payload = ''", "DELETE FROM inbox_attempt"]).await;
    let insert = "INSERT INTO inbox_message (message_id, source, topic, payload_hash) VALUES ('x', 'x', 'x', '')";
    refuses(
        &scene,
        "process",
        &[insert, CHANGE_MESSAGE, DELETE_MESSAGE, DELETE_DELIVERY, MOVE_LEDGER, REPLAY, MIGRATE],
    )
    .await;
}

// A rollback may begin with a process that accepts only.
#[tokio::test(flavor = "multi_thread")]
async fn the_role_accept_separates_handlers_that_a_later_version_has_united() {
    let (scene, runs) = (with_roles().await, Runs::new());
    let two = |store| {
        let builder = Inbox::builder(store).limits(quick()).subscribe("orders", runs.handler("old"));
        builder.subscribe("orders", runs.handler("new")).build().unwrap()
    };
    two(store_of(&scene, "accept").await).accept(record("a")).await.unwrap();
    let united = scene.inbox().subscribe("orders", runs.handler("new").formerly("old")).build().unwrap();
    assert_eq!(united.accept(record("b")).await.unwrap(), Receipt::Accepted { deliveries: 1 });

    let again = two(store_of(&scene, "accept").await);
    assert_eq!(again.accept(record("c")).await.unwrap(), Receipt::Accepted { deliveries: 2 });
}

#[tokio::test(flavor = "multi_thread")]
async fn the_role_read_sees_everything_and_changes_nothing() {
    let (scene, runs) = (with_roles().await, Runs::new());
    let failing = runs.answering("stock", |_| Err(Failure::poison("no")));
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept_or_quarantine([record("a"), Record::new("orders")]).await.unwrap();
    inbox.drain().await.unwrap();
    let operator = store_of(&scene, "read").await.operate();
    let diagnosis = operator.doctor().await.unwrap();
    assert_eq!(diagnosis.symptoms.len(), 2, "{diagnosis:?}");
    let found = operator.deliveries(&DeliveryFilter::default(), None, 10).await.unwrap().remove(0);
    assert!(operator.delivery(&found).await.unwrap().unwrap().record.is_some());
    assert_eq!(operator.quarantined(&QuarantineFilter::default(), 10).await.unwrap().len(), 1);
    let all = DeliveryFilter::all();
    assert!(format!("{:#}", operator.replay(&all, 1).await.unwrap_err()).contains("permission denied"));
    let changes =
        [CHANGE_MESSAGE, DELETE_MESSAGE, DELETE_DELIVERY, SETTLE, REPLAY, PAUSE, MOVE_LEDGER, DELETE_AUDIT, MIGRATE];
    refuses(&scene, "read", &changes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_role_admin_can_run_operator_actions_and_nothing_more() {
    let (scene, runs) = (with_roles().await, Runs::new());
    let failing = runs.answering("stock", |_| Err(Failure::poison("no")));
    let inbox = scene.inbox().subscribe("orders", failing).subscribe("returns", runs.handler("mail")).build().unwrap();
    inbox.accept_or_quarantine([record("a"), record("b"), Record::new("orders")]).await.unwrap();
    inbox.drain().await.unwrap();
    let operator = store_of(&scene, "admin").await.operate();
    let of = |id: &str| DeliveryFilter::default().message_id(id);
    assert_eq!(operator.replay(&of("a"), 1).await.unwrap(), 1);
    assert_eq!(operator.discard(&of("b"), 1).await.unwrap(), 1);
    let done = operator.deliveries(&of("b"), None, 1).await.unwrap().remove(0);
    assert!(!operator.release(&done).await.unwrap());
    assert!(operator.replay_corrected(&done, "corrected").await.unwrap());
    assert!(operator.pause("stock").await.unwrap() && operator.resume("stock").await.unwrap());
    let backfill = Backfill::new("mail", ["orders"]);
    assert_eq!(operator.backfill(&backfill, |_| ()).await.unwrap(), 2);
    let all = QuarantineFilter::all();
    assert_eq!(operator.replay_quarantined(&all, 1).await.unwrap(), 1);
    assert_eq!(operator.discard_quarantined(&all, 1).await.unwrap(), 1);
    assert!(operator.doctor().await.is_ok());
    let insert = "INSERT INTO inbox_message (message_id, source, topic, payload_hash) VALUES ('x', 'x', 'x', '')";
    let changes = [
        insert,
        CHANGE_MESSAGE,
        DELETE_MESSAGE,
        DELETE_DELIVERY,
        SETTLE,
        PAUSE,
        CHANGE_QUARANTINE,
        CHANGE_HISTORY,
        MOVE_LEDGER,
        DELETE_AUDIT,
        CHANGE_AUDIT,
        FORGE_AUDIT,
        FORGE_BACKFILL,
        FORGE_PURGE,
        "SELECT inbox_change('discard', '{\"all\": true}', 1, NULL, NULL)",
        MIGRATE,
    ];
    refuses(&scene, "admin", &changes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_role_clean_purges_finished_messages_and_changes_nothing_else() {
    let (scene, runs) = (with_roles().await, Runs::new());
    crate::scene::Database::age_identities(&scene.database, 3_600).await;
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    let keeping = Retention::after(Duration::ZERO).for_handler("stock", Duration::ZERO).keep_identities(DAY);
    let store = store_of(&scene, "clean").await;
    assert_eq!(store.purgeable(&keeping).await.unwrap().messages, 1);
    assert_eq!(store.operate().purge(&keeping, |_| {}).await.unwrap().identities_kept, 1);
    let accepting = Inbox::builder(store_of(&scene, "accept").await).limits(quick());
    let accepting = accepting.subscribe("orders", runs.handler("stock")).build().unwrap();
    assert_eq!(accepting.accept(record("a")).await.unwrap(), Receipt::Duplicate { added: 0 });
    let changes =
        [CHANGE_MESSAGE, SETTLE, REPLAY, PAUSE, MOVE_LEDGER, DELETE_AUDIT, FORGE_AUDIT, CHANGE_QUARANTINE, MIGRATE];
    refuses(&scene, "clean", &changes).await;
    refuses(&scene, "accept", &["DELETE FROM inbox_identity", "UPDATE inbox_lease SET holder = 1"]).await;
}
