//! Performs the previewed action in the visitor's name, and redirects to the page that shows the result.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Form, Query, State};
use axum::http::Uri;
use axum::response::{IntoResponse, Redirect};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::super::app::App;
use super::super::bound::{self, Bound};
use super::super::guard::Visit;
use super::super::long_act::{Plan, Work, at_once, carefully};
use super::super::query::{DeliveryQuery, QuarantineQuery, encoded};
use super::super::refusal::Refusal;
use super::Page;
use super::preview::{ActVerb, meant, open, state_of, with_message};
use crate::operate::Canary;
use crate::store::Backend;
use crate::store::operating::SeenDelivery;
use crate::types::{DeliveryFilter, QuarantineFilter, State as DeliveryState};

/// The maximum number of deliveries of one message in an action. A message has one for each handler.
const OF_MESSAGE_MAX: u32 = 1_000;

#[derive(Deserialize)]
pub(in super::super) struct ActForm {
    verb: ActVerb,
    /// The filter as a URL query, so that the page passes every character through unchanged.
    #[serde(default)]
    target: String,
    #[serde(default)]
    because: String,
    #[serde(default)]
    pace: String,
    /// How many rows the preview counted.
    expected: Option<u64>,
    /// When the preview was made, in microseconds.
    previewed: Option<u64>,
    /// The digest of the deliveries that the preview of an action on one message showed.
    seen: Option<String>,
    /// The pending or running deliveries that the preview of an action on many messages counted.
    list: Option<String>,
}

impl ActForm {
    fn bound(&self) -> Bound {
        Bound::new(self.previewed, self.expected)
    }

    fn canary(&self) -> Canary {
        if self.pace == "at-once" { at_once() } else { carefully() }
    }

    /// The previewed deliveries. Without a preview, those that match now.
    async fn listed<B: Backend>(
        &self,
        app: &App<B>,
        filter: &DeliveryFilter,
        state: DeliveryState,
    ) -> Result<Vec<SeenDelivery>, Refusal> {
        if let Some(list) = &self.list {
            return bound::read_list(list);
        }
        let (operator, filter) = (app.operator(), filter.clone());
        let found = app.reads.run(async move { open(&operator, &filter, state).await }).await?;
        Ok(found.iter().map(bound::seen).collect())
    }
}

#[derive(Deserialize)]
struct AttemptQuery {
    attempt: i32,
}

pub(in super::super) async fn act<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Form(asked): Form<ActForm>,
) -> Page {
    let path = match asked.verb {
        ActVerb::Replay | ActVerb::Discard | ActVerb::Release => on_deliveries(&app, &visit, &asked).await?,
        ActVerb::Accept | ActVerb::Delete => on_quarantine(&app, &visit, &asked).await?,
        ActVerb::Pause | ActVerb::Resume | ActVerb::CloseBreaker => on_handler(&app, &visit, &asked).await?,
    };
    // The page that follows shows what has changed.
    app.sampler.refreshed().await;
    Ok(Redirect::to(&visit.base.to(&path)).into_response())
}

async fn on_deliveries<B: Backend>(app: &App<B>, visit: &Visit, asked: &ActForm) -> Result<String, Refusal> {
    let query: DeliveryQuery = target(asked)?;
    if !query.message.is_empty() {
        return match asked.verb {
            ActVerb::Release => release(app, visit, asked, &query).await,
            _ => on_message(app, visit, asked, &query).await,
        };
    }
    let filter = meant(query.filter()?);
    let state = state_of(asked.verb, &query)?;
    let work = match (asked.verb, state) {
        (ActVerb::Replay, _) => Work::Replay { filter, canary: asked.canary() },
        (_, DeliveryState::Poisoned) => Work::Discard { filter },
        (ActVerb::Discard, _) => Work::DiscardSeen { seen: asked.listed(app, &filter, state).await?, filter },
        _ => Work::Release { seen: asked.listed(app, &filter, state).await?, filter },
    };
    let left = format!("{}?{}", query.path(state), query.encoded());
    start(app, visit, asked, work, (query.words(), left))
}

