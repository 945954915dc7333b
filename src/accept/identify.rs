//! Finds the identity under which a record is stored, by the policy of its topic. Pure: chance is an argument. Safe
//! with hostile bytes.
//!
//! An explicit id takes precedence. The policy decides about a missing identity. A record with an invalid identity (too
//! long, not text) is always quarantined: it is never stored under an id that it did not have.

use std::borrow::Cow;
use std::sync::Arc;

use serde_json::Value;

use super::cloud_event::Attributes;
use super::field::{Field, UnreadableField, read};
use super::identity::{IDENTITY_CHARS_MAX, Identity, IdentityDecoder, IdentityField, MissingIdentity};
use super::ready::{Answers, NotYet, Undecoded, decode};
use crate::types::{Position, Record};

/// The identity of a record.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Identified {
    pub(super) id: Arc<str>,
    /// `None`: the topic is the source.
    pub(super) source: Option<Arc<str>>,
    /// What replaced the identity, if it was missing.
    pub(super) fallback: Option<Fallback>,
}

/// What replaced a missing identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fallback {
    /// Its position.
    Position,
    /// A random id.
    Undeduplicated,
}

/// Why a record is quarantined. Never contains parts of the record.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// A fixed text, by which operators filter.
    pub(super) reason: &'static str,
    pub(super) detail: Option<String>,
}

impl From<&'static str> for Refusal {
    fn from(reason: &'static str) -> Self {
        Self { reason, detail: None }
    }
}

/// Why a record has no identity.
#[derive(Debug)]
pub(super) enum Unidentified {
    /// It is quarantined.
    Refused(Refusal),
    /// A decoder has to be waited for.
    NotYet(NotYet),
}

impl From<Refusal> for Unidentified {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<&'static str> for Unidentified {
    fn from(reason: &'static str) -> Self {
        Self::Refused(reason.into())
    }
}

/// Why a field has no usable identity.
enum FieldError<'p> {
    /// The record has no value there: the policy decides what happens.
    Missing(&'static str, &'p IdentityField),
    /// The record has a value that cannot be an identity.
    Bad(&'static str, &'p IdentityField),
    /// The payload or the key cannot be decoded: the reason for the quarantine, and the error.
    Undecoded(&'static str, String),
    /// The payload or the key cannot be decoded yet.
    NotYet(NotYet),
}

/// The identity in a field. Only CloudEvents have a source.
struct FieldIdentity {
    id: Arc<str>,
    source: Option<Arc<str>>,
}

/// Finds the identity of a record. Uses only decoders whose value is needed; `answers` has the answers of those that
/// were waited for. `chance` provides a random id if one is needed.
pub(super) fn identify(
    attributes: &Attributes<'_>,
    policy: &Identity,
    answers: &Answers,
    chance: impl FnOnce() -> u128,
) -> Result<Identified, Unidentified> {
    let record = attributes.record();
    let explicit_source = record.source.as_deref().map(source_text).transpose()?;
    let identified = |id, source: Option<Arc<str>>, fallback| Identified {
        id,
        source: explicit_source.clone().or(source),
        fallback,
    };
    if let Some(id) = &record.id {
        return Ok(identified(id_text(id)?, None, None));
    }
    let (reason, place) = match given(attributes, &policy.place, answers) {
        Ok(FieldIdentity { id, .. }) if is_reserved(&id, record, policy) => {
            return Err("identity has the form of a position".into());
        }
        Ok(FieldIdentity { id, source }) => return Ok(identified(id, source, None)),
        Err(FieldError::Bad(reason, place)) => return Err(refusal(reason, place).into()),
        Err(FieldError::Undecoded(reason, detail)) => {
            return Err(Refusal { reason, detail: Some(detail) }.into());
        }
        Err(FieldError::NotYet(not_yet)) => return Err(Unidentified::NotYet(not_yet)),
        Err(FieldError::Missing(reason, place)) => (reason, place),
    };
    match (policy.missing, record.position) {
        (MissingIdentity::Position, Some(position)) => {
            let id = id_text(position_id(record, position).as_bytes())?;
            Ok(identified(id, None, Some(Fallback::Position)))
        }
        (MissingIdentity::Undeduplicated, _) => {
            Ok(identified(format!("undeduplicated/{:032x}", chance()).into(), None, Some(Fallback::Undeduplicated)))
        }
        (MissingIdentity::Position, None) | (MissingIdentity::Quarantine, _) => Err(refusal(reason, place).into()),
    }
}

