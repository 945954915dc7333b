//! The outbox: records are stored with the caller's writes, read by the relay that holds their slot, and marked when
//! they are acknowledged.
//!
//! As in PostgreSQL, but with one writer: no record with a lower id can be committed later, so a read needs no floor.

use std::time::{Duration, Instant};

use bytes::Bytes;
use diesel::{QueryResult, RunQueryDsl, SqliteConnection};
use sha2::{Digest, Sha256};

use super::clock::{self, micros};
use super::errors::database;
use super::statement::{Content, only_row, rows, statements};
use crate::store::counts::limit;
use crate::store::outbound::{
    Held, Hold, Marked, Marking, NewOutgoing, OutboxQuery, OutboxRows, Outgoing, PurgedSent, Refused, SLOTS,
};
use crate::store::rows::DatabaseStamp;
use crate::store::seam::Stamp;
use crate::types::{Headers, Result};

/// How long the row of a relay is kept after it was last seen.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(86_400);

rows! {
    /// A waiting record.
    OutgoingRow {
        id: i64, slot: i16, topic: String, recorded_at: Option<i64>, key: Option<Vec<u8>>, headers: Option<Vec<u8>>,
        payload: Option<Vec<u8>>,
    }
}

/// Restricts to records that wait in a slot that the relay holds.
macro_rules! waiting_in_held {
    () => {
        " WHERE id = :id AND status = 0
            AND slot IN (SELECT s.slot FROM inbox_outbox_slots s WHERE s.holder = :relay AND s.held_until > :now)"
    };
}

