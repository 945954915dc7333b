//! One message's story: the record, and for each handler its attempts in time, with their errors, and who acted.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::{Query, State};
use serde::Deserialize;

use super::super::app::App;
use super::super::guard::Visit;
use super::super::query::encoded;
use super::super::refusal::Refusal;
use super::super::text::{self, When};
use super::{DeliveryView, Frame, Page, PagePlace, html};
use crate::store::Backend;
use crate::types::{DeliveryDetails, DeliveryFilter, Record, State as Standing};

/// Handlers of a message that are shown.
const HANDLERS_MAX: u32 = 100;
/// Bytes of a payload that are shown.
const PAYLOAD_BYTES_MAX: usize = 256 << 10;
/// Bytes of a key or of a header's value that are shown.
const VALUE_BYTES_MAX: usize = 4 << 10;

#[derive(Deserialize)]
pub(in super::super) struct StoryQuery {
    message: String,
    #[serde(default)]
    source: String,
    #[serde(default)]
    payload: String,
    #[serde(default)]
    told: String,
}

#[derive(Template)]
#[template(path = "story.html")]
struct StoryPage {
    frame: Frame,
    told: Option<String>,
    message: String,
    source: String,
    received: Option<When>,
    record: Option<RecordView>,
    /// The query of this page.
    this: String,
    handlers: Vec<HandlerStory>,
    /// Whether it goes on: then the page is kept up to date.
    is_open: bool,
    /// Other messages with this id, by their source.
    others: Vec<(String, String)>,
}

struct HandlerStory {
    row: DeliveryView,
    /// The error that it has now.
    steps: Vec<StoryStep>,
    correction: Option<CorrectionView>,
}

struct CorrectionView {
    at: Option<When>,
    size: String,
    payload: Option<String>,
}

/// Something that happened to a delivery.
struct StoryStep {
    at: Option<(SystemTime, When)>,
    class: &'static str,
    what: String,
    error: String,
    who: String,
}

pub(in super::super) async fn story<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Query(query): Query<StoryQuery>,
) -> Page {
    let (frame, _) = Frame::new(&app, &visit, PagePlace { path: "/deliveries", title: "Message" }).await;
    let (operator, now, is_shown) = (app.operator(), SystemTime::now(), !query.payload.is_empty());
    let mut filter = DeliveryFilter::default().message_id(&query.message);
    filter.source = Some(query.source.clone()).filter(|source| !source.is_empty());
    let found = operator.deliveries(&filter, None, HANDLERS_MAX).await?;
    let Some(first) = found.first() else {
        return Err(Refusal::missing(format!("there is no delivery of a message {:?}", query.message)));
    };
    let (mut handlers, mut record, mut others) = (Vec::new(), None, Vec::new());
    for delivery in &found {
        if delivery.message_seq != first.message_seq {
            let source = delivery.source.clone().unwrap_or_default();
            others.push((encoded(&[("message", &query.message), ("source", &source)]), source));
            continue;
        }
        let Some(details) = operator.delivery(delivery).await? else { continue };
        if let (None, Some(found)) = (&record, &details.record) {
            record = Some(RecordView::new(found, &visit, is_shown)?);
        }
        handlers.push(HandlerStory::new(&details, &visit, is_shown, now));
    }
    others.dedup();
    // What needs a person, or goes on, comes first.
    handlers.sort_by_key(|handler| match handler.row.state {
        "poisoned" => 0,
        "running" | "pending" => 1,
        _ => 2,
    });
    let source = first.source.clone().unwrap_or_default();
    let page = StoryPage {
        frame,
        told: super::told(&query.told),
        this: encoded(&[("message", &query.message), ("source", &source)]),
        message: query.message,
        source,
        received: first.received_at.map(|at| When::new(at, now)),
        record,
        is_open: handlers.iter().any(|handler| matches!(handler.row.state, "pending" | "running")),
        handlers,
        others,
    };
    Ok(html(&page))
}

