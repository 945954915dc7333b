//! The preview of an action: what it would change, and the button that performs it.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::{Query, State};
use serde::Deserialize;

use super::super::app::App;
use super::super::bound;
use super::super::groups::{self, DeliveryGroups, Groups};
use super::super::guard::Visit;
use super::super::long_act::SEEN_MAX;
use super::super::query::{DeliveryQuery, QuarantineQuery, ROWS_MAX, encoded};
use super::super::refusal::Refusal;
use super::super::text;
use super::{DeliveryView, Frame, Page, PagePlace, html};
use crate::operate::Operator;
use crate::store::Backend;
use crate::types::{DeliveryFilter, DeliverySummary, HandlerStatus, State as DeliveryState};

/// How many of the matching deliveries are shown.
const SHOWN: u32 = 10;

/// The actions. URLs use their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(in super::super) enum ActVerb {
    Replay,
    Discard,
    /// Revokes the claim of a run.
    Release,
    Pause,
    Resume,
    /// Closes a handler's breaker.
    CloseBreaker,
    /// Replays quarantined records.
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

    /// The text of the button.
    fn button(self) -> &'static str {
        match self {
            Self::Replay => "Replay",
            Self::Discard => "Discard",
            Self::Release => "Release",
            Self::Pause => "Pause",
            Self::Resume => "Resume",
            Self::CloseBreaker => "Close the breaker",
            Self::Accept => "Replay",
            Self::Delete => "Delete",
        }
    }

    /// Explains the action to a person who does it for the first time.
    fn meaning(self) -> &'static str {
        match self {
            Self::Replay => {
                "Each delivery is due now, with a fresh retry budget. Earlier outcomes stay in its history."
            }
            Self::Discard => "The deliveries do not run again, unless a person replays one by its message id.",
            Self::Release => {
                "The claim of the run is revoked. Each delivery is due at once and can run elsewhere. The outcome of its present run is ignored. A handler that does not yield \
                 continues concurrently with the next run."
            }
            Self::Pause => {
                "Within a third of the lease, no process starts deliveries of this handler any more. Runs under way finish."
            }
            Self::Resume => "Deliveries of this handler are started again.",
            Self::CloseBreaker => {
                "Deliveries of this handler are started again, without waiting for a probe. If they fail, the breaker opens again."
            }
            Self::Accept => {
                "A running inbox that subscribes to their topic accepts the records again, with its current identity policy. Accepted \
                 records leave the quarantine; rejected ones stay with an updated reason."
            }
            Self::Delete => "The records and their payloads are deleted. This cannot be undone.",
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
    /// Set when the action was refused, because something else matches than its preview showed.
    #[serde(default)]
    pub(super) changed: String,
}

