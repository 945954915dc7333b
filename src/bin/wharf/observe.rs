//! `observe`: what a service exports with the feature `metrics`, for monitoring systems. Needs no database.

mod alerts;
mod grafana;

use clap::{Args, Subcommand};
use wharf::observe::{Metric, metrics};

use crate::exit::{Exit, Failure};
use crate::output::{self, Output, cell};

#[derive(Debug, Subcommand)]
pub enum ObserveCommand {
    /// Every metric that a service exports: type, labels, unit, meaning
    Metrics(MetricsArguments),
    /// A Grafana dashboard, as JSON to import
    Grafana,
    /// Alert rules for Prometheus, as YAML
    Alerts,
}

#[derive(Debug, Clone, Copy, Args)]
pub struct MetricsArguments {
    /// Print a Markdown table, as in the documentation
    #[arg(long = "markdown", conflicts_with = "is_json")]
    is_markdown: bool,
}

pub fn run(output: Output, command: &ObserveCommand) -> Result<Exit, Failure> {
    match command {
        ObserveCommand::Metrics(_) if output.is_json => output.document(&metrics())?,
        ObserveCommand::Metrics(MetricsArguments { is_markdown: true }) => output::own_text(&markdown())?,
        ObserveCommand::Metrics(_) => table(output)?,
        // Files for other programs: the same with and without --json.
        ObserveCommand::Grafana => output::own_text(&format!("{:#}", grafana::dashboard()))?,
        ObserveCommand::Alerts => output::own_text(&alerts::yaml())?,
    }
    Ok(Exit::Well)
}

/// One block for each metric: the names are too long for a table.
fn table(output: Output) -> Result<(), Failure> {
    for metric in metrics() {
        let (kind, scope) = (metric.kind.as_str(), metric.scope.as_str());
        output.fields(vec![
            ("metric", cell(metric.name)),
            ("type", cell(format!("{kind} in {}, of the {scope}", metric.unit.as_str()))),
            ("labels", cell(labels(metric).join(", "))),
            ("values", cell(metric.values.join(", "))),
            ("meaning", cell(metric.meaning)),
        ])?;
        output.line("")?;
    }
    Ok(())
}

/// One row for each metric, in the order of the table.
fn markdown() -> String {
    let mut lines =
        vec!["| metric | type | labels | unit | of | meaning |".to_owned(), "|---|---|---|---|---|---|".to_owned()];
    for metric in metrics() {
        let Metric { name, kind, unit, scope, meaning, .. } = metric;
        let mut labels = labels(metric).iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
        if !metric.values.is_empty() {
            let values: Vec<String> = metric.values.iter().map(|value| format!("`{value}`")).collect();
            labels = format!("{labels}: {}", values.join(", "));
        }
        let conventions = metric.opentelemetry.map(|name| format!(" OpenTelemetry's `{name}`.")).unwrap_or_default();
        lines.push(format!(
            "| `{name}` | {} | {} | {} | {} | {meaning}{conventions} |",
            kind.as_str(),
            labels,
            unit.as_str(),
            scope.as_str()
        ));
    }
    lines.join("\n")
}

fn labels(metric: &Metric) -> Vec<&'static str> {
    metric.labels.iter().copied().chain(metric.fixed.iter().map(|(label, _)| *label)).collect()
}
