//! Claim, settle, renew: the statements of the processor, each bounded by its batch and fenced by the attempt.
//!
//! A claim costs what its batch costs, whatever lies beside it: one walk of the claim index per handler, in its order, an update by key
//! for each row. A settlement without the current attempt changes nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use diesel::sql_types::{BigInt, Binary, Bool, Integer, Nullable, SmallInt, Text};
use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::clock::{self, from_stamp, micros};
use super::errors::database;
use super::statement::{only_row, statement};
use crate::store::seam::{Ask, ClaimId, ClaimScope, Claimed, Renewal, Settlement, Stamp};
use crate::store::written::Written;
use crate::types::{Headers, Outcome, Position, Result, StoredMessage};

statement! {
    /// What is due of a handler, unless it is paused, with the crashes it has when it is claimed: a lock that ran out without being given
    /// back means that its process died, unless the process is known to be alive, then it is only late. A row whose attempt cannot grow
    /// any more could not be fenced and is left alone.
    Due("
        SELECT d.message_seq, d.handler_id, d.attempts + 1, d.errors,
               d.crashes + CASE WHEN d.locked_until IS NULL OR d.crashes = 2147483647 OR d.locked_by = ?1 THEN 0
                                WHEN (SELECT p.alive_until > ?2 FROM inbox_processor p WHERE p.id = d.locked_by) THEN 0
                                ELSE 1 END,
               d.due_at, m.message_id, m.source, m.topic, m.kafka_partition, m.kafka_offset, m.recorded_at, m.record_key, m.headers,
               m.payload
        FROM inbox_delivery d INDEXED BY inbox_delivery_due
        LEFT JOIN inbox_message m ON m.seq = d.message_seq
        WHERE d.handler_id = ?3 AND d.finished_at IS NULL AND d.due_at >= ?4 AND d.due_at <= ?2
          AND CASE WHEN ?5 THEN d.locked_until IS NULL OR d.locked_until <= ?2
                   ELSE d.locked_until IS NULL AND d.crashes < ?6 END
          AND d.attempts < 2147483647
          AND (SELECT h.paused_at IS NULL FROM inbox_handler h WHERE h.id = ?3)
        ORDER BY d.due_at, d.message_seq
        LIMIT ?7")
    -> (BigInt, SmallInt, Integer, Integer, Integer, BigInt, Nullable<Text>, Nullable<Text>, Nullable<Text>, Nullable<Integer>,
        Nullable<BigInt>, Nullable<BigInt>, Nullable<Binary>, Nullable<Binary>, Nullable<Binary>) {
        processor: i32 => Integer,
        now: i64 => BigInt,
        handler_id: i16 => SmallInt,
        floor: i64 => BigInt,
        with_suspects: bool => Bool,
        solo_from: i32 => Integer,
        limit: i32 => Integer,
    }
}

type DueRow = (
    i64,
    i16,
    i32,
    i32,
    i32,
    i64,
    Option<String>,
    Option<String>,
    Option<String>,
    Option<i32>,
    Option<i64>,
    Option<i64>,
    Option<Vec<u8>>,
    Option<Vec<u8>>,
    Option<Vec<u8>>,
);

statement! {
    Lock("
        UPDATE inbox_delivery SET locked_until = ?1, locked_by = ?2, attempts = ?3, crashes = ?4
        WHERE message_seq = ?5 AND handler_id = ?6") {
        locked_until: i64 => BigInt,
        processor: i32 => Integer,
        attempt: i32 => Integer,
        crashes: i32 => Integer,
        message_seq: i64 => BigInt,
        handler_id: i16 => SmallInt,
    }
}

statement! {
    /// The common case, kept narrow; also the settlement of a transactional handler.
    SettleDone("
        UPDATE inbox_delivery
        SET finished_at = ?1, status = 2, locked_until = NULL, locked_by = NULL, crashes = 0
        WHERE message_seq = ?2 AND handler_id = ?3 AND attempts = ?4 AND locked_until IS NOT NULL AND finished_at IS NULL") {
        now: i64 => BigInt,
        message_seq: i64 => BigInt,
        handler_id: i16 => SmallInt,
        attempt: i32 => Integer,
    }
}

statement! {
    /// Everything that is not simply done.
    SettleOther<'a>("
        UPDATE inbox_delivery
        SET due_at = coalesce(?1, due_at), finished_at = ?2, status = ?3, errors = min(errors + ?4, 2147483647),
            crashes = CASE WHEN ?5 THEN crashes ELSE 0 END, locked_until = NULL, locked_by = NULL, reason = ?6,
            last_error = coalesce(?7, last_error)
        WHERE message_seq = ?8 AND handler_id = ?9 AND attempts = ?10 AND locked_until IS NOT NULL AND finished_at IS NULL") {
        due_at: Option<i64> => Nullable<BigInt>,
        finished_at: Option<i64> => Nullable<BigInt>,
        status: i16 => SmallInt,
        charge: i32 => Integer,
        keeps_crashes: bool => Bool,
        reason: Option<&'a str> => Nullable<Text>,
        error: Option<&'a str> => Nullable<Text>,
        message_seq: i64 => BigInt,
        handler_id: i16 => SmallInt,
        attempt: i32 => Integer,
    }
}

