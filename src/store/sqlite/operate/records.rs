//! Reads complete records: of a message with its history, and of the quarantine.

use std::time::Duration;

use diesel::{RunQueryDsl, SqliteConnection};

use super::super::clock::{self, micros};
use super::super::errors::database;
use super::super::statement::statements;
use super::list;
use crate::store::operating::{QuarantineState, Replayed, from_json};
use crate::store::rows::{CorrectionRow, RecordRow, StoryRows, correction, record};
use crate::store::story::MessageStory;
use crate::types::{DeliveryDetails, FailedAttempt, HistoryEntry, QuarantineDetails, QuarantineFilter, Record, Result};

statements! {
    MessageRecord("
        SELECT topic, NULL, kafka_partition, kafka_offset, recorded_at, message_id, source, record_key, headers, payload
        FROM inbox_message WHERE seq = :seq") -> RecordRow<i64> { seq: i64 }

    QuarantinedRecord("
        SELECT topic, cluster_id, kafka_partition, kafka_offset, recorded_at, message_id, source, record_key, headers, payload
        FROM inbox_quarantine WHERE id = :id") -> RecordRow<i64> { id: i64 }

    /// If the process crashes, the lease expires and another one replays them.
    ClaimReplays("
        UPDATE inbox_quarantine SET replay_locked_until = :locked_until
        WHERE id IN (SELECT a.id FROM inbox_quarantine a
                     WHERE a.replay_asked_at IS NOT NULL AND a.topic IN (SELECT value FROM json_each(:topics))
                       AND (a.replay_locked_until IS NULL OR a.replay_locked_until <= :now)
                     ORDER BY a.replay_asked_at, a.id LIMIT :limit)
        RETURNING id, topic, cluster_id, kafka_partition, kafka_offset, recorded_at, message_id, source, record_key, headers, payload")
    -> (i64, RecordRow<i64>) { now: i64, locked_until: i64, topics: String, limit: i64 }

    AskedTopics("SELECT DISTINCT topic FROM inbox_quarantine WHERE replay_asked_at IS NOT NULL LIMIT :limit") -> String { limit: i64 }

    QuarantineStates("
        SELECT q.id, q.replays FROM json_each(:ids) r JOIN inbox_quarantine q ON q.id = r.value") -> (i64, i32) { ids: String }

    Leave("DELETE FROM inbox_quarantine WHERE id = :id AND replay_asked_at IS NOT NULL") { id: i64 }

    Stay<'a>("
        UPDATE inbox_quarantine SET replay_asked_at = NULL, replay_locked_until = NULL, replays = replays + 1, reason = :reason, detail = :detail
        WHERE id = :id AND replay_asked_at IS NOT NULL") { reason: &'a str, detail: Option<&'a str>, id: i64 }

    /// The state before each action. A delivery that was released was running, which its status does not show.
    History("
        SELECT json_object('action', a.action, 'acted_at', a.acted_at, 'database_user', a.database_user, 'actor', a.actor, 'because', a.because,
                           'state', CASE h.status WHEN 0 THEN iif(a.action = 'release', 'running', 'pending') WHEN 2 THEN 'done' WHEN 3 THEN 'poisoned' ELSE 'discarded' END,
                           'reason', h.reason, 'last_error', h.last_error, 'attempts', h.attempts, 'errors', h.errors)
        FROM inbox_history h LEFT JOIN inbox_audit a ON a.id = h.audit_id
        WHERE h.message_seq = :message_seq AND h.handler_id = :handler_id ORDER BY h.audit_id")
    -> String { message_seq: i64, handler_id: i16 }

    NewestCorrection("
        SELECT a.acted_at, k.payload FROM inbox_correction k LEFT JOIN inbox_audit a ON a.id = k.audit_id
        WHERE k.message_seq = :message_seq AND k.handler_id = :handler_id ORDER BY k.audit_id DESC LIMIT 1")
    -> CorrectionRow<i64> { message_seq: i64, handler_id: i16 }

    Failures("
        SELECT json_object('attempt', attempt, 'failed_at', failed_at, 'why', why, 'error', error) FROM inbox_attempt
        WHERE message_seq = :message_seq AND handler_id = :handler_id ORDER BY attempt")
    -> String { message_seq: i64, handler_id: i16 }

    /// The record without its payload, and the size of the payload.
    StoryRecord("
        SELECT octet_length(payload), topic, NULL, kafka_partition, kafka_offset, recorded_at, message_id, source, record_key, headers, NULL
        FROM inbox_message WHERE seq = :seq")
    -> (Option<i64>, RecordRow<i64>) { seq: i64 }

    StoryHistory("
        SELECT h.handler_id, json_object(
            'action', a.action, 'acted_at', a.acted_at, 'database_user', a.database_user, 'actor', a.actor, 'because', a.because,
            'state', CASE h.status WHEN 0 THEN iif(a.action = 'release', 'running', 'pending') WHEN 2 THEN 'done' WHEN 3 THEN 'poisoned' ELSE 'discarded' END,
            'reason', h.reason, 'last_error', h.last_error, 'attempts', h.attempts, 'errors', h.errors)
        FROM inbox_history h LEFT JOIN inbox_audit a ON a.id = h.audit_id
        WHERE h.message_seq = :message_seq ORDER BY h.handler_id, h.audit_id")
    -> (i16, String) { message_seq: i64 }

    StoryFailures("
        SELECT handler_id, json_object('attempt', attempt, 'failed_at', failed_at, 'why', why, 'error', error)
        FROM inbox_attempt WHERE message_seq = :message_seq ORDER BY handler_id, attempt")
    -> (i16, String) { message_seq: i64 }

    StoryCorrections("
        SELECT k.handler_id, a.acted_at, k.payload FROM inbox_correction k LEFT JOIN inbox_audit a ON a.id = k.audit_id
        WHERE k.message_seq = :message_seq
          AND k.audit_id = (SELECT max(n.audit_id) FROM inbox_correction n
                            WHERE n.message_seq = k.message_seq AND n.handler_id = k.handler_id)")
    -> (i16, CorrectionRow<i64>) { message_seq: i64 }
}

pub(super) fn delivery(
    conn: &mut SqliteConnection,
    message_seq: i64,
    handler_id: i16,
) -> Result<Option<DeliveryDetails>> {
    let cannot = || database("cannot read a delivery");
    let Some(delivery) = list::delivery(conn, message_seq, handler_id)? else { return Ok(None) };
    let message = MessageRecord { seq: message_seq }.load::<RecordRow<i64>>(conn).map_err(cannot())?.pop();
    let history: Vec<HistoryEntry> = from_json(History { message_seq, handler_id }.load(conn).map_err(cannot())?)?;
    let failures: Vec<FailedAttempt> = from_json(Failures { message_seq, handler_id }.load(conn).map_err(cannot())?)?;
    let corrected = NewestCorrection { message_seq, handler_id }.load::<CorrectionRow<i64>>(conn);
    let correction = corrected.map_err(cannot())?.pop().map(correction);
    Ok(Some(DeliveryDetails { delivery, record: message.map(record), history, failures, correction }))
}

/// Four statements, however many handlers the message has.
pub(super) fn story(conn: &mut SqliteConnection, message_seq: i64) -> Result<MessageStory> {
    let cannot = || database("cannot read the story of a message");
    let rows: StoryRows<i64> = StoryRows {
        record: StoryRecord { seq: message_seq }.load(conn).map_err(cannot())?.pop(),
        history: StoryHistory { message_seq }.load(conn).map_err(cannot())?,
        failures: StoryFailures { message_seq }.load(conn).map_err(cannot())?,
        corrections: StoryCorrections { message_seq }.load(conn).map_err(cannot())?,
    };
    rows.story()
}

pub(super) fn message_record(conn: &mut SqliteConnection, message_seq: i64) -> Result<Option<Record>> {
    let rows = MessageRecord { seq: message_seq }.load::<RecordRow<i64>>(conn);
    Ok(rows.map_err(database("cannot read the record of a message"))?.pop().map(record))
}

pub(super) fn quarantined(conn: &mut SqliteConnection, id: i64) -> Result<Option<QuarantineDetails>> {
    let one = QuarantineFilter { id: Some(id), ..QuarantineFilter::default() };
    let Some(summary) = list::quarantined(conn, &one, 1)?.pop() else { return Ok(None) };
    Ok(read(conn, id)?.map(|record| QuarantineDetails { summary, record }))
}

pub(super) fn claim_replays(
    conn: &mut SqliteConnection,
    topics: &[String],
    lease: Duration,
    limit: u32,
) -> Result<Vec<(i64, Record)>> {
    let cannot = || database("cannot claim replays of the quarantine");
    let now = clock::now(conn).map_err(cannot())?;
    let topics = serde_json::json!(topics).to_string();
    let claim = ClaimReplays { now, locked_until: now + micros(lease), topics, limit: limit.into() };
    let claimed = claim.load::<(i64, RecordRow<i64>)>(conn).map_err(cannot())?;
    Ok(claimed.into_iter().map(|(id, row)| (id, record(row))).collect())
}

pub(super) fn asked_topics(conn: &mut SqliteConnection, limit: u32) -> Result<Vec<String>> {
    let topics = AskedTopics { limit: limit.into() }.load(conn);
    topics.map_err(database("cannot search for replays of the quarantine"))
}

pub(super) fn quarantine_states(conn: &mut SqliteConnection, ids: &[i64]) -> Result<Vec<QuarantineState>> {
    let rows = QuarantineStates { ids: serde_json::json!(ids).to_string() }.load::<(i64, i32)>(conn);
    let rows = rows.map_err(database("cannot read quarantined records"))?;
    Ok(rows.into_iter().map(|(id, replays)| QuarantineState { id, replays }).collect())
}

pub(super) fn replayed(conn: &mut SqliteConnection, id: i64, replayed: &Replayed) -> Result<()> {
    let written = match replayed {
        Replayed::Left => Leave { id }.execute(conn),
        Replayed::Stays { reason, detail } => Stay { reason, detail: detail.as_deref(), id }.execute(conn),
    };
    written.map_err(database("cannot write the replay of a quarantined record"))?;
    Ok(())
}

fn read(conn: &mut SqliteConnection, id: i64) -> Result<Option<Record>> {
    let rows = QuarantinedRecord { id }.load::<RecordRow<i64>>(conn);
    Ok(rows.map_err(database("cannot read a quarantined record"))?.pop().map(record))
}
