//! Looks whether the handlers are too far behind for more records to be read.

use std::sync::Arc;

use crate::inbox::Shared;
use crate::store::Backend;
use crate::store::seam::Backlog;
use crate::telemetry::events;

/// Whether more is open than the limits allow; `None` when the database does not say.
pub(super) async fn is_over<B: Backend>(shared: &Arc<Shared<B>>) -> Option<bool> {
    let limits = &shared.limits;
    let lanes = shared.lanes().await.ok()?;
    let handler_ids: Vec<i16> = lanes.iter().flat_map(|lane| lane.ids.all.iter().copied()).collect();
    let count_max = limits.backlog_rows_max.map_or(1, |rows| u32::try_from(rows).unwrap_or(u32::MAX));
    match shared.store.backend.backlog(&handler_ids, count_max).await {
        Ok(Backlog { open, oldest_age }) => {
            let is_too_many = limits.backlog_rows_max.is_some_and(|max| open >= max as u64);
            let is_too_old = limits.backlog_age_max.is_some_and(|max| oldest_age > max);
            Some(is_too_many || is_too_old)
        }
        Err(error) => {
            events::store_trouble("count the backlog", &error);
            None
        }
    }
}
