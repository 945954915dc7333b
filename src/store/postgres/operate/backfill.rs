//! Adds a handler's deliveries to messages that were accepted before it was there.
//!
//! A step finds candidates without locking anything, locks those messages, and decides under the lock which deliveries are missing. Accept
//! locks the same rows before it adds deliveries, so a handler with two ids never gets two deliveries of one message.

use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::super::errors::database;
use super::super::process::millis;
use super::super::statement::{only_row, rows, statements};
use crate::store::counts::limit;
use crate::store::operating::{BackfillStep, Backfilled};
use crate::types::Result;

/// Messages that are looked at in one statement, wanted or not: it stays short also where nothing is wanted.
const LOOK_ROWS: i32 = 20_000;

rows! {
    /// The messages without a delivery, and the last of those that were looked at. There may be more without one before that.
    CandidatesRow { seqs: Vec<i64>, last_looked: Option<i64> }
}

statements! {
    /// Reads only: nobody waits for it, whatever it looks at.
    Candidates<'a>("
        WITH looked AS MATERIALIZED (
            SELECT seq, topic = ANY (:topics)
                        AND (:newer_than_ms::bigint IS NULL OR received_at >= now() - :newer_than_ms * interval '1 millisecond') AS is_wanted
            FROM inbox_message WHERE seq > :after_seq ORDER BY seq LIMIT :look)
        SELECT ARRAY(
                   SELECT l.seq FROM looked l
                   WHERE l.is_wanted
                     AND (SELECT true FROM unnest(inbox_handler_ids(:handler_key)) AS h (id)
                          CROSS JOIN LATERAL (SELECT 1 FROM inbox_delivery d WHERE d.message_seq = l.seq AND d.handler_id = h.id LIMIT 1) d
                          LIMIT 1) IS NULL
                   ORDER BY l.seq LIMIT :limit),
               (SELECT max(seq) FROM looked)")
    -> CandidatesRow {
        topics: &'a [String], newer_than_ms: Option<i64>, after_seq: i64, look: i32, handler_key: &'a str, limit: i32,
    }

    /// In the order of seq, as accept does. Messages that were purged meanwhile are left out.
    Lock<'a>("
        SELECT m.seq FROM unnest(:seqs) AS c (seq)
        CROSS JOIN LATERAL (SELECT seq FROM inbox_message WHERE seq = c.seq FOR NO KEY UPDATE) m") -> i64 { seqs: &'a [i64] }

    /// Decides with a snapshot that was taken under the locks.
    Make<'a>("
        INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
        SELECT c.seq, (SELECT coalesce(h.same_as, h.id) FROM inbox_handler_key k JOIN inbox_handler h ON h.id = k.handler_id
                       WHERE k.key = :handler_key), now()
        FROM unnest(:seqs) AS c (seq)
        WHERE (SELECT true FROM unnest(inbox_handler_ids(:handler_key)) AS h (id)
               CROSS JOIN LATERAL (SELECT 1 FROM inbox_delivery d WHERE d.message_seq = c.seq AND d.handler_id = h.id LIMIT 1) d
               LIMIT 1) IS NULL
        ON CONFLICT (message_seq, handler_id) DO NOTHING") { handler_key: &'a str, seqs: &'a [i64] }
}

pub(super) async fn backfill(conn: &mut AsyncPgConnection, step: &BackfillStep) -> Result<Backfilled> {
    let cannot = || database("cannot backfill deliveries");
    let candidates = Candidates {
        topics: &step.topics,
        newer_than_ms: step.newer_than.map(millis),
        after_seq: step.after_seq,
        look: LOOK_ROWS,
        handler_key: &step.handler_key,
        limit: limit(step.limit),
    };
    let found = candidates.load::<CandidatesRow>(conn).await.and_then(only_row).map_err(cannot())?;
    let CandidatesRow { seqs, last_looked } = found;
    let is_full = seqs.len() >= step.limit as usize;
    let next_seq = if is_full { seqs.last().copied() } else { last_looked };
    if seqs.is_empty() {
        return Ok(Backfilled { made: 0, next_seq });
    }
    let mut transaction = conn.build_transaction().read_committed();
    let made = transaction.run(async |conn| {
        let seqs = Lock { seqs: &seqs }.load::<i64>(conn).await?;
        Make { handler_key: &step.handler_key, seqs: &seqs }.execute(conn).await
    });
    let made = made.await.map_err(cannot())?;
    Ok(Backfilled { made: made as u64, next_seq })
}
