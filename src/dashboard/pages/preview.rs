//! Before an act: what it would take, and the button that does it.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::{Query, State};
use serde::Deserialize;

use super::super::app::App;
use super::super::guard::Visit;
use super::super::query::{DeliveryQuery, QuarantineQuery, encoded};
use super::super::refusal::Refusal;
use super::super::text;
use super::{DeliveryView, Frame, Page, PagePlace, html};
use crate::store::Backend;
use crate::types::{DeliveryFilter, HandlerStatus, State as Standing};

/// Deliveries that are shown of what is meant.
const SHOWN: u32 = 10;

/// What a person can do here. Names as they stand in URLs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(in super::super) enum ActVerb {
    Replay,
    Discard,
    /// Takes the claim of a run away.
    Release,
    Pause,
    Resume,
    /// Closes a handler's breaker.
    CloseBreaker,
    /// Accepts quarantined records anew.
    Accept,
    /// Deletes quarantined records.
    Delete,
}

impl ActVerb {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Replay => "replay",
            Self::Discard => "discard",
            Self::Release => "release",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::CloseBreaker => "close-breaker",
            Self::Accept => "accept",
            Self::Delete => "delete",
        }
    }

    /// What the button says.
    fn button(self) -> &'static str {
        match self {
            Self::Replay => "Replay",
            Self::Discard => "Discard for good",
            Self::Release => "Take the claim away",
            Self::Pause => "Pause",
            Self::Resume => "Resume",
            Self::CloseBreaker => "Close the breaker",
            Self::Accept => "Accept anew",
            Self::Delete => "Delete for good",
        }
    }

    /// What will happen, for a person who does it for the first time.
    fn meaning(self) -> &'static str {
        match self {
            Self::Replay => {
                "Each gets a fresh set of retries and is due now. What it had come to stays in its history."
            }
            Self::Discard => {
                "They are given up for good and never run again, unless somebody replays one by its message."
            }
            Self::Release => {
                "The delivery is due at once and runs elsewhere; what this run comes to changes nothing any more. A handler that does not \
                 yield goes on beside the next run."
            }
            Self::Pause => {
                "No process starts deliveries of this handler any more, within a third of the lease. What runs goes on to its end."
            }
            Self::Resume => "Deliveries of this handler are started again.",
            Self::CloseBreaker => {
                "Deliveries of this handler are started again, without waiting for a probe. When they fail, it opens again."
            }
            Self::Accept => {
                "A running inbox that subscribes to their topic accepts them anew, with the identity policy it has now. What is accepted \
                 leaves the quarantine; what is not stays, with its reason of now."
            }
            Self::Delete => "The records are deleted. What they held is gone.",
        }
    }

    fn is_destructive(self) -> bool {
        matches!(self, Self::Discard | Self::Delete)
    }
}

#[derive(Deserialize)]
pub(in super::super) struct Wanted {
    pub(super) verb: ActVerb,
    #[serde(default)]
    pub(super) attempt: String,
}

#[derive(Template)]
#[template(path = "act.html")]
struct PreviewPage {
    frame: Frame,
    verb: &'static str,
    heading: String,
    meaning: &'static str,
    button: &'static str,
    is_destructive: bool,
    /// What is meant, in words; empty for everything.
    about: Vec<(&'static str, String)>,
    /// The same as it is sent.
    target: String,
    /// How many, counted up to a bound.
    count: Option<u64>,
    count_text: String,
    /// What they are.
    noun: &'static str,
    groups: Vec<(String, String, String)>,
    rows: Vec<DeliveryView>,
    /// Whether to choose how fast.
    has_pace: bool,
    is_empty: bool,
}

pub(in super::super) async fn preview<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Query(wanted): Query<Wanted>,
    Query(deliveries): Query<DeliveryQuery>,
    Query(quarantine): Query<QuarantineQuery>,
) -> Page {
    if !visit.visitor.may_act {
        return Err(Refusal::forbidden("you have no right to act"));
    }
    let page = match wanted.verb {
        ActVerb::Replay | ActVerb::Discard => of_deliveries(&app, &visit, wanted.verb, &deliveries).await?,
        ActVerb::Release => {
            let page = of_deliveries(&app, &visit, wanted.verb, &deliveries).await?;
            PreviewPage { target: format!("{}&attempt={}", page.target, text::encode(&wanted.attempt)), ..page }
        }
        ActVerb::Accept | ActVerb::Delete => of_quarantine(&app, &visit, wanted.verb, &quarantine).await?,
        ActVerb::Pause | ActVerb::Resume | ActVerb::CloseBreaker => {
            let page = page(&app, &visit, wanted.verb, "/").await;
            let target = encoded(&[("handler", &deliveries.handler)]);
            PreviewPage { about: vec![("handler", deliveries.handler)], target, ..page }
        }
    };
    Ok(html(&page))
}

