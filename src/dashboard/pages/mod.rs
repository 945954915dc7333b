//! The pages, one file each. A page looks up what its template shows. `guard.rs` has already checked the visitor's
//! rights.

pub(super) mod act;
pub(super) mod audit;
pub(super) mod deliveries;
pub(super) mod jobs;
pub(super) mod kafka;
pub(super) mod live;
pub(super) mod login;
pub(super) mod poisoned;
pub(super) mod preview;
pub(super) mod processes;
pub(super) mod quarantine;
pub(super) mod start;
pub(super) mod story;

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::app::App;
use super::base::Base;
use super::guard::Visit;
use super::refusal::Refusal;
use super::sampler::Snapshot;
use super::text::{self, When};
use crate::store::Backend;
use crate::types::{DeliverySummary, HandlerStatus};

type Page = std::result::Result<Response, Refusal>;

/// The frame around every page: its title, the menu with counts, and the rights of the visitor.
struct Frame {
    base: Base,
    title: &'static str,
    /// The path of the page's event stream, below the base.
    live: String,
    /// Whether the page reloads by itself where scripts are disabled.
    is_reloaded: bool,
    menu: Vec<MenuItem>,
    may_act: bool,
    visitor: String,
    database: String,
    taken: Option<When>,
    /// Why the newest snapshot failed.
    error: Option<String>,
}

struct MenuItem {
    path: &'static str,
    name: &'static str,
    count: Option<String>,
    is_here: bool,
}

const MENU: [(&str, &str); 7] = [
    ("/", "Start"),
    ("/poisoned", "Poisoned"),
    ("/quarantine", "Quarantine"),
    ("/deliveries", "Deliveries"),
    ("/kafka", "Kafka"),
    ("/processes", "Processes"),
    ("/audit", "Audit"),
];

/// The identity of a page.
#[derive(Clone, Copy)]
struct PagePlace {
    /// The path in the menu.
    path: &'static str,
    title: &'static str,
}

impl Frame {
    /// A frame with the sampler's last snapshot.
    async fn new<B: Backend>(app: &App<B>, visit: &Visit, place: PagePlace) -> (Self, Option<Arc<Snapshot>>) {
        let snapshot = app.sampler.latest().await;
        (Self::of(app, visit, place, snapshot.as_deref()), snapshot)
    }

    fn of<B: Backend>(app: &App<B>, visit: &Visit, place: PagePlace, snapshot: Option<&Snapshot>) -> Self {
        let diagnosis = snapshot.and_then(|snapshot| snapshot.diagnosis.as_deref());
        let facts = diagnosis.and_then(|diagnosis| diagnosis.facts.as_ref());
        let counts = snapshot.map(menu_counts).unwrap_or_default();
        let item = |(path, name): (&'static str, &'static str)| {
            let count = counts.iter().find(|(counted, _)| *counted == path).and_then(|(_, count)| count.clone());
            MenuItem { path, name, count, is_here: path == place.path }
        };
        let no_look = || Some("the database has not answered yet".to_owned());
        Self {
            base: visit.base.clone(),
            title: place.title,
            live: "/live".to_owned(),
            is_reloaded: false,
            menu: MENU.into_iter().map(item).collect(),
            may_act: visit.visitor.may_act,
            visitor: app.name_of(&visit.visitor),
            // Drops the suffix that the packager adds to the version.
            database: facts
                .map_or_else(String::new, |facts| facts.database.split(" (").next().unwrap_or_default().to_owned()),
            taken: snapshot.map(|snapshot| When::new(snapshot.taken_at, SystemTime::now())),
            error: snapshot.map_or_else(no_look, |snapshot| snapshot.error.clone()),
        }
    }

    /// A page that reloads every few seconds also where scripts are disabled.
    fn reloaded(mut self) -> Self {
        self.is_reloaded = true;
        self
    }
}

/// The counts beside the menu items. A count of zero is not shown.
fn menu_counts(snapshot: &Snapshot) -> Vec<(&'static str, Option<String>)> {
    let Some(diagnosis) = snapshot.diagnosis.as_deref() else { return Vec::new() };
    let poisoned: u64 = diagnosis.handlers.iter().map(|handler| handler.poisoned).sum();
    let quarantined = diagnosis.facts.as_ref().map_or(0, |facts| facts.quarantined);
    let shown = |count: u64| (count > 0).then(|| text::count(count.min(HandlerStatus::COUNT_MAX)));
    vec![("/poisoned", shown(poisoned)), ("/quarantine", shown(quarantined))]
}

