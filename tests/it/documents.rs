//! The examples of the documents work: every SQL statement runs in psql or sqlite3, every command parses, every link
//! leads to a file. `documents/readme.rs` compiles the Rust code of the README, `quickstart.rs` runs its commands, and
//! `documents/options.rs` checks that every option is described.

mod options;
mod readme;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use wharf::{Failure, RetryPolicy};

use crate::conformance::sqlite::scene as sqlite;
use crate::scene::{Runs, Scene, record};
use support::postgres_binaries::program;

fn documents() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut paths: Vec<PathBuf> = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
        .iter()
        .map(|name| root.join(name))
        .collect();
    for folder in ["docs", "docs/guide"] {
        let in_folder = fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path());
        paths.extend(in_folder.filter(|path| path.is_file()));
    }
    paths.into_iter().map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

/// The blocks of a document that are marked as `language`.
fn blocks<'a>(document: &'a str, language: &str) -> Vec<&'a str> {
    let opening = format!("```{language}\n");
    document.split(opening.as_str()).skip(1).map(|rest| rest.split("```").next().unwrap_or_default()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_statement_in_the_documents_runs_in_psql() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let failing = runs.answering("mail.receipt", |_| Err(Failure::retry("no"))).retry(RetryPolicy::never());
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept(record("order-17/placed")).await.unwrap();
    inbox.drain().await.unwrap();

    let mut count = 0;
    for (path, document) in documents() {
        for sql in blocks(&document, "sql") {
            count += 1;
            let ran = Command::new(program("psql"))
                .args([&scene.database.url(), "--set", "ON_ERROR_STOP=1", "--command", sql])
                .output()
                .unwrap();
            assert!(ran.status.success(), "{}:\n{sql}\n{}", path.display(), String::from_utf8_lossy(&ran.stderr));
        }
        if path.ends_with("README.md") {
            // The statement before has replayed this delivery.
            assert_eq!(scene.count("inbox_audit WHERE action = 'replay' AND affected = 1").await, 1);
        }
    }
    assert!(count >= 15, "the documents have lost their statements");
}

// All of them are shown, and each of them acts.
#[tokio::test(flavor = "multi_thread")]
async fn every_action_on_sqlite_is_shown_and_runs_in_its_shell() {
    let (scene, runs) = (sqlite::Scene::new().await, Runs::new());
    let failing = runs.answering("mail.receipt", |_| Err(Failure::poison("no")));
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept_all(["order-17/placed", "order-18/placed", "order-19/placed"].map(record)).await.unwrap();
    inbox.drain().await.unwrap();
    scene
        .database
        .execute(
            "UPDATE inbox_delivery SET status = 0, finished_at = NULL, attempts = 3, locked_by = 1,
                    locked_until = (SELECT at FROM inbox_now) + 3600000000
             WHERE message_seq = (SELECT seq FROM inbox_message WHERE message_id = 'order-19/placed');
             INSERT INTO inbox_ledger (consumer_group, topic, kafka_partition, next_offset, updated_at) VALUES ('shop', 'orders', 0, 7, 0);
             INSERT INTO inbox_outbox (id, stored_at, finished_at, slot, status, message_id, source, topic)
             VALUES (17, 0, 0, 0, 3, 'order-17/reserved', '/shop/stock', 'stock.reserved')",
        )
        .await;
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let operations = fs::read_to_string(root.join("docs/operations.md")).unwrap();
    let shown = blocks(&operations, "sqlite").concat();
    let ran = Command::new("sqlite3")
        .args(["-bail", "-cmd", ".timeout 60000"])
        .arg(scene.database.path())
        .arg(&shown)
        .output();
    let ran = ran.unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let audit =
        scene.database.query_texts("SELECT concat_ws(' ', action, affected) FROM inbox_audit ORDER BY id").await;
    assert_eq!(audit.len(), shown.matches("INSERT INTO ").count());
    assert!(audit.iter().all(|action| action.ends_with(" 1")), "{audit:?}");
    let views =
        scene.database.query_texts("SELECT tbl_name FROM sqlite_master WHERE sql LIKE '%INSTEAD OF INSERT%'").await;
    assert!(views.len() >= 12, "{views:?}");
    for view in views {
        assert!(shown.contains(&format!("INSERT INTO {view} (")), "{view}");
    }
}

// A sequence that stays behind after a cut-over lets new messages sort before old ones.
#[tokio::test(flavor = "multi_thread")]
async fn the_section_on_a_cut_over_sets_every_sequence_of_the_schema() {
    let scene = Scene::new().await;
    let operations = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operations.md")).unwrap();
    let section = operations.split("## After a cut-over to a logical replica").nth(1).unwrap();
    let section = section.split("\n## ").next().unwrap();
    // The sequence of an identity column is named by its column.
    let sequences = "SELECT CASE WHEN t.relname IS NULL THEN quote_literal(s.relname)
                                 ELSE format('pg_get_serial_sequence(%L, %L)', t.relname, a.attname) END
                     FROM pg_class s
                     LEFT JOIN pg_depend d ON d.objid = s.oid AND d.classid = 'pg_class'::regclass AND d.deptype = 'i'
                     LEFT JOIN pg_class t ON t.oid = d.refobjid
                     LEFT JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
                     WHERE s.relkind = 'S' AND s.relnamespace = current_schema()::regnamespace";
    let sequences = scene.database.query_texts(sequences).await;
    assert!(sequences.len() >= 8, "{sequences:?}");
    for sequence in sequences {
        assert!(section.contains(&format!("setval({sequence}, ")), "{sequence}");
    }
}

