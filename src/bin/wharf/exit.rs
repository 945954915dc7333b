//! How the program ends: the exit codes, which scripts rely on, and the failures that lead to them.
//!
//! What a failure says goes to stderr, escaped and without secrets: a URL that was given by mistake is shown without its password.

use std::io;

use crate::escape;
use crate::output::Output;

/// What the exit code says. The numbers stay the same over versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// All well; what was asked for is done.
    Well = 0,
    /// A problem was found, what was asked for is not there, or a person said no.
    Problem = 1,
    /// The command cannot be carried out as it was given. Nothing was done.
    Usage = 2,
    /// The database or Kafka did not answer, or refused.
    Connection = 3,
    /// Some of it was done: a canary stopped, a bound left some behind, others are still waited for.
    Partly = 4,
}

impl Exit {
    /// A word for programs.
    fn name(self) -> &'static str {
        match self {
            Self::Well => "well",
            Self::Problem => "problem",
            Self::Usage => "usage",
            Self::Connection => "connection",
            Self::Partly => "partly",
        }
    }
}

/// Why the program ends early.
#[derive(Debug)]
pub enum Failure {
    /// Something to be said, and the code.
    Told(Exit, String),
    /// Nobody reads the output any more (`| head`), which is no trouble of ours.
    OutputClosed,
}

impl Failure {
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Told(Exit::Usage, message.into())
    }

    pub fn problem(message: impl Into<String>) -> Self {
        Self::Told(Exit::Problem, message.into())
    }

    /// As it is shown.
    pub fn text(message: &str, exit: Exit, output: Output) -> String {
        let message = without_credentials(message);
        if output.is_json {
            let error = serde_json::json!({ "error": message, "code": exit.name(), "exit": exit as u8 });
            return escape::json(&error.to_string());
        }
        // The lines are ours (clap's, a list of problems); what stands in them may not be.
        message.lines().map(|line| output.wrapped(line)).collect::<Vec<_>>().join("\n")
    }
}

impl From<wharf::Error> for Failure {
    fn from(error: wharf::Error) -> Self {
        let exit = match () {
            () if error.is_configuration() => Exit::Usage,
            () if error.is_transient() => Exit::Connection,
            () => Exit::Problem,
        };
        Self::Told(exit, format!("{error:#}").replace("call store.migrate()", "run `wharf migrate`"))
    }
}

impl From<io::Error> for Failure {
    /// Of writing output: files that are read have errors of their own.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::OutputClosed,
            _ => Self::problem(format!("cannot write the output: {error}")),
        }
    }
}

/// The text with the user and password of every URL left out: clap quotes what it does not understand.
fn without_credentials(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        clean.push_str(before);
        let end = after.find(|c: char| c.is_whitespace() || matches!(c, '\'' | '"')).unwrap_or(after.len());
        let is_secret = after[..end].contains('@') || after[..end].to_ascii_lowercase().contains("password");
        clean.push_str(if is_secret { "…" } else { &after[..end] });
        rest = &after[end..];
    }
    clean.push_str(rest);
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_in_an_error_loses_its_password() {
        let text = "unrecognized subcommand 'postgres://me:hunter2@db/shop' near https://example.org/x";
        assert_eq!(without_credentials(text), "unrecognized subcommand 'postgres://…' near https://example.org/x");
        assert_eq!(without_credentials("postgres://db/x?password=hunter2"), "postgres://…");
    }
}
