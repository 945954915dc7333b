//! Runs the binary and checks all its output: no terminal control sequences, at most 80 columns, and valid JSON.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;

use crate::scene::{Database, Stage};

/// A canary over ten thousand deliveries takes a while on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// The result of a run.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// The binary, set up with the database of a scene.
pub struct Program {
    url: String,
}

impl Program {
    pub fn on<D: Database>(scene: &Stage<D>) -> Program {
        let url = scene.database.url();
        Program { url: if url.starts_with("postgres") { url } else { format!("sqlite:{url}") } }
    }

    /// The binary with this `DATABASE_URL`.
    pub fn at(url: &str) -> Program {
        Program { url: url.to_owned() }
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_wharf"));
        command.env("DATABASE_URL", &self.url).env_remove("COLUMNS").kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs the program without a terminal.
    pub async fn run(&self, arguments: &[&str]) -> Ran {
        let mut command = self.command();
        command.args(arguments);
        let ran = finish(command).await;
        let is_free = arguments.iter().any(|argument| ["--show-payload", "--json", "--print"].contains(argument));
        let widest = ran.stdout.lines().chain(ran.stderr.lines()).map(|line| line.chars().count()).max();
        assert!(is_free || widest.unwrap_or(0) <= 80, "wider than 80 columns:\n{}{}", ran.stdout, ran.stderr);
        ran
    }

    /// Runs the program and parses its output as JSON; asserts this exit code.
    pub async fn json(&self, arguments: &[&str], code: i32) -> Value {
        let ran = self.run(&[arguments, &["--json"]].concat()).await;
        assert_eq!(ran.code, code, "{ran:?}");
        serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {ran:?}"))
    }

    /// Runs the program; asserts success. Returns its output.
    pub async fn well(&self, arguments: &[&str]) -> String {
        let ran = self.run(arguments).await;
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{arguments:?} {}", ran.stdout);
        ran.stdout
    }
}

/// Waits until the program ends.
pub async fn finish(mut command: Command) -> Ran {
    let ended = tokio::time::timeout(PATIENCE, command.output()).await;
    let output = ended.expect("the program ends by itself").expect("the binary starts");
    let text = |bytes| String::from_utf8(bytes).expect("the output is text");
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    for character in stdout.chars().chain(stderr.chars()) {
        assert!(!acts_on_a_terminal(character), "{character:?} in\n{stdout:?}\n{stderr:?}");
    }
    Ran { code: output.status.code().expect("no signal ended it"), stdout, stderr }
}

/// Written independently of the program's own check: control characters except the line end, and characters that
/// reorder or hide text.
fn acts_on_a_terminal(character: char) -> bool {
    let code = u32::from(character);
    let is_control = code < 0x20 && character != '\n' || (0x7f..0xa0).contains(&code);
    let is_bidi = [0x61c, 0x200e, 0x200f].contains(&code)
        || (0x202a..=0x202e).contains(&code)
        || (0x2066..=0x2069).contains(&code);
    is_control || is_bidi || [0x200b, 0x200c, 0x200d, 0x2060, 0xfeff, 0x2028, 0x2029].contains(&code)
}
