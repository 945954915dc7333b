//! Reads a value of a record, for an identity, an ordering key or a tenant. Pure, and safe with hostile bytes.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;

use super::json::{self, Found, Scalar};
use crate::types::{Record, panic_text};

/// A place in a record that can hold a value.
#[derive(Clone, Copy)]
pub(super) enum Field<'p> {
    /// The first header of this name.
    Header(&'p str),
    /// The record's key.
    Key,
    /// An RFC 6901 pointer into the JSON payload.
    JsonPointer(&'p str),
    /// The user's function.
    Function(&'p (dyn Fn(&Record) -> Option<Bytes> + Send + Sync)),
}

/// Why a value cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnreadableField {
    /// The payload is not JSON.
    NotJson,
    /// A member on the way to the value occurs twice in its object.
    Twice,
    /// The value is an object, an array, a boolean, or a string that is not valid Unicode.
    NotScalar,
    /// The user's function panicked.
    Panicked,
}

/// The value of a field; `None` when the record has none.
pub(super) fn read<'r>(record: &'r Record, field: Field<'_>) -> Result<Option<Cow<'r, [u8]>>, UnreadableField> {
    match field {
        Field::Header(name) => Ok(record.headers.get(name).map(Cow::Borrowed)),
        Field::Key => Ok(record.key.as_deref().map(Cow::Borrowed)),
        Field::JsonPointer(pointer) => read_payload(record, pointer),
        Field::Function(function) => ask(record, function),
    }
}

/// The value at a pointer; `None` without a payload, without a value, or for `null`.
fn read_payload<'r>(record: &'r Record, pointer: &str) -> Result<Option<Cow<'r, [u8]>>, UnreadableField> {
    let Some(payload) = &record.payload else { return Ok(None) };
    match json::pointed_to(payload, pointer).map_err(|_| UnreadableField::NotJson)? {
        Found::Nothing => Ok(None),
        Found::Twice => Err(UnreadableField::Twice),
        Found::Value(value) => match json::scalar(value) {
            Scalar::Null => Ok(None),
            Scalar::Text(text) => Ok(Some(Cow::Owned(text.into_bytes()))),
            Scalar::Number(number) => Ok(Some(Cow::Borrowed(number.as_bytes()))),
            Scalar::Other => Err(UnreadableField::NotScalar),
        },
    }
}

/// Calls the user's function. Catches a panic: it would end the accepting task, and the record would be read again
/// after every restart.
fn ask(
    record: &Record,
    function: &(dyn Fn(&Record) -> Option<Bytes> + Send + Sync),
) -> Result<Option<Cow<'static, [u8]>>, UnreadableField> {
    catch_unwind(AssertUnwindSafe(|| function(record).map(|value| Cow::Owned(Vec::from(value))))).map_err(|panic| {
        // The text is not reported, because it may contain parts of the record.
        drop(panic_text(panic));
        UnreadableField::Panicked
    })
}
