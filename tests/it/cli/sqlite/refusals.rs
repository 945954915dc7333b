//! Invalid databases, wrong usage and closed pipes lead to an exit code and a message, never to a panic, a hang or a
//! new file.

use std::process::Stdio;

use crate::cli::program::{Program, finish};
use crate::scene::within;

#[tokio::test(flavor = "multi_thread")]
async fn only_migrate_creates_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new.db");
    let url = format!("sqlite:{}", path.display());
    let nowhere = Program::at("");
    for arguments in [&["status"][..], &["doctor"], &["migrate", "status"], &["migrate", "--print"]] {
        let mut command = nowhere.command();
        command.args(["--database", &url]).args(arguments);
        let expected = if arguments.contains(&"--print") { 0 } else { 3 };
        assert_eq!(finish(command).await.code, expected, "{arguments:?}");
        assert!(!path.exists());
    }
    let mut command = nowhere.command();
    command.args(["migrate", "--database", &url]);
    assert_eq!(finish(command).await.code, 0);
    assert!(path.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_usage_exits_with_2_and_a_failed_connection_with_3() {
    for (url, arguments, code) in [
        ("", &["status"][..], 2),
        ("", &["nonsense"], 2),
        ("", &[], 2),
        ("sqlite:", &["status"], 2),
        ("sqlite::memory:", &["status"], 2),
        ("sqlite:x", &["poisoned", "replay", "--max-failure-ratio", "2"], 2),
        ("sqlite:x", &["poisoned", "list", "--older-than", "soon"], 2),
        ("sqlite:no/such/folder/x", &["status"], 3),
        ("postgres://127.0.0.1:1/x", &["status"], 3),
        ("", &["--help"], 0),
        ("", &["--version"], 0),
        ("", &["poisoned", "replay", "--help"], 0),
    ] {
        let mut command = Program::at(url).command();
        command.args(arguments);
        let ran = finish(command).await;
        assert_eq!((ran.code, ran.stderr.is_empty()), (code, code == 0), "{arguments:?} {ran:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_are_json_with_the_json_option() {
    for (arguments, code, name) in [(&["status", "--json"][..], 3, "connection"), (&["--json", "nonsense"], 2, "usage")]
    {
        let ran = Program::at("postgres://127.0.0.1:1/x").run(arguments).await;
        let told: serde_json::Value = serde_json::from_str(&ran.stderr).unwrap();
        assert_eq!((ran.code, &told["exit"], &told["code"]), (code, &code.into(), &name.into()), "{told}");
        assert!(told["error"].is_string() && ran.stdout.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_output_pipe_is_not_an_error() {
    let mut command = Program::at("sqlite:x").command();
    let mut child = command.args(["migrate", "--print"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = within(child.wait_with_output()).await.unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn shell_completions_are_generated() {
    for shell in ["bash", "zsh", "fish"] {
        let mut command = Program::at("").command();
        command.args(["completions", shell]);
        let output = within(command.output()).await.unwrap();
        assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("poisoned"));
    }
}
