//! The audit page: who did what, and why. The newest come first.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::{Query, State};
use serde::Deserialize;
use serde_json::Value;

use super::super::app::App;
use super::super::guard::Visit;
use super::super::text::{self, When};
use super::{Frame, Page, PagePlace, html};
use crate::store::Backend;
use crate::types::AuditEntry;

/// How many entries a page shows.
const ROWS: u32 = 100;

#[derive(Deserialize)]
pub(in super::super) struct AuditQuery {
    before: Option<i64>,
}

#[derive(Template)]
#[template(path = "audit.html")]
struct AuditPage {
    frame: Frame,
    rows: Vec<AuditRow>,
    is_first: bool,
    older: Option<i64>,
}

struct AuditRow {
    at: When,
    actor: String,
    database_user: String,
    action: String,
    about: Vec<(String, String)>,
    affected: String,
    because: String,
}

pub(in super::super) async fn audit<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Query(query): Query<AuditQuery>,
) -> Page {
    let (frame, _) = Frame::new(&app, &visit, PagePlace { path: "/audit", title: "Audit" }).await;
    let found = app.operator().audit(query.before, ROWS).await?;
    let (now, is_full) = (SystemTime::now(), found.len() >= ROWS as usize);
    let page = AuditPage {
        frame,
        rows: found.iter().map(|entry| row(entry, now)).collect(),
        is_first: query.before.is_none(),
        older: found.last().filter(|_| is_full).map(|last| last.id),
    };
    Ok(html(&page))
}

fn row(entry: &AuditEntry, now: SystemTime) -> AuditRow {
    let value = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let about = entry.filter.as_object().into_iter().flatten();
    AuditRow {
        at: When::new(entry.acted_at, now),
        actor: entry.actor.clone().unwrap_or_default(),
        database_user: entry.database_user.clone().unwrap_or_default(),
        action: entry.action.clone(),
        about: about.map(|(name, said)| (name.replace('_', " "), value(said))).collect(),
        affected: text::number(entry.affected),
        because: entry.because.clone().unwrap_or_default(),
    }
}
