//! Settle, renew, release: the statements with which the processor writes its claims. Each statement is bounded by its
//! batch and fenced by the attempt.
//!
//! A settlement without the current attempt changes nothing. The fence also includes the processor: a replica that is
//! promoted without the last claims assigns their attempts to other processors. No statement here waits longer than two
//! seconds for a row lock.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::statement::{only_row, rows, statements};
use crate::store::counts::count;
use crate::store::seam::{ClaimId, Lost, Renewal, Settlement, Settler};
use crate::store::written::Written;
use crate::types::{Outcome, Result};

rows! {
    /// A claim that was renewed, or is lost. Claims on locked rows have no row.
    RenewRow { claim: ClaimId, is_renewed: bool }

    /// A settlement without effect, and whether the handler had settled the delivery itself.
    LostRow { claim: ClaimId, is_done: bool }
}

statements! {
    /// The common case, kept narrow. Arrays are unnested as in accept. Here and below the fence is in a CASE, so that
    /// the planner cannot estimate it: right after an ANALYZE that saw no locked row it would expect none, and start
    /// with a scan for them.
    SettleDone("
        UPDATE inbox_delivery d
        SET finished_at = now(), status = 2, locked_until = NULL, locked_by = NULL, crashes = 0
        FROM (SELECT unnest(:message_seqs) AS message_seq, unnest(:handler_ids) AS handler_id, unnest(:attempts) AS attempt) s
        WHERE d.message_seq = s.message_seq AND d.handler_id = s.handler_id
          AND CASE WHEN d.attempts = s.attempt AND d.locked_by = :processor AND d.locked_until IS NOT NULL AND d.finished_at IS NULL
                   THEN true ELSE false END
          AND (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL")
    { processor: i32, message_seqs: Vec<i64>, handler_ids: Vec<i16>, attempts: Vec<i32> }

    /// The same for ordered handlers, with the next delivery of each key.
    SettleOrdered("SELECT inbox_settle_ordered(:processor, :message_seqs, :handler_ids, :attempts)")
    -> i64 { processor: i32, message_seqs: Vec<i64>, handler_ids: Vec<i16>, attempts: Vec<i32> }

    /// All outcomes other than done. The failure of an attempt is written with the outcome, for exactly the settled
    /// rows, and replaces the row in its place: nothing must be read or deleted to keep the number of rows bounded.
    SettleOther<'a>("
        WITH settled AS (
            UPDATE inbox_delivery d
            SET due_at = CASE WHEN s.delay_ms IS NULL THEN d.due_at ELSE now() + s.delay_ms * interval '1 millisecond' END,
                finished_at = CASE WHEN s.status = 0 THEN NULL ELSE now() END,
                status = s.status,
                errors = d.errors + CASE WHEN d.errors = 2147483647 THEN 0 ELSE s.charge END,
                crashes = CASE WHEN s.keep_crashes THEN d.crashes ELSE 0 END,
                store_errors = coalesce(s.store_errors, d.store_errors),
                locked_until = NULL, locked_by = NULL,
                -- Only deliveries poisoned here may pass: one parked for an unknown key holds its key, and is returned later.
                passed = CASE WHEN s.status = 3 AND d.order_hash IS NOT NULL
                              THEN (SELECT true FROM inbox_handler h WHERE h.id = d.handler_id AND h.passes_poisoned) END,
                reason = s.reason,
                last_error = coalesce(s.error, d.last_error)
            FROM (SELECT unnest(:message_seqs) AS message_seq, unnest(:handler_ids) AS handler_id, unnest(:attempts) AS attempt,
                         unnest(:statuses) AS status, unnest(:delays_ms) AS delay_ms, unnest(:charges) AS charge,
                         unnest(:keep_crashes) AS keep_crashes, unnest(:store_errors) AS store_errors, unnest(:reasons) AS reason, unnest(:errors) AS error,
                         unnest(:places) AS place, unnest(:whys) AS why) s
            WHERE d.message_seq = s.message_seq AND d.handler_id = s.handler_id
              AND CASE WHEN d.attempts = s.attempt AND d.locked_by = :processor AND d.locked_until IS NOT NULL AND d.finished_at IS NULL
                       THEN true ELSE false END
              AND (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL
            RETURNING s.message_seq, s.handler_id, s.attempt, s.place, s.why, s.error),
        failed AS (
            INSERT INTO inbox_attempt (message_seq, handler_id, place, attempt, failed_at, why, error)
            SELECT message_seq, handler_id, place, attempt, now(), why, error FROM settled WHERE why IS NOT NULL
            ON CONFLICT (message_seq, handler_id, place)
            DO UPDATE SET attempt = excluded.attempt, failed_at = excluded.failed_at, why = excluded.why, error = excluded.error)
        SELECT count(*) FROM settled") -> i64 {
        processor: i32, message_seqs: Vec<i64>, handler_ids: Vec<i16>, attempts: Vec<i32>, statuses: Vec<i16>,
        delays_ms: Vec<Option<i64>>, charges: Vec<i32>, keep_crashes: Vec<bool>, store_errors: Vec<Option<i32>>, reasons: Vec<Option<&'a str>>,
        errors: Vec<Option<&'a str>>, places: Vec<i16>, whys: Vec<Option<&'a str>>,
    }

    /// Finds settlements that did not take effect. A settlement that did, in a try whose reply was lost, has its
    /// attempt, no other lock, and the status that it set. So has a delivery that its handler settled with
    /// `inbox_settle`: it is done, whatever else was to be written.
    FindLost("
        SELECT s.message_seq, s.handler_id, s.attempt,
               (SELECT true FROM inbox_delivery d
                WHERE d.message_seq = s.message_seq AND d.handler_id = s.handler_id AND d.attempts = s.attempt
                  AND d.locked_by IS NULL AND d.status = 2) IS TRUE
        FROM unnest(:message_seqs, :handler_ids, :attempts, :statuses) AS s (message_seq, handler_id, attempt, status)
        WHERE (SELECT true FROM inbox_delivery d
               WHERE d.message_seq = s.message_seq AND d.handler_id = s.handler_id AND d.attempts = s.attempt
                 AND d.locked_until IS NULL AND d.locked_by IS NULL AND d.status = s.status) IS NOT TRUE")
    -> LostRow { message_seqs: Vec<i64>, handler_ids: Vec<i16>, attempts: Vec<i32>, statuses: Vec<i16> }

    /// Skips locked rows, so that one stuck transaction cannot let the claims of all others expire. A delivery that its
    /// handler has settled counts as renewed: the handler may finish, and no other process runs the delivery.
    Renew("
        WITH renewed AS (
            UPDATE inbox_delivery t SET locked_until = now() + :lease_ms * interval '1 millisecond'
            WHERE t.ctid = ANY (ARRAY(
                SELECT held.tid
                FROM unnest(:message_seqs, :handler_ids, :attempts) AS r (message_seq, handler_id, attempt)
                CROSS JOIN LATERAL (
                    SELECT d.ctid AS tid FROM inbox_delivery d
                    WHERE d.message_seq = r.message_seq AND d.handler_id = r.handler_id
                      AND CASE WHEN d.attempts = r.attempt AND d.locked_by = :processor AND d.locked_until IS NOT NULL AND d.finished_at IS NULL
                               THEN true ELSE false END
                    LIMIT 1
                    FOR NO KEY UPDATE SKIP LOCKED) held))
            RETURNING t.message_seq, t.handler_id, t.attempts)
        SELECT message_seq, handler_id, attempts, true FROM renewed
        UNION ALL
        SELECT r.message_seq, r.handler_id, r.attempt,
               (SELECT true FROM inbox_delivery d
                WHERE d.message_seq = r.message_seq AND d.handler_id = r.handler_id AND d.attempts = r.attempt
                  AND d.locked_by IS NULL AND d.status = 2) IS TRUE
        FROM unnest(:message_seqs, :handler_ids, :attempts) AS r (message_seq, handler_id, attempt)
        WHERE (SELECT CASE WHEN d.attempts = r.attempt AND d.locked_by = :processor AND d.locked_until IS NOT NULL AND d.finished_at IS NULL
                           THEN true ELSE false END
               FROM inbox_delivery d
               WHERE d.message_seq = r.message_seq AND d.handler_id = r.handler_id) IS NOT TRUE")
    -> RenewRow { lease_ms: i64, processor: i32, message_seqs: Vec<i64>, handler_ids: Vec<i16>, attempts: Vec<i32> }

    /// Also fenced by the processor: attempt 1 may now belong to another processor.
    ReleaseHandedOver("
        UPDATE inbox_delivery d SET locked_until = NULL, locked_by = NULL
        FROM unnest(:message_seqs, :handler_ids) AS r (message_seq, handler_id)
        WHERE d.message_seq = r.message_seq AND d.handler_id = r.handler_id
          AND CASE WHEN d.attempts = 1 AND d.locked_by = :processor AND d.locked_until IS NOT NULL AND d.finished_at IS NULL
                   THEN true ELSE false END
          AND (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL")
    { message_seqs: Vec<i64>, handler_ids: Vec<i16>, processor: i32 }
}

/// Writes outcomes: each of the three statements is a transaction. After an error, repeating the call is safe, because
/// a settlement that took effect is recognized (`FindLost`).
pub(super) async fn settle(
    conn: &mut AsyncPgConnection,
    by: &Settler,
    settlements: &[Settlement],
) -> Result<Vec<Lost>> {
    let mut sorted: Vec<&Settlement> = settlements.iter().collect();
    // All settlers use the same order, so that they never deadlock.
    sorted.sort_unstable_by_key(|settlement| settlement.claim);
    let (done, other): (Vec<&Settlement>, Vec<&Settlement>) =
        sorted.iter().copied().partition(|settlement| settlement.outcome == Outcome::Done);
    let is_ordered = |settlement: &&Settlement| by.ordered_ids.contains(&settlement.claim.handler_id);
    let (ordered, done): (Vec<&Settlement>, Vec<&Settlement>) = done.into_iter().partition(is_ordered);
    let cannot = || database(format!("cannot settle {} deliveries", settlements.len()));
    let mut settled = 0;
    if !done.is_empty() {
        let (message_seqs, handler_ids, attempts) = columns(done.iter().map(|settlement| settlement.claim));
        let settle = SettleDone { processor: by.processor, message_seqs, handler_ids, attempts };
        settled += settle.execute(conn).await.map_err(cannot())? as u64;
    }
    if !ordered.is_empty() {
        let (message_seqs, handler_ids, attempts) = columns(ordered.iter().map(|settlement| settlement.claim));
        let settle = SettleOrdered { processor: by.processor, message_seqs, handler_ids, attempts };
        settled += settle.load(conn).await.and_then(only_row).map(self::count).map_err(cannot())?;
    }
    if !other.is_empty() {
        let count = settle_other(by, &other).load(conn).await.and_then(only_row).map(self::count);
        settled += count.map_err(cannot())?;
    }
    if settled == settlements.len() as u64 {
        return Ok(Vec::new());
    }
    let (message_seqs, handler_ids, attempts) = columns(sorted.iter().map(|settlement| settlement.claim));
    let statuses = sorted.iter().map(|settlement| Written::from(&settlement.outcome).status).collect();
    let lost = FindLost { message_seqs, handler_ids, attempts, statuses };
    let lost = lost.load::<LostRow>(conn).await.map_err(cannot())?;
    Ok(lost.into_iter().map(|LostRow { claim, is_done }| Lost { claim, is_done }).collect())
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
        .map_err(database("cannot release handed-over deliveries"))?;
    Ok(())
}

/// `sent_at` is taken before the statement, so a lease never lasts longer for this process than in the database.
pub(super) async fn renew(
    conn: &mut AsyncPgConnection,
    processor: i32,
    claims: &[ClaimId],
    lease: Duration,
) -> Result<Renewal> {
    let sent_at = Instant::now();
    let (message_seqs, handler_ids, attempts) = columns(claims.iter().copied());
    let rows = Renew { lease_ms: millis(lease), processor, message_seqs, handler_ids, attempts }
        .load::<RenewRow>(conn)
        .await
        .map_err(database(format!("cannot renew {} claims", claims.len())))?;
    let mut renewal = Renewal { sent_at, renewed: Vec::new(), lost: Vec::new() };
    for RenewRow { claim, is_renewed } in rows {
        let list = if is_renewed { &mut renewal.renewed } else { &mut renewal.lost };
        list.push(claim);
    }
    // A claim that was settled while the statement ran may be in neither list: its settlement decides. A claim in both
    // lists is renewed.
    let renewed: HashSet<ClaimId> = renewal.renewed.iter().copied().collect();
    renewal.lost.retain(|claim| !renewed.contains(claim));
    Ok(renewal)
}

/// The columns of all outcomes other than done, as arrays.
fn settle_other<'a>(by: &Settler, settlements: &[&'a Settlement]) -> SettleOther<'a> {
    let (message_seqs, handler_ids, attempts) = columns(settlements.iter().map(|settlement| settlement.claim));
    let written: Vec<Written<'_>> = settlements.iter().map(|settlement| Written::from(&settlement.outcome)).collect();
    SettleOther {
        processor: by.processor,
        places: attempts.iter().map(|&attempt| by.place(attempt)).collect(),
        whys: written.iter().map(|w| w.why).collect(),
        message_seqs,
        handler_ids,
        attempts,
        statuses: written.iter().map(|w| w.status).collect(),
        delays_ms: written.iter().map(|w| w.delay.map(millis)).collect(),
        charges: written.iter().map(|w| i32::from(w.is_charged)).collect(),
        keep_crashes: written.iter().map(|w| w.keeps_crashes).collect(),
        store_errors: written.iter().map(|w| w.store_errors).collect(),
        reasons: written.iter().map(|w| w.reason).collect(),
        errors: written.iter().map(|w| w.error).collect(),
    }
}

/// Claims as arrays for binding.
pub(super) fn columns(claims: impl Iterator<Item = ClaimId>) -> (Vec<i64>, Vec<i16>, Vec<i32>) {
    let mut columns = (Vec::new(), Vec::new(), Vec::new());
    for claim in claims {
        columns.0.push(claim.message_seq);
        columns.1.push(claim.handler_id);
        columns.2.push(claim.attempt);
    }
    columns
}

/// For binding. Saturates.
pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
