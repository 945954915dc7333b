//! Acts that take a while: all of them, one of them as it goes on, and the button that stops it.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Redirect};

use super::super::app::App;
use super::super::guard::Visit;
use super::super::jobs::{LongAct, LongActEnd, LongActProgress, LongActVerb};
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
    name: &'static str,
    is_replay: bool,
    about: Vec<(&'static str, String)>,
    /// The query of what is left.
    query: String,
    actor: String,
    because: String,
    started: When,
    affected: String,
    done: String,
    failed: String,
    waiting: String,
    expected: String,
    /// Of a hundred.
    percent: u64,
    is_running: bool,
    is_stopping: bool,
    class: &'static str,
    standing: String,
}

pub(in super::super) async fn jobs<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
) -> Page {
    let (frame, _) = Frame::new(&app, &visit, PagePlace { path: "/jobs", title: "Acts" }).await;
    let jobs = app.jobs.all().iter().map(|job| JobView::new(job)).collect();
    Ok(html(&JobsPage { frame: frame.reloaded(), jobs }))
}

pub(in super::super) async fn job<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Path(id): Path<u64>,
) -> Page {
    let job = JobView::new(&*app.jobs.find(id)?);
    let (mut frame, _) = Frame::new(&app, &visit, PagePlace { path: "/jobs", title: job.name }).await;
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
    Ok(Redirect::to(&format!("{}/jobs/{id}", visit.base)).into_response())
}

impl JobView {
    fn new(job: &LongAct) -> Self {
        let (plan, progress) = (&job.plan, job.progress.borrow().clone());
        let is_replay = plan.verb != LongActVerb::Discard;
        let ended = progress.done + progress.failed;
        let expected = plan.expected.max(progress.affected);
        let (class, standing) = standing(&progress, job.is_stopping());
        Self {
            id: job.id,
            name: plan.verb.name(),
            is_replay,
            about: plan.query.words(),
            query: plan.query.encoded(),
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
            standing,
        }
    }
}

fn standing(progress: &LongActProgress, is_stopping: bool) -> (&'static str, String) {
    match &progress.ended {
        None if is_stopping => ("pending", "stopping".to_owned()),
        None => ("running", "running".to_owned()),
        Some(LongActEnd::Well) => ("done", "ended: nothing that matches is left to take".to_owned()),
        Some(LongActEnd::Stopped(stop)) => {
            let why = match stop {
                CanaryStop::Failures => "too many of a step failed again; the rest was not touched",
                CanaryStop::Waited => "a step took too long: does a process run the handler?",
                CanaryStop::Asked => "as asked; the rest was not touched",
            };
            ("failed", format!("stopped: {why}"))
        }
        Some(LongActEnd::Failed(error)) => ("poisoned", format!("failed: {error}")),
    }
}