/// Starts the action in the background, and returns the path of its page.
fn start<B: Backend>(
    app: &App<B>,
    visit: &Visit,
    asked: &ActForm,
    work: Work,
    (about, left): (Vec<(&'static str, String)>, String),
) -> Result<String, Refusal> {
    let (actor, because) = (app.name_of(&visit.visitor), asked.because.clone());
    let (expected, bound) = (asked.expected.unwrap_or_default(), asked.bound());
    let plan = Plan { work, about, left, actor, because, expected, bound };
    let id = app.jobs.start(app.acting(&visit.visitor, &asked.because), &app.sampler, plan)?;
    Ok(format!("/jobs/{id}"))
}

/// Replays or discards the deliveries of one message.
async fn on_message<B: Backend>(
    app: &App<B>,
    visit: &Visit,
    asked: &ActForm,
    query: &DeliveryQuery,
) -> Result<String, Refusal> {
    let (filter, operator) = (query.filter()?, app.acting(&visit.visitor, &asked.because));
    // The visitor has decided about the previewed rows. After another attempt or a new delivery, the preview is shown
    // again.
    let found = with_message(&operator, asked.verb, &filter).await?;
    if asked.seen.as_ref().is_some_and(|seen| *seen != bound::digest(&found)) {
        return Ok(format!("/act?verb={}&{}&changed=yes", asked.verb.name(), query.encoded()));
    }
    let limit = asked.bound().limit(OF_MESSAGE_MAX);
    let count = match asked.verb {
        ActVerb::Replay => operator.replay(&filter, limit).await?,
        _ => operator.discard(&filter, limit).await?,
    };
    let message = encoded(&[("message", &query.message), ("source", &query.source)]);
    Ok(format!("/message?{message}&result={}-{count}", asked.verb.name()))
}

async fn release<B: Backend>(
    app: &App<B>,
    visit: &Visit,
    asked: &ActForm,
    query: &DeliveryQuery,
) -> Result<String, Refusal> {
    let AttemptQuery { attempt } = target(asked)?;
    let operator = app.acting(&visit.visitor, &asked.because);
    let running = operator.deliveries(&query.filter()?, Some(DeliveryState::Running), 2).await?;
    let released = match running.iter().find(|run| run.attempts == attempt) {
        Some(run) => operator.release(run).await?,
        None => false,
    };
    let message = encoded(&[("message", &query.message), ("source", &query.source)]);
    Ok(format!("/message?{message}&result=release-{}", u8::from(released)))
}

async fn on_quarantine<B: Backend>(app: &App<B>, visit: &Visit, asked: &ActForm) -> Result<String, Refusal> {
    let query: QuarantineQuery = target(asked)?;
    let mut filter = query.filter()?;
    filter.all = filter == QuarantineFilter::default();
    if filter.id.is_none() {
        let work = match asked.verb {
            ActVerb::Accept => Work::Accept { filter, canary: asked.canary() },
            _ => Work::Delete { filter },
        };
        return start(app, visit, asked, work, (query.words(), format!("/quarantine?{}", query.encoded())));
    }
    let operator = app.acting(&visit.visitor, &asked.because);
    let filter = asked.bound().quarantined(&filter);
    let count = match asked.verb {
        ActVerb::Accept => operator.replay_quarantined(&filter, 1).await?,
        _ => operator.discard_quarantined(&filter, 1).await?,
    };
    Ok(format!("/quarantine?result={}-{count}", asked.verb.name()))
}

async fn on_handler<B: Backend>(app: &App<B>, visit: &Visit, asked: &ActForm) -> Result<String, Refusal> {
    let query: DeliveryQuery = target(asked)?;
    let operator = app.acting(&visit.visitor, &asked.because);
    let is_changed = match asked.verb {
        ActVerb::Pause => operator.pause(&query.handler).await?,
        ActVerb::CloseBreaker => operator.close_breaker(&query.handler).await?,
        _ => operator.resume(&query.handler).await?,
    };
    Ok(format!("/?result={}-{}#handlers", asked.verb.name(), u8::from(is_changed)))
}

/// Parses the target as a URL query.
fn target<T: DeserializeOwned>(asked: &ActForm) -> Result<T, Refusal> {
    let unreadable = || Refusal::wrong("the target of the action cannot be parsed");
    let uri: Uri = format!("/?{}", asked.target).parse().map_err(|_| unreadable())?;
    let Query(read) = Query::try_from_uri(&uri).map_err(|_| unreadable())?;
    Ok(read)
}
