//! Gets a batch into the store, whatever the store and the data do.
//!
//! Database away: the same batch again, with pauses, as long as patience lasts (for Kafka: for ever). Data that the database refuses: the
//! batch is halved until the record is found, and that one is quarantined; the others are accepted. Deliveries whose handlers have a free slot are
//! inserted as claimed and started from memory.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::Receipt;
use crate::inbox::Shared;
use crate::process::{Engine, Slot, Start};
use crate::store::Backend;
use crate::store::seam::{AcceptBatch, Accepted, Few, LedgerEntry, LedgerMove, NewDelivery, NewMessage, Quarantined};
use crate::telemetry::events;
use crate::types::{Backoff, Error, Kind, Record, Result, StoredMessage};

/// Tries before a batch that is refused for a reason diesel cannot name is halved: deadlocks and time-outs pass by then.
const REFUSALS_MAX: usize = 3;

/// A record on its way into the store.
pub(crate) enum Row {
    Message { message: Arc<StoredMessage>, payload_hash: [u8; 16], wanted_by: Few<usize> },
    Quarantine(Box<Quarantined>),
}

/// A batch, or a part of it with the ledger if it reaches the end.
#[derive(Clone, Copy)]
pub(crate) struct Batch<'a> {
    pub(crate) rows: &'a [Row],
    pub(crate) ledger: &'a [LedgerEntry],
}

impl<'a> Batch<'a> {
    /// Parts are written in order, so when the one that reaches the end is there, all are.
    fn part(&self, part: Range<usize>) -> Batch<'a> {
        let ledger = if part.end == self.rows.len() { self.ledger } else { &[] };
        Batch { rows: &self.rows[part], ledger }
    }
}

/// What became of a batch, in its order.
#[derive(Default)]
pub(crate) struct Written {
    pub(crate) receipts: Vec<Receipt>,
    pub(crate) ledger: Vec<LedgerMove>,
}

/// How long a batch is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    Until(Instant),
    #[cfg(feature = "kafka")]
    ForEver,
}

impl Patience {
    fn is_over(self) -> bool {
        match self {
            Self::Until(deadline) => Instant::now() >= deadline,
            #[cfg(feature = "kafka")]
            Self::ForEver => false,
        }
    }
}

/// Why a part of a batch was not written.
enum Trouble {
    /// The database refuses these rows; smaller parts will tell which.
    Refused(Error),
    /// Patience is at an end.
    GaveUp(Error),
}

/// Writes the rows; one receipt each, in order. The ledger moves with the last of them.
pub(crate) async fn write<B: Backend>(
    shared: &Arc<Shared<B>>,
    batch: Batch<'_>,
    patience: Patience,
) -> Result<Written> {
    let mut receipts: Vec<Option<Receipt>> = vec![None; batch.rows.len()];
    let mut ledger = Vec::new();
    let whole = 0..batch.rows.len();
    let mut parts: Vec<Range<usize>> = vec![whole];
    let mut hand_over = HandOvers::Allowed;
    while let Some(range) = parts.pop() {
        let part = batch.part(range.clone());
        let written = match write_part(shared, part, patience, &mut hand_over).await {
            Ok(written) => written,
            Err(Trouble::GaveUp(error)) => return Err(error),
            Err(Trouble::Refused(error)) if range.len() <= 1 => {
                quarantine(shared, part, &error, patience, &mut hand_over).await?
            }
            Err(Trouble::Refused(_)) => {
                let middle = range.start + range.len() / 2;
                // The last one pushed is written first: the order of the batch is kept.
                parts.extend([middle..range.end, range.start..middle]);
                continue;
            }
        };
        for (index, receipt) in range.zip(written.receipts) {
            receipts[index] = Some(receipt);
        }
        // Only the part that reaches the end has any.
        ledger.extend(written.ledger);
    }
    Ok(Written { receipts: receipts.into_iter().flatten().collect(), ledger })
}

/// Whether deliveries may be inserted as claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HandOvers {
    Allowed,
    /// An earlier try failed, and may have committed hand-overs that nobody has started: none is made any more, and those are given
    /// back once the rows are known to be there.
    InDoubt,
}

