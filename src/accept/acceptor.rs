//! Collects records into batches: records that arrive while a batch is being written go into the next one.
//!
//! Calls from many tasks share statements, so a service that accepts one record at a time does not pay a commit for
//! each. Up to two batches are written at once. If a caller drops its future, the records that it has queued by then
//! are written all the same.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use super::batch::{Row, RowBatch};
use super::intake::Intake;
use super::write::{Patience, write};
use crate::store::Backend;
use crate::store::seam::Quarantined;
use crate::telemetry::events;
use crate::types::{Error, Receipt, Record, Result, panic_text, sanitize};

/// Batches that are written at a time: one is sent while the database syncs the other to disk.
const WRITES_MAX: usize = 2;
/// The most characters of a topic name that an error shows: Kafka's maximum.
pub(super) const TOPIC_CHARS_SHOWN: usize = 249;

/// Queues records for the collecting task. That task ends when this is dropped and all queued records are written.
pub(crate) struct Acceptor {
    jobs: mpsc::Sender<Job>,
    /// Bounds the queued records, by `Limits::accept_queue_rows`.
    rows: Room,
    /// Bounds the memory of queued records, by `Limits::accept_queue_bytes`. In KiB, because a semaphore counts in
    /// `u32`.
    kibibytes: Room,
}

/// What happens to a record that cannot become a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// The call returns an error before any of its records is written. If only the database finds the record unfit, the
    /// others may be stored, and it is quarantined.
    Refuse,
    /// It is kept in quarantine.
    Quarantine,
}

/// A bound on queued work, in units. Callers wait for room in the order in which they came.
struct Room {
    free: Arc<Semaphore>,
    total: usize,
}

impl Room {
    fn new(total: usize) -> Self {
        let total = total.clamp(1, Semaphore::MAX_PERMITS);
        Self { free: Arc::new(Semaphore::new(total)), total }
    }

    /// Takes room for `units`. A request that is larger than the total takes all of it, so it can be served at all.
    async fn take(&self, units: usize) -> Result<OwnedSemaphorePermit> {
        let units = u32::try_from(units.min(self.total)).unwrap_or(u32::MAX);
        // The fast path: usually there is room, and then the task does not yield.
        if let Ok(taken) = Arc::clone(&self.free).try_acquire_many_owned(units) {
            return Ok(taken);
        }
        let taken = Arc::clone(&self.free).acquire_many_owned(units).await;
        taken.map_err(|_| Error::stopped("the inbox has stopped accepting"))
    }
}

/// The rows of one caller, at most a batch of them.
struct Job {
    rows: Vec<Row>,
    size_bytes: usize,
    reply: oneshot::Sender<Reply>,
    /// Room for the rows and their bytes, released when the rows are written.
    room: [OwnedSemaphorePermit; 2],
}

/// The answer to one caller.
struct Reply {
    written: Result<Vec<Receipt>>,
    /// The rows of this caller, which drops them: freeing memory is fastest on the thread that allocated it, and the
    /// store's thread has other work.
    rows: Vec<Row>,
}

impl Acceptor {
    /// Starts the collecting task on the store's thread.
    pub(crate) fn start<B: Backend>(intake: &Arc<Intake<B>>) -> Self {
        let (jobs, queue) = mpsc::channel(intake.limits.accept_queue_rows);
        // Not joined: its channel closes, and it ends, when the last clone of the inbox is dropped.
        drop(intake.store.backend.reactor().spawn(collect(Arc::clone(intake), queue)));
        let rows = Room::new(intake.limits.accept_queue_rows);
        let kibibytes = Room::new(intake.limits.accept_queue_bytes.div_ceil(1024));
        Self { jobs, rows, kibibytes }
    }

