//! Does what a preview has shown, in the visitor's name, and leads to where the result is seen.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Form, Query, State};
use axum::http::Uri;
use axum::response::{IntoResponse, Redirect};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::super::app::App;
use super::super::guard::Visit;
use super::super::jobs::{LongActVerb, Plan};
use super::super::query::{DeliveryQuery, QuarantineQuery, encoded};
use super::super::refusal::Refusal;
use super::Page;
use super::preview::{ActVerb, meant};
use crate::store::Backend;
use crate::types::{QuarantineFilter, State as Standing};

/// Deliveries of one message that an act takes; there is one for each handler.
const OF_MESSAGE_MAX: u32 = 1_000;
/// Quarantined records that one act takes.
const QUARANTINED_MAX: u32 = 10_000;

#[derive(Deserialize)]
pub(in super::super) struct ActForm {
    verb: ActVerb,
    /// What is meant, as the query of a URL: no character of it is changed on its way through the page.
    #[serde(default)]
    target: String,
    #[serde(default)]
    because: String,
    #[serde(default)]
    pace: String,
    /// How many the preview has counted.
    #[serde(default)]
    expected: u64,
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
        ActVerb::Replay | ActVerb::Discard => on_deliveries(&app, &visit, &asked).await?,
        ActVerb::Release => release(&app, &visit, &asked).await?,
        ActVerb::Accept | ActVerb::Delete => on_quarantine(&app, &visit, &asked).await?,
        ActVerb::Pause | ActVerb::Resume | ActVerb::CloseBreaker => on_handler(&app, &visit, &asked).await?,
    };
    // The page that follows shows what has changed.
    app.sampler.refreshed().await;
    Ok(Redirect::to(&format!("{}{path}", visit.base)).into_response())
}

async fn on_deliveries<B: Backend>(app: &App<B>, visit: &Visit, asked: &ActForm) -> Result<String, Refusal> {
    let query: DeliveryQuery = target(asked)?;
    let (filter, operator) = (meant(query.filter()?), app.acting(&visit.visitor, &asked.because));
    if filter.message_id.is_some() {
        let count = match asked.verb {
            ActVerb::Replay => operator.replay(&filter, OF_MESSAGE_MAX).await?,
            _ => operator.discard(&filter, OF_MESSAGE_MAX).await?,
        };
        let message = encoded(&[("message", &query.message), ("source", &query.source)]);
        return Ok(format!("/message?{message}&told={}-{count}", asked.verb.name()));
    }
    let verb = match (asked.verb, asked.pace.as_str()) {
        (ActVerb::Replay, "at-once") => LongActVerb::Replay,
        (ActVerb::Replay, _) => LongActVerb::ReplayCarefully,
        _ => LongActVerb::Discard,
    };
    let (actor, because) = (app.name_of(&visit.visitor), asked.because.clone());
    let plan = Plan { verb, query, filter, actor, because, expected: asked.expected };
    let id = app.jobs.start(operator, plan)?;
    Ok(format!("/jobs/{id}"))
}

async fn release<B: Backend>(app: &App<B>, visit: &Visit, asked: &ActForm) -> Result<String, Refusal> {
    let (query, AttemptQuery { attempt }): (DeliveryQuery, AttemptQuery) = (target(asked)?, target(asked)?);
    let operator = app.acting(&visit.visitor, &asked.because);
    let running = operator.deliveries(&query.filter()?, Some(Standing::Running), 2).await?;
    let released = match running.iter().find(|run| run.attempts == attempt) {
        Some(run) => operator.release(run).await?,
        None => false,
    };
    let message = encoded(&[("message", &query.message), ("source", &query.source)]);
    Ok(format!("/message?{message}&told=release-{}", u8::from(released)))
}

async fn on_quarantine<B: Backend>(app: &App<B>, visit: &Visit, asked: &ActForm) -> Result<String, Refusal> {
    let query: QuarantineQuery = target(asked)?;
    let mut filter = query.filter()?;
    filter.all = filter == QuarantineFilter::default();
    let operator = app.acting(&visit.visitor, &asked.because);
    let count = match asked.verb {
        ActVerb::Accept => operator.replay_quarantined(&filter, QUARANTINED_MAX).await?,
        _ => operator.discard_quarantined(&filter, QUARANTINED_MAX).await?,
    };
    Ok(format!("/quarantine?told={}-{count}", asked.verb.name()))
}

async fn on_handler<B: Backend>(app: &App<B>, visit: &Visit, asked: &ActForm) -> Result<String, Refusal> {
    let query: DeliveryQuery = target(asked)?;
    let operator = app.acting(&visit.visitor, &asked.because);
    let is_changed = match asked.verb {
        ActVerb::Pause => operator.pause(&query.handler).await?,
        ActVerb::CloseBreaker => operator.close_breaker(&query.handler).await?,
        _ => operator.resume(&query.handler).await?,
    };
    Ok(format!("/?told={}-{}#handlers", asked.verb.name(), u8::from(is_changed)))
}

/// What is meant, read as the query of a URL is.
fn target<T: DeserializeOwned>(asked: &ActForm) -> Result<T, Refusal> {
    let unreadable = || Refusal::wrong("what is to be acted on cannot be read");
    let uri: Uri = format!("/?{}", asked.target).parse().map_err(|_| unreadable())?;
    let Query(read) = Query::try_from_uri(&uri).map_err(|_| unreadable())?;
    Ok(read)
}
