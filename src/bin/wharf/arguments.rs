//! The command line: every command and its options, as `--help` shows them. Decides nothing.

use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

use crate::audit::KafkaArguments;
use crate::cleanup::CleanupArguments;
use crate::connect::DatabaseArguments;
use crate::dashboard::DashboardArguments;
use crate::deliveries::DeliveriesCommand;
use crate::handlers::HandlersCommand;
use crate::ledger::LedgerCommand;
use crate::observe::ObserveCommand;
use crate::outbox::OutboxCommand;
use crate::poisoned::PoisonedCommand;
use crate::quarantine::QuarantineCommand;

/// The minimum interval between two polls.
const WATCH_MIN: Duration = Duration::from_millis(100);

const AFTER_HELP: &str = "\
Exit codes: 0 success, 1 a problem was found, 2 wrong usage, 3 no connection, 4 partly done.
The database: DATABASE_URL, --database-url-file or --database (postgres://… or sqlite:file).";

/// Inspect and operate an inbox
#[derive(Debug, Parser)]
#[command(name = "wharf", version, after_help = AFTER_HELP, max_term_width = 100)]
pub struct Arguments {
    #[command(flatten)]
    pub database: DatabaseArguments,
    /// Print one JSON document to stdout, and errors as JSON to stderr
    #[arg(long = "json", global = true, help_heading = "Options of every command")]
    pub is_json: bool,
    /// Name for the audit [default: user and host of this machine]
    #[arg(long, global = true, value_name = "WHO", help_heading = "Options of every command")]
    pub actor: Option<String>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the backlog and throughput of each handler, and live processes
    Status {
        /// Repeat at this interval, until Ctrl-C
        #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "1s", value_parser = interval)]
        watch: Option<Duration>,
    },
    /// Explain why work is not moving. Exit code 1 if there is a problem
    Doctor {
        #[command(flatten)]
        kafka: KafkaArguments,
    },
    /// Serve the inbox in a browser, to inspect and operate it
    Dashboard(DashboardArguments),
    /// List, replay and discard poisoned deliveries
    #[command(subcommand)]
    Poisoned(PoisonedCommand),
    /// List and show deliveries in any state, and release stuck runs
    #[command(subcommand)]
    Deliveries(DeliveriesCommand),
    /// List, replay and discard quarantined records
    #[command(subcommand)]
    Quarantine(QuarantineCommand),
    /// List, resend and discard records of the outbox
    #[command(subcommand)]
    Outbox(OutboxCommand),
    /// List, pause, resume and backfill handlers; check the handler keys of a build
    #[command(subcommand)]
    Handlers(HandlersCommand),
    /// List positions in Kafka; reset or skip them
    #[command(subcommand)]
    Ledger(LedgerCommand),
    /// Purge finished messages that are old enough (the retention job, for cron)
    Cleanup(CleanupArguments),
    /// Compare the ledger with Kafka. Exit code 1 if there is a problem
    Audit {
        #[command(flatten)]
        kafka: KafkaArguments,
    },
    /// Print metrics, dashboards and alert rules for monitoring systems. Needs no database
    #[command(subcommand)]
    Observe(ObserveCommand),
    /// Update the schema to the version of this build
    Migrate(MigrateArguments),
    /// Print a completion script for a shell
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
    /// Show the version of the schema and that of this build. Exit code 1 if they differ
    Status,
}

impl Command {
    /// Whether the command works on a schema that is missing or of another version.
    pub fn is_for_any_schema(&self) -> bool {
        matches!(self, Self::Doctor { .. } | Self::Migrate(_))
    }

    /// The maximum number of connections to the database.
    pub fn connections(&self) -> usize {
        // A page must not wait for a running canary replay.
        if matches!(self, Self::Dashboard(_)) { 4 } else { 2 }
    }

    /// Whether the command may create a database file.
    pub fn is_making(&self) -> bool {
        matches!(self, Self::Migrate(MigrateArguments { is_print: false, command: None }))
    }
}

fn interval(text: &str) -> Result<Duration, String> {
    let every = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if every < WATCH_MIN { Err("at least 100ms".to_owned()) } else { Ok(every) }
}
