//! Collects records into batches: whatever arrives while a batch is being written leaves in the next one.
//!
//! Calls from many tasks share statements, so a service that accepts one record at a time does not pay a commit for each. Two batches
//! may be under way at once. A caller that goes away changes nothing: what it handed in is written all the same.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use super::intake::Intake;
use super::write::{Patience, Row, RowBatch, write};
use crate::store::Backend;
use crate::store::seam::Quarantined;
use crate::telemetry::events;
use crate::types::{Error, Receipt, Record, Result, panic_text, sanitize};

/// Batches being written at a time: one travels while the other is being fsynced.
const WRITES_MAX: usize = 2;
/// Characters of a topic's name that an error shows: Kafka allows no more.
pub(super) const TOPIC_CHARS_SHOWN: usize = 249;

/// The way in. Dropping it ends the collecting task once everything handed in is written.
pub(crate) struct Acceptor {
    jobs: mpsc::Sender<Job>,
    rows: Room,
    kibibytes: Room,
}

/// What happens to a record that cannot become a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// The caller is told, and nothing of the call is written.
    Refuse,
    /// It is kept in quarantine.
    Quarantine,
}

/// How much may wait, in units. Callers wait for room, whoever is first.
struct Room {
    free: Arc<Semaphore>,
    total: usize,
}

impl Room {
    fn new(total: usize) -> Self {
        let total = total.clamp(1, Semaphore::MAX_PERMITS);
        Self { free: Arc::new(Semaphore::new(total)), total }
    }

    /// Takes room for `units`; what is larger than everything takes everything.
    async fn take(&self, units: usize) -> Result<OwnedSemaphorePermit> {
        let units = u32::try_from(units.min(self.total)).unwrap_or(u32::MAX);
        // Mostly there is room; then nothing is waited for, not even by the scheduler's leave.
        if let Ok(taken) = Arc::clone(&self.free).try_acquire_many_owned(units) {
            return Ok(taken);
        }
        let taken = Arc::clone(&self.free).acquire_many_owned(units).await;
        taken.map_err(|_| Error::stopped("the inbox has stopped accepting"))
    }
}

/// Rows of one caller, at most a batch of them.
struct Job {
    rows: Vec<Row>,
    size_bytes: usize,
    reply: oneshot::Sender<Reply>,
    /// Free again when the rows are written.
    room: [OwnedSemaphorePermit; 2],
}

/// What a caller is told.
struct Reply {
    written: Result<Vec<Receipt>>,
    /// Some rows of the batch, to be dropped where they were made: memory is given back best by the thread that took it, and the
    /// store's own has other work.
    rows: Vec<Row>,
}

impl Acceptor {
    pub(crate) fn start<B: Backend>(intake: &Arc<Intake<B>>) -> Self {
        let (jobs, queue) = mpsc::channel(intake.limits.accept_queue_rows);
        // Joined by its channel: it ends when the last inbox is dropped.
        drop(intake.store.backend.reactor().spawn(collect(Arc::clone(intake), queue)));
        let rows = Room::new(intake.limits.accept_queue_rows);
        let kibibytes = Room::new(intake.limits.accept_queue_bytes.div_ceil(1024));
        Self { jobs, rows, kibibytes }
    }

    /// Accepts records; one receipt each, in order.
    pub(crate) async fn accept<B: Backend>(
        &self,
        intake: &Arc<Intake<B>>,
        records: Vec<Record>,
        unfit: Unfit,
    ) -> Result<Vec<Receipt>> {
        let mut receipts: Vec<Option<Receipt>> = Vec::with_capacity(records.len());
        let mut places = Vec::with_capacity(records.len());
        let mut replies = Vec::new();
        let mut rows = Vec::with_capacity(records.len().min(intake.limits.accept_batch_rows));
        let mut size_bytes = 0;
        let mut prepared = Vec::with_capacity(records.len());
        for (at, record) in records.into_iter().enumerate() {
            match (intake.row(record), unfit) {
                (Some((Row::Quarantine(quarantined), _)), Unfit::Refuse) => return Err(refused(at, &quarantined)),
                (row, Unfit::Refuse | Unfit::Quarantine) => prepared.push(row),
            }
        }
        for row in prepared {
            let Some((row, row_bytes)) = row else {
                receipts.push(Some(Receipt::Unwanted));
                continue;
            };
            let is_full = rows.len() >= intake.limits.accept_batch_rows
                || size_bytes + row_bytes > intake.limits.accept_batch_bytes;
            if is_full && !rows.is_empty() {
                replies.push(self.hand_in(std::mem::take(&mut rows), std::mem::take(&mut size_bytes)).await?);
            }
            places.push(receipts.len());
            receipts.push(None);
            rows.push(row);
            size_bytes += row_bytes;
        }
        if !rows.is_empty() {
            replies.push(self.hand_in(rows, size_bytes).await?);
        }
        let mut places = places.into_iter();
        for reply in replies {
            let stopped = |_| Error::stopped("the task that stores the records has ended: some may have been accepted");
            let Reply { written, rows } = reply.await.map_err(stopped)?;
            drop(rows);
            // In this order: a zip that asks `places` first would swallow one when `written` ends.
            for (receipt, place) in written?.into_iter().zip(places.by_ref()) {
                receipts[place] = Some(receipt);
            }
        }
        let receipts: Vec<Receipt> = receipts.into_iter().flatten().collect();
        match unfit {
            Unfit::Refuse => refuse_quarantined(&receipts)?,
            Unfit::Quarantine => {}
        }
        Ok(receipts)
    }

