//! Asks for confirmation before a change. Without a terminal it does not wait: the change needs `--yes`.

use std::io::{self, BufRead, IsTerminal, Write};

use clap::Args;

use crate::exit::Failure;

/// How a change is confirmed.
#[derive(Debug, Args)]
pub struct Confirming {
    /// Show what would change, and change nothing
    #[arg(long = "dry-run")]
    pub is_dry_run: bool,
    /// Do not ask for confirmation
    #[arg(long = "yes", short = 'y')]
    pub is_yes: bool,
    /// The reason, for the audit
    #[arg(long, value_name = "TEXT")]
    pub because: Option<String>,
}

impl Confirming {
    /// Refuses a change that cannot be confirmed, before any query.
    pub fn check(&self) -> Result<(), Failure> {
        self.check_or(", or --dry-run to see what it would do")
    }

    /// The same for a command that has no dry run.
    pub fn check_without_dry_run(&self) -> Result<(), Failure> {
        self.check_or("")
    }

    fn check_or(&self, instead: &str) -> Result<(), Failure> {
        let can_answer = io::stdin().is_terminal() && io::stderr().is_terminal();
        match self.is_yes || self.is_dry_run || can_answer {
            true => Ok(()),
            false => Err(Failure::usage(format!(
                "this command changes data and needs a confirmation, but there is no terminal: use --yes to do it{instead}"
            ))),
        }
    }

    /// Fails unless a person or `--yes` confirms. The question must not contain text from outside, because it is not
    /// escaped.
    pub fn ask(&self, question: &str) -> Result<(), Failure> {
        if self.is_yes {
            return Ok(());
        }
        let mut stderr = io::stderr().lock();
        write!(stderr, "{question} [y/N] ")?;
        stderr.flush()?;
        let mut answer = String::new();
        // No answer means no.
        let _ = io::stdin().lock().read_line(&mut answer);
        match answer.trim() {
            "y" | "Y" | "yes" => Ok(()),
            _ => Err(Failure::problem("not confirmed: nothing was done")),
        }
    }
}
