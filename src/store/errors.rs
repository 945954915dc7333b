//! Converts Diesel errors as far as all stores do it alike: keeps the database's message, without details and hints,
//! which may quote the values of a row. Each store decides the kind of an error itself.

use diesel::result::Error as DieselError;

use crate::types::{Error, Kind};

/// A conversion for `map_err`. The context says what was being done.
pub(super) fn database(
    kind: fn(&DieselError) -> Kind,
    context: impl Into<String>,
) -> impl FnOnce(DieselError) -> Error {
    move |error| Error::new(kind(&error), context).with_source(DatabaseMessage(message(error)))
}

/// The message without details and hints.
fn message(error: DieselError) -> String {
    match error {
        DieselError::DatabaseError(_, information) => information.message().to_owned(),
        other => other.to_string(),
    }
}

/// The source of an [`Error`]. Diesel's own error is not kept: it gives access to details, which may quote values of a
/// row.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct DatabaseMessage(String);
