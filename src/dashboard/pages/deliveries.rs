//! The page of deliveries in any state: groups of those that wait, run or are poisoned, and single deliveries, with a
//! filter in the URL.

use std::sync::Arc;
use std::time::SystemTime;

use askama::Template;
use axum::Extension;
use axum::extract::{Query, State};

use super::super::app::App;
use super::super::groups::{self, Groups};
use super::super::guard::Visit;
use super::super::query::{self, DeliveryQuery};
use super::{Choice, DeliveryView, Frame, Page, PagePlace, handler_choices, html};
use crate::store::Backend;
use crate::types::State as DeliveryState;

const STATES: [&str; 5] = ["pending", "running", "done", "poisoned", "discarded"];

#[derive(Template)]
#[template(path = "deliveries.html")]
struct DeliveriesPage {
    frame: Frame,
    query: DeliveryQuery,
    handlers: Vec<Choice>,
    states: Vec<Choice>,
    groups: Groups,
    rows: Vec<DeliveryView>,
    order: &'static str,
    /// The query of an action on all matches.
    all: String,
    more: Option<String>,
}

pub(in super::super) async fn deliveries<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Query(query): Query<DeliveryQuery>,
) -> Page {
    let (frame, snapshot) = Frame::new(&app, &visit, PagePlace { path: "/deliveries", title: "Deliveries" }).await;
    let (state, rows_max, now) = (query.state()?, query::rows(&query.rows), SystemTime::now());
    let (found, rows) = groups::search(&app, &query, state, rows_max + 1).await?;
    let page = DeliveriesPage {
        frame,
        handlers: handler_choices(snapshot.as_deref(), query.handler.trim()),
        states: STATES.iter().map(|state| Choice::new(state, query.state.trim())).collect(),
        groups: match query.message.is_empty() {
            true => Groups::of_deliveries(&found, &query, state),
            false => Groups::none(rows.len()),
        },
        order: match state {
            Some(DeliveryState::Poisoned) => "the longest poisoned first",
            Some(DeliveryState::Pending | DeliveryState::Running) => "the longest due first",
            Some(DeliveryState::Done | DeliveryState::Discarded) | None => "the newest message first",
        },
        more: query::more(&query.encoded(), rows.len(), rows_max),
        rows: rows.iter().take(rows_max as usize).map(|one| DeliveryView::new(one, now)).collect(),
        all: query.encoded(),
        query,
    };
    Ok(html(&page))
}
