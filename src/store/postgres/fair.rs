//! Claims deliveries of fair handlers: an equal share for each tenant with due deliveries.
//!
//! There are two statements. The first one is read-only and goes from tenant to tenant (`store/turns.rs` decides how
//! far); the second one claims like the plain claim, with one index probe for each tenant. A change between the two
//! costs at most a share: nothing is claimed twice, because the second statement decides.
//!
//! Tenants are compared as a row together with the due time: only the index of tenants gives that order, so no plan can
//! scan another tenant's deliveries.

use std::collections::HashMap;

use diesel::pg::data_types::PgTimestamp;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::claim::{
    Claiming, Kind, asked, bottom, claim_sql, claim_statements, claimed_rows, gate, rate_allows, scan_again_in,
};
use super::errors::database;
use super::statement::{rows, statements};
use crate::store::rows::DatabaseStamp;
use crate::store::seam::{Ask, ClaimRequest};
use crate::store::turns::{IN_VAIN_MAX, OLDEST_MAX, Shares, TenantScan};
use crate::types::Result;

rows! {
    /// What was found for one handler: how many deliveries it may claim, its oldest open delivery, whether deliveries
    /// without a tenant hash are among the oldest, the tenants with due deliveries, the last tenant checked, and
    /// whether all were checked.
    TenantScanRow {
        handler_id: i16, wanted: i64, oldest: Option<PgTimestamp>, has_unmarked: bool, tenants: Vec<i64>, last: Option<i64>, is_whole: bool,
    }
}

/// Whether a claim may take a delivery.
macro_rules! is_free {
    () => {
        "CASE WHEN :with_suspects THEN d.locked_until IS NULL OR d.locked_until <= now()
                              ELSE d.locked_until IS NULL AND d.crashes < :suspect_from_crashes AND d.store_errors < :suspect_from_store_errors END
                    AND d.attempts < 2147483647"
    };
}

claim_statements! {
    /// One index probe per tenant.
    ClaimFair(claim_sql!(plain, fair))

    ClaimFairRated(claim_sql!(rated, fair))
}

