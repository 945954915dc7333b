//! `status --watch`: polls the backlog until Ctrl-C. Updates in place on a terminal, otherwise prints a line for each
//! poll.
//!
//! Adds what a single poll cannot show: how fast things change. A poll costs the same however large the tables are. A
//! failed poll is shown and the next one is tried, unless it is the first. What processes report (claims in memory,
//! connections, effective lag) is as old as their last heartbeat.

use std::collections::HashMap;
use std::pin::pin;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use wharf::operate::{HandlerStatus, LedgerFilter, LedgerStatus, ProcessorReport, ProcessorStatus, Totals};
use wharf::store::Backend;

use crate::exit::{Exit, Failure};
use crate::handlers::state;
use crate::output::{Cell, Column, Output, Tone, cell, counted, maybe, number, text, word};
use crate::session::Session;
use crate::status::rate;
use crate::when;

/// The maximum number of partitions that a poll reads.
const PARTITIONS_MAX: u32 = 10_000;
/// The maximum number of processes, and of partitions, that the screen lists.
const LISTED_MAX: usize = 10;

/// The result of one poll.
struct Snapshot {
    taken: Instant,
    handlers: Vec<HandlerStatus>,
    processors: Vec<ProcessorStatus>,
    partitions: Vec<LedgerStatus>,
    totals: Totals,
}

/// The change since the previous poll, per second. `None` at the first poll.
struct Change {
    /// By handler: the growth of due deliveries.
    due: HashMap<String, f64>,
    /// Offsets that were read from Kafka, over all partitions.
    read: f64,
}

pub async fn run<B: Backend>(session: &Session<B>, every: Duration) -> Result<Exit, Failure> {
    let mut ended = pin!(tokio::signal::ctrl_c());
    let mut before: Option<Snapshot> = None;
    loop {
        let snapshot = tokio::select! {
            biased;
            _ = &mut ended => return Ok(Exit::Well),
            snapshot = snapshot(session) => snapshot,
        };
        match (snapshot, before.take()) {
            (Ok(now), last) => {
                show(session.output, &now, last.map(|last| change(&last, &now)).as_ref())?;
                before = Some(now);
            }
            (Err(error), None) => return Err(error),
            (Err(Failure::Told(_, why)), Some(last)) => {
                let text = session.output.wrapped(&format!("cannot read the status: {why}; trying again"));
                session.output.watched(&text)?;
                before = Some(last);
            }
            (Err(Failure::OutputClosed), Some(_)) => return Err(Failure::OutputClosed),
        }
        tokio::select! {
            _ = &mut ended => return Ok(Exit::Well),
            () = tokio::time::sleep(every) => {}
        }
    }
}

async fn snapshot<B: Backend>(session: &Session<B>) -> Result<Snapshot, Failure> {
    let operator = session.operator();
    Ok(Snapshot {
        taken: Instant::now(),
        handlers: operator.handlers().await?,
        processors: operator.processors().await?,
        partitions: operator.positions(&LedgerFilter::default(), PARTITIONS_MAX).await?,
        totals: operator.totals().await?,
    })
}

fn change(before: &Snapshot, now: &Snapshot) -> Change {
    let secs = now.taken.saturating_duration_since(before.taken).as_secs_f64().max(0.001);
    let due_before: HashMap<&str, u64> =
        before.handlers.iter().map(|handler| (handler.handler_key.as_str(), handler.due)).collect();
    let grown = |handler: &HandlerStatus| {
        let before = due_before.get(handler.handler_key.as_str()).copied().unwrap_or(0);
        // If a count has reached its bound, the difference is not known.
        let is_known = before.max(handler.due) < HandlerStatus::COUNT_MAX;
        is_known.then(|| (handler.handler_key.clone(), (handler.due as f64 - before as f64) / secs))
    };
    let place =
        |one: &LedgerStatus| (one.consumer_group.clone(), one.cluster_id.clone(), one.topic.clone(), one.partition);
    let offsets: HashMap<_, i64> = before.partitions.iter().map(|one| (place(one), one.next_offset)).collect();
    let read = now.partitions.iter().filter_map(|one| {
        let before = *offsets.get(&place(one))?;
        // A position below 0 has no offset yet, and a position that an operator has moved back does not count as
        // negative.
        (before >= 0 && one.next_offset > before).then_some(one.next_offset - before)
    });
    let read: i64 = read.sum();
    Change { due: now.handlers.iter().filter_map(grown).collect(), read: read as f64 / secs }
}

