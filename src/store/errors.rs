//! Diesel's errors as ours, as far as they are the same in every store: the database's message, without details and hints, which may
//! quote a row's values. Of what kind an error is, each store says itself.

use diesel::result::Error as DieselError;

use crate::types::{Error, Kind};

pub(super) fn database(
    kind: fn(&DieselError) -> Kind,
    context: impl Into<String>,
) -> impl FnOnce(DieselError) -> Error {
    move |error| Error::new(kind(&error), context).with_source(DatabaseMessage(message(error)))
}

fn message(error: DieselError) -> String {
    match error {
        DieselError::DatabaseError(_, information) => information.message().to_owned(),
        other => other.to_string(),
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct DatabaseMessage(String);
