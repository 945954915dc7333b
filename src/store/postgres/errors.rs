//! Classifies Diesel errors: connection, server, or values.
//!
//! Diesel keeps no SQLSTATE, so errors of unknown kind count as server errors; the callers test whether one record is
//! the cause. Details of an error are left out, because they may quote the values of a row.

use diesel::result::{DatabaseErrorInformation, DatabaseErrorKind, Error as DieselError};

use crate::store::errors;
use crate::types::{Error, Kind};

/// A conversion for `map_err`. The context says what was being done.
pub(super) fn database(context: impl Into<String>) -> impl FnOnce(DieselError) -> Error {
    errors::database(kind, context)
}

/// The unique constraint that the values of a record can violate.
const IDENTITY: &str = "inbox_message_identity";

/// Why a transaction was rolled back if our own code can reject it: diesel needs an error type that its own errors
/// convert to.
pub(super) enum Rollback {
    /// Our code has rejected it.
    Ours(Error),
    /// A statement has failed.
    Database(DieselError),
}

impl Rollback {
    /// Our error, or the converted one of the database.
    pub(super) fn or(self, database: impl FnOnce(DieselError) -> Error) -> Error {
        match self {
            Self::Ours(error) => error,
            Self::Database(error) => database(error),
        }
    }
}

impl From<Error> for Rollback {
    fn from(error: Error) -> Self {
        Self::Ours(error)
    }
}

impl From<DieselError> for Rollback {
    fn from(error: DieselError) -> Self {
        Self::Database(error)
    }
}

/// The kind of an error. It decides what is retried: the operation, each record alone, or nothing.
pub(super) fn kind(error: &DieselError) -> Kind {
    match error {
        DieselError::DatabaseError(kind, information) => match kind {
            // A read-only server is the wrong server, or was demoted: another connection may reach the primary.
            DatabaseErrorKind::UnableToSendCommand
            | DatabaseErrorKind::ClosedConnection
            | DatabaseErrorKind::ReadOnlyTransaction => Kind::Connection,
            DatabaseErrorKind::SerializationFailure => Kind::Passing,
            DatabaseErrorKind::CheckViolation
            | DatabaseErrorKind::NotNullViolation
            | DatabaseErrorKind::ForeignKeyViolation
            | DatabaseErrorKind::ExclusionViolation
            | DatabaseErrorKind::RestrictViolation => Kind::Data,
            DatabaseErrorKind::UniqueViolation => unique_violation(&**information),
            _ => Kind::Server,
        },
        DieselError::BrokenTransactionManager | DieselError::RollbackErrorOnCommit { .. } => Kind::Connection,
        DieselError::SerializationError(_) => Kind::Data,
        _ => Kind::Server,
    }
}

/// All other unique columns of the inbox are numbers from a sequence. A duplicate number means that the sequence is
/// behind the table, for example after a cut-over to a logical replica. No record is the cause, and the error ends when
/// the sequence is set.
fn unique_violation(information: &dyn DatabaseErrorInformation) -> Kind {
    match information.constraint_name() {
        Some(IDENTITY) => Kind::Data,
        Some(_) | None => Kind::Passing,
    }
}