impl HandlerStory {
    fn new(details: &DeliveryDetails, visit: &Visit, is_shown: bool, now: SystemTime) -> Self {
        let delivery = &details.delivery;
        let moment = |at: SystemTime| Some((at, When::new(at, now)));
        let mut steps = Vec::new();
        if let Some(received) = delivery.received_at {
            steps.push(StoryStep::new(moment(received), "accepted", "accepted".to_owned()));
        }
        for failure in &details.failures {
            let what = format!("attempt {}: {}", failure.attempt, failure.why);
            let step = StoryStep::new(moment(failure.failed_at), "failed", what);
            steps.push(StoryStep { error: failure.error.clone().unwrap_or_default(), ..step });
        }
        for act in &details.history {
            let what = act.action.clone().unwrap_or_else(|| "acted on".to_owned());
            let step = StoryStep::new(act.acted_at.and_then(moment), "acted", what);
            let person = act.actor.as_deref().or(act.database_user.as_deref()).unwrap_or("somebody");
            let because = act.because.as_ref().map_or_else(String::new, |because| format!(": {because}"));
            steps.push(StoryStep { who: format!("{person}{because}"), ..step });
        }
        // What has no time stays where it was put: after the ones before it.
        steps.sort_by_key(|step| step.at.as_ref().map(|(at, _)| *at));
        steps.push(StoryStep::standing(details, now));
        let correction = details.correction.as_ref().map(|correction| CorrectionView {
            at: correction.corrected_at.map(|at| When::new(at, now)),
            size: text::bytes(correction.payload.len() as u64),
            payload: (is_shown && visit.visitor.may_see_payloads).then(|| pretty(&correction.payload)),
        });
        Self { row: DeliveryView::new(delivery, now), steps, correction }
    }
}

impl StoryStep {
    fn new(at: Option<(SystemTime, When)>, class: &'static str, what: String) -> Self {
        Self { at, class, what, error: String::new(), who: String::new() }
    }

    /// What it has come to, or waits for.
    fn standing(details: &DeliveryDetails, now: SystemTime) -> Self {
        let delivery = &details.delivery;
        let why = |word: &str| match &delivery.reason {
            Some(reason) => format!("{word}: {reason}"),
            None => word.to_owned(),
        };
        let (at, class, what) = match delivery.state {
            Standing::Done => (delivery.finished_at, "done", format!("attempt {}: done", delivery.attempts)),
            Standing::Poisoned => (delivery.finished_at, "poisoned", why("poisoned")),
            Standing::Discarded => (delivery.finished_at, "discarded", why("discarded")),
            Standing::Running => (None, "running", format!("attempt {} is running", delivery.attempts)),
            Standing::Pending if delivery.due_at.is_none() => {
                (None, "pending", "waits for another of its key".to_owned())
            }
            Standing::Pending => (delivery.due_at, "pending", "pending, due".to_owned()),
        };
        let mut step = Self::new(at.map(|at| (at, When::new(at, now))), class, what);
        if let (Standing::Running, Some(process)) = (delivery.state, &delivery.locked_by) {
            step.who = format!("in {process}");
        }
        step
    }
}

/// A record as it is shown: key, values of headers and payload only when they were asked for by somebody who may see them.
pub(super) struct RecordView {
    pub(super) topic: String,
    pub(super) position: String,
    pub(super) cluster: String,
    pub(super) recorded: Option<When>,
    pub(super) key: String,
    pub(super) headers: Vec<(String, String)>,
    pub(super) size: String,
    pub(super) payload: Option<String>,
    pub(super) is_cut: bool,
    pub(super) may_see: bool,
    pub(super) is_shown: bool,
}

impl RecordView {
    pub(super) fn new(record: &Record, visit: &Visit, is_asked: bool) -> Result<Self, Refusal> {
        let may_see = visit.visitor.may_see_payloads;
        if is_asked && !may_see {
            return Err(Refusal::forbidden("you have no right to see payloads"));
        }
        let value = |bytes: Option<&[u8]>| match bytes {
            None => "none".to_owned(),
            Some(bytes) if is_asked => text::shown(bytes, VALUE_BYTES_MAX),
            Some(bytes) => text::bytes(bytes.len() as u64),
        };
        let headers = record.headers().iter();
        let payload = record.payload();
        Ok(Self {
            topic: record.topic().to_owned(),
            position: record.position().map_or_else(String::new, |at| format!("[{}] {}", at.partition, at.offset)),
            cluster: record.cluster().unwrap_or_default().to_owned(),
            recorded: record.recorded_at().map(|at| When::new(at, SystemTime::now())),
            key: value(record.key()),
            headers: headers.map(|(name, bytes)| (text::shown(name, VALUE_BYTES_MAX), value(bytes))).collect(),
            size: payload.map_or_else(|| "none (a tombstone)".to_owned(), |bytes| text::bytes(bytes.len() as u64)),
            payload: payload.filter(|_| is_asked).map(pretty),
            is_cut: payload.is_some_and(|bytes| bytes.len() > PAYLOAD_BYTES_MAX),
            may_see,
            is_shown: is_asked,
        })
    }
}

/// JSON on several lines, every number and name as it came; other text as it is, bytes in hexadecimal.
fn pretty(payload: &[u8]) -> String {
    let is_json =
        payload.len() <= PAYLOAD_BYTES_MAX && serde_json::from_slice::<serde::de::IgnoredAny>(payload).is_ok();
    match std::str::from_utf8(payload) {
        Ok(json) if is_json => text::indented(json),
        Ok(_) | Err(_) => text::shown(payload, PAYLOAD_BYTES_MAX),
    }
}
