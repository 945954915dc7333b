//! The first five minutes: the quickstart, and the commands it prints, one after the other in an empty folder.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Built beside this binary: see `walkthrough.rs`.
fn program() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    tests.parent().and_then(Path::parent).unwrap().join("examples/quickstart")
}

fn run(folder: &Path, program: &Path, arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } =
        Command::new(program).args(arguments).current_dir(folder).output().expect("the program starts");
    let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8_lossy(&stderr).into_owned());
    assert!(status.success(), "{program:?} {arguments:?}: {status}\n{stdout}\n{stderr}");
    stdout
}

/// The command behind a label of the last lines, without the program's name.
fn printed<'a>(output: &'a str, label: &str) -> &'a str {
    let line = output.lines().find(|line| line.trim_start().starts_with(label)).expect("the command is printed");
    line.trim_start().trim_start_matches(label).trim()
}

fn sqlite(folder: &Path, command: &str) -> String {
    let statement = command.strip_prefix("sqlite3 quickstart.db ").expect("a command for sqlite3").trim_matches('"');
    run(folder, Path::new("sqlite3"), &["quickstart.db", statement])
}

fn wharf(folder: &Path, command: &str, more: &[&str]) -> String {
    let arguments: Vec<&str> = command.strip_prefix("wharf ").expect("a command for wharf").split(' ').collect();
    run(folder, Path::new(env!("CARGO_BIN_EXE_wharf")), &[&arguments, more].concat())
}

#[test]
fn the_quickstart_ends_by_itself_and_its_next_commands_work() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let output = run(folder, &program(), &[]);
    assert!(!output.contains('\x1b'), "no colours where there is no terminal");
    for line in ["duplicate   order-1", "quarantined", "poisoned    order-3   fraud.check"] {
        assert!(output.contains(line), "{line}\n{output}");
    }
    assert!(output.contains("\nfraud.check              0         0         4         1\n"), "{output}");
    assert!(output.contains("\nmail.receipt             0         0         5         0\n"), "{output}");
    assert!(output.contains("\nstock.reserve            0         0         5         0\n"), "{output}");

    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    for line in output.lines().skip_while(|line| !line.starts_with("handler ")) {
        assert!(readme.contains(line), "the README does not show: {line}");
    }

    let poisoned = wharf(folder, printed(&output, "look at it"), &[]);
    assert!(
        poisoned.contains("the fraud service does not know mallory") && poisoned.contains("\"number\": 3"),
        "{poisoned}"
    );
    assert!(wharf(folder, printed(&output, "and that"), &[]).contains("cloud event is not a JSON object"));
    let in_sql = sqlite(folder, printed(&output, "Or, in SQL:"));
    assert_eq!(in_sql, "order-3|fraud.check|the fraud service does not know mallory\n");
    assert!(run(folder, &program(), &["resume"]).contains("Nothing was due"));
    // A person is asked; here nobody can be.
    wharf(folder, printed(&output, "replay it"), &["--yes"]);
    let resumed = run(folder, &program(), &["resume"]);
    assert!(resumed.contains("done        order-3   fraud.check") && resumed.contains("1 run."), "{resumed}");
    let reservations = "sqlite3 quickstart.db \"SELECT count(*), count(DISTINCT order_number) FROM reservation\"";
    assert_eq!(sqlite(folder, reservations), "5|5\n");

    // Again: the file is made anew.
    assert!(run(folder, &program(), &[]).contains("\nfraud.check              0         0         4         1\n"));
}
