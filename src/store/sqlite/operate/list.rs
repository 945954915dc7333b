//! Queries: handlers, processes, deliveries and quarantined records, as JSON.
//!
//! The store registers `inbox_fingerprint` on each of its connections; SQLite's own shell does not have it, so no view
//! may use it.

use diesel::{RunQueryDsl, SqliteConnection};

use super::super::clock;
use super::super::errors::database;
use super::super::statement::statements;
use crate::store::operating::{HANDLER_KEYS, ReplayState, from_json};
use crate::types::{
    DeliveryFilter, DeliverySummary, ErrorSummary, HandlerStatus, HeldKey, ProcessorStatus, QuarantineFilter,
    QuarantineSummary, Result, State,
};

statements! {
    HandlerKeys(HANDLER_KEYS) -> (String, String) {}

    /// Ids that became one handler are one row. Counts stop at 10,000, as in the view. Whether finished deliveries are
    /// kept is derived from the newest thousand messages; a handler of a live process is assumed to have some if there
    /// are more messages.
    Handlers("
        SELECT json_object(
            'handler_key', h.key, 'due', min(due, 10000), 'later', min(later, 10000), 'held', min(held, 10000),
            'is_ordered', json(iif(h.is_ordered, 'true', 'false')), 'running', min(running, 10000),
            'poisoned', min(poisoned, 10000), 'oldest_due_secs', oldest_due_secs,
            'next_due_at', (SELECT min(next.due_at) FROM inbox_handler same
                            JOIN inbox_delivery next ON next.handler_id = same.id AND next.finished_at IS NULL
                             AND next.due_at = (SELECT d.due_at FROM inbox_delivery d
                                                WHERE d.handler_id = same.id AND d.finished_at IS NULL
                                                  AND d.due_at > (SELECT at FROM inbox_now) AND d.due_at < 9223372036854775807
                                                ORDER BY d.due_at LIMIT 1)
                            WHERE coalesce(same.same_as, same.id) = h.id),
            'paused_at', open.paused_at, 'unknown_since', open.unknown_since,
            'breaker_opened_at', h.breaker_opened_at, 'breaker_error', h.breaker_error,
            'rate_per_sec', 1e6 / h.rate_interval_us, 'rate_burst', h.rate_burst, 'is_rate_set', json(iif(h.rate_is_set, 'true', 'false')),
            'former_keys', (SELECT json_group_array(key) FROM (
                SELECT k.key FROM inbox_handler_key k JOIN inbox_handler own ON own.id = k.handler_id
                WHERE coalesce(own.same_as, own.id) = h.id AND k.key <> h.key ORDER BY 1)),
            'keys_by_id', (SELECT json_group_array(json(keys)) FROM (
                SELECT json_group_array(key) AS keys FROM (
                    SELECT own.id, k.key FROM inbox_handler_key k JOIN inbox_handler own ON own.id = k.handler_id
                    WHERE coalesce(own.same_as, own.id) = h.id ORDER BY 1, 2) GROUP BY id ORDER BY id)),
            'processors', processors,
            'keeps_finished', json(iif(
                EXISTS (SELECT 1 FROM (SELECT seq FROM inbox_message ORDER BY seq DESC LIMIT 1000) m
                        JOIN inbox_handler own ON coalesce(own.same_as, own.id) = h.id
                        JOIN inbox_delivery d ON d.message_seq = m.seq AND d.handler_id = own.id AND d.finished_at IS NOT NULL)
                OR processors > 0 AND EXISTS (SELECT 1 FROM inbox_message ORDER BY seq LIMIT 1 OFFSET 1000), 'true', 'false')))
        FROM (SELECT coalesce(same.same_as, same.id) AS id, sum(b.due) AS due, sum(b.later) AS later, sum(b.held) AS held, sum(b.running) AS running,
                     sum(b.poisoned) AS poisoned, max(b.oldest_due_age) AS oldest_due_secs, min(same.paused_at) AS paused_at,
                     min(same.unknown_since) AS unknown_since,
                     (SELECT count(*) FROM inbox_processor p WHERE p.alive_until > (SELECT at FROM inbox_now)
                      AND EXISTS (SELECT 1 FROM json_each(p.handler_ids) WHERE value = coalesce(same.same_as, same.id))) AS processors
              FROM inbox_handler same JOIN inbox_backlog b ON b.handler_id = same.id
              GROUP BY 1) open
        JOIN inbox_handler h ON h.id = open.id
        ORDER BY h.key") -> String {}

    /// Claims are counted in the view of the first rows of each handler's index, so their number is bounded.
    Processors("
        SELECT json_object(
            'id', p.id, 'name', p.name, 'version', p.version, 'started_at', p.started_at, 'seen_at', p.seen_at,
            'is_alive', json(iif(p.alive_until > now.at, 'true', 'false')), 'report', json(p.report),
            'running', (SELECT count(*) FROM inbox_head d WHERE d.locked_by = p.id AND d.locked_until > now.at),
            'locked_until', (SELECT max(d.locked_until) FROM inbox_head d WHERE d.locked_by = p.id AND d.locked_until > now.at),
            'handler_keys', (SELECT json_group_array(key) FROM (
                SELECT DISTINCT current.key FROM json_each(p.handler_ids) i
                JOIN inbox_handler own ON own.id = i.value
                JOIN inbox_handler current ON current.id = coalesce(own.same_as, own.id) ORDER BY 1)))
        FROM inbox_processor p CROSS JOIN inbox_now now
        ORDER BY p.alive_until > now.at DESC, p.name") -> String {}
}

/// A delivery as JSON, for the rows of `inbox_delivery d` that match a condition. `m` is its message, `h` its handler.
macro_rules! delivery {
    ($($condition:tt)*) => {
        concat!(
            "SELECT json_object(
                'message_id', m.message_id, 'source', m.source, 'topic', m.topic, 'kafka_partition', m.kafka_partition,
                'kafka_offset', m.kafka_offset, 'handler_key', h.key,
                'state', CASE d.status WHEN 0 THEN iif(d.locked_until > now.at, 'running', 'pending') WHEN 2 THEN 'done'
                                       WHEN 3 THEN 'poisoned' ELSE 'discarded' END,
                'reason', d.reason, 'last_error', d.last_error, 'fingerprint', inbox_fingerprint(d.last_error), 'attempts', d.attempts,
                'errors', d.errors, 'crashes', d.crashes, 'replays', d.replays, 'is_corrected', json(iif(d.is_corrected, 'true', 'false')), 'due_at', nullif(d.due_at, 9223372036854775807), 'locked_until', d.locked_until,
                'locked_by', (SELECT p.name FROM inbox_processor p WHERE p.id = d.locked_by), 'finished_at', d.finished_at,
                'received_at', m.received_at, 'recorded_at', m.recorded_at, 'message_seq', d.message_seq, 'handler_id', d.handler_id)
            FROM inbox_delivery d
            CROSS JOIN inbox_now now
            LEFT JOIN inbox_message m ON m.seq = d.message_seq
            LEFT JOIN inbox_handler h ON h.id = d.handler_id
            WHERE ",
            $($condition)*
        )
    };
}

/// Whether a filter matches a delivery, apart from its state: a NULL bind matches everything. Ages refer to the named
/// column.
macro_rules! is_meant {
    ($aged:literal) => {
        concat!(
            " AND (:handler_key IS NULL OR d.handler_id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = :handler_key))
              AND (:message_id IS NULL OR d.message_seq IN (SELECT seq FROM inbox_message WHERE message_id = :message_id))
              AND (:source IS NULL OR m.source = :source) AND (:topic IS NULL OR m.topic = :topic)
              AND (:reason IS NULL OR d.reason = :reason)
              AND (:error IS NULL OR instr(lower(d.last_error), lower(:error)) > 0)
              AND (:fingerprint IS NULL OR coalesce(inbox_fingerprint(d.last_error), 'none') = :fingerprint)
              AND (:before IS NULL OR ",
            $aged,
            " < :before) AND (:after IS NULL OR ",
            $aged,
            " >= :after) "
        )
    };
}
pub(super) use is_meant;

/// Declares a statement whose binds are a filter, a limit, and optionally one more.
macro_rules! by_filter {
    ($name:ident($sql:expr) -> $row:ty $(, $more:ident: $more_type:ty)?) => {
        statements! {
            $name<'a>($sql) -> $row {
                handler_key: Option<&'a str>, message_id: Option<&'a str>, source: Option<&'a str>, topic: Option<&'a str>,
                reason: Option<&'a str>, error: Option<&'a str>, fingerprint: Option<&'a str>, before: Option<i64>,
                after: Option<i64>, limit: i64, $($more: $more_type,)?
            }
        }

        impl<'a> $name<'a> {
            fn new(filter: &'a DeliveryFilter, $($more: $more_type,)? limit: u32, now: i64) -> Self {
                use $crate::store::sqlite::clock::micros;
                Self {
                    handler_key: filter.handler_key.as_deref(),
                    message_id: filter.message_id.as_deref(),
                    source: filter.source.as_deref(),
                    topic: filter.topic.as_deref(),
                    reason: filter.reason.as_deref(),
                    error: filter.error.as_deref(),
                    fingerprint: filter.fingerprint.as_deref(),
                    before: filter.older_than.map(|age| now - micros(age)),
                    after: filter.newer_than.map(|age| now - micros(age)),
                    limit: limit.into(),
                    $($more,)?
                }
            }
        }
    };
}
pub(super) use by_filter;

by_filter!(Poisoned(delivery!(
    "d.status = 3", is_meant!("d.finished_at"), "ORDER BY d.finished_at, d.message_seq LIMIT :limit"
)) -> String);

by_filter!(Open(delivery!(
    "d.finished_at IS NULL", is_meant!("coalesce(m.received_at, d.due_at)"),
    "AND iif(d.locked_until > now.at, 'running', 'pending') = :state ORDER BY d.due_at, d.message_seq LIMIT :limit"
)) -> String, state: &'static str);

by_filter!(Recent(delivery!(
    "true", is_meant!("CASE WHEN d.status = 3 THEN d.finished_at ELSE coalesce(m.received_at, d.due_at) END"),
    "AND (:state IS NULL OR :state = CASE d.status WHEN 0 THEN iif(d.locked_until > now.at, 'running', 'pending') WHEN 2 THEN 'done'
                                             WHEN 3 THEN 'poisoned' ELSE 'discarded' END)
     ORDER BY d.message_seq DESC, d.handler_id LIMIT :limit"
)) -> String, state: Option<&'static str>);

statements! {
    DeliveryOne(delivery!("d.message_seq = :message_seq AND d.handler_id = :handler_id"))
    -> String { message_seq: i64, handler_id: i16 }

    ReplayStateOfOne("
        SELECT json_object('message_seq', message_seq, 'handler_id', handler_id, 'errors', errors, 'replays', replays,
            'state', CASE status WHEN 0 THEN iif(locked_until > (SELECT at FROM inbox_now), 'running', 'pending') WHEN 2 THEN 'done'
                                 WHEN 3 THEN 'poisoned' ELSE 'discarded' END)
        FROM inbox_delivery WHERE message_seq = :message_seq AND handler_id = :handler_id")
    -> String { message_seq: i64, handler_id: i16 }

    /// First the keys that need an operator, then by the number of waiting deliveries.
    HeldKeys<'a>("
        SELECT json_object(
            'handler_key', k.handler_key, 'message_id', k.message_id, 'source', k.source, 'topic', k.topic, 'record_key', k.record_key, 'state', k.state,
            'reason', k.reason, 'last_error', k.last_error, 'behind', k.behind, 'held_since', coalesce(d.finished_at, m.received_at),
            'due_at', d.due_at, 'order_hash', k.order_hash, 'message_seq', k.message_seq, 'handler_id', k.handler_id)
        FROM inbox_held_keys k
        LEFT JOIN inbox_delivery d ON d.message_seq = k.message_seq AND d.handler_id = k.handler_id
        LEFT JOIN inbox_message m ON m.seq = k.message_seq
        WHERE k.handler_key = (SELECT current.key FROM inbox_handler_key n JOIN inbox_handler own ON own.id = n.handler_id
                               JOIN inbox_handler current ON current.id = coalesce(own.same_as, own.id) WHERE n.key = :handler_key)
        ORDER BY k.state = 'poisoned' DESC, k.behind DESC, k.message_seq LIMIT :limit") -> String { handler_key: &'a str, limit: i64 }

    PoisonedErrors("
        SELECT json_object('handler_key', h.key, 'reason', reason, 'fingerprint', fingerprint, 'poisoned', poisoned, 'first_at', first_at,
                           'last_at', last_at, 'example', example)
        FROM (SELECT d.handler_id, d.reason, inbox_fingerprint(d.last_error) AS fingerprint, count(*) AS poisoned,
                     min(d.finished_at) AS first_at, max(d.finished_at) AS last_at, min(d.last_error) AS example
              FROM inbox_delivery d WHERE d.status = 3 GROUP BY 1, 2, 3) e
        LEFT JOIN inbox_handler h ON h.id = e.handler_id
        ORDER BY poisoned DESC, h.key, fingerprint") -> String {}
}

/// Declares a statement on the quarantined records that a filter matches: the SQL before and after the subquery that
/// selects them.
macro_rules! by_quarantine_filter {
    ($name:ident($before:literal, $behind:literal) $(-> $row:ty)?) => {
        statements! {
            $name<'a>(concat!($before, "
                WHERE id > :after_id AND (:id IS NULL OR id = :id) AND (:topic IS NULL OR topic = :topic)
                  AND (:cluster_id IS NULL OR cluster_id = :cluster_id) AND (:reason IS NULL OR reason = :reason)
                  AND (:detail IS NULL OR instr(lower(detail), lower(:detail)) > 0)
                  AND (:before IS NULL OR quarantined_at < :before) AND (:after IS NULL OR quarantined_at >= :after)
                ORDER BY id LIMIT :limit", $behind)) $(-> $row)? {
                after_id: i64, id: Option<i64>, topic: Option<&'a str>, cluster_id: Option<&'a str>, reason: Option<&'a str>, detail: Option<&'a str>,
                before: Option<i64>, after: Option<i64>, limit: i64,
            }
        }

        impl<'a> $name<'a> {
            fn new(filter: &'a QuarantineFilter, limit: u32, now: i64) -> Self {
                use $crate::store::sqlite::clock::micros;
                Self {
                    after_id: filter.after_id.unwrap_or_default(),
                    id: filter.id,
                    topic: filter.topic.as_deref(),
                    cluster_id: filter.cluster_id.as_deref(),
                    reason: filter.reason.as_deref(),
                    detail: filter.detail.as_deref(),
                    before: filter.older_than.map(|age| now - micros(age)),
                    after: filter.newer_than.map(|age| now - micros(age)),
                    limit: limit.into(),
                }
            }
        }
    };
}
pub(super) use by_quarantine_filter;

by_quarantine_filter!(QuarantinedList(
    "SELECT json_object('id', id, 'topic', topic, 'kafka_partition', kafka_partition, 'kafka_offset', kafka_offset, 'reason', reason,
                        'detail', detail, 'quarantined_at', quarantined_at, 'replay_asked_at', replay_asked_at, 'replays', replays,
                        'payload_bytes', octet_length(payload))
     FROM inbox_quarantine", ""
) -> String);

pub(super) fn handler_keys(conn: &mut SqliteConnection) -> Result<Vec<(String, String)>> {
    HandlerKeys {}.load(conn).map_err(database("cannot read the handler keys"))
}

pub(super) fn handlers(conn: &mut SqliteConnection) -> Result<Vec<HandlerStatus>> {
    from_json(Handlers {}.load(conn).map_err(database("cannot read the handlers"))?)
}

pub(super) fn processors(conn: &mut SqliteConnection) -> Result<Vec<ProcessorStatus>> {
    from_json(Processors {}.load(conn).map_err(database("cannot read the processors"))?)
}

pub(super) fn deliveries(
    conn: &mut SqliteConnection,
    filter: &DeliveryFilter,
    state: Option<State>,
    limit: u32,
) -> Result<Vec<DeliverySummary>> {
    let cannot = || database("cannot list deliveries");
    let now = clock::now(conn).map_err(cannot())?;
    let rows = match state {
        Some(State::Poisoned) => Poisoned::new(filter, limit, now).load(conn),
        Some(open @ (State::Pending | State::Running)) => Open::new(filter, open.as_str(), limit, now).load(conn),
        Some(State::Done | State::Discarded) | None => {
            Recent::new(filter, state.map(State::as_str), limit, now).load(conn)
        }
    };
    from_json(rows.map_err(cannot())?)
}

pub(super) fn held_keys(conn: &mut SqliteConnection, handler_key: &str, limit: u32) -> Result<Vec<HeldKey>> {
    let keys = HeldKeys { handler_key, limit: limit.into() }.load(conn);
    from_json(keys.map_err(database("cannot read the held keys"))?)
}

pub(super) fn delivery(
    conn: &mut SqliteConnection,
    message_seq: i64,
    handler_id: i16,
) -> Result<Option<DeliverySummary>> {
    let rows = DeliveryOne { message_seq, handler_id }.load(conn);
    Ok(from_json(rows.map_err(database("cannot read a delivery"))?)?.pop())
}

/// Deleted deliveries are left out.
pub(super) fn replay_states(conn: &mut SqliteConnection, rows: &[(i64, i16)]) -> Result<Vec<ReplayState>> {
    let mut found = Vec::with_capacity(rows.len());
    for &(message_seq, handler_id) in rows {
        let row = ReplayStateOfOne { message_seq, handler_id }.load(conn);
        found.extend(row.map_err(database("cannot read deliveries"))?);
    }
    from_json(found)
}

pub(super) fn poisoned_errors(conn: &mut SqliteConnection) -> Result<Vec<ErrorSummary>> {
    from_json(PoisonedErrors {}.load(conn).map_err(database("cannot count the poisoned deliveries"))?)
}

pub(super) fn quarantined(
    conn: &mut SqliteConnection,
    filter: &QuarantineFilter,
    limit: u32,
) -> Result<Vec<QuarantineSummary>> {
    let cannot = || database("cannot list the quarantine");
    let now = clock::now(conn).map_err(cannot())?;
    let list = QuarantinedList::new(filter, limit, now);
    from_json(list.load(conn).map_err(cannot())?)
}
