//! `poisoned`: lists poisoned deliveries, one by one or by error fingerprint; `replay.rs` replays or discards them.

use clap::Subcommand;
use wharf::operate::{ErrorSummary, State};
use wharf::store::Backend;

use crate::correct::{self, CorrectionArguments};
use crate::deliveries::{self, ShowArguments};
use crate::exit::{Exit, Failure};
use crate::filter::DeliveryOptions;
use crate::output::{Output, brief, cell, maybe, number, text, word};
use crate::replay::{self, Acting, CanaryArguments};
use crate::session::Session;
use crate::when;

#[derive(Debug, Subcommand)]
pub enum PoisonedCommand {
    /// List poisoned deliveries, the longest poisoned first
    List {
        #[command(flatten)]
        options: DeliveryOptions,
        /// Count them by the fingerprint of the error instead
        #[arg(long = "by-error", conflicts_with_all = [
            "handler", "message", "source", "topic", "reason", "error", "fingerprint", "older_than", "newer_than", "limit",
        ])]
        is_by_error: bool,
        /// The maximum number of rows
        #[arg(long, value_name = "ROWS", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
        limit: u32,
    },
    /// Show one delivery with its record, failed attempts and history
    Show(ShowArguments),
    /// Run deliveries again with a new retry budget, due now; with --message also discarded ones
    Replay {
        #[command(flatten)]
        options: DeliveryOptions,
        #[command(flatten)]
        acting: Acting,
        #[command(flatten)]
        canary: CanaryArguments,
        #[command(flatten)]
        correction: CorrectionArguments,
    },
    /// Discard deliveries: they do not run unless they are replayed; with --message also pending ones
    Discard {
        #[command(flatten)]
        options: DeliveryOptions,
        #[command(flatten)]
        acting: Acting,
    },
}

pub async fn run<B: Backend>(session: &Session<B>, command: PoisonedCommand) -> Result<Exit, Failure> {
    match command {
        PoisonedCommand::List { is_by_error: true, .. } => by_error(session).await,
        PoisonedCommand::List { options, limit, is_by_error: false } => {
            let limit_and_one = limit.saturating_add(1);
            let found = session.operator().deliveries(&options.filter(), Some(State::Poisoned), limit_and_one).await?;
            deliveries::list(session.output, found, limit, deliveries::poisoned_table)
        }
        PoisonedCommand::Show(arguments) => deliveries::show(session, &arguments, Some(State::Poisoned)).await,
        PoisonedCommand::Replay { options, acting, canary, correction } => match correction.is_asked_for() {
            true => correct::replay(session, &options.filter(), &acting.confirming, &correction).await,
            false => replay::replay(session, options.filter(), &acting, &canary).await,
        },
        PoisonedCommand::Discard { options, acting } => replay::discard(session, options.filter(), &acting).await,
    }
}

async fn by_error<B: Backend>(session: &Session<B>) -> Result<Exit, Failure> {
    let errors = session.operator().poisoned_errors().await?;
    match (session.output.is_json, errors.is_empty()) {
        (true, _) => session.output.document(&errors)?,
        (false, true) => session.output.line("none")?,
        (false, false) => print(session.output, &errors)?,
    }
    Ok(Exit::Well)
}

fn print(output: Output, errors: &[ErrorSummary]) -> std::io::Result<()> {
    let columns = [
        text("HANDLER"),
        text("REASON"),
        word("FINGERPRINT"),
        number("COUNT"),
        text("EXAMPLE"),
        word("FIRST"),
        word("LAST"),
    ];
    let row = |error: &ErrorSummary| {
        vec![
            maybe(error.handler_key.as_deref()),
            maybe(error.reason.as_deref()),
            maybe(error.fingerprint.as_deref()),
            cell(error.poisoned),
            brief(error.example.as_deref(), 100),
            maybe(error.first_at.map(when::age)),
            maybe(error.last_at.map(when::age)),
        ]
    };
    output.table(&columns, errors.iter().map(row).collect())
}
