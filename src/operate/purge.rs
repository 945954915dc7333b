//! Purges: walks over what is finished, one short step after the other, and gives way in between.
//!
//! One process at a time does it, by a lease in the database. A step is carried to its end on the store's thread, whatever becomes of the
//! caller; a crash leaves nothing half done, and the next run goes on where this one was. The store decides what is finished.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Operator, Retention};
use crate::store::purging::{Cursor, Periods, PurgeStep, Step, Stepped};
use crate::store::{Backend, Store};
use crate::types::{Error, Kind, Purgeable, Purged, Result};

/// A step that takes longer is made smaller: whoever waits for one of its rows waits that long.
const SLOW: Duration = Duration::from_millis(500);
/// The longest pause after a step. A pause is as long as the step was, so that purging takes at most half of anything.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How often it is looked whether written identities have settled.
const SETTLE_POLL: Duration = Duration::from_secs(1);
/// How long that is waited for. What has not settled by then goes the next time.
const SETTLE_WAIT_MAX: Duration = Duration::from_secs(600);
/// Steps in a row that the database may refuse, each half as large as the one before.
const REFUSALS_MAX: u32 = 8;
/// How long a step may go on when nobody wants more: steps are short, and the lease can only be let go behind one.
const STOP_WAIT: Duration = Duration::from_secs(1);
/// Rows that are counted in one statement of a dry run.
const COUNT_ROWS: u32 = 10_000;

impl<B: Backend> Store<B> {
    /// Purges now, until nothing is left that can go, and tells `on_step` after each step what has been done so far. When another
    /// process is purging, it ends at once and says so ([`Purged::is_locked_out`]).
    ///
    /// With [`Retention::keep_identities`] on PostgreSQL it takes two minutes longer: identities are written first, and messages go when
    /// no accept that may have missed them can be under way. What other processes have locked, and what a transaction that is open
    /// for minutes keeps from going, is left for the next time.
    ///
    /// Dropping the future stops after the current step; the next purge can begin within a minute.
    ///
    /// # Errors
    /// When the retention cannot be used, names a handler key that nobody has registered, or the database does not answer or refuses
    /// again and again. What was purged stays purged.
    pub async fn purge(&self, retention: &Retention, on_step: impl FnMut(&Purged) + Send) -> Result<Purged> {
        purge(self, retention, on_step, std::future::pending()).await
    }

    /// What [`Store::purge`] would remove now. Changes nothing. Looks at every message that is old enough: for people.
    ///
    /// # Errors
    /// As [`Store::purge`].
    pub async fn purgeable(&self, retention: &Retention) -> Result<Purgeable> {
        retention.check()?;
        let periods = periods(self, retention).await?;
        let mut purgeable = Purgeable { identities: self.backend.count_forgettable().await?, ..Purgeable::default() };
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
    /// As [`Store::purge`], in somebody's name: it leaves a row in the audit with how many messages went.
    ///
    /// # Errors
    /// As [`Store::purge`]; what was purged stays purged, also when it could not be written down.
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

/// As [`Store::purge`], until `stopping`.
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
    // Not from under a step that is still under way. Without it, and after an error, the lease runs out.
    if !matches!(ended, Err(CutShort::StoppedWithin)) {
        let _ = store.backend.release_purge(holder).await;
    }
    match ended {
        Ok(()) | Err(CutShort::Stopped | CutShort::StoppedWithin) => Ok(purge.purged),
        Err(CutShort::LockedOut) => Ok(Purged { is_locked_out: true, ..purge.purged }),
        Err(CutShort::Failed(error)) => Err(error),
    }
}

/// The retention with ids for keys.
async fn periods<B: Backend>(store: &Store<B>, retention: &Retention) -> Result<Periods> {
    store.backend.check_schema().await?;
    let keys: Vec<String> = retention.of_handlers.iter().map(|(key, _)| key.clone()).collect();
    let ids = store.backend.ids_of_keys(&keys).await?;
    let unknown: Vec<&str> =
        keys.iter().zip(&ids).filter(|(_, ids)| ids.is_empty()).map(|(key, _)| key.as_str()).collect();
    if !unknown.is_empty() {
        // Else a slip of the pen would purge what was to be kept.
        let unknown = unknown.join(", ");
        return Err(Error::configuration(format!("cannot purge: nobody has registered a handler under {unknown}")));
    }
    let of_ids = ids.into_iter().zip(&retention.of_handlers);
    let of_handlers = of_ids.flat_map(|(ids, (_, period))| ids.into_iter().map(|id| (id, *period))).collect();
    Ok(Periods { default: retention.period, of_handlers, poisoned: retention.expire_poisoned })
}

/// A purge under way.
struct Purge<'a, B: Backend, F, S> {
    store: &'a Store<B>,
    holder: i64,
    purged: Purged,
    on_step: F,
    stopping: Pin<&'a mut S>,
    /// Rows of the next step: fewer after a refusal, more again after each success.
    rows: u32,
    rows_max: u32,
    refusals: u32,
}

