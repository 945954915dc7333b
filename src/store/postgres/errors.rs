//! Diesel's errors as ours: was it the connection, the server, or the values?
//!
//! Diesel keeps no SQLSTATE, so what it calls unknown counts as the server's trouble; the callers find out by trying whether one
//! record is to blame. Details of an error, which may quote a row's values, are left out.

use diesel::result::{DatabaseErrorInformation, DatabaseErrorKind, Error as DieselError};

use crate::store::errors;
use crate::types::{Error, Kind};

pub(super) fn database(context: impl Into<String>) -> impl FnOnce(DieselError) -> Error {
    errors::database(kind, context)
}

/// The unique constraint that a record's own values can violate.
const IDENTITY: &str = "inbox_message_identity";

/// Why a transaction was rolled back, where it can refuse by itself: diesel wants an error that its own can become.
pub(super) enum Trouble {
    Ours(Error),
    Database(DieselError),
}

impl Trouble {
    pub(super) fn or(self, database: impl FnOnce(DieselError) -> Error) -> Error {
        match self {
            Self::Ours(error) => error,
            Self::Database(error) => database(error),
        }
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Ours(error)
    }
}

impl From<DieselError> for Trouble {
    fn from(error: DieselError) -> Self {
        Self::Database(error)
    }
}

pub(super) fn kind(error: &DieselError) -> Kind {
    match error {
        DieselError::DatabaseError(kind, information) => match kind {
            // A server that only reads is the wrong one, or has become it: another connection may reach the right one.
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

/// Every other unique column of the inbox is a number that the server draws. A number that is taken means that its sequence lags behind
/// the table, as after a cut-over to a logical replica: no record is to blame, and it passes when the sequence is set.
fn unique_violation(information: &dyn DatabaseErrorInformation) -> Kind {
    match information.constraint_name() {
        Some(IDENTITY) => Kind::Data,
        Some(_) | None => Kind::Passing,
    }
}
