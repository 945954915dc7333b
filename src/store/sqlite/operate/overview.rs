//! Overviews: the audit, gaps, and groups of work that needs an operator. Groups read a bounded number of rows.

use diesel::{RunQueryDsl, SqliteConnection};

use super::super::clock;
use super::super::errors::database;
use super::super::statement::statements;
use super::list::{by_filter, by_quarantine_filter, handler_keys, is_meant};
use crate::store::operating::{Grouped, OpenGroup, from_json};
use crate::types::{
    AuditEntry, DeliveryFilter, ErrorSummary, LedgerFilter, LedgerGap, QuarantineFilter, QuarantineGroup, Result, State,
};

/// Maximum number of groups shown.
const GROUPS_MAX: usize = 1_000;

statements! {
    Audit("
        SELECT json_object('id', id, 'acted_at', acted_at, 'database_user', database_user, 'actor', actor, 'action', action, 'filter', json(filter),
                           'affected', affected, 'because', because)
        FROM inbox_audit WHERE id < coalesce(:before, 9223372036854775807) ORDER BY id DESC LIMIT :limit")
    -> String { before: Option<i64>, limit: i64 }

    Gaps<'a>("
        SELECT json_object('consumer_group', consumer_group, 'cluster_id', cluster_id, 'topic', topic, 'kafka_partition', kafka_partition,
                           'from_offset', from_offset, 'to_offset', to_offset, 'noticed_at', noticed_at)
        FROM inbox_gap
        WHERE (:group IS NULL OR consumer_group = :group) AND (:topic IS NULL OR topic = :topic)
          AND (:partition IS NULL OR kafka_partition = :partition) AND (:cluster_id IS NULL OR cluster_id = :cluster_id)
        ORDER BY noticed_at DESC, consumer_group, cluster_id, topic, kafka_partition, from_offset LIMIT :limit") -> String {
        group: Option<&'a str>, topic: Option<&'a str>, partition: Option<i32>, cluster_id: Option<&'a str>, limit: i64,
    }
}

by_filter!(PoisonedGroups(concat!(
    "SELECT json_object('handler_key', current.key, 'reason', x.reason, 'fingerprint', x.fingerprint, 'poisoned', count(*),
                        'first_at', min(x.finished_at), 'last_at', max(x.finished_at), 'example', min(x.last_error))
     FROM (SELECT d.handler_id, d.reason, inbox_fingerprint(d.last_error) AS fingerprint, d.finished_at, d.last_error
           FROM inbox_delivery d LEFT JOIN inbox_message m ON m.seq = d.message_seq
           WHERE d.status = 3", is_meant!("d.finished_at"), "ORDER BY d.finished_at, d.message_seq LIMIT :limit) x
     JOIN inbox_handler own ON own.id = x.handler_id
     JOIN inbox_handler current ON current.id = coalesce(own.same_as, own.id)
     GROUP BY current.key, x.reason, x.fingerprint"
)) -> String);

by_filter!(OpenGroups(concat!(
    "SELECT json_object('handler_key', current.key, 'state', x.state, 'fingerprint', x.fingerprint, 'deliveries', count(*),
                        'first_at', min(x.received_at), 'last_at', max(x.received_at), 'example', min(x.last_error))
     FROM (SELECT d.handler_id, iif(d.locked_until > now.at, 'running', 'pending') AS state, inbox_fingerprint(d.last_error) AS fingerprint,
                  m.received_at, d.last_error
           FROM inbox_delivery d CROSS JOIN inbox_now now LEFT JOIN inbox_message m ON m.seq = d.message_seq
           WHERE d.finished_at IS NULL", is_meant!("coalesce(m.received_at, d.due_at)"),
    "AND (:state IS NULL OR iif(d.locked_until > now.at, 'running', 'pending') = :state)
           ORDER BY d.due_at, d.message_seq LIMIT :limit) x
     JOIN inbox_handler own ON own.id = x.handler_id
     JOIN inbox_handler current ON current.id = coalesce(own.same_as, own.id)
     GROUP BY current.key, x.state, x.fingerprint"
)) -> String, state: Option<&'static str>);

