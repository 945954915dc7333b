//! Checks whether the handlers have too many or too old open deliveries to read more records.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use super::rebalance::Notice;
use crate::accept::Intake;
use crate::store::Backend;
use crate::store::seam::Backlog;
use crate::telemetry::events;

/// How often the backlog is checked at most, if it has limits.
const BACKLOG_EVERY: Duration = Duration::from_secs(1);
/// The pause after a check, as a multiple of its time: counting a long backlog keeps a connection busy for 5 % of the
/// time.
const PAUSE_FACTOR: u32 = 20;
/// The longest pause: a paused intake opens within this time, also if the check had to wait for the database.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Reports whether the backlog is over its limits, until the ingest ends: every second, or less often when counting
/// takes long. When the database does not answer, the last report stays valid.
pub(super) async fn watch<B: Backend>(intake: Arc<Intake<B>>, tell: Sender<Notice>) {
    loop {
        let begun = Instant::now();
        let is_over = is_over(&intake).await;
        // A check that failed has counted nothing.
        let pause = is_over.map_or(BACKLOG_EVERY, |_| pause_after(begun.elapsed()));
        if let Some(is_over) = is_over
            && tell.send(Notice::Backlog { is_over }).is_err()
        {
            return;
        }
        tokio::time::sleep(pause).await;
    }
}

/// How long to wait after a check that took this long.
fn pause_after(took: Duration) -> Duration {
    took.saturating_mul(PAUSE_FACTOR).clamp(BACKLOG_EVERY, PAUSE_MAX)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_that_takes_long_is_made_less_often() {
        assert_eq!(pause_after(Duration::from_millis(3)), BACKLOG_EVERY);
        assert_eq!(pause_after(Duration::from_millis(200)), Duration::from_secs(4));
        assert_eq!(pause_after(Duration::from_secs(60)), PAUSE_MAX);
    }
}
