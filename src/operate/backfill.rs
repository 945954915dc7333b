//! Gives a handler the messages that were accepted before it was registered: creates deliveries for retained messages.
//! Deliveries of other handlers are not touched.
//!
//! A backfill works in bounded, throttled steps and is idempotent: it skips messages that have a delivery for any key
//! of the handler.

use std::time::{Duration, Instant};

use super::operator::Operator;
use crate::store::Backend;
use crate::store::operating::BackfillStep;
use crate::types::{Error, HandlerStatus, Result, setters};

/// Deliveries created by one statement.
const STEP_ROWS: u32 = 500;

/// Which messages a handler gets. The handler's CloudEvents type filter is ignored: it gets every message of the
/// topics. [`Operator::backfill`](crate::operate::Operator::backfill) takes it.
///
/// ```
/// use std::time::Duration;
/// use wharf::operate::Backfill;
///
/// let last_week = Backfill::new("mail.receipt", ["orders"])
///     .newer_than(Duration::from_secs(7 * 86_400))
///     .rows_per_sec_max(1_000);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Backfill {
    /// The key of the handler. It must be registered already: start a build that has the handler once.
    pub handler_key: String,
    /// The topics whose messages the handler gets.
    pub topics: Vec<String>,
    /// Only messages accepted within this time. Default: all retained messages.
    pub newer_than: Option<Duration>,
    /// The maximum number of deliveries created per second, so that new messages are not delayed. Default: no limit.
    pub rows_per_sec_max: Option<u32>,
}

setters!(Backfill {} optional { newer_than: Duration, rows_per_sec_max: u32 });

impl Backfill {
    /// Gives the handler every retained message of these topics.
    ///
    /// ```
    /// use wharf::operate::Backfill;
    /// let backfill = Backfill::new("mail.receipt", ["orders"]).rows_per_sec_max(1_000);
    /// ```
    pub fn new<T: Into<String>>(handler_key: impl Into<String>, topics: impl IntoIterator<Item = T>) -> Self {
        let topics = topics.into_iter().map(Into::into).collect();
        Self { handler_key: handler_key.into(), topics, newer_than: None, rows_per_sec_max: None }
    }
}

impl<B: Backend> Operator<B> {
    /// Creates the missing deliveries, due now. Calls `on_step` after each step with the number created so far, and
    /// returns the total. A second call creates only deliveries that are still missing.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// use wharf::operate::Backfill;
    ///
    /// let backfill = Backfill::new("mail.receipt", ["orders"]).rows_per_sec_max(1_000);
    /// let operator = store.operate().acting_as("alice").because("a new handler");
    /// let created = operator.backfill(&backfill, |so_far| println!("{so_far} deliveries")).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When there is no such handler, it is ordered, no topic is given, or the database does not answer. Deliveries
    /// created before the error stay.
    pub async fn backfill(&self, backfill: &Backfill, mut on_step: impl FnMut(u64)) -> Result<u64> {
        if backfill.topics.is_empty() {
            return Err(Error::configuration("a backfill needs at least one topic"));
        }
        self.check_key(Some(&backfill.handler_key)).await?;
        let key = &backfill.handler_key;
        let is_it = |handler: &HandlerStatus| handler.handler_key == *key || handler.former_keys.contains(key);
        if self.handlers().await?.iter().any(|handler| is_it(handler) && handler.is_ordered) {
            // Order keys are extracted from records only when the service accepts them.
            return Err(Error::configuration(format!(
                "cannot backfill {key}: it is ordered, and the order keys of stored messages are unknown"
            )));
        }
        let limit = backfill.rows_per_sec_max.map_or(STEP_ROWS, |rows| rows.clamp(1, STEP_ROWS));
        let filter = serde_json::json!({
            "handler_key": backfill.handler_key,
            "topics": backfill.topics,
            "newer_than": backfill.newer_than.map(|age| humantime::format_duration(age).to_string()),
        })
        .to_string();
        let (mut made, mut after_seq, mut act) = (0, 0, None);
        loop {
            let started_at = Instant::now();
            let step = BackfillStep {
                handler_key: backfill.handler_key.clone(),
                topics: backfill.topics.clone(),
                newer_than: backfill.newer_than,
                after_seq,
                limit,
                filter: filter.clone(),
                act,
            };
            let step = self.store.backend.backfill(step, self.signed.clone()).await?;
            act = Some(step.act);
            made += step.made;
            on_step(made);
            let Some(next_seq) = step.next_seq else { break };
            after_seq = next_seq;
            if let Some(rows_per_sec) = backfill.rows_per_sec_max {
                let pace = Duration::from_secs_f64(step.made as f64 / f64::from(rows_per_sec.max(1)));
                tokio::time::sleep(pace.saturating_sub(started_at.elapsed())).await;
            }
        }
        Ok(made)
    }
}
