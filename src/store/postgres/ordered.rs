//! Claims deliveries of ordered handlers: at most one of each key, and never while another of its key runs.
//!
//! The deliveries of a key that are not held ("members") are due, waiting for a retry, claimed, or poisoned and holding
//! the key. Usually there is one. A claim locks all members that its snapshot shows. Of two claims of one key, the one
//! with the later snapshot also sees the other's delivery, and either cannot lock it or finds it running. So two
//! deliveries of one key never run at the same time, whatever made them due (concurrent accepts, replays, a rename).
//! Among members, the lowest seq is claimed. The others are held behind a member that is locked here: a statement that
//! finishes that member waits for this one, and `inbox_promote` then finds the held deliveries. So no delivery is held
//! without a member before it.
//!
//! If another session has locked a member of a key, the key is skipped until the next claim. No claim waits for a row.

use std::collections::HashSet;

use super::claim::{asked, claim_statements, claimed_rows, gate};
use crate::store::seam::NewDelivery;

/// Members of a key that one claim reads. If there are more (for example after a replay of 1,000 deliveries of one
/// key), the claim first holds the surplus.
macro_rules! members_max {
    () => {
        "1000"
    };
}

/// The first part is that of `Claim`: one index probe per handler, in the index's order. Then one probe per key and id.
macro_rules! claim_ordered_sql {
    ($kind:ident) => {
        concat!(
            "
        WITH ", gate!($kind), "candidate AS MATERIALIZED (
            SELECT ask.root, due.tid, due.order_hash
            FROM (SELECT q.*, (SELECT coalesce(h.same_as, h.id) FROM inbox_handler h WHERE h.id = q.handler_id) AS root
                  FROM (", asked!($kind), ") q OFFSET 0) ask
            CROSS JOIN LATERAL (
                SELECT d.ctid AS tid, d.order_hash FROM inbox_delivery d
                WHERE d.handler_id = ask.handler_id AND d.finished_at IS NULL
                  AND d.due_at >= ask.bottom AND d.due_at <= now()
                  AND CASE WHEN :with_suspects THEN d.locked_until IS NULL OR d.locked_until <= now()
                           ELSE d.locked_until IS NULL AND d.crashes < :suspect_from_crashes AND d.store_errors < :suspect_from_store_errors END
                  AND d.attempts < 2147483647
                ORDER BY d.due_at, d.message_seq
                LIMIT ask.wanted
                FOR NO KEY UPDATE SKIP LOCKED) due),
        order_key AS MATERIALIZED (
            SELECT k.root, k.order_hash, same.id AS handler_id, sum(seen.members) OVER (PARTITION BY k.root, k.order_hash) AS members
            FROM (SELECT DISTINCT root, order_hash FROM candidate WHERE order_hash IS NOT NULL) k
            CROSS JOIN LATERAL (SELECT h.id FROM inbox_handler h WHERE coalesce(h.same_as, h.id) = k.root OFFSET 0) same
            CROSS JOIN LATERAL (
                SELECT count(*) AS members
                FROM (SELECT 1 FROM inbox_delivery d
                      WHERE d.handler_id = same.id AND d.order_hash = k.order_hash AND d.due_at < 'infinity'
                        AND (d.finished_at IS NULL OR d.status = 3 AND d.passed IS NULL)
                      ORDER BY d.due_at, d.message_seq LIMIT ", members_max!(), ") m) seen),
        member AS MATERIALIZED (
            SELECT k.root, k.order_hash, k.members, m.*
            FROM order_key k
            CROSS JOIN LATERAL (
                SELECT d.ctid AS tid, d.message_seq, d.status, d.due_at <= now() AS is_due,
                       d.locked_until IS NOT NULL AND d.locked_until > now() AS is_running,
                       CASE WHEN :with_suspects THEN d.locked_until IS NULL OR d.locked_until <= now()
                            ELSE d.locked_until IS NULL AND d.crashes < :suspect_from_crashes AND d.store_errors < :suspect_from_store_errors END
                       AND d.attempts < 2147483647 AS is_free
                FROM inbox_delivery d
                WHERE d.handler_id = k.handler_id AND d.order_hash = k.order_hash AND d.due_at < 'infinity'
                  AND (d.finished_at IS NULL OR d.status = 3 AND d.passed IS NULL)
                ORDER BY d.due_at, d.message_seq LIMIT ", members_max!(), "
                FOR NO KEY UPDATE SKIP LOCKED) m),
        ranked AS MATERIALIZED (
            SELECT m.*, count(*) OVER (PARTITION BY m.root, m.order_hash) AS locked,
                   row_number() OVER (PARTITION BY m.root, m.order_hash ORDER BY m.status = 3 OR m.is_running DESC, m.message_seq) AS place
            FROM member m),
        held AS (
            UPDATE inbox_delivery t SET due_at = 'infinity'
            WHERE t.ctid = ANY (ARRAY(SELECT r.tid FROM ranked r WHERE r.place > 1 AND r.status = 0 AND r.is_running IS FALSE))),
        claimed AS (
            UPDATE inbox_delivery t
            SET locked_until = now() + :lease_ms * interval '1 millisecond', locked_by = :processor, attempts = t.attempts + 1,
                crashes = t.crashes + CASE WHEN t.locked_until IS NULL OR t.crashes = 2147483647 OR t.locked_by = :processor THEN 0
                                           WHEN (SELECT p.alive_until > now() FROM inbox_processor p WHERE p.id = t.locked_by)
                                           THEN 0 ELSE 1 END
            WHERE t.ctid = ANY (ARRAY(
                SELECT c.tid FROM candidate c WHERE c.order_hash IS NULL
                UNION ALL
                SELECT r.tid FROM ranked r
                WHERE r.place = 1 AND r.status = 0 AND r.is_due AND r.is_free AND r.locked = r.members AND r.members < ", members_max!(), "))
",
            claimed_rows!($kind)
        )
    };
}

claim_statements! {
    ClaimOrdered(claim_ordered_sql!(plain))

    ClaimOrderedRated(claim_ordered_sql!(rated))
}

/// The ordering keys and the tenants of a batch, as columns.
pub(super) struct OrderColumns {
    /// One per delivery: whether another delivery of its ordering key comes before it in the batch.
    pub(super) followers: Vec<bool>,
    /// The distinct ordering keys: handler ids, and the hashes of their keys.
    pub(super) handlers: Vec<i16>,
    pub(super) hashes: Vec<i64>,
    /// One per delivery; empty if no delivery has a tenant.
    pub(super) tenants: Vec<Option<i64>>,
}

impl OrderColumns {
    /// The deliveries must be in the order of the batch: the first one of a key follows no other.
    pub(super) fn of(deliveries: &[(i32, &NewDelivery)]) -> Self {
        let mut orders = HashSet::new();
        let followers = Vec::with_capacity(deliveries.len());
        let mut columns = Self { followers, handlers: vec![], hashes: vec![], tenants: vec![] };
        if deliveries.iter().any(|(_, delivery)| delivery.fair_hash.is_some()) {
            columns.tenants.extend(deliveries.iter().map(|(_, delivery)| delivery.fair_hash));
        }
        for (_, delivery) in deliveries {
            let order = delivery.order_hash.map(|hash| (delivery.ids.current, hash));
            columns.followers.push(order.is_some_and(|order| !orders.insert(order)));
        }
        (columns.handlers, columns.hashes) = orders.into_iter().unzip();
        columns
    }
}
