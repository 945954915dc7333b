//! Looks at many things at once: the audit, gaps, and groups of what waits for a person. Groups look at a bounded number of rows.

use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::super::errors::database;
use super::super::statement::statements;
use super::look::looking;
use crate::store::counts::limit;
use crate::store::operating::from_json;
use crate::types::{
    AuditEntry, DeliveryFilter, ErrorSummary, LedgerFilter, LedgerGap, QuarantineFilter, QuarantineGroup, Result,
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

    /// Of each handler those that have been poisoned longest, at most `limit`. So many old failures of one handler do not hide those of another.
    PoisonedGroups<'a>("
        SELECT (to_jsonb(e) || jsonb_build_object('first_at', inbox_micros(e.first_at), 'last_at', inbox_micros(e.last_at)))::text
        FROM (SELECT h.key AS handler_key, d.reason, inbox_fingerprint(d.last_error) AS fingerprint, count(*) AS poisoned,
                     min(d.finished_at) AS first_at, max(d.finished_at) AS last_at, min(d.last_error) AS example
              FROM (SELECT DISTINCT coalesce(own.same_as, own.id) AS id FROM inbox_handler own
                    WHERE own.id = ANY (inbox_handler_ids(:handler_key))) current
              JOIN inbox_handler h ON h.id = current.id
              CROSS JOIN LATERAL inbox_matching(:filter::jsonb || jsonb_build_object('handler_key', h.key), :limit, 'show') f
              CROSS JOIN LATERAL (SELECT * FROM inbox_delivery WHERE message_seq = f.message_seq AND handler_id = f.handler_id LIMIT 1) d
              WHERE d.status = 3
              GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 3 LIMIT 1000) e")
    -> String { handler_key: Option<&'a str>, filter: &'a str, limit: i32 }

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
) -> Result<Vec<ErrorSummary>> {
    let (handler_key, json) = (filter.handler_key.as_deref(), looking(filter.to_json()));
    let groups = PoisonedGroups { handler_key, filter: &json, limit: limit(rows) }.load(conn).await;
    from_json(groups.map_err(database("cannot group the poisoned deliveries"))?)
}

pub(super) async fn quarantine_groups(
    conn: &mut AsyncPgConnection,
    filter: &QuarantineFilter,
    rows: u32,
) -> Result<Vec<QuarantineGroup>> {
    let groups = QuarantineGroups { filter: &looking(filter.to_json()), limit: limit(rows) }.load(conn).await;
    from_json(groups.map_err(database("cannot group the quarantine"))?)
}
