//! Handlers: pause, resume, backfill, and the check for deliveries that a build would leave behind; also the commands
//! for the schema.

use std::io::Write;

use serde_json::json;
use wharf::order::OrderKey;
use wharf::{Failure, Postgres};

use super::scene::{Database, Runs, Scene, record};
use crate::cli::program::{Program, finish};

async fn accepted() -> (Scene, Runs, Program) {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).subscribe("orders", runs.handler("mail"));
    inbox.build().unwrap().accept_all(["a", "b"].map(record)).await.unwrap();
    let program = Program::on(&scene);
    (scene, runs, program)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_is_paused_and_resumed_once() {
    let (scene, _runs, program) = accepted().await;
    assert!(program.well(&["handlers", "pause", "mail", "--dry-run"]).await.starts_with("would pause mail, 2 "));
    assert!(program.well(&["handlers", "pause", "mail", "--yes"]).await.starts_with("pause: mail, 2 "));
    assert!(program.well(&["handlers", "pause", "mail", "--yes"]).await.starts_with("nothing to do: mail is paused already"));
    assert!(program.json(&["handlers", "list"], 0).await[0]["paused_at"].is_string());
    assert!(program.well(&["handlers", "list"]).await.contains("paused"));
    assert_eq!(program.json(&["handlers", "resume", "mail", "--yes"], 0).await["affected"], 1);
    assert_eq!(program.json(&["handlers", "resume", "mail", "--yes"], 0).await["affected"], 0);
    let audit = "SELECT concat_ws('|', action, affected) FROM inbox_audit ORDER BY id";
    assert_eq!(scene.database.query_texts(audit).await, ["pause|1", "resume|1"]);
    assert_eq!(program.run(&["handlers", "pause", "nobody", "--yes"]).await.code, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_breaker_of_a_handler_is_opened_and_closed_once() {
    let (scene, _runs, program) = accepted().await;
    let open = ["handlers", "open-breaker", "mail", "--yes"];
    assert!(program.well(&open).await.starts_with("open the breaker of: mail, 2 "));
    assert!(program.well(&open).await.starts_with("nothing to do: mail has an open breaker already"));
    assert!(program.json(&["handlers", "list"], 0).await[0]["breaker_opened_at"].is_string());
    assert!(program.well(&["handlers", "list"]).await.contains("breaker open"));
    let close = ["handlers", "close-breaker", "mail", "--yes"];
    assert_eq!(program.json(&close, 0).await["affected"], 1);
    assert_eq!(program.json(&close, 0).await["affected"], 0);
    let audit = "SELECT concat_ws('|', action, affected) FROM inbox_audit ORDER BY id";
    assert_eq!(scene.database.query_texts(audit).await, ["open breaker|1", "close breaker|1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rate_limit_of_a_handler_is_shown_set_lifted_and_reset() {
    let (scene, _runs, program) = accepted().await;
    assert_eq!(program.well(&["handlers", "rate", "mail"]).await.trim(), "mail: no limit");
    let set = ["handlers", "rate", "mail", "--per-min", "30", "--burst", "2", "--because", "slow down", "--yes"];
    assert_eq!(program.well(&set).await.trim(), "mail: 30 per minute, 2 at once, set by an operator");
    assert_eq!(program.json(&set, 0).await["affected"], 0);
    assert_eq!(program.json(&["handlers", "list"], 0).await[0]["rate_per_sec"], 0.5);
    let hourly = program.well(&["handlers", "rate", "mail", "--per-hour", "1", "--yes"]).await;
    assert_eq!(hourly.trim(), "mail: 1 per hour, 1 at once, set by an operator");
    let lifted = program.well(&["handlers", "rate", "mail", "--no-limit", "--yes"]).await;
    assert_eq!(lifted.trim(), "mail: no limit, set by an operator");
    assert_eq!(program.json(&["handlers", "rate", "mail", "--as-registered", "--yes"], 0).await["affected"], 1);
    assert_eq!(program.run(&["handlers", "rate", "mail", "--per-sec", "1", "--no-limit"]).await.code, 2);
    assert_eq!(program.run(&["handlers", "rate", "mail", "--burst", "5", "--yes"]).await.code, 2);
    assert_eq!(program.run(&["handlers", "rate", "mail", "--no-limit", "--burst", "5", "--yes"]).await.code, 2);
    assert_eq!(program.run(&["handlers", "rate", "nobody"]).await.code, 2);
    assert_eq!(scene.count("inbox_audit WHERE action = 'set rate'").await, 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_of_a_rate_limit_shows_the_change() {
    let (scene, _runs, program) = accepted().await;
    let rate = ["handlers", "rate", "mail"];
    assert_eq!(program.json(&rate, 0).await["wanted"], json!(null));
    program.well(&[&rate[..], &["--per-min", "30", "--yes"]].concat()).await;
    let now = "30 per minute, 1 at once";
    for (arguments, to, wanted) in [
        (&["--per-sec", "5"][..], "5 per second, 5 at once", json!({ "rate_per_sec": 5.0, "burst": 5, "is_rate_set": true })),
        (&["--per-min", "90", "--burst", "7"], "1.5 per second, 7 at once", json!({ "rate_per_sec": 1.5, "burst": 7, "is_rate_set": true })),
        (&["--per-hour", "1"], "1 per hour, 1 at once", json!({ "rate_per_sec": 1.0 / 3_600.0, "burst": 1, "is_rate_set": true })),
        (&["--no-limit"], "no limit", json!({ "rate_per_sec": null, "burst": null, "is_rate_set": true })),
        (&["--as-registered"], "the limit of the registration", json!({ "is_rate_set": false })),
    ] {
        let would = [&rate[..], arguments, &["--dry-run"]].concat();
        let told = program.well(&would).await.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(told, format!("would change mail from {now} to {to}"));
        let told = program.json(&would, 0).await;
        assert_eq!((&told["wanted"], &told["rate_per_sec"], &told["affected"]), (&wanted, &0.5.into(), &0.into()));
    }
    assert_eq!(scene.count("inbox_audit").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn held_keys_are_listed_and_their_record_keys_on_request_only() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let poisoning = runs.answering("stock", |_| Err(Failure::poison("no such shelf")));
    let inbox = scene.inbox().subscribe("orders", poisoning.ordered_by(OrderKey::record_key())).build().unwrap();
    inbox.accept_all([]).await.unwrap();
    let program = Program::on(&scene);
    let keys = ["handlers", "keys", "stock"];
    assert!(program.well(&keys).await.starts_with("none: "));
    // A record key is data from outside.
    let accepted = ["a1", "a2", "a3"].map(|id| record(id).with_key("shelf \u{1b}[31m7"));
    inbox.accept_all(accepted).await.unwrap();
    inbox.drain().await.unwrap();

    let listed = program.well(&keys).await;
    assert!(listed.contains("a1") && listed.contains("poisoned") && !listed.contains("shelf"), "{listed}");
    let shown = program.well(&[&keys[..], &["--show-payload"]].concat()).await;
    assert!(shown.contains("RECORD KEY") && shown.contains("shelf"), "{shown}");
    let document = program.json(&keys, 0).await;
    assert_eq!((&document[0]["behind"], &document[0]["record_key"]), (&2.into(), &json!(null)));
    let document = program.json(&[&keys[..], &["--show-payload"]].concat(), 0).await;
    assert_eq!(document[0]["record_key"], "shelf \u{1b}[31m7");
    assert_eq!(program.run(&["handlers", "keys", "nobody"]).await.code, 2);

    let status = program.well(&["status"]).await;
    let row: Vec<&str> = status.lines().find(|line| line.starts_with("stock")).unwrap().split_whitespace().collect();
    assert!(status.contains("LATER  HELD  RUNNING") && row[2..6] == ["0", "0", "2", "0"], "{status}");
    // Held deliveries are waiting, as the doctor counts them.
    let would = program.well(&["handlers", "pause", "stock", "--dry-run"]).await;
    assert!(would.starts_with("would pause stock, 2 waiting deliveries"), "{would}");
    assert_eq!(program.json(&["handlers", "pause", "stock", "--dry-run"], 0).await["open"], 2);
    // A held delivery that is discarded does not wait any more.
    let show = ["deliveries", "show", "a2"];
    assert!(program.well(&show).await.contains("held: it waits"));
    program.well(&["poisoned", "discard", "--message", "a2", "--yes"]).await;
    let discarded = program.well(&show).await;
    assert!(discarded.contains("discarded") && !discarded.contains("held: it waits"), "{discarded}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poisoned_delivery_holds_its_key_only_while_another_waits_for_it() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let poisoning = runs.answering("stock", |_| Err(Failure::poison("no such shelf")));
    let inbox = scene.inbox().subscribe("orders", poisoning.ordered_by(OrderKey::record_key())).build().unwrap();
    let program = Program::on(&scene);
    let told = async || {
        inbox.drain().await.unwrap();
        let keys = program.json(&["handlers", "keys", "stock"], 0).await;
        let doctor = program.json(&["doctor"], 1).await;
        let symptoms = doctor["diagnosis"]["symptoms"].as_array().unwrap();
        let codes = symptoms.iter().map(|symptom| symptom["code"].as_str().unwrap().to_owned());
        (keys.as_array().unwrap().len(), codes.collect::<Vec<_>>())
    };
    inbox.accept(record("a1").with_key("a")).await.unwrap();
    assert_eq!(told().await, (0, vec!["poisoned".to_owned()]));
    inbox.accept(record("a2").with_key("a")).await.unwrap();
    let (keys, codes) = told().await;
    assert!(keys == 1 && codes.contains(&"held keys".to_owned()), "{codes:?}");
    program.well(&["poisoned", "discard", "--message", "a2", "--yes"]).await;
    assert_eq!(told().await, (0, vec!["poisoned".to_owned()]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_lacks_the_handler_of_open_deliveries_fails_the_check() {
    let (scene, runs, program) = accepted().await;
    let kept = scene.inbox().subscribe("orders", runs.handler("stock"));
    let build = kept.subscribe("orders", runs.handler("letters").formerly("mail")).build().unwrap();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(serde_json::to_string(&build.manifest()).unwrap().as_bytes()).unwrap();
    let path = file.path().to_str().unwrap();
    let plan = program.json(&["handlers", "rename-plan", "--manifest", path], 0).await;
    assert_eq!((&plan["is_safe"], &plan["handlers"][0]["change"]), (&true.into(), &json!({ "renamed": { "to": "letters" } })));

    // The same through stdin, with a build that lacks the handler.
    let mut command = program.command();
    command.args(["handlers", "rename-plan", "--manifest", "-"]);
    let mut stdin = tempfile::tempfile().unwrap();
    stdin.write_all(br#"{"handlers": [{"key": "stock"}]}"#).unwrap();
    std::io::Seek::rewind(&mut stdin).unwrap();
    command.stdin(stdin);
    let ran = finish(command).await;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.stdout.contains("mail     removed     2         0  NO"), "{}", ran.stdout);
    assert_eq!(program.run(&["handlers", "rename-plan", "--manifest", "/dev/null"]).await.code, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rename_without_a_former_key_fails_the_check_while_finished_messages_are_kept() {
    let (scene, runs, program) = accepted().await;
    let old = scene.inbox().subscribe("orders", runs.handler("stock")).subscribe("orders", runs.handler("mail"));
    old.build().unwrap().drain().await.unwrap();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(br#"{"handlers": [{"key": "stock"}, {"key": "letters"}]}"#).unwrap();
    let plan = ["handlers", "rename-plan", "--manifest", file.path().to_str().unwrap()];
    let told = program.json(&plan, 1).await;
    assert_eq!(told["handlers"][0]["may_be_renamed_to"], json!(["letters"]));
    let lines = program.run(&plan).await.stdout;
    let text = lines.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("redelivery runs the handler again under the new key"), "{text}");
    let told = program.json(&[&plan[..], &["--removed", "mail"]].concat(), 0).await;
    assert_eq!(told["is_safe"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_gives_a_new_handler_old_messages_once() {
    let (scene, runs, program) = accepted().await;
    scene.inbox().subscribe("orders", runs.handler("audit")).build().unwrap().drain().await.unwrap();
    let backfill = ["handlers", "backfill", "audit", "--topic", "orders", "--since", "1h", "--yes"];
    assert_eq!(program.well(&backfill).await, "backfill: 2 deliveries\n");
    assert_eq!(program.json(&backfill, 0).await["affected"], 0);
    assert_eq!(scene.count("inbox_status WHERE handler_key = 'audit' AND state = 'pending'").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_schema_is_created_checked_and_printed() {
    let database = <super::scene::Data as Database>::create().await;
    let url = Database::url(&database);
    let program = Program::at(&if url.starts_with("postgres") { url } else { format!("sqlite:{url}") });
    let none = program.run(&["status"]).await;
    assert_eq!((none.code, none.stderr.contains("run `wharf migrate`")), (1, true), "{none:?}");
    assert_eq!(program.run(&["doctor"]).await.code, 1);
    assert_eq!(program.json(&["migrate", "status"], 1).await["found"], serde_json::Value::Null);
    assert_eq!(program.json(&["migrate"], 0).await["is_current"], true);
    assert!(program.well(&["migrate"]).await.contains("nothing to do"));
    assert_eq!(program.json(&["migrate", "status"], 0).await["is_current"], true);
    assert!(program.well(&["status"]).await.starts_with("no process has registered a handler"));
    let sql = program.well(&["migrate", "--print"]).await;
    let is_postgres = std::any::TypeId::of::<super::scene::Db>() == std::any::TypeId::of::<Postgres>();
    assert_eq!(sql.contains("GENERATED"), is_postgres);
    assert!(sql.starts_with("-- version 1\n") && sql.contains("CREATE TABLE inbox_message"));
}