async fn page<B: Backend>(app: &App<B>, visit: &Visit, verb: ActVerb, path: &'static str) -> PreviewPage {
    let (frame, _) = Frame::new(app, visit, PagePlace { path, title: verb.button() }).await;
    PreviewPage {
        frame,
        verb: verb.name(),
        heading: verb.button().to_owned(),
        meaning: verb.meaning(),
        button: verb.button(),
        is_destructive: verb.is_destructive(),
        about: Vec::new(),
        target: String::new(),
        count: None,
        count_text: String::new(),
        noun: "",
        groups: Vec::new(),
        rows: Vec::new(),
        has_pace: false,
        is_empty: false,
    }
}

async fn of_deliveries<B: Backend>(
    app: &App<B>,
    visit: &Visit,
    verb: ActVerb,
    query: &DeliveryQuery,
) -> Result<PreviewPage, Refusal> {
    let (filter, operator, now) = (query.filter()?, app.operator(), SystemTime::now());
    let base = page(app, visit, verb, "/poisoned").await;
    let (found, groups) = match filter.message_id {
        // By its message also what is not poisoned is meant, and they are few.
        Some(_) => {
            let mut found = operator.deliveries(&filter, None, super::super::query::ROWS_MAX).await?;
            found.retain(|one| can(verb, one.state));
            (found, Vec::new())
        }
        None => {
            let groups = operator.poisoned_groups(&filter, HandlerStatus::COUNT_MAX as u32).await?;
            (operator.deliveries(&filter, Some(Standing::Poisoned), SHOWN).await?, groups)
        }
    };
    let counted: u64 = groups.iter().map(|group| group.poisoned).sum();
    let count = counted.max(found.len() as u64).min(HandlerStatus::COUNT_MAX);
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let group = |group: &crate::types::ErrorSummary| {
        (
            text::count(group.poisoned),
            text(&group.handler_key),
            group.example.clone().unwrap_or_else(|| text(&group.reason)),
        )
    };
    Ok(PreviewPage {
        about: query.words(),
        target: query.encoded(),
        count: Some(count),
        count_text: text::count(count),
        noun: if count == 1 { "delivery" } else { "deliveries" },
        groups: groups.iter().take(SHOWN as usize).map(group).collect(),
        rows: found.iter().take(SHOWN as usize).map(|one| DeliveryView::new(one, now)).collect(),
        has_pace: verb == ActVerb::Replay && filter.message_id.is_none(),
        is_empty: count == 0,
        ..base
    })
}

/// Whether a delivery in this state is meant by the verb, when it is named by its message.
fn can(verb: ActVerb, state: Standing) -> bool {
    match verb {
        ActVerb::Replay => matches!(state, Standing::Poisoned | Standing::Discarded),
        ActVerb::Discard => matches!(state, Standing::Poisoned | Standing::Pending),
        ActVerb::Release => state == Standing::Running,
        ActVerb::Pause | ActVerb::Resume | ActVerb::CloseBreaker | ActVerb::Accept | ActVerb::Delete => false,
    }
}

async fn of_quarantine<B: Backend>(
    app: &App<B>,
    visit: &Visit,
    verb: ActVerb,
    query: &QuarantineQuery,
) -> Result<PreviewPage, Refusal> {
    let base = page(app, visit, verb, "/quarantine").await;
    let groups = app.operator().quarantine_groups(&query.filter()?, HandlerStatus::COUNT_MAX as u32).await?;
    let count = groups.iter().map(|group| group.records).sum::<u64>().min(HandlerStatus::COUNT_MAX);
    let group = |group: &crate::types::QuarantineGroup| {
        let why = group.example.as_ref().map_or_else(String::new, |example| format!(": {example}"));
        (text::count(group.records), group.topic.clone(), format!("{}{why}", group.reason))
    };
    Ok(PreviewPage {
        about: query.words(),
        target: query.encoded(),
        count: Some(count),
        count_text: text::count(count),
        noun: if count == 1 { "record" } else { "records" },
        groups: groups.iter().take(SHOWN as usize).map(group).collect(),
        is_empty: count == 0,
        ..base
    })
}

/// A filter for an act; one that says nothing means everything, because the preview has said so.
pub(super) fn meant(mut filter: DeliveryFilter) -> DeliveryFilter {
    filter.all = filter == DeliveryFilter::default();
    filter
}