fn show(output: Output, now: &Snapshot, change: Option<&Change>) -> Result<(), Failure> {
    match (output.is_json, output.is_terminal()) {
        (true, _) => output.json_line(&document(now, change))?,
        (false, true) => output.watched(&page(output, now, change))?,
        (false, false) => output.watched(&line(now, change))?,
    }
    Ok(())
}

fn document(now: &Snapshot, change: Option<&Change>) -> Value {
    json!({
        "at": when::at(SystemTime::now()),
        "handlers": now.handlers,
        "processors": now.processors,
        "partitions": now.partitions,
        "totals": now.totals,
        "due_per_sec": change.map(|change| &change.due),
        "read_per_sec": change.map(|change| change.read),
    })
}

/// All handlers together, in one line.
fn line(now: &Snapshot, change: Option<&Change>) -> String {
    let sum = |count: fn(&HandlerStatus) -> u64| now.handlers.iter().map(count).sum::<u64>();
    let per_sec = |of: fn(&HandlerStatus) -> f64| rate(now.handlers.iter().map(of).sum());
    let (due, poisoned) = (sum(|handler| handler.due), sum(|handler| handler.poisoned));
    let (later, held) = (sum(|handler| handler.later), sum(|handler| handler.held));
    let (running, done) = (sum(|handler| handler.running), per_sec(|handler| handler.done_per_sec));
    let (failed, lag) = (per_sec(|handler| handler.failed_per_sec), lag(now));
    let read = change.map_or_else(|| "-".to_owned(), |change| rate(change.read));
    let lags = now.handlers.iter().filter_map(|handler| handler.effective_lag_secs);
    let effective_lag = lags.reduce(f64::max).map_or_else(|| "-".to_owned(), when::secs);
    let claims = Held::by_all(now);
    format!(
        "{} due {due} later {later} held {held} running {running} poisoned {poisoned} done/s {done} failed/s {failed} read/s {read} lag {lag} \
         effective-lag {effective_lag} in-flight {} waiting {} unsettled {} connections {}/{}",
        when::at(SystemTime::now()),
        claims.in_flight,
        claims.waiting,
        claims.unsettled,
        claims.pool_in_use,
        claims.pool_size,
    )
}

fn lag(now: &Snapshot) -> i64 {
    now.partitions.iter().filter_map(|one| one.lag).sum()
}

/// What all live processes hold together, as they report it.
#[derive(Default)]
struct Held {
    in_flight: usize,
    waiting: usize,
    unsettled: usize,
    pool_in_use: usize,
    pool_size: usize,
}

impl Held {
    fn by_all(now: &Snapshot) -> Self {
        alive(now).filter_map(|processor| processor.report.as_ref()).fold(Self::default(), |held, report| Self {
            in_flight: held.in_flight + report.in_flight,
            waiting: held.waiting + report.claimed_waiting,
            unsettled: held.unsettled + report.unsettled,
            pool_in_use: held.pool_in_use + report.pool_in_use,
            pool_size: held.pool_size + report.pool_size,
        })
    }
}

fn alive(now: &Snapshot) -> impl Iterator<Item = &ProcessorStatus> {
    now.processors.iter().filter(|processor| processor.is_alive)
}

/// The whole screen, for a terminal. A low terminal shows only the upper part.
fn page(output: Output, now: &Snapshot, change: Option<&Change>) -> String {
    let columns = [
        text("HANDLER"),
        text("STATE"),
        number("DUE"),
        number("DUE/s"),
        number("RUNNING"),
        number("POISONED"),
        word("OLDEST"),
        word("LAG"),
        number("DONE/s"),
        number("FAIL/s"),
    ];
    let handlers = output.table_text(&columns, now.handlers.iter().map(|handler| row(handler, change)).collect());
    let sum = |count: fn(&HandlerStatus) -> u64| now.handlers.iter().map(count).sum::<u64>();
    let (held, later) = (sum(|handler| handler.held), sum(|handler| handler.later));
    let Held { in_flight, waiting, unsettled, .. } = Held::by_all(now);
    let Totals { quarantined, outbox_waiting, outbox_poisoned, .. } = now.totals;
    let read = change.map_or_else(|| "-".to_owned(), |change| rate(change.read));
    let oldest = now.totals.outbox_oldest_secs.map_or_else(|| "-".to_owned(), when::secs);
    let stopped = now.partitions.iter().filter(|one| one.stopped_at.is_some()).count();
    let mut parts = vec![
        format!("{}   Ctrl-C ends", when::at(SystemTime::now())),
        handlers,
        [
            format!("deliveries: {held} held, {later} due later"),
            format!("claims: {in_flight} in flight, {waiting} waiting for a slot, {unsettled} unsettled"),
            format!("kafka: {} partitions, {stopped} stopped, lag {}, read/s {read}", now.partitions.len(), lag(now)),
            format!(
                "outbox: {outbox_waiting} waiting, oldest {oldest}, {outbox_poisoned} poisoned   quarantine: {quarantined}"
            ),
            format!("processes: {} alive", alive(now).count()),
        ]
        .join("\n"),
    ];
    parts.extend(processes(output, now));
    parts.extend(partitions(output, now));
    parts.join("\n\n")
}

