//! Background actions: the list, the progress of one, and the button that stops it.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Redirect};

use super::super::app::App;
use super::super::guard::Visit;
use super::super::long_act::{LongAct, LongActEnd, LongActProgress, Words};
use super::super::text::{self, When};
use super::{Frame, Page, PagePlace, html};
use crate::operate::CanaryStop;
use crate::store::Backend;
use crate::types::HandlerStatus;

#[derive(Template)]
#[template(path = "jobs.html")]
struct JobsPage {
    frame: Frame,
    jobs: Vec<JobView>,
}

#[derive(Template)]
#[template(path = "job.html")]
struct JobPage {
    frame: Frame,
    job: JobView,
}

struct JobView {
    id: u64,
    words: Words,
    about: Vec<(&'static str, String)>,
    /// The page of what is left.
    left: String,
    actor: String,
    because: String,
    started: When,
    affected: String,
    done: String,
    failed: String,
    waiting: String,
    expected: String,
    /// The progress in percent.
    percent: u64,
    is_running: bool,
    is_stopping: bool,
    class: &'static str,
    status: String,
}

pub(in super::super) async fn jobs<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
) -> Page {
    let (frame, _) = Frame::new(&app, &visit, PagePlace { path: "/jobs", title: "Actions" }).await;
    let jobs = app.jobs.all().iter().map(|job| JobView::new(job)).collect();
    Ok(html(&JobsPage { frame: frame.reloaded(), jobs }))
}

pub(in super::super) async fn job<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Path(id): Path<u64>,
) -> Page {
    let job = JobView::new(&*app.jobs.find(id)?);
    let (mut frame, _) = Frame::new(&app, &visit, PagePlace { path: "/jobs", title: job.words.name }).await;
    if job.is_running {
        frame.live = format!("/jobs/{id}/live");
        frame.is_reloaded = true;
    }
    Ok(html(&JobPage { frame, job }))
}

pub(in super::super) async fn stop<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Path(id): Path<u64>,
) -> Page {
    app.jobs.find(id)?.stop();
    Ok(Redirect::to(&visit.base.to(&format!("/jobs/{id}"))).into_response())
}

impl JobView {
    fn new(job: &LongAct) -> Self {
        let (plan, progress) = (&job.plan, job.progress.borrow().clone());
        let words = plan.work.words();
        let ended = progress.done + progress.failed;
        let expected = plan.expected.max(progress.affected);
        let (class, status) = status(words, &progress, job.is_stopping());
        Self {
            id: job.id,
            words,
            about: plan.about.clone(),
            left: plan.left.clone(),
            actor: plan.actor.clone(),
            because: plan.because.trim().to_owned(),
            started: When::new(job.started_at, SystemTime::now()),
            affected: text::number(progress.affected),
            done: text::number(progress.done),
            failed: text::number(progress.failed),
            waiting: text::number(progress.affected.saturating_sub(ended)),
            expected: if expected == HandlerStatus::COUNT_MAX { "10,000+".to_owned() } else { text::number(expected) },
            percent: ended.saturating_mul(100).checked_div(expected).unwrap_or(100),
            is_running: progress.ended.is_none(),
            is_stopping: job.is_stopping(),
            class,
            status,
        }
    }
}

fn status(words: Words, progress: &LongActProgress, is_stopping: bool) -> (&'static str, String) {
    let (affected, failed) = (text::number(progress.affected), text::number(progress.failed));
    let Words { rows, became, .. } = words;
    let changed = words.changed.to_lowercase();
    match &progress.ended {
        None if is_stopping => ("pending", "stopping".to_owned()),
        None => ("running", "running".to_owned()),
        Some(LongActEnd::Well) => match became {
            _ if progress.affected == 0 => ("done", "finished: nothing matched any more".to_owned()),
            None => ("done", format!("finished: {affected} {changed}")),
            Some(became) if progress.failed == 0 => {
                ("done", format!("finished: {affected} {changed}, none {}", became.again))
            }
            Some(became) => ("failed", format!("finished: {affected} {changed}, {failed} {}", became.again)),
        },
        Some(LongActEnd::AtLimit) => {
            ("failed", format!("ended at {affected}, the limit of one action: start another one for the rest"))
        }
        Some(LongActEnd::Stopped(stop)) => {
            let (again, question) = became.map_or(("", ""), |became| (became.again, became.question));
            let why = match stop {
                CanaryStop::Failures => format!("too many {rows} of a step {again}; the rest was not changed"),
                CanaryStop::Waited => format!("a step took too long: {question}"),
                CanaryStop::Asked => "by a visitor; the rest was not changed".to_owned(),
            };
            ("failed", format!("stopped: {why}"))
        }
        Some(LongActEnd::Failed(error)) => ("poisoned", format!("failed: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::long_act::{Work, at_once, carefully};
    use super::*;
    use crate::types::{DeliveryFilter, QuarantineFilter};

    fn said(work: &Work, affected: u64, failed: u64, ended: LongActEnd) -> String {
        let done = affected - failed;
        status(work.words(), &LongActProgress { affected, done, failed, ended: Some(ended) }, false).1
    }

    #[test]
    fn the_end_of_an_action_says_what_it_has_changed_and_what_failed_again() {
        let careful = Work::Replay { filter: DeliveryFilter::all(), canary: carefully() };
        let plain = Work::Replay { filter: DeliveryFilter::all(), canary: at_once() };
        let discard = Work::DiscardSeen { filter: DeliveryFilter::all(), seen: Vec::new() };
        let accept = Work::Accept { filter: QuarantineFilter::all(), canary: carefully() };
        let delete = Work::Delete { filter: QuarantineFilter::all() };
        assert_eq!((careful.words().name, plain.words().name), ("Canary replay", "Replay"));
        assert_eq!(said(&careful, 500, 0, LongActEnd::Well), "finished: 500 replayed, none failed again");
        assert_eq!(said(&plain, 500, 500, LongActEnd::Well), "finished: 500 replayed, 500 failed again");
        assert_eq!(said(&discard, 2_000, 0, LongActEnd::Well), "finished: 2,000 discarded");
        assert_eq!(said(&delete, 2_000, 0, LongActEnd::Well), "finished: 2,000 deleted");
        assert_eq!(said(&careful, 0, 0, LongActEnd::Well), "finished: nothing matched any more");
        let rejected = said(&accept, 11, 11, LongActEnd::Stopped(CanaryStop::Failures));
        assert_eq!(rejected, "stopped: too many records of a step were rejected again; the rest was not changed");
        let at_limit = said(&careful, 1_000_000, 0, LongActEnd::AtLimit);
        assert!(at_limit.starts_with("ended at 1,000,000, the limit of one action"), "{at_limit}");
    }
}
