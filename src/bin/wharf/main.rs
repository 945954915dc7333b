//! The `wharf` binary: operates an inbox from a shell. Each command has a file; the library's
//! [`wharf::operate::Operator`] does the work.
//!
//! Nothing here uses SQL or a Kafka client, runs a handler, or prints without `output.rs`.
#![allow(unreachable_pub, reason = "nothing of a program is reachable from outside")]

mod arguments;
mod audit;
mod cleanup;
mod confirm;
mod connect;
mod correct;
mod dashboard;
mod decoded;
mod deliveries;
mod doctor;
mod escape;
mod exit;
mod filter;
mod handlers;
mod ledger;
mod meant;
mod migrate;
mod observe;
mod outbox;
mod output;
mod poisoned;
mod progress;
mod quarantine;
mod rate;
mod record;
mod release;
mod replay;
mod session;
mod status;
mod watch;
mod when;

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use wharf::store::Backend;
use wharf::{Postgres, Sqlite};

use arguments::{Arguments, Command, MigrateArguments};
use connect::Database;
use exit::{Exit, Failure};
use output::Output;
use session::Session;

fn main() -> ExitCode {
    let is_json = std::env::args_os().any(|argument| argument == "--json");
    let ended = match Arguments::try_parse() {
        Ok(arguments) => run(arguments),
        Err(error) if !error.use_stderr() => {
            // Help and the version. An error of stdout is ignored.
            let _ = error.print();
            Ok(Exit::Well)
        }
        Err(error) => Err(Failure::usage(error.render().to_string().trim_end())),
    };
    let exit = match ended {
        Ok(exit) => exit,
        Err(Failure::OutputClosed) => Exit::Well,
        Err(Failure::Told(exit, message)) => {
            // clap's messages begin with `error: `.
            let prefix = if is_json || message.starts_with("error: ") { "" } else { "wharf: " };
            let text = Failure::text(&format!("{prefix}{message}"), exit, Output::new(is_json));
            let _ = writeln!(std::io::stderr(), "{text}");
            exit
        }
    };
    ExitCode::from(exit as u8)
}

#[tokio::main]
async fn run(arguments: Arguments) -> Result<Exit, Failure> {
    let Arguments { database, is_json, actor, command } = arguments;
    let output = Output::new(is_json);
    if let Command::Completions { shell } = command {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Arguments::command(), "wharf", &mut script);
        output::own_text(&String::from_utf8_lossy(&script))?;
        return Ok(Exit::Well);
    }
    if let Command::Observe(command) = command {
        return observe::run(output, &command);
    }
    let actor = actor.unwrap_or_else(session::actor);
    let database = Database::given(&database)?;
    let is_print = matches!(command, Command::Migrate(MigrateArguments { is_print: true, .. }));
    match database {
        Database::Postgres(_) if is_print => migrate::print::<Postgres>(output),
        Database::Sqlite(_) if is_print => migrate::print::<Sqlite>(output),
        Database::Postgres(url) => {
            let store = connect::postgres(&url, command.connections()).await?;
            dispatch(&Session { store, output, actor }, command).await
        }
        Database::Sqlite(path) => {
            let store = connect::sqlite(&path, command.is_making()).await?;
            dispatch(&Session { store, output, actor }, command).await
        }
    }
}

async fn dispatch<B: Backend>(session: &Session<B>, command: Command) -> Result<Exit, Failure> {
    if !command.is_for_any_schema() {
        session.check_schema().await?;
    }
    match command {
        Command::Status { watch: None } => status::run(session).await,
        Command::Status { watch: Some(every) } => watch::run(session, every).await,
        Command::Doctor { kafka } => doctor::run(session, &kafka).await,
        Command::Dashboard(arguments) => dashboard::run(session, &arguments).await,
        Command::Poisoned(command) => poisoned::run(session, command).await,
        Command::Deliveries(command) => deliveries::run(session, command).await,
        Command::Quarantine(command) => quarantine::run(session, command).await,
        Command::Outbox(command) => outbox::run(session, command).await,
        Command::Handlers(command) => handlers::run(session, command).await,
        Command::Ledger(command) => ledger::run(session, command).await,
        Command::Cleanup(arguments) => cleanup::run(session, &arguments).await,
        Command::Audit { kafka } => audit::run(session, &kafka).await,
        Command::Migrate(MigrateArguments { command, .. }) => migrate::run(session, command).await,
        // They need no database, and are handled before one is opened.
        Command::Completions { .. } | Command::Observe(_) => Ok(Exit::Well),
    }
}
