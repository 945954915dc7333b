//! Claims due deliveries: one statement for handlers that are neither ordered, fair nor rate-limited, and one for each
//! other kind of handler (`ordered.rs`, `fair.rs`).
//!
//! The cost of a claim depends on its batch, not on the backlog, and it never waits for a row that another session has
//! locked. When a statement fails, the deliveries that the others have claimed are returned together with the error.

use std::time::{Duration, Instant};

use diesel::QueryResult;
use diesel::pg::data_types::PgTimestamp;
use diesel_async::methods::LoadQuery;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::fair::{ClaimFair, ClaimFairRated};
use super::ordered::{ClaimOrdered, ClaimOrderedRated};
use super::process::millis;
use super::statement::{rows, statements};
use crate::store::rate;
use crate::store::rows::{ClaimRow, claims};
use crate::store::seam::{Ask, ClaimRequest, Claimed, Claims, FailedAsks, ScanFrom, Stamp};
use crate::types::{Error, Result};

/// Declares claims, which all have the same binds: those of [`Binds`].
macro_rules! claim_statements {
    ($($(#[$meta:meta])* $name:ident($sql:expr))*) => {
        $crate::store::postgres::statement::statements! {$(
            $(#[$meta])*
            $name($sql) -> $crate::store::rows::ClaimRow<diesel::pg::data_types::PgTimestamp> {
                lease_ms: i64, processor: i32, handler_ids: Vec<i16>, limits: Vec<i32>,
                floors: Vec<Option<diesel::pg::data_types::PgTimestamp>>, depths_ms: Vec<i64>, are_probes: Vec<bool>, rate_ids: Vec<i16>, tenants: Vec<i64>, with_suspects: bool,
                suspect_from_crashes: i32, suspect_from_store_errors: i32, with_ages: bool, payload_bytes_max: i32,
            }
        )*}
        $(impl From<$crate::store::postgres::claim::Binds> for $name {
            fn from(binds: $crate::store::postgres::claim::Binds) -> Self {
                Self {
                    lease_ms: binds.lease_ms,
                    processor: binds.processor,
                    handler_ids: binds.handler_ids,
                    limits: binds.limits,
                    floors: binds.floors,
                    depths_ms: binds.depths_ms,
                    are_probes: binds.are_probes,
                    rate_ids: binds.rate_ids,
                    tenants: binds.tenants,
                    with_suspects: binds.with_suspects,
                    suspect_from_crashes: binds.suspect_from_crashes,
                    suspect_from_store_errors: binds.suspect_from_store_errors,
                    with_ages: binds.with_ages,
                    payload_bytes_max: binds.payload_bytes_max,
                }
            }
        })*
    };
}
pub(super) use claim_statements;

/// How many deliveries the rate limit of a handler `h` allows now.
macro_rules! rate_allows {
    () => {
        "CASE WHEN h.rate_interval_us IS NULL THEN 2147483647
                              ELSE greatest(0, floor(h.rate_burst - greatest(extract(epoch FROM h.rate_next_at - now()) * 1000000, 0)
                                                                    / h.rate_interval_us)) END::bigint"
    };
}
pub(super) use rate_allows;

/// The part before a claim with rate limits: how many deliveries each limit allows now. If another process is taking
/// from a limit, it allows none, so that no claim waits for it.
macro_rules! gate {
    (plain) => {
        ""
    };
    (rated) => {
        concat!(
            "gate AS MATERIALIZED (
            SELECT h.id, ",
            $crate::store::postgres::claim::rate_allows!(),
            " AS allowed
            FROM inbox_handler h WHERE h.id = ANY (:rate_ids) ORDER BY h.id FOR NO KEY UPDATE SKIP LOCKED),
        "
        )
    };
}
pub(super) use gate;

/// The handlers that may be claimed for: how many deliveries of each, and where the index scan begins. OFFSET 0 keeps
/// `bottom` a value, which the index is probed with. The plain claim skips handlers with a rate limit. Ids of one
/// handler share its limit. An ask with the rate id 0 was taken from the limit before.
macro_rules! asked {
    (plain) => {
        "SELECT a.handler_id, a.fair_hash, a.wanted, coalesce(a.floor, now()) - a.depth_ms * interval '1 millisecond' AS bottom
                  FROM unnest(:handler_ids, :limits, :floors, :depths_ms, :are_probes, :rate_ids, :tenants)
                      AS a (handler_id, wanted, floor, depth_ms, is_probe, rate_id, fair_hash)
                  WHERE (SELECT h.paused_at IS NULL AND (a.is_probe OR h.breaker_opened_at IS NULL) AND h.rate_interval_us IS NULL
                         FROM inbox_handler h WHERE h.id = a.handler_id) OFFSET 0"
    };
    (rated) => {
        "SELECT a.handler_id, a.fair_hash, CASE WHEN a.rate_id = 0 THEN a.wanted
                              ELSE least(a.wanted, greatest((SELECT g.allowed FROM gate g WHERE g.id = a.rate_id) - a.before, 0)) END AS wanted,
                         coalesce(a.floor, now()) - a.depth_ms * interval '1 millisecond' AS bottom
                  FROM (SELECT u.*, sum(u.wanted) OVER (PARTITION BY u.rate_id ORDER BY u.handler_id ROWS UNBOUNDED PRECEDING) - u.wanted AS before
                        FROM unnest(:handler_ids, :limits, :floors, :depths_ms, :are_probes, :rate_ids, :tenants)
                            AS u (handler_id, wanted, floor, depth_ms, is_probe, rate_id, fair_hash)) a
                  WHERE (SELECT h.paused_at IS NULL AND (a.is_probe OR h.breaker_opened_at IS NULL)
                         FROM inbox_handler h WHERE h.id = a.handler_id) OFFSET 0"
    };
}
pub(super) use asked;

/// The rows that every claim returns, after an UPDATE that is called `claimed`. A large payload, of a message or
/// corrected, is not read, so that the memory of a claim is bounded. The claimed deliveries are taken from the rate
/// limits in the same statement.
macro_rules! claimed_rows {
    ($kind:ident) => {
        concat!(
            "
            RETURNING t.message_seq, t.handler_id, t.attempts, t.errors, t.crashes, t.store_errors, t.due_at, t.is_corrected, t.replays)",
            $crate::store::postgres::claim::taken!($kind),
            "
        SELECT c.message_seq, c.handler_id, c.attempts, c.errors, c.crashes, c.store_errors,
               CASE WHEN :with_ages AND c.replays = 0 THEN (extract(epoch FROM now() - m.received_at) * 1000)::bigint END, c.due_at,
               m.message_id, m.source, m.topic, m.kafka_partition, m.kafka_offset, m.recorded_at, m.record_key, m.headers,
               CASE WHEN c.is_corrected THEN (SELECT CASE WHEN octet_length(k.payload) <= :payload_bytes_max THEN k.payload END FROM inbox_correction k
                                              WHERE k.message_seq = c.message_seq AND k.handler_id = c.handler_id
                                              ORDER BY k.audit_id DESC LIMIT 1)
                    WHEN octet_length(m.payload) <= :payload_bytes_max THEN m.payload END, c.is_corrected,
               CASE WHEN c.is_corrected THEN (SELECT CASE WHEN octet_length(k.payload) > :payload_bytes_max THEN octet_length(k.payload) END FROM inbox_correction k
                                              WHERE k.message_seq = c.message_seq AND k.handler_id = c.handler_id
                                              ORDER BY k.audit_id DESC LIMIT 1)
                    WHEN octet_length(m.payload) > :payload_bytes_max THEN octet_length(m.payload) END
        FROM claimed c
        LEFT JOIN LATERAL (SELECT * FROM inbox_message WHERE seq = c.message_seq LIMIT 1) m ON true"
        )
    };
}
pub(super) use claimed_rows;

/// The part after a claim with rate limits: takes the claimed deliveries from the limits that `gate!` has locked.
macro_rules! taken {
    (plain) => {
        ""
    };
    (rated) => {
        ",
        taken AS (
            UPDATE inbox_handler h
            SET rate_next_at = greatest(h.rate_next_at, now()) + n.claimed * h.rate_interval_us * interval '1 microsecond'
            FROM (SELECT u.rate_id, (SELECT count(*) FROM claimed c WHERE c.handler_id = ANY (u.handler_ids)) AS claimed
                  FROM (SELECT r.rate_id, array_agg(r.handler_id) AS handler_ids
                        FROM unnest(:handler_ids, :rate_ids) AS r (handler_id, rate_id) GROUP BY r.rate_id) u) n
            WHERE h.id = n.rate_id AND n.claimed > 0 AND h.rate_interval_us IS NOT NULL)"
    };
}
pub(super) use taken;

/// Which deliveries an ask selects, and in which order: the oldest, or the oldest of one tenant.
macro_rules! meant {
    (oldest) => {
        "AND d.due_at >= ask.bottom AND d.due_at <= now()"
    };
    (fair) => {
        "AND d.fair_hash IS NOT NULL
                      AND (d.fair_hash, d.due_at) >= (ask.fair_hash, ask.bottom) AND (d.fair_hash, d.due_at) <= (ask.fair_hash, now())"
    };
}
pub(super) use meant;

macro_rules! in_order {
    (oldest) => {
        "d.due_at, d.message_seq"
    };
    (fair) => {
        "d.fair_hash, d.due_at, d.message_seq"
    };
}
pub(super) use in_order;

/// The claim of handlers that are not ordered.
macro_rules! claim_sql {
    ($kind:ident, $whose:ident) => {
        concat!(
            "
        WITH ", gate!($kind), "claimed AS (
            UPDATE inbox_delivery t
            SET locked_until = now() + :lease_ms * interval '1 millisecond', locked_by = :processor, attempts = t.attempts + 1,
                crashes = t.crashes + CASE WHEN t.locked_until IS NULL OR t.crashes = 2147483647 OR t.locked_by = :processor THEN 0
                                           WHEN (SELECT p.alive_until > now() FROM inbox_processor p WHERE p.id = t.locked_by)
                                           THEN 0 ELSE 1 END
            WHERE t.ctid = ANY (ARRAY(
                SELECT due.tid
                FROM (", asked!($kind), ") ask
                CROSS JOIN LATERAL (
                    SELECT d.ctid AS tid FROM inbox_delivery d
                    WHERE d.handler_id = ask.handler_id AND d.finished_at IS NULL
                      ", $crate::store::postgres::claim::meant!($whose), "
                      AND CASE WHEN :with_suspects THEN d.locked_until IS NULL OR d.locked_until <= now()
                               ELSE d.locked_until IS NULL AND d.crashes < :suspect_from_crashes AND d.store_errors < :suspect_from_store_errors END
                      AND d.attempts < 2147483647
                    ORDER BY ", $crate::store::postgres::claim::in_order!($whose), "
                    LIMIT ask.wanted
                    FOR NO KEY UPDATE SKIP LOCKED) due))
",
            claimed_rows!($kind)
        )
    };
}
pub(super) use claim_sql;

claim_statements! {
    /// One index probe per handler, in the index's order, then an update by ctid: neither can become a scan or a join,
    /// whatever the statistics say. A claim that expired without being released means that its process crashed, which
    /// is counted here, unless the process is known to be alive: then it is only late. Counters saturate; a row whose
    /// attempt cannot grow any more could not be fenced, and is not claimed.
    Claim(claim_sql!(plain, oldest))

    ClaimRated(claim_sql!(rated, oldest))
}

rows! {
    RateRow { early_us: i64, interval_us: i64, burst: i32 }
}

statements! {
    /// How far each limit is ahead of its schedule.
    RateLimits("
        SELECT coalesce((extract(epoch FROM h.rate_next_at - now()) * 1000000)::bigint, 0), h.rate_interval_us, h.rate_burst
        FROM inbox_handler h WHERE h.id = ANY (:rate_ids) AND h.rate_interval_us IS NOT NULL") -> RateRow { rate_ids: Vec<i16> }
}

/// The arguments of the statements of one claim.
pub(super) struct Binds {
    pub(super) lease_ms: i64,
    pub(super) processor: i32,
    pub(super) handler_ids: Vec<i16>,
    pub(super) limits: Vec<i32>,
    /// Where the scan of each ask begins; `None` means now.
    pub(super) floors: Vec<Option<PgTimestamp>>,
    pub(super) depths_ms: Vec<i64>,
    pub(super) are_probes: Vec<bool>,
    pub(super) rate_ids: Vec<i16>,
    /// The tenant of each ask, if it selects one.
    pub(super) tenants: Vec<i64>,
    pub(super) with_suspects: bool,
    pub(super) suspect_from_crashes: i32,
    pub(super) suspect_from_store_errors: i32,
    pub(super) with_ages: bool,
    pub(super) payload_bytes_max: i32,
}

impl Binds {
    fn new(request: &ClaimRequest, asks: &[Ask], tenants: Vec<i64>) -> Self {
        let (floors, depths_ms) = asks.iter().map(bottom).unzip();
        Self {
            lease_ms: millis(request.lease),
            processor: request.processor,
            handler_ids: asks.iter().map(|ask| ask.handler_id).collect(),
            limits: asks.iter().map(|ask| ask.limit).collect(),
            floors,
            depths_ms,
            are_probes: asks.iter().map(|ask| ask.is_probe).collect(),
            // No handler has the id 0.
            rate_ids: asks.iter().map(|ask| ask.rate.limit_id().unwrap_or_default()).collect(),
            tenants,
            with_suspects: request.scope.has_suspects(),
            suspect_from_crashes: request.suspect_from_crashes,
            suspect_from_store_errors: request.suspect_from_store_errors,
            with_ages: request.with_ages,
            payload_bytes_max: request.payload_bytes_max,
        }
    }
}

pub(super) async fn claim(conn: &mut AsyncPgConnection, request: &ClaimRequest) -> Result<Claims> {
    let mut claiming = Claiming::new(request);
    let (fair, mut asks): (Vec<Ask>, Vec<Ask>) = request.asks.iter().partition(|ask| ask.after.is_some());
    if !fair.is_empty() {
        asks.extend(claiming.take_turns(conn, &fair).await);
    }
    for kind in [Kind::Plain, Kind::Rated, Kind::Ordered, Kind::OrderedAndRated] {
        let asks: Vec<Ask> = asks.iter().copied().filter(|ask| Kind::of(ask, request) == kind).collect();
        claiming.run(conn, kind, asks, Vec::new()).await;
    }
    claiming.end()
}

/// The state of a claim across its statements.
pub(super) struct Claiming<'r> {
    pub(super) request: &'r ClaimRequest,
    pub(super) claims: Claims,
    pub(super) is_answered: bool,
}

impl<'r> Claiming<'r> {
    fn new(request: &'r ClaimRequest) -> Self {
        let (deliveries, failed, turns) = (Vec::new(), Vec::new(), Vec::new());
        let claims = Claims { sent_at: Instant::now(), deliveries, failed, turns, scan_again_in: None };
        Self { request, claims, is_answered: false }
    }

    /// Runs the statement of one kind. An error is kept with its asks, and the other kinds still run.
    pub(super) async fn run(&mut self, conn: &mut AsyncPgConnection, kind: Kind, asks: Vec<Ask>, tenants: Vec<i64>) {
        if asks.is_empty() {
            return;
        }
        let binds = Binds::new(self.request, &asks, tenants);
        let claimed = match kind {
            Kind::Plain => run(conn, Claim::from(binds)).await,
            Kind::Rated => run(conn, ClaimRated::from(binds)).await,
            Kind::Ordered => run(conn, ClaimOrdered::from(binds)).await,
            Kind::OrderedAndRated => run(conn, ClaimOrderedRated::from(binds)).await,
            Kind::Fair => run(conn, ClaimFair::from(binds)).await,
            Kind::FairAndRated => run(conn, ClaimFairRated::from(binds)).await,
        };
        match claimed.map_err(database("cannot claim deliveries")) {
            Ok(claimed) => {
                self.is_answered = true;
                // For fair handlers, `take_turns` does that.
                if matches!(kind, Kind::Rated | Kind::OrderedAndRated)
                    && claimed.len() < asks.iter().map(|ask| ask.limit.unsigned_abs() as usize).sum()
                {
                    let wait = scan_again_in(conn, &asks).await;
                    self.claims.scan_again_in = wait.into_iter().chain(self.claims.scan_again_in).min();
                }
                self.claims.deliveries.extend(claimed);
            }
            Err(error) => self.failed(&asks, error),
        }
    }

    pub(super) fn failed(&mut self, asks: &[Ask], error: Error) {
        let handler_ids = asks.iter().map(|ask| ask.handler_id).collect();
        self.claims.failed.push(FailedAsks { handler_ids, error });
    }

    fn end(mut self) -> Result<Claims> {
        match self.claims.failed.pop() {
            Some(FailedAsks { error, .. }) if !self.is_answered => Err(error),
            last => {
                self.claims.failed.extend(last);
                Ok(self.claims)
            }
        }
    }
}

/// The statement that claims for a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Plain,
    Rated,
    Ordered,
    OrderedAndRated,
    Fair,
    FairAndRated,
}

impl Kind {
    /// For deliveries that are not claimed by tenant.
    fn of(ask: &Ask, request: &ClaimRequest) -> Self {
        match (request.ordered_ids.contains(&ask.handler_id), ask.rate.is_rated()) {
            (false, false) => Self::Plain,
            (false, true) => Self::Rated,
            (true, false) => Self::Ordered,
            (true, true) => Self::OrderedAndRated,
        }
    }
}

/// When the rate limits allow more starts; `None` if they do now. If the query fails, the claim loop uses its normal
/// poll interval.
pub(super) async fn scan_again_in(conn: &mut AsyncPgConnection, asks: &[Ask]) -> Option<Duration> {
    let rate_ids = asks.iter().filter_map(|ask| ask.rate.limit_id()).collect();
    let limits = RateLimits { rate_ids }.load::<RateRow>(conn).await.ok()?;
    limits.into_iter().filter_map(|row| rate::scan_again_in(row.early_us, row.interval_us, row.burst)).min()
}

async fn run<'q, S>(conn: &mut AsyncPgConnection, statement: S) -> QueryResult<Vec<Claimed>>
where
    S: RunQueryDsl<AsyncPgConnection> + LoadQuery<'q, AsyncPgConnection, ClaimRow<PgTimestamp>> + 'q,
{
    Ok(claims(statement.load(conn).await?))
}

/// Where the scan begins: a time, and this many milliseconds before it.
pub(super) fn bottom(ask: &Ask) -> (Option<PgTimestamp>, i64) {
    match ask.from {
        // PostgreSQL's `-infinity`.
        ScanFrom::Beginning => (Some(PgTimestamp(i64::MIN)), 0),
        ScanFrom::Below { floor, depth } => (floor.map(|Stamp(micros)| PgTimestamp(micros)), millis(depth)),
    }
}
