//! Server-sent events: a page hears that there is something new and loads itself again. What it loads was looked up once for all.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::{Stream, stream};

use super::super::app::App;
use super::super::refusal::Refusal;
use crate::store::Backend;

/// A page is told of a change of an act no more often.
const JOB_EVERY: Duration = Duration::from_millis(300);

type Events<S> = Sse<axum::response::sse::KeepAliveStream<S>>;

/// One event for each look of the sampler, with what the menu counts.
pub(in super::super) async fn live<B: Backend>(
    State(app): State<Arc<App<B>>>,
) -> Events<impl Stream<Item = Result<Event, Infallible>>> {
    let looks = app.sampler.looks();
    let events = stream::unfold((app, looks), async |(app, mut looks)| {
        looks.changed().await.ok()?;
        app.sampler.watch();
        let counts = looks.borrow_and_update().as_deref().map(super::menu_counts).unwrap_or_default();
        let data: serde_json::Map<String, serde_json::Value> =
            counts.into_iter().map(|(path, count)| (path.to_owned(), count.unwrap_or_default().into())).collect();
        let event = Event::default().data(serde_json::Value::Object(data).to_string());
        Some((Ok(event), (app, looks)))
    });
    Sse::new(events).keep_alive(KeepAlive::default())
}

/// One event for each change of an act; the last when it has ended.
pub(in super::super) async fn of_job<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Path(id): Path<u64>,
) -> Result<Events<impl Stream<Item = Result<Event, Infallible>>>, Refusal> {
    let job = app.jobs.find(id)?;
    let changes = job.progress.subscribe();
    let events = stream::unfold(Some((job, changes)), async |watched| {
        let (job, mut changes) = watched?;
        // Also what came between the page and this request is told.
        let affected = changes.borrow_and_update().affected;
        let is_ended = changes.borrow().ended.is_some();
        let event = Event::default().event(if is_ended { "end" } else { "message" }).data(affected.to_string());
        if is_ended {
            return Some((Ok(event), None));
        }
        tokio::time::sleep(JOB_EVERY).await;
        changes.changed().await.ok()?;
        Some((Ok(event), Some((job, changes))))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}
