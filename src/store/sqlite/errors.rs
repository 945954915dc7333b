//! Diesel's errors as ours: does it pass, or is it the values?
//!
//! Diesel names constraints and nothing else. SQLite's messages are fixed, in English, and say the rest. They name tables and columns, never a value.

use diesel::result::{DatabaseErrorKind, Error as DieselError};

use crate::store::errors;
use crate::types::{Error, Kind};

/// What passes: somebody else writes, the disk is full, failing or read-only, memory is short.
const PASSING: [&str; 9] = [
    "database is locked",
    "database table is locked",
    "database schema is locked",
    "database schema has changed",
    "disk I/O error",
    "database or disk is full",
    "attempt to write a readonly database",
    "unable to open database file",
    "out of memory",
];

/// What the values are to blame for.
const DATA: [&str; 2] = ["string or blob too big", "datatype mismatch"];

pub(super) fn database(context: impl Into<String>) -> impl FnOnce(DieselError) -> Error {
    errors::database(kind, context)
}

pub(super) fn kind(error: &DieselError) -> Kind {
    match error {
        DieselError::DatabaseError(kind, information) => match kind {
            DatabaseErrorKind::UnableToSendCommand | DatabaseErrorKind::ClosedConnection => Kind::Connection,
            DatabaseErrorKind::CheckViolation
            | DatabaseErrorKind::NotNullViolation
            | DatabaseErrorKind::ForeignKeyViolation
            | DatabaseErrorKind::UniqueViolation => Kind::Data,
            _ if PASSING.contains(&information.message()) => Kind::Passing,
            _ if DATA.contains(&information.message()) => Kind::Data,
            _ => Kind::Server,
        },
        DieselError::SerializationError(_) => Kind::Data,
        _ => Kind::Server,
    }
}
