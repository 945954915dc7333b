//! Claim, settle, renew: the statements of the processor, each bounded by its batch and fenced by the attempt.
//!
//! The cost of a claim depends on its batch, not on the other rows: one scan of the claim index per handler, in its
//! order, and an update by key for each row. A settlement without the current attempt changes nothing.

use std::time::{Duration, Instant};

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::clock::{self, micros};
use super::errors::database;
use super::fair::{self, Turn};
use super::ordered;
use super::rate::Rate;
use super::statement::{only_row, statements};
use crate::store::rows::{ClaimRow, CorrectedRow, PayloadRow, claims};
use crate::store::seam::{
    Ask, ClaimId, ClaimRequest, Claimed, Claims, Lost, Payloads, Renewal, ScanFrom, Settlement, Settler, Stamp, Turns,
    Withheld,
};
use crate::store::written::Written;
use crate::types::{Outcome, Result};

/// The fence: a claim that is not current changes nothing.
macro_rules! fence {
    () => {
        " WHERE message_seq = :message_seq AND handler_id = :handler_id AND attempts = :attempt AND locked_until IS NOT NULL
            AND finished_at IS NULL"
    };
}

/// The columns that a claim returns of a delivery. A large payload, of a message or corrected, is not read.
macro_rules! claim_columns {
    () => {
        "
        SELECT d.message_seq, d.handler_id, d.attempts + 1, d.errors,
               d.crashes + CASE WHEN d.locked_until IS NULL OR d.crashes = 2147483647 OR d.locked_by = :processor THEN 0
                                WHEN (SELECT p.alive_until > :now FROM inbox_processor p WHERE p.id = d.locked_by) THEN 0
                                ELSE 1 END,
               d.store_errors, CASE WHEN :with_ages AND d.replays = 0 THEN (:now - m.received_at) / 1000 END, d.due_at, m.message_id, m.source, m.topic, m.kafka_partition, m.kafka_offset, m.recorded_at, m.record_key, m.headers,
               CASE WHEN d.is_corrected THEN (SELECT CASE WHEN octet_length(k.payload) <= :payload_bytes_max THEN k.payload END FROM inbox_correction k
                                              WHERE k.message_seq = d.message_seq AND k.handler_id = d.handler_id
                                              ORDER BY k.audit_id DESC LIMIT 1)
                    WHEN octet_length(m.payload) <= :payload_bytes_max THEN m.payload END, d.is_corrected,
               CASE WHEN d.is_corrected THEN (SELECT CASE WHEN octet_length(k.payload) > :payload_bytes_max THEN octet_length(k.payload) END FROM inbox_correction k
                                              WHERE k.message_seq = d.message_seq AND k.handler_id = d.handler_id
                                              ORDER BY k.audit_id DESC LIMIT 1)
                    WHEN octet_length(m.payload) > :payload_bytes_max THEN octet_length(m.payload) END"
    };
}
pub(super) use claim_columns;

