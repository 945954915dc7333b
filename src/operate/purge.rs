//! Purges finished messages in short steps, with a pause after each step.
//!
//! A lease in the database lets one process purge at a time. A step runs to its end on the store's thread, even if the
//! caller's future is dropped. After a crash no step is half done, and the next purge continues. The store decides
//! which messages are finished.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Operator, Retention};
use crate::store::purging::{Cursor, ExpiredCount, Periods, PurgeStep, Step, Stepped};
use crate::store::{Backend, Store};
use crate::types::{Error, Kind, Purgeable, Purged, Result};

/// After a step that takes longer, the next one is smaller: statements that wait for one of its rows wait that long.
const SLOW: Duration = Duration::from_millis(500);
/// The longest pause after a step. A pause is as long as the step was, so that purging uses the database at most half
/// of the time.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How often to check whether written identities have settled.
const SETTLE_POLL: Duration = Duration::from_secs(1);
/// How long to wait for that. Messages whose identities have not settled by then are purged the next time.
const SETTLE_WAIT_MAX: Duration = Duration::from_secs(600);
/// How many steps in a row the database may refuse. Each is half as large as the one before.
const REFUSALS_MAX: u32 = 8;
/// How long to wait for a running step on shutdown. Steps are short, and the lease can be released only after the step.
const STOP_WAIT: Duration = Duration::from_secs(1);
/// How many rows one statement of a dry run counts.
const COUNT_ROWS: u32 = 10_000;

impl<B: Backend> Store<B> {
    /// Purges now, until nothing is left to purge, and calls `on_step` with the progress after each step. When another
    /// process is purging, it returns at once with [`Purged::is_locked_out`].
    ///
    /// With [`Retention::keep_identities`] on PostgreSQL it takes two minutes longer: identities are written first, and
    /// messages are deleted when no accept that may have missed the identities can still be running. Messages that
    /// other processes have locked, or that a transaction open for minutes keeps from being deleted, are left for the
    /// next purge.
    ///
    /// Dropping the future stops the purge after the current step; the next purge can begin within a minute.
    ///
    /// ```
    /// # use wharf::{Retention, Sqlite, Store};
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let store = Store::<Sqlite>::in_memory().await?;
    /// # store.migrate().await?;
    /// # const DAY: std::time::Duration = std::time::Duration::from_secs(86_400);
    /// let purged = store.purge(&Retention::after(30 * DAY), |so_far| println!("{so_far}")).await?;
    /// println!("{} messages", purged.messages);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the retention is invalid or names a handler key that is not registered, or the database does not answer or
    /// keeps refusing. What was purged stays purged.
    pub async fn purge(&self, retention: &Retention, on_step: impl FnMut(&Purged) + Send) -> Result<Purged> {
        purge(self, retention, on_step, std::future::pending()).await
    }

    /// Counts what [`Store::purge`] would remove now, and changes nothing. It examines every message that is old
    /// enough, so it is meant for people and not for loops.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// # use wharf::Retention;
    /// # const DAY: std::time::Duration = std::time::Duration::from_secs(86_400);
    /// println!("{} messages", store.purgeable(&Retention::after(30 * DAY)).await?.messages);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Store::purge`].
    pub async fn purgeable(&self, retention: &Retention) -> Result<Purgeable> {
        retention.check()?;
        let periods = periods(self, retention).await?;
        let ExpiredCount { identities, quarantined } = self.backend.count_expired(retention.expire_quarantined).await?;
        let mut purgeable = Purgeable { identities, quarantined, ..Purgeable::default() };
        let mut cursor = Some(i64::MIN);
        while let Some(from) = cursor {
            let (backend, periods) = (Arc::clone(&self.backend), periods.clone());
            let counting = async move { backend.count_purgeable(&periods, from, COUNT_ROWS).await };
            let counted = on_reactor(self, counting).await?;
            purgeable.deliveries += counted.deliveries;
            purgeable.messages += counted.messages;
            cursor = counted.cursor;
        }
        Ok(purgeable)
    }
}

impl<B: Backend> Operator<B> {
    /// Like [`Store::purge`], with a row in the audit: who purged, with which periods, and how many messages.
    ///
    /// ```
    /// # async fn example(store: wharf::Store<wharf::Postgres>) -> wharf::Result<()> {
    /// # use wharf::Retention;
    /// # const DAY: std::time::Duration = std::time::Duration::from_secs(86_400);
    /// store.operate().acting_as("alice").because("the disk is full").purge(&Retention::after(DAY), |_| {}).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Store::purge`]. What was purged stays purged, also when the audit row cannot be written.
    pub async fn purge(&self, retention: &Retention, on_step: impl FnMut(&Purged) + Send) -> Result<Purged> {
        let purged = self.store.purge(retention, on_step).await?;
        let period = |period: Duration| humantime::format_duration(period).to_string();
        let of_handlers: BTreeMap<_, _> =
            retention.of_handlers.iter().map(|(key, of_handler)| (key, period(*of_handler))).collect();
        let filter = serde_json::json!({
            "older_than": period(retention.period),
            "of_handlers": of_handlers,
            "keep_identities": retention.keep_identities.map(period),
            "expire_poisoned": retention.expire_poisoned.map(period),
            "expire_quarantined": retention.expire_quarantined.map(period),
        });
        self.store.backend.audit_purge(filter.to_string(), purged.messages, self.signed.clone()).await?;
        Ok(purged)
    }
}