    async fn hand_in(&self, rows: Vec<Row>, size_bytes: usize) -> Result<oneshot::Receiver<Reply>> {
        let room = [self.rows.take(rows.len()).await?, self.kibibytes.take(size_bytes.div_ceil(1024)).await?];
        let (reply, replied) = oneshot::channel();
        let job = Job { rows, size_bytes, reply, room };
        // A job has at least one row and the rows have room, so the channel has too.
        self.jobs.try_send(job).map_err(|_| Error::stopped("the inbox has stopped accepting"))?;
        Ok(replied)
    }
}

/// What a caller is told about a record that cannot become a message. `at` counts from 0.
pub(super) fn refused(at: usize, quarantined: &Quarantined) -> Error {
    let Quarantined { record, reason, detail } = quarantined;
    let detail = detail.as_ref().map(|detail| format!(" ({detail})")).unwrap_or_default();
    let topic = sanitize::text(&record.topic, TOPIC_CHARS_SHOWN);
    Error::refused(format!("cannot accept record {} of topic {topic}: {reason}{detail}; nothing was stored", at + 1))
}

/// Some records are found out only when they are written: their identity belongs to another payload, or the database refuses them.
fn refuse_quarantined(receipts: &[Receipt]) -> Result<()> {
    for (at, receipt) in receipts.iter().enumerate() {
        match receipt {
            Receipt::Accepted { .. } | Receipt::Duplicate { .. } | Receipt::Unwanted => {}
            Receipt::Quarantined { reason } => {
                let what = format!("record {} was not accepted and is kept in quarantine: {reason}", at + 1);
                return Err(Error::refused(what));
            }
        }
    }
    Ok(())
}

async fn collect<B: Backend>(intake: Arc<Intake<B>>, mut queue: mpsc::Receiver<Job>) {
    let writes = Arc::new(Semaphore::new(WRITES_MAX));
    let mut next = None;
    loop {
        let first = match next.take() {
            Some(job) => job,
            None => match queue.recv().await {
                Some(job) => job,
                None => return,
            },
        };
        // The semaphore is never closed.
        let Ok(permit) = Arc::clone(&writes).acquire_owned().await else { return };
        let mut jobs = vec![first];
        let mut rows = jobs[0].rows.len();
        let mut size_bytes = jobs[0].size_bytes;
        while let Ok(job) = queue.try_recv() {
            rows += job.rows.len();
            size_bytes += job.size_bytes;
            if rows > intake.limits.accept_batch_rows || size_bytes > intake.limits.accept_batch_bytes {
                next = Some(job);
                break;
            }
            jobs.push(job);
        }
        let intake = Arc::clone(&intake);
        // Joined by its permit and by the callers that wait for it.
        drop(tokio::spawn(async move {
            let written = AssertUnwindSafe(write_jobs(&intake, jobs)).catch_unwind().await;
            if let Err(panic) = written {
                events::accept_failed(&panic_text(panic));
            }
            drop(permit);
        }));
    }
}

/// Writes the jobs' rows as one batch and tells each caller its part.
async fn write_jobs<B: Backend>(intake: &Arc<Intake<B>>, jobs: Vec<Job>) {
    let mut callers = Vec::with_capacity(jobs.len());
    let mut rows = Vec::new();
    for job in jobs {
        callers.push((job.rows.len(), job.reply, job.room));
        // Mostly there is one job, or the first is the largest.
        if rows.is_empty() {
            rows = job.rows;
        } else {
            rows.extend(job.rows);
        }
    }
    let patience = Patience::Until(Instant::now() + intake.limits.accept_patience);
    let written = write(intake, RowBatch { rows: &rows, ledger: &[], is_in_doubt: false }, patience).await;
    let mut receipts = written.map(|written| written.receipts.into_iter());
    for (count, reply, _room) in callers {
        let written = match &mut receipts {
            Ok(receipts) => Ok(receipts.take(count).collect()),
            Err(error) => Err(error.repeat()),
        };
        let later = rows.split_off(count.min(rows.len()));
        let rows = std::mem::replace(&mut rows, later);
        // Callers that have gone away are told all the same; nobody listens then.
        let _ = reply.send(Reply { written, rows });
    }
}
