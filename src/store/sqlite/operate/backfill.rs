//! Adds deliveries of a handler for messages that were accepted before the handler existed.

use diesel::{RunQueryDsl, SqliteConnection};

use super::super::clock::{self, micros};
use super::super::errors::database;
use super::super::statement::statements;
use super::act::{NewAuditEntry, audit};
use crate::store::operating::{BackfillStep, Backfilled, Signed};
use crate::types::Result;

statements! {
    /// Reads messages until `limit` are found: there is no other writer that would wait for a lock.
    Missing<'a>("
        SELECT m.seq FROM inbox_message m
        WHERE m.seq > :after_seq AND m.topic IN (SELECT value FROM json_each(:topics)) AND (:since IS NULL OR m.received_at >= :since)
          AND NOT EXISTS (SELECT 1 FROM inbox_delivery d JOIN inbox_handler_ids i ON i.id = d.handler_id AND i.handler_key = :handler_key
                          WHERE d.message_seq = m.seq)
        ORDER BY m.seq LIMIT :limit")
    -> i64 { after_seq: i64, topics: String, since: Option<i64>, handler_key: &'a str, limit: i64 }

    /// Backfilled deliveries of a fair handler take turns like one tenant.
    Make<'a>("
        INSERT INTO inbox_delivery (message_seq, handler_id, fair_hash, due_at)
        SELECT :message_seq, coalesce(h.same_as, h.id), CASE WHEN h.is_fair THEN 0 END, :now
        FROM inbox_handler_key k JOIN inbox_handler h ON h.id = k.handler_id WHERE k.key = :handler_key") { message_seq: i64, handler_key: &'a str, now: i64 }

    Count("UPDATE inbox_audit SET affected = affected + :made WHERE id = :act") { made: i64, act: i64 }
}

/// One step. The end is reached when no message without a delivery is found.
pub(super) fn backfill(conn: &mut SqliteConnection, step: &BackfillStep, signed: &Signed) -> Result<Backfilled> {
    let cannot = || database("cannot backfill deliveries");
    let now = clock::now(conn).map_err(cannot())?;
    let missing = Missing {
        after_seq: step.after_seq,
        topics: serde_json::json!(step.topics).to_string(),
        since: step.newer_than.map(|age| now - micros(age)),
        handler_key: &step.handler_key,
        limit: step.limit.into(),
    };
    let seqs = missing.load::<i64>(conn).map_err(cannot())?;
    for &message_seq in &seqs {
        let make = Make { message_seq, handler_key: &step.handler_key, now };
        make.execute(conn).map_err(cannot())?;
    }
    let made = seqs.len() as u64;
    let act = match step.act {
        Some(act) => Count { made: made.cast_signed(), act }.execute(conn).map(|_| act),
        None => audit(conn, &NewAuditEntry { action: "backfill", filter: step.filter.clone(), affected: made }, signed),
    };
    Ok(Backfilled { act: act.map_err(cannot())?, made, next_seq: seqs.last().copied() })
}
