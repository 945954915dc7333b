//! Accepts one message: the usual batch while traffic is low. The same as the statement for batches, with values in
//! place of most arrays, which takes the server less than half of the time.
//!
//! It takes no deliveries of ordered handlers, and a position in at most one partition.

use diesel::pg::data_types::PgTimestamp;

use super::{InsertedRow, identity_hash};
use crate::store::identity_hash::IdentityHash;
use crate::store::postgres::process::millis;
use crate::store::postgres::statement::statements;
use crate::store::postgres::time::to_postgres;
use crate::store::seam::{AcceptBatch, NewDelivery, NewMessage};

statements! {
    /// The row of the ledger is locked first, as for batches: `held` is evaluated before the message is inserted. A
    /// batch without a position has NULLs for it, which match no row.
    InsertOne<'a>("
        WITH held AS MATERIALIZED (
            SELECT next_offset >= :from_offset AND stopped_at IS NULL AS is_there FROM inbox_ledger
            WHERE consumer_group = :consumer_group AND cluster_id = :cluster_id AND topic = :ledger_topic AND kafka_partition = :ledger_partition
            FOR NO KEY UPDATE),
        turn AS MATERIALIZED (
            SELECT coalesce((SELECT is_there FROM held), :from_offset IS NULL) AS has_come,
                   CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true) END),
        message AS (
            INSERT INTO inbox_message (message_id, source, topic, payload_hash, kafka_partition, kafka_offset, recorded_at, record_key,
                                       headers, payload)
            SELECT :message_id, :source, :topic, :payload_hash, :kafka_partition, :kafka_offset, :recorded_at, :record_key, :headers, :payload
            WHERE (SELECT has_come FROM turn)
              AND CASE WHEN pg_relation_size('inbox_identity') = 0 THEN true ELSE inbox_remembered(:identity_hashes) IS NULL END
            ON CONFLICT (message_id, source) DO NOTHING
            RETURNING seq),
        delivery AS (
            INSERT INTO inbox_delivery (message_seq, handler_id, fair_hash, due_at, locked_until, locked_by, attempts)
            SELECT message.seq, d.handler_id, d.fair_hash,
                   CASE WHEN d.delay_ms IS NULL AND d.due_at IS NULL THEN now()
                        ELSE greatest(now() + coalesce(d.delay_ms, 0) * interval '1 millisecond', d.due_at) END,
                   CASE WHEN d.is_handed_over THEN now() + :lease_ms * interval '1 millisecond' END,
                   CASE WHEN d.is_handed_over THEN :processor END,
                   CASE WHEN d.is_handed_over THEN 1 ELSE 0 END
            FROM message, (SELECT unnest(:handlers) AS handler_id, unnest(:handed_over) AS is_handed_over, unnest(:delays_ms) AS delay_ms,
                                  unnest(:due_ats) AS due_at, unnest(:tenants) AS fair_hash) d),
        ledger AS (
            UPDATE inbox_ledger
            SET next_offset = greatest(next_offset, :next_offset), updated_at = now(),
                leader_epoch = CASE WHEN :next_offset >= next_offset THEN :leader_epoch ELSE leader_epoch END
            WHERE consumer_group = :consumer_group AND cluster_id = :cluster_id AND topic = :ledger_topic AND kafka_partition = :ledger_partition
              AND (SELECT is_there FROM held) AND EXISTS (SELECT FROM message)
            RETURNING topic, kafka_partition)
        SELECT CASE WHEN (SELECT has_come FROM turn) THEN ARRAY[coalesce((SELECT seq FROM message), 0)] ELSE '{}' END,
               ARRAY(SELECT seq FROM message), ARRAY(SELECT topic FROM ledger), ARRAY(SELECT kafka_partition FROM ledger)")
    -> InsertedRow {
        message_id: &'a str, source: &'a str, topic: &'a str, payload_hash: &'a [u8], kafka_partition: Option<i32>,
        kafka_offset: Option<i64>, recorded_at: Option<PgTimestamp>, record_key: Option<&'a [u8]>,
        headers: Option<&'a [u8]>, payload: Option<&'a [u8]>, identity_hashes: Vec<IdentityHash>, lease_ms: i64,
        processor: Option<i32>, handlers: Vec<i16>, handed_over: Vec<bool>, delays_ms: Vec<Option<i64>>,
        due_ats: Vec<Option<PgTimestamp>>, tenants: Vec<Option<i64>>, consumer_group: Option<&'a str>,
        cluster_id: Option<&'a str>, ledger_topic: Option<&'a str>, ledger_partition: Option<i32>,
        from_offset: Option<i64>, next_offset: Option<i64>, leader_epoch: Option<i32>,
    }
}

/// The statement for the only open message of a batch; `None` if it takes the statement for batches.
pub(super) fn insert<'a>(batch: &'a AcceptBatch, open: &[usize]) -> Option<InsertOne<'a>> {
    let (&[index], [] | [_]) = (open, &*batch.ledger) else { return None };
    let new = &batch.messages[index];
    let NewMessage { message, payload_hash, deliveries } = new;
    if deliveries.iter().any(|delivery| delivery.order_hash.is_some()) {
        return None;
    }
    let entry = batch.ledger.first();
    let of_each = deliveries.iter().map(NewDelivery::due);
    Some(InsertOne {
        message_id: &message.id,
        source: &message.source,
        topic: &message.topic,
        payload_hash,
        kafka_partition: message.position.map(|position| position.partition),
        kafka_offset: message.position.map(|position| position.offset),
        recorded_at: message.recorded_at.map(to_postgres),
        record_key: message.key.as_deref(),
        headers: message.headers.encoded(),
        payload: message.payload.as_deref(),
        identity_hashes: vec![identity_hash(new)],
        lease_ms: millis(batch.lease),
        processor: batch.processor,
        handlers: deliveries.iter().map(|delivery| delivery.ids.current).collect(),
        handed_over: deliveries.iter().map(|delivery| batch.claimed_by(delivery).is_some()).collect(),
        delays_ms: of_each.clone().map(|(delay, _)| delay.map(millis)).collect(),
        due_ats: of_each.map(|(_, due_at)| due_at.map(to_postgres)).collect(),
        tenants: deliveries.iter().map(|delivery| delivery.fair_hash).collect(),
        consumer_group: entry.map(|entry| &*entry.reader.group),
        cluster_id: entry.map(|entry| &*entry.reader.cluster_id),
        ledger_topic: entry.map(|entry| &*entry.topic),
        ledger_partition: entry.map(|entry| entry.partition),
        from_offset: entry.map(|entry| entry.from_offset),
        next_offset: entry.map(|entry| entry.next_offset),
        leader_epoch: entry.and_then(|entry| entry.leader_epoch),
    })
}
