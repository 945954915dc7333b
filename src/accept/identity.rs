//! Identity policies: where the records of a topic carry what makes a second delivery of the same record a duplicate.
//!
//! Only what a user says stands here, and what is wrong with it; `identify.rs` does it to records. Nothing is checked before `build()`,
//! which names every problem at once.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use super::json;
use crate::types::Record;

/// The most characters an id or a source may have.
pub(super) const IDENTITY_CHARS_MAX: usize = 200;
/// The most characters of a cluster's id for which there is room in every identity by position: Kafka's own have 22, Redpanda's 45.
const CLUSTER_CHARS_MAX: usize = 48;
/// The most characters of a topic that leave room for a partition, an offset and a cluster in an identity.
const POSITION_TOPIC_CHARS_MAX: usize =
    IDENTITY_CHARS_MAX - "/2147483647/9223372036854775807@".len() - CLUSTER_CHARS_MAX;

/// Where the records of a topic carry their identity, and what becomes of a record that carries none.
///
/// Given to [`InboxBuilder::identity`](crate::InboxBuilder::identity). Default, also for topics without a policy:
/// [`Identity::cloud_events`], and records without identity are quarantined. A record with an explicit id
/// ([`Record::with_id`]) has that one, whatever the policy. The source is the one given with the record, else that of the
/// CloudEvent, else the topic.
///
/// An identity is 1 to 200 characters of text without NUL. A record where it is longer, or not text, or stands in something
/// broken, is quarantined, whatever is to happen to records without one. An empty value counts as none.
///
/// ```
/// use wharf::Identity;
/// let by_header = Identity::header("message-id").or_position();
/// let by_payload = Identity::all_of([Identity::json_pointer("/order/id"), Identity::json_pointer("/version")]);
/// let by_code = Identity::by(|record| record.key().map(|key| key.escape_ascii().to_string()));
/// ```
#[derive(Clone)]
#[must_use = "a policy does nothing until a topic has it"]
pub struct Identity {
    pub(super) place: IdentityField,
    pub(super) missing: MissingIdentity,
}

/// Where an identity stands.
#[derive(Clone)]
pub(super) enum IdentityField {
    CloudEvent,
    Header(String),
    Key,
    JsonPointer(String),
    AllOf(Vec<Identity>),
    FirstOf(Vec<Identity>),
    Position,
    Function(IdentityFn),
}

pub(super) type IdentityFn = Arc<dyn Fn(&Record) -> Option<Bytes> + Send + Sync>;

/// What becomes of a record without identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MissingIdentity {
    Quarantine,
    Position,
    Undeduplicated,
}

impl Identity {
    /// `id` and `source` of a CloudEvent, both. In binary mode these are the headers `ce_id` and `ce_source`; in structured mode, which
    /// the header `content-type: application/cloudevents+json` tells, they are members of the JSON payload. A structured event
    /// whose JSON is broken is quarantined.
    pub fn cloud_events() -> Self {
        Self::at(IdentityField::CloudEvent)
    }

    /// The value of a header. The first header of the name counts, also when it has no value and a later one does. Names are
    /// case-sensitive.
    pub fn header(name: impl Into<String>) -> Self {
        Self::at(IdentityField::Header(name.into()))
    }

    /// The record's key. For topics where no two records share a key: a second payload under the same key is a conflict, and
    /// quarantined. For others, make the key a part of [`Identity::all_of`].
    pub fn key() -> Self {
        Self::at(IdentityField::Key)
    }

    /// What an RFC 6901 pointer (`/order/id`) finds in the JSON payload: a string, or a number as it is written (`1` and `1.0` are two).
    /// `null`, and no payload at all, count as none; other values, a member that stands twice and payloads that are not JSON are
    /// quarantined.
    pub fn json_pointer(pointer: impl Into<String>) -> Self {
        Self::at(IdentityField::JsonPointer(pointer.into()))
    }

