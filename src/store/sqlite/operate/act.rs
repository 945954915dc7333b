//! Operator actions, each in one transaction of the writer.

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::super::clock;
use super::super::errors::database;
use super::super::statement::{Content, only_row, statements};
use super::ledger;
use super::list::{by_filter, by_quarantine_filter, is_meant};
use super::outbox;
use crate::store::identity_hash::IdentityHash;
use crate::store::operating::{Act, RateSetting, SeenDelivery, Signed, Verb};
use crate::types::{DeliveryFilter, QuarantineFilter, Result};

by_filter!(OfFilter(concat!(
    "SELECT d.message_seq, d.handler_id FROM inbox_delivery d LEFT JOIN inbox_message m ON m.seq = d.message_seq
     WHERE d.status = 3", is_meant!("d.finished_at"), "ORDER BY d.finished_at, d.message_seq LIMIT :limit"
)) -> (i64, i16));

// The first condition selects the index.
by_filter!(OfMessage(concat!(
    "SELECT d.message_seq, d.handler_id FROM inbox_message m JOIN inbox_delivery d ON d.message_seq = m.seq
     WHERE m.message_id = :message_id", is_meant!("CASE WHEN d.status = 3 THEN d.finished_at ELSE coalesce(m.received_at, d.due_at) END"),
    "AND CASE WHEN :is_replay THEN d.status IN (3, 4)
              ELSE d.status = 3 OR d.status = 0 AND (d.locked_until IS NULL OR d.locked_until <= (SELECT at FROM inbox_now)) END
     ORDER BY d.message_seq, d.handler_id LIMIT :limit"
)) -> (i64, i16), is_replay: bool);

