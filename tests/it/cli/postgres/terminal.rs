//! On a terminal the program asks for confirmation, a no changes nothing, and `--watch` updates in place.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::sync::Semaphore;
use wharf::order::OrderKey;
use wharf::{Failure, Identity, Message, Raw, Record, handler};

use crate::scene::{Runs, Scene, key, quick, record};

/// Answers the question on a new terminal. Returns the exit code and the output.
fn answer(url: &str, arguments: &[&str], answer: &str) -> (Option<i32>, String) {
    answer_when(url, arguments, answer, || ())
}

/// The same, once this function has returned, which is called when the question is there.
fn answer_when(url: &str, arguments: &[&str], answer: &str, when: impl FnOnce()) -> (Option<i32>, String) {
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
    // Otherwise the reader below would never see the end of the output.
    drop(terminal.slave);
    let mut person = File::from(terminal.master);
    let mut seen = Vec::new();
    let mut byte = [0];
    while !seen.ends_with(b"[y/N] ") && person.read(&mut byte).is_ok_and(|count| count == 1) {
        seen.push(byte[0]);
    }
    when();
    // The program may have ended already; its exit code shows that.
    let _ = person.write_all(answer.as_bytes());
    let code = child.wait().unwrap().code();
    (code, String::from_utf8_lossy(&seen).into_owned())
}

/// Answers yes once this change was made, which begins when the question is there. Returns the exit code and the output.
async fn agree_after(scene: &Scene, arguments: &[&str], change: impl Future<Output = ()>) -> (Option<i32>, String) {
    let (asked, asking) = tokio::sync::oneshot::channel();
    let (agree, agreed) = std::sync::mpsc::channel();
    let url = scene.database.url();
    let arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
    let person = tokio::task::spawn_blocking(move || {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        answer_when(&url, &arguments, "y\n", || {
            asked.send(()).unwrap();
            agreed.recv().unwrap();
        })
    });
    asking.await.unwrap();
    change.await;
    agree.send(()).unwrap();
    person.await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_action_asks_for_confirmation_and_only_yes_executes_it() {
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

#[tokio::test(flavor = "multi_thread")]
async fn the_question_about_a_rate_limit_names_the_old_and_the_new_one() {
    let scene = with_one_poisoned().await;
    let url = scene.database.url();
    let rate = ["handlers", "rate", "mail", "--per-sec", "5", "--burst", "1"];
    let asked = tokio::task::spawn_blocking(move || answer(&url, &rate, "y\n")).await.unwrap();
    let question = "change the rate limit of this handler from no limit to 5 per second, 1 at once? [y/N] ";
    assert_eq!(asked, (Some(0), question.to_owned()));
    assert_eq!(scene.count("inbox_handler WHERE rate_interval_us = 200000 AND rate_burst = 1").await, 1);
}

// What comes to match while the person reads the question is not changed.
#[tokio::test(flavor = "multi_thread")]
async fn an_action_changes_no_more_rows_than_the_question_named() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("mail", |_| Err(Failure::poison("no")));
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept_all(["a", "b"].map(record)).await.unwrap();
    inbox.drain().await.unwrap();
    let unidentified = |text: &'static str| Record::new("orders").with_payload(text);
    inbox.accept_or_quarantine([unidentified("first")]).await.unwrap();
    for (arguments, question) in [
        (["quarantine", "discard", "--all"], "discard 1 records? [y/N] "),
        (["poisoned", "discard", "--all"], "discard 3 deliveries? [y/N] "),
    ] {
        let told = agree_after(&scene, &arguments, async {
            inbox.accept_or_quarantine([unidentified(arguments[0])]).await.unwrap();
            inbox.accept(record(arguments[0])).await.unwrap();
            inbox.drain().await.unwrap();
        });
        assert_eq!(told.await, (Some(0), question.to_owned()));
    }
    assert_eq!(scene.count("inbox_quarantine").await, 2);
    assert_eq!(
        scene.states().await,
        ["a mail discarded", "b mail discarded", "poisoned mail poisoned", "quarantine mail discarded"]
    );
}

// The exit code shows that an action has changed fewer rows than the question named.
#[tokio::test(flavor = "multi_thread")]
async fn an_action_on_rows_that_somebody_else_has_changed_is_done_in_part() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let subscribed = || scene.inbox().subscribe("orders", runs.handler("mail"));
    let inbox = subscribed().build().unwrap();
    let unidentified = [1, 2].map(|number| Record::new("orders").with_payload(format!("{{\"number\":{number}}}")));
    for action in ["discard", "replay"] {
        inbox.accept_or_quarantine(unidentified.clone()).await.unwrap();
        // It accepts replayed records.
        let accepting = subscribed().identity("orders", Identity::json_pointer("/number")).build().unwrap();
        let running = accepting.start().await.unwrap();
        let discard = scene.database.execute(r#"SELECT inbox_quarantine_discard('{"all": true}', 1)"#);
        let told = agree_after(&scene, &["quarantine", action, "--all"], discard).await;
        assert_eq!(told, (Some(4), format!("{action} 2 records? [y/N] ")));
        running.shutdown(Duration::from_secs(20)).await.unwrap();
        assert_eq!(scene.count("inbox_quarantine").await, 0);
    }
    for text in ["first", "second"] {
        let publish = format!("SELECT inbox_publish('out', convert_to('{text}', 'UTF8'), source => '/shop')");
        scene.database.execute(&publish).await;
    }
    for (action, state) in [("discard", "waiting"), ("replay", "discarded")] {
        let same = format!(r#"SELECT inbox_outbox_{action}('{{"state": "{state}"}}', 1)"#);
        let told = agree_after(&scene, &["outbox", action, "--state", state], scene.database.execute(&same)).await;
        assert_eq!(told, (Some(4), format!("{action} 2 records? [y/N] ")));
        assert_eq!(scene.count(&format!("inbox_outgoing WHERE state = '{state}'")).await, 0);
    }
}

// A discarded delivery has the age of its message, so an age alone does not tell it from those of the question.
#[tokio::test(flavor = "multi_thread")]
async fn a_watched_replay_of_a_message_replays_only_deliveries_that_the_question_named() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let gate = Arc::new(Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let slow = handler(key("a"), move |message: Message<Raw>| {
        let gate = Arc::clone(&opened);
        async move {
            if message.attempt() == 1 {
                gate.acquire().await?.forget();
            }
            Err::<(), _>(Failure::discard("not needed"))
        }
    });
    let broken = |name| {
        runs.answering(name, |message| match message.attempt() {
            1 => Err(Failure::poison("no")),
            _ => Ok(()),
        })
    };
    let limits = quick().lease(Duration::from_secs(600));
    let inbox = scene.inbox().limits(limits).subscribe("orders", slow);
    let inbox = inbox.subscribe("orders", broken("b")).subscribe("orders", broken("c")).build().unwrap();
    let running = inbox.start().await.unwrap();
    for watched in [&["--wait", "60s"][..], &["--canary"]] {
        let id = watched[0].trim_start_matches('-');
        inbox.accept(record(id)).await.unwrap();
        scene.until("SELECT (count(*) = 2)::int::bigint FROM inbox_poisoned").await;
        let arguments = [&["poisoned", "replay", "--message", id], watched].concat();
        let told = agree_after(&scene, &arguments, async {
            gate.add_permits(1);
            scene.until("SELECT (count(*) = 0)::int::bigint FROM inbox_status WHERE state = 'running'").await;
        });
        assert_eq!(told.await, (Some(0), "replay 2 deliveries? [y/N] ".to_owned()));
        let states = ["a discarded", "b done", "c done"].map(|state| format!("{id} {state}"));
        let of_message = format!(
            "SELECT concat_ws(' ', message_id, handler_key, state) FROM inbox_status
                                  WHERE message_id = '{id}' ORDER BY 1"
        );
        assert_eq!(scene.database.query_texts(&of_message).await, states);
    }
    running.shutdown(Duration::from_secs(20)).await.unwrap();
}

/// Sends Ctrl-C to the terminal of the process. Returns the exit code.
fn interrupt(child: &mut Child) -> Option<i32> {
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).unwrap();
    child.wait().unwrap().code()
}

fn watching(url: &str, arguments: &[&str], stdout: Stdio) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wharf"));
    command.args(["status", "--watch=100ms"]).args(arguments).env("DATABASE_URL", url);
    command.stdin(Stdio::null()).stdout(stdout).stderr(Stdio::inherit()).spawn().unwrap()
}

