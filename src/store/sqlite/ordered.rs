//! Order: at most one delivery of each key of an ordered handler is claimed, and never while another delivery of its
//! key runs.
//!
//! The rule is that of `postgres/ordered.rs`: among the deliveries of a key that are not held, the one with the lowest
//! seq is claimed, unless one of them is running or poisoned and holds the key; every other one is held. There is only
//! one writer, so no row needs a lock.
//!
//! `CROSS JOIN` fixes the order of the joins. With `JOIN`, SQLite may read the whole index of all keys and look up the
//! handler of each row.

use std::collections::HashSet;

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::process::claim_columns;
use super::statement::{only_row, rows, statements};
use crate::store::rows::{ClaimRow, claims};
use crate::store::seam::{ClaimRequest, Claimed, NewDelivery};

/// The due time of a delivery that is held.
const HELD: i64 = i64::MAX;

rows! {
    /// A delivery of a key that is not held. `is_free`: this claim may take it.
    Member { message_seq: i64, handler_id: i16, status: i16, is_running: bool, is_free: bool }
}

statements! {
    /// The key and the handler of a delivery. The handler is given by the id that represents all of its ids.
    KeyOf("
        SELECT coalesce(h.same_as, h.id), d.order_hash FROM inbox_delivery d JOIN inbox_handler h ON h.id = d.handler_id
        WHERE d.message_seq = :message_seq AND d.handler_id = :handler_id")
    -> (i16, Option<i64>) { message_seq: i64, handler_id: i16 }

    /// Whether a delivery that is open or holds the key comes before a new one. Held ones do not count: before each of
    /// them is one that does.
    IsBlocked("
        SELECT count(*) > 0 FROM (
            SELECT 1 FROM inbox_handler own
            CROSS JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
            CROSS JOIN inbox_delivery d INDEXED BY inbox_delivery_order
              ON d.handler_id = same.id AND d.order_hash = :order_hash AND d.due_at < 9223372036854775807
             AND (d.finished_at IS NULL OR d.status = 3 AND d.passed IS NULL)
            WHERE own.id = :handler_id LIMIT 1)") -> bool { order_hash: i64, handler_id: i16 }

    /// The deliveries of a key that are not held: first those that block the key, then by seq.
    Members("
        SELECT d.message_seq, d.handler_id, d.status, d.locked_until IS NOT NULL AND d.locked_until > :now,
               d.due_at <= :now AND d.attempts < 2147483647
               AND CASE WHEN :with_suspects THEN d.locked_until IS NULL OR d.locked_until <= :now
                        ELSE d.locked_until IS NULL AND d.crashes < :suspect_from_crashes AND d.store_errors < :suspect_from_store_errors END
        FROM inbox_handler same
        CROSS JOIN inbox_delivery d INDEXED BY inbox_delivery_order
          ON d.handler_id = same.id AND d.order_hash = :order_hash AND d.due_at < 9223372036854775807
         AND (d.finished_at IS NULL OR d.status = 3 AND d.passed IS NULL)
        WHERE coalesce(same.same_as, same.id) = :root
        ORDER BY d.status = 3 OR d.locked_until IS NOT NULL AND d.locked_until > :now DESC, d.message_seq")
    -> Member { now: i64, with_suspects: bool, suspect_from_crashes: i32, suspect_from_store_errors: i32, order_hash: i64, root: i16 }

    Hold("UPDATE inbox_delivery SET due_at = 9223372036854775807 WHERE message_seq = :message_seq AND handler_id = :handler_id")
    { message_seq: i64, handler_id: i16 }

    /// Like `Due` in `process.rs`, for one delivery.
    One(concat!(claim_columns!(), "
        FROM inbox_delivery d LEFT JOIN inbox_message m ON m.seq = d.message_seq
        WHERE d.message_seq = :message_seq AND d.handler_id = :handler_id"))
    -> ClaimRow<i64> { processor: i32, now: i64, message_seq: i64, handler_id: i16, with_ages: bool, payload_bytes_max: i32 }
}

/// The due time of a new delivery: the given time, or held if another delivery of its key comes first.
pub(super) fn due_at(conn: &mut SqliteConnection, delivery: &NewDelivery, then: i64) -> QueryResult<i64> {
    let Some(order_hash) = delivery.order_hash else { return Ok(then) };
    let is_blocked: bool = IsBlocked { order_hash, handler_id: delivery.ids.current }.load(conn).and_then(only_row)?;
    Ok(if is_blocked { HELD } else { then })
}

/// The due deliveries that may run now, one per key. The others are held.
pub(super) fn in_turn(
    conn: &mut SqliteConnection,
    request: &ClaimRequest,
    due: Vec<Claimed>,
    now: i64,
) -> QueryResult<Vec<Claimed>> {
    let mut turns = Vec::with_capacity(due.len());
    let mut keys = HashSet::new();
    for candidate in due {
        let (message_seq, handler_id) = (candidate.claim.message_seq, candidate.claim.handler_id);
        let (root, order_hash) = KeyOf { message_seq, handler_id }.load(conn).and_then(only_row)?;
        let Some(order_hash) = order_hash else {
            turns.push(candidate);
            continue;
        };
        if keys.insert((root, order_hash)) {
            turns.extend(turn(conn, request, root, order_hash, now)?);
        }
    }
    Ok(turns)
}

/// Holds all deliveries of a key except the first, and returns the first if it may run now.
fn turn(
    conn: &mut SqliteConnection,
    request: &ClaimRequest,
    root: i16,
    order_hash: i64,
    now: i64,
) -> QueryResult<Option<Claimed>> {
    let members = Members {
        now,
        with_suspects: request.scope.has_suspects(),
        suspect_from_crashes: request.suspect_from_crashes,
        suspect_from_store_errors: request.suspect_from_store_errors,
        order_hash,
        root,
    };
    let mut members = members.load::<Member>(conn)?.into_iter();
    let Some(head) = members.next() else { return Ok(None) };
    for Member { message_seq, handler_id, status, is_running, .. } in members {
        if status == 0 && !is_running {
            Hold { message_seq, handler_id }.execute(conn)?;
        }
    }
    if head.status != 0 || head.is_running || !head.is_free {
        return Ok(None);
    }
    let Member { message_seq, handler_id, .. } = head;
    let one = One {
        processor: request.processor,
        now,
        message_seq,
        handler_id,
        with_ages: request.with_ages,
        payload_bytes_max: request.payload_bytes_max,
    };
    Ok(claims(one.load::<ClaimRow<i64>>(conn)?).pop())
}

#[cfg(test)]
mod tests;