/// Why a purge ended before its end.
enum CutShort {
    LockedOut,
    Stopped,
    /// Nobody waits for the step that is under way; it comes to its end by itself.
    StoppedWithin,
    Failed(Error),
}

impl<B: Backend, F: FnMut(&Purged) + Send, S: Future<Output = ()> + Send> Purge<'_, B, F, S> {
    async fn run(&mut self, periods: &Periods, retention: &Retention) -> Result<(), CutShort> {
        let keep = retention.keep_identities;
        let marks_first = keep.filter(|_| self.store.backend.marks_first());
        let mut is_anything_over = true;
        if let Some(keep) = marks_first {
            let mark = |cursor, rows| PurgeStep::Mark { periods: periods.clone(), keep, cursor, rows };
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

    /// Steps over what is worth a look, to the end. Returns how many messages they found.
    async fn walk(
        &mut self,
        step: impl Fn(Cursor, u32) -> PurgeStep,
        note: impl Fn(&mut Purged, &Step),
    ) -> Result<u64, CutShort> {
        let mut messages = 0;
        let mut cursor = Some(Cursor::START);
        while let Some(from) = cursor {
            let done = self.step(|rows| step(from, rows), &note).await?;
            messages += done.messages;
            cursor = done.cursor;
        }
        Ok(messages)
    }

    /// Waits until written identities have settled, and keeps the lease meanwhile.
    async fn settle(&mut self) -> Result<(), CutShort> {
        let deadline = Instant::now() + SETTLE_WAIT_MAX;
        while Instant::now() < deadline {
            if self.step(|_| PurgeStep::Settle, |_, _| {}).await?.cursor.is_none() {
                break;
            }
            self.pause(SETTLE_POLL).await?;
        }
        Ok(())
    }

    async fn forget(&mut self) -> Result<(), CutShort> {
        let note = |purged: &mut Purged, step: &Step| purged.identities_forgotten += step.identities;
        while self.step(|rows| PurgeStep::Forget { rows }, note).await?.identities > 0 {}
        Ok(())
    }

    async fn expire(&mut self, older_than: Duration) -> Result<(), CutShort> {
        let note = |purged: &mut Purged, step: &Step| purged.quarantined += step.quarantined;
        while self.step(|rows| PurgeStep::Expire { older_than, rows }, note).await?.quarantined > 0 {}
        Ok(())
    }

    /// One step, again and smaller while the database refuses it; then a pause.
    async fn step(
        &mut self,
        step: impl Fn(u32) -> PurgeStep,
        note: impl Fn(&mut Purged, &Step),
    ) -> Result<Step, CutShort> {
        loop {
            let begun_at = Instant::now();
            let (backend, holder, step) = (Arc::clone(&self.store.backend), self.holder, step(self.rows));
            let mut stepping = pin!(on_reactor(self.store, async move { backend.purge_step(holder, &step).await }));
            let stepped = tokio::select! {
                stepped = &mut stepping => stepped,
                () = &mut self.stopping => {
                    let ended = tokio::time::timeout(STOP_WAIT, stepping).await;
                    return Err(if ended.is_ok() { CutShort::Stopped } else { CutShort::StoppedWithin });
                }
            };
            match stepped {
                Ok(Stepped::LockedOut) => return Err(CutShort::LockedOut),
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
                        return Err(CutShort::Failed(error));
                    }
                    self.refusals += 1;
                    self.rows = (self.rows / 2).max(1);
                    self.pause(PAUSE_MAX.min(begun_at.elapsed() + Duration::from_millis(50))).await?;
                }
            }
        }
    }

    async fn pause(&mut self, pause: Duration) -> Result<(), CutShort> {
        tokio::select! {
            biased;
            () = &mut self.stopping => Err(CutShort::Stopped),
            () = tokio::time::sleep(pause) => Ok(()),
        }
    }
}

/// On the store's thread, to its end: a caller that goes away must not leave a transaction open.
async fn on_reactor<B: Backend, T: Send + 'static>(
    store: &Store<B>,
    act: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let acted = store.backend.reactor().spawn(act).await;
    acted.unwrap_or_else(|_| Err(Error::stopped("the store was closed while it was purged")))
}
