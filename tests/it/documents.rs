//! What the documents show works: every SQL of theirs is run through psql, every command is understood, every link leads somewhere. Rust in the README is compiled as a
//! documentation test, its commands are run by `quickstart.rs`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use wharf::{Failure, RetryPolicy};

use crate::scene::{Runs, Scene, record};
use support::postgres_binaries::program;

fn documents() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut paths: Vec<PathBuf> = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
        .iter()
        .map(|name| root.join(name))
        .collect();
    let in_docs = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    paths.extend(in_docs.filter(|path| path.is_file()));
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
            // Its replay was this very delivery.
            assert_eq!(scene.count("inbox_audit WHERE action = 'replay' AND affected = 1").await, 1);
        }
    }
    assert!(count >= 15, "the documents have lost their statements");
}

#[test]
fn every_wharf_command_in_the_documents_is_understood() {
    let mut count = 0;
    for (path, document) in documents() {
        for line in blocks(&document, "sh").into_iter().flat_map(str::lines).filter(|line| line.starts_with("wharf ")) {
            count += 1;
            // The shell takes the line apart; help is what comes of a line without a mistake.
            let script = format!("wharf() {{ \"$WHARF\" \"$@\" --help; }}; {line}");
            let ran =
                Command::new("bash").args(["-c", &script]).env("WHARF", env!("CARGO_BIN_EXE_wharf")).output().unwrap();
            assert!(ran.status.success(), "{}: {line}\n{}", path.display(), String::from_utf8_lossy(&ran.stderr));
        }
    }
    assert!(count >= 30, "the documents have lost their commands");
}

#[test]
fn every_link_to_a_file_leads_somewhere() {
    for (path, document) in documents() {
        let folder = path.parent().unwrap();
        for link in document.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let is_file = !link.contains("://") && !link.starts_with('#');
            assert!(!is_file || folder.join(link).exists(), "{}: {link}", path.display());
        }
    }
}

#[test]
fn what_the_changelog_and_the_readme_say_of_rust_is_what_cargo_holds_to() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let line = manifest.lines().find(|line| line.starts_with("rust-version")).unwrap();
    let version = line.split('"').nth(1).unwrap();
    for name in ["README.md", "CONTRIBUTING.md"] {
        assert!(fs::read_to_string(root.join(name)).unwrap().contains(version), "{name} does not say {version}");
    }
}
