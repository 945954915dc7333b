//! Queries and actions on the outbox: lists, single records, replay and discard.

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::super::clock;
use super::super::errors::database;
use super::super::statement::statements;
use crate::store::operating::{Verb, from_json, outbox_statuses};
use crate::store::rows::{RecordRow, record};
use crate::types::{OutboxDetails, OutboxFilter, OutboxSummary, Result};

/// Declares a statement on the records that a filter matches: the SQL before and after the subquery that selects them,
/// and optionally one more bind.
macro_rules! by_outbox_filter {
    ($name:ident($before:literal, $behind:literal) $(-> $row:ty)? $(, $more:ident: $more_type:ty)?) => {
        statements! {
            $name<'a>(concat!($before, "
                WHERE (:id IS NULL OR id = :id) AND status IN (SELECT value FROM json_each(:statuses)) AND (:topic IS NULL OR topic = :topic)
                  AND (:message_id IS NULL OR message_id = :message_id) AND (:reason IS NULL OR reason = :reason)
                  AND (:error IS NULL OR instr(lower(last_error), lower(:error)) > 0)
                  AND (:before IS NULL OR coalesce(finished_at, stored_at) < :before) AND (:after IS NULL OR coalesce(finished_at, stored_at) >= :after)
                ORDER BY id LIMIT :limit", $behind)) $(-> $row)? {
                id: Option<i64>, statuses: String, topic: Option<&'a str>, message_id: Option<&'a str>, reason: Option<&'a str>,
                error: Option<&'a str>, before: Option<i64>, after: Option<i64>, limit: i64, $($more: $more_type,)?
            }
        }

        impl<'a> $name<'a> {
            fn new(filter: &'a OutboxFilter, act: Option<Verb>, $($more: $more_type,)? limit: u32, now: i64) -> Self {
                Self {
                    id: filter.id,
                    statuses: serde_json::json!(outbox_statuses(filter, act)).to_string(),
                    topic: filter.topic.as_deref(),
                    message_id: filter.message_id.as_deref(),
                    reason: filter.reason.as_deref(),
                    error: filter.error.as_deref(),
                    before: filter.older_than.map(|age| now - clock::micros(age)),
                    after: filter.newer_than.map(|age| now - clock::micros(age)),
                    limit: limit.into(),
                    $($more,)?
                }
            }
        }
    };
}

by_outbox_filter!(OutgoingList(
    "SELECT json_object('id', id, 'topic', topic,
                        'state', CASE status WHEN 0 THEN 'waiting' WHEN 2 THEN 'sent' WHEN 3 THEN 'poisoned' ELSE 'discarded' END,
                        'message_id', message_id, 'source', source,
                        'reason', reason, 'last_error', last_error, 'stored_at', stored_at, 'finished_at', finished_at, 'replays', replays,
                        'kafka_partition', kafka_partition, 'kafka_offset', kafka_offset, 'payload_bytes', octet_length(payload))
     FROM inbox_outbox", ""
) -> String);

by_outbox_filter!(SendAgain(
    "UPDATE inbox_outbox
     SET status = 0, finished_at = NULL, reason = NULL, kafka_partition = NULL, kafka_offset = NULL, replays = replays + 1
     WHERE id IN (SELECT id FROM inbox_outbox",
    ")"
));

by_outbox_filter!(GiveUp(
    "UPDATE inbox_outbox SET status = 4, finished_at = (SELECT at FROM inbox_now), reason = coalesce(:because, 'by a person')
     WHERE id IN (SELECT id FROM inbox_outbox",
    ")"
), because: Option<&'a str>);

statements! {
    OutgoingRecord("
        SELECT topic, NULL, kafka_partition, kafka_offset, recorded_at, CAST(message_id AS BLOB), CAST(source AS BLOB), record_key, headers, payload
        FROM inbox_outbox WHERE id = :id") -> RecordRow<i64> { id: i64 }
}

pub(super) fn list(conn: &mut SqliteConnection, filter: &OutboxFilter, limit: u32) -> Result<Vec<OutboxSummary>> {
    let cannot = || database("cannot list the outbox");
    let now = clock::now(conn).map_err(cannot())?;
    from_json(OutgoingList::new(filter, None, limit, now).load(conn).map_err(cannot())?)
}

pub(super) fn one(conn: &mut SqliteConnection, id: i64) -> Result<Option<OutboxDetails>> {
    let summary = list(conn, &OutboxFilter { id: Some(id), ..OutboxFilter::default() }, 1)?.pop();
    let row = OutgoingRecord { id }.load::<RecordRow<i64>>(conn);
    let row = row.map_err(database("cannot read a record of the outbox"))?.pop();
    Ok(summary.zip(row).map(|(summary, row)| OutboxDetails { summary, record: record(row) }))
}

/// Replays or discards the records that the filter matches, in the caller's transaction. A discarded record keeps the
/// person's reason.
pub(super) fn act(
    conn: &mut SqliteConnection,
    verb: Verb,
    filter: &OutboxFilter,
    limit: u32,
    because: Option<&str>,
    now: i64,
) -> QueryResult<usize> {
    match verb {
        Verb::Replay => SendAgain::new(filter, Some(verb), limit, now).execute(conn),
        Verb::Discard => GiveUp::new(filter, Some(verb), because, limit, now).execute(conn),
    }
}
