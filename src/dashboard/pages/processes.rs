//! The page of processes that run handlers: which are alive, their claims and their reports, from the sampler's last
//! snapshot.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::State;

use super::super::app::App;
use super::super::guard::Visit;
use super::super::text::{self, When};
use super::{Frame, Page, PagePlace, html};
use crate::store::Backend;
use crate::types::ProcessorStatus;

#[derive(Template)]
#[template(path = "processes.html")]
struct ProcessesPage {
    frame: Frame,
    alive: usize,
    rows: Vec<ProcessRow>,
}

struct ProcessRow {
    name: String,
    version: String,
    is_alive: bool,
    started: When,
    seen: When,
    running: String,
    handlers: Vec<String>,
    done: String,
    failed: String,
    intake: &'static str,
    pool: String,
    is_pool_full: bool,
    longest: String,
}

pub(in super::super) async fn processes<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
) -> Page {
    let (frame, snapshot) = Frame::new(&app, &visit, PagePlace { path: "/processes", title: "Processes" }).await;
    let diagnosis = snapshot.as_ref().and_then(|snapshot| snapshot.diagnosis.as_deref());
    let processors = diagnosis.map(|found| &found.processors[..]).unwrap_or_default();
    let now = SystemTime::now();
    let page = ProcessesPage {
        frame: frame.reloaded(),
        alive: processors.iter().filter(|processor| processor.is_alive).count(),
        rows: processors.iter().map(|processor| row(processor, now)).collect(),
    };
    Ok(html(&page))
}

fn row(processor: &ProcessorStatus, now: SystemTime) -> ProcessRow {
    let report = processor.report.as_ref();
    let rates = |of: fn(&crate::types::Rate) -> f64| {
        text::rate(report.map_or(0.0, |report| report.rates.values().map(of).sum()))
    };
    ProcessRow {
        name: processor.name.clone(),
        version: processor.version.clone(),
        is_alive: processor.is_alive,
        started: When::new(processor.started_at, now),
        seen: When::new(processor.seen_at, now),
        running: text::number(processor.running),
        handlers: processor.handler_keys.clone(),
        done: rates(|rate| rate.done_per_sec),
        failed: rates(|rate| rate.failed_per_sec),
        intake: match report.and_then(|report| report.is_intake_open) {
            Some(true) if report.is_some_and(|report| !report.closed_sources.is_empty()) => "partly closed",
            Some(true) => "open",
            Some(false) => "closed",
            None => "–",
        },
        pool: report.map_or_else(|| "–".to_owned(), |report| format!("{} of {}", report.pool_in_use, report.pool_size)),
        is_pool_full: report.is_some_and(|report| report.pool_waiting > 0),
        longest: report.and_then(|report| report.longest_run.as_ref()).map_or_else(String::new, |run| {
            format!("{} {}, {}", run.handler_key, run.message_id.as_deref().unwrap_or_default(), text::span(run.secs))
        }),
    }
}
