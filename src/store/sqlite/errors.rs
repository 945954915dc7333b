//! Classifies Diesel errors: temporary, or caused by the values.
//!
//! Diesel reports only constraint errors by kind. All others are recognized by SQLite's messages, which are fixed and
//! in English. They contain table and column names, never a value.

use diesel::result::{DatabaseErrorKind, Error as DieselError};

use crate::store::errors;
use crate::types::{Error, Kind};

/// Another connection holds the lock.
const LOCKED: [&str; 3] = ["database is locked", "database table is locked", "database schema is locked"];

/// Other temporary errors: the disk is full, failing or read-only, memory is short.
const PASSING: [&str; 6] = [
    "database schema has changed",
    "disk I/O error",
    "database or disk is full",
    "attempt to write a readonly database",
    "unable to open database file",
    "out of memory",
];

/// Errors caused by the values.
const DATA: [&str; 2] = ["string or blob too big", "datatype mismatch"];

/// A conversion for `map_err`. The context says what was being done.
pub(super) fn database(context: impl Into<String>) -> impl FnOnce(DieselError) -> Error {
    errors::database(kind, context)
}

/// The kind of an error. It decides what is retried: the operation, each record alone, or nothing.
pub(super) fn kind(error: &DieselError) -> Kind {
    match error {
        DieselError::DatabaseError(kind, information) => match kind {
            DatabaseErrorKind::UnableToSendCommand | DatabaseErrorKind::ClosedConnection => Kind::Connection,
            DatabaseErrorKind::CheckViolation
            | DatabaseErrorKind::NotNullViolation
            | DatabaseErrorKind::ForeignKeyViolation
            | DatabaseErrorKind::UniqueViolation => Kind::Data,
            _ if is_locked(error) || PASSING.contains(&information.message()) => Kind::Passing,
            _ if DATA.contains(&information.message()) => Kind::Data,
            _ => Kind::Server,
        },
        DieselError::SerializationError(_) => Kind::Data,
        _ => Kind::Server,
    }
}

/// Whether another connection holds the lock: a moment later, the same statement may succeed. Other temporary errors
/// last longer.
pub(super) fn is_locked(error: &DieselError) -> bool {
    matches!(error, DieselError::DatabaseError(_, information) if LOCKED.contains(&information.message()))
}
