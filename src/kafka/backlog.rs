//! Looks whether the handlers are too far behind for more records to be read.

use std::sync::Arc;

use crate::accept::Intake;
use crate::store::Backend;
use crate::store::seam::Backlog;
use crate::telemetry::events;

/// Whether more is open than the limits allow; `None` when the database does not say.
pub(super) async fn is_over<B: Backend>(intake: &Arc<Intake<B>>) -> Option<bool> {
    let limits = &intake.limits;
    let handlers = intake.handlers().await.ok()?;
    let handler_ids: Vec<i16> = handlers.iter().flat_map(|handler| handler.all.iter().copied()).collect();
    let count_max = limits.backlog_rows_max.map_or(1, |rows| u32::try_from(rows).unwrap_or(u32::MAX));
    match intake.store.backend.backlog(&handler_ids, count_max).await {
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
