//! The exit codes, which scripts rely on, and the failures that lead to them.
//!
//! The text of a failure goes to stderr, escaped and without secrets: a URL that was passed by mistake is shown without
//! its credentials.

use std::io;

use crate::escape;
use crate::output::Output;

/// The exit codes. The numbers do not change between versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// The command succeeded, and no problem was found.
    Well = 0,
    /// A problem was found, the requested row does not exist, or the person did not confirm.
    Problem = 1,
    /// The arguments are wrong. Nothing was done.
    Usage = 2,
    /// The database or Kafka did not answer, or refused.
    Connection = 3,
    /// The command was done in part: a canary stopped, `--limit` left some rows, somebody else changed some of them
    /// first, or some results are still pending.
    Partly = 4,
}

impl Exit {
    /// A stable code for programs.
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
    /// An exit code with a message.
    Told(Exit, String),
    /// The reader of the output has closed it (`| head`), which is not an error.
    OutputClosed,
}

impl Failure {
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Told(Exit::Usage, message.into())
    }

    pub fn problem(message: impl Into<String>) -> Self {
        Self::Told(Exit::Problem, message.into())
    }

    /// The message as it is printed.
    pub fn text(message: &str, exit: Exit, output: Output) -> String {
        let message = without_credentials(message);
        if output.is_json {
            let error = serde_json::json!({ "error": message, "code": exit.name(), "exit": exit as u8 });
            return escape::json(&error.to_string());
        }
        // The line breaks come from this program or clap. The text within a line may come from outside.
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
    /// An error of writing the output. Errors of files and of other programs are converted where they happen.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::OutputClosed,
            _ => Self::problem(format!("cannot write the output: {error}")),
        }
    }
}

/// Removes user and password from every URL in the text: clap quotes arguments that it does not understand.
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
