//! Records read back whole: of a message with its history, and of the quarantine.

use diesel::sql_types::{BigInt, Binary, Integer, Nullable, SmallInt, Text};
use diesel::{RunQueryDsl, SqliteConnection};

use super::super::clock::from_stamp;
use super::super::errors::database;
use super::super::statement::statement;
use super::look;
use crate::store::operating::{self, RecordRow, from_json};
use crate::types::{DeliveryDetails, HistoryEntry, QuarantineDetails, QuarantineFilter, Record, Result};

type Row = RecordRow<i64>;

statement! {
    MessageRecord("
        SELECT topic, kafka_partition, kafka_offset, recorded_at, message_id, source, record_key, headers, payload
        FROM inbox_message WHERE seq = ?1")
    -> (Text, Nullable<Integer>, Nullable<BigInt>, Nullable<BigInt>, Nullable<Binary>, Nullable<Binary>, Nullable<Binary>,
        Nullable<Binary>, Nullable<Binary>) {
        seq: i64 => BigInt,
    }
}

statement! {
    QuarantinedRecord("
        SELECT topic, kafka_partition, kafka_offset, recorded_at, message_id, source, record_key, headers, payload
        FROM inbox_quarantine WHERE id = ?1")
    -> (Text, Nullable<Integer>, Nullable<BigInt>, Nullable<BigInt>, Nullable<Binary>, Nullable<Binary>, Nullable<Binary>,
        Nullable<Binary>, Nullable<Binary>) {
        id: i64 => BigInt,
    }
}

statement! {
    AskedReplays("
        SELECT id FROM inbox_quarantine
        WHERE replay_asked_at IS NOT NULL AND topic IN (SELECT value FROM json_each(?1)) ORDER BY replay_asked_at, id LIMIT ?2")
    -> (BigInt) {
        topics: String => Text,
        limit: i64 => BigInt,
    }
}

statement! {
    Leave("DELETE FROM inbox_quarantine WHERE id = ?1 AND replay_asked_at IS NOT NULL") {
        id: i64 => BigInt,
    }
}

statement! {
    Stay("
        UPDATE inbox_quarantine SET replay_asked_at = NULL, replays = replays + 1, reason = ?1, detail = ?2
        WHERE id = ?3 AND replay_asked_at IS NOT NULL") {
        reason: String => Text,
        detail: Option<String> => Nullable<Text>,
        id: i64 => BigInt,
    }
}

statement! {
    History("
        SELECT json_object('action', a.action, 'acted_at', a.acted_at, 'actor', a.actor, 'operator', a.operator, 'because', a.reason,
                           'state', CASE h.status WHEN 0 THEN 'pending' WHEN 2 THEN 'done' WHEN 3 THEN 'poisoned' ELSE 'discarded' END,
                           'reason', h.reason, 'last_error', h.last_error, 'attempts', h.attempts, 'errors', h.errors)
        FROM inbox_history h LEFT JOIN inbox_audit a ON a.id = h.audit_id
        WHERE h.message_seq = ?1 AND h.handler_id = ?2 ORDER BY h.audit_id")
    -> (Text) {
        message_seq: i64 => BigInt,
        handler_id: i16 => SmallInt,
    }
}

pub(super) fn delivery(
    conn: &mut SqliteConnection,
    message_seq: i64,
    handler_id: i16,
) -> Result<Option<DeliveryDetails>> {
    let cannot = || database("cannot look at a delivery");
    let Some(delivery) = look::delivery(conn, message_seq, handler_id)? else { return Ok(None) };
    let message = MessageRecord { seq: message_seq }.load::<Row>(conn).map_err(cannot())?.pop();
    let history: Vec<HistoryEntry> = from_json(History { message_seq, handler_id }.load(conn).map_err(cannot())?)?;
    Ok(Some(DeliveryDetails { delivery, record: message.map(record), history }))
}

pub(super) fn quarantined(conn: &mut SqliteConnection, id: i64) -> Result<Option<QuarantineDetails>> {
    let one = QuarantineFilter { id: Some(id), ..QuarantineFilter::default() };
    let Some(summary) = look::quarantined(conn, &one, 1)?.pop() else { return Ok(None) };
    Ok(read(conn, id)?.map(|record| QuarantineDetails { summary, record }))
}

pub(super) fn asked_replays(conn: &mut SqliteConnection, topics: &[String], limit: u32) -> Result<Vec<(i64, Record)>> {
    let asked = AskedReplays { topics: serde_json::json!(topics).to_string(), limit: limit.into() };
    let ids = asked.load::<(i64,)>(conn).map_err(database("cannot look for replays of the quarantine"))?;
    let mut records = Vec::with_capacity(ids.len());
    for (id,) in ids {
        records.extend(read(conn, id)?.map(|record| (id, record)));
    }
    Ok(records)
}

/// `reason` is why it stays; without one it leaves.
pub(super) fn replayed(conn: &mut SqliteConnection, id: i64, reason: Option<(String, Option<String>)>) -> Result<()> {
    let written = match reason {
        None => Leave { id }.execute(conn),
        Some((reason, detail)) => Stay { reason, detail, id }.execute(conn),
    };
    written.map_err(database("cannot note the replay of a quarantined record"))?;
    Ok(())
}

fn read(conn: &mut SqliteConnection, id: i64) -> Result<Option<Record>> {
    let rows = QuarantinedRecord { id }.load::<Row>(conn);
    Ok(rows.map_err(database("cannot read a quarantined record"))?.pop().map(record))
}

fn record(row: Row) -> Record {
    operating::record(row, from_stamp)
}