/// A refusal that names the field in which the identity was expected, but not its content.
fn refusal(reason: &'static str, place: &IdentityField) -> Refusal {
    Refusal { reason, detail: Some(format!("looked for {place}")) }
}

/// Reads the identity in a field, or in the combined fields.
fn given<'p>(
    attributes: &Attributes<'_>,
    place: &'p IdentityField,
    answers: &Answers,
) -> Result<FieldIdentity, FieldError<'p>> {
    let record = attributes.record();
    let field = |field| read(record, field).map_err(|unreadable| FieldError::Bad(unreadable_reason(unreadable), place));
    let value: Option<Cow<'_, [u8]>> = match place {
        IdentityField::CloudEvent => return given_by_event(attributes, place),
        IdentityField::AllOf(parts) => return given_by_all(attributes, parts, place, answers),
        IdentityField::FirstOf(parts) => return given_by_first(attributes, parts, place, answers),
        IdentityField::Header(name) => field(Field::Header(name))?,
        IdentityField::Key => field(Field::Key)?,
        IdentityField::JsonPointer(pointer) => field(Field::JsonPointer(pointer))?,
        IdentityField::Decoded(decoder, pointer) => match record.payload {
            Some(_) => scalar(&decoded(record, decoder, "payload cannot be decoded", answers)?, pointer, place)?,
            None => None,
        },
        IdentityField::DecodedKey(decoder, pointer) => match record.key {
            Some(_) => scalar(&decoded(record, decoder, "key cannot be decoded", answers)?, pointer, place)?,
            None => None,
        },
        IdentityField::Position => record.position.map(|position| position_id(record, position).into_bytes().into()),
        IdentityField::Function(function) => field(Field::Function(&**function))?,
    };
    Ok(FieldIdentity { id: present(value.as_deref(), place)?, source: None })
}

/// The decoded payload or key of the record. `reason` is the reason for the quarantine if it cannot be decoded.
fn decoded<'p>(
    record: &Record,
    decoder: &IdentityDecoder,
    reason: &'static str,
    answers: &Answers,
) -> Result<Value, FieldError<'p>> {
    decode(record, decoder, answers).map_err(|undecoded| match undecoded {
        Undecoded::Never(why) => FieldError::Undecoded(reason, why),
        Undecoded::NotYet(not_yet) => FieldError::NotYet(not_yet),
    })
}

/// The value at the pointer in a decoded payload or key.
fn scalar<'p>(
    value: &Value,
    pointer: &str,
    place: &'p IdentityField,
) -> Result<Option<Cow<'static, [u8]>>, FieldError<'p>> {
    match value.pointer(pointer) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone().into_bytes().into())),
        Some(value @ (Value::Number(_) | Value::Bool(_))) => Ok(Some(value.to_string().into_bytes().into())),
        Some(Value::Array(_) | Value::Object(_)) => Err(FieldError::Bad("identity is not text", place)),
    }
}

/// Turns a value into an id. An empty value counts as missing.
fn present<'p>(value: Option<&[u8]>, place: &'p IdentityField) -> Result<Arc<str>, FieldError<'p>> {
    match value {
        None => Err(FieldError::Missing("missing identity", place)),
        Some([]) => Err(FieldError::Missing("empty identity", place)),
        Some(value) => id_text(value).map_err(|reason| FieldError::Bad(reason, place)),
    }
}

/// The id and the source of a CloudEvent.
fn given_by_event<'p>(attributes: &Attributes<'_>, place: &'p IdentityField) -> Result<FieldIdentity, FieldError<'p>> {
    let event = attributes.event().map_err(|reason| FieldError::Bad(reason, place))?;
    let id = present(event.id.as_deref(), place)?;
    match event.source.as_deref() {
        // The id of an event is unique only together with its source.
        None => Err(FieldError::Missing("missing source", place)),
        Some([]) => Err(FieldError::Missing("empty source", place)),
        Some(source) => {
            let source = source_text(source).map_err(|reason| FieldError::Bad(reason, place))?;
            Ok(FieldIdentity { id, source: Some(source) })
        }
    }
}