/// Renders a template.
pub(super) fn html(template: &impl Template) -> Response {
    match template.render() {
        Ok(page) => ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], text::visible(page)).into_response(),
        // Rendering fails only if a formatter fails, and those in use do not.
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// A delivery as a row of a list.
struct DeliveryView {
    message: String,
    /// The query of the message's page.
    story: String,
    handler: String,
    topic: String,
    position: String,
    state: &'static str,
    reason: String,
    error: String,
    attempts: i32,
    at: Option<When>,
    /// The meaning of `at`.
    at_is: &'static str,
    /// The query of an action on this delivery.
    this: String,
    can_replay: bool,
    can_discard: bool,
    can_release: bool,
}

impl DeliveryView {
    fn new(found: &DeliverySummary, now: SystemTime) -> Self {
        use crate::types::State;
        let (at_is, at) = match found.state {
            State::Pending => ("due", found.due_at),
            State::Running => ("locked until", found.locked_until),
            State::Done | State::Poisoned | State::Discarded => ("finished", found.finished_at),
        };
        let (message, source) = (found.message_id.as_deref().unwrap_or_default(), found.source.as_deref());
        let handler = found.handler_key.clone().unwrap_or_default();
        let of_message = [("message", message), ("source", source.unwrap_or_default())];
        let attempt = found.attempts.to_string();
        let this = super::query::encoded(&[of_message[0], of_message[1], ("handler", &handler), ("attempt", &attempt)]);
        let can_act = found.message_id.is_some() && found.handler_key.is_some();
        Self {
            message: found.message_id.clone().unwrap_or_else(|| "(deleted message)".to_owned()),
            story: super::query::encoded(&of_message),
            handler,
            topic: found.topic.clone().unwrap_or_default(),
            position: match (found.kafka_partition, found.kafka_offset) {
                (Some(partition), Some(offset)) => format!("[{partition}] {offset}"),
                _ => String::new(),
            },
            state: found.state.as_str(),
            reason: found.reason.clone().unwrap_or_default(),
            error: found.last_error.clone().unwrap_or_default(),
            attempts: found.attempts,
            at: at.map(|at| When::new(at, now)),
            at_is,
            this,
            can_replay: can_act && matches!(found.state, State::Poisoned | State::Discarded),
            can_discard: can_act && matches!(found.state, State::Poisoned | State::Pending),
            can_release: can_act && found.state == State::Running,
        }
    }
}

/// The handlers that a filter offers.
fn handler_choices(snapshot: Option<&Snapshot>, chosen: &str) -> Vec<Choice> {
    let diagnosis = snapshot.and_then(|snapshot| snapshot.diagnosis.as_deref());
    let keys = diagnosis.map(|diagnosis| &diagnosis.handlers[..]).unwrap_or_default();
    let mut choices: Vec<Choice> = keys.iter().map(|handler| Choice::new(&handler.handler_key, chosen)).collect();
    if !chosen.is_empty() && !choices.iter().any(|choice| choice.is_chosen) {
        choices.push(Choice::new(chosen, chosen));
    }
    choices
}

struct Choice {
    name: String,
    is_chosen: bool,
}

impl Choice {
    fn new(name: &str, chosen: &str) -> Self {
        Self { name: name.to_owned(), is_chosen: name == chosen }
    }
}

/// The result of an action in words. The URL of the next page has it in the form `replay-3`.
fn result(code: &str) -> Option<String> {
    let (verb, count) = code.rsplit_once('-')?;
    let count: u64 = count.parse().ok()?;
    let number = text::number(count);
    let text = match (verb, count) {
        ("pause", 0) => "It was paused already.".to_owned(),
        ("resume", 0) => "It was not paused.".to_owned(),
        ("close-breaker", 0) => "It was not open.".to_owned(),
        (_, 0) => "Nothing was changed: the state had changed in between.".to_owned(),
        ("replay", 1) => "One delivery was replayed: it is due now.".to_owned(),
        ("replay", _) => format!("{number} deliveries were replayed: they are due now."),
        ("discard", 1) => "One delivery was discarded.".to_owned(),
        ("discard", _) => format!("{number} deliveries were discarded."),
        ("release", _) => "The claim was released: the delivery is due now.".to_owned(),
        ("pause", _) => "Paused: within a third of the lease, no process starts its deliveries any more.".to_owned(),
        ("close-breaker", _) => "Closed: its deliveries are claimed again.".to_owned(),
        ("resume", _) => "Resumed: its deliveries are claimed again.".to_owned(),
        ("accept", 1) => "A replay of 1 record was requested. A running inbox does it within seconds.".to_owned(),
        ("accept", _) => {
            format!("A replay of {number} records was requested. A running inbox does it within seconds.")
        }
        ("delete", 1) => "One record was deleted.".to_owned(),
        ("delete", _) => format!("{number} records were deleted."),
        _ => return None,
    };
    Some(text)
}