statements! {
    /// The tenants with due deliveries, from `after` on and once around, and the oldest open delivery. If nothing is
    /// due, no tenant is checked.
    ScanTenants(concat!("
        SELECT a.handler_id, a.wanted, near.oldest, coalesce(near.has_unmarked, false), coalesce(seen.tenants, '{}'), seen.last,
               coalesce(seen.is_whole, true)
        FROM (SELECT u.handler_id, u.after, coalesce(u.floor, now()) - u.depth_ms * interval '1 millisecond' AS bottom,
                     least(u.wanted, ", rate_allows!(), ") AS wanted
              FROM unnest(:handler_ids, :limits, :floors, :depths_ms, :are_probes, :afters)
                  AS u (handler_id, wanted, floor, depth_ms, is_probe, after)
              CROSS JOIN LATERAL (SELECT * FROM inbox_handler WHERE id = u.handler_id LIMIT 1) h
              WHERE h.paused_at IS NULL AND (u.is_probe OR h.breaker_opened_at IS NULL) OFFSET 0) a
        CROSS JOIN LATERAL (
            SELECT min(o.due_at) AS oldest, bool_or(o.fair_hash IS NULL) AS has_unmarked
            FROM (SELECT d.due_at, d.fair_hash FROM inbox_delivery d
                  WHERE d.handler_id = a.handler_id AND d.finished_at IS NULL AND d.due_at >= a.bottom AND d.due_at <= now()
                  ORDER BY d.due_at, d.message_seq LIMIT :oldest_max) o) near
        CROSS JOIN LATERAL (
            WITH RECURSIVE scan AS (
                SELECT 0 AS step, a.after AS fair_hash, false AS is_around, 0 AS found, false AS is_due
                WHERE (SELECT true FROM inbox_delivery d
                       WHERE d.handler_id = a.handler_id AND d.finished_at IS NULL AND d.due_at >= a.bottom AND d.due_at <= now()
                         AND ", is_free!(), "
                       ORDER BY d.due_at, d.message_seq LIMIT 1)
                UNION ALL
                SELECT s.step + 1, t.fair_hash, t.is_around, s.found + CASE WHEN t.is_due THEN 1 ELSE 0 END, t.is_due
                FROM scan s
                CROSS JOIN LATERAL (
                    SELECT n.fair_hash, n.is_around, coalesce((
                               SELECT true FROM inbox_delivery d
                               WHERE d.handler_id = a.handler_id AND d.finished_at IS NULL AND d.fair_hash IS NOT NULL
                                 AND (d.fair_hash, d.due_at) >= (n.fair_hash, a.bottom) AND (d.fair_hash, d.due_at) <= (n.fair_hash, now())
                                 AND ", is_free!(), "
                               ORDER BY d.fair_hash, d.due_at, d.message_seq LIMIT 1), false) AS is_due
                    FROM ((SELECT d.fair_hash, s.is_around FROM inbox_delivery d
                           WHERE d.handler_id = a.handler_id AND d.finished_at IS NULL AND d.fair_hash > s.fair_hash
                             AND d.fair_hash <= CASE WHEN s.is_around THEN a.after ELSE 9223372036854775807 END
                           ORDER BY d.fair_hash, d.due_at, d.message_seq LIMIT 1)
                          UNION ALL
                          (SELECT d.fair_hash, true FROM inbox_delivery d
                           WHERE NOT s.is_around AND d.handler_id = a.handler_id AND d.finished_at IS NULL AND d.fair_hash <= a.after
                           ORDER BY d.fair_hash, d.due_at, d.message_seq LIMIT 1)) n
                    LIMIT 1) t
                WHERE s.found < a.wanted AND s.step < a.wanted + :in_vain_max)
            SELECT array_agg(s.fair_hash ORDER BY s.step) FILTER (WHERE s.is_due) AS tenants,
                   (array_agg(s.fair_hash ORDER BY s.step DESC))[1] AS last,
                   max(s.found) < a.wanted AND max(s.step) < a.wanted + :in_vain_max AS is_whole
            FROM scan s) seen"))
    -> TenantScanRow {
        handler_ids: Vec<i16>, limits: Vec<i32>, floors: Vec<Option<PgTimestamp>>, depths_ms: Vec<i64>, are_probes: Vec<bool>, afters: Vec<i64>,
        oldest_max: i32, in_vain_max: i32, with_suspects: bool, suspect_from_crashes: i32, suspect_from_store_errors: i32,
    }
}

/// The result of the scan of one handler, and how its claim is divided.
struct Turn {
    ask: Ask,
    scanned: TenantScan,
    shares: Shares,
}

impl Turn {
    /// The asks for each tenant.
    fn of_tenants(&self) -> impl Iterator<Item = (Ask, i64)> {
        let shares = self.scanned.tenants.iter().zip(&self.shares.tenants);
        shares
            .filter(|(_, limit)| **limit > 0)
            .map(|(&tenant, &limit)| (Ask { limit, after: None, ..self.ask }, tenant))
    }

    /// The asks for deliveries that were stored before the handler was fair: the oldest, of any tenant.
    fn of_unmarked(&self) -> Option<Ask> {
        (self.shares.unmarked > 0).then_some(Ask { limit: self.shares.unmarked, after: None, ..self.ask })
    }
}

impl Claiming<'_> {
    /// Claims the share of each tenant of these handlers. Returns the asks for deliveries that were stored before their
    /// handler was fair.
    pub(super) async fn take_turns(&mut self, conn: &mut AsyncPgConnection, fair: &[Ask]) -> Vec<Ask> {
        let turns = match scan_tenants(conn, self.request, fair).await {
            Ok(turns) => turns,
            Err(error) => {
                self.failed(fair, error);
                return Vec::new();
            }
        };
        self.is_answered = true;
        for (kind, is_rated) in [(Kind::Fair, false), (Kind::FairAndRated, true)] {
            let of_kind = turns.iter().filter(|turn| turn.ask.rate.is_rated() == is_rated);
            let (asks, tenants) = of_kind.flat_map(Turn::of_tenants).unzip();
            self.run(conn, kind, asks, tenants).await;
        }
        let mut counts: HashMap<i16, usize> = HashMap::new();
        for delivery in &self.claims.deliveries {
            *counts.entry(delivery.claim.handler_id).or_default() += 1;
        }
        let count = |ask: &Ask| counts.get(&ask.handler_id).copied().unwrap_or_default();
        let stand = |turn: &Turn| turn.shares.turns(&turn.scanned, count(&turn.ask), turn.ask.rate.is_rated());
        self.claims.turns.extend(turns.iter().map(stand));
        // Also if the limit allows nothing, and so no tenant was checked.
        let is_less = |ask: &&Ask| ask.rate.is_rated() && count(ask) < ask.limit.unsigned_abs() as usize;
        let limited: Vec<Ask> = fair.iter().filter(is_less).copied().collect();
        if !limited.is_empty() {
            self.claims.scan_again_in = scan_again_in(conn, &limited).await;
        }
        turns.iter().filter_map(Turn::of_unmarked).collect()
    }
}

/// Scans the tenants of the requested fair handlers.
async fn scan_tenants(conn: &mut AsyncPgConnection, request: &ClaimRequest, asks: &[Ask]) -> Result<Vec<Turn>> {
    let (floors, depths_ms) = asks.iter().map(bottom).unzip();
    let scan = ScanTenants {
        handler_ids: asks.iter().map(|ask| ask.handler_id).collect(),
        limits: asks.iter().map(|ask| ask.limit).collect(),
        floors,
        depths_ms,
        are_probes: asks.iter().map(|ask| ask.is_probe).collect(),
        afters: asks.iter().map(|ask| ask.after.unwrap_or_default()).collect(),
        oldest_max: OLDEST_MAX,
        in_vain_max: IN_VAIN_MAX,
        with_suspects: request.scope.has_suspects(),
        suspect_from_crashes: request.suspect_from_crashes,
        suspect_from_store_errors: request.suspect_from_store_errors,
    };
    let rows = scan.load::<TenantScanRow>(conn).await.map_err(database("cannot read the tenants of handlers"))?;
    let turn = |row: TenantScanRow| {
        let ask = *asks.iter().find(|ask| ask.handler_id == row.handler_id)?;
        let TenantScanRow { handler_id, wanted, oldest, has_unmarked, tenants, last, is_whole } = row;
        let oldest = oldest.map(DatabaseStamp::to_stamp);
        let scanned = TenantScan { handler_id, oldest, has_unmarked, tenants, last, is_whole };
        let limit = i32::try_from(wanted).unwrap_or(ask.limit);
        let shares = Shares::new(limit, &scanned, rand::random_range(0..usize::MAX));
        Some(Turn { ask, scanned, shares })
    };
    Ok(rows.into_iter().filter_map(turn).collect())
}