/// The live processes, those with the most claims first.
fn processes(output: Output, now: &Snapshot) -> Option<String> {
    let mut alive: Vec<&ProcessorStatus> = alive(now).collect();
    alive.sort_by_key(|one| std::cmp::Reverse(one.report.as_ref().map_or(0, |report| report.in_flight)));
    let columns = [
        text("PROCESS"),
        word("SEEN"),
        number("IN FLIGHT"),
        number("WAITING"),
        number("UNSETTLED"),
        word("CONNECTIONS"),
        word("INTAKE"),
    ];
    listed(output, &columns, &alive, |processor| {
        let report = processor.report.as_ref();
        vec![
            cell(&processor.name),
            cell(when::age(processor.seen_at)),
            maybe(report.map(|report| report.in_flight)),
            maybe(report.map(|report| report.claimed_waiting)),
            maybe(report.map(|report| report.unsettled)),
            report.map_or_else(|| cell("-"), connections),
            intake(report),
        ]
    })
}

fn connections(report: &ProcessorReport) -> Cell {
    let ProcessorReport { pool_in_use, pool_size, pool_waiting, .. } = report;
    match pool_waiting {
        0 => cell(format!("{pool_in_use} of {pool_size}")),
        _ => cell(format!("{pool_in_use} of {pool_size}, {pool_waiting} wait")).toned(Tone::Warning),
    }
}

fn intake(report: Option<&ProcessorReport>) -> Cell {
    match report.and_then(|report| Some((report.is_intake_open?, report.closed_sources.is_empty()))) {
        Some((true, true)) => cell("open"),
        Some((true, false)) => cell("partly closed").toned(Tone::Warning),
        Some((false, _)) => cell("closed").toned(Tone::Warning),
        None => cell("-"),
    }
}

/// The partitions with the most records that are not stored yet.
fn partitions(output: Output, now: &Snapshot) -> Option<String> {
    let mut behind: Vec<&LedgerStatus> =
        now.partitions.iter().filter(|one| one.lag.is_some_and(|lag| lag > 0)).collect();
    behind.sort_by_key(|one| std::cmp::Reverse(one.lag));
    let columns = [text("TOPIC"), number("PARTITION"), number("LAG"), word("STATE"), word("SEEN"), text("GROUP")];
    listed(output, &columns, &behind, |one| {
        vec![
            cell(&one.topic),
            cell(one.partition),
            maybe(one.lag),
            maybe(one.state.as_deref()),
            maybe(one.seen_at.map(when::age)),
            cell(&one.consumer_group),
        ]
    })
}

/// A table of the first rows, and how many are left out; nothing without rows.
fn listed<T>(output: Output, columns: &[Column], rows: &[T], row: impl Fn(&T) -> Vec<Cell>) -> Option<String> {
    let table = output.table_text(columns, rows.iter().take(LISTED_MAX).map(row).collect());
    match rows.len().saturating_sub(LISTED_MAX) {
        _ if rows.is_empty() => None,
        0 => Some(table),
        more => Some(format!("{table}\n{more} more: `--json` has all")),
    }
}

fn row(handler: &HandlerStatus, change: Option<&Change>) -> Vec<Cell> {
    let due_per_sec = change.and_then(|change| change.due.get(&handler.handler_key));
    vec![
        cell(&handler.handler_key),
        state(handler),
        counted(handler.due),
        maybe(due_per_sec.map(|per_sec| signed(*per_sec))),
        counted(handler.running),
        Cell::count(handler.poisoned, Tone::Problem),
        maybe(handler.oldest_due_secs.map(when::secs)),
        maybe(handler.effective_lag_secs.map(when::secs)),
        cell(rate(handler.done_per_sec)),
        cell(rate(handler.failed_per_sec)),
    ]
}

fn signed(per_sec: f64) -> String {
    match per_sec {
        0.0 => "0".to_owned(),
        _ if per_sec.abs() < 10.0 => format!("{per_sec:+.1}"),
        _ => format!("{per_sec:+.0}"),
    }
}
