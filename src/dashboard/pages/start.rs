//! The start page: symptoms first, then errors and plots, then every handler.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::{Query, State};
use serde::Deserialize;

use super::super::app::App;
use super::super::groups;
use super::super::guard::Visit;
use super::super::plot::{self, Plot};
use super::super::query::{DeliveryQuery, encoded};
use super::super::text::{self, When};
use super::{Frame, Page, PagePlace, html};
use crate::operate::{Severity, Symptom};
use crate::store::Backend;
use crate::types::{ErrorSummary, HandlerStatus, Lag};

/// How many failing groups are shown. The page of poisoned deliveries has all.
const FAILING_MAX: usize = 8;

#[derive(Deserialize)]
pub(in super::super) struct StartQuery {
    #[serde(default)]
    result: String,
}

#[derive(Template)]
#[template(path = "start.html")]
struct StartPage {
    frame: Frame,
    result: Option<String>,
    findings: Vec<FindingView>,
    failing: Vec<FailingRow>,
    plots: Vec<Plot>,
    /// The time of the first sample, if the plots do not cover an hour yet.
    since: Option<String>,
    handlers: Vec<HandlerRow>,
}

/// A symptom and a link to the page that helps with it.
struct FindingView {
    is_problem: bool,
    code: String,
    what: String,
    advice: String,
    /// The path with its query, and the text of the link.
    link: Option<(String, &'static str)>,
}

struct FailingRow {
    handler: String,
    error: String,
    reason: String,
    count: String,
    last: Option<When>,
    query: String,
}

struct HandlerRow {
    key: String,
    query: String,
    due: String,
    later: String,
    held: String,
    running: String,
    poisoned: String,
    has_poisoned: bool,
    done: String,
    failed: String,
    is_failing: bool,
    oldest: String,
    lag: String,
    processes: u64,
    paused: Option<When>,
    /// Since when the breaker is open, and the error that opened it.
    broken: Option<(When, String)>,
    unknown: Option<When>,
    /// The rate limit in words. Empty without a limit.
    limit: String,
    is_ordered: bool,
    is_idle: bool,
}

pub(in super::super) async fn start<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Query(query): Query<StartQuery>,
) -> Page {
    let (frame, snapshot) = Frame::new(&app, &visit, PagePlace { path: "/", title: "Start" }).await;
    let now = SystemTime::now();
    let diagnosis = snapshot.as_ref().and_then(|snapshot| snapshot.diagnosis.as_deref());
    let groups = snapshot.as_ref().map(|snapshot| &snapshot.groups[..]).unwrap_or_default();
    let lags = diagnosis.and_then(|found| found.facts.as_ref()).map(|facts| &facts.lags[..]).unwrap_or_default();
    let points = app.sampler.points();
    let page = StartPage {
        frame: frame.reloaded(),
        result: super::result(&query.result),
        findings: diagnosis.map(|found| found.symptoms.iter().map(finding).collect()).unwrap_or_default(),
        failing: groups.iter().take(FAILING_MAX).map(|group| failing(group, now)).collect(),
        plots: plot::plots(&points, now),
        since: plot::since(&points, now),
        handlers: diagnosis
            .map(|found| found.handlers.iter().map(|handler| handler_row(handler, lags, now)).collect())
            .unwrap_or_default(),
    };
    Ok(html(&page))
}

fn finding(symptom: &Symptom) -> FindingView {
    let of_handler = |path: &str| {
        let handler = symptom.handler_key.as_deref().unwrap_or_default();
        format!("{path}?{}", encoded(&[("handler", handler)]))
    };
    let link = match &*symptom.code {
        "poisoned" | "held keys" => Some((of_handler("/poisoned"), "Show")),
        "quarantine" | "replay waits" => Some(("/quarantine".to_owned(), "Show")),
        "paused" | "breaker open" => {
            let handler = symptom.handler_key.as_deref().unwrap_or_default();
            let (verb, name) =
                if symptom.code == "paused" { ("resume", "Resume…") } else { ("close-breaker", "Close it…") };
            Some((format!("/act?{}", encoded(&[("verb", verb), ("handler", handler)])), name))
        }
        "backoff" | "slow" | "unknown key" => Some((format!("{}&state=pending", of_handler("/deliveries")), "Show")),
        "dead process" | "long run" | "pool exhausted" | "intake closed" => {
            Some(("/processes".to_owned(), "Processes"))
        }
        code if code.contains("partition") || code.contains("ingest") || code == "gaps" => {
            Some(("/kafka".to_owned(), "Kafka"))
        }
        _ => None,
    };
    FindingView {
        is_problem: symptom.severity == Severity::Problem,
        code: symptom.code.to_string(),
        what: symptom.what.clone(),
        advice: symptom.advice.clone(),
        link,
    }
}

fn failing(group: &ErrorSummary, now: SystemTime) -> FailingRow {
    let query = groups::of_errors(group, &DeliveryQuery::default());
    let bound = if group.poisoned >= 1_000 { "+" } else { "" };
    FailingRow {
        error: group.example.clone().unwrap_or_else(|| query.reason.clone()),
        count: format!("{}{bound}", text::number(group.poisoned)),
        last: group.last_at.map(|at| When::new(at, now)),
        query: query.encoded(),
        handler: query.handler,
        reason: query.reason,
    }
}

fn handler_row(handler: &HandlerStatus, lags: &[Lag], now: SystemTime) -> HandlerRow {
    let lag = lags.iter().find(|lag| lag.handler_key == handler.handler_key);
    HandlerRow {
        key: handler.handler_key.clone(),
        query: encoded(&[("handler", &handler.handler_key)]),
        due: text::count(handler.due),
        later: text::count(handler.later),
        held: text::count(handler.held),
        running: text::count(handler.running),
        poisoned: text::count(handler.poisoned),
        has_poisoned: handler.poisoned > 0,
        done: text::rate(handler.done_per_sec),
        failed: text::rate(handler.failed_per_sec),
        is_failing: handler.failed_per_sec > 0.0,
        oldest: handler.oldest_due_secs.map_or_else(|| "–".to_owned(), text::span),
        lag: lag.map_or_else(|| "–".to_owned(), |lag| text::span(lag.p50_secs)),
        processes: handler.processors,
        paused: handler.paused_at.map(|at| When::new(at, now)),
        broken: handler
            .breaker_opened_at
            .map(|at| (When::new(at, now), handler.breaker_error.clone().unwrap_or_default())),
        limit: handler.rate_per_sec.map_or_else(String::new, |limit| format!("at most {}", text::limit(limit))),
        unknown: handler.unknown_since.map(|at| When::new(at, now)),
        is_ordered: handler.is_ordered,
        is_idle: handler.processors == 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_without_an_error_leads_to_deliveries_without_an_error_only() {
        let group = |fingerprint: Option<&str>| ErrorSummary {
            handler_key: Some("mail".to_owned()),
            reason: Some("expired".to_owned()),
            fingerprint: fingerprint.map(str::to_owned),
            poisoned: 1,
            first_at: None,
            last_at: None,
            example: None,
        };
        let query = |fingerprint| failing(&group(fingerprint), SystemTime::now()).query;
        assert_eq!(query(None), "handler=mail&reason=expired&fingerprint=none");
        assert_eq!(query(Some("1f2e3d4c")), "handler=mail&reason=expired&fingerprint=1f2e3d4c");
    }
}
