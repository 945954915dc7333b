//! Acts of a person: the SQL functions that anybody has in psql too.

use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::super::errors::database;
use super::super::statement::{only_row, statements};
use crate::store::counts::{count, limit};
use crate::store::operating::{Act, Audit, Signed, Verb};
use crate::types::Result;

/// Declares acts on what a filter means, each by the function that does it.
macro_rules! acts_by_filter {
    ($($name:ident($function:literal))*) => {
        statements! {$(
            $name<'a>(concat!("SELECT ", $function, "(:filter::jsonb, :limit, :reason, :operator)")) -> i64 {
                filter: &'a str, limit: i32, reason: Option<&'a str>, operator: Option<&'a str>,
            }
        )*}
    };
}
acts_by_filter! {
    Replay("inbox_replay_matching")
    Discard("inbox_discard_matching")
    ReplayQuarantined("inbox_quarantine_replay")
    DiscardQuarantined("inbox_quarantine_discard")
}

statements! {
    Pause<'a>("SELECT inbox_pause_handler(:handler_key, :reason, :operator)") -> i64 {
        handler_key: &'a str, reason: Option<&'a str>, operator: Option<&'a str>,
    }

    Resume<'a>("SELECT inbox_resume_handler(:handler_key, :reason, :operator)") -> i64 {
        handler_key: &'a str, reason: Option<&'a str>, operator: Option<&'a str>,
    }

    InsertAudit<'a>("
        INSERT INTO inbox_audit (action, filter, affected, reason, operator)
        VALUES (:action, :filter::jsonb, :affected, :reason, :operator)") {
        action: &'a str, filter: &'a str, affected: i64, reason: Option<&'a str>, operator: Option<&'a str>,
    }
}

pub(super) async fn audit(conn: &mut AsyncPgConnection, audit: &Audit, signed: &Signed) -> Result<()> {
    let Audit { action, filter, affected } = audit;
    let affected = i64::try_from(*affected).unwrap_or(i64::MAX);
    let (reason, operator) = (signed.reason.as_deref(), signed.operator.as_deref());
    let inserted = InsertAudit { action, filter, affected, reason, operator }.execute(conn).await;
    inserted.map(drop).map_err(database("cannot write the audit"))
}

pub(super) async fn act(conn: &mut AsyncPgConnection, act: &Act, signed: &Signed) -> Result<u64> {
    let (reason, operator) = (signed.reason.as_deref(), signed.operator.as_deref());
    let filter = &act.filter();
    let changed = match *act {
        Act::Deliveries { verb, limit: rows, .. } => match verb {
            Verb::Replay => Replay { filter, limit: limit(rows), reason, operator }.load(conn).await,
            Verb::Discard => Discard { filter, limit: limit(rows), reason, operator }.load(conn).await,
        },
        Act::Quarantined { verb, limit: rows, .. } => match verb {
            Verb::Replay => ReplayQuarantined { filter, limit: limit(rows), reason, operator }.load(conn).await,
            Verb::Discard => DiscardQuarantined { filter, limit: limit(rows), reason, operator }.load(conn).await,
        },
        Act::Pause { ref handler_key } => Pause { handler_key, reason, operator }.load(conn).await,
        Act::Resume { ref handler_key } => Resume { handler_key, reason, operator }.load(conn).await,
    };
    changed.and_then(only_row).map(count).map_err(database(format!("cannot {}", act.name())))
}
