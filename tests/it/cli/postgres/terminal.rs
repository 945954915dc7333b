//! With a person at a terminal: it asks, and a no is a no.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Command, Stdio};

use nix::pty::openpty;
use wharf::Failure;

use crate::scene::{Runs, Scene, record};

/// Answers the question at a terminal of its own. Returns the exit code and what stood there.
fn answer(url: &str, arguments: &[&str], answer: &str) -> (Option<i32>, String) {
    let terminal = openpty(None, None).unwrap();
    let side = || Stdio::from(terminal.slave.try_clone().unwrap());
    let mut child = Command::new(env!("CARGO_BIN_EXE_wharf"))
        .args(arguments)
        .env("DATABASE_URL", url)
        .stdin(side())
        .stdout(Stdio::null())
        .stderr(side())
        .spawn()
        .unwrap();
    // Else the reader below would never see the end.
    drop(terminal.slave);
    let mut person = File::from(terminal.master);
    let mut seen = Vec::new();
    let mut byte = [0];
    while !seen.ends_with(b"[y/N] ") && person.read(&mut byte).is_ok_and(|count| count == 1) {
        seen.push(byte[0]);
    }
    // The program may have ended already, which its code tells.
    let _ = person.write_all(answer.as_bytes());
    let code = child.wait().unwrap().code();
    (code, String::from_utf8_lossy(&seen).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_is_asked_and_only_a_yes_does_it() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("mail", |_| Err(Failure::poison("no")));
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    let url = scene.database.url();
    for (said, code, pending) in [("n\n", 1, 0), ("\n", 1, 0), ("y\n", 0, 1)] {
        let url = url.clone();
        let asked =
            tokio::task::spawn_blocking(move || answer(&url, &["poisoned", "replay", "--all"], said)).await.unwrap();
        assert_eq!(asked, (Some(code), "replay 1 deliveries? [y/N] ".to_owned()));
        assert_eq!(scene.count("inbox_status WHERE state = 'pending'").await, pending);
    }
}