    /// Several together, in this order; none of them may be missing. The id is the parts with `|` between them, where `|` and `\` within a
    /// part are written `\|` and `\\`: other parts never make the same id. At most 200 characters in all.
    pub fn all_of(parts: impl IntoIterator<Item = Identity>) -> Self {
        Self::at(IdentityField::AllOf(parts.into_iter().collect()))
    }

    /// The first of several places that has a value, in this order: for topics whose producers carry the identity in different places.
    /// A place with a value that cannot be used (too long, not text, a payload that is not JSON) is not passed over: the record is
    /// quarantined. Ids from all places are compared with each other, so they must come from the same id space.
    ///
    /// ```
    /// use wharf::Identity;
    /// let identity = Identity::first_of([Identity::cloud_events(), Identity::header("message-id")]).or_position();
    /// ```
    pub fn first_of(places: impl IntoIterator<Item = Identity>) -> Self {
        Self::at(IdentityField::FirstOf(places.into_iter().collect()))
    }

    /// Where the record was: `topic/partition/offset@cluster`, with the id of the Kafka cluster, so that several clusters can feed one
    /// database. Tells a redelivery, but not that a producer sent the same thing twice. Records that were not read from Kafka have none,
    /// unless [`Record::with_position`] said so; without [`Record::with_cluster`] it is `topic/partition/offset`.
    pub fn position() -> Self {
        Self::at(IdentityField::Position)
    }

    /// What a function says; `None` for a record without identity. It must say the same each time it sees the same record.
    /// It is called while records are accepted, so it should be quick; a record it panics on is quarantined.
    pub fn by<I: Into<Bytes>>(function: impl Fn(&Record) -> Option<I> + Send + Sync + 'static) -> Self {
        Self::at(IdentityField::Function(Arc::new(move |record| function(record).map(Into::into))))
    }

    /// Records without identity are quarantined. This is the default.
    pub fn or_quarantine(mut self) -> Self {
        self.missing = MissingIdentity::Quarantine;
        self
    }

    /// Records without identity are told apart by where they were, as by [`Identity::position`]; without a position they are quarantined.
    /// Default: they are quarantined. Choose it when a redelivery must be a duplicate and nothing more.
    ///
    /// A record whose own identity has the form of such a position is quarantined: it could take the place of another record.
    pub fn or_position(mut self) -> Self {
        self.missing = MissingIdentity::Position;
        self
    }

    /// Records without identity are accepted each time they come, under a new random id: **a redelivery is handled again**, and so is a
    /// record that is handed to [`Inbox::accept`](crate::Inbox::accept) again after an error. Default: they are quarantined. Choose it when
    /// handlers bear that and records have no position.
    pub fn or_undeduplicated(mut self) -> Self {
        self.missing = MissingIdentity::Undeduplicated;
        self
    }

    fn at(place: IdentityField) -> Self {
        Self { place, missing: MissingIdentity::Quarantine }
    }

    /// Why this policy cannot work for a topic.
    pub(crate) fn problems(&self, topic: &str) -> Vec<String> {
        let mut problems = self.place.problems();
        let is_by_position = self.missing == MissingIdentity::Position || self.place.needs_position();
        if is_by_position && topic.chars().count() > POSITION_TOPIC_CHARS_MAX {
            problems.push(format!(
                "a topic of more than {POSITION_TOPIC_CHARS_MAX} characters leaves no room for a position in an identity"
            ));
        }
        problems
    }
}

impl IdentityField {
    fn problems(&self) -> Vec<String> {
        match self {
            Self::CloudEvent | Self::Key | Self::Position | Self::Function(_) => Vec::new(),
            Self::Header(name) if name.is_empty() => vec!["the header has no name".to_owned()],
            Self::Header(_) => Vec::new(),
            Self::JsonPointer(pointer) => {
                json::pointer_problem(pointer).map(|problem| format!("{pointer:?}: {problem}")).into_iter().collect()
            }
            Self::AllOf(parts) => parts_problems("all_of", parts),
            // A value from another place could have the form of a position: `or_position` refuses those.
            Self::FirstOf(parts) if parts.iter().any(|part| matches!(part.place, Self::Position)) => {
                vec!["first_of has no position as a part: use or_position".to_owned()]
            }
            Self::FirstOf(parts) => parts_problems("first_of", parts),
        }
    }

