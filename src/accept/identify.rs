//! Says under which identity a record is stored, by the policy of its topic. Pure: chance is an argument; hostile bytes welcome.
//!
//! An explicit id always wins. A missing identity is a matter of policy; a bad one never is: a record that says who it is in a way that
//! cannot be kept is quarantined, never stored under a name that somebody made up.

use std::borrow::Cow;
use std::sync::Arc;

use super::cloud_event::Attributes;
use super::field::{Field, UnreadableField, read};
use super::identity::{IDENTITY_CHARS_MAX, Identity, IdentityField, MissingIdentity};
use crate::types::{Position, Record};

/// The identity of a record.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Identified {
    pub(super) id: Arc<str>,
    /// `None`: its topic.
    pub(super) source: Option<Arc<str>>,
    pub(super) fallback: Option<Fallback>,
}

/// What stood in for an identity that was missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fallback {
    Position,
    Undeduplicated,
}

/// Why a record is quarantined. Never holds anything of the record.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) reason: &'static str,
    pub(super) detail: Option<String>,
}

impl From<&'static str> for Refusal {
    fn from(reason: &'static str) -> Self {
        Self { reason, detail: None }
    }
}

/// Why a place gave no identity.
enum Flaw<'p> {
    /// There is none: the policy decides.
    Missing(&'static str, &'p IdentityField),
    /// There is one, and it cannot be used.
    Bad(&'static str, &'p IdentityField),
}

/// What a place gave.
struct FieldIdentity {
    id: Arc<str>,
    source: Option<Arc<str>>,
}

/// The identity of a record. `chance` is asked when a random id is needed.
pub(super) fn identify(
    attributes: &Attributes<'_>,
    policy: &Identity,
    chance: impl FnOnce() -> u128,
) -> Result<Identified, Refusal> {
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
    let (reason, place) = match given(attributes, &policy.place) {
        Ok(FieldIdentity { id, .. }) if is_reserved(&id, record, policy) => {
            return Err("identity has the form of a position".into());
        }
        Ok(FieldIdentity { id, source }) => return Ok(identified(id, source, None)),
        Err(Flaw::Bad(reason, place)) => return Err(refusal(reason, place)),
        Err(Flaw::Missing(reason, place)) => (reason, place),
    };
    match (policy.missing, record.position) {
        (MissingIdentity::Position, Some(position)) => {
            let id = id_text(position_id(record, position).as_bytes())?;
            Ok(identified(id, None, Some(Fallback::Position)))
        }
        (MissingIdentity::Undeduplicated, _) => {
            Ok(identified(format!("undeduplicated/{:032x}", chance()).into(), None, Some(Fallback::Undeduplicated)))
        }
        (MissingIdentity::Position, None) | (MissingIdentity::Quarantine, _) => Err(refusal(reason, place)),
    }
}

fn refusal(reason: &'static str, place: &IdentityField) -> Refusal {
    Refusal { reason, detail: Some(format!("looked for {place}")) }
}

fn given<'p>(attributes: &Attributes<'_>, place: &'p IdentityField) -> Result<FieldIdentity, Flaw<'p>> {
    let record = attributes.record();
    let field = |field| read(record, field).map_err(|unreadable| Flaw::Bad(unreadable_reason(unreadable), place));
    let value: Option<Cow<'_, [u8]>> = match place {
        IdentityField::CloudEvent => return given_by_event(attributes, place),
        IdentityField::AllOf(parts) => return given_by_all(attributes, parts, place),
        IdentityField::FirstOf(parts) => return given_by_first(attributes, parts, place),
        IdentityField::Header(name) => field(Field::Header(name))?,
        IdentityField::Key => field(Field::Key)?,
        IdentityField::JsonPointer(pointer) => field(Field::JsonPointer(pointer))?,
        IdentityField::Position => record.position.map(|position| position_id(record, position).into_bytes().into()),
        IdentityField::Function(function) => field(Field::Function(&**function))?,
    };
    Ok(FieldIdentity { id: present(value.as_deref(), place)?, source: None })
}

