//! The page of one message: the record, and for each handler a timeline of attempts, errors and operator actions.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::{Query, State};
use axum::http::HeaderMap;
use serde::Deserialize;

use super::super::app::{App, StoryKey, StoryLook};
use super::super::decoding::DecodedView;
use super::super::guard::Visit;
use super::super::query::encoded;
use super::super::refusal::Refusal;
use super::super::text::{self, When};
use super::{DeliveryView, Frame, Page, PagePlace, html};
use crate::operate::Operator;
use crate::store::Backend;
use crate::store::story::{DeliveryStory, MessageStory};
use crate::types::{DeliveryFilter, DeliverySummary, FailedAttempt, HistoryEntry, Record, State as DeliveryState};

/// How many handlers of a message are shown.
const HANDLERS_MAX: u32 = 100;
/// How many bytes of a payload are shown.
const PAYLOAD_BYTES_MAX: usize = 256 << 10;
/// How many bytes of a key or a header value are shown.
const VALUE_BYTES_MAX: usize = 4 << 10;
/// The script sends this header when it updates an open page. An update does not replace the record.
const UPDATE_HEADER: &str = "x-wharf-update";

#[derive(Deserialize)]
pub(in super::super) struct StoryQuery {
    message: String,
    #[serde(default)]
    source: String,
    #[serde(default)]
    payload: String,
    #[serde(default)]
    result: String,
}

#[derive(Template)]
#[template(path = "story.html")]
struct StoryPage {
    frame: Frame,
    result: Option<String>,
    message: String,
    source: String,
    received: Option<When>,
    record: Option<RecordView>,
    /// The query of this page.
    this: String,
    handlers: Vec<HandlerStory>,
    /// Whether a delivery is not finished yet. Then the page updates by itself.
    is_open: bool,
    /// Other messages with the same id, by their source.
    others: Vec<(String, String)>,
}

struct HandlerStory {
    row: DeliveryView,
    /// The timeline, with the current state last.
    steps: Vec<StoryStep>,
    correction: Option<CorrectionView>,
}

struct CorrectionView {
    at: Option<When>,
    size: String,
    payload: Option<String>,
}

/// An entry of the timeline.
struct StoryStep {
    at: Option<When>,
    class: &'static str,
    what: String,
    error: String,
    who: String,
}

