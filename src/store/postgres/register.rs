//! Handler ids: reads the known keys, lets `aliases.rs` decide, writes the missing ids, all under one lock.

use std::collections::HashMap;
use std::time::Duration;

use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::{Rollback, database};
use super::poison;
use super::process::millis;
use super::statement::{only_row, statements};
use crate::store::aliases;
use crate::store::seam::{HandlerIds, KeyedBy, WantedHandler, Wants};
use crate::types::Result;

statements! {
    /// Two processes that start at once must not give one handler two ids. If a process is frozen while it holds the
    /// lock, the server ends its session, so that others can start.
    Lock("SELECT set_config('idle_in_transaction_session_timeout', '10s', true) IS NOT NULL
             AND pg_advisory_xact_lock(hashtextextended('wharf register ' || current_schema(), 0)) IS NULL") -> bool {}

    KnownKeys<'a>("SELECT key, handler_id FROM inbox_handler_key WHERE key = ANY(:keys)")
    -> (String, i16) { keys: &'a [&'a str] }

    /// The first key is the current one.
    NewHandler<'a>("
        WITH handler AS (INSERT INTO inbox_handler (key) VALUES ((:keys::text[])[1]) RETURNING id)
        INSERT INTO inbox_handler_key (key, handler_id) SELECT unnest(:keys), id FROM handler") { keys: &'a [String] }

    NewAlias<'a>("INSERT INTO inbox_handler_key (key, handler_id) VALUES (:key, :handler_id)")
    { key: &'a str, handler_id: i16 }

    /// The displayed name is the key of the newest registration.
    Rename<'a>("UPDATE inbox_handler SET key = :key WHERE id = :handler_id AND key <> :key")
    { key: &'a str, handler_id: i16 }

    /// Written to every id: deliveries stored under an older id also belong to this handler.
    SetOrder<'a>("
        UPDATE inbox_handler SET is_ordered = :is_ordered, passes_poisoned = :passes_poisoned, is_fair = :is_fair
        WHERE id = ANY (:all) AND (is_ordered, passes_poisoned, is_fair) IS DISTINCT FROM (:is_ordered, :passes_poisoned, :is_fair)")
    { is_ordered: bool, passes_poisoned: bool, is_fair: bool, all: &'a [i16] }

    /// Subscriptions for inbox_accept, under the id of new deliveries; unchanged rows are not written again.
    Subscribe<'a>("
        WITH gone AS (
            DELETE FROM inbox_subscription WHERE handler_id = ANY (:all) AND (handler_id <> :current OR topic <> ALL (:topics)))
        INSERT INTO inbox_subscription AS s (topic, matches, handler_id, event_types, delay_ms, delay_header, order_by, order_header, fair_by, fair_header)
        SELECT DISTINCT t.topic, t.matches, :current, :event_types, :delay_ms, :delay_header, :order_by, :order_header, :fair_by, :fair_header
        FROM unnest(:topics, :matches) AS t (topic, matches)
        ON CONFLICT (topic, handler_id) DO UPDATE
        SET matches = excluded.matches, event_types = excluded.event_types, delay_ms = excluded.delay_ms, delay_header = excluded.delay_header,
            order_by = excluded.order_by, order_header = excluded.order_header, fair_by = excluded.fair_by, fair_header = excluded.fair_header
        WHERE (s.matches, s.event_types, s.delay_ms, s.delay_header, s.order_by, s.order_header, s.fair_by, s.fair_header)
              IS DISTINCT FROM (excluded.matches, excluded.event_types, excluded.delay_ms, excluded.delay_header, excluded.order_by, excluded.order_header,
                                excluded.fair_by, excluded.fair_header)")
    {
        all: &'a [i16], current: i16, topics: Vec<&'a str>, matches: Vec<Option<&'a str>>, event_types: Option<&'a [String]>, delay_ms: Option<i64>,
        delay_header: Option<&'a str>, order_by: Option<&'a str>, order_header: Option<&'a str>, fair_by: Option<&'a str>,
        fair_header: Option<&'a str>,
    }

    /// The schema of the inbox.
    Schema("SELECT current_schema()") -> Option<String> {}

    /// A limit that an operator has set stays.
    SetRate<'a>("
        UPDATE inbox_handler
        SET registered_interval_us = :interval_us, registered_burst = :burst,
            rate_interval_us = CASE WHEN rate_is_set THEN rate_interval_us ELSE :interval_us END,
            rate_burst = CASE WHEN rate_is_set THEN rate_burst ELSE :burst END,
            rate_next_at = CASE WHEN rate_is_set THEN rate_next_at END
        WHERE id = ANY (:all) AND (registered_interval_us, registered_burst) IS DISTINCT FROM (:interval_us, :burst)")
    { interval_us: Option<i64>, burst: Option<i32>, all: &'a [i16] }

    /// Processes that know only one of the ids must not add deliveries to messages that have one under another id.
    Unite<'a>("
        UPDATE inbox_handler SET same_as = :current
        WHERE (id = ANY (:all) OR same_as = ANY (:all)) AND same_as IS DISTINCT FROM :current")
    { current: i16, all: &'a [i16] }

    /// The open state belongs to every id: the probe of the lowest one could not close the breaker of another.
    ShareBreaker("
        UPDATE inbox_handler h
        SET breaker_opened_at = o.breaker_opened_at, breaker_error = o.breaker_error, breaker_probe_at = o.breaker_probe_at
        FROM (SELECT * FROM inbox_handler WHERE same_as = :current AND breaker_opened_at IS NOT NULL ORDER BY id LIMIT 1) o
        WHERE h.same_as = :current AND h.breaker_opened_at IS NULL")
    { current: i16 }

    /// A limit that an operator has set belongs to every id, because claims read that of the lowest one. It comes with
    /// its schedule. If several ids have one, that of the current id stays.
    ShareRate("
        UPDATE inbox_handler h
        SET rate_is_set = true, rate_interval_us = s.rate_interval_us, rate_burst = s.rate_burst, rate_next_at = s.rate_next_at
        FROM (SELECT * FROM inbox_handler WHERE same_as = :current AND rate_is_set ORDER BY id <> :current, id LIMIT 1) s
        WHERE h.same_as = :current
          AND (h.rate_is_set, h.rate_interval_us, h.rate_burst) IS DISTINCT FROM (true, s.rate_interval_us, s.rate_burst)")
    { current: i16 }

    /// The handlers of one program are separate, even if a later version united their ids: that version was rolled
    /// back. The id that others were united with keeps its `same_as`, because further ids may be united with it.
    /// Returns all ids that belonged together before, or none if nothing changes.
    Part<'a>("
        WITH parted AS MATERIALIZED (
            SELECT h.id, h.same_as FROM inbox_handler h
            WHERE h.id = ANY (:own) AND h.same_as <> h.id
              AND (SELECT true FROM inbox_handler o
                   WHERE o.id = ANY (:others) AND coalesce(o.same_as, o.id) = h.same_as LIMIT 1)),
        part AS (
            UPDATE inbox_handler h SET same_as = NULL WHERE h.id = ANY (ARRAY(SELECT id FROM parted)))
        SELECT g.id FROM inbox_handler g WHERE g.same_as = ANY (ARRAY(SELECT same_as FROM parted))")
    -> i16 { own: &'a [i16], others: &'a [i16] }

    PromoteParted<'a>("SELECT inbox_promote_parted(:parted) IS NULL") -> bool { parted: &'a [i16] }
}

/// How long claims that began before handlers were separated may still run.
const CLAIMS_END: Duration = Duration::from_secs(1);

/// Registers all handlers of a process in one transaction, under a lock per schema: two processes that start at the
/// same time see each other's keys.
pub(super) async fn register(conn: &mut AsyncPgConnection, wanted: &[WantedHandler]) -> Result<Vec<HandlerIds>> {
    let mut all_parted = Vec::new();
    let registered = conn
        .build_transaction()
        .read_committed()
        .run(async |conn| {
            Lock {}.load::<bool>(conn).await?;
            let known = known_keys(conn, wanted).await?;
            aliases::refuse_shared_ids(wanted, &known)?;
            let plan = aliases::plan(wanted, &known);
            for keys in &plan.new_handlers {
                NewHandler { keys }.execute(conn).await?;
            }
            for (key, handler_id) in &plan.aliases {
                NewAlias { key, handler_id: *handler_id }.execute(conn).await?;
            }
            let ids = aliases::resolve(wanted, &known_keys(conn, wanted).await?)?;
            let every: Vec<i16> = ids.iter().flat_map(|ids| ids.all.iter().copied()).collect();
            for (handler, ids) in wanted.iter().zip(&ids) {
                Rename { key: &handler.key, handler_id: ids.current }.execute(conn).await?;
                let passes_poisoned = handler.order.is_some_and(|order| order.passes_poisoned);
                let (is_ordered, is_fair) = (handler.order.is_some(), handler.is_fair);
                let set = SetOrder { is_ordered, passes_poisoned, is_fair, all: &ids.all };
                set.execute(conn).await?;
                let (interval_us, burst) = handler.rate.map(|rate| (rate.interval_us, rate.burst)).unzip();
                SetRate { interval_us, burst, all: &ids.all }.execute(conn).await?;
                subscribe(&handler.wants, ids).execute(conn).await?;
                poison::set(conn, handler, &ids.all).await?;
                let others = every.iter().copied().filter(|id| !ids.all.contains(id)).collect::<Vec<i16>>();
                let parted = Part { own: &ids.all, others: &others }.load::<i16>(conn).await?;
                if !parted.is_empty() {
                    PromoteParted { parted: &parted }.load::<bool>(conn).await?;
                    all_parted.extend(parted);
                }
                if ids.all.len() > 1 {
                    Unite { current: ids.current, all: &ids.all }.execute(conn).await?;
                    ShareBreaker { current: ids.current }.execute(conn).await?;
                    ShareRate { current: ids.current }.execute(conn).await?;
                }
            }
            Result::<_, Rollback>::Ok(ids)
        })
        .await;
    let ids = registered.map_err(|rollback| rollback.or(database("cannot register the handlers")))?;
    if !all_parted.is_empty() {
        // A claim that ran beside the transaction may have held further deliveries behind those of the other handler. If
        // this fails, such a delivery waits until a newer one of its key has run. The handlers are registered anyway.
        tokio::time::sleep(CLAIMS_END).await;
        let _ = PromoteParted { parted: &all_parted }.load::<bool>(conn).await;
    }
    Ok(ids)
}

fn subscribe<'a>(wants: &'a Wants, ids: &'a HandlerIds) -> Subscribe<'a> {
    let Wants { topics, event_types, delay, delay_header, ordered_by, fair_by } = wants;
    let (order_by, order_header) = keyed_by(ordered_by.as_ref());
    let (fair_by, fair_header) = keyed_by(fair_by.as_ref());
    Subscribe {
        all: &ids.all,
        current: ids.current,
        topics: topics.iter().map(|wanted| wanted.topic.as_str()).collect(),
        matches: topics.iter().map(|wanted| wanted.matches.as_deref()).collect(),
        event_types: (!event_types.is_empty()).then_some(event_types),
        delay_ms: delay.map(millis),
        delay_header: delay_header.as_deref(),
        order_by,
        order_header,
        fair_by,
        fair_header,
    }
}

/// As in `inbox_subscription`: how a key is found, and in which header.
fn keyed_by(keyed_by: Option<&KeyedBy>) -> (Option<&str>, Option<&str>) {
    match keyed_by {
        None => (None, None),
        Some(KeyedBy::RecordKey) => (Some("record key"), None),
        Some(KeyedBy::Header(name)) => (Some("header"), Some(name.as_str())),
        Some(KeyedBy::Process) => (Some("process"), None),
    }
}

/// The schema in which the connection finds the inbox.
pub(super) async fn schema(conn: &mut AsyncPgConnection) -> Result<String> {
    let found: diesel::QueryResult<Option<String>> = Schema {}.load(conn).await.and_then(only_row);
    Ok(found.map_err(database("cannot read the schema of the inbox"))?.unwrap_or_default())
}

async fn known_keys(
    conn: &mut AsyncPgConnection,
    wanted: &[WantedHandler],
) -> diesel::QueryResult<HashMap<String, i16>> {
    let keys: Vec<&str> = wanted
        .iter()
        .flat_map(|handler| std::iter::once(&handler.key).chain(&handler.former_keys))
        .map(String::as_str)
        .collect();
    Ok(KnownKeys { keys: &keys }.load(conn).await?.into_iter().collect())
}
