//! Writes records that could not become messages: with all their bytes, once each.

use std::collections::HashMap;

use diesel::QueryResult;
use diesel::pg::data_types::PgTimestamp;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::ledger::{self, LedgerTurn, Moved};
use super::statement::{only_row, rows, statements};
use super::time::to_postgres;
use crate::store::quarantined::{self, record_hash};
use crate::store::seam::{AcceptBatch, NewMessage, Quarantined};
use crate::types::Result;

rows! {
    /// A quarantined record by its row id.
    KeptRow { record_hash: Vec<u8>, id: i64 }
}

statements! {
    /// A redelivered record is quarantined once. Sorted, so that two acceptors never deadlock.
    InsertQuarantined<'a>("
        INSERT INTO inbox_quarantine (topic, cluster_id, reason, detail, kafka_partition, kafka_offset, recorded_at, message_id, source,
                                      record_key, headers, payload, record_hash)
        SELECT * FROM unnest(:topics, :clusters, :reasons, :details, :kafka_partitions, :kafka_offsets, :recorded_ats, :message_ids, :sources,
                             :record_keys, :headers, :payloads, :record_hashes)
            AS q (topic, cluster_id, reason, detail, kafka_partition, kafka_offset, recorded_at, message_id, source, record_key, headers,
                  payload, record_hash)
        WHERE (SELECT CASE WHEN current_setting('synchronous_commit') = 'off'
                           THEN set_config('synchronous_commit', 'on', true) END) IS DISTINCT FROM ''
        ORDER BY record_hash
        ON CONFLICT (record_hash) DO NOTHING
        RETURNING record_hash, id")
    -> KeptRow {
        topics: Vec<String>, clusters: Vec<Option<String>>, reasons: Vec<&'a str>, details: Vec<Option<String>>, kafka_partitions: Vec<Option<i32>>,
        kafka_offsets: Vec<Option<i64>>, recorded_ats: Vec<Option<PgTimestamp>>, message_ids: Vec<Option<&'a [u8]>>,
        sources: Vec<Option<&'a [u8]>>, record_keys: Vec<Option<&'a [u8]>>, headers: Vec<Option<&'a [u8]>>,
        payloads: Vec<Option<&'a [u8]>>, record_hashes: Vec<Vec<u8>>,
    }

    /// Records that were already in quarantine.
    FindQuarantined<'a>("
        SELECT record_hash, id FROM inbox_quarantine WHERE record_hash = ANY (:record_hashes)")
    -> KeptRow { record_hashes: Vec<&'a [u8]> }

    /// Tries to insert the message in a subtransaction, and returns the SQLSTATE of the error: diesel does not report
    /// it.
    Refusal<'a>("
        SELECT inbox_refusal(:message_id, :source, :topic, :payload_hash, :kafka_partition, :kafka_offset, :recorded_at, :record_key,
                             :headers, :payload)")
    -> String {
        message_id: &'a str, source: &'a str, topic: &'a str, payload_hash: &'a [u8], kafka_partition: Option<i32>,
        kafka_offset: Option<i64>, recorded_at: Option<PgTimestamp>, record_key: Option<&'a [u8]>,
        headers: Option<&'a [u8]>, payload: Option<&'a [u8]>,
    }
}

/// Whether the server rejects the message because of its values: SQLSTATE classes 22 (data), 23 (constraints), 54
/// (limits), P0 (raised by a trigger). All other errors are server errors and temporary.
pub(super) async fn refuses(conn: &mut AsyncPgConnection, message: &NewMessage) -> Result<bool> {
    let stored = &message.message;
    let refusal = Refusal {
        message_id: &stored.id,
        source: &stored.source,
        topic: &stored.topic,
        payload_hash: &message.payload_hash,
        kafka_partition: stored.position.map(|p| p.partition),
        kafka_offset: stored.position.map(|p| p.offset),
        recorded_at: stored.recorded_at.map(to_postgres),
        record_key: stored.key.as_deref(),
        headers: stored.headers.encoded(),
        payload: stored.payload.as_deref(),
    };
    let state: String =
        refusal.load(conn).await.and_then(only_row).map_err(database("cannot find out why a message is rejected"))?;
    Ok(["22", "23", "54", "P0"].iter().any(|class| state.starts_with(class)))
}

/// Writes records in the caller's transaction; returns their row ids, in order. Redelivered records keep their id.
pub(super) async fn write(conn: &mut AsyncPgConnection, rows: &[Quarantined]) -> QueryResult<Vec<Option<i64>>> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let insert = insert(rows);
    let hashes = insert.record_hashes.clone();
    let kept: Vec<KeptRow> = insert.load(conn).await?;
    let mut ids: HashMap<Vec<u8>, i64> = kept.into_iter().map(|row| (row.record_hash, row.id)).collect();
    let known: Vec<&[u8]> = hashes.iter().filter(|hash| !ids.contains_key(*hash)).map(Vec::as_slice).collect();
    if !known.is_empty() {
        let known: Vec<KeptRow> = FindQuarantined { record_hashes: known }.load(conn).await?;
        ids.extend(known.into_iter().map(|row| (row.record_hash, row.id)));
    }
    Ok(hashes.iter().map(|hash| ids.get(hash).copied()).collect())
}

/// The columns of the records. Text columns are cleaned; all other bytes are stored as they came.
fn insert(rows: &[Quarantined]) -> InsertQuarantined<'_> {
    let records = || rows.iter().map(|row| &row.record);
    InsertQuarantined {
        topics: rows.iter().map(quarantined::topic).collect(),
        clusters: rows.iter().map(quarantined::cluster).collect(),
        reasons: rows.iter().map(|row| row.reason).collect(),
        details: rows.iter().map(quarantined::detail).collect(),
        kafka_partitions: records().map(|record| record.position.map(|p| p.partition)).collect(),
        kafka_offsets: records().map(|record| record.position.map(|p| p.offset)).collect(),
        recorded_ats: records().map(|record| record.recorded_at.map(to_postgres)).collect(),
        message_ids: records().map(|record| record.id.as_deref()).collect(),
        sources: records().map(|record| record.source.as_deref()).collect(),
        record_keys: records().map(|record| record.key.as_deref()).collect(),
        headers: records().map(|record| record.headers.encoded()).collect(),
        payloads: records().map(|record| record.payload.as_deref()).collect(),
        record_hashes: records().map(record_hash).collect(),
    }
}

/// Writes a batch without messages: nothing in it was wanted, or everything is quarantined. Returns the ids of its rows
/// and which ledgers moved; `None` when the ledger of a partition is not there.
pub(super) async fn write_alone(
    conn: &mut AsyncPgConnection,
    batch: &AcceptBatch,
) -> Result<Option<(Vec<Option<i64>>, Moved)>> {
    let mut transaction = conn.build_transaction().read_committed();
    let written = transaction.run(async |conn| {
        if ledger::turn(conn, batch).await? == LedgerTurn::NotYet {
            return Ok(None);
        }
        let ids = write(conn, &batch.quarantined).await?;
        Ok(Some((ids, ledger::advance(conn, &batch.ledger).await?)))
    });
    written.await.map_err(database(format!("cannot quarantine {} records", batch.quarantined.len())))
}
