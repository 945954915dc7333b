//! Identity policies: which part of a record identifies it, so that a redelivery is recognized as a duplicate.
//!
//! This file holds the policy and its validation; `identify.rs` applies it to records. Nothing is checked before
//! `build()`, which reports every problem at once.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use super::json;
use super::of_key::OfKey;
use crate::types::{Decoder, Record};

/// The most characters an id or a source may have.
pub(super) const IDENTITY_CHARS_MAX: usize = 200;
/// The most characters of a cluster id that fit into every identity by position. Kafka's ids have 22, Redpanda's 45.
const CLUSTER_CHARS_MAX: usize = 48;
/// The most characters of a topic that leave room for a partition, an offset and a cluster in an identity.
const POSITION_TOPIC_CHARS_MAX: usize =
    IDENTITY_CHARS_MAX - "/2147483647/9223372036854775807@".len() - CLUSTER_CHARS_MAX;

/// Where the records of a topic carry their identity, and what happens to a record without one.
///
/// Two records with the same identity are the same message: the second one is a duplicate.
/// [`InboxBuilder::identity`](crate::InboxBuilder::identity) takes it. Default, also for topics without a policy:
/// [`Identity::cloud_events`], and records without an identity are quarantined. An explicit id ([`Record::with_id`])
/// takes precedence. The source is the one of the record, otherwise that of the CloudEvent, otherwise the topic.
///
/// An identity is 1 to 200 characters of text without NUL. A record whose identity is longer, is not text, or is in an
/// invalid payload is quarantined, whatever the policy for records without an identity is. An empty value counts as
/// none.
///
/// ```
/// use wharf::Identity;
///
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

/// The field that holds an identity.
#[derive(Clone)]
pub(super) enum IdentityField {
    CloudEvent,
    Header(String),
    Key,
    JsonPointer(String),
    Decoded(IdentityDecoder, String),
    DecodedKey(IdentityDecoder, String),
    AllOf(Vec<Identity>),
    FirstOf(Vec<Identity>),
    Position,
    Function(IdentityFn),
}

/// Decodes a payload or a key into a JSON value, in which a pointer finds the identity.
pub(super) type IdentityDecoder = Arc<dyn Decoder<serde_json::Value>>;
pub(super) type IdentityFn = Arc<dyn Fn(&Record) -> Option<Bytes> + Send + Sync>;

/// What happens to a record without an identity. See the `or_` methods of [`Identity`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MissingIdentity {
    Quarantine,
    Position,
    Undeduplicated,
}

impl Identity {
    /// Uses `id` and `source` of a CloudEvent. In binary mode these are the headers `ce_id` and `ce_source`; in
    /// structured mode (the header `content-type` is `application/cloudevents+json`, `+protobuf` or `+avro`) they are
    /// in the payload. A structured event that cannot be read is quarantined.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, handler};
    /// # use wharf::testing::TestInbox;
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// use wharf::{Identity, Receipt, Record};
    ///
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let send = handler(HandlerKey::new("mail.receipt"), send_receipt);
    /// # let builder = |inbox: wharf::InboxBuilder<wharf::Sqlite>| inbox.subscribe("orders", send);
    /// let inbox = TestInbox::new(|inbox| builder(inbox).identity("orders", Identity::cloud_events())).await?;
    /// let placed = Record::new("orders").with_header("ce_id", "17").with_header("ce_source", "/shop");
    /// inbox.accept(placed.clone()).await?;
    /// assert_eq!(inbox.accept(placed).await?, Receipt::Duplicate { added: 0 });
    /// # Ok(()) }
    /// ```
    pub fn cloud_events() -> Self {
        Self::at(IdentityField::CloudEvent)
    }

    /// Uses the value of a header. If there are several headers of the name, the first counts, even if it has no value.
    /// Names are case-sensitive.
    ///
    /// ```
    /// let identity = wharf::Identity::header("message-id");
    /// ```
    pub fn header(name: impl Into<String>) -> Self {
        Self::at(IdentityField::Header(name.into()))
    }

    /// Uses the record's key, for topics in which no two records share a key. A second payload under the same key is a
    /// conflict and is quarantined. For other topics, use the key as a part of [`Identity::all_of`].
    ///
    /// ```
    /// use wharf::Identity;
    ///
    /// let identity = Identity::all_of([Identity::key(), Identity::json_pointer("/version")]);
    /// ```
    pub fn key() -> Self {
        Self::at(IdentityField::Key)
    }

    /// Uses the value at an RFC 6901 pointer (`/order/id`) in the JSON payload: a string, or a number as it is written
    /// (`1` and `1.0` are different). `null` and a missing payload count as none. Other values, duplicate members and
    /// payloads that are not JSON are quarantined.
    ///
    /// ```
    /// let identity = wharf::Identity::json_pointer("/order/id");
    /// ```
    pub fn json_pointer(pointer: impl Into<String>) -> Self {
        Self::at(IdentityField::JsonPointer(pointer.into()))
    }