/// A scene with one poisoned delivery of `mail`.
async fn with_one_poisoned() -> Scene {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("mail", |_| Err(Failure::poison("no")));
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    scene
}

/// Watches at a terminal of this size until three screens have stood there. Returns the exit code and all that was written.
async fn watched(url: String, rows: u16, columns: u16) -> (Option<i32>, String) {
    let look = move || {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let terminal = openpty(&size, None).unwrap();
        let mut child = watching(&url, &[], Stdio::from(terminal.slave.try_clone().unwrap()));
        drop(terminal.slave);
        let (mut screen, mut seen, mut bytes) = (File::from(terminal.master), String::new(), [0; 4096]);
        while seen.matches("\x1b[H").count() < 3 {
            let count = screen.read(&mut bytes).unwrap();
            seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
        (interrupt(&mut child), seen)
    };
    tokio::task::spawn_blocking(look).await.unwrap()
}

/// A partition as a process would report it.
async fn report_partition(scene: &Scene, partition: i32, lag: i64) {
    let place = format!("'shop', 'orders', {partition}, 'cluster'");
    let sql = format!(
        "INSERT INTO inbox_ledger (consumer_group, topic, kafka_partition, cluster_id, next_offset) VALUES ({place}, 7);
         INSERT INTO inbox_partition (consumer_group, topic, kafka_partition, cluster_id, state, lag, ingest)
         VALUES ({place}, 'reading', {lag}, 'host/1')"
    );
    scene.database.execute(&sql).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watched_status_shows_what_processes_hold_and_how_far_behind_handlers_and_partitions_are() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let gate = tokio::sync::watch::channel(false).0;
    let inbox = scene.inbox().subscribe("mails", runs.handler("mail"));
    let inbox = inbox.subscribe("orders", runs.gated("stock", &gate)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("held")).await.unwrap();
    report_partition(&scene, 3, 120).await;
    report_partition(&scene, 4, 0).await;

    // A report is about the time since the heartbeat before, so the handler has to go on.
    let hour_ago = SystemTime::now() - Duration::from_secs(3_660);
    let operator = scene.store.operate();
    let mut number = 0;
    let report = loop {
        number += 1;
        let late = Record::new("mails").with_id(format!("late {number}")).with_recorded_at(hour_ago);
        inbox.accept(late).await.unwrap();
        runs.reached(number + 1).await;
        let handlers = operator.handlers().await.unwrap();
        let lag = handlers.iter().find(|handler| handler.handler_key == "mail").unwrap().effective_lag_secs;
        // None before the first heartbeat.
        let report = operator.processors().await.unwrap().remove(0).report;
        if let Some(report) = report.filter(|report| lag.is_some_and(|secs| secs > 3_600.0) && report.in_flight > 0) {
            break report;
        }
    };
    assert!(report.pool_size > 0 && report.claimed_waiting <= report.in_flight, "{report:?}");

    let (_, seen) = watched(scene.database.url(), 60, 120).await;
    let screen = seen.split("\x1b[H").nth(1).unwrap();
    let line = |start: &str| screen.lines().find(|line| line.contains(start)).unwrap_or_else(|| panic!("{screen}"));
    assert!(line("HANDLER").contains("LAG") && line("claims: ").contains("waiting for a slot"), "{screen}");
    assert!(line("PROCESS").contains("IN FLIGHT") && line(" of ").contains(&format!("of {}", report.pool_size)));
    assert!(line("TOPIC").contains("PARTITION"), "{screen}");
    let partition: Vec<&str> = line("reading").split_whitespace().collect();
    assert_eq!(partition[..4], ["orders", "3", "120", "reading"], "{screen}");
    assert_eq!(screen.matches("reading").count(), 1, "a partition that is not behind is not listed: {screen}");
    gate.send_replace(true);
    running.shutdown(Duration::from_secs(20)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watched_status_stands_in_one_place_of_the_terminal_and_ctrl_c_ends_it_well() {
    let scene = with_one_poisoned().await;
    let url = scene.database.url();
    let (code, seen) = watched(url, 24, 80).await;
    assert_eq!(code, Some(0), "{seen}");
    let looks: Vec<&str> = seen.split("\x1b[H").skip(1).take(2).collect();
    for look in &looks {
        assert!(look.contains("mail") && look.contains("POISONED") && look.contains("quarantine: 0"), "{look:?}");
        // Each line clears the rest of the previous screen.
        assert!(
            look.lines().take_while(|line| !line.contains("\x1b[J")).all(|line| line.ends_with("\x1b[K")),
            "{look:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watched_status_without_a_terminal_prints_one_line_per_update() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("mail", |_| Err(Failure::poison("no"))).ordered_by(OrderKey::record_key());
    let late = runs.handler("late").delay(Duration::from_secs(3_600));
    let inbox = scene.inbox().subscribe("orders", failing).subscribe("orders", late).build().unwrap();
    inbox.accept_all(["a", "b"].map(|id| record(id).with_key("one"))).await.unwrap();
    inbox.drain().await.unwrap();
    let url = scene.database.url();
    let lines = move |arguments: &[&str]| {
        let mut child = watching(&url, arguments, Stdio::piped());
        let printed = BufReader::new(child.stdout.take().unwrap());
        let lines: Vec<String> = printed.lines().take(2).map(Result::unwrap).collect();
        assert_eq!(interrupt(&mut child), Some(0), "{lines:?}");
        lines
    };
    let (plain, json) = tokio::task::spawn_blocking(move || (lines(&[]), lines(&["--json"]))).await.unwrap();
    let counts = " due 0 later 2 held 1 running 0 poisoned 1 ";
    assert!(plain.iter().all(|line| line.contains(counts) && !line.contains('\x1b')), "{plain:?}");
    assert!(plain[0].contains(" effective-lag - in-flight 0 waiting 0 unsettled 0 connections "), "{plain:?}");
    let looks: Vec<Value> = json.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(looks[0]["handlers"][1]["poisoned"], 1);
    assert!(looks[0]["read_per_sec"].is_null() && looks[1]["read_per_sec"] == 0.0, "{looks:?}");
    assert_eq!(looks[1]["due_per_sec"]["mail"], 0.0);
    assert_eq!(looks[1]["totals"]["quarantined"], 0);
}
