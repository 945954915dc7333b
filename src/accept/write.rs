//! Stores a batch, through database outages and bad data.
//!
//! While the database is away, the same batch is retried with backoff until `Patience` ends. When the database refuses
//! data, the batch is halved until the bad record is found: it is quarantined, and the others are accepted. Deliveries
//! whose handlers have room in this process are inserted as claimed, and start or wait in memory.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use super::batch::{PartLedger, Row, RowBatch, WrittenBatch};
use super::hand_over::{HandOver, Reservations};
use super::intake::Intake;
use super::observe::observed;
#[cfg(feature = "kafka")]
use super::quarantine_run;
use super::rules::KeyHashes;
use crate::handler::{Subscription, UnreadableDelay};
use crate::store::Backend;
use crate::store::ledger::{LedgerEntry, LedgerMove};
use crate::store::seam::{AcceptBatch, Accepted, Answers, Due, Few, HandlerIds, NewDelivery, NewMessage, Quarantined};
use crate::telemetry::{events, spans::AcceptedBy};
use crate::types::{Backoff, Error, Kind, Receipt, Record, Result, StoredMessage};

/// Tries before a batch is halved after a server error of unknown cause. Most deadlocks and timeouts are over by then.
const REFUSALS_MAX: usize = 3;

/// How long writing a batch is retried.
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
enum WriteError {
    /// The database refuses at least one of these rows; the caller splits the part to find it.
    Refused(Error),
    /// Retrying has ended, or cannot help.
    GaveUp(Error),
}

/// Writes the rows and returns one receipt for each, in order. The ledger moves with them.
pub(crate) async fn write<B: Backend>(
    intake: &Arc<Intake<B>>,
    batch: RowBatch<'_>,
    patience: Patience,
) -> Result<WrittenBatch> {
    observed(AcceptedBy::Engine, batch, write_batch(intake, batch, patience)).await
}

async fn write_batch<B: Backend>(
    intake: &Arc<Intake<B>>,
    batch: RowBatch<'_>,
    patience: Patience,
) -> Result<WrittenBatch> {
    #[cfg(feature = "kafka")]
    if patience == Patience::ForEver {
        quarantine_run::refuse_while_stopped(intake, batch.ledger).await?;
    }
    let mut receipts: Vec<Receipt> = Vec::with_capacity(batch.rows.len());
    let mut ledger = Vec::new();
    let mut positions = PartLedger::new(batch);
    let whole = 0..batch.rows.len();
    let mut parts: Vec<Range<usize>> = vec![whole];
    let mut hand_over = if batch.is_in_doubt { HandOvers::InDoubt } else { HandOvers::Allowed };
    while let Some(range) = parts.pop() {
        let entries = positions.of(&range);
        let part = RowBatch { rows: &batch.rows[range.clone()], ledger: &entries, ..batch };
        let written = match write_part(intake, part, patience, &mut hand_over).await {
            Ok(written) => written,
            Err(WriteError::GaveUp(error)) => return Err(error),
            Err(WriteError::Refused(error)) if range.len() <= 1 => {
                quarantine(intake, part, &error, patience, &mut hand_over).await?
            }
            Err(WriteError::Refused(_)) => {
                let middle = range.start + range.len() / 2;
                // The last one pushed is written first: the order of the batch is kept.
                parts.extend([middle..range.end, range.start..middle]);
                continue;
            }
        };
        let Some(written) = written else { return unwritten(batch.ledger) };
        positions.written(&entries);
        // The parts come in the order of the batch.
        debug_assert_eq!((receipts.len(), written.receipts.len()), (range.start, range.len()));
        receipts.extend(written.receipts);
        ledger = written.ledger;
    }
    if receipts.len() != batch.rows.len() {
        return Err(Error::bug(format!("{} rows got {} receipts", batch.rows.len(), receipts.len())));
    }
    #[cfg(feature = "kafka")]
    if patience == Patience::ForEver {
        quarantine_run::note(intake, batch.rows, batch.ledger, &receipts);
    }
    Ok(WrittenBatch { receipts, ledger })
}

/// The result of a batch that was not written, or of which the last parts were not, because the ledger of a partition is
/// not there: the database has lost records, or the partition is stopped. The positions of all its partitions are
/// determined again.
fn unwritten(ledger: &[LedgerEntry]) -> Result<WrittenBatch> {
    match ledger {
        [] => Err(Error::bug("the store deferred a batch without a position")),
        [_, ..] => Ok(WrittenBatch { receipts: Vec::new(), ledger: vec![LedgerMove::Unwritten; ledger.len()] }),
    }
}

/// Whether deliveries may be inserted as claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HandOvers {
    Allowed,
    /// A try has failed, and may have committed hand-overs that were never started. These are released once the rows
    /// are known to be stored, and no more are made. If the ledger is not there on the next try, their leases end.
    InDoubt,
}

