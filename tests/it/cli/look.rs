//! The commands that show something: backlog, poisoned deliveries, single deliveries, and problems.

use wharf::Failure;
use wharf::operate::fingerprint;

use super::scene::{Runs, Scene, record};
use crate::cli::program::{Program, finish};

/// One poisoned and two completed deliveries of two handlers.
async fn scene() -> (Scene, Program) {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("mail.receipt", |message| match message.id() {
        "order-2" => Err(Failure::poison("the mail server does not know mallory\nat all")),
        _ => Ok(()),
    });
    let inbox =
        scene.inbox().subscribe("orders", failing).subscribe("orders", runs.handler("stock.reserve")).build().unwrap();
    inbox.accept_all([record("order-1"), record("order-2").with_header("token", "s3cret").with_key("k3y")]).await.unwrap();
    inbox.drain().await.unwrap();
    let program = Program::on(&scene);
    (scene, program)
}

#[tokio::test(flavor = "multi_thread")]
async fn help_lists_the_options_of_a_command_separately_from_global_options() {
    let (_scene, program) = scene().await;
    let mut command = program.command();
    command.args(["cleanup", "--help"]);
    let help = finish(command).await.stdout;
    let (own, global) = help.split_once("Options of every command:").expect("a heading");
    assert!(own.contains("--older-than") && !own.contains("--json") && !own.contains("--database"), "{help}");
    assert!(global.contains("--json") && global.contains("--database") && !global.contains("--older-than"), "{help}");
}

#[tokio::test(flavor = "multi_thread")]
async fn status_shows_the_backlog_of_each_handler_and_the_live_processes() {
    let (scene, program) = scene().await;
    scene.store.operate().pause("stock.reserve").await.unwrap();
    let text = program.well(&["status"]).await;
    assert!(text.contains("mail.receipt") && text.contains("paused") && text.contains("0 alive"), "{text}");
    assert!(!text.contains("HELD"), "no handler is ordered: {text}");
    let told = program.json(&["status"], 0).await;
    assert_eq!((&told["handlers"][0]["handler_key"], &told["handlers"][0]["poisoned"]), (&"mail.receipt".into(), &1.into()));
    assert!(told["handlers"][1]["paused_at"].is_string(), "{told}");
    assert!(told["processors"].is_array());
}

#[tokio::test(flavor = "multi_thread")]
async fn poisoned_deliveries_are_listed_counted_by_error_and_filtered() {
    let (_scene, program) = scene().await;
    let error = "the mail server does not know mallory\nat all";
    let list = program.well(&["poisoned", "list"]).await;
    assert!(list.contains("order-2") && list.contains("permanent") && list.contains(&fingerprint(error)), "{list}");
    let listed = program.json(&["poisoned", "list", "--error", "MALLORY", "--newer-than", "1h"], 0).await;
    assert_eq!((listed.as_array().unwrap().len(), &listed[0]["last_error"]), (1, &error.into()));
    assert_eq!(program.json(&["poisoned", "list", "--older-than", "1h"], 0).await, serde_json::json!([]));
    assert_eq!(program.well(&["poisoned", "list", "--topic", "returns"]).await, "none\n");
    let counted = program.json(&["poisoned", "list", "--by-error"], 0).await;
    assert_eq!((&counted[0]["poisoned"], &counted[0]["fingerprint"]), (&1.into(), &fingerprint(error).into()));
    assert!(program.well(&["poisoned", "list", "--by-error"]).await.contains("mail.receipt"));
}

#[tokio::test(flavor = "multi_thread")]
async fn payload_key_and_header_values_are_shown_only_on_request() {
    let (_scene, program) = scene().await;
    let show = ["poisoned", "show", "order-2", "--handler", "mail.receipt"];
    for hidden in [program.well(&show).await, program.json(&show, 0).await.to_string()] {
        assert!(hidden.contains("token") && hidden.contains("permanent"), "{hidden}");
        for secret in ["payload of order-2", "s3cret", "k3y"] {
            assert!(!hidden.contains(secret), "{hidden}");
        }
    }
    let show = [&show[..], &["--show-payload"]].concat();
    for shown in [program.well(&show).await, program.json(&show, 0).await.to_string()] {
        for value in ["payload of order-2", "s3cret", "k3y"] {
            assert!(shown.contains(value), "{shown}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_whole_error_of_each_attempt_is_shown() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("mail", |_| Err(Failure::poison(format!("{}the-end", "a long error, ".repeat(20)))));
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept_all([record("m1")]).await.unwrap();
    inbox.drain().await.unwrap();
    let shown = Program::on(&scene).well(&["deliveries", "show", "m1"]).await;
    // As the last error, and in the row of the attempt.
    assert_eq!(shown.matches("the-end").count(), 2, "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_are_listed_by_state_and_a_message_of_two_handlers_needs_a_handler_key() {
    let (_scene, program) = scene().await;
    let done = program.json(&["deliveries", "list", "--state", "done"], 0).await;
    assert_eq!(done.as_array().unwrap().len(), 3);
    let some = program.well(&["deliveries", "list", "--limit", "2"]).await;
    assert!(some.contains("more than 2"), "{some}");
    let which = program.run(&["deliveries", "show", "order-1"]).await;
    assert_eq!(which.code, 2);
    assert!(which.stderr.contains("--handler stock.reserve --source orders"), "{}", which.stderr);
    let one = program.json(&["deliveries", "show", "order-1", "--handler", "stock.reserve"], 0).await;
    assert_eq!((&one["delivery"]["state"], &one["record"]["topic"]), (&"done".into(), &"orders".into()));
    assert_eq!(one["failures"], serde_json::json!([]));
    let failed = program.json(&["poisoned", "show", "order-2"], 0).await;
    assert_eq!((&failed["failures"][0]["attempt"], &failed["failures"][0]["why"]), (&1.into(), &"permanent".into()));
    let shown = program.well(&["deliveries", "show", "order-2", "--handler", "mail.receipt"]).await;
    assert!(shown.contains("FAILED AT") && shown.contains("does not know mallory"), "{shown}");
    assert_eq!(program.run(&["deliveries", "show", "order-9"]).await.code, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_exit_code_of_the_doctor_tells_whether_there_are_problems() {
    let (scene, program) = scene().await;
    let ill = program.run(&["doctor"]).await;
    assert_eq!(ill.code, 1, "{ill:?}");
    assert!(ill.stdout.contains("problem   1 poisoned delivery") && ill.stdout.contains("P50"), "{}", ill.stdout);
    let told = program.json(&["doctor"], 1).await;
    assert_eq!(told["diagnosis"]["symptoms"][0]["code"], "poisoned");
    assert!(told["diagnosis"]["facts"]["lags"][0]["p50_secs"].is_number(), "{told}");
    program.well(&["poisoned", "discard", "--all", "--yes"]).await;
    assert!(program.well(&["doctor"]).await.lines().last() == Some("healthy"));
    drop(scene);
}
