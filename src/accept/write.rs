//! Gets a batch into the store, whatever the store and the data do.
//!
//! Database away: the same batch again, with pauses, as long as patience lasts (for Kafka: for ever). Data that the database refuses: the
//! batch is halved until the record is found, and that one is quarantined; the others are accepted. Deliveries whose handlers have a free slot are
//! inserted as claimed and started from memory.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use super::hand_over::{HandOver, Reservations};
use super::intake::Intake;
#[cfg(feature = "kafka")]
use super::quarantine_run;
use crate::handler::{Subscription, UnreadableDelay};
use crate::store::Backend;
use crate::store::ledger::{LedgerEntry, LedgerMove};
use crate::store::seam::{AcceptBatch, Accepted, Answers, Due, Few, HandlerIds, NewDelivery, NewMessage, Quarantined};
use crate::telemetry::events;
use crate::types::{Backoff, Error, Kind, Receipt, Record, Result, StoredMessage};

/// Tries before a batch that is refused for a reason diesel cannot name is halved: deadlocks and time-outs pass by then.
const REFUSALS_MAX: usize = 3;

/// A record on its way into the store.
pub(crate) enum Row {
    Message { message: Arc<StoredMessage>, payload_hash: [u8; 16], wanted_by: Few<usize> },
    Quarantine(Box<Quarantined>),
}

/// A batch, or a part of it with the ledger if it reaches the end.
#[derive(Clone, Copy)]
pub(crate) struct RowBatch<'a> {
    pub(crate) rows: &'a [Row],
    pub(crate) ledger: &'a [LedgerEntry],
    /// An earlier try may have stored it, with deliveries as claimed.
    pub(crate) is_in_doubt: bool,
}

impl<'a> RowBatch<'a> {
    /// Parts are written in order, so when the one that reaches the end is there, all are.
    fn part(&self, part: Range<usize>) -> RowBatch<'a> {
        let ledger = if part.end == self.rows.len() { self.ledger } else { &[] };
        RowBatch { rows: &self.rows[part], ledger, is_in_doubt: self.is_in_doubt }
    }
}

/// What became of a batch, in its order.
#[derive(Default)]
pub(crate) struct WrittenBatch {
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
enum WriteTrouble {
    /// The database refuses these rows; smaller parts will tell which.
    Refused(Error),
    /// Patience is at an end.
    GaveUp(Error),
}

/// Writes the rows; one receipt each, in order. The ledger moves with the last of them.
pub(crate) async fn write<B: Backend>(
    intake: &Arc<Intake<B>>,
    batch: RowBatch<'_>,
    patience: Patience,
) -> Result<WrittenBatch> {
    #[cfg(feature = "kafka")]
    if patience == Patience::ForEver {
        quarantine_run::refuse_while_stopped(intake).await?;
    }
    let mut receipts: Vec<Receipt> = Vec::with_capacity(batch.rows.len());
    let mut ledger = Vec::new();
    let whole = 0..batch.rows.len();
    let mut parts: Vec<Range<usize>> = vec![whole];
    let mut hand_over = if batch.is_in_doubt { HandOvers::InDoubt } else { HandOvers::Allowed };
    while let Some(range) = parts.pop() {
        let part = batch.part(range.clone());
        let written = match write_part(intake, part, patience, &mut hand_over).await {
            Ok(written) => written,
            Err(WriteTrouble::GaveUp(error)) => return Err(error),
            Err(WriteTrouble::Refused(error)) if range.len() <= 1 => {
                quarantine(intake, part, &error, patience, &mut hand_over).await?
            }
            Err(WriteTrouble::Refused(_)) => {
                let middle = range.start + range.len() / 2;
                // The last one pushed is written first: the order of the batch is kept.
                parts.extend([middle..range.end, range.start..middle]);
                continue;
            }
        };
        // The parts come in the order of the batch.
        debug_assert_eq!((receipts.len(), written.receipts.len()), (range.start, range.len()));
        receipts.extend(written.receipts);
        // Only the part that reaches the end has any.
        ledger.extend(written.ledger);
    }
    if receipts.len() != batch.rows.len() {
        return Err(Error::bug(format!("{} rows were written and {} answered", batch.rows.len(), receipts.len())));
    }
    #[cfg(feature = "kafka")]
    if patience == Patience::ForEver {
        quarantine_run::note(intake, batch.rows, &receipts);
    }
    Ok(WrittenBatch { receipts, ledger })
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
    intake: &Arc<Intake<B>>,
    part: RowBatch<'_>,
    patience: Patience,
    hand_overs: &mut HandOvers,
) -> Result<WrittenBatch, WriteTrouble> {
    let rows = part.rows;
    let mut backoff = Backoff::new(intake.limits.backoff_max);
    let mut refusals = 0;
    loop {
        let hand_over = match hand_overs {
            HandOvers::Allowed => intake.hand_over(),
            HandOvers::InDoubt => None,
        };
        match try_write(intake, part, BatchTurn::Come, hand_over).await {
            Ok(None) => return Err(WriteTrouble::GaveUp(Error::bug("a batch that follows no other was told to wait"))),
            Ok(Some((written, known))) => {
                if *hand_overs == HandOvers::InDoubt {
                    release_lost_hand_overs(intake, rows, &known).await;
                }
                return Ok(written);
            }
            Err(error) => {
                *hand_overs = HandOvers::InDoubt;
                match error.kind() {
                    Kind::Connection | Kind::Passing => {}
                    Kind::Server => refusals += 1,
                    Kind::Data => return Err(WriteTrouble::Refused(error)),
                    Kind::Bug | Kind::Configuration | Kind::Schema | Kind::Refused | Kind::Stopped => {
                        return Err(WriteTrouble::GaveUp(error));
                    }
                }
                events::store_trouble("accept", &error);
                if refusals >= REFUSALS_MAX && is_blamed_on(intake, rows).await {
                    return Err(WriteTrouble::Refused(error));
                }
                if patience.is_over() {
                    return Err(WriteTrouble::GaveUp(error));
                }
            }
        }
        backoff.pause().await;
    }
}

/// Whether rows that were refused again and again may be to blame. Several: one of them might be, smaller parts will tell. A single one:
/// the database is asked, because its own trouble (a lock, a full disk) must never cost a record.
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

/// The seq of each row whose message was there already.
pub(super) type KnownSeqs = Vec<Option<i64>>;

/// Whether everything before a batch is stored, as far as this process knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BatchTurn {
    Come,
    /// The database decides.
    #[cfg(feature = "kafka")]
    Unknown,
}