/// Writes a part; retries while the database is away. Returns `None` if the ledger of a partition is not there.
async fn write_part<B: Backend>(
    intake: &Arc<Intake<B>>,
    part: RowBatch<'_>,
    patience: Patience,
    hand_overs: &mut HandOvers,
) -> Result<Option<WrittenBatch>, WriteError> {
    let rows = part.rows;
    let mut backoff = Backoff::new(intake.limits.backoff_max);
    let mut refusals = 0;
    loop {
        let hand_over = match hand_overs {
            HandOvers::Allowed => intake.hand_over(),
            HandOvers::InDoubt => None,
        };
        match try_write(intake, part, hand_over).await {
            Ok(None) => return Ok(None),
            Ok(Some((written, known))) => {
                if *hand_overs == HandOvers::InDoubt {
                    release_lost_hand_overs(intake, rows, &known).await;
                }
                return Ok(Some(written));
            }
            Err(error) => {
                *hand_overs = HandOvers::InDoubt;
                match error.kind() {
                    Kind::Connection | Kind::Passing => {}
                    Kind::Server => refusals += 1,
                    Kind::Data => return Err(WriteError::Refused(error)),
                    Kind::Bug | Kind::Configuration | Kind::Schema | Kind::Refused | Kind::Stopped => {
                        return Err(WriteError::GaveUp(error));
                    }
                }
                events::store_error("accept", &error);
                if refusals >= REFUSALS_MAX && is_blamed_on(intake, rows).await {
                    return Err(WriteError::Refused(error));
                }
                if patience.is_over() {
                    return Err(WriteError::GaveUp(error));
                }
            }
        }
        backoff.pause().await;
    }
}

/// Whether rows that were refused repeatedly may be the cause. One of several rows may be; smaller parts show which.
/// For a single row, the database is asked: a lock or a full disk must never quarantine a record.
async fn is_blamed_on<B: Backend>(intake: &Arc<Intake<B>>, rows: &[Row]) -> bool {
    match rows {
        [] | [Row::Quarantine(_)] => false,
        [Row::Message { message, payload_hash, .. }] => {
            let message =
                NewMessage { message: Arc::clone(message), payload_hash: *payload_hash, deliveries: Few::new() };
            intake.store.backend.refuses(&message).await.unwrap_or(false)
        }
        _ => true,
    }
}

/// For each row, the seq of its message if that was stored before.
pub(super) type KnownSeqs = Vec<Option<i64>>;

/// Tries once. With `hand_over`, deliveries of handlers with room are handed over. Returns `None` and writes
/// nothing if the ledger of a partition is not where the batch begins.
pub(super) async fn try_write<B: Backend>(
    intake: &Arc<Intake<B>>,
    RowBatch { rows, ledger, .. }: RowBatch<'_>,
    hand_over: Option<Arc<dyn HandOver>>,
) -> Result<Option<(WrittenBatch, KnownSeqs)>> {
    let handlers = intake.handlers().await?;
    let mut reservations = match hand_over {
        Some(hand_over) => Some(hand_over.begin().await),
        None => None,
    };
    let messages = new_messages(intake, rows, &handlers, reservations.as_deref_mut());
    let quarantined: Vec<Quarantined> = rows
        .iter()
        .filter_map(|row| match row {
            Row::Quarantine(quarantined) => Some(Quarantined::clone(quarantined)),
            Row::Message { .. } => None,
        })
        .collect();
    let batch = Arc::new(AcceptBatch {
        messages,
        quarantined,
        ledger: ledger.to_vec(),
        processor: reservations.as_ref().map(|reservations| reservations.processor()),
        lease: intake.limits.lease,
    });
    let Some(answers) = intake.store.backend.accept(&batch).await? else { return Ok(None) };
    events::batch_accepted(rows.len(), ledger.is_empty(), answers.sent_at.elapsed());
    let messages = &batch.messages;
    if answers.messages.len() != messages.len() {
        let (sent, answered) = (messages.len(), answers.messages.len());
        return Err(Error::bug(format!("{sent} messages were sent but {answered} answers came back")));
    }
    let (receipts, known) = report(rows, messages, &answers);
    let new: Vec<Option<i64>> = answers.messages.iter().map(new_seq).collect();
    let is_new = new.iter().all(Option::is_some);
    let is_handing_over = reservations.is_some();
    let takes_turns = |delivery: &NewDelivery| delivery.order_hash.is_some() || delivery.fair_hash.is_some();
    let has_turns = messages.iter().flat_map(|new| &new.deliveries).any(takes_turns);
    if let Some(reservations) = reservations {
        reservations.start(messages, &new, answers.sent_at);
    }
    // Deliveries that were added to known messages, take turns or were not handed over wait for a claim.
    if !(is_new && is_handing_over && !has_turns)
        && let Some(hand_over) = intake.hand_over()
    {
        hand_over.wake();
    }
    Ok(Some((WrittenBatch { receipts, ledger: answers.ledger }, known)))
}