#[test]
fn every_wharf_command_in_the_documents_is_understood() {
    let mut count = 0;
    for (path, document) in documents() {
        for line in blocks(&document, "sh").into_iter().flat_map(str::lines).filter(|line| line.starts_with("wharf ")) {
            count += 1;
            // The shell splits the line; with `--help` a correct line prints the help.
            let script = format!("wharf() {{ \"$WHARF\" \"$@\" --help; }}; {line}");
            let ran =
                Command::new("bash").args(["-c", &script]).env("WHARF", env!("CARGO_BIN_EXE_wharf")).output().unwrap();
            assert!(ran.status.success(), "{}: {line}\n{}", path.display(), String::from_utf8_lossy(&ran.stderr));
        }
    }
    assert!(count >= 30, "the documents have lost their commands");
}

// `--help` would hide options that conflict. A command that is understood fails because there is no database, or
// because the advice leaves out what the reader has to add.
#[test]
fn every_command_in_alerts_and_in_the_advice_of_the_doctor_is_understood() {
    let read = |path: &str| fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    let alerts = read("src/bin/wharf/observe/alerts.rs");
    let alerts = alerts.replace("{{ $labels.handler }}", "mail").replace("{{ $labels.topic }}", "orders");
    let doctor = ["", "/kafka", "/outbox"].map(|part| read(&format!("src/operate/doctor{part}.rs"))).concat();
    let doctor = doctor.replace("{position}", "--group shop --topic orders --partition 0 --to 17");
    let quoted = alerts.split("`wharf ").skip(1).chain(doctor.split("`wharf ").skip(1));
    let quoted = quoted.map(|rest| rest.split('`').next().unwrap());
    // Most advice of the doctor has no mark at the end of a command: its text continues.
    let told = ["\"wharf ", "; wharf ", ": wharf "].into_iter().flat_map(|begin| doctor.split(begin).skip(1));
    let told = told.map(|rest| rest.split(['"', ';', ',']).next().unwrap());
    let ends = [" lists", " shows", " resumes", " leaves"];
    let told = told.map(|text| ends.iter().fold(text, |text, end| text.split(end).next().unwrap()));
    let mut count = 0;
    for command in quoted.chain(told) {
        count += 1;
        let words = command.replace(['…', '{', '}'], "x");
        let ran = Command::new(env!("CARGO_BIN_EXE_wharf"))
            .args(words.split_whitespace())
            .env("DATABASE_URL", "postgres://127.0.0.1:1/nothing")
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&ran.stderr).replace('\n', " ");
        let is_understood = ran.status.code() != Some(2) || told.contains("required arguments were not provided");
        assert!(is_understood, "wharf {words}\n{told}");
    }
    assert!(count >= 25, "only {count} commands were found");
}

#[test]
fn every_link_leads_to_a_file_and_to_a_heading_of_it() {
    for (path, document) in documents() {
        let folder = path.parent().unwrap();
        let inline = document.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let definitions =
            document.lines().filter(|line| line.starts_with('[')).filter_map(|line| line.split_once("]: "));
        for link in inline.chain(definitions.map(|(_, link)| link)) {
            // Rustdoc checks links to items.
            if link.contains("://") || link.starts_with("crate::") {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { folder.join(file) };
            assert!(target.exists(), "{}: {link}", path.display());
            let has_heading = || fs::read_to_string(&target).unwrap().lines().any(|line| anchor(line) == heading);
            assert!(heading.is_empty() || has_heading(), "{}: {link}", path.display());
        }
    }
}

/// What a heading is linked by.
fn anchor(line: &str) -> String {
    let heading = line.trim_start_matches('#').trim().to_lowercase();
    let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
    kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}

#[test]
fn the_changelog_and_the_readme_state_the_rust_version_of_cargo() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let line = manifest.lines().find(|line| line.starts_with("rust-version")).unwrap();
    let version = line.split('"').nth(1).unwrap();
    for name in ["README.md", "CONTRIBUTING.md"] {
        assert!(fs::read_to_string(root.join(name)).unwrap().contains(version), "{name} does not say {version}");
    }
}

#[test]
fn the_readme_shows_code_that_is_compiled() {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    let compiled = regions(include_str!("documents/readme.rs"));
    assert_eq!(blocks(&readme, "rust"), compiled);
}

/// The lines between the marks, without the indentation of their first line.
fn regions(source: &str) -> Vec<String> {
    let mut regions = Vec::new();
    let mut lines = source.lines();
    while lines.any(|line| line.trim() == "// begin: README") {
        let region: Vec<&str> = lines.by_ref().take_while(|line| line.trim() != "// end: README").collect();
        let indent = region.first().map_or(0, |line| line.len() - line.trim_start().len());
        regions.push(region.iter().map(|line| format!("{}\n", line.get(indent..).unwrap_or_default())).collect());
    }
    regions
}