/// A value that is there, as an id. An empty one is as good as none.
fn present<'p>(value: Option<&[u8]>, place: &'p IdentityField) -> Result<Arc<str>, Flaw<'p>> {
    match value {
        None => Err(Flaw::Missing("missing identity", place)),
        Some([]) => Err(Flaw::Missing("empty identity", place)),
        Some(value) => id_text(value).map_err(|reason| Flaw::Bad(reason, place)),
    }
}

fn given_by_event<'p>(attributes: &Attributes<'_>, place: &'p IdentityField) -> Result<FieldIdentity, Flaw<'p>> {
    let event = attributes.event().map_err(|reason| Flaw::Bad(reason, place))?;
    let id = present(event.id.as_deref(), place)?;
    match event.source.as_deref() {
        // Without its source the id could be anybody's.
        None => Err(Flaw::Missing("missing source", place)),
        Some([]) => Err(Flaw::Missing("empty source", place)),
        Some(source) => {
            let source = source_text(source).map_err(|reason| Flaw::Bad(reason, place))?;
            Ok(FieldIdentity { id, source: Some(source) })
        }
    }
}

fn given_by_all<'p>(
    attributes: &Attributes<'_>,
    parts: &'p [Identity],
    place: &'p IdentityField,
) -> Result<FieldIdentity, Flaw<'p>> {
    let mut ids = Vec::with_capacity(parts.len());
    let mut source = None;
    let mut missing = None;
    for part in parts {
        match given(attributes, &part.place) {
            Ok(given) => {
                ids.push(given.id);
                source = source.or(given.source);
            }
            // A bad part after a missing one is still bad: policy must not hide it.
            Err(flaw @ Flaw::Missing(..)) => missing = missing.or(Some(flaw)),
            Err(flaw @ Flaw::Bad(..)) => return Err(flaw),
        }
    }
    match missing {
        Some(flaw) => Err(flaw),
        None => Ok(FieldIdentity { id: present(Some(joined(&ids).as_bytes()), place)?, source }),
    }
}

/// The first place that has a value. A bad value ends the search: falling through would store the record under another identity.
fn given_by_first<'p>(
    attributes: &Attributes<'_>,
    parts: &'p [Identity],
    place: &'p IdentityField,
) -> Result<FieldIdentity, Flaw<'p>> {
    for part in parts {
        match given(attributes, &part.place) {
            Err(Flaw::Missing(..)) => {}
            answer @ (Ok(_) | Err(Flaw::Bad(..))) => return answer,
        }
    }
    Err(Flaw::Missing("missing identity", place))
}

/// Parts with `|` between them; `|` and `\` within a part are escaped, so that other parts never give the same text.
fn joined(parts: &[impl AsRef<str>]) -> String {
    let escaped: Vec<String> =
        parts.iter().map(|part| part.as_ref().replace('\\', r"\\").replace('|', r"\|")).collect();
    escaped.join("|")
}

/// The reason that stands in the quarantine.
fn unreadable_reason(unreadable: UnreadableField) -> &'static str {
    match unreadable {
        UnreadableField::NotJson => "payload is not JSON",
        UnreadableField::Twice => "identity stands twice",
        UnreadableField::NotScalar => "identity is not text",
        UnreadableField::Panicked => "identity function panicked",
    }
}

/// With the cluster where it is known: two clusters have records at the same position. No topic has an `@` in its name.
fn position_id(record: &Record, Position { partition, offset }: Position) -> String {
    match (&record.topic, &record.cluster) {
        (topic, Some(cluster)) => format!("{topic}/{partition}/{offset}@{cluster}"),
        (topic, None) => format!("{topic}/{partition}/{offset}"),
    }
}

/// Whether an id out of a record could be the position of another, where positions stand in for missing identities: a producer could have
/// that other record taken for a duplicate.
fn is_reserved(id: &str, record: &Record, policy: &Identity) -> bool {
    let names_position = || {
        let position = id.strip_prefix(&*record.topic)?.strip_prefix('/')?;
        let (partition, offset) = position.split_once('/')?;
        // Whatever the cluster: another one may feed the same database.
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

/// Text that PostgreSQL can store and an index can hold.
fn identity_text(bytes: &[u8], [empty, too_long, not_text]: [&'static str; 3]) -> Result<Arc<str>, &'static str> {
    if bytes.is_empty() {
        return Err(empty);
    }
    // Four bytes a character at most: no need to look at megabytes to know that they are too many.
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
