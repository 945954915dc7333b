//! The quickstart and the commands that it prints, one after another in an empty folder.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use support::child::example;

/// The number of rows that the transactional handler wrote, and of the orders that they are for.
const RESERVATIONS: &str = "sqlite3 quickstart.db \"SELECT count(*), count(DISTINCT order_number) FROM reservation\"";

fn output(folder: &Path, program: &Path, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).current_dir(folder).output().expect("the program starts")
}

fn run(folder: &Path, program: &Path, arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = output(folder, program, arguments);
    let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8_lossy(&stderr).into_owned());
    assert!(status.success(), "{program:?} {arguments:?}: {status}\n{stdout}\n{stderr}");
    stdout
}

/// The command after a label in the last lines, without the program's name.
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
fn the_quickstart_ends_and_its_next_commands_work() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let output = run(folder, &example("quickstart"), &[]);
    assert!(!output.contains('\x1b'), "no colours where there is no terminal");
    for line in ["duplicate   order-1", "quarantined", "poisoned    order-3   fraud.check"] {
        assert!(output.contains(line), "{line}\n{output}");
    }
    assert!(output.contains("\nfraud.check              0         0         4         1\n"), "{output}");
    assert!(output.contains("\nmail.receipt             0         0         5         0\n"), "{output}");
    assert!(output.contains("\nstock.reserve            0         0         5         0\n"), "{output}");

    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    let (_, shown) = readme.split_once("\n…\n").expect("the README leaves out the middle of the output");
    for line in shown.lines().take_while(|line| !line.starts_with("```")) {
        assert!(output.lines().any(|printed| printed == line), "the README shows what is not printed: {line}");
    }

    let poisoned = wharf(folder, printed(&output, "look at it"), &[]);
    assert!(
        poisoned.contains("the fraud service does not know mallory") && poisoned.contains("\"number\": 3"),
        "{poisoned}"
    );
    assert!(wharf(folder, printed(&output, "and that"), &[]).contains("cloud event is not a JSON object"));
    let in_sql = sqlite(folder, printed(&output, "Or, in SQL:"));
    assert_eq!(in_sql, "order-3|fraud.check|the fraud service does not know mallory\n");
    assert!(run(folder, &example("quickstart"), &["resume"]).contains("Nothing was left to do"));
    // The command asks for confirmation; without a terminal it cannot.
    wharf(folder, printed(&output, "replay it"), &["--yes"]);
    let resumed = run(folder, &example("quickstart"), &["resume"]);
    assert!(
        resumed.contains("done        order-3   fraud.check") && resumed.contains("Deliveries that ran: 1."),
        "{resumed}"
    );
    assert_eq!(sqlite(folder, RESERVATIONS), "5|5\n");

    // A second run creates the file again.
    assert!(
        run(folder, &example("quickstart"), &[])
            .contains("\nfraud.check              0         0         4         1\n")
    );
}

#[test]
fn the_quickstart_killed_in_a_receipt_sends_it_when_resumed_and_a_rename_runs_nothing_again() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    run(folder, &example("quickstart"), &[]);

    let killed = output(folder, &example("quickstart"), &["crash"]).status;
    assert_eq!(killed.signal(), Some(9), "{killed}");
    let resumed = run(folder, &example("quickstart"), &["resume"]);
    assert!(resumed.contains("done        order-6   mail.receipt"), "{resumed}");
    // The killed attempt consumes no retry, and the transactional handler has exactly one effect.
    let attempts = "sqlite3 quickstart.db \"SELECT state, attempts, errors FROM inbox_status
                    WHERE message_id = 'order-6' AND handler_key = 'mail.receipt'\"";
    assert_eq!(sqlite(folder, attempts), "done|2|0\n");
    assert_eq!(sqlite(folder, RESERVATIONS), "6|6\n");
    assert!(run(folder, &example("quickstart"), &["crash"]).contains("No crash: order-6 was handled before"));

    let renamed = run(folder, &example("quickstart"), &["renamed"]);
    assert!(renamed.contains("order-1 once more: Duplicate { added: 0 }"), "{renamed}");
    assert!(renamed.contains("\nmail.confirm             0         0         6         0\n"), "{renamed}");
    assert!(!renamed.contains("mail.receipt    "), "{renamed}");
    let runs = "sqlite3 quickstart.db \"SELECT sum(attempts) FROM inbox_status WHERE message_id = 'order-1'\"";
    assert_eq!(sqlite(folder, runs), "3\n");
}
