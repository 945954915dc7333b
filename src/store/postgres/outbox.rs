//! The outbox: records are stored with the caller's writes, read by the relay that holds their slot, and marked when
//! they are acknowledged.
//!
//! The cost of a read depends on its batch: one scan of the index of waiting records per slot, and while topics are held
//! one for each other topic of a slot. A read beside held topics uses no floors: while an old snapshot is open, it also
//! walks the index entries of the records that were sent since. Writes of a relay are fenced by the slot's row, which it
//! locks, so that no other relay can take the slot in the meantime.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use diesel::pg::data_types::PgTimestamp;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::process::millis;
use super::statement::{only_row, rows, statements};
use super::time::to_postgres;
use crate::store::counts::{count, limit};
use crate::store::outbound::{
    Held, Hold, Marked, Marking, NewOutgoing, OutboxQuery, OutboxRows, Outgoing, PurgedSent, Refused,
};
use crate::store::rows::DatabaseStamp;
use crate::store::seam::Stamp;
use crate::types::{Headers, Result};

rows! {
    /// A waiting record, with the oldest transaction that was open at the time of the read.
    OutgoingRow {
        id: i64, slot: i16, topic: String, recorded_at: Option<PgTimestamp>, key: Option<Vec<u8>>, headers: Option<Vec<u8>>,
        payload: Option<Vec<u8>>, oldest_open: i64,
    }

    HeldRow { slot: i16, share: i32 }
}

/// Those of the given slots that the relay holds. Their rows stay locked until the statement has committed.
macro_rules! held_slots {
    () => {
        "
        held AS MATERIALIZED (
            SELECT s.slot FROM inbox_outbox_slots s
            WHERE s.slot = ANY (:slots) AND CASE WHEN s.holder = :relay AND s.held_until > now() THEN true ELSE false END
            FOR NO KEY UPDATE)"
    };
}

