//! Asks before anything is changed. Where nobody can answer, it never waits: `--yes` or nothing is done.

use std::io::{self, BufRead, IsTerminal, Write};

use clap::Args;

use crate::exit::Failure;

/// How a change is to be made.
#[derive(Debug, Args)]
pub struct Confirming {
    /// Show what would be done, and do nothing
    #[arg(long = "dry-run")]
    pub is_dry_run: bool,
    /// Do not ask
    #[arg(long = "yes", short = 'y')]
    pub is_yes: bool,
    /// Why you do this, for the audit
    #[arg(long, value_name = "TEXT")]
    pub because: Option<String>,
}

impl Confirming {
    /// Refuses, before anything is looked up, what could never be confirmed.
    pub fn check(&self) -> Result<(), Failure> {
        let can_answer = io::stdin().is_terminal() && io::stderr().is_terminal();
        match self.is_yes || self.is_dry_run || can_answer {
            true => Ok(()),
            false => Err(Failure::usage(
                "this changes something and there is no terminal to ask at: say --yes to do it, or --dry-run to see what it would do",
            )),
        }
    }

    /// Fails unless a person, or `--yes`, agrees. Only our own words and numbers are in the question.
    pub fn ask(&self, question: &str) -> Result<(), Failure> {
        if self.is_yes {
            return Ok(());
        }
        let mut stderr = io::stderr().lock();
        write!(stderr, "{question} [y/N] ")?;
        stderr.flush()?;
        let mut answer = String::new();
        // No answer is a no.
        let _ = io::stdin().lock().read_line(&mut answer);
        match answer.trim() {
            "y" | "Y" | "yes" => Ok(()),
            _ => Err(Failure::problem("nothing was done")),
        }
    }
}