statement! {
    /// Whether a settlement took effect in an earlier try whose answer was lost: its attempt, unlocked, with the status it set.
    HasTakenEffect("
        SELECT count(*) > 0 FROM inbox_delivery
        WHERE message_seq = ?1 AND handler_id = ?2 AND attempts = ?3 AND locked_until IS NULL AND status = ?4")
    -> (Bool) {
        message_seq: i64 => BigInt,
        handler_id: i16 => SmallInt,
        attempt: i32 => Integer,
        status: i16 => SmallInt,
    }
}

statement! {
    Renew("
        UPDATE inbox_delivery SET locked_until = ?1
        WHERE message_seq = ?2 AND handler_id = ?3 AND attempts = ?4 AND locked_until IS NOT NULL AND finished_at IS NULL") {
        locked_until: i64 => BigInt,
        message_seq: i64 => BigInt,
        handler_id: i16 => SmallInt,
        attempt: i32 => Integer,
    }
}

statement! {
    /// Fenced by the processor as well: attempt 1 may by now be another's.
    ReleaseHandedOver("
        UPDATE inbox_delivery SET locked_until = NULL, locked_by = NULL
        WHERE message_seq = ?1 AND handler_id = ?2 AND attempts = 1 AND locked_by = ?3 AND locked_until IS NOT NULL
          AND finished_at IS NULL") {
        message_seq: i64 => BigInt,
        handler_id: i16 => SmallInt,
        processor: i32 => Integer,
    }
}

/// What is asked for, and by whom.
pub(super) struct Request {
    pub(super) processor: i32,
    pub(super) lease: Duration,
    pub(super) asks: Vec<Ask>,
    pub(super) scope: ClaimScope,
    pub(super) solo_from: i32,
}

pub(super) fn claim(conn: &mut SqliteConnection, request: &Request) -> Result<Vec<Claimed>> {
    let cannot = || database("cannot claim deliveries");
    let now = clock::now(conn).map_err(cannot())?;
    let locked_until = now + micros(request.lease);
    let mut claims = Vec::new();
    for ask in &request.asks {
        let due = Due {
            processor: request.processor,
            now,
            handler_id: ask.handler_id,
            floor: ask.floor.map_or(i64::MIN, |Stamp(micros)| micros),
            with_suspects: match request.scope {
                ClaimScope::Unsuspected => false,
                ClaimScope::All => true,
            },
            solo_from: request.solo_from,
            limit: ask.limit,
        };
        let due: Vec<Claimed> = due.load::<DueRow>(conn).map_err(cannot())?.into_iter().map(claimed).collect();
        for Claimed { claim: ClaimId { message_seq, handler_id, attempt }, crashes, .. } in &due {
            let (message_seq, handler_id, attempt, crashes) = (*message_seq, *handler_id, *attempt, *crashes);
            let lock = Lock { locked_until, processor: request.processor, attempt, crashes, message_seq, handler_id };
            lock.execute(conn).map_err(cannot())?;
        }
        claims.extend(due);
    }
    Ok(claims)
}

pub(super) fn settle(conn: &mut SqliteConnection, settlements: &[Settlement]) -> Result<Vec<ClaimId>> {
    let cannot = || database(format!("cannot settle {} deliveries", settlements.len()));
    let now = clock::now(conn).map_err(cannot())?;
    let mut lost = Vec::new();
    for Settlement { claim, outcome } in settlements {
        let settled = match outcome {
            Outcome::Done => done(conn, *claim, now),
            other => settle_other(*claim, &Written::from(other), now).execute(conn),
        };
        if settled.map_err(cannot())? == 0 && !has_taken_effect(conn, *claim, outcome).map_err(cannot())? {
            lost.push(*claim);
        }
    }
    Ok(lost)
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
    let found = HasTakenEffect { message_seq, handler_id, attempt, status }.load::<(bool,)>(conn);
    found.and_then(only_row).map(|(has,)| has)
}

fn claimed(row: DueRow) -> Claimed {
    let (
        message_seq,
        handler_id,
        attempt,
        errors,
        crashes,
        due_at,
        id,
        source,
        topic,
        partition,
        offset,
        recorded_at,
        key,
        headers,
        payload,
    ) = row;
    let message = match (id, source, topic) {
        (Some(id), Some(source), Some(topic)) => Some(Arc::new(StoredMessage {
            id: id.into(),
            source: source.into(),
            topic: topic.into(),
            position: partition.zip(offset).map(|(partition, offset)| Position { partition, offset }),
            key: key.map(Bytes::from),
            headers: headers.and_then(Headers::decode).unwrap_or_default(),
            payload: payload.map(Bytes::from),
            recorded_at: recorded_at.map(from_stamp),
        })),
        // The columns are NOT NULL, so there is no message row.
        (_, _, _) => None,
    };
    let claim = ClaimId { message_seq, handler_id, attempt };
    Claimed { claim, errors, crashes, due_at: Stamp(due_at), message }
}
