//! Diesel's errors as ours: was it the connection, the server, or the values?
//!
//! Diesel keeps no SQLSTATE, so what it calls unknown counts as the server's trouble; the callers find out by trying whether one
//! record is to blame. Details of an error, which may quote a row's values, are left out.

use diesel::result::{DatabaseErrorKind, Error as DieselError};

use crate::store::errors;
use crate::types::{Error, Kind};

pub(super) fn database(context: impl Into<String>) -> impl FnOnce(DieselError) -> Error {
    errors::database(kind, context)
}

pub(super) fn kind(error: &DieselError) -> Kind {
    match error {
        DieselError::DatabaseError(kind, _) => match kind {
            DatabaseErrorKind::UnableToSendCommand | DatabaseErrorKind::ClosedConnection => Kind::Connection,
            DatabaseErrorKind::SerializationFailure | DatabaseErrorKind::ReadOnlyTransaction => Kind::Passing,
            DatabaseErrorKind::CheckViolation
            | DatabaseErrorKind::NotNullViolation
            | DatabaseErrorKind::ForeignKeyViolation
            | DatabaseErrorKind::ExclusionViolation
            | DatabaseErrorKind::RestrictViolation
            | DatabaseErrorKind::UniqueViolation => Kind::Data,
            _ => Kind::Server,
        },
        DieselError::BrokenTransactionManager | DieselError::RollbackErrorOnCommit { .. } => Kind::Connection,
        DieselError::SerializationError(_) => Kind::Data,
        _ => Kind::Server,
    }
}
