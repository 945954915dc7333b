//! Claim, settle, renew: the statements of the processor, each bounded by its batch and fenced by the attempt.
//!
//! A claim costs what its batch costs, whatever lies beside it. A settlement without the current attempt changes nothing. No
//! statement here waits for a row that somebody else has locked for longer than two seconds.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use diesel::pg::data_types::PgTimestamp;
use diesel::sql_types::{Array, BigInt, Binary, Bool, Integer, Nullable, SmallInt, Text, Timestamptz};
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::statement::{SharedText, statement};
use super::time::from_postgres;
use crate::store::seam::{Ask, ClaimId, ClaimRequest, ClaimScope, Claimed, Renewal, Settlement, Stamp};
use crate::store::written::Written;
use crate::types::{Headers, Outcome, Position, Result, StoredMessage};

statement! {
    /// One index probe per handler, in the index's order, then an update by ctid: neither can become a scan or a join, whatever
    /// the planner believes. A lock that ran out without being given back means that its process died, which is counted here, unless
    /// the process is known to be alive: then it is only late. Counters saturate; a row whose attempt cannot grow any more could not be
    /// fenced and is left alone.
    Claim("
        WITH claimed AS (
            UPDATE inbox_delivery t
            SET locked_until = now() + $1 * interval '1 millisecond', locked_by = $2, attempts = t.attempts + 1,
                crashes = t.crashes + CASE WHEN t.locked_until IS NULL OR t.crashes = 2147483647 OR t.locked_by = $2 THEN 0
                                           WHEN (SELECT p.alive_until > now() FROM inbox_processor p WHERE p.id = t.locked_by)
                                           THEN 0 ELSE 1 END
            WHERE t.ctid = ANY (ARRAY(
                SELECT due.tid
                FROM (SELECT * FROM unnest($3, $4, $5) AS a (handler_id, wanted, floor)
                      WHERE (SELECT h.paused_at IS NULL FROM inbox_handler h WHERE h.id = a.handler_id)) ask
                CROSS JOIN LATERAL (
                    SELECT d.ctid AS tid FROM inbox_delivery d
                    WHERE d.handler_id = ask.handler_id AND d.finished_at IS NULL
                      AND d.due_at >= ask.floor AND d.due_at <= now()
                      AND CASE WHEN $6 THEN d.locked_until IS NULL OR d.locked_until <= now()
                               ELSE d.locked_until IS NULL AND d.crashes < $7 END
                      AND d.attempts < 2147483647
                    ORDER BY d.due_at, d.message_seq
                    LIMIT ask.wanted
                    FOR NO KEY UPDATE SKIP LOCKED) due))
            RETURNING t.message_seq, t.handler_id, t.attempts, t.errors, t.crashes, t.due_at)
        SELECT c.message_seq, c.handler_id, c.attempts, c.errors, c.crashes, c.due_at,
               m.message_id, m.source, m.topic, m.kafka_partition, m.kafka_offset, m.recorded_at, m.record_key, m.headers, m.payload
        FROM claimed c
        LEFT JOIN LATERAL (SELECT * FROM inbox_message WHERE seq = c.message_seq LIMIT 1) m ON true")
    -> (BigInt, SmallInt, Integer, Integer, Integer, Timestamptz, Nullable<Text>, Nullable<Text>, Nullable<Text>, Nullable<Integer>,
        Nullable<BigInt>, Nullable<Timestamptz>, Nullable<Binary>, Nullable<Binary>, Nullable<Binary>) {
        lease_ms: i64 => BigInt,
        processor: i32 => Integer,
        handler_ids: Vec<i16> => Array<SmallInt>,
        limits: Vec<i32> => Array<Integer>,
        floors: Vec<PgTimestamp> => Array<Timestamptz>,
        with_suspects: bool => Bool,
        solo_from: i32 => Integer,
    }
}

type ClaimRow = (
    i64,
    i16,
    i32,
    i32,
    i32,
    PgTimestamp,
    Option<SharedText>,
    Option<String>,
    Option<String>,
    Option<i32>,
    Option<i64>,
    Option<PgTimestamp>,
    Option<Vec<u8>>,
    Option<Vec<u8>>,
    Option<Vec<u8>>,
);

statement! {
    /// The common case, kept narrow. Arrays are unnested as in accept. The fence stands in a CASE, here and below, so that the planner
    /// cannot reason about it: right after an ANALYZE that saw no locked row it would expect none, and begin with a scan for them.
    SettleDone("
        UPDATE inbox_delivery d
        SET finished_at = now(), status = 2, locked_until = NULL, locked_by = NULL, crashes = 0
        FROM (SELECT unnest($1) AS message_seq, unnest($2) AS handler_id, unnest($3) AS attempt) s
        WHERE d.message_seq = s.message_seq AND d.handler_id = s.handler_id
          AND CASE WHEN d.attempts = s.attempt AND d.locked_until IS NOT NULL AND d.finished_at IS NULL THEN true ELSE false END
          AND (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL") {
        message_seqs: Vec<i64> => Array<BigInt>,
        handler_ids: Vec<i16> => Array<SmallInt>,
        attempts: Vec<i32> => Array<Integer>,
    }
}

statement! {
    /// Everything that is not simply done.
    SettleOther("
        UPDATE inbox_delivery d
        SET due_at = CASE WHEN s.delay_ms IS NULL THEN d.due_at ELSE now() + s.delay_ms * interval '1 millisecond' END,
            finished_at = CASE WHEN s.status = 0 THEN NULL ELSE now() END,
            status = s.status,
            errors = d.errors + CASE WHEN d.errors = 2147483647 THEN 0 ELSE s.charge END,
            crashes = CASE WHEN s.keep_crashes THEN d.crashes ELSE 0 END,
            locked_until = NULL, locked_by = NULL,
            reason = s.reason,
            last_error = coalesce(s.error, d.last_error)
        FROM (SELECT unnest($1) AS message_seq, unnest($2) AS handler_id, unnest($3) AS attempt, unnest($4) AS status,
                     unnest($5) AS delay_ms, unnest($6) AS charge, unnest($7) AS keep_crashes, unnest($8) AS reason,
                     unnest($9) AS error) s
        WHERE d.message_seq = s.message_seq AND d.handler_id = s.handler_id
          AND CASE WHEN d.attempts = s.attempt AND d.locked_until IS NOT NULL AND d.finished_at IS NULL THEN true ELSE false END
          AND (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL") {
        message_seqs: Vec<i64> => Array<BigInt>,
        handler_ids: Vec<i16> => Array<SmallInt>,
        attempts: Vec<i32> => Array<Integer>,
        statuses: Vec<i16> => Array<SmallInt>,
        delays_ms: Vec<Option<i64>> => Array<Nullable<BigInt>>,
        charges: Vec<i32> => Array<Integer>,
        keep_crashes: Vec<bool> => Array<Bool>,
        reasons: Vec<Option<String>> => Array<Nullable<Text>>,
        errors: Vec<Option<String>> => Array<Nullable<Text>>,
    }
}

statement! {
    /// Which settlements did not take effect. One that did, in a try whose answer was lost, shows as its attempt, unlocked, with the
    /// status it set.
    FindLost("
        SELECT s.message_seq, s.handler_id, s.attempt
        FROM unnest($1, $2, $3, $4) AS s (message_seq, handler_id, attempt, status)
        WHERE (SELECT true FROM inbox_delivery d
               WHERE d.message_seq = s.message_seq AND d.handler_id = s.handler_id AND d.attempts = s.attempt
                 AND d.locked_until IS NULL AND d.status = s.status) IS NOT TRUE")
    -> (BigInt, SmallInt, Integer) {
        message_seqs: Vec<i64> => Array<BigInt>,
        handler_ids: Vec<i16> => Array<SmallInt>,
        attempts: Vec<i32> => Array<Integer>,
        statuses: Vec<i16> => Array<SmallInt>,
    }
}

statement! {
    /// Skips rows that are locked, so that one transaction that hangs cannot let the claims of all others run out.
    Renew("
        WITH renewed AS (
            UPDATE inbox_delivery t SET locked_until = now() + $1 * interval '1 millisecond'
            WHERE t.ctid = ANY (ARRAY(
                SELECT held.tid
                FROM unnest($2, $3, $4) AS r (message_seq, handler_id, attempt)
                CROSS JOIN LATERAL (
                    SELECT d.ctid AS tid FROM inbox_delivery d
                    WHERE d.message_seq = r.message_seq AND d.handler_id = r.handler_id
                      AND CASE WHEN d.attempts = r.attempt AND d.locked_until IS NOT NULL AND d.finished_at IS NULL
                               THEN true ELSE false END
                    LIMIT 1
                    FOR NO KEY UPDATE SKIP LOCKED) held))
            RETURNING t.message_seq, t.handler_id, t.attempts)
        SELECT message_seq, handler_id, attempts, true FROM renewed
        UNION ALL
        SELECT r.message_seq, r.handler_id, r.attempt, false
        FROM unnest($2, $3, $4) AS r (message_seq, handler_id, attempt)
        WHERE (SELECT CASE WHEN d.attempts = r.attempt AND d.locked_until IS NOT NULL AND d.finished_at IS NULL
                           THEN true ELSE false END
               FROM inbox_delivery d
               WHERE d.message_seq = r.message_seq AND d.handler_id = r.handler_id) IS NOT TRUE")
    -> (BigInt, SmallInt, Integer, Bool) {
        lease_ms: i64 => BigInt,
        message_seqs: Vec<i64> => Array<BigInt>,
        handler_ids: Vec<i16> => Array<SmallInt>,
        attempts: Vec<i32> => Array<Integer>,
    }
}

statement! {
    /// Fenced by the processor as well: attempt 1 may by now be another's.
    ReleaseHandedOver("
        UPDATE inbox_delivery d SET locked_until = NULL, locked_by = NULL
        FROM unnest($1, $2) AS r (message_seq, handler_id)
        WHERE d.message_seq = r.message_seq AND d.handler_id = r.handler_id
          AND CASE WHEN d.attempts = 1 AND d.locked_by = $3 AND d.locked_until IS NOT NULL AND d.finished_at IS NULL
                   THEN true ELSE false END
          AND (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL") {
        message_seqs: Vec<i64> => Array<BigInt>,
        handler_ids: Vec<i16> => Array<SmallInt>,
        processor: i32 => Integer,
    }
}

pub(super) async fn claim(conn: &mut AsyncPgConnection, request: &ClaimRequest<'_>) -> Result<Vec<Claimed>> {
    let floor = |ask: &Ask| PgTimestamp(ask.floor.map_or(i64::MIN, |Stamp(micros)| micros));
    let rows = Claim {
        lease_ms: millis(request.lease),
        processor: request.processor,
        handler_ids: request.asks.iter().map(|ask| ask.handler_id).collect(),
        limits: request.asks.iter().map(|ask| ask.limit).collect(),
        floors: request.asks.iter().map(floor).collect(),
        with_suspects: match request.scope {
            ClaimScope::Unsuspected => false,
            ClaimScope::All => true,
        },
        solo_from: request.solo_from,
    }
    .load::<ClaimRow>(conn)
    .await
    .map_err(database("cannot claim deliveries"))?;
    // Most messages of a batch are of one topic.
    let mut topic: Arc<str> = "".into();
    Ok(rows.into_iter().map(|row| claimed(row, &mut topic)).collect())
}

pub(super) async fn settle(conn: &mut AsyncPgConnection, settlements: &[Settlement]) -> Result<Vec<ClaimId>> {
    let mut sorted: Vec<&Settlement> = settlements.iter().collect();
    // The same order everywhere, so that two settlers never wait for each other in a circle.
    sorted.sort_unstable_by_key(|settlement| settlement.claim);
    let (done, other): (Vec<&Settlement>, Vec<&Settlement>) =
        sorted.iter().copied().partition(|settlement| settlement.outcome == Outcome::Done);
    let cannot = || database(format!("cannot settle {} deliveries", settlements.len()));
    let mut settled = 0;
    if !done.is_empty() {
        let (message_seqs, handler_ids, attempts) = columns(done.iter().map(|settlement| settlement.claim));
        settled += SettleDone { message_seqs, handler_ids, attempts }.execute(conn).await.map_err(cannot())?;
    }
    if !other.is_empty() {
        settled += settle_other(&other).execute(conn).await.map_err(cannot())?;
    }
    if settled == settlements.len() {
        return Ok(Vec::new());
    }
    let (message_seqs, handler_ids, attempts) = columns(sorted.iter().map(|settlement| settlement.claim));
    let statuses = sorted.iter().map(|settlement| Written::from(&settlement.outcome).status).collect();
    let lost = FindLost { message_seqs, handler_ids, attempts, statuses };
    let lost = lost.load::<(i64, i16, i32)>(conn).await.map_err(cannot())?;
    Ok(lost.into_iter().map(claim_id).collect())
}

pub(super) async fn release_handed_over(
    conn: &mut AsyncPgConnection,
    deliveries: &[(i64, i16)],
    processor: i32,
) -> Result<()> {
    let (message_seqs, handler_ids) = deliveries.iter().copied().unzip();
    ReleaseHandedOver { message_seqs, handler_ids, processor }
        .execute(conn)
        .await
        .map_err(database("cannot give back deliveries that were handed over"))?;
    Ok(())
}

pub(super) async fn renew(conn: &mut AsyncPgConnection, claims: &[ClaimId], lease: Duration) -> Result<Renewal> {
    let sent_at = Instant::now();
    let (message_seqs, handler_ids, attempts) = columns(claims.iter().copied());
    let rows = Renew { lease_ms: millis(lease), message_seqs, handler_ids, attempts }
        .load::<(i64, i16, i32, bool)>(conn)
        .await
        .map_err(database(format!("cannot renew {} claims", claims.len())))?;
    let mut renewal = Renewal { sent_at, renewed: Vec::new(), lost: Vec::new() };
    for (message_seq, handler_id, attempt, is_renewed) in rows {
        let list = if is_renewed { &mut renewal.renewed } else { &mut renewal.lost };
        list.push(claim_id((message_seq, handler_id, attempt)));
    }
    // Settled between the two halves of the statement is neither: the settler knows better.
    let renewed: HashSet<ClaimId> = renewal.renewed.iter().copied().collect();
    renewal.lost.retain(|claim| !renewed.contains(claim));
    Ok(renewal)
}

fn settle_other(settlements: &[&Settlement]) -> SettleOther {
    let (message_seqs, handler_ids, attempts) = columns(settlements.iter().map(|settlement| settlement.claim));
    let written: Vec<Written<'_>> = settlements.iter().map(|settlement| Written::from(&settlement.outcome)).collect();
    SettleOther {
        message_seqs,
        handler_ids,
        attempts,
        statuses: written.iter().map(|w| w.status).collect(),
        delays_ms: written.iter().map(|w| w.delay.map(millis)).collect(),
        charges: written.iter().map(|w| i32::from(w.is_charged)).collect(),
        keep_crashes: written.iter().map(|w| w.keeps_crashes).collect(),
        reasons: written.iter().map(|w| w.reason.map(str::to_owned)).collect(),
        errors: written.iter().map(|w| w.error.map(str::to_owned)).collect(),
    }
}

/// Claims as the arrays that statements bind.
pub(super) fn columns(claims: impl Iterator<Item = ClaimId>) -> (Vec<i64>, Vec<i16>, Vec<i32>) {
    let mut columns = (Vec::new(), Vec::new(), Vec::new());
    for claim in claims {
        columns.0.push(claim.message_seq);
        columns.1.push(claim.handler_id);
        columns.2.push(claim.attempt);
    }
    columns
}

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn claim_id((message_seq, handler_id, attempt): (i64, i16, i32)) -> ClaimId {
    ClaimId { message_seq, handler_id, attempt }
}

fn claimed(row: ClaimRow, last_topic: &mut Arc<str>) -> Claimed {
    let (
        seq,
        handler_id,
        attempt,
        errors,
        crashes,
        due_at,
        id,
        source,
        topic_text,
        partition,
        offset,
        recorded_at,
        key,
        headers,
        payload,
    ) = row;
    let message = match (id, source, topic_text) {
        (Some(SharedText(id)), Some(source), Some(topic_text)) => {
            if *topic_text != **last_topic {
                *last_topic = topic_text.into();
            }
            let topic = Arc::clone(last_topic);
            let source = if *source == *topic { Arc::clone(&topic) } else { source.into() };
            Some(Arc::new(StoredMessage {
                id,
                source,
                topic,
                position: partition.zip(offset).map(|(partition, offset)| Position { partition, offset }),
                key: key.map(Bytes::from),
                headers: headers.and_then(Headers::decode).unwrap_or_default(),
                payload: payload.map(Bytes::from),
                recorded_at: recorded_at.map(from_postgres),
            }))
        }
        // The columns are NOT NULL, so there is no message row.
        (_, _, _) => None,
    };
    Claimed { claim: claim_id((seq, handler_id, attempt)), errors, crashes, due_at: Stamp(due_at.0), message }
}
