//! Overviews: the audit, gaps, and groups of work that needs an operator. Groups read a bounded number of rows.

use diesel_async::{AsyncPgConnection, RunQueryDsl};
use serde::de::DeserializeOwned;

use super::super::errors::database;
use super::super::statement::statements;
use super::list::{by_index, query_filter};
use crate::store::counts::{count, limit};
use crate::store::operating::{Grouped, OpenGroup, from_json};
use crate::types::{
    AuditEntry, DeliveryFilter, ErrorSummary, LedgerFilter, LedgerGap, QuarantineFilter, QuarantineGroup, Result, State,
};

statements! {
    Audit("
        SELECT (to_jsonb(a) || jsonb_build_object('acted_at', inbox_micros(a.acted_at)))::text
        FROM inbox_audit a WHERE a.id < coalesce(:before, 9223372036854775807) ORDER BY a.id DESC LIMIT :limit")
    -> String { before: Option<i64>, limit: i32 }

    Gaps<'a>("
        SELECT (to_jsonb(g) || jsonb_build_object('noticed_at', inbox_micros(g.noticed_at)))::text
        FROM inbox_gap g
        WHERE (:group::text IS NULL OR g.consumer_group = :group) AND (:topic::text IS NULL OR g.topic = :topic)
          AND (:partition::integer IS NULL OR g.kafka_partition = :partition) AND (:cluster_id::text IS NULL OR g.cluster_id = :cluster_id)
        ORDER BY g.noticed_at DESC, g.consumer_group, g.cluster_id, g.topic, g.kafka_partition, g.from_offset LIMIT :limit") -> String {
        group: Option<&'a str>, topic: Option<&'a str>, partition: Option<i32>, cluster_id: Option<&'a str>, limit: i32,
    }

    /// At most `limit` deliveries of each handler that have been poisoned longest. So many old failures of one handler
    /// do not hide those of another. With each group, the number of deliveries of all groups.
    PoisonedGroups<'a>("
        SELECT (to_jsonb(e) || jsonb_build_object('first_at', inbox_micros(e.first_at), 'last_at', inbox_micros(e.last_at)))::text, e.total
        FROM (SELECT h.key AS handler_key, d.reason, inbox_fingerprint(d.last_error) AS fingerprint, count(*) AS poisoned, (sum(count(*)) OVER ())::bigint AS total,
                     min(d.finished_at) AS first_at, max(d.finished_at) AS last_at, min(d.last_error) AS example
              FROM (SELECT DISTINCT coalesce(own.same_as, own.id) AS id FROM inbox_handler own
                    WHERE own.id = ANY (inbox_handler_ids(:handler_key))) current
              JOIN inbox_handler h ON h.id = current.id
              CROSS JOIN LATERAL inbox_matching(:filter::jsonb || jsonb_build_object('handler_key', h.key), :limit, 'show') f
              CROSS JOIN LATERAL (SELECT * FROM inbox_delivery WHERE message_seq = f.message_seq AND handler_id = f.handler_id LIMIT 1) d
              WHERE d.status = 3
              GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 3 LIMIT 1000) e")
    -> (String, i64) { handler_key: Option<&'a str>, filter: &'a str, limit: i32 }

    /// The same for open deliveries: at most `limit` of each id of a handler, the longest due first.
    OpenGroups<'a>("
        SELECT (to_jsonb(e) || jsonb_build_object('first_at', inbox_micros(e.first_at), 'last_at', inbox_micros(e.last_at)))::text, e.total
        FROM (SELECT h.key AS handler_key, d.state, inbox_fingerprint(d.last_error) AS fingerprint, count(*) AS deliveries, (sum(count(*)) OVER ())::bigint AS total,
                     min(d.received_at) AS first_at, max(d.received_at) AS last_at, min(d.last_error) AS example
              FROM inbox_handler own
              JOIN inbox_handler h ON h.id = coalesce(own.same_as, own.id)
              CROSS JOIN LATERAL (
                  SELECT o.last_error, m.received_at, CASE WHEN o.locked_until > now() THEN 'running' ELSE 'pending' END AS state
                  FROM inbox_delivery o
                  LEFT JOIN LATERAL (SELECT source, topic, received_at FROM inbox_message WHERE seq = o.message_seq LIMIT 1) m ON true
                  WHERE o.handler_id = own.id AND o.finished_at IS NULL
                    AND (:state::text IS NULL OR (:state = 'running') = (o.locked_until IS NOT NULL AND o.locked_until > now()))
                    AND inbox_is_meant(:filter::jsonb, m.source, m.topic, o.reason, o.last_error, coalesce(m.received_at, o.due_at))
                  ORDER BY o.due_at, o.message_seq LIMIT :limit) d
              WHERE own.id = ANY (inbox_handler_ids(:handler_key))
              GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3 LIMIT 1000) e")
    -> (String, i64) { handler_key: Option<&'a str>, state: Option<&'a str>, filter: &'a str, limit: i32 }

    QuarantineGroups<'a>("
        SELECT row_to_json(x)::text FROM (
            SELECT q.topic, q.reason, count(*) AS records, count(q.replay_asked_at) AS replay_asked, inbox_micros(min(q.quarantined_at)) AS first_at,
                   inbox_micros(max(q.quarantined_at)) AS last_at, min(q.detail) AS example
            FROM inbox_quarantine_matching(:filter::jsonb, :limit) AS f (id)
            CROSS JOIN LATERAL (SELECT * FROM inbox_quarantine WHERE id = f.id LIMIT 1) q
            GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2 LIMIT 1000) x")
    -> String { filter: &'a str, limit: i32 }
}

pub(super) async fn audit(conn: &mut AsyncPgConnection, before: Option<i64>, rows: u32) -> Result<Vec<AuditEntry>> {
    let entries = Audit { before, limit: limit(rows) }.load(conn).await;
    from_json(entries.map_err(database("cannot read the audit"))?)
}

pub(super) async fn gaps(conn: &mut AsyncPgConnection, filter: &LedgerFilter, rows: u32) -> Result<Vec<LedgerGap>> {
    let (group, topic) = (filter.consumer_group.as_deref(), filter.topic.as_deref());
    let (partition, cluster_id) = (filter.partition, filter.cluster_id.as_deref());
    let gaps = Gaps { group, topic, partition, cluster_id, limit: limit(rows) };
    from_json(gaps.load(conn).await.map_err(database("cannot list the gaps"))?)
}

pub(super) async fn poisoned_groups(
    conn: &mut AsyncPgConnection,
    filter: &DeliveryFilter,
    rows: u32,
) -> Result<Grouped<ErrorSummary>> {
    let (handler_key, json) = (filter.handler_key.as_deref(), query_filter(filter.to_json()));
    let groups = PoisonedGroups { handler_key, filter: &json, limit: limit(rows) }.load(conn).await;
    grouped(groups.map_err(database("cannot group the poisoned deliveries"))?)
}

pub(super) async fn open_groups(
    conn: &mut AsyncPgConnection,
    filter: &DeliveryFilter,
    state: Option<State>,
    rows: u32,
) -> Result<Grouped<OpenGroup>> {
    let (handler_key, state, filter) = (filter.handler_key.as_deref(), state.map(State::as_str), filter.to_json());
    let groups = by_index!(conn, OpenGroups { handler_key, state, filter: &filter, limit: limit(rows) });
    grouped(groups.map_err(database("cannot group the open deliveries"))?)
}

/// Groups as JSON, each with the number of rows of all.
fn grouped<T: DeserializeOwned>(rows: Vec<(String, i64)>) -> Result<Grouped<T>> {
    let total = if let [(_, total), ..] = &rows[..] { count(*total) } else { 0 };
    Ok(Grouped { groups: from_json(rows.into_iter().map(|(group, _)| group).collect())?, total })
}

pub(super) async fn quarantine_groups(
    conn: &mut AsyncPgConnection,
    filter: &QuarantineFilter,
    rows: u32,
) -> Result<Vec<QuarantineGroup>> {
    let groups = QuarantineGroups { filter: &query_filter(filter.to_json()), limit: limit(rows) }.load(conn).await;
    from_json(groups.map_err(database("cannot group the quarantine"))?)
}