/// All parts, joined. If several are missing, the first is reported.
fn given_by_all<'p>(
    attributes: &Attributes<'_>,
    parts: &'p [Identity],
    place: &'p IdentityField,
    answers: &Answers,
) -> Result<FieldIdentity, FieldError<'p>> {
    let mut ids = Vec::with_capacity(parts.len());
    let mut source = None;
    let mut missing = None;
    for part in parts {
        match given(attributes, &part.place, answers) {
            Ok(given) => {
                ids.push(given.id);
                source = source.or(given.source);
            }
            // An invalid part after a missing one is still an error: the policy for missing identities must not hide
            // it.
            Err(flaw @ FieldError::Missing(..)) => missing = missing.or(Some(flaw)),
            Err(flaw @ (FieldError::Bad(..) | FieldError::Undecoded(..) | FieldError::NotYet(_))) => return Err(flaw),
        }
    }
    match missing {
        Some(flaw) => Err(flaw),
        None => Ok(FieldIdentity { id: present(Some(joined(&ids).as_bytes()), place)?, source }),
    }
}

/// The first field that has a value. An invalid value ends the search: otherwise the record would be stored under
/// another identity.
fn given_by_first<'p>(
    attributes: &Attributes<'_>,
    parts: &'p [Identity],
    place: &'p IdentityField,
    answers: &Answers,
) -> Result<FieldIdentity, FieldError<'p>> {
    for part in parts {
        match given(attributes, &part.place, answers) {
            Err(FieldError::Missing(..)) => {}
            answer @ (Ok(_) | Err(FieldError::Bad(..) | FieldError::Undecoded(..) | FieldError::NotYet(_))) => {
                return answer;
            }
        }
    }
    Err(FieldError::Missing("missing identity", place))
}

/// Joins the parts with `|`. `|` and `\` within a part are escaped, so that different parts never give the same text.
fn joined(parts: &[impl AsRef<str>]) -> String {
    let escaped: Vec<String> =
        parts.iter().map(|part| part.as_ref().replace('\\', r"\\").replace('|', r"\|")).collect();
    escaped.join("|")
}

/// The reason that the quarantine shows.
fn unreadable_reason(unreadable: UnreadableField) -> &'static str {
    match unreadable {
        UnreadableField::NotJson => "payload is not JSON",
        UnreadableField::Twice => "identity occurs twice",
        UnreadableField::NotScalar => "identity is not text",
        UnreadableField::Panicked => "identity function panicked",
    }
}

/// The position as an identity. Includes the cluster if it is known, because two clusters have records at the same
/// position. Topic names contain no `@`.
fn position_id(record: &Record, Position { partition, offset }: Position) -> String {
    match (&record.topic, &record.cluster) {
        (topic, Some(cluster)) => format!("{topic}/{partition}/{offset}@{cluster}"),
        (topic, None) => format!("{topic}/{partition}/{offset}"),
    }
}

/// Whether an id has the form of a position while positions replace missing identities. Such an id could make another
/// record count as a duplicate.
fn is_reserved(id: &str, record: &Record, policy: &Identity) -> bool {
    let names_position = || {
        let position = id.strip_prefix(&*record.topic)?.strip_prefix('/')?;
        let (partition, offset) = position.split_once('/')?;
        // The cluster is ignored: another one may feed the same database.
        let offset = offset.split_once('@').map_or(offset, |(offset, _)| offset);
        Some(partition.parse::<i32>().is_ok() && offset.parse::<i64>().is_ok())
    };
    policy.missing == MissingIdentity::Position
        && !matches!(policy.place, IdentityField::Position)
        && names_position().unwrap_or(false)
}

fn id_text(bytes: &[u8]) -> Result<Arc<str>, &'static str> {
    identity_text(bytes, ["empty identity", "identity too long", "identity is not text"])
}

fn source_text(bytes: &[u8]) -> Result<Arc<str>, &'static str> {
    identity_text(bytes, ["empty source", "source too long", "source is not text"])
}

/// Checks that an id or a source is text that PostgreSQL can store and an index can hold.
fn identity_text(bytes: &[u8], [empty, too_long, not_text]: [&'static str; 3]) -> Result<Arc<str>, &'static str> {
    if bytes.is_empty() {
        return Err(empty);
    }
    // A character has at most four bytes, so longer values are refused without decoding them.
    if bytes.len() > 4 * IDENTITY_CHARS_MAX {
        return Err(too_long);
    }
    let text = std::str::from_utf8(bytes).map_err(|_| not_text)?;
    if text.contains('\0') {
        return Err(not_text);
    }
    if text.chars().count() > IDENTITY_CHARS_MAX {
        return Err(too_long);
    }
    Ok(text.into())
}

#[cfg(test)]
mod tests;
