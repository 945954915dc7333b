//! Server-sent events: they notify pages of new data, and the pages reload. The data is looked up once for all pages.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::{Stream, StreamExt, stream};

use super::super::app::App;
use super::super::refusal::Refusal;
use crate::store::Backend;

/// How long a stream lasts. The page then opens another one. An endless stream would block the graceful shutdown of the
/// service.
const STREAM_LASTS: Duration = Duration::from_secs(60);
/// How long a page waits before it opens a stream again.
const REOPEN_AFTER: Duration = Duration::from_secs(1);
/// The minimum time between two events about an action.
const JOB_EVERY: Duration = Duration::from_millis(300);

type Events<S> = Sse<axum::response::sse::KeepAliveStream<S>>;

/// Ends the stream after a while, whether or not there are events.
fn lasting<S: Stream<Item = Result<Event, Infallible>>>(lasts: Duration, events: S) -> impl Stream<Item = S::Item> {
    let first = stream::iter([Ok(Event::default().retry(REOPEN_AFTER))]);
    first.chain(events).take_until(tokio::time::sleep(lasts))
}

/// Sends one event for each snapshot of the sampler, with the counts of the menu.
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
    Sse::new(lasting(STREAM_LASTS, events)).keep_alive(KeepAlive::default())
}

/// Sends one event for each change of an action, and a last one when it has ended.
pub(in super::super) async fn of_job<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Path(id): Path<u64>,
) -> Result<Events<impl Stream<Item = Result<Event, Infallible>>>, Refusal> {
    let job = app.jobs.find(id)?;
    let changes = job.progress.subscribe();
    let events = stream::unfold(Some((job, changes)), async |watched| {
        let (job, mut changes) = watched?;
        // The action may have ended between the page and this request. Other changes are reported with the next one.
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
    Ok(Sse::new(lasting(STREAM_LASTS, events)).keep_alive(KeepAlive::default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stream_ends_although_nothing_happens() {
        let events = lasting(Duration::from_millis(1), stream::pending());
        assert_eq!(events.count().await, 1, "only how soon to open it again");
    }
}
