//! Whatever records, errors and operator texts contain, no command prints a control sequence that a terminal would
//! execute. `Program` checks every output.

use wharf::{Failure, Record};

use super::scene::{Runs, Scene};
use crate::cli::program::Program;

/// Colours, a window title, a cursor movement, reversed and hidden text, line ends, and more than one line of it.
const HOSTILE: &str = "\x1b[31m\x1b]0;owned\x07\u{9b}2J\x1b[5A\u{202e}gnp.exe\u{2066}\u{200d}\u{feff}\u{61c}\r\n\t\u{7f}\u{2028}\u{e0041} a long one that goes on and on and on and on and on and on";

#[tokio::test(flavor = "multi_thread")]
async fn no_command_prints_terminal_control_sequences() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("mail", |_| Err(Failure::poison(HOSTILE)));
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    let hostile = |id: &'static str| {
        let record = Record::new("orders").with_key(HOSTILE).with_header(HOSTILE, HOSTILE).with_header("bytes", &b"\xff\x1b"[..]);
        record.with_id(id).with_source(HOSTILE).with_payload(HOSTILE)
    };
    let bytes = hostile("bytes").with_payload(&b"\xff\x1b]0;x\x07"[..]);
    inbox.accept_or_quarantine([hostile("id"), bytes, hostile("forced"), Record::new("orders").with_payload(HOSTILE)]).await.unwrap();
    // Texts that are rejected on input today are written directly to the tables.
    let force = [
        format!("UPDATE inbox_message SET message_id = '{HOSTILE}', topic = '{HOSTILE}' WHERE message_id = 'forced'"),
        format!("UPDATE inbox_quarantine SET reason = '{HOSTILE}', detail = '{HOSTILE}', topic = '{HOSTILE}'"),
    ];
    for sql in &force {
        scene.database.execute(sql).await;
    }
    inbox.drain().await.unwrap();
    let program = Program::on(&scene);
    program.well(&["poisoned", "replay", "--all", "--yes", "--because", HOSTILE, "--actor", HOSTILE]).await;
    inbox.drain().await.unwrap();

    let mut commands: Vec<Vec<&str>> = ["status", "doctor", "poisoned list", "poisoned list --by-error", "deliveries list", "quarantine list", "handlers list", "poisoned replay --all --dry-run", "quarantine discard --all --dry-run"]
        .iter()
        .map(|command| command.split(' ').collect())
        .collect();
    for id in ["id", "bytes", HOSTILE] {
        commands.push(vec!["poisoned", "show", id]);
        commands.push(vec!["poisoned", "show", id, "--show-payload"]);
    }
    let quarantined = program.json(&["quarantine", "list"], 0).await;
    let id = quarantined[0]["id"].to_string();
    commands.push(vec!["quarantine", "show", &id]);
    commands.push(vec!["quarantine", "show", &id, "--show-payload"]);
    commands.push(vec!["poisoned", "list", "--handler", HOSTILE]);
    for command in commands {
        let people = program.run(&command).await;
        assert!([0, 1, 2].contains(&people.code), "{command:?} {people:?}");
        let machine = program.run(&[&command[..], &["--json"]].concat()).await;
        let text = if machine.code == 2 || machine.stdout.is_empty() { &machine.stderr } else { &machine.stdout };
        serde_json::from_str::<serde_json::Value>(text).unwrap_or_else(|error| panic!("{error} {command:?} {machine:?}"));
    }
    // The text is complete, and unchanged in JSON.
    let shown = program.json(&["poisoned", "show", "id", "--show-payload"], 0).await;
    assert_eq!(shown["record"]["payload"]["text"], HOSTILE);
    let people = program.well(&["poisoned", "show", "id", "--show-payload"]).await;
    assert!(people.contains(r"\u{1b}]0;owned\u{7}"), "{people}");
}
