//! The page of poisoned deliveries: groups by error, and single deliveries, with a filter in the URL.

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

#[derive(Template)]
#[template(path = "poisoned.html")]
struct PoisonedPage {
    frame: Frame,
    query: DeliveryQuery,
    handlers: Vec<Choice>,
    groups: Groups,
    rows: Vec<DeliveryView>,
    /// The query of an action on all matches.
    all: String,
    /// The query of a longer list.
    more: Option<String>,
}

pub(in super::super) async fn poisoned<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(visit): Extension<Visit>,
    Query(query): Query<DeliveryQuery>,
) -> Page {
    let (frame, snapshot) = Frame::new(&app, &visit, PagePlace { path: "/poisoned", title: "Poisoned" }).await;
    // This page always shows poisoned deliveries, so a state in the URL is ignored.
    let query = DeliveryQuery { state: String::new(), ..query };
    let (rows_max, now) = (query::rows(&query.rows), SystemTime::now());
    let (found, rows) = groups::search(&app, &query, Some(DeliveryState::Poisoned), rows_max + 1).await?;
    let mut groups = Groups::of_poisoned(&found, &query);
    groups.total = groups.total.max(rows.len() as u64);
    let page = PoisonedPage {
        frame,
        handlers: handler_choices(snapshot.as_deref(), query.handler.trim()),
        groups,
        more: query::more(&query.encoded(), rows.len(), rows_max),
        rows: rows.iter().take(rows_max as usize).map(|one| DeliveryView::new(one, now)).collect(),
        all: query.encoded(),
        query,
    };
    Ok(html(&page))
}
