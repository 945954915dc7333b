//! The quarantine pages: groups by reason, single records, and one record with its payload.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::{Query, State};
use serde::Deserialize;

use super::super::app::App;
use super::super::groups::Groups;
use super::super::guard::Visit;
use super::super::query::{self, QuarantineQuery, encoded};
use super::super::refusal::Refusal;
use super::super::text::{self, When};
use super::story::RecordView;
use super::{Frame, Page, PagePlace, html};
use crate::store::Backend;
use crate::types::{HandlerStatus, QuarantineSummary};

#[derive(Deserialize)]
pub(in super::super) struct ResultQuery {
    #[serde(default)]
    result: String,
}

#[derive(Template)]
#[template(path = "quarantine.html")]
struct QuarantinePage {
    frame: Frame,
    result: Option<String>,
    query: QuarantineQuery,
    groups: Groups,
    rows: Vec<QuarantineRow>,
    all: String,
    more: Option<String>,
}

struct QuarantineRow {
    id: i64,
    topic: String,
    position: String,
    reason: String,
    detail: String,
    at: When,
    asked: Option<When>,
    replays: i32,
    bytes: String,
}

const PLACE: PagePlace = PagePlace { path: "/quarantine", title: "Quarantine" };

pub(in super::super) async fn quarantine<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Query(query): Query<QuarantineQuery>,
    Query(ResultQuery { result }): Query<ResultQuery>,
) -> Page {
    let (frame, _) = Frame::new(&app, &visit, PLACE).await;
    let (filter, rows_max, now) = (query.filter()?, query::rows(&query.rows), SystemTime::now());
    let operator = app.operator();
    let search = async move {
        let groups = operator.quarantine_groups(&filter, HandlerStatus::COUNT_MAX as u32).await?;
        Ok((groups, operator.quarantined(&filter, rows_max + 1).await?))
    };
    let (groups, found) = app.reads.run(search).await?;
    let page = QuarantinePage {
        frame,
        result: super::result(&result),
        groups: Groups::of_quarantine(&groups, &query),
        rows: found.iter().take(rows_max as usize).map(|one| QuarantineRow::new(one, now)).collect(),
        all: query.encoded(),
        more: query::more(&query.encoded(), found.len(), rows_max),
        query,
    };
    Ok(html(&page))
}

impl QuarantineRow {
    fn new(found: &QuarantineSummary, now: SystemTime) -> Self {
        Self {
            id: found.id,
            topic: found.topic.clone(),
            position: match (found.kafka_partition, found.kafka_offset) {
                (Some(partition), Some(offset)) => format!("[{partition}] {offset}"),
                _ => String::new(),
            },
            reason: found.reason.clone(),
            detail: found.detail.clone().unwrap_or_default(),
            at: When::new(found.quarantined_at, now),
            asked: found.replay_asked_at.map(|at| When::new(at, now)),
            replays: found.replays,
            bytes: found.payload_bytes.map_or_else(|| "none".to_owned(), text::bytes),
        }
    }
}

#[derive(Deserialize)]
pub(in super::super) struct RecordQuery {
    id: i64,
    #[serde(default)]
    payload: String,
}

#[derive(Template)]
#[template(path = "record.html")]
struct RecordPage {
    frame: Frame,
    row: QuarantineRow,
    record: RecordView,
    this: String,
}

pub(in super::super) async fn record<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Query(query): Query<RecordQuery>,
) -> Page {
    let (frame, _) = Frame::new(&app, &visit, PLACE).await;
    let found = app.operator().quarantined_record(query.id).await?;
    let found = found.ok_or_else(|| Refusal::missing(format!("record {} is no longer in quarantine", query.id)))?;
    let page = RecordPage {
        frame,
        row: QuarantineRow::new(&found.summary, SystemTime::now()),
        record: RecordView::new(
            &found.record,
            found.record.payload().map(|payload| payload.len() as u64),
            &visit,
            !query.payload.is_empty(),
        )?
        .decoded(&app, &found.record)
        .await,
        this: encoded(&[("id", &query.id.to_string())]),
    };
    Ok(html(&page))
}
