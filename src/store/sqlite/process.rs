//! Claim, settle, renew: the statements of the processor, each bounded by its batch and fenced by the attempt.
//!
//! A claim costs what its batch costs, whatever lies beside it: one walk of the claim index per handler, in its order, an update by key
//! for each row. A settlement without the current attempt changes nothing.

use std::time::{Duration, Instant};

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::clock::{self, micros};
use super::errors::database;
use super::ordered;
use super::rate::Rate;
use super::statement::{only_row, statements};
use crate::store::rows::{ClaimRow, claims};
use crate::store::seam::{ClaimId, ClaimRequest, Claimed, Claims, LookFrom, Lost, Renewal, Settlement, Settler, Stamp};
use crate::store::written::Written;
use crate::types::{Outcome, Result};

/// The fence: a claim that is not current changes nothing.
macro_rules! fence {
    () => {
        " WHERE message_seq = :message_seq AND handler_id = :handler_id AND attempts = :attempt AND locked_until IS NOT NULL
            AND finished_at IS NULL"
    };
}

/// What a claim returns of a delivery. A corrected payload is read only where there is one.
macro_rules! claim_columns {
    () => {
        "
        SELECT d.message_seq, d.handler_id, d.attempts + 1, d.errors,
               d.crashes + CASE WHEN d.locked_until IS NULL OR d.crashes = 2147483647 OR d.locked_by = :processor THEN 0
                                WHEN (SELECT p.alive_until > :now FROM inbox_processor p WHERE p.id = d.locked_by) THEN 0
                                ELSE 1 END,
               d.troubles, CASE WHEN :with_ages AND d.replays = 0 THEN (:now - m.received_at) / 1000 END, d.due_at, m.message_id, m.source, m.topic, m.kafka_partition, m.kafka_offset, m.recorded_at, m.record_key, m.headers,
               CASE WHEN d.is_corrected THEN (SELECT k.payload FROM inbox_correction k
                                              WHERE k.message_seq = d.message_seq AND k.handler_id = d.handler_id
                                              ORDER BY k.audit_id DESC LIMIT 1)
                    ELSE m.payload END, d.is_corrected"
    };
}
pub(super) use claim_columns;