    /// Uses the value at an RFC 6901 pointer (`/order/id`) in the payload that a decoder has decoded, such as Avro or
    /// Protobuf: a string, a number or a boolean. `null` and a missing payload count as none. Other values are
    /// quarantined.
    ///
    /// The payload is decoded only if the identity is not found before it, for example in a header by
    /// [`Identity::first_of`]. A payload that cannot be decoded is quarantined; a replay of the quarantine decodes it
    /// again. While a dependency of the decoder, such as a schema registry, is unavailable, records wait: the Kafka
    /// partition is not read further, others continue, and [`Inbox::accept`](crate::Inbox::accept) waits up to
    /// [`Limits::accept_patience`](crate::Limits::accept_patience) and then returns a transient error. A record that is
    /// accepted in SQL needs an explicit id.
    ///
    /// ```
    /// use wharf::Identity;
    /// use wharf::formats::JsonSchema;
    /// let identity = Identity::decoded(JsonSchema::new(), "/order/id");
    /// ```
    pub fn decoded(decoder: impl Decoder<serde_json::Value>, pointer: impl Into<String>) -> Self {
        Self::at(IdentityField::Decoded(Arc::new(decoder), pointer.into()))
    }

    /// Uses the value at an RFC 6901 pointer in the decoded key of the record, like [`Identity::decoded`] does in the
    /// payload. The pointer `""` is the whole key. `null` and a missing key count as none. A tombstone has its key, so
    /// it has this identity too.
    ///
    /// ```
    /// use wharf::{Identity, formats::JsonSchema};
    /// let identity = Identity::decoded_key(JsonSchema::new(), "/order_id");
    /// ```
    pub fn decoded_key(decoder: impl Decoder<serde_json::Value>, pointer: impl Into<String>) -> Self {
        Self::at(IdentityField::DecodedKey(Arc::new(OfKey(decoder)), pointer.into()))
    }

    /// Combines several parts, in this order; all of them must be present. The id is the parts joined with `|`; within
    /// a part `|` and `\` are escaped as `\|` and `\\`, so different parts never give the same id. At most 200
    /// characters together.
    ///
    /// ```
    /// use wharf::Identity;
    ///
    /// let identity = Identity::all_of([Identity::header("tenant"), Identity::json_pointer("/order/id")]);
    /// ```
    pub fn all_of(parts: impl IntoIterator<Item = Identity>) -> Self {
        Self::at(IdentityField::AllOf(parts.into_iter().collect()))
    }

    /// Uses the first of several places that has a value, for topics whose producers carry the identity in different
    /// places. A place with an invalid value (too long, not text, a payload that is not JSON) is not skipped: the
    /// record is quarantined. Ids from all places are compared with each other, so they must be from one id space.
    ///
    /// ```
    /// use wharf::Identity;
    /// let identity = Identity::first_of([Identity::cloud_events(), Identity::header("message-id")]).or_position();
    /// ```
    pub fn first_of(places: impl IntoIterator<Item = Identity>) -> Self {
        Self::at(IdentityField::FirstOf(places.into_iter().collect()))
    }

    /// Uses the position of the record, `topic/partition/offset@cluster`, with the id of the Kafka cluster, so that
    /// several clusters can feed one database. It detects a redelivery, but not a record that the producer sent twice.
    /// Records that were not read from Kafka have none, unless [`Record::with_position`] sets it; without
    /// [`Record::with_cluster`] it is `topic/partition/offset`.
    ///
    /// ```
    /// let identity = wharf::Identity::position();
    /// ```
    pub fn position() -> Self {
        Self::at(IdentityField::Position)
    }

    /// Uses the result of a function; `None` means no identity. The function must return the same id each time it gets
    /// the same record. It is called while records are accepted, so it should be fast. A record on which it panics is
    /// quarantined.
    ///
    /// ```
    /// let identity = wharf::Identity::by(|record| record.key().map(|key| key.to_ascii_lowercase()));
    /// ```
    pub fn by<I: Into<Bytes>>(function: impl Fn(&Record) -> Option<I> + Send + Sync + 'static) -> Self {
        Self::at(IdentityField::Function(Arc::new(move |record| function(record).map(Into::into))))
    }

    /// Quarantines records without an identity. This is the default.
    ///
    /// ```
    /// let identity = wharf::Identity::header("message-id").or_quarantine();
    /// ```
    pub fn or_quarantine(mut self) -> Self {
        self.missing = MissingIdentity::Quarantine;
        self
    }