statements! {
    Publish<'a>("
        INSERT INTO inbox_outbox (slot, stored_at, message_id, source, topic, recorded_at, record_key, headers, payload)
        VALUES (:slot, :now, :message_id, :source, :topic, :recorded_at, :record_key, :headers, :payload)
        RETURNING id") -> i64 {
        slot: i16, now: i64, message_id: &'a str, source: &'a str, topic: &'a str, recorded_at: Option<i64>, record_key: Content<'a>,
        headers: Option<&'a [u8]>, payload: Content<'a>,
    }

    ForgetRelays("DELETE FROM inbox_relay WHERE alive_until < :before") { before: i64 }

    RegisterRelay<'a>("
        INSERT INTO inbox_relay (name, started_at, seen_at, alive_until) VALUES (:name, :now, :now, :alive_until) RETURNING id")
    -> i32 { name: &'a str, now: i64, alive_until: i64 }

    /// Inserts the row again if it is missing: the file may have been restored from a backup.
    KeepRelay<'a>("
        INSERT INTO inbox_relay (id, name, started_at, seen_at, alive_until, problem, problem_since)
        VALUES (:relay, :name, :now, :now, :alive_until, :problem, CASE WHEN :problem IS NOT NULL THEN :now END)
        ON CONFLICT (id) DO UPDATE
        SET seen_at = excluded.seen_at, alive_until = excluded.alive_until, problem = excluded.problem,
            problem_since = CASE WHEN excluded.problem IS NULL THEN NULL ELSE coalesce(problem_since, excluded.seen_at) END")
    { relay: i32, name: &'a str, now: i64, alive_until: i64, problem: Option<&'a str> }

    LiveRelays("SELECT count(*) FROM inbox_relay WHERE alive_until > :now") -> i64 { now: i64 }

    Mine("SELECT slot FROM inbox_outbox_slots WHERE holder = :relay AND held_until > :now ORDER BY slot") -> i16 { relay: i32, now: i64 }

    Free("SELECT slot FROM inbox_outbox_slots WHERE holder IS NULL OR held_until <= :now ORDER BY slot LIMIT :limit")
    -> i16 { now: i64, limit: i32 }

    Take("UPDATE inbox_outbox_slots SET holder = :relay, held_until = :until WHERE slot = :slot") { relay: i32, until: i64, slot: i16 }

    Release("UPDATE inbox_outbox_slots SET holder = NULL, held_until = NULL WHERE holder = :relay AND slot = :slot")
    { relay: i32, slot: i16 }

    RemoveRelay("DELETE FROM inbox_relay WHERE id = :relay") { relay: i32 }

    /// Reads only sizes: a record may be large.
    SizesOfSlot("
        SELECT id, coalesce(length(payload), 0) + coalesce(length(headers), 0) FROM inbox_outbox INDEXED BY inbox_outbox_waiting
        WHERE slot = :slot AND status = 0 ORDER BY id LIMIT :limit")
    -> (i64, i64) { slot: i16, limit: i32 }

    ReadSlot("
        SELECT id, slot, topic, recorded_at, record_key, headers, payload FROM inbox_outbox INDEXED BY inbox_outbox_waiting
        WHERE slot = :slot AND status = 0 ORDER BY id LIMIT :limit")
    -> OutgoingRow { slot: i16, limit: i32 }

    NextTopic<'a>("
        SELECT topic FROM inbox_outbox INDEXED BY inbox_outbox_topic
        WHERE slot = :slot AND status = 0 AND topic > :after ORDER BY topic LIMIT 1") -> String { slot: i16, after: &'a str }

    SizesOfTopic<'a>("
        SELECT id, coalesce(length(payload), 0) + coalesce(length(headers), 0) FROM inbox_outbox INDEXED BY inbox_outbox_topic
        WHERE slot = :slot AND status = 0 AND topic = :topic ORDER BY id LIMIT :limit")
    -> (i64, i64) { slot: i16, topic: &'a str, limit: i32 }

    ReadOne("
        SELECT id, slot, topic, recorded_at, record_key, headers, payload FROM inbox_outbox WHERE id = :id") -> OutgoingRow { id: i64 }

    MarkSent(concat!("
        UPDATE inbox_outbox
        SET status = 2, finished_at = :now, kafka_partition = :partition, kafka_offset = :offset, reason = NULL, last_error = NULL",
        waiting_in_held!()))
    { now: i64, partition: i32, offset: i64, id: i64, relay: i32 }

    DeleteSent(concat!("DELETE FROM inbox_outbox", waiting_in_held!())) { id: i64, relay: i32, now: i64 }

    PoisonOutgoing<'a>(concat!("
        UPDATE inbox_outbox SET status = 3, finished_at = :now, reason = :reason, last_error = :error", waiting_in_held!()))
    { now: i64, reason: &'a str, error: &'a str, id: i64, relay: i32 }

    PurgeSent("
        DELETE FROM inbox_outbox
        WHERE id IN (SELECT id FROM inbox_outbox INDEXED BY inbox_outbox_finished
                     WHERE status IN (2, 4) AND finished_at < :before AND finished_at >= :from ORDER BY finished_at LIMIT :limit)
        RETURNING finished_at")
    -> i64 { before: i64, from: i64, limit: i32 }
}

/// The same as PostgreSQL's function `inbox_outbox_slot`.
fn slot(key: Option<&[u8]>) -> i16 {
    let number = key.map_or_else(rand::random, |key| Sha256::digest(key)[0]);
    i16::from(number) % SLOTS
}

/// On the caller's connection: the records are committed with the caller's writes, or not at all.
pub(super) fn publish(conn: &mut SqliteConnection, records: &[NewOutgoing]) -> QueryResult<Vec<i64>> {
    let now = clock::now(conn)?;
    let publish = |record: &NewOutgoing| {
        let publish = Publish {
            slot: slot(record.key.as_deref()),
            now,
            message_id: &record.message_id,
            source: &record.source,
            topic: &record.topic,
            recorded_at: record.recorded_at.map(clock::to_stamp),
            record_key: record.key.as_deref().into(),
            headers: record.headers.encoded(),
            payload: record.payload.as_deref().into(),
        };
        publish.load(conn).and_then(only_row)
    };
    records.iter().map(publish).collect()
}

/// Also removes relays that have not been seen for a day.
pub(super) fn register(conn: &mut SqliteConnection, name: &str, lease: Duration) -> Result<i32> {
    let register = |conn: &mut SqliteConnection| {
        let now = clock::now(conn)?;
        ForgetRelays { before: now - micros(FORGOTTEN_AFTER) }.execute(conn)?;
        RegisterRelay { name, now, alive_until: now + micros(lease) }.load(conn).and_then(only_row)
    };
    register(conn).map_err(database("cannot register the relay"))
}

/// Keeps the relay alive, renews its slots and takes free ones up to its share.
pub(super) fn hold(conn: &mut SqliteConnection, sent_at: Instant, hold: &Hold) -> Result<Held> {
    let hold = |conn: &mut SqliteConnection| {
        let now = clock::now(conn)?;
        let (relay, until) = (hold.relay, now + micros(hold.lease));
        KeepRelay { relay, name: &hold.name, now, alive_until: until, problem: hold.problem.as_deref() }
            .execute(conn)?;
        let relays = LiveRelays { now }.load::<i64>(conn).and_then(only_row)?.max(1);
        let share = i64::from(SLOTS).unsigned_abs().div_ceil(relays.unsigned_abs());
        let mut slots = Mine { relay, now }.load::<i16>(conn)?;
        let wanted = i32::try_from(share).unwrap_or(i32::MAX) - i32::try_from(slots.len()).unwrap_or(i32::MAX);
        slots.extend(Free { now, limit: wanted.max(0) }.load::<i16>(conn)?);
        for &slot in &slots {
            Take { relay, until, slot }.execute(conn)?;
        }
        QueryResult::Ok(Held { sent_at, slots, share: usize::try_from(share).unwrap_or(usize::MAX) })
    };
    hold(conn).map_err(database("cannot hold slots of the outbox"))
}

pub(super) fn release(conn: &mut SqliteConnection, relay: i32, slots: &[i16]) -> Result<()> {
    let released = slots.iter().try_for_each(|&slot| Release { relay, slot }.execute(conn).map(drop));
    released.map_err(database("cannot release slots of the outbox"))
}

/// Slots are released first, so that another relay can take them at once.
pub(super) fn remove(conn: &mut SqliteConnection, relay: i32) -> Result<()> {
    release(conn, relay, &(0..SLOTS).collect::<Vec<i16>>())?;
    RemoveRelay { relay }.execute(conn).map(drop).map_err(database("cannot remove the relay"))
}

pub(super) fn read(conn: &mut SqliteConnection, query: &OutboxQuery) -> Result<OutboxRows> {
    read_slots(conn, query).map_err(database("cannot read the outbox"))
}

/// Reads slot by slot, within limits of rows and bytes. Only the records within the limits are read completely.
fn read_slots(conn: &mut SqliteConnection, query: &OutboxQuery) -> QueryResult<OutboxRows> {
    let now = clock::now(conn)?;
    let mine = Mine { relay: query.relay, now }.load::<i16>(conn)?;
    let rows_max = usize::try_from(query.rows).unwrap_or(usize::MAX);
    let (mut rows, mut bytes): (Vec<Outgoing>, u64) = (Vec::new(), 0);
    for &(slot, _) in query.slots.iter().filter(|(slot, _)| mine.contains(slot)) {
        if rows.len() >= rows_max || bytes >= query.bytes {
            break;
        }
        let mut sizes = match query.held_topics.is_empty() {
            true => SizesOfSlot { slot, limit: limit(query.rows) }.load::<(i64, i64)>(conn)?,
            false => sizes_beside_held(conn, query, slot)?,
        };
        sizes.truncate(rows_max - rows.len());
        let is_within = |(_, size): &(i64, i64)| {
            let is_within = bytes < query.bytes;
            bytes += size.unsigned_abs();
            is_within
        };
        let ids: Vec<i64> = sizes.into_iter().take_while(is_within).map(|(id, _)| id).collect();
        let found = match query.held_topics.is_empty() {
            true => ReadSlot { slot, limit: i32::try_from(ids.len()).unwrap_or(i32::MAX) }.load::<OutgoingRow>(conn)?,
            false => read_each(conn, &ids)?,
        };
        rows.extend(found.into_iter().map(outgoing));
    }
    Ok(OutboxRows { rows, oldest_open: None })
}

/// The first records of a slot whose topic is not held, with their sizes. Goes from one topic to the next, and reads no
/// record of a held one.
fn sizes_beside_held(conn: &mut SqliteConnection, query: &OutboxQuery, slot: i16) -> QueryResult<Vec<(i64, i64)>> {
    let (mut sizes, mut after) = (Vec::new(), String::new());
    while let Some(topic) = (NextTopic { slot, after: &after }).load::<String>(conn)?.pop() {
        if !query.held_topics.contains(&topic) {
            sizes.extend(SizesOfTopic { slot, topic: &topic, limit: limit(query.rows) }.load::<(i64, i64)>(conn)?);
        }
        after = topic;
    }
    sizes.sort_unstable();
    Ok(sizes)
}

fn read_each(conn: &mut SqliteConnection, ids: &[i64]) -> QueryResult<Vec<OutgoingRow>> {
    ids.iter().map(|&id| ReadOne { id }.load::<OutgoingRow>(conn).and_then(only_row)).collect()
}

fn outgoing(row: OutgoingRow) -> Outgoing {
    Outgoing {
        id: row.id,
        slot: row.slot,
        topic: row.topic.into(),
        recorded_at: row.recorded_at.map(DatabaseStamp::to_time),
        key: row.key.map(Bytes::from),
        headers: row.headers.and_then(Headers::decode).unwrap_or_default(),
        payload: row.payload.map(Bytes::from),
    }
}

/// Marks or deletes sent records. Records of a slot that the relay has lost stay waiting, and are sent again.
pub(super) fn mark_sent(conn: &mut SqliteConnection, marking: &Marking) -> Result<Marked> {
    let Marking { relay, sent, keeps, .. } = marking;
    let mark = |conn: &mut SqliteConnection| {
        let now = clock::now(conn)?;
        for sent in sent {
            let (id, relay) = (sent.id, *relay);
            match keeps {
                true => MarkSent { now, partition: sent.partition, offset: sent.offset, id, relay }.execute(conn)?,
                false => DeleteSent { id, relay, now }.execute(conn)?,
            };
        }
        QueryResult::Ok(Marked { transaction: None })
    };
    mark(conn).map_err(database(format!("cannot mark {} records as sent", sent.len())))
}

pub(super) fn poison(conn: &mut SqliteConnection, relay: i32, refused: &[Refused]) -> Result<u64> {
    let poison = |conn: &mut SqliteConnection| {
        let now = clock::now(conn)?;
        let mut poisoned = 0;
        for Refused { id, reason, error, .. } in refused {
            poisoned += PoisonOutgoing { now, reason, error, id: *id, relay }.execute(conn)?;
        }
        QueryResult::Ok(poisoned as u64)
    };
    poison(conn).map_err(database("cannot poison records of the outbox"))
}

pub(super) fn purge(
    conn: &mut SqliteConnection,
    older_than: Duration,
    from: Option<Stamp>,
    rows: u32,
) -> Result<PurgedSent> {
    let purge = |conn: &mut SqliteConnection| {
        let before = clock::now(conn)? - micros(older_than);
        let from = from.map_or(i64::MIN, |Stamp(from)| from);
        PurgeSent { before, from, limit: limit(rows) }.load::<i64>(conn)
    };
    let purged = purge(conn).map_err(database("cannot purge sent records"))?;
    Ok(PurgedSent { rows: purged.len() as u64, to: purged.into_iter().max().map(Stamp) })
}

#[cfg(test)]
mod tests;