statements! {
    /// What is due of a handler, unless it is paused, with the crashes it has when it is claimed: a lock that ran out without being given
    /// back means that its process died, unless the process is known to be alive, then it is only late. A row whose attempt cannot grow
    /// any more could not be fenced and is left alone.
    Due(concat!(claim_columns!(), "
        FROM inbox_delivery d INDEXED BY inbox_delivery_due
        LEFT JOIN inbox_message m ON m.seq = d.message_seq
        WHERE d.handler_id = :handler_id AND d.finished_at IS NULL AND d.due_at >= :floor AND d.due_at <= :now
          AND CASE WHEN :with_suspects THEN d.locked_until IS NULL OR d.locked_until <= :now
                   ELSE d.locked_until IS NULL AND d.crashes < :solo_from AND d.troubles < :solo_from_troubles END
          AND d.attempts < 2147483647
          AND (SELECT h.paused_at IS NULL AND (:is_probe OR h.breaker_opened_at IS NULL) AND (:is_rated OR h.rate_interval_us IS NULL) FROM inbox_handler h WHERE h.id = :handler_id)
        ORDER BY d.due_at, d.message_seq
        LIMIT :limit"))
    -> ClaimRow<i64> {
        processor: i32, now: i64, handler_id: i16, floor: i64, with_suspects: bool, solo_from: i32, solo_from_troubles: i32,
        with_ages: bool, is_probe: bool, is_rated: bool, limit: i32,
    }

    Lock("
        UPDATE inbox_delivery SET locked_until = :locked_until, locked_by = :processor, attempts = :attempt, crashes = :crashes
        WHERE message_seq = :message_seq AND handler_id = :handler_id")
    { locked_until: i64, processor: i32, attempt: i32, crashes: i32, message_seq: i64, handler_id: i16 }

    /// The common case, kept narrow; also the settlement of a transactional handler.
    SettleDone(concat!("
        UPDATE inbox_delivery
        SET finished_at = :now, status = 2, locked_until = NULL, locked_by = NULL, crashes = 0", fence!()))
    { now: i64, message_seq: i64, handler_id: i16, attempt: i32 }

    /// Everything that is not simply done.
    SettleOther<'a>(concat!("
        UPDATE inbox_delivery
        SET due_at = coalesce(:due_at, due_at), finished_at = :finished_at, status = :status, errors = min(errors + :charge, 2147483647),
            crashes = CASE WHEN :keeps_crashes THEN crashes ELSE 0 END, troubles = coalesce(:troubles, troubles), locked_until = NULL, locked_by = NULL, reason = :reason,
            passed = CASE WHEN :status = 3 AND order_hash IS NOT NULL
                          THEN (SELECT 1 FROM inbox_handler h WHERE h.id = inbox_delivery.handler_id AND h.passes_poisoned) END,
            last_error = coalesce(:error, last_error)", fence!())) {
        due_at: Option<i64>, finished_at: Option<i64>, status: i16, charge: i32, keeps_crashes: bool, troubles: Option<i32>,
        reason: Option<&'a str>, error: Option<&'a str>, message_seq: i64, handler_id: i16, attempt: i32,
    }

    /// How an attempt failed, over what stood in its place: nothing has to be deleted to keep the number of rows bounded.
    NoteFailure<'a>("
        INSERT INTO inbox_attempt (message_seq, handler_id, place, attempt, failed_at, why, error)
        VALUES (:message_seq, :handler_id, :place, :attempt, :now, :why, :error)
        ON CONFLICT (message_seq, handler_id, place)
        DO UPDATE SET attempt = excluded.attempt, failed_at = excluded.failed_at, why = excluded.why, error = excluded.error")
    { message_seq: i64, handler_id: i16, place: i16, attempt: i32, now: i64, why: &'a str, error: Option<&'a str> }

    /// Whether a settlement took effect in an earlier try whose answer was lost: its attempt, unlocked by nobody else, with the status it set.
    HasTakenEffect("
        SELECT count(*) > 0 FROM inbox_delivery
        WHERE message_seq = :message_seq AND handler_id = :handler_id AND attempts = :attempt AND locked_until IS NULL
          AND locked_by IS NULL AND status = :status")
    -> bool { message_seq: i64, handler_id: i16, attempt: i32, status: i16 }

    Renew(concat!("
        UPDATE inbox_delivery SET locked_until = :locked_until", fence!()))
    { locked_until: i64, message_seq: i64, handler_id: i16, attempt: i32 }

    /// Fenced by the processor as well: attempt 1 may by now be another's.
    ReleaseHandedOver("
        UPDATE inbox_delivery SET locked_until = NULL, locked_by = NULL
        WHERE message_seq = :message_seq AND handler_id = :handler_id AND attempts = 1 AND locked_by = :processor
          AND locked_until IS NOT NULL AND finished_at IS NULL") { message_seq: i64, handler_id: i16, processor: i32 }
}

pub(super) fn claim(conn: &mut SqliteConnection, sent_at: Instant, request: &ClaimRequest) -> Result<Claims> {
    let cannot = || database("cannot claim deliveries");
    let now = clock::now(conn).map_err(cannot())?;
    let locked_until = now + micros(request.lease);
    let (mut deliveries, mut look_again_in) = (Vec::new(), None);
    for ask in &request.asks {
        let rate = if ask.is_rated { Rate::of(conn, ask.rate_id, now).map_err(cannot())? } else { None };
        let due = Due {
            processor: request.processor,
            now,
            handler_id: ask.handler_id,
            floor: match ask.from {
                LookFrom::Beginning => i64::MIN,
                LookFrom::Below { floor, depth } => floor.map_or(now, |Stamp(floor)| floor) - micros(depth),
            },
            with_suspects: request.scope.has_suspects(),
            solo_from: request.solo_from,
            solo_from_troubles: request.solo_from_troubles,
            with_ages: request.with_ages,
            is_probe: ask.is_probe,
            is_rated: ask.is_rated,
            limit: rate.as_ref().map_or(ask.limit, |rate| rate.allowed().min(ask.limit)),
        };
        let mut due = claims(due.load::<ClaimRow<i64>>(conn).map_err(cannot())?);
        if request.ordered_ids.contains(&ask.handler_id) {
            due = ordered::in_turn(conn, request, due, now).map_err(cannot())?;
        }
        for Claimed { claim: ClaimId { message_seq, handler_id, attempt }, crashes, .. } in &due {
            let (message_seq, handler_id, attempt, crashes) = (*message_seq, *handler_id, *attempt, *crashes);
            let lock = Lock { locked_until, processor: request.processor, attempt, crashes, message_seq, handler_id };
            lock.execute(conn).map_err(cannot())?;
        }
        if let Some(rate) = rate {
            rate.take(conn, due.len()).map_err(cannot())?;
            let is_less = due.len() < ask.limit.unsigned_abs() as usize;
            look_again_in = rate.look_again_in(due.len()).filter(|_| is_less).into_iter().chain(look_again_in).min();
        }
        deliveries.extend(due);
    }
    Ok(Claims { sent_at, deliveries, failed: Vec::new(), look_again_in })
}

pub(super) fn settle(conn: &mut SqliteConnection, by: Settler, settlements: &[Settlement]) -> Result<Vec<Lost>> {
    let cannot = || database(format!("cannot settle {} deliveries", settlements.len()));
    let now = clock::now(conn).map_err(cannot())?;
    let mut lost = Vec::new();
    for Settlement { claim, outcome } in settlements {
        let settled = match outcome {
            Outcome::Done => done(conn, *claim, now),
            other => not_done(conn, by, *claim, &Written::from(other), now),
        };
        if settled.map_err(cannot())? == 0 && !has_taken_effect(conn, *claim, outcome).map_err(cannot())? {
            // No handler settles itself here.
            lost.push(Lost { claim: *claim, is_done: false });
        }
    }
    Ok(lost)
}

/// Settles as anything else, with how the attempt failed; 0 when the claim is not current.
fn not_done(
    conn: &mut SqliteConnection,
    by: Settler,
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

/// Settles as done; 0 when the claim is not current.
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
        released.map_err(database("cannot give back deliveries that were handed over"))?;
    }
    Ok(())
}

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
        troubles: written.troubles,
        reason: written.reason,
        error: written.error,
        message_seq: claim.message_seq,
        handler_id: claim.handler_id,
        attempt: claim.attempt,
    }
}

fn has_taken_effect(conn: &mut SqliteConnection, claim: ClaimId, outcome: &Outcome) -> QueryResult<bool> {
    let ClaimId { message_seq, handler_id, attempt } = claim;
    let status = Written::from(outcome).status;
    let found = HasTakenEffect { message_seq, handler_id, attempt, status }.load(conn);
    found.and_then(only_row)
}
