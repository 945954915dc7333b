//! Checks whether the handlers have too many or too old open deliveries to read more records.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use super::rebalance::Notice;
use crate::accept::Intake;
use crate::store::Backend;
use crate::store::seam::Backlog;
use crate::telemetry::events;

/// How often the backlog is checked, if it has limits.
const BACKLOG_EVERY: Duration = Duration::from_secs(1);

/// Reports every second whether the backlog is over its limits, until the ingest ends. When the database does not
/// answer, the last report stays valid.
pub(super) async fn watch<B: Backend>(intake: Arc<Intake<B>>, tell: Sender<Notice>) {
    loop {
        if let Some(is_over) = is_over(&intake).await
            && tell.send(Notice::Backlog { is_over }).is_err()
        {
            return;
        }
        tokio::time::sleep(BACKLOG_EVERY).await;
    }
}

/// Whether the open deliveries have reached `backlog_rows_max`, or the oldest one is older than `backlog_age_max`;
/// `None` when the database does not answer. Counts at most up to the limit.
async fn is_over<B: Backend>(intake: &Arc<Intake<B>>) -> Option<bool> {
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
            events::store_error("count the backlog", &error);
            None
        }
    }
}