pub(in super::super) async fn story<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    headers: HeaderMap,
    Query(query): Query<StoryQuery>,
) -> Page {
    let (frame, snapshot) = Frame::new(&app, &visit, PagePlace { path: "/deliveries", title: "Message" }).await;
    let (operator, now, is_shown) = (app.operator(), SystemTime::now(), !query.payload.is_empty());
    let key = StoryKey { message: query.message.clone(), source: query.source.clone() };
    let look = look(&operator, &key);
    // Cached stories are valid for one snapshot, so without a snapshot the story is looked up.
    let found = match &snapshot {
        Some(snapshot) => app.stories.get(key.clone(), snapshot.number, look).await?,
        None => Arc::new(look.await?),
    };
    let Some(first) = found.deliveries.first() else {
        return Err(Refusal::missing(format!("no delivery of a message {:?} exists", query.message)));
    };
    let story = &found.story;
    let record = match &story.record {
        Some(head) => {
            let is_read = is_shown && !headers.contains_key(UPDATE_HEADER);
            let whole = if is_read { operator.message_record(first).await? } else { None };
            let view = RecordView::new(whole.as_ref().unwrap_or(head), story.payload_bytes, &visit, is_shown)?;
            Some(if let Some(whole) = &whole { view.decoded(&app, whole).await } else { view })
        }
        None => None,
    };
    let (mut handlers, mut others) = (Vec::new(), Vec::new());
    for delivery in &found.deliveries {
        if delivery.message_seq != first.message_seq {
            let source = delivery.source.clone().unwrap_or_default();
            others.push((encoded(&[("message", &query.message), ("source", &source)]), source));
            continue;
        }
        let result = story.deliveries.get(&delivery.handler_id).unwrap_or(&NOTHING_HAPPENED);
        handlers.push(HandlerStory::new(delivery, result, &visit, is_shown, now));
    }
    others.dedup();
    // Poisoned deliveries come first, then unfinished ones.
    handlers.sort_by_key(|handler| match handler.row.state {
        "poisoned" => 0,
        "running" | "pending" => 1,
        _ => 2,
    });
    let source = first.source.clone().unwrap_or_default();
    let page = StoryPage {
        frame,
        result: super::result(&query.result),
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

async fn look<B: Backend>(operator: &Operator<B>, key: &StoryKey) -> crate::types::Result<StoryLook> {
    let mut filter = DeliveryFilter::default().message_id(&key.message);
    filter.source = Some(key.source.clone()).filter(|source| !source.is_empty());
    let deliveries = operator.deliveries(&filter, None, HANDLERS_MAX).await?;
    let story = match deliveries.first() {
        Some(first) => operator.story(first).await?,
        None => MessageStory::default(),
    };
    Ok(StoryLook { deliveries, story })
}

/// The story of a delivery without failures and operator actions.
static NOTHING_HAPPENED: DeliveryStory = DeliveryStory { history: Vec::new(), failures: Vec::new(), correction: None };

impl HandlerStory {
    fn new(
        delivery: &DeliverySummary,
        details: &DeliveryStory,
        visit: &Visit,
        is_shown: bool,
        now: SystemTime,
    ) -> Self {
        let mut steps = past(delivery.received_at, details, now);
        steps.push(StoryStep::status(delivery, now));
        let correction = details.correction.as_ref().map(|correction| CorrectionView {
            at: correction.corrected_at.map(|at| When::new(at, now)),
            size: text::bytes(correction.payload.len() as u64),
            payload: (is_shown && visit.visitor.may_see_payloads).then(|| pretty(&correction.payload)),
        });
        Self { row: DeliveryView::new(delivery, now), steps, correction }
    }
}

/// What has happened to a delivery so far, the oldest first.
fn past(received_at: Option<SystemTime>, details: &DeliveryStory, now: SystemTime) -> Vec<StoryStep> {
    let mut steps = Vec::new();
    if received_at.is_some() {
        steps.push((received_at, StoryStep::new(received_at, "accepted", "accepted".to_owned(), now)));
    }
    for failure in &details.failures {
        let (at, what) = (Some(failure.failed_at), format!("attempt {}: {}", failure.attempt, failure.why));
        let error = failure.error.clone().unwrap_or_default();
        steps.push((at, StoryStep { error, ..StoryStep::new(at, "failed", what, now) }));
    }
    let mut place = received_at;
    for act in &details.history {
        place = place_of(act, &details.failures, place);
        let what = act.action.clone().unwrap_or_else(|| "acted on".to_owned());
        let person = act.actor.as_deref().or(act.database_user.as_deref()).unwrap_or("somebody");
        let because = act.because.as_ref().map_or_else(String::new, |because| format!(": {because}"));
        let who = format!("{person}{because}");
        steps.push((place, StoryStep { who, ..StoryStep::new(act.acted_at, "acted", what, now) }));
    }
    // Stable: an action without a time stays behind the entry whose place it shares.
    steps.sort_by_key(|(place, _)| *place);
    steps.into_iter().map(|(_, step)| step).collect()
}

/// The time by which an action is sorted. An action has no time of its own when its row of the audit was deleted: it
/// then follows the last attempt before it, and the action before it, whose place is `earlier`.
fn place_of(act: &HistoryEntry, failures: &[FailedAttempt], earlier: Option<SystemTime>) -> Option<SystemTime> {
    act.acted_at.or_else(|| {
        let before = failures.iter().filter(|failure| failure.attempt <= act.attempts);
        before.map(|failure| failure.failed_at).chain(earlier).max()
    })
}

impl StoryStep {
    fn new(at: Option<SystemTime>, class: &'static str, what: String, now: SystemTime) -> Self {
        let at = at.map(|at| When::new(at, now));
        Self { at, class, what, error: String::new(), who: String::new() }
    }

    /// The outcome of the delivery, or what it waits for.
    fn status(delivery: &DeliverySummary, now: SystemTime) -> Self {
        let why = |word: &str| match &delivery.reason {
            Some(reason) => format!("{word}: {reason}"),
            None => word.to_owned(),
        };
        let (at, class, what) = match delivery.state {
            DeliveryState::Done => (delivery.finished_at, "done", format!("attempt {}: done", delivery.attempts)),
            DeliveryState::Poisoned => (delivery.finished_at, "poisoned", why("poisoned")),
            DeliveryState::Discarded => (delivery.finished_at, "discarded", why("discarded")),
            DeliveryState::Running => (None, "running", format!("attempt {} is running", delivery.attempts)),
            DeliveryState::Pending if delivery.due_at.is_none() => {
                (None, "pending", "waits for an earlier delivery of its order key".to_owned())
            }
            DeliveryState::Pending => (delivery.due_at, "pending", "pending, due".to_owned()),
        };
        let mut step = Self::new(at, class, what, now);
        if let (DeliveryState::Running, Some(process)) = (delivery.state, &delivery.locked_by) {
            step.who = format!("in {process}");
        }
        step
    }
}

/// A record for display. Key, header values and payload are included only if the visitor requests them and may see
/// them.
pub(super) struct RecordView {
    pub(super) topic: String,
    pub(super) position: String,
    pub(super) cluster: String,
    pub(super) recorded: Option<When>,
    pub(super) key: String,
    pub(super) headers: Vec<(String, String)>,
    pub(super) size: String,
    pub(super) payload: Option<String>,
    /// Payload and key as the decoder of the dashboard shows them.
    pub(super) decoded: Vec<DecodedView>,
    pub(super) is_cut: bool,
    pub(super) may_see: bool,
    pub(super) is_shown: bool,
}

impl RecordView {
    /// The size of the payload is given, because the record may have been read without it.
    pub(super) fn new(
        record: &Record,
        payload_bytes: Option<u64>,
        visit: &Visit,
        is_asked: bool,
    ) -> Result<Self, Refusal> {
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
            size: payload_bytes.map_or_else(|| "none (a tombstone)".to_owned(), text::bytes),
            payload: payload.filter(|_| is_asked).map(pretty),
            decoded: Vec::new(),
            is_cut: payload.is_some_and(|bytes| bytes.len() > PAYLOAD_BYTES_MAX),
            may_see,
            is_shown: is_asked,
        })
    }

    /// Adds the decoded payload and key, if the visitor has requested them.
    pub(super) async fn decoded<B: Backend>(mut self, app: &App<B>, record: &Record) -> Self {
        if self.is_shown {
            self.decoded = app.decoding.of(record).await;
        }
        self
    }
}

