//! Claims due deliveries: one statement for the handlers that are neither ordered nor rated, and one each for those that are one or both (`ordered.rs`).
//!
//! A claim costs what its batch costs, whatever lies beside it, and never waits for a row that somebody else has locked. When a statement fails,
//! what the others have claimed is returned all the same, with the error beside it.

use std::time::{Duration, Instant};

use diesel::QueryResult;
use diesel::pg::data_types::PgTimestamp;
use diesel_async::methods::LoadQuery;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::ordered::{ClaimOrdered, ClaimOrderedRated};
use super::process::millis;
use super::statement::{rows, statements};
use crate::store::rate;
use crate::store::rows::{ClaimRow, claims};
use crate::store::seam::{Ask, ClaimRequest, Claimed, Claims, FailedAsks, LookFrom, Stamp};
use crate::types::Result;

/// Declares claims, which all have the same binds: those of [`Binds`].
macro_rules! claim_statements {
    ($($(#[$meta:meta])* $name:ident($sql:expr))*) => {
        $crate::store::postgres::statement::statements! {$(
            $(#[$meta])*
            $name($sql) -> $crate::store::rows::ClaimRow<diesel::pg::data_types::PgTimestamp> {
                lease_ms: i64, processor: i32, handler_ids: Vec<i16>, limits: Vec<i32>,
                floors: Vec<Option<diesel::pg::data_types::PgTimestamp>>, depths_ms: Vec<i64>, are_probes: Vec<bool>, rate_ids: Vec<i16>, with_suspects: bool,
                solo_from: i32, solo_from_troubles: i32, with_ages: bool,
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
                    with_suspects: binds.with_suspects,
                    solo_from: binds.solo_from,
                    solo_from_troubles: binds.solo_from_troubles,
                    with_ages: binds.with_ages,
                }
            }
        })*
    };
}
pub(super) use claim_statements;

/// What comes before a claim that takes from rate limits: how many deliveries each limit allows now. A limit that another process is taking from
/// allows none: nobody waits for it.
macro_rules! gate {
    (plain) => {
        ""
    };
    (rated) => {
        "gate AS MATERIALIZED (
            SELECT h.id, CASE WHEN h.rate_interval_us IS NULL THEN 2147483647
                              ELSE greatest(0, floor(h.rate_burst - greatest(extract(epoch FROM h.rate_next_at - now()) * 1000000, 0)
                                                                    / h.rate_interval_us)) END::bigint AS allowed
            FROM inbox_handler h WHERE h.id = ANY (:rate_ids) ORDER BY h.id FOR NO KEY UPDATE SKIP LOCKED),
        "
    };
}
pub(super) use gate;

/// What is asked for, of handlers that may be claimed for: how many, and where the look begins. OFFSET 0 keeps `bottom` a value, which the
/// index is probed with. A claim that takes from no rate limit passes over handlers that have one; ids that share a limit share what it allows.
macro_rules! asked {
    (plain) => {
        "SELECT a.handler_id, a.wanted, coalesce(a.floor, now()) - a.depth_ms * interval '1 millisecond' AS bottom
                  FROM unnest(:handler_ids, :limits, :floors, :depths_ms, :are_probes, :rate_ids)
                      AS a (handler_id, wanted, floor, depth_ms, is_probe, rate_id)
                  WHERE (SELECT h.paused_at IS NULL AND (a.is_probe OR h.breaker_opened_at IS NULL) AND h.rate_interval_us IS NULL
                         FROM inbox_handler h WHERE h.id = a.handler_id) OFFSET 0"
    };
    (rated) => {
        "SELECT a.handler_id, least(a.wanted, greatest((SELECT g.allowed FROM gate g WHERE g.id = a.rate_id) - a.before, 0)) AS wanted,
                         coalesce(a.floor, now()) - a.depth_ms * interval '1 millisecond' AS bottom
                  FROM (SELECT u.*, sum(u.wanted) OVER (PARTITION BY u.rate_id ORDER BY u.handler_id) - u.wanted AS before
                        FROM unnest(:handler_ids, :limits, :floors, :depths_ms, :are_probes, :rate_ids)
                            AS u (handler_id, wanted, floor, depth_ms, is_probe, rate_id)) a
                  WHERE (SELECT h.paused_at IS NULL AND (a.is_probe OR h.breaker_opened_at IS NULL)
                         FROM inbox_handler h WHERE h.id = a.handler_id) OFFSET 0"
    };
}
pub(super) use asked;

/// What every claim returns, behind an UPDATE that is called `claimed`. A corrected payload is read only where there is one. What was claimed is
/// taken from the rate limits in the same statement.
macro_rules! claimed_rows {
    ($kind:ident) => {
        concat!(
            "
            RETURNING t.message_seq, t.handler_id, t.attempts, t.errors, t.crashes, t.troubles, t.due_at, t.is_corrected, t.replays)",
            $crate::store::postgres::claim::taken!($kind),
            "
        SELECT c.message_seq, c.handler_id, c.attempts, c.errors, c.crashes, c.troubles,
               CASE WHEN :with_ages AND c.replays = 0 THEN (extract(epoch FROM now() - m.received_at) * 1000)::bigint END, c.due_at,
               m.message_id, m.source, m.topic, m.kafka_partition, m.kafka_offset, m.recorded_at, m.record_key, m.headers,
               CASE WHEN c.is_corrected THEN (SELECT k.payload FROM inbox_correction k
                                              WHERE k.message_seq = c.message_seq AND k.handler_id = c.handler_id
                                              ORDER BY k.audit_id DESC LIMIT 1)
                    ELSE m.payload END, c.is_corrected
        FROM claimed c
        LEFT JOIN LATERAL (SELECT * FROM inbox_message WHERE seq = c.message_seq LIMIT 1) m ON true"
        )
    };
}
pub(super) use claimed_rows;

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

