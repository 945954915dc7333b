//! Acts of a person: the SQL functions that anybody has in psql too.

use diesel::sql_types::{BigInt, Integer, Nullable, Text};
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::super::errors::database;
use super::super::statement::{only_row, statement};
use crate::store::operating::{Act, Signed};
use crate::types::Result;

/// An act on what a filter means.
macro_rules! act_by_filter {
    ($name:ident($sql:literal)) => {
        statement! {
            $name<'a>($sql) -> (BigInt) {
                filter: &'a str => Text,
                limit: i32 => Integer,
                reason: Option<&'a str> => Nullable<Text>,
                operator: Option<&'a str> => Nullable<Text>,
            }
        }
    };
}
act_by_filter!(Replay("SELECT inbox_replay_matching($1::jsonb, $2, $3, $4)"));
act_by_filter!(Discard("SELECT inbox_discard_matching($1::jsonb, $2, $3, $4)"));
act_by_filter!(ReplayQuarantined("SELECT inbox_quarantine_replay($1::jsonb, $2, $3, $4)"));
act_by_filter!(DiscardQuarantined("SELECT inbox_quarantine_discard($1::jsonb, $2, $3, $4)"));

statement! {
    Pause<'a>("SELECT inbox_pause_handler($1, $2, $3)") -> (BigInt) {
        handler_key: &'a str => Text,
        reason: Option<&'a str> => Nullable<Text>,
        operator: Option<&'a str> => Nullable<Text>,
    }
}

statement! {
    Resume<'a>("SELECT inbox_resume_handler($1, $2, $3)") -> (BigInt) {
        handler_key: &'a str => Text,
        reason: Option<&'a str> => Nullable<Text>,
        operator: Option<&'a str> => Nullable<Text>,
    }
}

statement! {
    Audit<'a>("INSERT INTO inbox_audit (action, filter, affected, reason, operator) VALUES ($1, $2::jsonb, $3, $4, $5)") {
        action: &'a str => Text,
        filter: &'a str => Text,
        affected: i64 => BigInt,
        reason: Option<&'a str> => Nullable<Text>,
        operator: Option<&'a str> => Nullable<Text>,
    }
}

pub(super) async fn audit(
    conn: &mut AsyncPgConnection,
    action: &str,
    filter: &str,
    affected: u64,
    signed: &Signed,
) -> Result<()> {
    let audit = Audit {
        action,
        filter,
        affected: i64::try_from(affected).unwrap_or(i64::MAX),
        reason: signed.reason.as_deref(),
        operator: signed.operator.as_deref(),
    };
    audit.execute(conn).await.map_err(database("cannot write the audit"))?;
    Ok(())
}

pub(super) async fn act(conn: &mut AsyncPgConnection, act: &Act<'_>, signed: &Signed) -> Result<u64> {
    let (reason, operator) = (signed.reason.as_deref(), signed.operator.as_deref());
    let rows = |limit: u32| i32::try_from(limit).unwrap_or(i32::MAX);
    let changed = match *act {
        Act::Replay { filter, limit } => {
            Replay { filter: &filter.to_json(), limit: rows(limit), reason, operator }.load::<(i64,)>(conn).await
        }
        Act::Discard { filter, limit } => {
            Discard { filter: &filter.to_json(), limit: rows(limit), reason, operator }.load(conn).await
        }
        Act::ReplayQuarantined { filter, limit } => {
            ReplayQuarantined { filter: &filter.to_json(), limit: rows(limit), reason, operator }.load(conn).await
        }
        Act::DiscardQuarantined { filter, limit } => {
            DiscardQuarantined { filter: &filter.to_json(), limit: rows(limit), reason, operator }.load(conn).await
        }
        Act::Pause { handler_key } => Pause { handler_key, reason, operator }.load(conn).await,
        Act::Resume { handler_key } => Resume { handler_key, reason, operator }.load(conn).await,
    };
    let (changed,) = changed.and_then(only_row).map_err(database(format!("cannot {}", act.name())))?;
    Ok(u64::try_from(changed).unwrap_or_default())
}
