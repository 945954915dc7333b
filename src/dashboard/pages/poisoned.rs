//! Poisoned deliveries: in groups by what went wrong, and one by one; with a filter that stands in the URL.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::{Query, State};

use super::super::app::App;
use super::super::guard::Visit;
use super::super::query::{self, DeliveryQuery};
use super::super::text::{self, When};
use super::{Choice, DeliveryView, Frame, Page, PagePlace, handler_choices, html};
use crate::store::Backend;
use crate::types::{ErrorSummary, HandlerStatus, State as Standing};

#[derive(Template)]
#[template(path = "poisoned.html")]
struct PoisonedPage {
    frame: Frame,
    query: DeliveryQuery,
    handlers: Vec<Choice>,
    groups: Vec<ErrorGroupView>,
    rows: Vec<DeliveryView>,
    /// All that match, counted up to the bound.
    total: String,
    is_any: bool,
    /// The query of an act on all that match.
    all: String,
    /// The query of a longer list.
    more: Option<String>,
}

struct ErrorGroupView {
    handler: String,
    reason: String,
    error: String,
    count: String,
    first: Option<When>,
    last: Option<When>,
    query: String,
}

pub(in super::super) async fn poisoned<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Query(query): Query<DeliveryQuery>,
) -> Page {
    let (frame, snapshot) = Frame::new(&app, &visit, PagePlace { path: "/poisoned", title: "Poisoned" }).await;
    let (filter, rows_max, now) = (query.filter()?, query::rows(&query.rows), SystemTime::now());
    let operator = app.operator();
    let looked_max = HandlerStatus::COUNT_MAX as u32;
    let groups = match filter.message_id {
        // Groups are of what was not named one by one.
        Some(_) => Vec::new(),
        None => operator.poisoned_groups(&filter, looked_max).await?,
    };
    let found = operator.deliveries(&filter, Some(Standing::Poisoned), rows_max + 1).await?;
    let counted: u64 = groups.iter().map(|group| group.poisoned).sum();
    let total = counted.max(found.len() as u64).min(HandlerStatus::COUNT_MAX);
    let is_more = found.len() > rows_max as usize && rows_max < query::ROWS_MAX;
    let page = PoisonedPage {
        frame,
        handlers: handler_choices(snapshot.as_deref(), query.handler.trim()),
        groups: groups.iter().map(|group| ErrorGroupView::new(group, &query, now)).collect(),
        rows: found.iter().take(rows_max as usize).map(|one| DeliveryView::new(one, now)).collect(),
        total: text::count(total),
        is_any: total > 0,
        all: query.encoded(),
        more: is_more.then(|| format!("{}&rows={}", query.encoded(), query::ROWS_MAX)),
        query,
    };
    Ok(html(&page))
}

impl ErrorGroupView {
    fn new(group: &ErrorSummary, query: &DeliveryQuery, now: SystemTime) -> Self {
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let (handler, reason, fingerprint) = (text(&group.handler_key), text(&group.reason), text(&group.fingerprint));
        let of_group = DeliveryQuery {
            handler: handler.clone(),
            reason: reason.clone(),
            fingerprint: fingerprint.clone(),
            ..query.clone()
        };
        Self {
            error: group.example.clone().unwrap_or_default(),
            count: text::count(group.poisoned),
            first: group.first_at.map(|at| When::new(at, now)),
            last: group.last_at.map(|at| When::new(at, now)),
            query: of_group.encoded(),
            handler,
            reason,
        }
    }
}
