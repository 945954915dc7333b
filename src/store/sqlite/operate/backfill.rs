//! Adds a handler's deliveries to messages that were accepted before it was there.

use diesel::sql_types::{BigInt, Nullable, Text};
use diesel::{RunQueryDsl, SqliteConnection};

use super::super::clock::{self, micros};
use super::super::errors::database;
use super::super::statement::statement;
use crate::store::operating::{BackfillStep, Backfilled};
use crate::types::Result;

/// A step that does not borrow.
pub(super) struct OwnStep {
    handler_key: String,
    topics: String,
    newer_than_us: Option<i64>,
    after_seq: i64,
    limit: i64,
}

impl From<&BackfillStep<'_>> for OwnStep {
    fn from(step: &BackfillStep<'_>) -> Self {
        Self {
            handler_key: step.handler_key.to_owned(),
            topics: serde_json::json!(step.topics).to_string(),
            newer_than_us: step.newer_than.map(micros),
            after_seq: step.after_seq,
            limit: step.limit.into(),
        }
    }
}

statement! {
    Missing<'a>("
        SELECT m.seq FROM inbox_message m
        WHERE m.seq > ?1 AND m.topic IN (SELECT value FROM json_each(?2)) AND (?3 IS NULL OR m.received_at >= ?3)
          AND NOT EXISTS (SELECT 1 FROM inbox_delivery d JOIN inbox_handler_ids i ON i.id = d.handler_id AND i.handler_key = ?4
                          WHERE d.message_seq = m.seq)
        ORDER BY m.seq LIMIT ?5")
    -> (BigInt) {
        after_seq: i64 => BigInt,
        topics: &'a str => Text,
        since: Option<i64> => Nullable<BigInt>,
        handler_key: &'a str => Text,
        limit: i64 => BigInt,
    }
}

statement! {
    Make<'a>("
        INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
        VALUES (?1, (SELECT coalesce(h.same_as, h.id) FROM inbox_handler_key k JOIN inbox_handler h ON h.id = k.handler_id
                     WHERE k.key = ?2), ?3)") {
        message_seq: i64 => BigInt,
        handler_key: &'a str => Text,
        now: i64 => BigInt,
    }
}

pub(super) fn backfill(conn: &mut SqliteConnection, step: &OwnStep) -> Result<Backfilled> {
    let cannot = || database("cannot backfill deliveries");
    let now = clock::now(conn).map_err(cannot())?;
    let missing = Missing {
        after_seq: step.after_seq,
        topics: &step.topics,
        since: step.newer_than_us.map(|age| now - age),
        handler_key: &step.handler_key,
        limit: step.limit,
    };
    let seqs = missing.load::<(i64,)>(conn).map_err(cannot())?;
    for (message_seq,) in &seqs {
        let make = Make { message_seq: *message_seq, handler_key: &step.handler_key, now };
        make.execute(conn).map_err(cannot())?;
    }
    Ok(Backfilled { made: u64::try_from(seqs.len()).unwrap_or_default(), next_seq: seqs.last().map(|(seq,)| *seq) })
}
