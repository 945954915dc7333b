//! Server-sent events: they notify pages of new data, and the pages reload. The data is looked up once for all pages.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::{Stream, StreamExt, stream};
use tokio::sync::watch;
use tokio::time::Instant;

use super::super::app::App;
use super::super::long_act::LongActProgress;
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

/// Sends one event when the stream opens and one for each change of an action, and a last one when it has ended.
pub(in super::super) async fn of_job<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Path(id): Path<u64>,
) -> Result<Events<impl Stream<Item = Result<Event, Infallible>>>, Refusal> {
    let changes = app.jobs.find(id)?.progress.subscribe();
    let events = progress(changes, JOB_EVERY).map(|now| {
        let name = if now.ended.is_some() { "end" } else { "message" };
        Ok(Event::default().event(name).data(now.affected.to_string()))
    });
    Ok(Sse::new(lasting(STREAM_LASTS, events)).keep_alive(KeepAlive::default()))
}

/// The progress of an action: at once, because it may have changed since the page was loaded, and then on each change,
/// at most once in `every`. The last item is the end.
fn progress(mut changes: watch::Receiver<LongActProgress>, every: Duration) -> impl Stream<Item = LongActProgress> {
    changes.mark_changed();
    stream::unfold(Some((changes, Instant::now())), move |watched| async move {
        let (mut changes, not_before) = watched?;
        tokio::time::sleep_until(not_before).await;
        changes.changed().await.ok()?;
        let now = changes.borrow_and_update().clone();
        let rest = now.ended.is_none().then(|| (changes, Instant::now() + every));
        Some((now, rest))
    })
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::super::super::long_act::LongActEnd;
    use super::*;

    #[tokio::test]
    async fn a_stream_ends_although_nothing_happens() {
        let events = lasting(Duration::from_millis(1), stream::pending());
        assert_eq!(events.count().await, 1, "only how soon to open it again");
    }

    #[tokio::test]
    async fn the_progress_of_an_action_is_reported_at_once_and_on_each_change_until_its_end() {
        let affected = |affected| LongActProgress { affected, ..LongActProgress::default() };
        let (action, changes) = watch::channel(affected(1));
        let mut reported = Box::pin(progress(changes, Duration::ZERO));
        // The page may have been loaded before this change.
        assert_eq!(reported.next().await, Some(affected(1)));
        assert_eq!(reported.next().now_or_never(), None, "nothing has changed");
        action.send_replace(affected(2));
        assert_eq!(reported.next().await, Some(affected(2)));
        let ended = LongActProgress { ended: Some(LongActEnd::Well), ..affected(2) };
        action.send_replace(ended.clone());
        assert_eq!(reported.next().await, Some(ended));
        assert_eq!(reported.next().await, None);
    }
}
