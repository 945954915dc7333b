//! Adds deliveries of a handler for messages that were accepted before the handler existed.

use diesel::{RunQueryDsl, SqliteConnection};

use super::super::clock::{self, micros};
use super::super::errors::database;
use super::super::statement::{only_row, statements};
use super::act::{NewAuditEntry, audit};
use crate::store::operating::{BackfillStep, Backfilled, Signed};
use crate::types::Result;

statements! {
    /// The last message that a step reads, and how many it reads.
    Reach("SELECT max(seq), count(*) FROM (SELECT seq FROM inbox_message WHERE seq > :after_seq ORDER BY seq LIMIT :scan_rows)")
    -> (Option<i64>, i64) { after_seq: i64, scan_rows: i64 }

    Missing<'a>("
        SELECT m.seq FROM inbox_message m
        WHERE m.seq > :after_seq AND m.seq <= :reach AND m.topic IN (SELECT value FROM json_each(:topics)) AND (:since IS NULL OR m.received_at >= :since)
          AND NOT EXISTS (SELECT 1 FROM inbox_delivery d JOIN inbox_handler_ids i ON i.id = d.handler_id AND i.handler_key = :handler_key
                          WHERE d.message_seq = m.seq)
        ORDER BY m.seq LIMIT :limit")
    -> i64 { after_seq: i64, reach: i64, topics: String, since: Option<i64>, handler_key: &'a str, limit: i64 }

    /// Backfilled deliveries of a fair handler take turns like one tenant.
    Make<'a>("
        INSERT INTO inbox_delivery (message_seq, handler_id, fair_hash, due_at)
        SELECT :message_seq, coalesce(h.same_as, h.id), CASE WHEN h.is_fair THEN 0 END, :now
        FROM inbox_handler_key k JOIN inbox_handler h ON h.id = k.handler_id WHERE k.key = :handler_key") { message_seq: i64, handler_key: &'a str, now: i64 }

    Count("UPDATE inbox_audit SET affected = affected + :made WHERE id = :act") { made: i64, act: i64 }
}

/// Messages that one step reads, so that the writer is free for others between the steps, however few messages have no
/// delivery.
const SCAN_ROWS: i64 = 20_000;

/// One step. A step that could have read more messages has reached the end, as in `postgres/operate/backfill.rs`.
pub(super) fn backfill(conn: &mut SqliteConnection, step: &BackfillStep, signed: &Signed) -> Result<Backfilled> {
    let cannot = || database("cannot backfill deliveries");
    let now = clock::now(conn).map_err(cannot())?;
    let (reach, scanned) = Reach { after_seq: step.after_seq, scan_rows: SCAN_ROWS }
        .load::<(Option<i64>, i64)>(conn)
        .and_then(only_row)
        .map_err(cannot())?;
    let missing = Missing {
        after_seq: step.after_seq,
        reach: reach.unwrap_or(step.after_seq),
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
        Some(act) if made == 0 => Ok(act),
        Some(act) => Count { made: made.cast_signed(), act }.execute(conn).map(|_| act),
        None => audit(conn, &NewAuditEntry { action: "backfill", filter: step.filter.clone(), affected: made }, signed),
    };
    let next_seq = match made >= u64::from(step.limit) {
        true => seqs.last().copied(),
        false => reach.filter(|_| scanned >= SCAN_ROWS),
    };
    Ok(Backfilled { act: act.map_err(cannot())?, made, next_seq })
}
