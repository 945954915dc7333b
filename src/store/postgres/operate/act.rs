//! Operator actions: calls of the SQL functions that are also available in psql.

use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::super::errors::database;
use super::super::statement::{only_row, statements};
use super::ledger;
use crate::store::counts::{count, limit};
use crate::store::operating::{Act, RateSetting, Returned, Signed, Verb};
use crate::types::{DeliveryFilter, Result};

/// Declares actions by filter, each with its SQL function.
macro_rules! acts_by_filter {
    ($($name:ident($function:literal))*) => {
        statements! {$(
            $name<'a>(concat!("SELECT ", $function, "(:filter::jsonb, :limit, :because, :actor)")) -> i64 {
                filter: &'a str, limit: i32, because: Option<&'a str>, actor: Option<&'a str>,
            }
        )*}
    };
}
acts_by_filter! {
    Replay("inbox_replay_matching")
    Discard("inbox_discard_matching")
    ReplayQuarantined("inbox_quarantine_replay")
    DiscardQuarantined("inbox_quarantine_discard")
    ReplayOutgoing("inbox_outbox_replay")
    DiscardOutgoing("inbox_outbox_discard")
}

statements! {
    DiscardSeen<'a>("
        SELECT inbox_discard_seen(:filter::jsonb, :message_seqs, :handler_ids, :attempts, :because, :actor)") -> i64 {
        filter: &'a str, message_seqs: Vec<i64>, handler_ids: Vec<i16>, attempts: Vec<i32>, because: Option<&'a str>,
        actor: Option<&'a str>,
    }

    Release<'a>("SELECT inbox_release(:message_id, :handler_key, :source, :attempt, :because, :actor)") -> i64 {
        message_id: Option<&'a str>, handler_key: Option<&'a str>, source: Option<&'a str>, attempt: i32,
        because: Option<&'a str>, actor: Option<&'a str>,
    }

    ReplayCorrected<'a>("
        SELECT inbox_replay_corrected(:message_id, :handler_key, :payload, :source, :attempt, :because, :actor)") -> i64 {
        message_id: Option<&'a str>, handler_key: Option<&'a str>, payload: &'a [u8], source: Option<&'a str>,
        attempt: i32, because: Option<&'a str>, actor: Option<&'a str>,
    }

    Pause<'a>("SELECT inbox_pause_handler(:handler_key, :because, :actor)") -> i64 {
        handler_key: &'a str, because: Option<&'a str>, actor: Option<&'a str>,
    }

    Resume<'a>("SELECT inbox_resume_handler(:handler_key, :because, :actor)") -> i64 {
        handler_key: &'a str, because: Option<&'a str>, actor: Option<&'a str>,
    }

    OpenBreaker<'a>("SELECT inbox_open_breaker(:handler_key, :because, :actor)") -> i64 {
        handler_key: &'a str, because: Option<&'a str>, actor: Option<&'a str>,
    }

    CloseBreaker<'a>("SELECT inbox_close_breaker(:handler_key, :because, :actor)") -> i64 {
        handler_key: &'a str, because: Option<&'a str>, actor: Option<&'a str>,
    }

    SetRate<'a>("SELECT inbox_set_rate(:handler_key, :per_sec, :burst, :because, :actor)") -> i64 {
        handler_key: &'a str, per_sec: Option<f64>, burst: Option<i32>, because: Option<&'a str>, actor: Option<&'a str>,
    }

    ForgetIdentity<'a>("SELECT inbox_forget_identity(:message_id, :source, :because, :actor)") -> i64 {
        message_id: &'a str, source: &'a str, because: Option<&'a str>, actor: Option<&'a str>,
    }

    ReturnParked<'a>("SELECT handler_key, returned FROM inbox_return_parked(:handler_ids, :limit, :actor)")
    -> (String, i64) { handler_ids: &'a [i16], limit: i32, actor: &'a str }

    AuditPurge<'a>("SELECT inbox_audit_purge(:filter::jsonb, :affected, :because, :actor)::text") {
        filter: &'a str, affected: i64, because: Option<&'a str>, actor: Option<&'a str>,
    }
}

pub(super) async fn audit_purge(
    conn: &mut AsyncPgConnection,
    filter: &str,
    messages: u64,
    signed: &Signed,
) -> Result<()> {
    let affected = i64::try_from(messages).unwrap_or(i64::MAX);
    let (because, actor) = (signed.because.as_deref(), signed.actor.as_deref());
    let inserted = AuditPurge { filter, affected, because, actor }.execute(conn).await;
    inserted.map(drop).map_err(database("cannot write the audit"))
}

