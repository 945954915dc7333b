//! Gives a handler the messages that were accepted before it was there: deliveries for retained messages, other handlers' untouched.
//!
//! In bounded steps, throttled, and idempotent: a message that has a delivery for the handler, under whichever of its keys, is passed over.

use std::time::{Duration, Instant};

use super::operator::Operator;
use crate::store::Backend;
use crate::store::operating::BackfillStep;
use crate::types::{Error, HandlerStatus, Result, setters};

/// Deliveries made in one statement.
const STEP_ROWS: u32 = 500;

/// Which messages a handler is given. A handler's CloudEvents types do not count here: it sees every message of the topics.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Backfill {
    /// The handler. It has to be registered: start a build that has it once.
    pub handler_key: String,
    /// Of messages of these topics.
    pub topics: Vec<String>,
    /// Accepted no longer ago than this. Default: all that are retained.
    pub newer_than: Option<Duration>,
    /// Deliveries made in a second at the most, so that what arrives meanwhile is not held up. Default: no bound.
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
    /// Makes the missing deliveries, due now; tells after each step how many that are so far. Calling again makes only what is missing still.
    ///
    /// # Errors
    /// When there is no such handler, it is ordered, no topic is given, or the database does not answer; what was made stays.
    pub async fn backfill(&self, backfill: &Backfill, mut on_step: impl FnMut(u64)) -> Result<u64> {
        if backfill.topics.is_empty() {
            return Err(Error::configuration("a backfill needs the topics whose messages the handler is to have"));
        }
        self.check_key(Some(&backfill.handler_key)).await?;
        let key = &backfill.handler_key;
        let is_it = |handler: &HandlerStatus| handler.handler_key == *key || handler.former_keys.contains(key);
        if self.handlers().await?.iter().any(|handler| is_it(handler) && handler.is_ordered) {
            // The keys are read out of records by the service itself, when it accepts them.
            return Err(Error::configuration(format!(
                "{key} is ordered: a backfill cannot tell the keys of its deliveries"
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
