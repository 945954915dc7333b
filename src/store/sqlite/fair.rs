//! Claims deliveries of fair handlers: an equal share for each tenant with due deliveries.
//!
//! The scan is that of `postgres/fair.rs`, with one probe of the index of tenants for each step. There is no other
//! writer meanwhile, so the deliveries that it finds are claimed.

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::process::claim_columns;
use super::statement::{only_row, rows, statements};
use crate::store::rows::{ClaimRow, claims};
use crate::store::seam::{Ask, ClaimRequest, Claimed, Stamp};
use crate::store::turns::{IN_VAIN_MAX, OLDEST_MAX, Shares, TenantScan};

/// Whether a claim may take a delivery.
macro_rules! is_free {
    () => {
        " AND d.due_at >= :floor AND d.due_at <= :now AND d.attempts < 2147483647
          AND CASE WHEN :with_suspects THEN d.locked_until IS NULL OR d.locked_until <= :now
                   ELSE d.locked_until IS NULL AND d.crashes < :suspect_from_crashes AND d.store_errors < :suspect_from_store_errors END"
    };
}

rows! {
    /// The oldest due delivery, and whether one of the oldest has no tenant.
    NearRow { oldest: Option<i64>, has_unmarked: Option<bool> }
}

statements! {
    /// Whether anything may be claimed: something is due, the handler is not paused, its breaker is closed or the claim
    /// is a probe, and the claim knows of its rate limit.
    IsAny(concat!("
        SELECT count(*) > 0 FROM (
            SELECT 1 FROM inbox_delivery d INDEXED BY inbox_delivery_due
            WHERE d.handler_id = :handler_id AND d.finished_at IS NULL", is_free!(), "
              AND (SELECT h.paused_at IS NULL AND (:is_probe OR h.breaker_opened_at IS NULL) AND (:is_rated OR h.rate_interval_us IS NULL)
                   FROM inbox_handler h WHERE h.id = :handler_id)
            LIMIT 1)"))
    -> bool {
        handler_id: i16, floor: i64, now: i64, with_suspects: bool, suspect_from_crashes: i32, suspect_from_store_errors: i32, is_probe: bool, is_rated: bool,
    }

    /// The oldest due delivery, and whether one of the oldest was stored before the handler was fair.
    Near("
        SELECT min(due_at), max(fair_hash IS NULL)
        FROM (SELECT d.due_at, d.fair_hash FROM inbox_delivery d INDEXED BY inbox_delivery_due
              WHERE d.handler_id = :handler_id AND d.finished_at IS NULL AND d.due_at >= :floor AND d.due_at <= :now
              ORDER BY d.due_at, d.message_seq LIMIT :oldest_max)")
    -> NearRow { handler_id: i16, floor: i64, now: i64, oldest_max: i32 }

    /// The first tenant with open deliveries after one tenant and up to another.
    Next("
        SELECT d.fair_hash FROM inbox_delivery d INDEXED BY inbox_delivery_fair
        WHERE d.handler_id = :handler_id AND d.finished_at IS NULL AND d.fair_hash > :after AND d.fair_hash <= :to
        ORDER BY d.fair_hash LIMIT 1") -> i64 { handler_id: i16, after: i64, to: i64 }

    IsDue(concat!("
        SELECT count(*) > 0 FROM (
            SELECT 1 FROM inbox_delivery d INDEXED BY inbox_delivery_fair
            WHERE d.handler_id = :handler_id AND d.finished_at IS NULL AND d.fair_hash = :tenant", is_free!(), " LIMIT 1)"))
    -> bool {
        handler_id: i16, tenant: i64, floor: i64, now: i64, with_suspects: bool, suspect_from_crashes: i32, suspect_from_store_errors: i32,
    }

    /// Like `Due` in `process.rs`, for one tenant.
    DueOf(concat!(claim_columns!(), "
        FROM inbox_delivery d INDEXED BY inbox_delivery_fair
        LEFT JOIN inbox_message m ON m.seq = d.message_seq
        WHERE d.handler_id = :handler_id AND d.finished_at IS NULL AND d.fair_hash = :tenant", is_free!(), "
        ORDER BY d.due_at, d.message_seq
        LIMIT :limit"))
    -> ClaimRow<i64> {
        processor: i32, handler_id: i16, tenant: i64, floor: i64, now: i64, with_suspects: bool, suspect_from_crashes: i32, suspect_from_store_errors: i32,
        with_ages: bool, payload_bytes_max: i32, limit: i32,
    }
}

/// The result of a scan, how the claim is divided, and the deliveries that are claimed by tenant.
pub(super) struct Turn {
    pub(super) scanned: TenantScan,
    pub(super) shares: Shares,
    pub(super) due: Vec<Claimed>,
}

/// The requested handler, with the range of due times.
#[derive(Clone, Copy)]
struct Asked<'r> {
    request: &'r ClaimRequest,
    ask: Ask,
    floor: i64,
    now: i64,
}

/// Due deliveries of the tenants of a fair handler, at most `ask.limit`.
pub(super) fn turn(
    conn: &mut SqliteConnection,
    request: &ClaimRequest,
    ask: Ask,
    floor: i64,
    now: i64,
) -> QueryResult<Turn> {
    let asked = Asked { request, ask, floor, now };
    let scanned = asked.scan_tenants(conn)?;
    let shares = Shares::new(ask.limit, &scanned, rand::random_range(0..usize::MAX));
    let mut due = Vec::new();
    for (&tenant, &limit) in scanned.tenants.iter().zip(&shares.tenants) {
        due.extend(asked.of_tenant(conn, tenant, limit)?);
    }
    Ok(Turn { scanned, shares, due })
}

impl Asked<'_> {
    /// Goes from tenant to tenant, once around at most, until enough have something due.
    fn scan_tenants(self, conn: &mut SqliteConnection) -> QueryResult<TenantScan> {
        let Self { ask: Ask { handler_id, limit, .. }, floor, now, .. } = self;
        let near = Near { handler_id, floor, now, oldest_max: OLDEST_MAX }.load::<NearRow>(conn).and_then(only_row)?;
        let oldest = near.oldest.map(Stamp);
        let has_unmarked = near.has_unmarked.unwrap_or_default();
        let mut scanned =
            TenantScan { handler_id, oldest, has_unmarked, tenants: Vec::new(), last: None, is_whole: true };
        if limit <= 0 || !self.is_any(conn)? {
            return Ok(scanned);
        }
        let begins_after = self.ask.after.unwrap_or_default();
        let (mut after, mut to) = (begins_after, i64::MAX);
        let mut steps = 0;
        loop {
            if scanned.tenants.len() >= limit.unsigned_abs() as usize || steps >= limit.saturating_add(IN_VAIN_MAX) {
                scanned.is_whole = false;
                break;
            }
            match (Next { handler_id, after, to }.load::<i64>(conn)?.pop(), to) {
                (Some(tenant), _) => {
                    (after, steps, scanned.last) = (tenant, steps + 1, Some(tenant));
                    if self.is_due(conn, tenant)? {
                        scanned.tenants.push(tenant);
                    }
                }
                // Around the end. The scan finds hashes above `after`, so a tenant whose hash is the lowest number is
                // missed: its probability is one in 2^64.
                (None, i64::MAX) if begins_after < i64::MAX => (after, to) = (i64::MIN, begins_after),
                (None, _) => break,
            }
        }
        Ok(scanned)
    }

    /// Checked first, because most claims of an idle handler end here.
    fn is_any(self, conn: &mut SqliteConnection) -> QueryResult<bool> {
        let Self { request, ask, floor, now } = self;
        let is_any = IsAny {
            handler_id: ask.handler_id,
            floor,
            now,
            with_suspects: request.scope.has_suspects(),
            suspect_from_crashes: request.suspect_from_crashes,
            suspect_from_store_errors: request.suspect_from_store_errors,
            is_probe: ask.is_probe,
            is_rated: ask.rate.is_rated(),
        };
        is_any.load(conn).and_then(only_row)
    }

    /// Whether the tenant has a delivery that the claim may take.
    fn is_due(self, conn: &mut SqliteConnection, tenant: i64) -> QueryResult<bool> {
        let Self { request, ask, floor, now } = self;
        let is_due = IsDue {
            handler_id: ask.handler_id,
            tenant,
            floor,
            now,
            with_suspects: request.scope.has_suspects(),
            suspect_from_crashes: request.suspect_from_crashes,
            suspect_from_store_errors: request.suspect_from_store_errors,
        };
        is_due.load(conn).and_then(only_row)
    }

    /// The oldest deliveries of a tenant that the claim may take.
    fn of_tenant(self, conn: &mut SqliteConnection, tenant: i64, limit: i32) -> QueryResult<Vec<Claimed>> {
        let Self { request, ask, floor, now } = self;
        let due = DueOf {
            processor: request.processor,
            handler_id: ask.handler_id,
            tenant,
            floor,
            now,
            with_suspects: request.scope.has_suspects(),
            suspect_from_crashes: request.suspect_from_crashes,
            suspect_from_store_errors: request.suspect_from_store_errors,
            with_ages: request.with_ages,
            payload_bytes_max: request.payload_bytes_max,
            limit,
        };
        Ok(claims(due.load::<ClaimRow<i64>>(conn)?))
    }
}

#[cfg(test)]
mod tests;
