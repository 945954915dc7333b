//! The command line: every command and its options, as `--help` shows them. Decides nothing.

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

use crate::audit::KafkaArguments;
use crate::cleanup::CleanupArguments;
use crate::connect::DatabaseArguments;
use crate::dashboard::DashboardArguments;
use crate::deliveries::DeliveriesCommand;
use crate::handlers::HandlersCommand;
use crate::ledger::LedgerCommand;
use crate::outbox::OutboxCommand;
use crate::poisoned::PoisonedCommand;
use crate::quarantine::QuarantineCommand;

const AFTER_HELP: &str = "\
Exit codes: 0 well, 1 a problem was found, 2 wrong usage, 3 no connection, 4 partly done.
The database: DATABASE_URL, --database-url-file or --database (postgres://… or sqlite:file).";

/// Looks at an inbox and acts on it
#[derive(Debug, Parser)]
#[command(name = "wharf", version, after_help = AFTER_HELP, max_term_width = 100)]
pub struct Arguments {
    #[command(flatten)]
    pub database: DatabaseArguments,
    /// One JSON document on stdout, errors as JSON on stderr
    #[arg(long = "json", global = true, help_heading = "Options of every command")]
    pub is_json: bool,
    /// Who acts, for the audit; without it, the user and host of this machine
    #[arg(long, global = true, value_name = "WHO", help_heading = "Options of every command")]
    pub actor: Option<String>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Backlog of each handler, processes that are alive, how fast it goes
    Status,
    /// Why is work not moving? Exit code 1 unless all is well
    Doctor {
        #[command(flatten)]
        kafka: KafkaArguments,
    },
    /// The inbox in a browser, to look at and to act on
    Dashboard(DashboardArguments),
    /// Deliveries that were given up
    #[command(subcommand)]
    Poisoned(PoisonedCommand),
    /// Deliveries in any state
    #[command(subcommand)]
    Deliveries(DeliveriesCommand),
    /// Records that could not become messages
    #[command(subcommand)]
    Quarantine(QuarantineCommand),
    /// Records that were published: what Kafka refused, what waits, what was sent
    #[command(subcommand)]
    Outbox(OutboxCommand),
    /// Handlers: pause, resume, give them old messages, check a new build
    #[command(subcommand)]
    Handlers(HandlersCommand),
    /// Positions in Kafka: list them, read on where a partition is stopped
    #[command(subcommand)]
    Ledger(LedgerCommand),
    /// Purge what has been finished for long enough: the retention job, for cron
    Cleanup(CleanupArguments),
    /// Compare the ledger with Kafka. Exit code 1 when something is not as it should be
    Audit {
        #[command(flatten)]
        kafka: KafkaArguments,
    },
    /// Bring the schema to what this build knows
    Migrate(MigrateArguments),
    /// A script for the shell's completion
    Completions {
        /// The shell
        shell: Shell,
    },
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct MigrateArguments {
    /// Print the SQL and do nothing
    #[arg(long = "print")]
    pub is_print: bool,
    #[command(subcommand)]
    pub command: Option<MigrateCommand>,
}

#[derive(Debug, Clone, Copy, Subcommand)]
pub enum MigrateCommand {
    /// The version there is and the one this build knows. Exit code 1 when they differ
    Status,
}

impl Command {
    /// Whether it works on a schema that is missing or of another version.
    pub fn is_for_any_schema(&self) -> bool {
        matches!(self, Self::Doctor { .. } | Self::Migrate(_))
    }

    /// Connections to the database that it uses at the most.
    pub fn connections(&self) -> usize {
        // A page must not wait for a replay that somebody watches.
        if matches!(self, Self::Dashboard(_)) { 4 } else { 2 }
    }

    /// Whether it may make a database file.
    pub fn is_making(&self) -> bool {
        matches!(self, Self::Migrate(MigrateArguments { is_print: false, command: None }))
    }
}