/// One try. With `hand_over`, deliveries are handed over as far as their handlers are free. `None`, and nothing is written, when its turn has
/// not come.
pub(super) async fn try_write<B: Backend>(
    intake: &Arc<Intake<B>>,
    RowBatch { rows, ledger, .. }: RowBatch<'_>,
    turn: BatchTurn,
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
        is_following: turn != BatchTurn::Come,
        processor: reservations.as_ref().map(|reservations| reservations.processor()),
        lease: intake.limits.lease,
    });
    let Some(answers) = intake.store.backend.accept(&batch).await? else { return Ok(None) };
    let messages = &batch.messages;
    if answers.messages.len() != messages.len() {
        let (sent, answered) = (messages.len(), answers.messages.len());
        return Err(Error::bug(format!("{sent} messages were accepted and {answered} answered")));
    }
    let (receipts, known) = told(rows, messages, &answers);
    let new: Vec<Option<i64>> = answers.messages.iter().map(new_seq).collect();
    let is_new = new.iter().all(Option::is_some);
    let is_handing_over = reservations.is_some();
    let is_ordered = messages.iter().flat_map(|new| &new.deliveries).any(|delivery| delivery.order_hash.is_some());
    if let Some(reservations) = reservations {
        reservations.start(messages, &new, answers.sent_at);
    }
    // Deliveries that were added to known messages, are in an order, or were stored while nobody could take them over, wait to be claimed.
    if !(is_new && is_handing_over && !is_ordered)
        && let Some(hand_over) = intake.hand_over()
    {
        hand_over.wake();
    }
    Ok(Some((WrittenBatch { receipts, ledger: answers.ledger }, known)))
}

/// A receipt for each row, and the seqs of messages that were known. Tells each as an event.
fn told(rows: &[Row], messages: &[NewMessage], answers: &Answers) -> (Vec<Receipt>, KnownSeqs) {
    let mut answered = answers.messages.iter().zip(messages);
    let mut ids = answers.quarantined.iter().copied();
    let quarantined_for = |reason| (Receipt::Quarantined { reason }, None);
    let told = rows.iter().filter_map(|row| match row {
        Row::Quarantine(quarantined) => {
            events::quarantined(&quarantined.record, quarantined.reason, ids.next().flatten());
            Some(quarantined_for(quarantined.reason))
        }
        Row::Message { message, .. } => {
            // One answer a message: the caller has counted them.
            let (answer, new) = answered.next()?;
            Some((receipt(answer, message, new.deliveries.len()), known_seq(answer)))
        }
    });
    told.unzip()
}

/// The messages among the rows. Deliveries that are due at once and get a slot are marked as handed over.
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
            .zip(intake.rules.order_hashes(wanted_by, message))
            .map(|(&handler, order_hash)| {
                let due = due(&subscriptions[handler], message);
                // In an order, whether its turn has come is decided where it is claimed.
                let is_handed_over = due.is_none() && order_hash.is_none() && reserve(handler);
                NewDelivery { ids: handlers[handler].clone(), due, is_handed_over, order_hash }
            })
            .collect();
        messages.push(NewMessage { message: Arc::clone(message), payload_hash: *payload_hash, deliveries });
    }
    messages
}

/// When a handler's delivery of a message is due, if that is not at once.
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
        // New in a try without hand-overs is not claimed.
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

/// An earlier try may have stored deliveries as claimed by this process that nobody started.
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

/// Quarantines the one row that the database refuses. A record that was to be quarantined anyway and is refused even so is the
/// database's trouble, not the record's.
async fn quarantine<B: Backend>(
    intake: &Arc<Intake<B>>,
    part: RowBatch<'_>,
    error: &Error,
    patience: Patience,
    hand_overs: &mut HandOvers,
) -> Result<WrittenBatch> {
    let [Row::Message { message, .. }] = part.rows else { return Err(error.repeat()) };
    let reason = "refused by the database";
    let record = Record::from(&**message);
    let rows = [Row::Quarantine(Box::new(Quarantined { record, reason, detail: Some(format!("{error:#}")) }))];
    match write_part(intake, RowBatch { rows: &rows, ..part }, patience, hand_overs).await {
        Ok(written) => Ok(written),
        Err(WriteTrouble::Refused(error) | WriteTrouble::GaveUp(error)) => Err(error),
    }
}
