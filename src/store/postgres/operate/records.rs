//! Records read back whole: of a message with its history, and of the quarantine.

use diesel::pg::data_types::PgTimestamp;
use diesel::sql_types::{Array, BigInt, Binary, Integer, Nullable, SmallInt, Text, Timestamptz};
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::super::errors::database;
use super::super::statement::statement;
use super::super::time::from_postgres;
use super::look;
use crate::store::operating::{self, RecordRow, Replayed, from_json};
use crate::types::{DeliveryDetails, HistoryEntry, QuarantineDetails, Record, Result};

type Row = RecordRow<PgTimestamp>;

statement! {
    MessageRecord("
        SELECT topic, kafka_partition, kafka_offset, recorded_at, convert_to(message_id, 'UTF8'), convert_to(source, 'UTF8'),
               record_key, headers, payload
        FROM inbox_message WHERE seq = $1")
    -> (Text, Nullable<Integer>, Nullable<BigInt>, Nullable<Timestamptz>, Nullable<Binary>, Nullable<Binary>, Nullable<Binary>,
        Nullable<Binary>, Nullable<Binary>) {
        seq: i64 => BigInt,
    }
}

statement! {
    QuarantinedRecord("
        SELECT topic, kafka_partition, kafka_offset, recorded_at, message_id, source, record_key, headers, payload
        FROM inbox_quarantine WHERE id = $1")
    -> (Text, Nullable<Integer>, Nullable<BigInt>, Nullable<Timestamptz>, Nullable<Binary>, Nullable<Binary>, Nullable<Binary>,
        Nullable<Binary>, Nullable<Binary>) {
        id: i64 => BigInt,
    }
}

statement! {
    AskedReplays<'a>("
        SELECT id FROM inbox_quarantine WHERE replay_asked_at IS NOT NULL AND topic = ANY ($1) ORDER BY replay_asked_at, id LIMIT $2")
    -> (BigInt) {
        topics: &'a [&'a str] => Array<Text>,
        limit: i32 => Integer,
    }
}

statement! {
    Leave("DELETE FROM inbox_quarantine WHERE id = $1 AND replay_asked_at IS NOT NULL") {
        id: i64 => BigInt,
    }
}

statement! {
    Stay<'a>("
        UPDATE inbox_quarantine SET replay_asked_at = NULL, replays = replays + 1, reason = $1, detail = $2
        WHERE id = $3 AND replay_asked_at IS NOT NULL") {
        reason: &'a str => Text,
        detail: Option<&'a str> => Nullable<Text>,
        id: i64 => BigInt,
    }
}

statement! {
    History("
        SELECT row_to_json(x)::text FROM (
            SELECT a.action, inbox_micros(a.acted_at) AS acted_at, a.actor, a.operator, a.reason AS because,
                   (ARRAY['pending', NULL, 'done', 'poisoned', 'discarded'])[h.status + 1] AS state, h.reason, h.last_error, h.attempts,
                   h.errors
            FROM inbox_history h LEFT JOIN inbox_audit a ON a.id = h.audit_id
            WHERE h.message_seq = $1 AND h.handler_id = $2 ORDER BY h.audit_id) x")
    -> (Text) {
        message_seq: i64 => BigInt,
        handler_id: i16 => SmallInt,
    }
}

pub(super) async fn delivery(
    conn: &mut AsyncPgConnection,
    message_seq: i64,
    handler_id: i16,
) -> Result<Option<DeliveryDetails>> {
    let cannot = || database("cannot look at a delivery");
    let Some(delivery) = look::delivery(conn, message_seq, handler_id).await? else { return Ok(None) };
    let message = MessageRecord { seq: message_seq }.load::<Row>(conn).await.map_err(cannot())?.pop();
    let history: Vec<HistoryEntry> =
        from_json(History { message_seq, handler_id }.load(conn).await.map_err(cannot())?)?;
    Ok(Some(DeliveryDetails { delivery, record: message.map(record), history }))
}

pub(super) async fn quarantined(conn: &mut AsyncPgConnection, id: i64) -> Result<Option<QuarantineDetails>> {
    let Some(summary) = look::quarantined_one(conn, id).await? else { return Ok(None) };
    Ok(read(conn, id).await?.map(|record| QuarantineDetails { summary, record }))
}

pub(super) async fn asked_replays(
    conn: &mut AsyncPgConnection,
    topics: &[&str],
    limit: u32,
) -> Result<Vec<(i64, Record)>> {
    let asked = AskedReplays { topics, limit: i32::try_from(limit).unwrap_or(i32::MAX) };
    let ids = asked.load::<(i64,)>(conn).await.map_err(database("cannot look for replays of the quarantine"))?;
    let mut records = Vec::with_capacity(ids.len());
    for (id,) in ids {
        records.extend(read(conn, id).await?.map(|record| (id, record)));
    }
    Ok(records)
}

pub(super) async fn replayed(conn: &mut AsyncPgConnection, id: i64, replayed: &Replayed<'_>) -> Result<()> {
    let written = match *replayed {
        Replayed::Left => Leave { id }.execute(conn).await,
        Replayed::Stays { reason, detail } => Stay { reason, detail, id }.execute(conn).await,
    };
    written.map_err(database("cannot note the replay of a quarantined record"))?;
    Ok(())
}

async fn read(conn: &mut AsyncPgConnection, id: i64) -> Result<Option<Record>> {
    let rows = QuarantinedRecord { id }.load::<Row>(conn).await;
    Ok(rows.map_err(database("cannot read a quarantined record"))?.pop().map(record))
}

fn record(row: Row) -> Record {
    operating::record(row, from_postgres)
}
