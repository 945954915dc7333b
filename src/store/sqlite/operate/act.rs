//! Acts of a person, each in the one transaction of the writer.

use diesel::sql_types::{BigInt, Nullable, SmallInt, Text};
use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::super::clock;
use super::super::errors::database;
use super::super::statement::{only_row, statement};
use super::look::{by_filter, by_quarantine_filter, is_meant};
use crate::store::operating::{Act, Signed};
use crate::types::{DeliveryFilter, QuarantineFilter, Result};

/// An act that does not borrow.
pub(super) enum OwnAct {
    Replay(DeliveryFilter, u32),
    Discard(DeliveryFilter, u32),
    Pause(String),
    Resume(String),
    ReplayQuarantined(QuarantineFilter, u32),
    DiscardQuarantined(QuarantineFilter, u32),
}

impl From<&Act<'_>> for OwnAct {
    fn from(act: &Act<'_>) -> Self {
        match *act {
            Act::Replay { filter, limit } => Self::Replay(filter.clone(), limit),
            Act::Discard { filter, limit } => Self::Discard(filter.clone(), limit),
            Act::Pause { handler_key } => Self::Pause(handler_key.to_owned()),
            Act::Resume { handler_key } => Self::Resume(handler_key.to_owned()),
            Act::ReplayQuarantined { filter, limit } => Self::ReplayQuarantined(filter.clone(), limit),
            Act::DiscardQuarantined { filter, limit } => Self::DiscardQuarantined(filter.clone(), limit),
        }
    }
}

by_filter!(OfFilter(concat!(
    "SELECT d.message_seq, d.handler_id FROM inbox_delivery d LEFT JOIN inbox_message m ON m.seq = d.message_seq
     WHERE d.status = 3", is_meant!("d.finished_at"), "AND ?10 IS NOT NULL ORDER BY d.finished_at, d.message_seq LIMIT ?11"
)) -> (BigInt, SmallInt));

// The first condition says which index; it names the first bind only because binds have to be named in order.
by_filter!(OfMessage(concat!(
    "SELECT d.message_seq, d.handler_id FROM inbox_message m JOIN inbox_delivery d ON d.message_seq = m.seq
     WHERE (?1 IS NULL OR true) AND m.message_id = ?2", is_meant!("d.finished_at"),
    "AND CASE ?10 WHEN 'replay' THEN d.status IN (3, 4)
                  ELSE d.status = 3 OR d.status = 0 AND (d.locked_until IS NULL OR d.locked_until <= (SELECT at FROM inbox_now)) END
     ORDER BY d.message_seq, d.handler_id LIMIT ?11"
)) -> (BigInt, SmallInt));

statement! {
    Audit<'a>("
        INSERT INTO inbox_audit (acted_at, action, filter, affected, reason, operator)
        VALUES ((SELECT at FROM inbox_now), ?1, ?2, ?3, ?4, ?5) RETURNING id")
    -> (BigInt) {
        action: &'a str => Text,
        filter: &'a str => Text,
        affected: i64 => BigInt,
        reason: Option<&'a str> => Nullable<Text>,
        operator: Option<&'a str> => Nullable<Text>,
    }
}

statement! {
    KeepHistory("
        INSERT INTO inbox_history (message_seq, handler_id, audit_id, status, finished_at, attempts, errors, crashes, reason, last_error)
        SELECT message_seq, handler_id, ?1, status, finished_at, attempts, errors, crashes, reason, last_error
        FROM inbox_delivery WHERE message_seq = ?2 AND handler_id = ?3") {
        audit_id: i64 => BigInt,
        message_seq: i64 => BigInt,
        handler_id: i16 => SmallInt,
    }
}

statement! {
    /// The attempt number goes on, so that a claim from before the replay stays invalid.
    ReplayOne("
        UPDATE inbox_delivery
        SET status = 0, due_at = (SELECT at FROM inbox_now), finished_at = NULL, errors = 0, crashes = 0, reason = NULL,
            locked_until = NULL, locked_by = NULL, replays = replays + 1
        WHERE message_seq = ?1 AND handler_id = ?2") {
        message_seq: i64 => BigInt,
        handler_id: i16 => SmallInt,
    }
}

