//! Reads complete records: of a message with its history, and of the quarantine.

use std::time::Duration;

use diesel::pg::data_types::PgTimestamp;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::super::errors::database;
use super::super::process::millis;
use super::super::statement::statements;
use super::list;
use crate::store::counts::limit;
use crate::store::operating::{QuarantineState, Replayed, from_json};
use crate::store::rows::{CorrectionRow, RecordRow, StoryRows, correction, record};
use crate::store::story::MessageStory;
use crate::types::{DeliveryDetails, FailedAttempt, HistoryEntry, QuarantineDetails, Record, Result};

statements! {
    MessageRecord("
        SELECT topic, NULL::text, kafka_partition, kafka_offset, recorded_at, convert_to(message_id, 'UTF8'), convert_to(source, 'UTF8'),
               record_key, headers, payload
        FROM inbox_message WHERE seq = :seq") -> RecordRow<PgTimestamp> { seq: i64 }

    QuarantinedRecord("
        SELECT topic, cluster_id, kafka_partition, kafka_offset, recorded_at, message_id, source, record_key, headers, payload
        FROM inbox_quarantine WHERE id = :id") -> RecordRow<PgTimestamp> { id: i64 }

    /// Skips records that another process has locked. If the process crashes, the lease expires and another one replays
    /// them.
    ClaimReplays<'a>("
        UPDATE inbox_quarantine q SET replay_locked_until = now() + :lease_ms * interval '1 millisecond'
        WHERE q.id = ANY (ARRAY(
            SELECT a.id FROM inbox_quarantine a
            WHERE a.replay_asked_at IS NOT NULL AND a.topic = ANY (:topics)
              AND (a.replay_locked_until IS NULL OR a.replay_locked_until <= now())
            ORDER BY a.replay_asked_at, a.id LIMIT :limit
            FOR UPDATE SKIP LOCKED))
        RETURNING q.id, q.topic, q.cluster_id, q.kafka_partition, q.kafka_offset, q.recorded_at, q.message_id, q.source, q.record_key, q.headers, q.payload")
    -> (i64, RecordRow<PgTimestamp>) { lease_ms: i64, topics: &'a [String], limit: i32 }

    AskedTopics("SELECT DISTINCT topic FROM inbox_quarantine WHERE replay_asked_at IS NOT NULL LIMIT :limit") -> String { limit: i32 }

    QuarantineStates<'a>("
        SELECT q.id, q.replays FROM unnest(:ids) AS r (id)
        CROSS JOIN LATERAL (SELECT id, replays FROM inbox_quarantine WHERE id = r.id LIMIT 1) q") -> (i64, i32) { ids: &'a [i64] }

    Leave("DELETE FROM inbox_quarantine WHERE id = :id AND replay_asked_at IS NOT NULL") { id: i64 }

    Stay<'a>("
        UPDATE inbox_quarantine SET replay_asked_at = NULL, replay_locked_until = NULL, replays = replays + 1, reason = :reason, detail = :detail
        WHERE id = :id AND replay_asked_at IS NOT NULL") { reason: &'a str, detail: Option<&'a str>, id: i64 }

    /// The state before each action. A delivery that was released was running, which its status does not show.
    History("
        SELECT row_to_json(x)::text FROM (
            SELECT a.action, inbox_micros(a.acted_at) AS acted_at, a.database_user, a.actor, a.because,
                   CASE a.action WHEN 'release' THEN 'running'
                                 ELSE (ARRAY['pending', NULL, 'done', 'poisoned', 'discarded'])[h.status + 1] END AS state, h.reason, h.last_error, h.attempts,
                   h.errors
            FROM inbox_history h LEFT JOIN inbox_audit a ON a.id = h.audit_id
            WHERE h.message_seq = :message_seq AND h.handler_id = :handler_id ORDER BY h.audit_id) x")
    -> String { message_seq: i64, handler_id: i16 }

    NewestCorrection("
        SELECT a.acted_at, k.payload FROM inbox_correction k LEFT JOIN inbox_audit a ON a.id = k.audit_id
        WHERE k.message_seq = :message_seq AND k.handler_id = :handler_id ORDER BY k.audit_id DESC LIMIT 1")
    -> CorrectionRow<PgTimestamp> { message_seq: i64, handler_id: i16 }

    Failures("
        SELECT row_to_json(x)::text FROM (
            SELECT attempt, inbox_micros(failed_at) AS failed_at, why, error FROM inbox_attempt
            WHERE message_seq = :message_seq AND handler_id = :handler_id ORDER BY attempt) x")
    -> String { message_seq: i64, handler_id: i16 }

    /// The record without its payload, and the size of the payload.
    StoryRecord("
        SELECT octet_length(payload)::bigint, topic, NULL::text, kafka_partition, kafka_offset, recorded_at,
               convert_to(message_id, 'UTF8'), convert_to(source, 'UTF8'), record_key, headers, NULL::bytea
        FROM inbox_message WHERE seq = :seq")
    -> (Option<i64>, RecordRow<PgTimestamp>) { seq: i64 }

    StoryHistory("
        SELECT h.handler_id, jsonb_build_object(
            'action', a.action, 'acted_at', inbox_micros(a.acted_at), 'database_user', a.database_user, 'actor', a.actor, 'because', a.because,
            'state', CASE a.action WHEN 'release' THEN 'running'
                                   ELSE (ARRAY['pending', NULL, 'done', 'poisoned', 'discarded'])[h.status + 1] END,
            'reason', h.reason, 'last_error', h.last_error, 'attempts', h.attempts, 'errors', h.errors)::text
        FROM inbox_history h LEFT JOIN inbox_audit a ON a.id = h.audit_id
        WHERE h.message_seq = :message_seq ORDER BY h.handler_id, h.audit_id")
    -> (i16, String) { message_seq: i64 }

    StoryFailures("
        SELECT handler_id, jsonb_build_object('attempt', attempt, 'failed_at', inbox_micros(failed_at), 'why', why, 'error', error)::text
        FROM inbox_attempt WHERE message_seq = :message_seq ORDER BY handler_id, attempt")
    -> (i16, String) { message_seq: i64 }

    StoryCorrections("
        SELECT k.handler_id, a.acted_at, k.payload FROM inbox_correction k LEFT JOIN inbox_audit a ON a.id = k.audit_id
        WHERE k.message_seq = :message_seq
          AND k.audit_id = (SELECT max(n.audit_id) FROM inbox_correction n
                            WHERE n.message_seq = k.message_seq AND n.handler_id = k.handler_id)")
    -> (i16, CorrectionRow<PgTimestamp>) { message_seq: i64 }
}

/// Several statements without a transaction: the parts may differ if the delivery changes in between.
pub(super) async fn delivery(
    conn: &mut AsyncPgConnection,
    message_seq: i64,
    handler_id: i16,
) -> Result<Option<DeliveryDetails>> {
    let cannot = || database("cannot read a delivery");
    let Some(delivery) = list::delivery(conn, message_seq, handler_id).await? else { return Ok(None) };
    let message =
        MessageRecord { seq: message_seq }.load::<RecordRow<PgTimestamp>>(conn).await.map_err(cannot())?.pop();
    let history: Vec<HistoryEntry> =
        from_json(History { message_seq, handler_id }.load(conn).await.map_err(cannot())?)?;
    let failures: Vec<FailedAttempt> =
        from_json(Failures { message_seq, handler_id }.load(conn).await.map_err(cannot())?)?;
    let corrected = NewestCorrection { message_seq, handler_id }.load::<CorrectionRow<PgTimestamp>>(conn).await;
    let correction = corrected.map_err(cannot())?.pop().map(correction);
    Ok(Some(DeliveryDetails { delivery, record: message.map(record), history, failures, correction }))
}

/// Four statements, however many handlers the message has.
pub(super) async fn story(conn: &mut AsyncPgConnection, message_seq: i64) -> Result<MessageStory> {
    let cannot = || database("cannot read the story of a message");
    let rows: StoryRows<PgTimestamp> = StoryRows {
        record: StoryRecord { seq: message_seq }.load(conn).await.map_err(cannot())?.pop(),
        history: StoryHistory { message_seq }.load(conn).await.map_err(cannot())?,
        failures: StoryFailures { message_seq }.load(conn).await.map_err(cannot())?,
        corrections: StoryCorrections { message_seq }.load(conn).await.map_err(cannot())?,
    };
    rows.story()
}

pub(super) async fn message_record(conn: &mut AsyncPgConnection, message_seq: i64) -> Result<Option<Record>> {
    let rows = MessageRecord { seq: message_seq }.load::<RecordRow<PgTimestamp>>(conn).await;
    Ok(rows.map_err(database("cannot read the record of a message"))?.pop().map(record))
}

pub(super) async fn quarantined(conn: &mut AsyncPgConnection, id: i64) -> Result<Option<QuarantineDetails>> {
    let Some(summary) = list::quarantined_one(conn, id).await? else { return Ok(None) };
    Ok(read(conn, id).await?.map(|record| QuarantineDetails { summary, record }))
}

pub(super) async fn claim_replays(
    conn: &mut AsyncPgConnection,
    topics: &[String],
    lease: Duration,
    rows: u32,
) -> Result<Vec<(i64, Record)>> {
    let claim = ClaimReplays { lease_ms: millis(lease), topics, limit: limit(rows) };
    let claimed = claim.load::<(i64, RecordRow<PgTimestamp>)>(conn).await;
    let claimed = claimed.map_err(database("cannot claim replays of the quarantine"))?;
    Ok(claimed.into_iter().map(|(id, row)| (id, record(row))).collect())
}

pub(super) async fn asked_topics(conn: &mut AsyncPgConnection, rows: u32) -> Result<Vec<String>> {
    let topics = AskedTopics { limit: limit(rows) }.load(conn).await;
    topics.map_err(database("cannot search for replays of the quarantine"))
}

pub(super) async fn quarantine_states(conn: &mut AsyncPgConnection, ids: &[i64]) -> Result<Vec<QuarantineState>> {
    let rows = QuarantineStates { ids }.load::<(i64, i32)>(conn).await;
    let rows = rows.map_err(database("cannot read quarantined records"))?;
    Ok(rows.into_iter().map(|(id, replays)| QuarantineState { id, replays }).collect())
}

pub(super) async fn replayed(conn: &mut AsyncPgConnection, id: i64, replayed: &Replayed) -> Result<()> {
    let written = match replayed {
        Replayed::Left => Leave { id }.execute(conn).await,
        Replayed::Stays { reason, detail } => Stay { reason, detail: detail.as_deref(), id }.execute(conn).await,
    };
    written.map_err(database("cannot write the replay of a quarantined record"))?;
    Ok(())
}

async fn read(conn: &mut AsyncPgConnection, id: i64) -> Result<Option<Record>> {
    let rows = QuarantinedRecord { id }.load::<RecordRow<PgTimestamp>>(conn).await;
    Ok(rows.map_err(database("cannot read a quarantined record"))?.pop().map(record))
}