    /// Accepts records; returns one receipt for each, in order. All records are decided before the first one is queued,
    /// so that with `Unfit::Refuse` a bad record is refused before anything is written.
    pub(crate) async fn accept<B: Backend>(
        &self,
        intake: &Arc<Intake<B>>,
        records: Vec<Record>,
        unfit: Unfit,
    ) -> Result<Vec<Receipt>> {
        let deadline = Instant::now() + intake.limits.accept_patience;
        let mut receipts: Vec<Option<Receipt>> = Vec::with_capacity(records.len());
        let mut places = Vec::with_capacity(records.len());
        let mut replies = Vec::new();
        // How many of the places have their receipt.
        let mut placed = 0;
        let mut rows = Vec::with_capacity(records.len().min(intake.limits.accept_batch_rows));
        let mut size_bytes = 0;
        let mut prepared = Vec::with_capacity(records.len());
        for (at, record) in records.into_iter().enumerate() {
            match (intake.row_by(record, deadline).await?, unfit) {
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
                let is_in_order = rows.iter().any(|row| intake.is_in_order(row));
                replies.push(self.hand_in(std::mem::take(&mut rows), std::mem::take(&mut size_bytes)).await?);
                // Two batches are written at once: without this wait, the next one could be stored first.
                if is_in_order {
                    place(replies.drain(..), &places, &mut placed, &mut receipts).await?;
                }
            }
            places.push(receipts.len());
            receipts.push(None);
            rows.push(row);
            size_bytes += row_bytes;
        }
        if !rows.is_empty() {
            replies.push(self.hand_in(rows, size_bytes).await?);
        }
        place(replies.into_iter(), &places, &mut placed, &mut receipts).await?;
        let receipts: Vec<Receipt> = receipts.into_iter().flatten().collect();
        match unfit {
            Unfit::Refuse => refuse_quarantined(&receipts)?,
            Unfit::Quarantine => {}
        }
        Ok(receipts)
    }

    /// Queues rows as one job, when there is room for them. Dropping the future before that queues nothing.
    async fn hand_in(&self, rows: Vec<Row>, size_bytes: usize) -> Result<oneshot::Receiver<Reply>> {
        let room = [self.rows.take(rows.len()).await?, self.kibibytes.take(size_bytes.div_ceil(1024)).await?];
        let (reply, replied) = oneshot::channel();
        let job = Job { rows, size_bytes, reply, room };
        // A job has at least one row, and it holds room for its rows, so there are never more jobs than the channel
        // holds.
        self.jobs.try_send(job).map_err(|_| Error::stopped("the inbox has stopped accepting"))?;
        Ok(replied)
    }
}

/// Waits for the replies to jobs, and puts their receipts into the next places.
async fn place(
    replies: impl Iterator<Item = oneshot::Receiver<Reply>>,
    places: &[usize],
    placed: &mut usize,
    receipts: &mut [Option<Receipt>],
) -> Result<()> {
    for reply in replies {
        let stopped = |_| Error::stopped("the task that stores the records has ended: some may have been accepted");
        let Reply { written, rows } = reply.await.map_err(stopped)?;
        drop(rows);
        for (receipt, &at) in written?.into_iter().zip(&places[*placed..]) {
            receipts[at] = Some(receipt);
            *placed += 1;
        }
    }
    Ok(())
}

/// The error for a record that cannot become a message. `at` counts from 0.
pub(super) fn refused(at: usize, quarantined: &Quarantined) -> Error {
    let Quarantined { record, reason, detail } = quarantined;
    let detail = detail.as_ref().map(|detail| format!(" ({detail})")).unwrap_or_default();
    let topic = sanitize::text(&record.topic, TOPIC_CHARS_SHOWN);
    Error::refused(format!("cannot accept record {} of topic {topic}: {reason}{detail}; nothing was stored", at + 1))
}

/// Returns an error if a record is in quarantine. Some records turn out to be bad only when they are written: their
/// identity belongs to another payload, or the database refuses them.
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

/// The collecting task: takes jobs from the queue and writes them in batches.
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
        // Waits while two batches are being written; the queue fills meanwhile, and the next batch is larger. The
        // semaphore is never closed.
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
        // Not joined: the permit bounds these tasks, and the callers wait for their replies.
        drop(tokio::spawn(async move {
            let written = AssertUnwindSafe(write_jobs(&intake, jobs)).catch_unwind().await;
            if let Err(panic) = written {
                events::accept_failed(&panic_text(panic));
            }
            drop(permit);
        }));
    }
}

/// Writes the jobs' rows as one batch and sends each caller its receipts.
async fn write_jobs<B: Backend>(intake: &Arc<Intake<B>>, jobs: Vec<Job>) {
    let mut callers = Vec::with_capacity(jobs.len());
    let mut rows = Vec::new();
    for job in jobs {
        callers.push((job.rows.len(), job.reply, job.room));
        // The first job's vector is reused: usually there is one job, or the first is the largest.
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
        // Fails when the caller has dropped its future: then no answer is needed.
        let _ = reply.send(Reply { written, rows });
    }
}