    fn needs_position(&self) -> bool {
        match self {
            Self::Position => true,
            Self::AllOf(parts) | Self::FirstOf(parts) => parts.iter().any(|part| part.place.needs_position()),
            Self::CloudEvent | Self::Header(_) | Self::Key | Self::JsonPointer(_) | Self::Function(_) => false,
        }
    }
}

fn parts_problems(name: &str, parts: &[Identity]) -> Vec<String> {
    if parts.is_empty() {
        return vec![format!("{name} has at least one part")];
    }
    let has_policy = |part: &&Identity| part.missing != MissingIdentity::Quarantine;
    let own_policy = parts
        .iter()
        .filter(has_policy)
        .map(|part| format!("what to do without {} is said of the whole {name}, not of a part", part.place));
    own_policy.chain(parts.iter().flat_map(|part| part.place.problems())).collect()
}

fn joined(f: &mut fmt::Formatter<'_>, parts: &[Identity], between: &str) -> fmt::Result {
    for (number, part) in parts.iter().enumerate() {
        write!(f, "{}{}", if number == 0 { "" } else { between }, part.place)?;
    }
    Ok(())
}

impl Default for Identity {
    /// [`Identity::cloud_events`], and records without identity are quarantined.
    fn default() -> Self {
        Self::cloud_events()
    }
}

impl fmt::Display for IdentityField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CloudEvent => f.write_str("the CloudEvents id and source"),
            Self::Header(name) => write!(f, "the header {name:?}"),
            Self::Key => f.write_str("the key"),
            Self::JsonPointer(pointer) => write!(f, "the JSON pointer {pointer:?}"),
            Self::AllOf(parts) => joined(f, parts, " and "),
            Self::FirstOf(parts) => joined(f, parts, " or "),
            Self::Position => f.write_str("the position"),
            Self::Function(_) => f.write_str("the identity function"),
        }
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("place", &format_args!("{}", self.place))
            .field("missing", &self.missing)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_that_cannot_work_says_why() {
        let problems = |identity: Identity| identity.problems("orders");
        for identity in [Identity::default(), Identity::json_pointer(""), Identity::all_of([Identity::key()])] {
            assert_eq!(problems(identity.or_position()), [""; 0]);
        }
        assert_eq!(problems(Identity::header("")), ["the header has no name"]);
        assert_eq!(problems(Identity::all_of([])), ["all_of has at least one part"]);
        assert_eq!(problems(Identity::first_of([])), ["first_of has at least one part"]);
        assert_eq!(
            problems(Identity::first_of([Identity::key(), Identity::position()])),
            ["first_of has no position as a part: use or_position"]
        );
        assert_eq!(problems(Identity::first_of([Identity::key(), Identity::header("a")]).or_position()), [""; 0]);
        let parts = [Identity::key().or_undeduplicated(), Identity::json_pointer("id"), Identity::header("")];
        assert_eq!(
            problems(Identity::all_of(parts)),
            [
                "what to do without the key is said of the whole all_of, not of a part",
                "\"id\": a JSON pointer begins with a slash",
                "the header has no name",
            ]
        );
    }

    #[test]
    fn a_position_fits_into_an_identity_for_every_topic_that_is_not_refused() {
        let topic = "t".repeat(POSITION_TOPIC_CHARS_MAX);
        let longest = format!("{topic}/{}/{}@{}", i32::MAX, i64::MAX, "c".repeat(CLUSTER_CHARS_MAX));
        assert_eq!(longest.len(), IDENTITY_CHARS_MAX);
        let longer = format!("{topic}t");
        let nested = Identity::all_of([Identity::key(), Identity::position()]);
        for identity in [Identity::position(), Identity::key().or_position(), nested] {
            assert_eq!(identity.problems(&topic).len(), 0);
            assert_eq!(identity.problems(&longer).len(), 1);
        }
        assert_eq!(Identity::key().problems(&longer).len(), 0);
    }
}