by_quarantine_filter!(QuarantineGroups(
    "SELECT json_object('topic', topic, 'reason', reason, 'records', count(*), 'replay_asked', count(replay_asked_at),
                        'first_at', min(quarantined_at), 'last_at', max(quarantined_at), 'example', min(detail))
     FROM (SELECT * FROM inbox_quarantine", ") GROUP BY topic, reason ORDER BY count(*) DESC, topic, reason LIMIT 1000"
) -> String);

pub(super) fn audit(conn: &mut SqliteConnection, before: Option<i64>, limit: u32) -> Result<Vec<AuditEntry>> {
    from_json(Audit { before, limit: limit.into() }.load(conn).map_err(database("cannot read the audit"))?)
}

pub(super) fn gaps(conn: &mut SqliteConnection, filter: &LedgerFilter, limit: u32) -> Result<Vec<LedgerGap>> {
    let (group, topic) = (filter.consumer_group.as_deref(), filter.topic.as_deref());
    let (partition, cluster_id) = (filter.partition, filter.cluster_id.as_deref());
    let gaps = Gaps { group, topic, partition, cluster_id, limit: limit.into() };
    from_json(gaps.load(conn).map_err(database("cannot list the gaps"))?)
}

/// The filter once for each handler that it matches, so that many rows of one handler do not hide those of another.
fn of_each_handler(conn: &mut SqliteConnection, filter: &DeliveryFilter) -> Result<Vec<DeliveryFilter>> {
    let mut keys: Vec<String> = match &filter.handler_key {
        Some(key) => vec![key.clone()],
        None => handler_keys(conn)?.into_iter().map(|(_, current)| current).collect(),
    };
    keys.sort_unstable();
    keys.dedup();
    Ok(keys.into_iter().map(|key| DeliveryFilter { handler_key: Some(key), ..filter.clone() }).collect())
}

pub(super) fn poisoned_groups(
    conn: &mut SqliteConnection,
    filter: &DeliveryFilter,
    limit: u32,
) -> Result<Grouped<ErrorSummary>> {
    let cannot = || database("cannot group the poisoned deliveries");
    let now = clock::now(conn).map_err(cannot())?;
    let mut groups: Vec<ErrorSummary> = Vec::new();
    for of_handler in of_each_handler(conn, filter)? {
        groups.extend(from_json(PoisonedGroups::new(&of_handler, limit, now).load(conn).map_err(cannot())?)?);
    }
    let order = |group: &ErrorSummary| {
        (std::cmp::Reverse(group.poisoned), group.handler_key.clone(), group.fingerprint.clone())
    };
    groups.sort_by_cached_key(order);
    let total = groups.iter().map(|group| group.poisoned).sum();
    groups.truncate(GROUPS_MAX);
    Ok(Grouped { groups, total })
}

pub(super) fn open_groups(
    conn: &mut SqliteConnection,
    filter: &DeliveryFilter,
    state: Option<State>,
    limit: u32,
) -> Result<Grouped<OpenGroup>> {
    let cannot = || database("cannot group the open deliveries");
    let now = clock::now(conn).map_err(cannot())?;
    let mut groups: Vec<OpenGroup> = Vec::new();
    for of_handler in of_each_handler(conn, filter)? {
        let found = OpenGroups::new(&of_handler, state.map(State::as_str), limit, now).load(conn);
        groups.extend(from_json(found.map_err(cannot())?)?);
    }
    let order = |group: &OpenGroup| {
        (
            std::cmp::Reverse(group.deliveries),
            group.handler_key.clone(),
            group.state.as_str(),
            group.fingerprint.clone(),
        )
    };
    groups.sort_by_cached_key(order);
    let total = groups.iter().map(|group| group.deliveries).sum();
    groups.truncate(GROUPS_MAX);
    Ok(Grouped { groups, total })
}

pub(super) fn quarantine_groups(
    conn: &mut SqliteConnection,
    filter: &QuarantineFilter,
    limit: u32,
) -> Result<Vec<QuarantineGroup>> {
    let cannot = || database("cannot group the quarantine");
    let now = clock::now(conn).map_err(cannot())?;
    from_json(QuarantineGroups::new(filter, limit, now).load(conn).map_err(cannot())?)
}