/// Like [`Store::purge`], until `stopping` resolves.
pub(crate) async fn purge<B: Backend>(
    store: &Store<B>,
    retention: &Retention,
    on_step: impl FnMut(&Purged) + Send,
    stopping: impl Future<Output = ()> + Send,
) -> Result<Purged> {
    retention.check()?;
    let periods = periods(store, retention).await?;
    let holder = rand::random();
    let rows_max = u32::try_from(retention.batch_rows).unwrap_or(u32::MAX);
    let mut purge = Purge {
        store,
        holder,
        purged: Purged::default(),
        on_step,
        stopping: pin!(stopping),
        rows: rows_max,
        rows_max,
        refusals: 0,
    };
    let ended = purge.run(&periods, retention).await;
    // While a step is still running, the lease must not be released; then, and when the release fails, it expires.
    if !matches!(ended, Err(EarlyEnd::StoppedWithin)) {
        let _ = store.backend.release_purge(holder).await;
    }
    match ended {
        Ok(()) | Err(EarlyEnd::Stopped | EarlyEnd::StoppedWithin) => Ok(purge.purged),
        Err(EarlyEnd::LockedOut) => Ok(Purged { is_locked_out: true, ..purge.purged }),
        Err(EarlyEnd::Failed(error)) => Err(error),
    }
}

/// The periods of the retention, with handler ids instead of keys.
async fn periods<B: Backend>(store: &Store<B>, retention: &Retention) -> Result<Periods> {
    store.backend.check_schema().await?;
    let keys: Vec<String> = retention.of_handlers.iter().map(|(key, _)| key.clone()).collect();
    let ids = store.backend.ids_of_keys(&keys).await?;
    let unknown: Vec<&str> =
        keys.iter().zip(&ids).filter(|(_, ids)| ids.is_empty()).map(|(key, _)| key.as_str()).collect();
    if !unknown.is_empty() {
        // If a mistyped key were ignored, messages that should be kept would be purged.
        let unknown = unknown.join(", ");
        return Err(Error::configuration(format!("cannot purge: no handler is registered under {unknown}")));
    }
    let of_ids = ids.into_iter().zip(&retention.of_handlers);
    let of_handlers = of_ids.flat_map(|(ids, (_, period))| ids.into_iter().map(|id| (id, *period))).collect();
    Ok(Periods { default: retention.period, of_handlers, poisoned: retention.expire_poisoned })
}

/// A running purge.
struct Purge<'a, B: Backend, F, S> {
    store: &'a Store<B>,
    /// A random number that identifies this purge as the holder of the lease. Each step renews the lease.
    holder: i64,
    purged: Purged,
    on_step: F,
    stopping: Pin<&'a mut S>,
    /// Rows of the next step: fewer after a refusal or a slow step, more again after each fast one.
    rows: u32,
    rows_max: u32,
    /// Steps in a row that the database refused.
    refusals: u32,
}

/// Why a purge ended early.
enum EarlyEnd {
    /// Another purge holds the lease.
    LockedOut,
    /// No step is running, so the lease can be released.
    Stopped,
    /// A step is still running on the store's thread, and nothing waits for it.
    StoppedWithin,
    Failed(Error),
}

