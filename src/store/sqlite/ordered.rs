//! Order: of each key of an ordered handler at most one delivery is claimed, and never beside another of its key.
//!
//! The rule is that of `postgres/ordered.rs`: among the deliveries of a key that are not held the lowest seq is claimed, unless one of them
//! is running or poisoned and holds the key; every other one is held. Nobody else writes meanwhile, so no row needs a lock.

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
    /// The key and the handler of a delivery, the handler by the id that stands for all of its ids.
    KeyOf("
        SELECT coalesce(h.same_as, h.id), d.order_hash FROM inbox_delivery d JOIN inbox_handler h ON h.id = d.handler_id
        WHERE d.message_seq = :message_seq AND d.handler_id = :handler_id")
    -> (i16, Option<i64>) { message_seq: i64, handler_id: i16 }

    /// Whether one that is open or holds the key stands before a new delivery.
    IsBlocked("
        SELECT count(*) > 0 FROM (
            SELECT 1 FROM inbox_handler own
            JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
            JOIN inbox_delivery d INDEXED BY inbox_delivery_order
              ON d.handler_id = same.id AND d.order_hash = :order_hash AND (d.finished_at IS NULL OR d.status = 3 AND d.passed IS NULL)
            WHERE own.id = :handler_id LIMIT 1)") -> bool { order_hash: i64, handler_id: i16 }

    /// The deliveries of a key that are not held: first those that nobody may pass, then by seq.
    Members("
        SELECT d.message_seq, d.handler_id, d.status, d.locked_until IS NOT NULL AND d.locked_until > :now,
               d.due_at <= :now AND d.attempts < 2147483647
               AND CASE WHEN :with_suspects THEN d.locked_until IS NULL OR d.locked_until <= :now
                        ELSE d.locked_until IS NULL AND d.crashes < :solo_from AND d.troubles < :solo_from_troubles END
        FROM inbox_handler same
        JOIN inbox_delivery d INDEXED BY inbox_delivery_order
          ON d.handler_id = same.id AND d.order_hash = :order_hash AND d.due_at < 9223372036854775807
         AND (d.finished_at IS NULL OR d.status = 3 AND d.passed IS NULL)
        WHERE coalesce(same.same_as, same.id) = :root
        ORDER BY d.status = 3 OR d.locked_until IS NOT NULL AND d.locked_until > :now DESC, d.message_seq")
    -> Member { now: i64, with_suspects: bool, solo_from: i32, solo_from_troubles: i32, order_hash: i64, root: i16 }

    Hold("UPDATE inbox_delivery SET due_at = 9223372036854775807 WHERE message_seq = :message_seq AND handler_id = :handler_id")
    { message_seq: i64, handler_id: i16 }

    /// As `Due` in `process.rs`, of one delivery.
    One(concat!(claim_columns!(), "
        FROM inbox_delivery d LEFT JOIN inbox_message m ON m.seq = d.message_seq
        WHERE d.message_seq = :message_seq AND d.handler_id = :handler_id"))
    -> ClaimRow<i64> { processor: i32, now: i64, message_seq: i64, handler_id: i16, with_ages: bool }
}

/// When a new delivery is due: then, or when it is its turn.
pub(super) fn due_at(conn: &mut SqliteConnection, delivery: &NewDelivery, then: i64) -> QueryResult<i64> {
    let Some(order_hash) = delivery.order_hash else { return Ok(then) };
    let is_blocked: bool = IsBlocked { order_hash, handler_id: delivery.ids.current }.load(conn).and_then(only_row)?;
    Ok(if is_blocked { HELD } else { then })
}

/// Those of the due deliveries whose turn it is, one of a key. The others are held.
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
        solo_from: request.solo_from,
        solo_from_troubles: request.solo_from_troubles,
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
    let one = One { processor: request.processor, now, message_seq, handler_id, with_ages: request.with_ages };
    Ok(claims(one.load::<ClaimRow<i64>>(conn)?).pop())
}

#[cfg(test)]
mod tests;
