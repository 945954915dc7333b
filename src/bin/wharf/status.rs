//! `status`: the backlog and throughput of each handler, and the processes.

use serde_json::json;
use wharf::operate::{HandlerStatus, ProcessorStatus};
use wharf::store::Backend;

use crate::exit::{Exit, Failure};
use crate::handlers::state;
use crate::output::{Cell, Tone, cell, counted, maybe, number, text, word};
use crate::session::Session;
use crate::when;

pub async fn run<B: Backend>(session: &Session<B>) -> Result<Exit, Failure> {
    let (operator, output) = (session.operator(), session.output);
    let (handlers, processors) = (operator.handlers().await?, operator.processors().await?);
    if output.is_json {
        output.document(&json!({ "handlers": handlers, "processors": processors }))?;
        return Ok(Exit::Well);
    }
    if handlers.is_empty() {
        output.line("no process has registered a handler yet")?;
        return Ok(Exit::Well);
    }
    // Only ordered handlers hold deliveries, and in 80 columns one more leaves little room for the keys.
    let is_held_shown = handlers.iter().any(|handler| handler.is_ordered || handler.held > 0);
    let mut columns = vec![
        text("HANDLER"),
        text("STATE"),
        number("DUE"),
        number("LATER"),
        number("RUNNING"),
        number("POISONED"),
        word("OLDEST"),
        number("DONE/s"),
        number("FAILED/s"),
    ];
    let mut rows: Vec<Vec<Cell>> = handlers.iter().map(handler_row).collect();
    if is_held_shown {
        columns.insert(4, number("HELD"));
        rows.iter_mut().zip(&handlers).for_each(|(row, handler)| row.insert(4, counted(handler.held)));
    }
    output.table(&columns, rows)?;
    let alive = processors.iter().filter(|processor| processor.is_alive).count();
    output.line("")?;
    output.line(format!("processes: {alive} alive"))?;
    if !processors.is_empty() {
        let columns =
            [text("PROCESS"), word("VERSION"), word("STATE"), word("SEEN"), number("RUNNING"), text("HANDLERS")];
        output.table(&columns, processors.iter().map(processor_row).collect())?;
    }
    Ok(Exit::Well)
}

fn handler_row(handler: &HandlerStatus) -> Vec<Cell> {
    vec![
        cell(&handler.handler_key),
        state(handler),
        counted(handler.due),
        counted(handler.later),
        counted(handler.running),
        Cell::count(handler.poisoned, Tone::Problem),
        maybe(handler.oldest_due_secs.map(when::secs)),
        cell(rate(handler.done_per_sec)),
        cell(rate(handler.failed_per_sec)),
    ]
}

fn processor_row(processor: &ProcessorStatus) -> Vec<Cell> {
    let state = if processor.is_alive { cell("alive") } else { cell("dead").toned(Tone::Warning) };
    vec![
        cell(&processor.name),
        cell(&processor.version),
        state,
        cell(when::age(processor.seen_at)),
        cell(processor.running),
        cell(processor.handler_keys.join(", ")),
    ]
}

/// Small rates are shown with one more digit.
pub fn rate(per_sec: f64) -> String {
    if per_sec > 0.0 && per_sec < 10.0 { format!("{per_sec:.1}") } else { format!("{per_sec:.0}") }
}
