//! Adds deliveries of a handler for messages that were accepted before the handler existed.
//!
//! A step finds candidates without locks, locks those messages, and decides under the lock which deliveries are
//! missing. Accept locks the same rows before it adds deliveries, so a handler with two ids never gets two deliveries
//! of one message.

use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::super::errors::database;
use super::super::process::millis;
use super::super::statement::{only_row, rows, statements};
use crate::store::counts::{count, limit};
use crate::store::operating::{BackfillStep, Backfilled, Signed};
use crate::types::Result;

/// Maximum number of messages read by one statement, wanted or not: the statement stays short even if none is wanted.
const SCAN_ROWS: i32 = 20_000;

rows! {
    /// The messages without a delivery, how many messages were read, and the last of them. More messages without a
    /// delivery may come before it.
    CandidatesRow { seqs: Vec<i64>, scanned: i64, last_scanned: Option<i64> }

    /// The audit row of the backfill, and how many deliveries the step has created.
    StepRow { audit_id: i64, made: i64 }
}

statements! {
    /// Only reads: nothing waits for it.
    Candidates<'a>("
        WITH scanned AS MATERIALIZED (
            SELECT seq, topic = ANY (:topics)
                        AND (:newer_than_ms::bigint IS NULL OR received_at >= now() - :newer_than_ms * interval '1 millisecond') AS is_wanted
            FROM inbox_message WHERE seq > :after_seq ORDER BY seq LIMIT :scan_rows)
        SELECT ARRAY(
                   SELECT l.seq FROM scanned l
                   WHERE l.is_wanted
                     AND (SELECT true FROM unnest(inbox_handler_ids(:handler_key)) AS h (id)
                          CROSS JOIN LATERAL (SELECT 1 FROM inbox_delivery d WHERE d.message_seq = l.seq AND d.handler_id = h.id LIMIT 1) d
                          LIMIT 1) IS NULL
                   ORDER BY l.seq LIMIT :limit),
               (SELECT count(*) FROM scanned), (SELECT max(seq) FROM scanned)")
    -> CandidatesRow {
        topics: &'a [String], newer_than_ms: Option<i64>, after_seq: i64, scan_rows: i32, handler_key: &'a str, limit: i32,
    }

    /// Locks, decides and inserts in the database, with the rights of the inbox's owner, and adds the count to the
    /// audit.
    Step<'a>("SELECT audit_id, made FROM inbox_backfill_step(:handler_key, :seqs, :filter::jsonb, :act, :because, :actor)")
    -> StepRow {
        handler_key: &'a str, seqs: &'a [i64], filter: &'a str, act: Option<i64>, because: Option<&'a str>, actor: Option<&'a str>,
    }
}

/// One step. A step that finds no candidate still moves on: `next_seq` is the last message that was read. A step that
/// could have read more messages has reached the end, even if messages are accepted meanwhile.
pub(super) async fn backfill(conn: &mut AsyncPgConnection, step: &BackfillStep, signed: &Signed) -> Result<Backfilled> {
    let cannot = || database("cannot backfill deliveries");
    let candidates = Candidates {
        topics: &step.topics,
        newer_than_ms: step.newer_than.map(millis),
        after_seq: step.after_seq,
        scan_rows: SCAN_ROWS,
        handler_key: &step.handler_key,
        limit: limit(step.limit),
    };
    let found = candidates.load::<CandidatesRow>(conn).await.and_then(only_row).map_err(cannot())?;
    let CandidatesRow { seqs, scanned, last_scanned } = found;
    let next_seq = match seqs.len() >= step.limit as usize {
        true => seqs.last().copied(),
        false => last_scanned.filter(|_| scanned >= SCAN_ROWS.into()),
    };
    if let (Some(act), true) = (step.act, seqs.is_empty()) {
        return Ok(Backfilled { act, made: 0, next_seq });
    }
    let (because, actor) = (signed.because.as_deref(), signed.actor.as_deref());
    let add = Step { handler_key: &step.handler_key, seqs: &seqs, filter: &step.filter, act: step.act, because, actor };
    let mut transaction = conn.build_transaction().read_committed();
    let added = transaction.run(async |conn| add.load::<StepRow>(conn).await.and_then(only_row)).await;
    let StepRow { audit_id, made } = added.map_err(cannot())?;
    Ok(Backfilled { act: audit_id, made: count(made), next_seq })
}