by_quarantine_filter!(AskReplay(
    "UPDATE inbox_quarantine SET replay_asked_at = (SELECT at FROM inbox_now)
     WHERE id IN (SELECT id FROM inbox_quarantine",
    ") AND replay_asked_at IS NULL"
));
by_quarantine_filter!(Delete("DELETE FROM inbox_quarantine WHERE id IN (SELECT id FROM inbox_quarantine", ")"));

statements! {
    InsertAudit<'a>("
        INSERT INTO inbox_audit (acted_at, action, filter, affected, because, actor)
        VALUES ((SELECT at FROM inbox_now), :action, :filter, :affected, :because, :actor) RETURNING id")
    -> i64 { action: &'a str, filter: &'a str, affected: i64, because: Option<&'a str>, actor: Option<&'a str> }

    KeepHistory("
        INSERT INTO inbox_history (message_seq, handler_id, audit_id, status, finished_at, attempts, errors, crashes, reason, last_error)
        SELECT message_seq, handler_id, :audit_id, status, finished_at, attempts, errors, crashes, reason, last_error
        FROM inbox_delivery WHERE message_seq = :message_seq AND handler_id = :handler_id")
    { audit_id: i64, message_seq: i64, handler_id: i16 }

    /// The attempt number keeps growing, so that an earlier claim stays invalid.
    ReplayOne("
        UPDATE inbox_delivery
        SET status = 0, due_at = (SELECT at FROM inbox_now), finished_at = NULL, errors = 0, crashes = 0, store_errors = 0, reason = NULL,
            locked_until = NULL, locked_by = NULL, replays = replays + 1
        WHERE message_seq = :message_seq AND handler_id = :handler_id") { message_seq: i64, handler_id: i16 }

    /// The active run of an attempt.
    Running<'a>("
        SELECT d.message_seq, d.handler_id FROM inbox_message m JOIN inbox_delivery d ON d.message_seq = m.seq
        WHERE m.message_id = :message_id AND (:source IS NULL OR m.source = :source)
          AND d.handler_id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = :handler_key)
          AND d.status = 0 AND d.locked_until > :now AND d.attempts = :attempt")
    -> (i64, i16) {
        message_id: Option<&'a str>, source: Option<&'a str>, handler_key: Option<&'a str>, now: i64, attempt: i32,
    }

    /// Clears the claim without counting a crash: the outcome of the run is then ignored. No processor has the id 0, so
    /// a settlement of the released run is lost, and is not taken for one that was written before (`HasTakenEffect`).
    ReleaseOne("
        UPDATE inbox_delivery SET locked_until = NULL, locked_by = 0, due_at = :now
        WHERE message_seq = :message_seq AND handler_id = :handler_id") { now: i64, message_seq: i64, handler_id: i16 }

    /// A pending delivery, if it has had no attempt since it was seen.
    StillPending("
        SELECT message_seq, handler_id FROM inbox_delivery
        WHERE message_seq = :message_seq AND handler_id = :handler_id AND attempts = :attempts AND status = 0
          AND (locked_until IS NULL OR locked_until <= :now)")
    -> (i64, i16) { message_seq: i64, handler_id: i16, attempts: i32, now: i64 }

    /// A poisoned or discarded delivery, if it has had no attempt since.
    GivenUp<'a>("
        SELECT d.message_seq, d.handler_id FROM inbox_message m JOIN inbox_delivery d ON d.message_seq = m.seq
        WHERE m.message_id = :message_id AND (:source IS NULL OR m.source = :source)
          AND d.handler_id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = :handler_key)
          AND d.status IN (3, 4) AND d.attempts = :attempt")
    -> (i64, i16) {
        message_id: Option<&'a str>, source: Option<&'a str>, handler_key: Option<&'a str>, attempt: i32,
    }

    KeepCorrection<'a>("
        INSERT INTO inbox_correction (message_seq, handler_id, audit_id, payload) VALUES (:message_seq, :handler_id, :audit_id, :payload)")
    { message_seq: i64, handler_id: i16, audit_id: i64, payload: Content<'a> }

    MarkCorrected("
        UPDATE inbox_delivery SET is_corrected = 1 WHERE message_seq = :message_seq AND handler_id = :handler_id")
    { message_seq: i64, handler_id: i16 }

    DiscardOne<'a>("
        UPDATE inbox_delivery
        SET status = 4, finished_at = (SELECT at FROM inbox_now), locked_until = NULL, locked_by = NULL,
            reason = coalesce(:because, 'by a person')
        WHERE message_seq = :message_seq AND handler_id = :handler_id")
    { because: Option<&'a str>, message_seq: i64, handler_id: i16 }

    ForgetIdentity<'a>("DELETE FROM inbox_identity WHERE hash = :hash") { hash: &'a [u8] }

    Pause<'a>("
        UPDATE inbox_handler SET paused_at = (SELECT at FROM inbox_now)
        WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = :handler_key) AND paused_at IS NULL")
    { handler_key: &'a str }

    Resume<'a>("
        UPDATE inbox_handler SET paused_at = NULL
        WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = :handler_key) AND paused_at IS NOT NULL")
    { handler_key: &'a str }

    OpenBreaker<'a>("
        UPDATE inbox_handler
        SET breaker_opened_at = (SELECT at FROM inbox_now), breaker_probe_at = (SELECT at FROM inbox_now) + 10000000,
            breaker_error = coalesce('by a person: ' || :because, 'by a person'), breaker_probe_until = NULL,
            breaker_probe_no = breaker_probe_no + 1
        WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = :handler_key) AND breaker_opened_at IS NULL")
    { because: Option<&'a str>, handler_key: &'a str }

    SetRate<'a>("
        UPDATE inbox_handler
        SET rate_is_set = :is_set, rate_next_at = NULL,
            rate_interval_us = CASE WHEN :is_set THEN :interval_us ELSE registered_interval_us END,
            rate_burst = CASE WHEN :is_set THEN :burst ELSE registered_burst END
        WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = :handler_key)
          AND (rate_is_set IS NOT :is_set OR rate_interval_us IS NOT CASE WHEN :is_set THEN :interval_us ELSE registered_interval_us END
               OR rate_burst IS NOT CASE WHEN :is_set THEN :burst ELSE registered_burst END)")
    { is_set: bool, interval_us: Option<i64>, burst: Option<i32>, handler_key: &'a str }

    CloseBreaker<'a>("
        UPDATE inbox_handler
        SET breaker_opened_at = NULL, breaker_probe_at = NULL, breaker_error = NULL, breaker_probe_until = NULL,
            breaker_probe_no = breaker_probe_no + 1
        WHERE id IN (SELECT id FROM inbox_handler_ids WHERE handler_key = :handler_key) AND breaker_opened_at IS NOT NULL")
    { handler_key: &'a str }
}

pub(super) fn act(conn: &mut SqliteConnection, act: &Act, signed: &Signed) -> Result<u64> {
    try_act(conn, act, signed).map_err(database(format!("cannot {}", act.name())))
}

/// Changes the rows and writes the audit, in the caller's transaction. The audit row comes first where the history
/// refers to it.
fn try_act(conn: &mut SqliteConnection, act: &Act, signed: &Signed) -> QueryResult<u64> {
    let now = clock::now(conn)?;
    let changed = match *act {
        Act::Deliveries { verb, ref filter, limit } => {
            let meant = meant(conn, verb, filter, limit, now)?;
            return change(conn, verb, &meant, act, signed);
        }
        Act::DiscardSeen { ref seen, .. } => {
            let mut meant = Vec::new();
            for &SeenDelivery { message_seq, handler_id, attempts } in seen {
                meant.extend(StillPending { message_seq, handler_id, attempts, now }.load::<(i64, i16)>(conn)?);
            }
            return change(conn, Verb::Discard, &meant, act, signed);
        }
        Act::Release { ref filter, attempt } => {
            let meant = running(filter, attempt, now).load::<(i64, i16)>(conn)?;
            let audit_id = audited(conn, act, meant.len() as u64, signed)?;
            for &(message_seq, handler_id) in &meant {
                keep_history(conn, audit_id, message_seq, handler_id)?;
                ReleaseOne { now, message_seq, handler_id }.execute(conn)?;
            }
            return Ok(meant.len() as u64);
        }
        Act::ReplayCorrected { ref filter, attempt, ref payload } => {
            let meant = given_up(filter, attempt).load::<(i64, i16)>(conn)?;
            let audit_id = audited(conn, act, meant.len() as u64, signed)?;
            for &(message_seq, handler_id) in &meant {
                keep_history(conn, audit_id, message_seq, handler_id)?;
                let payload = Content::from(Some(&*payload.0));
                KeepCorrection { message_seq, handler_id, audit_id, payload }.execute(conn)?;
                MarkCorrected { message_seq, handler_id }.execute(conn)?;
                ReplayOne { message_seq, handler_id }.execute(conn)?;
            }
            return Ok(meant.len() as u64);
        }
        Act::Quarantined { verb: Verb::Replay, ref filter, limit } => {
            AskReplay::new(filter, limit, now).execute(conn)?
        }
        Act::Quarantined { verb: Verb::Discard, ref filter, limit } => Delete::new(filter, limit, now).execute(conn)?,
        Act::Outgoing { verb, ref filter, limit } => {
            outbox::act(conn, verb, filter, limit, signed.because.as_deref(), now)?
        }
        // A handler with several ids counts as one.
        Act::Pause { ref handler_key } => Pause { handler_key }.execute(conn)?.min(1),
        Act::Resume { ref handler_key } => Resume { handler_key }.execute(conn)?.min(1),
        Act::OpenBreaker { ref handler_key } => {
            OpenBreaker { because: signed.because.as_deref(), handler_key }.execute(conn)?.min(1)
        }
        Act::CloseBreaker { ref handler_key } => CloseBreaker { handler_key }.execute(conn)?.min(1),
        Act::SetRate { ref handler_key, rate } => {
            let (interval_us, burst) = match rate {
                RateSetting::Limit { interval_us, burst } => (Some(interval_us), Some(burst)),
                RateSetting::Unlimited | RateSetting::AsRegistered => (None, None),
            };
            let is_set = rate != RateSetting::AsRegistered;
            SetRate { is_set, interval_us, burst, handler_key }.execute(conn)?.min(1)
        }
        Act::ForgetIdentity { ref message_id, ref source } => {
            let IdentityHash(hash) = IdentityHash::of(message_id, source);
            ForgetIdentity { hash: &hash }.execute(conn)?
        }
        Act::ResetLedger { ref filter, to_offset } => ledger::reset(conn, filter, to_offset)?,
        Act::SkipLedger { ref filter, to_offset } => ledger::skip(conn, filter, to_offset)?,
    };
    audited(conn, act, changed as u64, signed)?;
    Ok(changed as u64)
}

/// Replays or discards these deliveries, and writes the audit and the history.
fn change(
    conn: &mut SqliteConnection,
    verb: Verb,
    meant: &[(i64, i16)],
    act: &Act,
    signed: &Signed,
) -> QueryResult<u64> {
    let audit_id = audited(conn, act, meant.len() as u64, signed)?;
    for &(message_seq, handler_id) in meant {
        keep_history(conn, audit_id, message_seq, handler_id)?;
        match verb {
            Verb::Replay => ReplayOne { message_seq, handler_id }.execute(conn)?,
            Verb::Discard => {
                DiscardOne { because: signed.because.as_deref(), message_seq, handler_id }.execute(conn)?
            }
        };
    }
    Ok(meant.len() as u64)
}

/// The deliveries that a filter matches, out of those that the action may change.
fn meant(
    conn: &mut SqliteConnection,
    verb: Verb,
    filter: &DeliveryFilter,
    limit: u32,
    now: i64,
) -> QueryResult<Vec<(i64, i16)>> {
    match filter.message_id {
        Some(_) => OfMessage::new(filter, verb == Verb::Replay, limit, now).load(conn),
        None => OfFilter::new(filter, limit, now).load(conn),
    }
}

fn running(filter: &DeliveryFilter, attempt: i32, now: i64) -> Running<'_> {
    Running {
        message_id: filter.message_id.as_deref(),
        source: filter.source.as_deref(),
        handler_key: filter.handler_key.as_deref(),
        now,
        attempt,
    }
}

fn given_up(filter: &DeliveryFilter, attempt: i32) -> GivenUp<'_> {
    GivenUp {
        message_id: filter.message_id.as_deref(),
        source: filter.source.as_deref(),
        handler_key: filter.handler_key.as_deref(),
        attempt,
    }
}

/// Writes the audit row of an action; returns its id.
fn audited(conn: &mut SqliteConnection, act: &Act, affected: u64, signed: &Signed) -> QueryResult<i64> {
    audit(conn, &NewAuditEntry { action: act.name(), filter: act.filter(), affected }, signed)
}

/// Stores the result of a delivery before an action changes it.
pub(super) fn keep_history(
    conn: &mut SqliteConnection,
    audit_id: i64,
    message_seq: i64,
    handler_id: i16,
) -> QueryResult<()> {
    KeepHistory { audit_id, message_seq, handler_id }.execute(conn).map(drop)
}

/// An audit row of an action.
pub(super) struct NewAuditEntry {
    pub(super) action: &'static str,
    /// The filter of the action, as JSON.
    pub(super) filter: String,
    /// How many deliveries, records, messages or handlers it changed.
    pub(super) affected: u64,
}

/// Writes an entry; returns the id of its row.
pub(super) fn audit(conn: &mut SqliteConnection, entry: &NewAuditEntry, signed: &Signed) -> QueryResult<i64> {
    let NewAuditEntry { action, filter, affected } = entry;
    let affected = i64::try_from(*affected).unwrap_or(i64::MAX);
    let (because, actor) = (signed.because.as_deref(), signed.actor.as_deref());
    InsertAudit { action, filter, affected, because, actor }.load(conn).and_then(only_row)
}
