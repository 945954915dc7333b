//! Queries: handlers, processes, deliveries and quarantined records, as JSON.

use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::super::errors::database;
use super::super::statement::statements;
use crate::store::counts::limit;
use crate::store::operating::{HANDLER_KEYS, ReplayState, from_json};
use crate::types::{
    DeliveryFilter, DeliverySummary, ErrorSummary, HandlerStatus, HeldKey, ProcessorStatus, QuarantineFilter,
    QuarantineSummary, Result, State,
};

statements! {
    /// For the rest of the transaction, tables are read by index, whatever the planner estimates. JIT would take longer
    /// than the query.
    ByIndex("
        SELECT concat(set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
                      set_config('jit', 'off', true))") -> String {}

    HandlerKeys(HANDLER_KEYS) -> (String, String) {}

    /// Ids that became one handler are one row. Counts stop at 10,000, as in the view. Whether finished deliveries are
    /// kept is derived from the newest thousand messages; a handler of a live process is assumed to have some if there
    /// are more messages.
    Handlers("
        SELECT row_to_json(x)::text FROM (
            SELECT h.key AS handler_key, least(sum(b.due), 10000)::bigint AS due, least(sum(b.later), 10000)::bigint AS later,
                   least(sum(b.held), 10000)::bigint AS held, h.is_ordered,
                   least(sum(b.running), 10000)::bigint AS running, least(sum(b.poisoned), 10000)::bigint AS poisoned,
                   extract(epoch FROM max(b.oldest_due_age))::float8 AS oldest_due_secs, inbox_micros(min(b.next_due_at)) AS next_due_at,
                   inbox_micros(min(b.paused_at)) AS paused_at, inbox_micros(min(b.unknown_since)) AS unknown_since,
                   inbox_micros(min(b.breaker_opened_at)) AS breaker_opened_at, h.breaker_error,
                   1000000.0 / h.rate_interval_us AS rate_per_sec, h.rate_burst, h.rate_is_set AS is_rate_set,
                   ARRAY(SELECT k.key FROM inbox_handler_key k JOIN inbox_handler own ON own.id = k.handler_id
                         WHERE coalesce(own.same_as, own.id) = h.id AND k.key <> h.key ORDER BY 1) AS former_keys,
                   (SELECT json_agg(keys) FROM (
                        SELECT json_agg(k.key ORDER BY k.key) AS keys FROM inbox_handler_key k JOIN inbox_handler own ON own.id = k.handler_id
                        WHERE coalesce(own.same_as, own.id) = h.id GROUP BY own.id ORDER BY own.id) of_id) AS keys_by_id,
                   (SELECT count(*) FROM inbox_processor p WHERE p.alive_until > now() AND h.id = ANY (p.handler_ids)) AS processors,
                   coalesce((SELECT true FROM (SELECT seq FROM inbox_message ORDER BY seq DESC LIMIT 1000) m
                             CROSS JOIN inbox_handler own
                             CROSS JOIN LATERAL (SELECT 1 FROM inbox_delivery
                                                 WHERE message_seq = m.seq AND handler_id = own.id AND finished_at IS NOT NULL LIMIT 1) d
                             WHERE coalesce(own.same_as, own.id) = h.id LIMIT 1),
                            (SELECT true FROM inbox_processor p WHERE p.alive_until > now() AND h.id = ANY (p.handler_ids) LIMIT 1)
                            AND (SELECT seq FROM inbox_message ORDER BY seq OFFSET 1000 LIMIT 1) IS NOT NULL, false) AS keeps_finished
            FROM inbox_handler h
            JOIN inbox_handler same ON coalesce(same.same_as, same.id) = h.id
            JOIN inbox_backlog b ON b.handler_id = same.id
            GROUP BY h.id ORDER BY h.key) x") -> String {}

    /// The claims of a process are at the head of the index, because rows keep their place in it while they run. The
    /// first thousand of each handler are read.
    Processors("
        WITH held AS MATERIALIZED (
            SELECT head.locked_by, count(*) AS running, max(head.locked_until) AS locked_until
            FROM inbox_handler h
            CROSS JOIN LATERAL (SELECT d.locked_by, d.locked_until FROM inbox_delivery d
                                WHERE d.handler_id = h.id AND d.finished_at IS NULL ORDER BY d.due_at, d.message_seq LIMIT 1000) head
            WHERE head.locked_until > now() GROUP BY head.locked_by)
        SELECT row_to_json(x)::text FROM (
            SELECT p.id, p.name, p.version, inbox_micros(p.started_at) AS started_at, inbox_micros(p.seen_at) AS seen_at,
                   p.alive_until > now() AS is_alive, p.report, coalesce(held.running, 0) AS running,
                   inbox_micros(held.locked_until) AS locked_until,
                   ARRAY(SELECT DISTINCT current.key FROM inbox_handler own
                         JOIN inbox_handler current ON current.id = coalesce(own.same_as, own.id)
                         WHERE own.id = ANY (p.handler_ids) ORDER BY 1) AS handler_keys
            FROM inbox_processor p LEFT JOIN held ON held.locked_by = p.id
            ORDER BY p.alive_until > now() DESC, p.name) x") -> String {}
}

/// A delivery as JSON, from a row `s` of `inbox_status`.
macro_rules! delivery {
    ($from:literal) => {
        concat!(
            "SELECT (to_jsonb(s) || jsonb_build_object(
                'due_at', inbox_micros(nullif(s.due_at, 'infinity')), 'locked_until', inbox_micros(s.locked_until),
                'finished_at', inbox_micros(s.finished_at), 'received_at', inbox_micros(s.received_at),
                'recorded_at', inbox_micros(s.recorded_at)))::text ",
            $from
        )
    };
}

statements! {
    /// The deliveries that an action would change.
    Poisoned<'a>(delivery!("
        FROM inbox_matching(:filter::jsonb, :limit, 'show') WITH ORDINALITY AS f (tid, message_seq, handler_id, place)
        CROSS JOIN LATERAL (SELECT * FROM inbox_status WHERE message_seq = f.message_seq AND handler_id = f.handler_id LIMIT 1) s
        ORDER BY f.place")) -> String { filter: &'a str, limit: i32 }

    OfMessage<'a>(delivery!("
        FROM (SELECT seq FROM inbox_message WHERE message_id = :message_id ORDER BY seq LIMIT 1000) m
        CROSS JOIN unnest(inbox_handler_ids(:handler_key)) AS h (id)
        CROSS JOIN LATERAL (SELECT * FROM inbox_status WHERE message_seq = m.seq AND handler_id = h.id LIMIT 1) s
        WHERE (:state::text IS NULL OR s.state = :state)
          AND inbox_is_meant(:filter::jsonb, s.source, s.topic, s.reason, s.last_error,
                             CASE WHEN s.state = 'poisoned' THEN s.finished_at ELSE coalesce(s.received_at, s.due_at) END)
        ORDER BY s.message_seq, s.handler_key LIMIT :limit"))
    -> String { message_id: &'a str, handler_key: Option<&'a str>, state: Option<&'a str>, filter: &'a str, limit: i32 }

    /// Pending and running deliveries, the longest due first.
    Open<'a>(delivery!("
        FROM unnest(inbox_handler_ids(:handler_key)) AS h (id)
        CROSS JOIN LATERAL (SELECT * FROM inbox_status s
                            WHERE s.handler_id = h.id AND s.finished_at IS NULL AND s.state = :state
                              AND inbox_is_meant(:filter::jsonb, s.source, s.topic, s.reason, s.last_error, coalesce(s.received_at, s.due_at))
                            ORDER BY s.due_at, s.message_seq LIMIT :limit) s
        ORDER BY s.due_at, s.message_seq LIMIT :limit"))
    -> String { handler_key: Option<&'a str>, state: &'a str, filter: &'a str, limit: i32 }

    /// The newest first.
    Recent<'a>(delivery!("
        FROM (SELECT * FROM inbox_status s
              WHERE (:state::text IS NULL OR s.state = :state) 
                AND (:handler_key::text IS NULL OR s.handler_id = ANY (inbox_handler_ids(:handler_key)))
                AND inbox_is_meant(:filter::jsonb, s.source, s.topic, s.reason, s.last_error,
                                   CASE WHEN s.state = 'poisoned' THEN s.finished_at ELSE coalesce(s.received_at, s.due_at) END)
              ORDER BY s.message_seq DESC, s.handler_id LIMIT :limit) s"))
    -> String { state: Option<&'a str>, handler_key: Option<&'a str>, filter: &'a str, limit: i32 }

    /// First the keys that need an operator, then by the number of waiting deliveries.
    HeldKeys<'a>("
        SELECT (to_jsonb(k) || jsonb_build_object('held_since', inbox_micros(k.held_since), 'due_at', inbox_micros(k.due_at)))::text
        FROM inbox_held_keys k
        WHERE k.handler_key = (SELECT current.key FROM inbox_handler_key n JOIN inbox_handler own ON own.id = n.handler_id
                               JOIN inbox_handler current ON current.id = coalesce(own.same_as, own.id) WHERE n.key = :handler_key)
        ORDER BY k.state = 'poisoned' DESC, k.behind DESC, k.message_seq LIMIT :limit") -> String { handler_key: &'a str, limit: i32 }

    ReplayStates("
        SELECT row_to_json(x)::text FROM (
            SELECT d.message_seq, d.handler_id, d.errors, d.replays,
                   CASE d.status WHEN 0 THEN CASE WHEN d.locked_until > now() THEN 'running' ELSE 'pending' END
                                 WHEN 2 THEN 'done' WHEN 3 THEN 'poisoned' ELSE 'discarded' END AS state
            FROM unnest(:message_seqs, :handler_ids) AS r (message_seq, handler_id)
            CROSS JOIN LATERAL (SELECT * FROM inbox_delivery
                                WHERE message_seq = r.message_seq AND handler_id = r.handler_id LIMIT 1) d) x")
    -> String { message_seqs: Vec<i64>, handler_ids: Vec<i16> }

    PoisonedErrors("
        SELECT (to_jsonb(e) || jsonb_build_object('first_at', inbox_micros(e.first_at), 'last_at', inbox_micros(e.last_at)))::text
        FROM inbox_poisoned_by_error e ORDER BY e.poisoned DESC, e.handler_key, e.fingerprint") -> String {}
}

/// A quarantined record as JSON, from a row `q` of `inbox_quarantine`.
macro_rules! quarantined {
    ($from:literal) => {
        concat!(
            "SELECT jsonb_build_object('id', q.id, 'topic', q.topic, 'kafka_partition', q.kafka_partition,
                'kafka_offset', q.kafka_offset, 'reason', q.reason, 'detail', q.detail,
                'quarantined_at', inbox_micros(q.quarantined_at), 'replay_asked_at', inbox_micros(q.replay_asked_at),
                'replays', q.replays, 'payload_bytes', octet_length(q.payload))::text",
            $from
        )
    };
}

statements! {
    QuarantinedList<'a>(quarantined!("
        FROM inbox_quarantine_matching(:filter::jsonb, :limit) AS f (id)
        CROSS JOIN LATERAL (SELECT * FROM inbox_quarantine WHERE id = f.id LIMIT 1) q ORDER BY q.id"))
    -> String { filter: &'a str, limit: i32 }

    QuarantinedOne(quarantined!(" FROM inbox_quarantine q WHERE q.id = :id")) -> String { id: i64 }

    DeliveryOne(delivery!("FROM inbox_status s WHERE s.message_seq = :message_seq AND s.handler_id = :handler_id"))
    -> String { message_seq: i64, handler_id: i16 }
}

/// Queries tables of any size: see `ByIndex`.
macro_rules! by_index {
    ($conn:ident, $query:expr) => {{
        let mut transaction = $conn.build_transaction().read_committed().read_only();
        let listed = transaction.run::<Vec<_>, diesel::result::Error, _>(async |conn| {
            $crate::store::postgres::operate::list::ByIndex {}.load::<String>(conn).await?;
            $query.load(conn).await
        });
        listed.await
    }};
}
pub(super) use by_index;

pub(super) async fn handler_keys(conn: &mut AsyncPgConnection) -> Result<Vec<(String, String)>> {
    HandlerKeys {}.load(conn).await.map_err(database("cannot read the handler keys"))
}

pub(super) async fn handlers(conn: &mut AsyncPgConnection) -> Result<Vec<HandlerStatus>> {
    from_json(by_index!(conn, Handlers {}).map_err(database("cannot read the handlers"))?)
}

pub(super) async fn processors(conn: &mut AsyncPgConnection) -> Result<Vec<ProcessorStatus>> {
    from_json(by_index!(conn, Processors {}).map_err(database("cannot read the processors"))?)
}

/// Each combination of state and filter has its own statement, so that each is read in the order of an index.
pub(super) async fn deliveries(
    conn: &mut AsyncPgConnection,
    filter: &DeliveryFilter,
    state: Option<State>,
    limit: u32,
) -> Result<Vec<DeliverySummary>> {
    let limit = self::limit(limit);
    let json = &*query_filter(filter.to_json());
    let handler_key = filter.handler_key.as_deref();
    let name = state.map(State::as_str);
    let rows = match (state, &filter.message_id) {
        (Some(State::Poisoned), _) => Poisoned { filter: json, limit }.load(conn).await,
        (_, Some(message_id)) => {
            OfMessage { message_id, handler_key, state: name, filter: json, limit }.load(conn).await
        }
        (Some(open @ (State::Pending | State::Running)), None) => {
            Open { handler_key, state: open.as_str(), filter: json, limit }.load(conn).await
        }
        (Some(State::Done | State::Discarded) | None, None) => {
            Recent { state: name, handler_key, filter: json, limit }.load(conn).await
        }
    };
    from_json(rows.map_err(database("cannot list deliveries"))?)
}

pub(super) async fn held_keys(conn: &mut AsyncPgConnection, handler_key: &str, limit: u32) -> Result<Vec<HeldKey>> {
    let limit = self::limit(limit);
    from_json(by_index!(conn, HeldKeys { handler_key, limit }).map_err(database("cannot read the held keys"))?)
}

pub(super) async fn delivery(
    conn: &mut AsyncPgConnection,
    message_seq: i64,
    handler_id: i16,
) -> Result<Option<DeliverySummary>> {
    let rows = DeliveryOne { message_seq, handler_id }.load(conn).await;
    Ok(from_json(rows.map_err(database("cannot read a delivery"))?)?.pop())
}

/// Deleted deliveries are left out.
pub(super) async fn replay_states(conn: &mut AsyncPgConnection, rows: &[(i64, i16)]) -> Result<Vec<ReplayState>> {
    let (message_seqs, handler_ids) = rows.iter().copied().unzip();
    let rows = ReplayStates { message_seqs, handler_ids }.load(conn).await;
    from_json(rows.map_err(database("cannot read deliveries"))?)
}

pub(super) async fn poisoned_errors(conn: &mut AsyncPgConnection) -> Result<Vec<ErrorSummary>> {
    from_json(PoisonedErrors {}.load(conn).await.map_err(database("cannot count the poisoned deliveries"))?)
}

pub(super) async fn quarantined(
    conn: &mut AsyncPgConnection,
    filter: &QuarantineFilter,
    limit: u32,
) -> Result<Vec<QuarantineSummary>> {
    let limit = self::limit(limit);
    let listed = QuarantinedList { filter: &query_filter(filter.to_json()), limit }.load(conn).await;
    from_json(listed.map_err(database("cannot list the quarantine"))?)
}

pub(super) async fn quarantined_one(conn: &mut AsyncPgConnection, id: i64) -> Result<Option<QuarantineSummary>> {
    let rows = QuarantinedOne { id }.load(conn).await;
    Ok(from_json(rows.map_err(database("cannot read a quarantined record"))?)?.pop())
}

/// A query, unlike an action, may use an empty filter.
pub(super) fn query_filter(filter: String) -> String {
    if filter == "{}" { r#"{"all": true}"#.to_owned() } else { filter }
}
