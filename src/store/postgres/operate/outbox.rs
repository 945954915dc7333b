//! Queries of the outbox: lists and single records.

use diesel::pg::data_types::PgTimestamp;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::super::errors::database;
use super::super::statement::statements;
use super::list::query_filter;
use crate::store::counts::limit;
use crate::store::operating::from_json;
use crate::store::rows::{RecordRow, record};
use crate::types::{OutboxDetails, OutboxFilter, OutboxSummary, Result};

/// A record as JSON, from a row `o` of `inbox_outbox`.
macro_rules! outgoing {
    ($from:literal) => {
        concat!(
            "SELECT jsonb_build_object('id', o.id, 'topic', o.topic,
                'state', (ARRAY['waiting', NULL, 'sent', 'poisoned', 'discarded'])[o.status + 1], 'message_id', o.message_id, 'source', o.source,
                'reason', o.reason, 'last_error', o.last_error, 'stored_at', inbox_micros(o.stored_at),
                'finished_at', inbox_micros(o.finished_at), 'replays', o.replays, 'kafka_partition', o.kafka_partition,
                'kafka_offset', o.kafka_offset, 'payload_bytes', octet_length(o.payload))::text",
            $from
        )
    };
}

statements! {
    OutgoingList<'a>(outgoing!("
        FROM inbox_outbox_matching(:filter::jsonb, :limit) WITH ORDINALITY AS f (id, place)
        CROSS JOIN LATERAL (SELECT * FROM inbox_outbox WHERE id = f.id LIMIT 1) o ORDER BY f.place"))
    -> String { filter: &'a str, limit: i32 }

    OutgoingOne(outgoing!(" FROM inbox_outbox o WHERE o.id = :id")) -> String { id: i64 }

    /// The record as the relay sends it: with the position in Kafka once it was sent.
    OutgoingRecord("
        SELECT topic, NULL::text, kafka_partition, kafka_offset, recorded_at, convert_to(message_id, 'UTF8'), convert_to(source, 'UTF8'),
               record_key, headers, payload
        FROM inbox_outbox WHERE id = :id") -> RecordRow<PgTimestamp> { id: i64 }
}

pub(super) async fn list(
    conn: &mut AsyncPgConnection,
    filter: &OutboxFilter,
    limit: u32,
) -> Result<Vec<OutboxSummary>> {
    let listing = OutgoingList { filter: &query_filter(filter.to_json()), limit: self::limit(limit) };
    from_json(listing.load(conn).await.map_err(database("cannot list the outbox"))?)
}

pub(super) async fn one(conn: &mut AsyncPgConnection, id: i64) -> Result<Option<OutboxDetails>> {
    let cannot = || database("cannot read a record of the outbox");
    let summary = from_json(OutgoingOne { id }.load(conn).await.map_err(cannot())?)?.pop();
    let record_of = OutgoingRecord { id }.load::<RecordRow<PgTimestamp>>(conn).await.map_err(cannot())?.pop();
    Ok(summary.zip(record_of).map(|(summary, row)| OutboxDetails { summary, record: record(row) }))
}