/// The claim of handlers that are not ordered.
macro_rules! claim_sql {
    ($kind:ident) => {
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
                      AND d.due_at >= ask.bottom AND d.due_at <= now()
                      AND CASE WHEN :with_suspects THEN d.locked_until IS NULL OR d.locked_until <= now()
                               ELSE d.locked_until IS NULL AND d.crashes < :solo_from AND d.troubles < :solo_from_troubles END
                      AND d.attempts < 2147483647
                    ORDER BY d.due_at, d.message_seq
                    LIMIT ask.wanted
                    FOR NO KEY UPDATE SKIP LOCKED) due))
",
            claimed_rows!($kind)
        )
    };
}

claim_statements! {
    /// One index probe per handler, in the index's order, then an update by ctid: neither can become a scan or a join, whatever
    /// the planner believes. A lock that ran out without being given back means that its process died, which is counted here, unless
    /// the process is known to be alive: then it is only late. Counters saturate; a row whose attempt cannot grow any more could not be
    /// fenced and is left alone.
    Claim(claim_sql!(plain))

    ClaimRated(claim_sql!(rated))
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

/// What the statements of one claim are given.
pub(super) struct Binds {
    pub(super) lease_ms: i64,
    pub(super) processor: i32,
    pub(super) handler_ids: Vec<i16>,
    pub(super) limits: Vec<i32>,
    pub(super) floors: Vec<Option<PgTimestamp>>,
    pub(super) depths_ms: Vec<i64>,
    pub(super) are_probes: Vec<bool>,
    pub(super) rate_ids: Vec<i16>,
    pub(super) with_suspects: bool,
    pub(super) solo_from: i32,
    pub(super) solo_from_troubles: i32,
    pub(super) with_ages: bool,
}

impl Binds {
    fn new(request: &ClaimRequest, asks: &[Ask]) -> Self {
        let (floors, depths_ms) = asks.iter().map(bottom).unzip();
        Self {
            lease_ms: millis(request.lease),
            processor: request.processor,
            handler_ids: asks.iter().map(|ask| ask.handler_id).collect(),
            limits: asks.iter().map(|ask| ask.limit).collect(),
            floors,
            depths_ms,
            are_probes: asks.iter().map(|ask| ask.is_probe).collect(),
            rate_ids: asks.iter().map(|ask| ask.rate_id).collect(),
            with_suspects: request.scope.has_suspects(),
            solo_from: request.solo_from,
            solo_from_troubles: request.solo_from_troubles,
            with_ages: request.with_ages,
        }
    }
}

pub(super) async fn claim(conn: &mut AsyncPgConnection, request: &ClaimRequest) -> Result<Claims> {
    let mut claims =
        Claims { sent_at: Instant::now(), deliveries: Vec::new(), failed: Vec::new(), look_again_in: None };
    let mut is_answered = false;
    for kind in [Kind::Plain, Kind::Rated, Kind::Ordered, Kind::OrderedAndRated] {
        let asks: Vec<Ask> = request.asks.iter().copied().filter(|ask| Kind::of(ask, request) == kind).collect();
        if asks.is_empty() {
            continue;
        }
        let binds = Binds::new(request, &asks);
        let claimed = match kind {
            Kind::Plain => run(conn, Claim::from(binds)).await,
            Kind::Rated => run(conn, ClaimRated::from(binds)).await,
            Kind::Ordered => run(conn, ClaimOrdered::from(binds)).await,
            Kind::OrderedAndRated => run(conn, ClaimOrderedRated::from(binds)).await,
        };
        match claimed.map_err(database("cannot claim deliveries")) {
            Ok(claimed) => {
                is_answered = true;
                if kind.is_rated() && claimed.len() < asks.iter().map(|ask| ask.limit.unsigned_abs() as usize).sum() {
                    claims.look_again_in = look_again_in(conn, &asks).await;
                }
                claims.deliveries.extend(claimed);
            }
            Err(error) => {
                let handler_ids = asks.iter().map(|ask| ask.handler_id).collect();
                claims.failed.push(FailedAsks { handler_ids, error });
            }
        }
    }
    match claims.failed.pop() {
        Some(FailedAsks { error, .. }) if !is_answered => Err(error),
        last => {
            claims.failed.extend(last);
            Ok(claims)
        }
    }
}

/// Which statement a handler is claimed by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    Rated,
    Ordered,
    OrderedAndRated,
}