statements! {
    /// The due deliveries of a handler, unless it is paused or its breaker is open, with their crashes including this
    /// claim: a claim that expired without being released means that its process crashed, unless the process is known
    /// to be alive: then it is only late. A row whose attempt cannot grow could not be fenced, and is not claimed.
    Due(concat!(claim_columns!(), "
        FROM inbox_delivery d INDEXED BY inbox_delivery_due
        LEFT JOIN inbox_message m ON m.seq = d.message_seq
        WHERE d.handler_id = :handler_id AND d.finished_at IS NULL AND d.due_at >= :floor AND d.due_at <= :now
          AND CASE WHEN :with_suspects THEN d.locked_until IS NULL OR d.locked_until <= :now
                   ELSE d.locked_until IS NULL AND d.crashes < :suspect_from_crashes AND d.store_errors < :suspect_from_store_errors END
          AND d.attempts < 2147483647
          AND (SELECT h.paused_at IS NULL AND (:is_probe OR h.breaker_opened_at IS NULL) AND (:is_rated OR h.rate_interval_us IS NULL) FROM inbox_handler h WHERE h.id = :handler_id)
        ORDER BY d.due_at, d.message_seq
        LIMIT :limit"))
    -> ClaimRow<i64> {
        processor: i32, now: i64, handler_id: i16, floor: i64, with_suspects: bool, suspect_from_crashes: i32, suspect_from_store_errors: i32,
        with_ages: bool, payload_bytes_max: i32, is_probe: bool, is_rated: bool, limit: i32,
    }

    /// A payload that was withheld from a claim.
    Payload("SELECT seq, payload FROM inbox_message WHERE seq = :message_seq AND payload IS NOT NULL")
    -> PayloadRow { message_seq: i64 }

    /// The newest corrected payload of a delivery, if it was withheld from a claim.
    Corrected("
        SELECT message_seq, handler_id, payload FROM inbox_correction
        WHERE message_seq = :message_seq AND handler_id = :handler_id ORDER BY audit_id DESC LIMIT 1")
    -> CorrectedRow { message_seq: i64, handler_id: i16 }

    /// Writes a claim. The attempt and the crashes are those that the query before it has computed.
    Lock("
        UPDATE inbox_delivery SET locked_until = :locked_until, locked_by = :processor, attempts = :attempt, crashes = :crashes
        WHERE message_seq = :message_seq AND handler_id = :handler_id")
    { locked_until: i64, processor: i32, attempt: i32, crashes: i32, message_seq: i64, handler_id: i16 }

    /// The common case, with few columns; also the settlement of a transactional handler.
    SettleDone(concat!("
        UPDATE inbox_delivery
        SET finished_at = :now, status = 2, locked_until = NULL, locked_by = NULL, crashes = 0", fence!()))
    { now: i64, message_seq: i64, handler_id: i16, attempt: i32 }

    /// Every other outcome than done.
    SettleOther<'a>(concat!("
        UPDATE inbox_delivery
        SET due_at = coalesce(:due_at, due_at), finished_at = :finished_at, status = :status, errors = min(errors + :charge, 2147483647),
            crashes = CASE WHEN :keeps_crashes THEN crashes ELSE 0 END, store_errors = coalesce(:store_errors, store_errors), locked_until = NULL, locked_by = NULL, reason = :reason,
            passed = CASE WHEN :status = 3 AND order_hash IS NOT NULL
                          THEN (SELECT 1 FROM inbox_handler h WHERE h.id = inbox_delivery.handler_id AND h.passes_poisoned) END,
            last_error = coalesce(:error, last_error)", fence!())) {
        due_at: Option<i64>, finished_at: Option<i64>, status: i16, charge: i32, keeps_crashes: bool, store_errors: Option<i32>,
        reason: Option<&'a str>, error: Option<&'a str>, message_seq: i64, handler_id: i16, attempt: i32,
    }

    /// Records how an attempt failed; replaces the failure that used this place, so that no row must be deleted to
    /// bound their number.
    NoteFailure<'a>("
        INSERT INTO inbox_attempt (message_seq, handler_id, place, attempt, failed_at, why, error)
        VALUES (:message_seq, :handler_id, :place, :attempt, :now, :why, :error)
        ON CONFLICT (message_seq, handler_id, place)
        DO UPDATE SET attempt = excluded.attempt, failed_at = excluded.failed_at, why = excluded.why, error = excluded.error")
    { message_seq: i64, handler_id: i16, place: i16, attempt: i32, now: i64, why: &'a str, error: Option<&'a str> }

    /// Whether a settlement took effect in an earlier try whose reply was lost: the row has its attempt, is not
    /// claimed, and has the status that it set.
    HasTakenEffect("
        SELECT count(*) > 0 FROM inbox_delivery
        WHERE message_seq = :message_seq AND handler_id = :handler_id AND attempts = :attempt AND locked_until IS NULL
          AND locked_by IS NULL AND status = :status")
    -> bool { message_seq: i64, handler_id: i16, attempt: i32, status: i16 }

    Renew(concat!("
        UPDATE inbox_delivery SET locked_until = :locked_until", fence!()))
    { locked_until: i64, message_seq: i64, handler_id: i16, attempt: i32 }

    /// Fenced by the processor as well: attempt 1 may belong to another one by now.
    ReleaseHandedOver("
        UPDATE inbox_delivery SET locked_until = NULL, locked_by = NULL
        WHERE message_seq = :message_seq AND handler_id = :handler_id AND attempts = 1 AND locked_by = :processor
          AND locked_until IS NOT NULL AND finished_at IS NULL") { message_seq: i64, handler_id: i16, processor: i32 }
}

pub(super) fn payloads(conn: &mut SqliteConnection, withheld: &Withheld) -> Result<Payloads> {
    let cannot = || database("cannot load payloads");
    let mut payloads = Payloads::default();
    for &message_seq in &withheld.message_seqs {
        let rows = Payload { message_seq }.load::<PayloadRow>(conn).map_err(cannot())?;
        payloads.of_messages.extend(rows.into_iter().map(PayloadRow::into_pair));
    }
    for &(message_seq, handler_id) in &withheld.corrected {
        let rows = Corrected { message_seq, handler_id }.load::<CorrectedRow>(conn).map_err(cannot())?;
        payloads.corrected.extend(rows.into_iter().map(CorrectedRow::into_pair));
    }
    Ok(payloads)
}

/// Claims for one handler after the other, in one transaction. So an error fails the whole claim, and `failed` is
/// empty.
pub(super) fn claim(conn: &mut SqliteConnection, sent_at: Instant, request: &ClaimRequest) -> Result<Claims> {
    let cannot = || database("cannot claim deliveries");
    let now = clock::now(conn).map_err(cannot())?;
    let (mut deliveries, mut turns, mut scan_again_in) = (Vec::new(), Vec::new(), None);
    for ask in &request.asks {
        let rate = match ask.rate.limit_id() {
            Some(id) => Rate::of(conn, id, now).map_err(cannot())?,
            None => None,
        };
        let limit = rate.as_ref().map_or(ask.limit, |rate| rate.allowed().min(ask.limit));
        let allowed = Ask { limit, ..*ask };
        let claimed = match ask.after {
            None => of_oldest(conn, request, allowed, now).map_err(cannot())?,
            Some(_) => {
                let (claimed, stand) = of_tenants(conn, request, allowed, now).map_err(cannot())?;
                turns.push(stand);
                claimed
            }
        };
        if let Some(rate) = rate {
            rate.take(conn, claimed.len()).map_err(cannot())?;
            let is_less = claimed.len() < ask.limit.unsigned_abs() as usize;
            scan_again_in =
                rate.scan_again_in(claimed.len()).filter(|_| is_less).into_iter().chain(scan_again_in).min();
        }
        deliveries.extend(claimed);
    }
    Ok(Claims { sent_at, deliveries, failed: Vec::new(), turns, scan_again_in })
}

/// Claims the deliveries that have been due longest.
fn of_oldest(conn: &mut SqliteConnection, request: &ClaimRequest, ask: Ask, now: i64) -> QueryResult<Vec<Claimed>> {
    let due = Due {
        processor: request.processor,
        now,
        handler_id: ask.handler_id,
        floor: floor(ask, now),
        with_suspects: request.scope.has_suspects(),
        suspect_from_crashes: request.suspect_from_crashes,
        suspect_from_store_errors: request.suspect_from_store_errors,
        with_ages: request.with_ages,
        payload_bytes_max: request.payload_bytes_max,
        is_probe: ask.is_probe,
        is_rated: ask.rate.is_rated(),
        limit: ask.limit,
    };
    let mut due = claims(due.load::<ClaimRow<i64>>(conn)?);
    if request.ordered_ids.contains(&ask.handler_id) {
        due = ordered::in_turn(conn, request, due, now)?;
    }
    lock(conn, request, &due, now)?;
    Ok(due)
}

/// Claims the share of each tenant, and the share of deliveries that were stored before the handler was fair.
fn of_tenants(
    conn: &mut SqliteConnection,
    request: &ClaimRequest,
    ask: Ask,
    now: i64,
) -> QueryResult<(Vec<Claimed>, Turns)> {
    let Turn { scanned, shares, mut due } = fair::turn(conn, request, ask, floor(ask, now), now)?;
    lock(conn, request, &due, now)?;
    let stand = shares.turns(&scanned, due.len(), ask.rate.is_rated());
    if shares.unmarked > 0 {
        due.extend(of_oldest(conn, request, Ask { limit: shares.unmarked, ..ask }, now)?);
    }
    Ok((due, stand))
}

/// Claims the deliveries that were found. They are still free: there is no other writer.
fn lock(conn: &mut SqliteConnection, request: &ClaimRequest, due: &[Claimed], now: i64) -> QueryResult<()> {
    let (processor, locked_until) = (request.processor, now + micros(request.lease));
    for &Claimed { claim: ClaimId { message_seq, handler_id, attempt }, crashes, .. } in due {
        Lock { locked_until, processor, attempt, crashes, message_seq, handler_id }.execute(conn)?;
    }
    Ok(())
}

/// Where the scan begins.
fn floor(ask: Ask, now: i64) -> i64 {
    match ask.from {
        ScanFrom::Beginning => i64::MIN,
        ScanFrom::Below { floor, depth } => floor.map_or(now, |Stamp(floor)| floor) - micros(depth),
    }
}

/// Writes all outcomes in one transaction.
pub(super) fn settle(conn: &mut SqliteConnection, by: &Settler, settlements: &[Settlement]) -> Result<Vec<Lost>> {
    let cannot = || database(format!("cannot settle {} deliveries", settlements.len()));
    let now = clock::now(conn).map_err(cannot())?;
    let mut lost = Vec::new();
    for Settlement { claim, outcome } in settlements {
        let settled = match outcome {
            Outcome::Done => done(conn, *claim, now),
            other => not_done(conn, by, *claim, &Written::from(other), now),
        };
        if settled.map_err(cannot())? == 0 && !has_taken_effect(conn, *claim, outcome).map_err(cannot())? {
            // On SQLite no handler settles its own delivery.
            lost.push(Lost { claim: *claim, is_done: false });
        }
    }
    Ok(lost)
}

/// Settles with another outcome than done, and records how the attempt failed. Returns 0 if the claim is not current.
fn not_done(
    conn: &mut SqliteConnection,
    by: &Settler,
    claim: ClaimId,
    written: &Written<'_>,
    now: i64,
) -> QueryResult<usize> {
    let settled = settle_other(claim, written, now).execute(conn)?;
    if let Some(why) = written.why.filter(|_| settled > 0) {
        let ClaimId { message_seq, handler_id, attempt } = claim;
        let place = by.place(attempt);
        NoteFailure { message_seq, handler_id, place, attempt, now, why, error: written.error }.execute(conn)?;
    }
    Ok(settled)
}

/// Settles as done. Returns 0 if the claim is not current.
pub(super) fn done(conn: &mut SqliteConnection, claim: ClaimId, now: i64) -> QueryResult<usize> {
    let ClaimId { message_seq, handler_id, attempt } = claim;
    SettleDone { now, message_seq, handler_id, attempt }.execute(conn)
}

pub(super) fn release_handed_over(
    conn: &mut SqliteConnection,
    deliveries: &[(i64, i16)],
    processor: i32,
) -> Result<()> {
    for &(message_seq, handler_id) in deliveries {
        let released = ReleaseHandedOver { message_seq, handler_id, processor }.execute(conn);
        released.map_err(database("cannot release handed-over deliveries"))?;
    }
    Ok(())
}

/// Renews claims, each with its own lease: recorded renewals may have different ones.
pub(super) fn renew(conn: &mut SqliteConnection, sent_at: Instant, claims: &[(ClaimId, Duration)]) -> Result<Renewal> {
    let cannot = || database(format!("cannot renew {} claims", claims.len()));
    let now = clock::now(conn).map_err(cannot())?;
    let mut renewal = Renewal { sent_at, renewed: Vec::new(), lost: Vec::new() };
    for &(claim, lease) in claims {
        let ClaimId { message_seq, handler_id, attempt } = claim;
        let renew = Renew { locked_until: now + micros(lease), message_seq, handler_id, attempt };
        let list = if renew.execute(conn).map_err(cannot())? > 0 { &mut renewal.renewed } else { &mut renewal.lost };
        list.push(claim);
    }
    Ok(renewal)
}

fn settle_other<'a>(claim: ClaimId, written: &Written<'a>, now: i64) -> SettleOther<'a> {
    SettleOther {
        due_at: written.delay.map(|delay| now + micros(delay)),
        finished_at: written.is_finished().then_some(now),
        status: written.status,
        charge: i32::from(written.is_charged),
        keeps_crashes: written.keeps_crashes,
        store_errors: written.store_errors,
        reason: written.reason,
        error: written.error,
        message_seq: claim.message_seq,
        handler_id: claim.handler_id,
        attempt: claim.attempt,
    }
}

/// Whether this settlement was written before, in a call whose result the caller did not get.
fn has_taken_effect(conn: &mut SqliteConnection, claim: ClaimId, outcome: &Outcome) -> QueryResult<bool> {
    let ClaimId { message_seq, handler_id, attempt } = claim;
    let status = Written::from(outcome).status;
    let found = HasTakenEffect { message_seq, handler_id, attempt, status }.load(conn);
    found.and_then(only_row)
}