/// Restricts to records that wait in a held slot.
macro_rules! waiting_in_held {
    () => {
        "
        o.id = m.id AND CASE WHEN o.status = 0 THEN true ELSE false END AND o.slot = ANY (ARRAY(SELECT slot FROM held))
          AND (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL"
    };
}

/// Reads the records of each slot that a query for one slot `a` finds, in order, within limits of rows and bytes. The
/// limits only leave out the last records of a slot. Only the records within the limits are read completely.
macro_rules! first_of_slots {
    ($of_slot:literal) => {
        concat!(
            "
        WITH found AS MATERIALIZED (
            SELECT f.*, sum(f.bytes) OVER (ORDER BY f.place, f.id ROWS UNBOUNDED PRECEDING) - f.bytes AS bytes_before
            FROM (SELECT a.place, w.id, w.bytes
                  FROM (SELECT g.* FROM unnest(:slots, :floors) WITH ORDINALITY AS g (slot, floor, place)
                        WHERE (SELECT CASE WHEN s.holder = :relay AND s.held_until > now() THEN true ELSE false END
                               FROM inbox_outbox_slots s WHERE s.slot = g.slot) OFFSET 0) a
                  CROSS JOIN LATERAL (",
            $of_slot,
            ") w
                  LIMIT :rows) f)
        SELECT r.id, r.slot, r.topic, r.recorded_at, r.record_key, r.headers, r.payload,
               pg_snapshot_xmin(pg_current_snapshot())::text::bigint
        FROM found l CROSS JOIN LATERAL (SELECT * FROM inbox_outbox o WHERE o.id = l.id LIMIT 1) r
        WHERE l.bytes_before < :bytes
        ORDER BY l.place, l.id"
        )
    };
}

statements! {
    /// The transaction id is assigned before the record ids, as in inbox_publish. Without the condition on it, the
    /// planner would leave the unused column out.
    Publish<'a>("
        INSERT INTO inbox_outbox (slot, message_id, source, topic, recorded_at, record_key, headers, payload)
        SELECT inbox_outbox_slot(n.record_key), n.message_id, n.source, n.topic, n.recorded_at, n.record_key, n.headers, n.payload
        FROM (SELECT pg_current_xact_id() AS number OFFSET 0) drawn
        CROSS JOIN unnest(:message_ids, :sources, :topics, :recorded_at, :record_keys, :headers, :payloads) WITH ORDINALITY
                   AS n (message_id, source, topic, recorded_at, record_key, headers, payload, place)
        WHERE drawn.number IS NOT NULL
        ORDER BY n.place
        RETURNING id")
    -> i64 {
        message_ids: Vec<&'a str>, sources: Vec<&'a str>, topics: Vec<&'a str>, recorded_at: Vec<Option<PgTimestamp>>,
        record_keys: Vec<Option<&'a [u8]>>, headers: Vec<Option<&'a [u8]>>, payloads: Vec<Option<&'a [u8]>>,
    }

    /// Also removes relays that have not been seen for a day.
    RegisterRelay<'a>("
        WITH gone AS (DELETE FROM inbox_relay WHERE alive_until < now() - interval '1 day')
        INSERT INTO inbox_relay (name, alive_until) VALUES (:name, now() + :lease_ms * interval '1 millisecond') RETURNING id")
    -> i32 { name: &'a str, lease_ms: i64 }

    /// Inserts the row again if it is missing: a database that failed over may have lost it.
    KeepRelay<'a>("
        INSERT INTO inbox_relay (id, name, alive_until, problem, problem_since) OVERRIDING SYSTEM VALUE
        VALUES (:relay, :name, now() + :lease_ms * interval '1 millisecond', :problem, CASE WHEN :problem IS NOT NULL THEN now() END)
        ON CONFLICT (id) DO UPDATE
        SET seen_at = now(), alive_until = excluded.alive_until, problem = excluded.problem,
            problem_since = CASE WHEN excluded.problem IS NULL THEN NULL ELSE coalesce(inbox_relay.problem_since, now()) END")
    { relay: i32, name: &'a str, lease_ms: i64, problem: Option<&'a str> }

    /// Renews the slots that the relay holds and takes free ones up to its share. It never waits for the lock of a free
    /// slot.
    HoldSlots("
        WITH share AS MATERIALIZED (
            SELECT ceil((SELECT count(*) FROM inbox_outbox_slots)::numeric / greatest(count(*), 1))::integer AS slots
            FROM inbox_relay r WHERE r.alive_until > now()),
        mine AS MATERIALIZED (
            SELECT s.slot FROM inbox_outbox_slots s WHERE s.holder = :relay AND s.held_until > now() FOR NO KEY UPDATE),
        free AS MATERIALIZED (
            SELECT s.slot FROM inbox_outbox_slots s WHERE s.holder IS NULL OR s.held_until <= now()
            ORDER BY s.slot
            LIMIT greatest((SELECT slots FROM share) - (SELECT count(*) FROM mine), 0)
            FOR NO KEY UPDATE SKIP LOCKED)
        UPDATE inbox_outbox_slots s SET holder = :relay, held_until = now() + :lease_ms * interval '1 millisecond'
        WHERE s.slot IN (SELECT slot FROM mine UNION ALL SELECT slot FROM free)
        RETURNING s.slot, (SELECT slots FROM share)") -> HeldRow { relay: i32, lease_ms: i64 }

    ReleaseSlots<'a>("
        UPDATE inbox_outbox_slots SET holder = NULL, held_until = NULL WHERE holder = :relay AND slot = ANY (:slots)")
    { relay: i32, slots: &'a [i16] }

    RemoveRelay("
        WITH released AS (UPDATE inbox_outbox_slots SET holder = NULL, held_until = NULL WHERE holder = :relay)
        DELETE FROM inbox_relay WHERE id = :relay") { relay: i32 }

    /// Reads the first records of each slot.
    ReadOutgoing(first_of_slots!("
                      SELECT o.waiting AS id, coalesce(octet_length(o.payload), 0)::bigint + coalesce(octet_length(o.headers), 0) AS bytes
                      FROM inbox_outbox o
                      WHERE o.slot = a.slot AND o.waiting IS NOT NULL AND o.waiting >= a.floor
                      ORDER BY o.waiting LIMIT :rows"))
    -> OutgoingRow { slots: Vec<i16>, floors: Vec<i64>, relay: i32, rows: i32, bytes: i64 }

    /// Reads the first records of each slot whose topic is not held: the first ones of each such topic, merged by id. It
    /// goes from one topic of the slot to the next, and reads no record of a held one. Slower with every topic that has
    /// waiting records, so it is only for while topics are held.
    ReadBesideHeld<'a>(first_of_slots!("
                      SELECT first.id, first.bytes
                      FROM (WITH RECURSIVE topics (topic) AS (
                                SELECT (SELECT o.topic FROM inbox_outbox o WHERE o.slot = a.slot AND o.status = 0 ORDER BY o.topic LIMIT 1)
                                UNION ALL
                                SELECT (SELECT o.topic FROM inbox_outbox o WHERE o.slot = a.slot AND o.status = 0 AND o.topic > t.topic
                                        ORDER BY o.topic LIMIT 1)
                                FROM topics t WHERE t.topic IS NOT NULL)
                            SELECT t.topic FROM topics t WHERE t.topic <> ALL (:held_topics)) open
                      CROSS JOIN LATERAL (
                          SELECT o.waiting AS id, coalesce(octet_length(o.payload), 0)::bigint + coalesce(octet_length(o.headers), 0) AS bytes
                          FROM inbox_outbox o
                          WHERE o.slot = a.slot AND o.topic = open.topic AND o.status = 0
                          ORDER BY o.waiting LIMIT :rows) first
                      ORDER BY first.id LIMIT :rows"))
    -> OutgoingRow { slots: Vec<i16>, floors: Vec<i64>, relay: i32, held_topics: &'a [String], rows: i32, bytes: i64 }

    MarkSent<'a>(concat!("
        WITH", held_slots!(), ",
        marked AS (
            UPDATE inbox_outbox o
            SET status = 2, finished_at = now(), kafka_partition = m.kafka_partition, kafka_offset = m.kafka_offset, reason = NULL, last_error = NULL
            FROM (SELECT unnest(:ids) AS id, unnest(:partitions) AS kafka_partition, unnest(:offsets) AS kafka_offset) m
            WHERE", waiting_in_held!(), ")
        SELECT pg_current_xact_id()::text::bigint"))
    -> i64 { slots: &'a [i16], relay: i32, ids: Vec<i64>, partitions: Vec<i32>, offsets: Vec<i64> }

    /// For relays that do not keep sent records.
    DeleteSent<'a>(concat!("
        WITH", held_slots!(), ",
        marked AS (
            DELETE FROM inbox_outbox o USING (SELECT unnest(:ids) AS id) m
            WHERE", waiting_in_held!(), ")
        SELECT pg_current_xact_id()::text::bigint"))
    -> i64 { slots: &'a [i16], relay: i32, ids: Vec<i64> }

    PoisonOutgoing<'a>(concat!("
        WITH", held_slots!(), "
        UPDATE inbox_outbox o SET status = 3, finished_at = now(), reason = m.reason, last_error = m.error
        FROM (SELECT unnest(:ids) AS id, unnest(:reasons) AS reason, unnest(:errors) AS error) m
        WHERE", waiting_in_held!()))
    { slots: &'a [i16], relay: i32, ids: Vec<i64>, reasons: Vec<&'a str>, errors: Vec<&'a str> }

    /// Several relays may purge at once: each skips the rows that the others have locked.
    PurgeSent("
        WITH purged AS (
            DELETE FROM inbox_outbox o
            WHERE o.ctid = ANY (ARRAY(
                SELECT s.ctid FROM inbox_outbox s
                WHERE s.status IN (2, 4) AND s.finished_at < now() - :older_ms * interval '1 millisecond' AND s.finished_at >= :from
                ORDER BY s.finished_at LIMIT :rows
                FOR UPDATE SKIP LOCKED))
            RETURNING o.finished_at)
        SELECT count(*), max(finished_at) FROM purged")
    -> (i64, Option<PgTimestamp>) { older_ms: i64, from: PgTimestamp, rows: i32 }
}

/// On the caller's connection: the records are committed with the caller's writes, or not at all.
pub(super) async fn publish(conn: &mut AsyncPgConnection, records: Vec<NewOutgoing>) -> Result<Vec<i64>> {
    let publish = Publish {
        message_ids: records.iter().map(|record| record.message_id.as_str()).collect(),
        sources: records.iter().map(|record| record.source.as_str()).collect(),
        topics: records.iter().map(|record| &*record.topic).collect(),
        recorded_at: records.iter().map(|record| record.recorded_at.map(to_postgres)).collect(),
        record_keys: records.iter().map(|record| record.key.as_deref()).collect(),
        headers: records.iter().map(|record| record.headers.encoded()).collect(),
        payloads: records.iter().map(|record| record.payload.as_deref()).collect(),
    };
    publish.load(conn).await.map_err(database("cannot store records in the outbox"))
}

pub(super) async fn register(conn: &mut AsyncPgConnection, name: &str, lease: Duration) -> Result<i32> {
    let register = RegisterRelay { name, lease_ms: millis(lease) };
    register.load(conn).await.and_then(only_row).map_err(database("cannot register the relay"))
}

/// Keeps the relay alive and its slots held. The relay's row comes first: shares are computed from the live relays.
pub(super) async fn hold(conn: &mut AsyncPgConnection, hold: &Hold) -> Result<Held> {
    let cannot = || database("cannot hold slots of the outbox");
    let (relay, lease_ms, sent_at) = (hold.relay, millis(hold.lease), Instant::now());
    let keep = KeepRelay { relay, name: &hold.name, lease_ms, problem: hold.problem.as_deref() };
    keep.execute(conn).await.map_err(cannot())?;
    let rows = HoldSlots { relay, lease_ms }.load::<HeldRow>(conn).await.map_err(cannot())?;
    let share = rows.as_slice().first().map_or(0, |row| usize::try_from(row.share).unwrap_or(0));
    Ok(Held { sent_at, slots: rows.into_iter().map(|row| row.slot).collect(), share })
}

pub(super) async fn release(conn: &mut AsyncPgConnection, relay: i32, slots: &[i16]) -> Result<()> {
    let released = ReleaseSlots { relay, slots }.execute(conn).await;
    released.map(drop).map_err(database("cannot release slots of the outbox"))
}

pub(super) async fn remove(conn: &mut AsyncPgConnection, relay: i32) -> Result<()> {
    RemoveRelay { relay }.execute(conn).await.map(drop).map_err(database("cannot remove the relay"))
}

pub(super) async fn read(conn: &mut AsyncPgConnection, query: &OutboxQuery) -> Result<OutboxRows> {
    let (slots, floors) = query.slots.iter().copied().unzip();
    let bytes = i64::try_from(query.bytes).unwrap_or(i64::MAX);
    let (relay, held_topics, rows) = (query.relay, &*query.held_topics, limit(query.rows));
    let rows = match held_topics.is_empty() {
        true => ReadOutgoing { slots, floors, relay, rows, bytes }.load::<OutgoingRow>(conn).await,
        false => ReadBesideHeld { slots, floors, relay, held_topics, rows, bytes }.load::<OutgoingRow>(conn).await,
    };
    let rows = rows.map_err(database("cannot read the outbox"))?;
    let oldest_open = rows.as_slice().first().map(|row| row.oldest_open);
    // Most records of a read have a few topics: they share the text.
    let mut topic: Arc<str> = "".into();
    let outgoing = |row: OutgoingRow| {
        if *row.topic != *topic {
            topic = row.topic.into();
        }
        Outgoing {
            id: row.id,
            slot: row.slot,
            topic: Arc::clone(&topic),
            recorded_at: row.recorded_at.map(DatabaseStamp::to_time),
            key: row.key.map(Bytes::from),
            headers: row.headers.and_then(Headers::decode).unwrap_or_default(),
            payload: row.payload.map(Bytes::from),
        }
    };
    Ok(OutboxRows { rows: rows.into_iter().map(outgoing).collect(), oldest_open })
}

/// Marks or deletes sent records. Records of a slot that the relay has lost stay waiting, and are sent again.
pub(super) async fn mark_sent(conn: &mut AsyncPgConnection, marking: &Marking) -> Result<Marked> {
    let Marking { relay, slots, sent, keeps } = marking;
    let ids: Vec<i64> = sent.iter().map(|sent| sent.id).collect();
    let marked = if *keeps {
        let partitions = sent.iter().map(|sent| sent.partition).collect();
        let offsets = sent.iter().map(|sent| sent.offset).collect();
        MarkSent { slots, relay: *relay, ids, partitions, offsets }.load(conn).await.and_then(only_row)
    } else {
        DeleteSent { slots, relay: *relay, ids }.load(conn).await.and_then(only_row)
    };
    let transaction = marked.map_err(database(format!("cannot mark {} records as sent", sent.len())))?;
    Ok(Marked { transaction: Some(transaction) })
}

/// Poisons records, with the reason for the operator.
pub(super) async fn poison(conn: &mut AsyncPgConnection, relay: i32, refused: &[Refused]) -> Result<u64> {
    let slots: Vec<i16> = refused.iter().map(|refused| refused.slot).collect();
    let poison = PoisonOutgoing {
        slots: &slots,
        relay,
        ids: refused.iter().map(|refused| refused.id).collect(),
        reasons: refused.iter().map(|refused| refused.reason).collect(),
        errors: refused.iter().map(|refused| refused.error.as_str()).collect(),
    };
    let poisoned = poison.execute(conn).await.map_err(database("cannot poison records of the outbox"))?;
    Ok(poisoned as u64)
}

pub(super) async fn purge(
    conn: &mut AsyncPgConnection,
    older_than: Duration,
    from: Option<Stamp>,
    rows: u32,
) -> Result<PurgedSent> {
    let from = PgTimestamp(from.map_or(i64::MIN, |Stamp(from)| from));
    let purge = PurgeSent { older_ms: millis(older_than), from, rows: limit(rows) };
    let purged = purge.load::<(i64, Option<PgTimestamp>)>(conn).await.and_then(only_row);
    let (rows, to) = purged.map_err(database("cannot purge sent records"))?;
    Ok(PurgedSent { rows: count(rows), to: to.map(DatabaseStamp::to_stamp) })
}