impl Kind {
    fn of(ask: &Ask, request: &ClaimRequest) -> Self {
        match (request.ordered_ids.contains(&ask.handler_id), ask.is_rated) {
            (false, false) => Self::Plain,
            (false, true) => Self::Rated,
            (true, false) => Self::Ordered,
            (true, true) => Self::OrderedAndRated,
        }
    }

    fn is_rated(self) -> bool {
        matches!(self, Self::Rated | Self::OrderedAndRated)
    }
}

/// When the rate limits allow more; nothing where they do already. Who cannot be told looks when it would have anyway.
async fn look_again_in(conn: &mut AsyncPgConnection, asks: &[Ask]) -> Option<Duration> {
    let rate_ids = asks.iter().map(|ask| ask.rate_id).collect();
    let limits = RateLimits { rate_ids }.load::<RateRow>(conn).await.ok()?;
    limits.into_iter().filter_map(|row| rate::look_again_in(row.early_us, row.interval_us, row.burst)).min()
}

async fn run<'q, S>(conn: &mut AsyncPgConnection, statement: S) -> QueryResult<Vec<Claimed>>
where
    S: RunQueryDsl<AsyncPgConnection> + LoadQuery<'q, AsyncPgConnection, ClaimRow<PgTimestamp>> + 'q,
{
    Ok(claims(statement.load(conn).await?))
}

/// Where a look begins: a moment, and so many milliseconds before it.
fn bottom(ask: &Ask) -> (Option<PgTimestamp>, i64) {
    match ask.from {
        // PostgreSQL's `-infinity`.
        LookFrom::Beginning => (Some(PgTimestamp(i64::MIN)), 0),
        LookFrom::Below { floor, depth } => (floor.map(|Stamp(micros)| PgTimestamp(micros)), millis(depth)),
    }
}