impl<B: Backend, F: FnMut(&Purged) + Send, S: Future<Output = ()> + Send> Purge<'_, B, F, S> {
    /// Purges in this order: identities, messages, expired identities, expired quarantined records.
    async fn run(&mut self, periods: &Periods, retention: &Retention) -> Result<(), EarlyEnd> {
        let keep = retention.keep_identities;
        let marks_first = keep.filter(|_| self.store.backend.marks_first());
        let mut is_anything_over = true;
        if let Some(keep) = marks_first {
            let mark = |cursor, rows| PurgeStep::Mark { periods: periods.clone(), keep, cursor, rows };
            // Identities are written before any message is deleted: an accept in between finds the message or its
            // identity.
            is_anything_over = self.walk(mark, |purged, step| purged.identities_written += step.messages).await? > 0;
            if is_anything_over {
                self.settle().await?;
            }
            self.purged.identities_written = 0;
        }
        if is_anything_over {
            let remove = |cursor, rows| PurgeStep::Remove { periods: periods.clone(), keep, cursor, rows };
            self.walk(remove, |purged, step| {
                purged.deliveries += step.deliveries;
                purged.messages += step.messages;
                purged.identities_kept += step.identities;
            })
            .await?;
        }
        self.forget().await?;
        match retention.expire_quarantined {
            Some(older_than) => self.expire(older_than).await,
            None => Ok(()),
        }
    }

    /// Runs steps from the start to the end of the messages to examine. Returns how many messages the steps matched.
    async fn walk(
        &mut self,
        step: impl Fn(Cursor, u32) -> PurgeStep,
        note: impl Fn(&mut Purged, &Step),
    ) -> Result<u64, EarlyEnd> {
        let mut messages = 0;
        let mut cursor = Some(Cursor::START);
        while let Some(from) = cursor {
            let done = self.step(|rows| step(from, rows), &note).await?;
            messages += done.messages;
            cursor = done.cursor;
        }
        Ok(messages)
    }

    /// Waits until written identities have settled, and keeps the lease while waiting.
    async fn settle(&mut self) -> Result<(), EarlyEnd> {
        let deadline = Instant::now() + SETTLE_WAIT_MAX;
        while Instant::now() < deadline {
            if self.step(|_| PurgeStep::Settle, |_, _| {}).await?.cursor.is_none() {
                break;
            }
            self.pause(SETTLE_POLL).await?;
        }
        Ok(())
    }

    /// Deletes kept identities whose time is over.
    async fn forget(&mut self) -> Result<(), EarlyEnd> {
        let note = |purged: &mut Purged, step: &Step| purged.identities_forgotten += step.identities;
        while self.step(|rows| PurgeStep::Forget { rows }, note).await?.identities > 0 {}
        Ok(())
    }

    /// Deletes quarantined records that are older than this.
    async fn expire(&mut self, older_than: Duration) -> Result<(), EarlyEnd> {
        let note = |purged: &mut Purged, step: &Step| purged.quarantined += step.quarantined;
        while self.step(|rows| PurgeStep::Expire { older_than, rows }, note).await?.quarantined > 0 {}
        Ok(())
    }

    /// Runs one step, repeats it in a smaller size while the database refuses it, then pauses.
    async fn step(
        &mut self,
        step: impl Fn(u32) -> PurgeStep,
        note: impl Fn(&mut Purged, &Step),
    ) -> Result<Step, EarlyEnd> {
        loop {
            let begun_at = Instant::now();
            let (backend, holder, step) = (Arc::clone(&self.store.backend), self.holder, step(self.rows));
            let mut stepping = pin!(on_reactor(self.store, async move { backend.purge_step(holder, &step).await }));
            let stepped = tokio::select! {
                stepped = &mut stepping => stepped,
                () = &mut self.stopping => {
                    let ended = tokio::time::timeout(STOP_WAIT, stepping).await;
                    return Err(if ended.is_ok() { EarlyEnd::Stopped } else { EarlyEnd::StoppedWithin });
                }
            };
            match stepped {
                Ok(Stepped::LockedOut) => return Err(EarlyEnd::LockedOut),
                Ok(Stepped::Done(done)) => {
                    let took = begun_at.elapsed();
                    self.refusals = 0;
                    self.rows = if took > SLOW { self.rows / 2 } else { self.rows + self.rows / 4 + 1 };
                    self.rows = self.rows.clamp(1, self.rows_max);
                    note(&mut self.purged, &done);
                    (self.on_step)(&self.purged);
                    self.pause(took.min(PAUSE_MAX)).await?;
                    return Ok(done);
                }
                Err(error) => {
                    let may_pass = matches!(error.kind(), Kind::Server | Kind::Passing);
                    if !may_pass || self.refusals == REFUSALS_MAX {
                        return Err(EarlyEnd::Failed(error));
                    }
                    self.refusals += 1;
                    self.rows = (self.rows / 2).max(1);
                    self.pause(PAUSE_MAX.min(begun_at.elapsed() + Duration::from_millis(50))).await?;
                }
            }
        }
    }

    /// Waits between two steps, or returns at once when the purge has to stop.
    async fn pause(&mut self, pause: Duration) -> Result<(), EarlyEnd> {
        tokio::select! {
            biased;
            () = &mut self.stopping => Err(EarlyEnd::Stopped),
            () = tokio::time::sleep(pause) => Ok(()),
        }
    }
}

/// Runs the future to its end on the store's thread, so that a dropped caller does not leave a transaction open.
async fn on_reactor<B: Backend, T: Send + 'static>(
    store: &Store<B>,
    act: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let acted = store.backend.reactor().spawn(act).await;
    acted.unwrap_or_else(|_| Err(Error::stopped("the store was closed while it was purged")))
}
