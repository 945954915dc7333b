//! Accepts messages in the caller's transaction: they are committed together with the caller's own writes.
//!
//! Each call uses one savepoint: a rejected message leaves nothing behind, and the caller's transaction can continue.
//! SAVEPOINT also shows whether a transaction is open. The work is done by a SQL function with its own settings, so
//! that none of them stays in the caller's transaction, and with the rights of the inbox's owner, so that the caller
//! needs no rights on tables.

use diesel::pg::data_types::PgTimestamp;
use diesel_async::{AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection};

use super::errors::{database, kind};
use super::process::millis;
use super::statement::{rows, statements};
use super::time::to_postgres;
use crate::store::seam::{Accepted, NewMessage};
use crate::types::{Error, Kind, Result};

rows! {
    PreparedRow { result: String, seq: Option<i64>, deliveries: Option<i32> }
}

statements! {
    /// One call per message, in order. The handlers of a message are a slice of the arrays, so that no arrays are
    /// joined.
    Prepared<'a>("
        SELECT a.result, a.seq, a.deliveries
        FROM unnest(:message_ids, :sources, :topics, :payload_hashes, :kafka_partitions, :kafka_offsets, :recorded_ats, :record_keys, :headers,
                    :payloads, :firsts, :lasts) WITH ORDINALITY
            AS r (message_id, source, topic, payload_hash, kafka_partition, kafka_offset, recorded_at, record_key, headers, payload, first, last, ord)
        CROSS JOIN LATERAL inbox_accept_prepared(
            :schema, r.message_id, r.source, r.topic, r.payload_hash, r.kafka_partition, r.kafka_offset, r.recorded_at, r.record_key, r.headers, r.payload,
            (:handler_ids)[r.first : r.last], (:orders)[r.first : r.last], (:tenants)[r.first : r.last], (:delays_ms)[r.first : r.last], (:due_ats)[r.first : r.last]) a
        ORDER BY r.ord")
    -> PreparedRow {
        schema: &'a str, message_ids: Vec<&'a str>, sources: Vec<&'a str>, topics: Vec<&'a str>, payload_hashes: Vec<&'a [u8]>,
        kafka_partitions: Vec<Option<i32>>, kafka_offsets: Vec<Option<i64>>, recorded_ats: Vec<Option<PgTimestamp>>,
        record_keys: Vec<Option<&'a [u8]>>, headers: Vec<Option<&'a [u8]>>, payloads: Vec<Option<&'a [u8]>>, firsts: Vec<i32>,
        lasts: Vec<i32>, handler_ids: Vec<i16>, orders: Vec<Option<i64>>, tenants: Vec<Option<i64>>, delays_ms: Vec<Option<i64>>,
        due_ats: Vec<Option<PgTimestamp>>,
    }
}

/// Accepts all batches behind one savepoint. A conflict rolls all of them back; the results show which message caused
/// it.
pub(super) async fn accept_in(
    conn: &mut AsyncPgConnection,
    schema: &str,
    batches: &[Vec<NewMessage>],
) -> Result<Vec<Accepted>> {
    conn.batch_execute("SAVEPOINT wharf_accept").await.map_err(|error| match kind(&error) {
        Kind::Connection => database("cannot accept in the caller's transaction")(error),
        _ => Error::configuration(
            "cannot accept in the caller's transaction: none is open on the connection, or a statement has failed in it",
        )
        .with_source(error),
    })?;
    let accepted = accept_all(conn, schema, batches).await;
    let is_kept = accepted
        .as_ref()
        .is_ok_and(|answers| !answers.iter().any(|answer| matches!(answer, Accepted::Conflict { .. })));
    let end = match is_kept {
        true => "RELEASE SAVEPOINT wharf_accept",
        false => "ROLLBACK TO SAVEPOINT wharf_accept; RELEASE SAVEPOINT wharf_accept",
    };
    let ended = conn.batch_execute(end).await;
    let answers = accepted?;
    ended.map_err(database("cannot accept in the caller's transaction"))?;
    Ok(answers)
}

/// Accepts the batches one after the other, each with one statement.
async fn accept_all(conn: &mut AsyncPgConnection, schema: &str, batches: &[Vec<NewMessage>]) -> Result<Vec<Accepted>> {
    let mut answers = Vec::new();
    for messages in batches {
        let rows = prepared(schema, messages).load::<PreparedRow>(conn).await;
        let rows =
            rows.map_err(database(format!("cannot accept {} messages in the caller's transaction", messages.len())))?;
        for row in rows {
            answers.push(answer(&row)?);
        }
    }
    Ok(answers)
}

/// The result of one message. The texts are those of the SQL function.
fn answer(row: &PreparedRow) -> Result<Accepted> {
    let count = row.deliveries.and_then(|count| usize::try_from(count).ok()).unwrap_or_default();
    match (row.result.as_str(), row.seq) {
        ("accepted", Some(seq)) => Ok(Accepted::New { seq }),
        ("duplicate", Some(seq)) => Ok(Accepted::Duplicate { seq, added: count }),
        ("duplicate", None) => Ok(Accepted::Remembered),
        ("conflict", _) => Ok(Accepted::Conflict { quarantine_id: None }),
        (other, _) => Err(Error::bug(format!("unknown result of accepting a message: {other:?}"))),
    }
}

/// The arguments of one batch. The deliveries of all messages are in one array each; `firsts` and `lasts` are 1-based
/// bounds.
fn prepared<'a>(schema: &'a str, messages: &'a [NewMessage]) -> Prepared<'a> {
    let mut firsts = Vec::with_capacity(messages.len());
    let mut lasts = Vec::with_capacity(messages.len());
    let mut last = 0_i32;
    for message in messages {
        firsts.push(last + 1);
        last += i32::try_from(message.deliveries.len()).unwrap_or(i32::MAX);
        lasts.push(last);
    }
    let deliveries = || messages.iter().flat_map(|message| &message.deliveries);
    Prepared {
        schema,
        message_ids: messages.iter().map(|m| &*m.message.id).collect(),
        sources: messages.iter().map(|m| &*m.message.source).collect(),
        topics: messages.iter().map(|m| &*m.message.topic).collect(),
        payload_hashes: messages.iter().map(|m| m.payload_hash.as_slice()).collect(),
        kafka_partitions: messages.iter().map(|m| m.message.position.map(|p| p.partition)).collect(),
        kafka_offsets: messages.iter().map(|m| m.message.position.map(|p| p.offset)).collect(),
        recorded_ats: messages.iter().map(|m| m.message.recorded_at.map(to_postgres)).collect(),
        record_keys: messages.iter().map(|m| m.message.key.as_deref()).collect(),
        headers: messages.iter().map(|m| m.message.headers.encoded()).collect(),
        payloads: messages.iter().map(|m| m.message.payload.as_deref()).collect(),
        firsts,
        lasts,
        handler_ids: deliveries().map(|delivery| delivery.ids.current).collect(),
        orders: deliveries().map(|delivery| delivery.order_hash).collect(),
        tenants: deliveries().map(|delivery| delivery.fair_hash).collect(),
        delays_ms: deliveries().map(|delivery| delivery.due().0.map(millis)).collect(),
        due_ats: deliveries().map(|delivery| delivery.due().1.map(to_postgres)).collect(),
    }
}