/// Formats JSON on several lines without changing names or numbers, other text unchanged, and other bytes in
/// hexadecimal.
fn pretty(payload: &[u8]) -> String {
    let is_json =
        payload.len() <= PAYLOAD_BYTES_MAX && serde_json::from_slice::<serde::de::IgnoredAny>(payload).is_ok();
    match std::str::from_utf8(payload) {
        Ok(json) if is_json => text::indented(json),
        Ok(_) | Err(_) => text::shown(payload, PAYLOAD_BYTES_MAX),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(secs: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(secs)
    }

    fn failure(attempt: i32, secs: u64) -> FailedAttempt {
        FailedAttempt { attempt, failed_at: at(secs), why: "failed".to_owned(), error: None }
    }

    fn act(action: &str, attempts: i32, acted_at: Option<SystemTime>) -> HistoryEntry {
        HistoryEntry {
            action: Some(action.to_owned()),
            acted_at,
            database_user: None,
            actor: None,
            because: None,
            state: DeliveryState::Poisoned,
            reason: None,
            last_error: None,
            attempts,
            errors: 1,
        }
    }

    fn told(received_at: Option<SystemTime>, story: &DeliveryStory) -> Vec<String> {
        past(received_at, story, at(100)).into_iter().map(|step| step.what).collect()
    }

    #[test]
    fn an_action_without_a_time_follows_the_attempt_before_it() {
        let history = vec![act("replay", 1, None), act("discard", 2, None), act("replay", 2, Some(at(40)))];
        let story = DeliveryStory { history, failures: vec![failure(1, 20), failure(2, 30)], correction: None };
        let expected = ["accepted", "attempt 1: failed", "replay", "attempt 2: failed", "discard", "replay"];
        assert_eq!(told(Some(at(10)), &story), expected);
    }

    #[test]
    fn an_action_without_a_time_never_precedes_the_accept_or_an_earlier_action() {
        let history = vec![act("discard", 0, None), act("replay", 0, Some(at(20))), act("release", 0, None)];
        let story = DeliveryStory { history, ..DeliveryStory::default() };
        assert_eq!(told(Some(at(10)), &story), ["accepted", "discard", "replay", "release"]);
        assert_eq!(told(None, &story), ["discard", "replay", "release"]);
    }
}
