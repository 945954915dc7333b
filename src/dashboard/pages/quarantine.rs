//! Records that could not become messages: in groups by reason, one by one, and one of them whole.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::{Query, State};
use serde::Deserialize;

use super::super::app::App;
use super::super::guard::Visit;
use super::super::query::{self, QuarantineQuery, encoded};
use super::super::refusal::Refusal;
use super::super::text::{self, When};
use super::story::RecordView;
use super::{Frame, Page, PagePlace, html};
use crate::store::Backend;
use crate::types::{HandlerStatus, QuarantineGroup, QuarantineSummary};

#[derive(Deserialize)]
pub(in super::super) struct ToldQuery {
    #[serde(default)]
    told: String,
}

#[derive(Template)]
#[template(path = "quarantine.html")]
struct QuarantinePage {
    frame: Frame,
    told: Option<String>,
    query: QuarantineQuery,
    groups: Vec<ReasonGroupView>,
    rows: Vec<QuarantineRow>,
    total: String,
    is_any: bool,
    all: String,
    more: Option<String>,
}

struct ReasonGroupView {
    topic: String,
    reason: String,
    example: String,
    count: String,
    asked: u64,
    first: When,
    last: When,
    query: String,
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
    Query(ToldQuery { told }): Query<ToldQuery>,
) -> Page {
    let (frame, _) = Frame::new(&app, &visit, PLACE).await;
    let (filter, rows_max, now) = (query.filter()?, query::rows(&query.rows), SystemTime::now());
    let groups = app.operator().quarantine_groups(&filter, HandlerStatus::COUNT_MAX as u32).await?;
    let found = app.operator().quarantined(&filter, rows_max + 1).await?;
    let total = groups.iter().map(|group| group.records).sum::<u64>().min(HandlerStatus::COUNT_MAX);
    let is_more = found.len() > rows_max as usize && rows_max < query::ROWS_MAX;
    let page = QuarantinePage {
        frame,
        told: super::told(&told),
        groups: groups.iter().map(|group| ReasonGroupView::new(group, &query, now)).collect(),
        rows: found.iter().take(rows_max as usize).map(|one| QuarantineRow::new(one, now)).collect(),
        total: text::count(total),
        is_any: total > 0,
        all: query.encoded(),
        more: is_more.then(|| format!("{}&rows={}", query.encoded(), query::ROWS_MAX)),
        query,
    };
    Ok(html(&page))
}

impl ReasonGroupView {
    fn new(group: &QuarantineGroup, query: &QuarantineQuery, now: SystemTime) -> Self {
        let of_group = QuarantineQuery { topic: group.topic.clone(), reason: group.reason.clone(), ..query.clone() };
        Self {
            topic: group.topic.clone(),
            reason: group.reason.clone(),
            example: group.example.clone().unwrap_or_default(),
            count: text::count(group.records),
            asked: group.replay_asked,
            first: When::new(group.first_at, now),
            last: When::new(group.last_at, now),
            query: of_group.encoded(),
        }
    }
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
    let found = found.ok_or_else(|| Refusal::missing(format!("record {} is not in quarantine any more", query.id)))?;
    let page = RecordPage {
        frame,
        row: QuarantineRow::new(&found.summary, SystemTime::now()),
        record: RecordView::new(&found.record, &visit, !query.payload.is_empty())?,
        this: encoded(&[("id", &query.id.to_string())]),
    };
    Ok(html(&page))
}
