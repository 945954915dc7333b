//! Adds a handler's deliveries to messages that were accepted before it was there.

use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::super::errors::database;
use super::super::process::millis;
use super::super::statement::{only_row, rows, statements};
use crate::store::counts::{count, limit};
use crate::store::operating::{BackfillStep, Backfilled};
use crate::types::Result;

/// Messages that are looked at in one statement, wanted or not: it stays short also where nothing is wanted.
const LOOK_ROWS: i32 = 20_000;

rows! {
    /// `is_full`: there may be more that are missing among those that were looked at.
    BackfillRow { made: i64, is_full: bool, last_missing: Option<i64>, last_looked: Option<i64> }
}

statements! {
    /// Messages are locked, as accept does where it adds deliveries: nobody adds the same ones meanwhile, and nobody purges them.
    Backfill<'a>("
        WITH looked AS MATERIALIZED (
            SELECT seq, topic = ANY (:topics)
                        AND (:newer_than_ms::bigint IS NULL OR received_at >= now() - :newer_than_ms * interval '1 millisecond') AS is_wanted
            FROM inbox_message WHERE seq > :after_seq ORDER BY seq LIMIT :look),
        missing AS MATERIALIZED (
            SELECT m.seq FROM looked l
            CROSS JOIN LATERAL (SELECT seq FROM inbox_message WHERE seq = l.seq FOR NO KEY UPDATE) m
            WHERE l.is_wanted
              AND (SELECT true FROM unnest(inbox_handler_ids(:handler_key)) AS h (id)
                   CROSS JOIN LATERAL (SELECT 1 FROM inbox_delivery d WHERE d.message_seq = l.seq AND d.handler_id = h.id LIMIT 1) d
                   LIMIT 1) IS NULL
            ORDER BY m.seq LIMIT :limit),
        made AS (
            INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
            SELECT seq, (SELECT coalesce(h.same_as, h.id) FROM inbox_handler_key k JOIN inbox_handler h ON h.id = k.handler_id
                         WHERE k.key = :handler_key), now() FROM missing
            ON CONFLICT (message_seq, handler_id) DO NOTHING RETURNING 1)
        SELECT (SELECT count(*) FROM made), (SELECT count(*) FROM missing) = :limit, (SELECT max(seq) FROM missing),
               (SELECT max(seq) FROM looked)")
    -> BackfillRow {
        topics: &'a [String], newer_than_ms: Option<i64>, after_seq: i64, look: i32, handler_key: &'a str, limit: i32,
    }
}

pub(super) async fn backfill(conn: &mut AsyncPgConnection, step: &BackfillStep) -> Result<Backfilled> {
    let backfill = Backfill {
        topics: &step.topics,
        newer_than_ms: step.newer_than.map(millis),
        after_seq: step.after_seq,
        look: LOOK_ROWS,
        handler_key: &step.handler_key,
        limit: limit(step.limit),
    };
    let row = backfill.load::<BackfillRow>(conn).await.and_then(only_row);
    let row = row.map_err(database("cannot backfill deliveries"))?;
    let next_seq = if row.is_full { row.last_missing } else { row.last_looked };
    Ok(Backfilled { made: count(row.made), next_seq })
}
