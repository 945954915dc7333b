//! Adds a handler's deliveries to messages that were accepted before it was there.

use diesel::sql_types::{Array, BigInt, Bool, Integer, Nullable, Text};
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::super::errors::database;
use super::super::process::millis;
use super::super::statement::{only_row, statement};
use crate::store::operating::{BackfillStep, Backfilled};
use crate::types::Result;

/// Messages that are looked at in one statement, wanted or not: it stays short also where nothing is wanted.
const LOOK_ROWS: i32 = 20_000;

statement! {
    /// Messages are locked, as accept does where it adds deliveries: nobody adds the same ones meanwhile, and nobody purges them.
    Backfill<'a>("
        WITH looked AS MATERIALIZED (
            SELECT seq, topic = ANY ($1) AND ($2::bigint IS NULL OR received_at >= now() - $2 * interval '1 millisecond') AS is_wanted
            FROM inbox_message WHERE seq > $3 ORDER BY seq LIMIT $4),
        missing AS MATERIALIZED (
            SELECT m.seq FROM looked l
            CROSS JOIN LATERAL (SELECT seq FROM inbox_message WHERE seq = l.seq FOR NO KEY UPDATE) m
            WHERE l.is_wanted
              AND (SELECT true FROM unnest(inbox_handler_ids($5)) AS h (id)
                   CROSS JOIN LATERAL (SELECT 1 FROM inbox_delivery d WHERE d.message_seq = l.seq AND d.handler_id = h.id LIMIT 1) d
                   LIMIT 1) IS NULL
            ORDER BY m.seq LIMIT $6),
        made AS (
            INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
            SELECT seq, (SELECT coalesce(h.same_as, h.id) FROM inbox_handler_key k JOIN inbox_handler h ON h.id = k.handler_id
                         WHERE k.key = $5), now() FROM missing
            ON CONFLICT (message_seq, handler_id) DO NOTHING RETURNING 1)
        SELECT (SELECT count(*) FROM made), (SELECT count(*) FROM missing) = $6, (SELECT max(seq) FROM missing), (SELECT max(seq) FROM looked)")
    -> (BigInt, Bool, Nullable<BigInt>, Nullable<BigInt>) {
        topics: &'a [String] => Array<Text>,
        newer_than_ms: Option<i64> => Nullable<BigInt>,
        after_seq: i64 => BigInt,
        look: i32 => Integer,
        handler_key: &'a str => Text,
        limit: i32 => Integer,
    }
}

pub(super) async fn backfill(conn: &mut AsyncPgConnection, step: &BackfillStep<'_>) -> Result<Backfilled> {
    let backfill = Backfill {
        topics: step.topics,
        newer_than_ms: step.newer_than.map(millis),
        after_seq: step.after_seq,
        look: LOOK_ROWS,
        handler_key: step.handler_key,
        limit: i32::try_from(step.limit).unwrap_or(i32::MAX),
    };
    let made = backfill.load::<(i64, bool, Option<i64>, Option<i64>)>(conn).await.and_then(only_row);
    let (made, is_full, last_missing, last_looked) = made.map_err(database("cannot backfill deliveries"))?;
    let next_seq = if is_full { last_missing } else { last_looked };
    Ok(Backfilled { made: u64::try_from(made).unwrap_or_default(), next_seq })
}
