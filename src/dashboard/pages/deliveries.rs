//! Deliveries in any state, one by one; with a filter that stands in the URL.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::{Query, State};

use super::super::app::App;
use super::super::guard::Visit;
use super::super::query::{self, DeliveryQuery};
use super::{Choice, DeliveryView, Frame, Page, PagePlace, handler_choices, html};
use crate::store::Backend;

const STATES: [&str; 5] = ["pending", "running", "done", "poisoned", "discarded"];

#[derive(Template)]
#[template(path = "deliveries.html")]
struct DeliveriesPage {
    frame: Frame,
    query: DeliveryQuery,
    handlers: Vec<Choice>,
    states: Vec<Choice>,
    rows: Vec<DeliveryView>,
    order: &'static str,
    more: Option<String>,
}

pub(in super::super) async fn deliveries<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Query(query): Query<DeliveryQuery>,
) -> Page {
    let (frame, snapshot) = Frame::new(&app, &visit, PagePlace { path: "/deliveries", title: "Deliveries" }).await;
    let (filter, state, rows_max) = (query.filter()?, query.state()?, query::rows(&query.rows));
    let found = app.operator().deliveries(&filter, state, rows_max + 1).await?;
    let now = SystemTime::now();
    let is_more = found.len() > rows_max as usize && rows_max < query::ROWS_MAX;
    let page = DeliveriesPage {
        frame,
        handlers: handler_choices(snapshot.as_deref(), query.handler.trim()),
        states: STATES.iter().map(|state| Choice::new(state, &query.state)).collect(),
        rows: found.iter().take(rows_max as usize).map(|one| DeliveryView::new(one, now)).collect(),
        order: match query.state.as_str() {
            "poisoned" => "the longest poisoned first",
            "pending" | "running" => "the longest due first",
            _ => "the newest message first",
        },
        more: is_more.then(|| format!("{}&state={}&rows={}", query.encoded(), query.state, query::ROWS_MAX)),
        query,
    };
    Ok(html(&page))
}