/// Returns a receipt for each row and the seqs of known messages. Emits an event for each row.
fn report(rows: &[Row], messages: &[NewMessage], answers: &Answers) -> (Vec<Receipt>, KnownSeqs) {
    let mut pairs = answers.messages.iter().zip(messages);
    let mut ids = answers.quarantined.iter().copied();
    let quarantined_for = |reason| (Receipt::Quarantined { reason }, None);
    let receipts = rows.iter().filter_map(|row| match row {
        Row::Quarantine(quarantined) => {
            events::quarantined(&quarantined.record, quarantined.reason, ids.next().flatten());
            Some(quarantined_for(quarantined.reason))
        }
        Row::Message { message, .. } => {
            // There is one answer for each message: the caller has checked the count.
            let (answer, new) = pairs.next()?;
            Some((receipt(answer, message, new.deliveries.len()), known_seq(answer)))
        }
    });
    receipts.unzip()
}

/// The messages among the rows. Deliveries that are due at once and get a place are marked as handed over.
pub(super) fn new_messages<B: Backend>(
    intake: &Intake<B>,
    rows: &[Row],
    handlers: &[HandlerIds],
    mut reservations: Option<&mut (dyn Reservations + 'static)>,
) -> Vec<NewMessage> {
    let subscriptions = intake.rules.subscriptions();
    let mut messages = Vec::with_capacity(rows.len());
    for row in rows {
        let Row::Message { message, payload_hash, wanted_by } = row else { continue };
        let mut reserve = |handler| match &mut reservations {
            Some(reservations) => reservations.reserve(messages.len(), handler),
            None => false,
        };
        let deliveries = wanted_by
            .iter()
            .zip(intake.rules.key_hashes(wanted_by, message))
            .map(|(&handler, KeyHashes { order: order_hash, fair: fair_hash })| {
                let due = due(&subscriptions[handler], message);
                // Deliveries in an order, or of a tenant, are never handed over: the claim decides whose turn it is.
                let takes_turns = order_hash.is_some() || fair_hash.is_some();
                let is_handed_over = due.is_none() && !takes_turns && reserve(handler);
                NewDelivery { ids: handlers[handler].clone(), due, is_handed_over, order_hash, fair_hash }
            })
            .collect();
        messages.push(NewMessage { message: Arc::clone(message), payload_hash: *payload_hash, deliveries });
    }
    messages
}

/// When a handler's delivery of a message is due; `None` means at once.
fn due(subscription: &Subscription, message: &StoredMessage) -> Option<Due> {
    let Subscription { key, delay, .. } = subscription;
    if delay.is_none() {
        return None;
    }
    delay.due(&message.headers, SystemTime::now()).unwrap_or_else(|UnreadableDelay| {
        events::bad_delay(message, key.as_str(), delay.header.as_deref().unwrap_or_default());
        None
    })
}

fn new_seq(answer: &Accepted) -> Option<i64> {
    match answer {
        Accepted::New { seq } => Some(*seq),
        Accepted::Duplicate { .. } | Accepted::Remembered | Accepted::Conflict { .. } => None,
    }
}

fn known_seq(answer: &Accepted) -> Option<i64> {
    match answer {
        Accepted::Duplicate { seq, .. } => Some(*seq),
        // Tries after a failed one make no hand-overs, so a message that is new in them has no claimed deliveries.
        Accepted::New { .. } | Accepted::Remembered | Accepted::Conflict { .. } => None,
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
        Accepted::Conflict { quarantine_id } => {
            events::conflict(message, *quarantine_id);
            Receipt::Quarantined { reason: "conflict" }
        }
    }
}

/// Releases deliveries that an earlier try may have stored as claimed, and that were never started.
async fn release_lost_hand_overs<B: Backend>(intake: &Arc<Intake<B>>, rows: &[Row], known: &KnownSeqs) {
    let Some(hand_over) = intake.hand_over() else { return };
    let mut deliveries = Vec::new();
    for (row, seq) in rows.iter().zip(known) {
        let (Row::Message { wanted_by, .. }, Some(message_seq)) = (row, *seq) else { continue };
        deliveries.extend(wanted_by.iter().map(|&handler| (message_seq, handler)));
    }
    if !deliveries.is_empty() {
        hand_over.release_lost(deliveries).await;
    }
}

/// Quarantines the one row that the database refuses. If it refuses a row that is for the quarantine anyway, the cause
/// is the database, and not the record.
async fn quarantine<B: Backend>(
    intake: &Arc<Intake<B>>,
    part: RowBatch<'_>,
    error: &Error,
    patience: Patience,
    hand_overs: &mut HandOvers,
) -> Result<Option<WrittenBatch>> {
    let [Row::Message { message, .. }] = part.rows else { return Err(error.repeat()) };
    let reason = "refused by the database";
    let record = Record::from(&**message);
    let rows = [Row::Quarantine(Box::new(Quarantined { record, reason, detail: Some(format!("{error:#}")) }))];
    match write_part(intake, RowBatch { rows: &rows, ..part }, patience, hand_overs).await {
        Ok(written) => Ok(written),
        Err(WriteError::Refused(error) | WriteError::GaveUp(error)) => Err(error),
    }
}