/// Writes a part, again and again while the database is away.
async fn write_part<B: Backend>(
    shared: &Arc<Shared<B>>,
    part: Batch<'_>,
    patience: Patience,
    hand_overs: &mut HandOvers,
) -> Result<Written, Trouble> {
    let rows = part.rows;
    let mut backoff = Backoff::new(shared.limits.backoff_max);
    let mut refusals = 0;
    loop {
        let engine = match hand_overs {
            HandOvers::Allowed => shared.engine(),
            HandOvers::InDoubt => None,
        };
        match try_write(shared, part, engine).await {
            Ok((written, known)) => {
                if *hand_overs == HandOvers::InDoubt {
                    release_lost_hand_overs(shared, rows, &known).await;
                }
                return Ok(written);
            }
            Err(error) => {
                *hand_overs = HandOvers::InDoubt;
                match error.kind() {
                    Kind::Connection | Kind::Passing => {}
                    Kind::Server => refusals += 1,
                    Kind::Data => return Err(Trouble::Refused(error)),
                    Kind::Configuration | Kind::Schema | Kind::Stopped => return Err(Trouble::GaveUp(error)),
                }
                events::store_trouble("accept", &error);
                if refusals >= REFUSALS_MAX && is_blamed_on(shared, rows).await {
                    return Err(Trouble::Refused(error));
                }
                if patience.is_over() {
                    return Err(Trouble::GaveUp(error));
                }
            }
        }
        backoff.pause().await;
    }
}

/// Whether rows that were refused again and again may be to blame. Several: one of them might be, smaller parts will tell. A single one:
/// the database is asked, because its own trouble (a lock, a full disk) must never cost a record.
async fn is_blamed_on<B: Backend>(shared: &Arc<Shared<B>>, rows: &[Row]) -> bool {
    match rows {
        [] | [Row::Quarantine(_)] => false,
        [Row::Message { message, payload_hash, .. }] => {
            let message =
                NewMessage { message: Arc::clone(message), payload_hash: *payload_hash, deliveries: Few::new() };
            shared.store.backend.refuses(&message).await.unwrap_or(false)
        }
        _ => true,
    }
}

/// The seq of each row whose message was there already.
type Known = Vec<Option<i64>>;

/// One try. With an engine, deliveries are handed over as far as slots are free.
async fn try_write<B: Backend>(
    shared: &Arc<Shared<B>>,
    Batch { rows, ledger }: Batch<'_>,
    engine: Option<Arc<Engine<B>>>,
) -> Result<(Written, Known)> {
    // Held from before slots are taken until hand-overs are on the in-flight list: see release_lost_hand_overs and shutdown.
    let _gate = match &engine {
        Some(engine) => Some(engine.starting.read().await),
        None => None,
    };
    let (messages, mut slots) = new_messages(shared, rows, engine.as_deref());
    let is_claimable = |lane: usize| shared.lane(lane).is_some_and(|lane| !lane.is_paused());
    let quarantined: Vec<Quarantined> = rows
        .iter()
        .filter_map(|row| match row {
            Row::Quarantine(quarantined) => Some(Quarantined::clone(quarantined)),
            Row::Message { .. } => None,
        })
        .collect();
    let batch = AcceptBatch {
        messages: &messages,
        quarantined: &quarantined,
        ledger,
        processor: engine.as_ref().map(|engine| engine.processor),
        lease: shared.limits.lease,
    };
    let answers = shared.store.backend.accept(&batch).await?;
    let mut answered = answers.messages.iter().zip(&messages).zip(slots.drain(..));
    let mut receipts = Vec::with_capacity(rows.len());
    let mut known = Vec::with_capacity(rows.len());
    let mut leaves_work = false;
    let mut starts = Vec::new();
    for row in rows {
        match row {
            Row::Quarantine(quarantined) => {
                events::quarantined(&quarantined.record.topic, quarantined.reason);
                known.push(None);
                receipts.push(Receipt::Quarantined { reason: quarantined.reason });
            }
            Row::Message { message, wanted_by, .. } => {
                let Some(((answer, new), slots)) = answered.next() else { break };
                if let (Accepted::New { seq }, true) = (answer, engine.is_some()) {
                    // A handler that is paused has nothing to claim; when it goes on, the next poll finds what is there.
                    leaves_work |=
                        slots.iter().zip(wanted_by).any(|(slot, &lane)| slot.is_none() && is_claimable(lane));
                    let taken = slots.into_iter().flatten();
                    starts.extend(taken.map(|slot| Start::handed_over(slot, *seq, Arc::clone(message))));
                } else {
                    leaves_work = true;
                }
                known.push(known_seq(answer));
                receipts.push(receipt(answer, message, new.deliveries.len()));
            }
        }
    }
    if let Some(engine) = &engine {
        engine.start(starts, answers.sent_at);
    }
    if leaves_work && let Some(engine) = shared.engine() {
        engine.wake.notify_one();
    }
    Ok((Written { receipts, ledger: answers.ledger }, known))
}