    /// Identifies records without an identity by their position, like [`Identity::position`]; without a position they
    /// are quarantined. Default: they are quarantined. Choose it if it is enough to detect redeliveries.
    ///
    /// A record whose own identity has the form of a position is quarantined: another could count as its duplicate.
    ///
    /// ```
    /// let identity = wharf::Identity::header("message-id").or_position();
    /// ```
    pub fn or_position(mut self) -> Self {
        self.missing = MissingIdentity::Position;
        self
    }

    /// Accepts records without an identity each time they arrive, under a new random id: **a redelivery is handled
    /// again**, and so is a record that is passed to [`Inbox::accept`](crate::Inbox::accept) again after an error.
    /// Default: they are quarantined. Choose it if handlers tolerate that and records have no position.
    ///
    /// ```
    /// let identity = wharf::Identity::header("message-id").or_undeduplicated();
    /// ```
    pub fn or_undeduplicated(mut self) -> Self {
        self.missing = MissingIdentity::Undeduplicated;
        self
    }

    fn at(place: IdentityField) -> Self {
        Self { place, missing: MissingIdentity::Quarantine }
    }

    /// Why this policy cannot work for a topic. `topic` is `None` for a pattern, whose names have an unknown length.
    pub(crate) fn problems(&self, topic: Option<&str>) -> Vec<String> {
        let mut problems = self.place.problems();
        let is_by_position = self.missing == MissingIdentity::Position || self.place.needs_position();
        if is_by_position && topic.is_some_and(|topic| topic.chars().count() > POSITION_TOPIC_CHARS_MAX) {
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
            Self::Header(name) if name.is_empty() => vec!["the header name is empty".to_owned()],
            Self::Header(_) => Vec::new(),
            Self::JsonPointer(pointer) | Self::Decoded(_, pointer) | Self::DecodedKey(_, pointer) => {
                json::pointer_problem(pointer).map(|problem| format!("{pointer:?}: {problem}")).into_iter().collect()
            }
            Self::AllOf(parts) => parts_problems("all_of", parts),
            // A value from another field could have the form of a position. `or_position` refuses such values.
            Self::FirstOf(parts) if parts.iter().any(|part| matches!(part.place, Self::Position)) => {
                vec!["first_of cannot have a position as a part: use or_position".to_owned()]
            }
            Self::FirstOf(parts) => parts_problems("first_of", parts),
        }
    }

    /// Whether the identity contains the position of the record.
    fn needs_position(&self) -> bool {
        match self {
            Self::Position => true,
            Self::AllOf(parts) | Self::FirstOf(parts) => parts.iter().any(|part| part.place.needs_position()),
            Self::CloudEvent
            | Self::Header(_)
            | Self::Key
            | Self::JsonPointer(_)
            | Self::Decoded(..)
            | Self::DecodedKey(..)
            | Self::Function(_) => false,
        }
    }
}

/// The problems of a combined policy and of its parts.
fn parts_problems(name: &str, parts: &[Identity]) -> Vec<String> {
    if parts.is_empty() {
        return vec![format!("{name} needs at least one part")];
    }
    let has_policy = |part: &&Identity| part.missing != MissingIdentity::Quarantine;
    let own_policy = parts
        .iter()
        .filter(has_policy)
        .map(|part| format!("set the policy for a missing identity on {name}, not on {}", part.place));
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
            Self::Decoded(_, pointer) => write!(f, "{pointer:?} of the decoded payload"),
            Self::DecodedKey(_, pointer) => write!(f, "{pointer:?} of the decoded key"),
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
        let problems = |identity: Identity| identity.problems(Some("orders"));
        for identity in [Identity::default(), Identity::json_pointer(""), Identity::all_of([Identity::key()])] {
            assert_eq!(problems(identity.or_position()), [""; 0]);
        }
        assert_eq!(problems(Identity::header("")), ["the header name is empty"]);
        assert_eq!(problems(Identity::all_of([])), ["all_of needs at least one part"]);
        assert_eq!(problems(Identity::first_of([])), ["first_of needs at least one part"]);
        assert_eq!(
            problems(Identity::first_of([Identity::key(), Identity::position()])),
            ["first_of cannot have a position as a part: use or_position"]
        );
        assert_eq!(problems(Identity::first_of([Identity::key(), Identity::header("a")]).or_position()), [""; 0]);
        let parts = [Identity::key().or_undeduplicated(), Identity::json_pointer("id"), Identity::header("")];
        assert_eq!(
            problems(Identity::all_of(parts)),
            [
                "set the policy for a missing identity on all_of, not on the key",
                "\"id\": a JSON pointer begins with a slash",
                "the header name is empty",
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
            assert_eq!(identity.problems(Some(&topic)).len(), 0);
            assert_eq!(identity.problems(Some(&longer)).len(), 1);
        }
        assert_eq!(Identity::key().problems(Some(&longer)).len(), 0);
    }
}