statement! {
    DiscardOne<'a>("
        UPDATE inbox_delivery
        SET status = 4, finished_at = (SELECT at FROM inbox_now), attempts = attempts + 1, locked_until = NULL, locked_by = NULL,
            reason = coalesce(?1, 'by a person')
        WHERE message_seq = ?2 AND handler_id = ?3") {
        reason: Option<&'a str> => Nullable<Text>,
        message_seq: i64 => BigInt,
        handler_id: i16 => SmallInt,
    }
}

statement! {
    Pause<'a>("
        UPDATE inbox_handler SET paused_at = (SELECT at FROM inbox_now)
        WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = ?1) AND paused_at IS NULL") {
        handler_key: &'a str => Text,
    }
}

statement! {
    Resume<'a>("
        UPDATE inbox_handler SET paused_at = NULL
        WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = ?1) AND paused_at IS NOT NULL") {
        handler_key: &'a str => Text,
    }
}

by_quarantine_filter!(AskReplay(
    "UPDATE inbox_quarantine SET replay_asked_at = coalesce(replay_asked_at, (SELECT at FROM inbox_now))
     WHERE id IN (SELECT id FROM inbox_quarantine",
    ")"
));
by_quarantine_filter!(Delete("DELETE FROM inbox_quarantine WHERE id IN (SELECT id FROM inbox_quarantine", ")"));

pub(super) fn act(conn: &mut SqliteConnection, name: &str, act: &OwnAct, signed: &Signed) -> Result<u64> {
    let key = |handler_key: &str| serde_json::json!({ "handler_key": handler_key }).to_string();
    let acted = match act {
        OwnAct::Replay(of, limit) | OwnAct::Discard(of, limit) => change(conn, name, of, *limit, signed),
        OwnAct::Pause(handler_key) => {
            let paused = Pause { handler_key }.execute(conn);
            paused.and_then(|ids| audited(conn, name, &key(handler_key), ids.min(1), signed))
        }
        OwnAct::Resume(handler_key) => {
            let resumed = Resume { handler_key }.execute(conn);
            resumed.and_then(|ids| audited(conn, name, &key(handler_key), ids.min(1), signed))
        }
        OwnAct::ReplayQuarantined(of, limit) => {
            let asked = clock::now(conn).and_then(|now| AskReplay::new(of, *limit, now).execute(conn));
            asked.and_then(|records| audited(conn, name, &of.to_json(), records, signed))
        }
        OwnAct::DiscardQuarantined(of, limit) => {
            let deleted = clock::now(conn).and_then(|now| Delete::new(of, *limit, now).execute(conn));
            deleted.and_then(|records| audited(conn, name, &of.to_json(), records, signed))
        }
    };
    let changed = acted.map_err(database(format!("cannot {name}")))?;
    Ok(u64::try_from(changed).unwrap_or_default())
}

/// Writes down how many an act has changed, and tells it again.
fn audited(
    conn: &mut SqliteConnection,
    name: &str,
    filter: &str,
    changed: usize,
    signed: &Signed,
) -> QueryResult<usize> {
    audit(conn, name, filter, changed, signed).map(|_| changed)
}

/// Replays or discards what a filter means.
fn change(
    conn: &mut SqliteConnection,
    action: &str,
    filter: &DeliveryFilter,
    limit: u32,
    signed: &Signed,
) -> QueryResult<usize> {
    let now = clock::now(conn)?;
    let meant: Vec<(i64, i16)> = match filter.message_id {
        Some(_) => OfMessage::new(filter, Some(action), limit, now).load(conn)?,
        None => OfFilter::new(filter, Some(action), limit, now).load(conn)?,
    };
    let audit_id = audit(conn, action, &filter.to_json(), meant.len(), signed)?;
    for &(message_seq, handler_id) in &meant {
        KeepHistory { audit_id, message_seq, handler_id }.execute(conn)?;
        if action == "replay" {
            ReplayOne { message_seq, handler_id }.execute(conn)?;
        } else {
            DiscardOne { reason: signed.reason.as_deref(), message_seq, handler_id }.execute(conn)?;
        }
    }
    Ok(meant.len())
}

pub(super) fn audit(
    conn: &mut SqliteConnection,
    action: &str,
    filter: &str,
    affected: usize,
    signed: &Signed,
) -> QueryResult<i64> {
    let audit = Audit {
        action,
        filter,
        affected: i64::try_from(affected).unwrap_or(i64::MAX),
        reason: signed.reason.as_deref(),
        operator: signed.operator.as_deref(),
    };
    audit.load::<(i64,)>(conn).and_then(only_row).map(|(id,)| id)
}