/// One statement for all handler ids; each has its own audit row.
pub(super) async fn return_parked(
    conn: &mut AsyncPgConnection,
    handler_ids: &[i16],
    actor: &str,
    rows: u32,
) -> Result<Vec<Returned>> {
    let returned = ReturnParked { handler_ids, limit: limit(rows), actor }.load::<(String, i64)>(conn).await;
    let returned = returned.map_err(database("cannot return deliveries of handler keys that are known again"))?;
    Ok(returned
        .into_iter()
        .map(|(handler_key, deliveries)| Returned { handler_key, deliveries: count(deliveries) })
        .collect())
}

/// Runs an action. The SQL function changes the rows and writes the audit in one statement, so there is no transaction
/// here.
pub(super) async fn act(conn: &mut AsyncPgConnection, act: &Act, signed: &Signed) -> Result<u64> {
    let (because, actor) = (signed.because.as_deref(), signed.actor.as_deref());
    let filter = &act.filter();
    let changed = match *act {
        Act::Deliveries { verb, limit: rows, .. } => match verb {
            Verb::Replay => Replay { filter, limit: limit(rows), because, actor }.load(conn).await,
            Verb::Discard => Discard { filter, limit: limit(rows), because, actor }.load(conn).await,
        },
        Act::DiscardSeen { ref seen, .. } => {
            let message_seqs = seen.iter().map(|one| one.message_seq).collect();
            let handler_ids = seen.iter().map(|one| one.handler_id).collect();
            let attempts = seen.iter().map(|one| one.attempts).collect();
            DiscardSeen { filter, message_seqs, handler_ids, attempts, because, actor }.load(conn).await
        }
        Act::Release { ref filter, attempt } => {
            let DeliveryFilter { message_id, handler_key, source, .. } = filter;
            let (message_id, handler_key) = (message_id.as_deref(), handler_key.as_deref());
            let release = Release { message_id, handler_key, source: source.as_deref(), attempt, because, actor };
            release.load(conn).await
        }
        Act::ReplayCorrected { ref filter, attempt, ref payload } => {
            let DeliveryFilter { message_id, handler_key, source, .. } = filter;
            let (message_id, handler_key, source) = (message_id.as_deref(), handler_key.as_deref(), source.as_deref());
            let payload = &payload.0;
            ReplayCorrected { message_id, handler_key, payload, source, attempt, because, actor }.load(conn).await
        }
        Act::Quarantined { verb, limit: rows, .. } => match verb {
            Verb::Replay => ReplayQuarantined { filter, limit: limit(rows), because, actor }.load(conn).await,
            Verb::Discard => DiscardQuarantined { filter, limit: limit(rows), because, actor }.load(conn).await,
        },
        Act::Outgoing { verb, limit: rows, .. } => match verb {
            Verb::Replay => ReplayOutgoing { filter, limit: limit(rows), because, actor }.load(conn).await,
            Verb::Discard => DiscardOutgoing { filter, limit: limit(rows), because, actor }.load(conn).await,
        },
        Act::Pause { ref handler_key } => Pause { handler_key, because, actor }.load(conn).await,
        Act::Resume { ref handler_key } => Resume { handler_key, because, actor }.load(conn).await,
        Act::OpenBreaker { ref handler_key } => OpenBreaker { handler_key, because, actor }.load(conn).await,
        Act::CloseBreaker { ref handler_key } => CloseBreaker { handler_key, because, actor }.load(conn).await,
        Act::SetRate { ref handler_key, rate } => {
            let (per_sec, burst) = match rate {
                RateSetting::Limit { interval_us, burst } => (Some(1e6 / interval_us as f64), Some(burst)),
                RateSetting::Unlimited => (Some(f64::INFINITY), None),
                RateSetting::AsRegistered => (None, None),
            };
            SetRate { handler_key, per_sec, burst, because, actor }.load(conn).await
        }
        Act::ForgetIdentity { ref message_id, ref source } => {
            ForgetIdentity { message_id, source, because, actor }.load(conn).await
        }
        Act::ResetLedger { ref filter, to_offset } => {
            ledger::reset(conn, filter, to_offset, signed).await.map(|changed| vec![changed])
        }
        Act::SkipLedger { ref filter, to_offset } => {
            ledger::skip(conn, filter, to_offset, signed).await.map(|changed| vec![changed])
        }
    };
    changed.and_then(only_row).map(count).map_err(database(format!("cannot {}", act.name())))
}