#[derive(Template)]
#[template(path = "act.html")]
struct PreviewPage {
    frame: Frame,
    verb: &'static str,
    heading: &'static str,
    meaning: &'static str,
    is_destructive: bool,
    /// The filter in words. Empty for everything.
    about: Vec<(&'static str, String)>,
    /// The filter as a URL query.
    target: String,
    /// How many rows match, counted up to a limit.
    count: Option<u64>,
    count_text: String,
    /// What the rows are called.
    noun: &'static str,
    /// When the preview was made, in microseconds. The action changes nothing that came to match later.
    previewed: u64,
    /// The digest of the deliveries of one message.
    seen: Option<String>,
    /// The pending or running deliveries that the action may change.
    list: Option<String>,
    is_changed: bool,
    /// What the action leaves out, if it cannot take everything that matches.
    limit: Option<&'static str>,
    groups: Groups,
    rows: Vec<DeliveryView>,
    /// Whether the visitor can choose between a canary and a plain replay.
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
    let mut page = match wanted.verb {
        ActVerb::Replay | ActVerb::Discard | ActVerb::Release if deliveries.message.is_empty() => {
            of_deliveries(&app, &visit, wanted.verb, &deliveries).await?
        }
        ActVerb::Replay | ActVerb::Discard => of_message(&app, &visit, wanted.verb, &deliveries).await?,
        ActVerb::Release => {
            let page = of_message(&app, &visit, wanted.verb, &deliveries).await?;
            PreviewPage { target: format!("{}&attempt={}", page.target, text::encode(&wanted.attempt)), ..page }
        }
        ActVerb::Accept | ActVerb::Delete => of_quarantine(&app, &visit, wanted.verb, &quarantine).await?,
        ActVerb::Pause | ActVerb::Resume | ActVerb::CloseBreaker => {
            let page = page(&app, &visit, wanted.verb, "/").await;
            let target = encoded(&[("handler", &deliveries.handler)]);
            PreviewPage { about: vec![("handler", deliveries.handler)], target, ..page }
        }
    };
    page.is_changed = !wanted.changed.is_empty();
    Ok(html(&page))
}

async fn page<B: Backend>(app: &App<B>, visit: &Visit, verb: ActVerb, path: &'static str) -> PreviewPage {
    let (frame, _) = Frame::new(app, visit, PagePlace { path, title: verb.button() }).await;
    PreviewPage {
        frame,
        // Taken before the rows are read: a row that appears in between may be shown, but is not changed.
        previewed: bound::micros(SystemTime::now()),
        seen: None,
        list: None,
        is_changed: false,
        limit: None,
        verb: verb.name(),
        heading: verb.button(),
        meaning: verb.meaning(),
        is_destructive: verb.is_destructive(),
        about: Vec::new(),
        target: String::new(),
        count: None,
        count_text: String::new(),
        noun: "",
        groups: Groups::none(0),
        rows: Vec::new(),
        has_pace: false,
        is_empty: false,
    }
}

impl PreviewPage {
    /// The page with the rows that match: how many, in which groups, and what they are called.
    fn of(self, groups: Groups, [one, many]: [&'static str; 2]) -> Self {
        let count = groups.total;
        Self {
            count: Some(count),
            count_text: groups.total(),
            noun: if count == 1 { one } else { many },
            is_empty: count == 0,
            groups: groups.first(SHOWN as usize),
            ..self
        }
    }
}

const DELIVERIES: [&str; 2] = ["delivery", "deliveries"];
const RECORDS: [&str; 2] = ["record", "records"];

/// An action on all deliveries that match.
async fn of_deliveries<B: Backend>(
    app: &App<B>,
    visit: &Visit,
    verb: ActVerb,
    query: &DeliveryQuery,
) -> Result<PreviewPage, Refusal> {
    let (state, now) = (state_of(verb, query)?, SystemTime::now());
    let base = page(app, visit, verb, query.path(state)).await;
    let base = PreviewPage { about: query.words(), target: query.encoded(), ..base };
    if state == DeliveryState::Poisoned {
        let (found, rows) = groups::search(app, query, Some(state), SHOWN).await?;
        let rows = rows.iter().map(|one| DeliveryView::new(one, now)).collect();
        let base = PreviewPage { rows, has_pace: verb == ActVerb::Replay, ..base };
        return Ok(base.of(Groups::of_poisoned(&found, query), DELIVERIES));
    }
    let (operator, filter) = (app.operator(), query.filter()?);
    let found = app.reads.run(async move { open(&operator, &filter, state).await }).await?;
    let is_cut = found.len() >= SEEN_MAX as usize;
    let seen: Vec<_> = found.iter().map(bound::seen).collect();
    let base = PreviewPage {
        list: Some(bound::list(&seen)),
        limit: is_cut.then_some("One action takes the longest due 10,000 deliveries. Repeat it for the rest."),
        rows: found.iter().take(SHOWN as usize).map(|one| DeliveryView::new(one, now)).collect(),
        ..base
    };
    let groups = DeliveryGroups::of_rows(&found, state);
    Ok(base.of(Groups::of_deliveries(&groups, query, Some(state)), DELIVERIES))
}

/// The state of the deliveries that an action on many applies to.
pub(super) fn state_of(verb: ActVerb, query: &DeliveryQuery) -> Result<DeliveryState, Refusal> {
    match (verb, query.state()?) {
        (ActVerb::Replay | ActVerb::Discard, None | Some(DeliveryState::Poisoned)) => Ok(DeliveryState::Poisoned),
        (ActVerb::Discard, Some(DeliveryState::Pending)) => Ok(DeliveryState::Pending),
        (ActVerb::Release, None | Some(DeliveryState::Running)) => Ok(DeliveryState::Running),
        (verb, _) => {
            let what = format!("cannot {} {} deliveries, except one by its message id", verb.name(), query.state);
            Err(Refusal::wrong(what))
        }
    }
}

/// The pending or running deliveries that match, the longest due first. One whose message is gone cannot be named in an
/// action.
pub(super) async fn open<B: Backend>(
    operator: &Operator<B>,
    filter: &DeliveryFilter,
    state: DeliveryState,
) -> crate::types::Result<Vec<DeliverySummary>> {
    let mut found = operator.deliveries(filter, Some(state), SEEN_MAX).await?;
    found.retain(|one| one.message_id.is_some() && one.handler_key.is_some());
    Ok(found)
}

/// An action on the deliveries of one message, in other states than poisoned too.
async fn of_message<B: Backend>(
    app: &App<B>,
    visit: &Visit,
    verb: ActVerb,
    query: &DeliveryQuery,
) -> Result<PreviewPage, Refusal> {
    let base = page(app, visit, verb, "/deliveries").await;
    let (operator, filter, now) = (app.operator(), query.filter()?, SystemTime::now());
    let found = app.reads.run(async move { with_message(&operator, verb, &filter).await }).await?;
    let base = PreviewPage {
        about: query.words(),
        target: query.encoded(),
        rows: found.iter().take(SHOWN as usize).map(|one| DeliveryView::new(one, now)).collect(),
        seen: Some(bound::digest(&found)),
        ..base
    };
    Ok(base.of(Groups::none(found.len()), DELIVERIES))
}

/// The deliveries of one message that the action applies to. They are few.
pub(super) async fn with_message<B: Backend>(
    operator: &Operator<B>,
    verb: ActVerb,
    filter: &DeliveryFilter,
) -> crate::types::Result<Vec<DeliverySummary>> {
    let mut found = operator.deliveries(filter, None, ROWS_MAX).await?;
    found.retain(|one| can(verb, one.state));
    Ok(found)
}

/// Whether the action applies to a delivery in this state, when it is named by its message id.
fn can(verb: ActVerb, state: DeliveryState) -> bool {
    match verb {
        ActVerb::Replay => matches!(state, DeliveryState::Poisoned | DeliveryState::Discarded),
        ActVerb::Discard => matches!(state, DeliveryState::Poisoned | DeliveryState::Pending),
        ActVerb::Release => state == DeliveryState::Running,
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
    let (filter, operator) = (query.filter()?, app.operator());
    let is_one = filter.id.is_some();
    let search = async move { operator.quarantine_groups(&filter, HandlerStatus::COUNT_MAX as u32).await };
    let groups = app.reads.run(search).await?;
    let has_pace = verb == ActVerb::Accept && !is_one;
    let base = PreviewPage { about: query.words(), target: query.encoded(), has_pace, ..base };
    Ok(base.of(Groups::of_quarantine(&groups, query), RECORDS))
}

/// The filter for the action. An empty one becomes `all`, because the preview has said that everything matches.
pub(super) fn meant(mut filter: DeliveryFilter) -> DeliveryFilter {
    filter.all = filter == DeliveryFilter::default();
    filter
}
