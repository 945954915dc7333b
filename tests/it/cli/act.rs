//! Operator actions of the CLI: they change only what the filter matches, are bounded, ask for confirmation, are
//! audited, and change nothing when they are repeated.

use serde_json::json;
use wharf::Failure;

use super::scene::{Runs, Scene, State, quick, record, records};
use crate::cli::program::{Program, finish};

/// Three poisoned deliveries of one handler, one of another.
async fn scene() -> (Scene, Program) {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let mail = runs.answering("mail", |message| Err(Failure::poison(format!("timeout of {}", message.id()))));
    let stock = runs.answering("stock", |message| match message.id() {
        "m1" => Err(Failure::poison("out of stock")),
        _ => Ok(()),
    });
    let inbox = scene.inbox().subscribe("orders", mail).subscribe("orders", stock).build().unwrap();
    inbox.accept_all(["m1", "m2", "m3"].map(record)).await.unwrap();
    inbox.drain().await.unwrap();
    let program = Program::on(&scene);
    (scene, program)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_shows_the_exact_set_and_changes_nothing() {
    let (scene, program) = scene().await;
    let before = scene.states().await;
    let would = program.json(&["poisoned", "replay", "--handler", "mail", "--limit", "2", "--dry-run"], 0).await;
    assert_eq!((&would["meant"], &would["remaining"]), (&2.into(), &1.into()));
    let ids: Vec<_> = would["deliveries"].as_array().unwrap().iter().map(|one| one["message_id"].clone()).collect();
    assert_eq!(scene.states().await, before);
    assert_eq!(scene.count("inbox_audit").await, 0);
    assert!(program.well(&["poisoned", "discard", "--all", "--dry-run"]).await.contains("would discard 4; 0 more remain"));
    assert_eq!(scene.states().await, before);

    let acted = program.json(&["poisoned", "replay", "--handler", "mail", "--limit", "2", "--yes"], 4).await;
    assert_eq!(acted, json!({ "action": "replay", "dry_run": false, "meant": 2, "affected": 2, "remaining": 1 }));
    let pending = "SELECT message_id FROM inbox_status WHERE state = 'pending' ORDER BY message_id";
    let mut ids: Vec<&str> = ids.iter().map(|id| id.as_str().unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(scene.database.query_texts(pending).await, ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_is_audited_with_actor_and_reason_and_repeating_it_changes_nothing() {
    let (scene, program) = scene().await;
    let replay = ["poisoned", "replay", "--error", "timeout", "--yes", "--because", "it is back", "--actor", "alice"];
    assert!(program.well(&replay).await.contains("replay: 3 deliveries"));
    assert_eq!(program.well(&replay).await, "there is nothing to replay\n");
    let audit = "SELECT concat_ws('|', action, affected, actor, because, filter->>'error') FROM inbox_audit";
    assert_eq!(scene.database.query_texts(audit).await, ["replay|3|alice|it is back|timeout"]);
    assert_eq!(scene.count("inbox_status WHERE state = 'pending'").await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_changed_without_confirmation_or_filter() {
    let (scene, program) = scene().await;
    let before = scene.states().await;
    for (arguments, why) in [
        (&["poisoned", "replay", "--all"][..], "there is no terminal"),
        (&["poisoned", "discard", "--handler", "mail"], "there is no terminal"),
        (&["handlers", "pause", "mail"], "there is no terminal"),
        (&["quarantine", "discard", "--all"], "there is no terminal"),
        (&["handlers", "backfill", "mail", "--topic", "orders"], "there is no terminal"),
        (&["poisoned", "replay", "--yes"], "use a filter, or --all"),
        (&["quarantine", "replay", "--yes"], "use a filter, or --all"),
        (&["poisoned", "replay", "--yes", "--handler", "nobody"], "unknown handler key"),
    ] {
        let ran = program.run(arguments).await;
        let told = ran.stderr.replace('\n', " ");
        assert_eq!((ran.code, told.contains(why)), (2, true), "{arguments:?} {ran:?}");
        // The advice is about options that the command has.
        let has_dry_run = arguments[1] != "backfill";
        assert_eq!(told.contains("--dry-run"), has_dry_run && why == "there is no terminal", "{told}");
    }
    assert_eq!(scene.states().await, before);
    assert_eq!(scene.count("inbox_audit").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_discard_keeps_the_reason_and_a_replay_by_message_reverts_it() {
    let (scene, program) = scene().await;
    let m2 = ["--message", "m2", "--handler", "mail", "--yes"];
    program.well(&[&["poisoned", "discard", "--because", "a test order"], &m2[..]].concat()).await;
    assert_eq!(scene.count("inbox_status WHERE state = 'discarded'").await, 1);
    program.well(&[&["poisoned", "replay"], &m2[..]].concat()).await;
    let shown = program.json(&["deliveries", "show", "m2", "--handler", "mail"], 0).await;
    assert_eq!((&shown["delivery"]["state"], &shown["delivery"]["replays"]), (&"pending".into(), &1.into()));
    let history = shown["history"].as_array().unwrap();
    let told: Vec<_> = history.iter().map(|entry| (entry["action"].clone(), entry["because"].clone())).collect();
    assert_eq!(told, [("discard".into(), "a test order".into()), ("replay".into(), serde_json::Value::Null)]);

    // A replay that is watched takes it too. No process runs the handler.
    program.well(&[&["poisoned", "discard"], &m2[..]].concat()).await;
    let watched = program.json(&[&["poisoned", "replay", "--wait", "1ms"], &m2[..]].concat(), 4).await;
    assert_eq!((&watched["affected"], &watched["remaining"], &watched["stopped"]), (&1.into(), &0.into(), &"waited".into()));
    assert_eq!(scene.count("inbox_status WHERE state = 'discarded'").await, 0);
}

// Each delivery of a message is named, so each is a step of its own, and the wait is that of all together.
#[tokio::test(flavor = "multi_thread")]
async fn a_watched_replay_of_a_message_adds_up_its_deliveries() {
    let (scene, program) = scene().await;
    let m1 = ["poisoned", "replay", "--message", "m1", "--yes"];
    // No process runs the handlers.
    let careful = program.json(&[&m1[..], &["--canary", "--wait", "1ms"]].concat(), 4).await;
    assert_eq!((&careful["affected"], &careful["remaining"], &careful["stopped"]), (&1.into(), &1.into(), &"waited".into()));
    program.well(&["poisoned", "discard", "--message", "m1", "--yes"]).await;
    let watched = program.json(&[&m1[..], &["--wait", "1ms"]].concat(), 4).await;
    let expected = json!({
        "action": "replay", "dry_run": false, "meant": 2, "affected": 2, "remaining": 0, "done": 0, "failed": 0, "stopped": "waited",
    });
    assert_eq!(watched, expected);
    assert_eq!(scene.count("inbox_status WHERE message_id = 'm1' AND state = 'pending'").await, 2);

    let repaired = |name| Runs::new().answering(name, |message| match message.id() {
        "m3" => Err(Failure::poison("still bad")),
        _ => Ok(()),
    });
    let running = scene.inbox().subscribe("orders", repaired("mail")).subscribe("orders", repaired("stock"));
    let running = running.build().unwrap().start().await.unwrap();
    scene.until("SELECT (count(*) = 2)::int::bigint FROM inbox_status WHERE message_id = 'm1' AND state = 'done'").await;
    for (id, code, done, failed) in [("m2", 0, 1, 0), ("m3", 4, 0, 1)] {
        let watched = ["poisoned", "replay", "--message", id, "--yes", "--wait", "60s"];
        let told = program.json(&watched, code).await;
        assert_eq!((&told["done"], &told["failed"], &told["stopped"]), (&done.into(), &failed.into(), &json!(null)));
    }
    running.shutdown(std::time::Duration::from_secs(5)).await.unwrap();
}

/// Everything is poisoned for one reason. The handler of the inbox is repaired for the ids that `is_repaired` accepts.
async fn canary(count: usize, is_repaired: fn(&str) -> bool, arguments: &[&str], code: i32) -> (serde_json::Value, Scene) {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let broken = runs.answering("mail", |_| Err(Failure::poison("a bad deploy")));
    let inbox = scene.inbox().subscribe("orders", broken).build().unwrap();
    inbox.accept_all(records(count)).await.unwrap();
    inbox.drain().await.unwrap();
    let repaired = runs.answering("mail", move |message| match is_repaired(message.id()) {
        true => Ok(()),
        false => Err(Failure::poison("still bad")),
    });
    let running = scene.inbox().subscribe("orders", repaired).build().unwrap().start().await.unwrap();
    let replay = ["poisoned", "replay", "--all", "--yes", "--wait", "30s"];
    let told = Program::on(&scene).json(&[&replay, arguments].concat(), code).await;
    running.shutdown(std::time::Duration::from_secs(5)).await.unwrap();
    (told, scene)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_canary_continues_while_deliveries_succeed_and_reports_all_outcomes() {
    let (told, scene) = canary(40, |_| true, &["--canary"], 0).await;
    let expected = json!({
        "action": "replay", "dry_run": false, "meant": 40, "affected": 40, "remaining": 0, "done": 40, "failed": 0, "stopped": null,
    });
    assert_eq!(told, expected);
    assert_eq!(scene.count_in(State::Done).await, 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_canary_stops_when_too_many_deliveries_fail_again() {
    let (told, scene) = canary(40, |id| id == "m000000", &["--canary", "--max-failure-ratio", "0.5"], 4).await;
    assert_eq!((&told["stopped"], &told["affected"], &told["remaining"]), (&"failures".into(), &11.into(), &29.into()));
    assert_eq!(scene.count_in(State::Done).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_with_wait_reports_the_outcomes() {
    let (told, _scene) = canary(3, |id| id != "m000001", &[], 4).await;
    assert_eq!((&told["done"], &told["failed"], &told["stopped"]), (&2.into(), &1.into(), &serde_json::Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stuck_run_is_released_by_its_attempt_and_only_while_it_runs() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let gate = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
    let limits = quick().lease(std::time::Duration::from_secs(600));
    let inbox = scene.inbox().limits(limits).subscribe("orders", runs.held("mail", &gate).concurrency(1)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("m1")).await.unwrap();
    runs.reached(1).await;
    let program = Program::on(&scene);
    let release = ["deliveries", "release", "m1"];
    let refused = program.run(&release).await;
    assert!(refused.code == 2 && refused.stderr.replace('\n', " ").contains("there is no terminal"), "{refused:?}");
    let would = program.json(&[&release[..], &["--dry-run"]].concat(), 0).await;
    assert_eq!((&would["attempt"], &would["deliveries"][0]["message_id"]), (&1.into(), &"m1".into()));
    let another = program.run(&[&release[..], &["--attempt", "2", "--yes"]].concat()).await;
    assert!(another.code == 1 && another.stderr.contains("attempt 1 is"), "{another:?}");
    assert_eq!(scene.count("inbox_audit").await, 0);
    let told = program.well(&[&release[..], &["--attempt", "1", "--because", "it hangs", "--yes"]].concat()).await;
    assert!(told.contains("released attempt 1"), "{told}");
    let audit = "SELECT concat_ws('|', action, affected, because, filter->>'handler_key', filter->>'attempt') FROM inbox_audit";
    assert_eq!(scene.database.query_texts(audit).await, ["release|1|it hangs|mail|1"]);
    assert_eq!(scene.states().await, ["m1 mail pending"]);
    let ended = program.run(&[&release[..], &["--yes"]].concat()).await;
    assert!(ended.code == 1 && ended.stderr.contains("not running"), "{ended:?}");
    gate.add_permits(9);
    running.shutdown(std::time::Duration::from_secs(20)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_delivery_is_replayed_with_a_corrected_payload_from_an_editor_or_a_file() {
    let (scene, program) = scene().await;
    let edit = ["poisoned", "replay", "--message", "m1", "--handler", "mail", "--edit", "--yes"];
    let with_editor = async |editor: &str| {
        let mut command = program.command();
        command.args(edit).env("VISUAL", "").env("EDITOR", editor);
        finish(command).await
    };
    // The editor gets a file with the payload that only its owner can read.
    let seen = tempfile::tempdir().unwrap();
    let notes = seen.path().join("notes");
    let private = with_editor(&format!("sh -c 'stat -c %a \"$1\" > {0}; cat \"$1\" >> {0}' -", notes.display())).await;
    assert!(private.code == 1 && private.stderr.contains("the payload is unchanged"), "{private:?}");
    assert_eq!(std::fs::read_to_string(notes).unwrap(), "600\npayload of m1");
    for (editor, code, why) in [("", 2, "set VISUAL or EDITOR"), ("false", 1, "the editor failed")] {
        let refused = with_editor(editor).await;
        assert!(refused.code == code && refused.stderr.replace('\n', " ").contains(why), "{refused:?}");
    }
    // An error of a file or of the shell names it, and is not reported as one of the output.
    let failing = async |editor: &str, name: &str, value: &str| {
        let mut command = program.command();
        command.args(edit).env("VISUAL", "").env("EDITOR", editor).env(name, value);
        let ran = finish(command).await;
        assert_eq!(ran.code, 1, "{ran:?}");
        ran.stderr.replace('\n', " ")
    };
    let absent = seen.path().join("absent");
    let absent = absent.to_str().unwrap();
    for (told, why) in [
        (failing("rm", "TMPDIR", seen.path().to_str().unwrap()).await, "cannot read the edited payload from"),
        (failing("true", "TMPDIR", absent).await, "cannot create the folder"),
        (failing("true", "PATH", absent).await, "cannot start `sh` to edit"),
    ] {
        assert!(told.contains(why) && told.contains("wharf-") && told.contains("nothing was done"), "{told}");
    }
    assert_eq!(scene.count("inbox_audit").await, 0);
    let told = with_editor("sed -i s/payload/corrected/").await;
    assert!(told.code == 0 && told.stdout.contains("15 bytes instead of 13"), "{told:?}");

    let file = seen.path().join("corrected");
    std::fs::write(&file, "from a file").unwrap();
    let with_file = ["poisoned", "replay", "--message", "m2", "--handler", "mail", "--payload-file", file.to_str().unwrap()];
    let would = program.json(&[&with_file[..], &["--dry-run"]].concat(), 0).await;
    assert_eq!((&would["dry_run"], &would["payload_bytes"]), (&true.into(), &11.into()));
    let refused = program.run(&[&with_file[..], &["--all", "--yes"]].concat()).await;
    assert_eq!(refused.code, 2, "{refused:?}");
    assert_eq!(scene.count("inbox_correction").await, 1);
    let told = program.json(&[&with_file[..], &["--yes", "--because", "a typing error"]].concat(), 0).await;
    assert_eq!((&told["affected"], &told["action"]), (&1.into(), &"replay corrected".into()));

    let show = ["deliveries", "show", "m2", "--handler", "mail"];
    let hidden = program.well(&show).await;
    assert!(hidden.contains("corrected payload") && !hidden.contains("from a file"), "{hidden}");
    let show = [&show[..], &["--show-payload"]].concat();
    let shown = program.well(&show).await;
    assert!(shown.contains("payload of m2") && shown.contains("from a file"), "{shown}");
    assert_eq!(program.json(&show, 0).await["correction"]["payload"]["text"], "from a file");
}
