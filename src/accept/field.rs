//! Reads a value out of a record: the places that an identity and an order can stand in. Pure; hostile bytes welcome.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;

use super::json::{self, Found, Scalar};
use crate::types::{Record, panic_text};

/// A place in a record.
#[derive(Clone, Copy)]
pub(super) enum Field<'p> {
    Header(&'p str),
    Key,
    JsonPointer(&'p str),
    Function(&'p (dyn Fn(&Record) -> Option<Bytes> + Send + Sync)),
}

/// Why a value cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnreadableField {
    NotJson,
    Twice,
    NotScalar,
    Panicked,
}

/// The value in a place; `None` when there is none.
pub(super) fn read<'r>(record: &'r Record, field: Field<'_>) -> Result<Option<Cow<'r, [u8]>>, UnreadableField> {
    match field {
        Field::Header(name) => Ok(record.headers.get(name).map(Cow::Borrowed)),
        Field::Key => Ok(record.key.as_deref().map(Cow::Borrowed)),
        Field::JsonPointer(pointer) => read_payload(record, pointer),
        Field::Function(function) => ask(record, function),
    }
}

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

/// A panic must not end whoever accepts: the record would come again after every restart.
fn ask(
    record: &Record,
    function: &(dyn Fn(&Record) -> Option<Bytes> + Send + Sync),
) -> Result<Option<Cow<'static, [u8]>>, UnreadableField> {
    catch_unwind(AssertUnwindSafe(|| function(record).map(|value| Cow::Owned(Vec::from(value))))).map_err(|panic| {
        // Its text may hold anything of the record.
        drop(panic_text(panic));
        UnreadableField::Panicked
    })
}