type Slots<B> = Few<Option<Slot<B>>>;

/// The messages among the rows, and for each delivery the slot that waits for it, if there is one.
fn new_messages<B: Backend>(
    shared: &Shared<B>,
    rows: &[Row],
    engine: Option<&Engine<B>>,
) -> (Vec<NewMessage>, Vec<Slots<B>>) {
    let mut messages = Vec::with_capacity(rows.len());
    let mut all_slots = Vec::with_capacity(rows.len());
    for row in rows {
        let Row::Message { message, payload_hash, wanted_by } = row else { continue };
        let lanes = || wanted_by.iter().filter_map(|&position| shared.lane(position));
        let slots: Slots<B> = lanes().map(|lane| engine.and_then(|engine| engine.take_slot(lane))).collect();
        let deliveries = lanes()
            .zip(&slots)
            .map(|(lane, slot)| NewDelivery { ids: lane.ids.clone(), is_handed_over: slot.is_some() })
            .collect();
        messages.push(NewMessage { message: Arc::clone(message), payload_hash: *payload_hash, deliveries });
        all_slots.push(slots);
    }
    (messages, all_slots)
}

fn known_seq(answer: &Accepted) -> Option<i64> {
    match answer {
        Accepted::Duplicate { seq, .. } => Some(*seq),
        // New in a try without hand-overs is not claimed.
        Accepted::New { .. } | Accepted::Remembered | Accepted::Conflict => None,
    }
}

fn receipt(answer: &Accepted, message: &StoredMessage, deliveries: usize) -> Receipt {
    match answer {
        Accepted::New { .. } => {
            events::accepted(message, deliveries);
            Receipt::Accepted { deliveries }
        }
        Accepted::Duplicate { added, .. } => {
            events::duplicate(message, *added);
            Receipt::Duplicate { added: *added }
        }
        Accepted::Remembered => {
            events::duplicate(message, 0);
            Receipt::Duplicate { added: 0 }
        }
        Accepted::Conflict => {
            events::conflict(message);
            Receipt::Quarantined { reason: "conflict" }
        }
    }
}

/// An earlier try may have committed hand-overs that nobody started. The gate keeps out batches and claims between their commit and
/// their place on the in-flight list, so what is locked by us and not on the list is surely lost.
async fn release_lost_hand_overs<B: Backend>(shared: &Arc<Shared<B>>, rows: &[Row], known: &Known) {
    let Some(engine) = shared.engine() else { return };
    let _gate = engine.starting.write().await;
    let mut deliveries = Vec::new();
    for (row, seq) in rows.iter().zip(known) {
        let (Row::Message { wanted_by, .. }, Some(message_seq)) = (row, *seq) else { continue };
        for lane in wanted_by.iter().filter_map(|&position| shared.lane(position)) {
            let handler_id = lane.ids.current;
            if !engine.in_flight.holds(crate::store::seam::ClaimId { message_seq, handler_id, attempt: 1 }) {
                deliveries.push((message_seq, handler_id));
            }
        }
    }
    if deliveries.is_empty() {
        return;
    }
    match shared.store.backend.release_handed_over(&deliveries, engine.processor).await {
        Ok(()) => engine.wake.notify_one(),
        // The lease gives them back then.
        Err(error) => events::store_trouble("release hand-overs", &error),
    }
}

/// Quarantines the one row that the database refuses. A record that was to be quarantined anyway and is refused even so is the
/// database's trouble, not the record's.
async fn quarantine<B: Backend>(
    shared: &Arc<Shared<B>>,
    part: Batch<'_>,
    error: &Error,
    patience: Patience,
    hand_overs: &mut HandOvers,
) -> Result<Written> {
    let [Row::Message { message, .. }] = part.rows else { return Err(error.repeat()) };
    let reason = "refused by the database";
    let record = Record::from(&**message);
    let rows = [Row::Quarantine(Box::new(Quarantined { record, reason, detail: Some(error.to_string()) }))];
    match write_part(shared, Batch { rows: &rows, ledger: part.ledger }, patience, hand_overs).await {
        Ok(written) => Ok(written),
        Err(Trouble::Refused(error) | Trouble::GaveUp(error)) => Err(error),
    }
}
