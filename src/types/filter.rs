//! Which deliveries and which quarantined records are meant.
//!
//! A filter that says nothing means everything, which is fine for looking and refused for acting, unless it says so.

use std::time::Duration;

use bytes::Bytes;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::{Error, Result, setters};

/// What a delivery is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum State {
    /// Due now or later.
    Pending,
    /// Claimed by a process.
    Running,
    /// Its handler has ended well.
    Done,
    /// Given up by the machine, kept for a person.
    Poisoned,
    /// Done by the word of a person or of its handler.
    Discarded,
}

impl State {
    /// The state's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::Done => "done",
            Self::Poisoned => "poisoned",
            Self::Discarded => "discarded",
        }
    }
}

/// Which deliveries are meant: those that fit everything it says.
///
/// ```
/// use wharf::operate::DeliveryFilter;
/// let failed = DeliveryFilter::default().handler_key("mail.receipt").error("timeout");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeliveryFilter {
    /// Of this handler, by its key or a former one.
    pub handler_key: Option<String>,
    /// Of the message with this id; of several, when several sources use it.
    pub message_id: Option<String>,
    /// Of messages of this source.
    pub source: Option<String>,
    /// Of messages of this topic.
    pub topic: Option<String>,
    /// Poisoned or discarded for this reason.
    pub reason: Option<String>,
    /// With this text in the last error, in upper or lower case.
    pub error: Option<String>,
    /// With a last error of this [`fingerprint`](crate::operate::fingerprint).
    pub fingerprint: Option<String>,
    /// Poisoned longer ago than this; where that does not apply, received longer ago.
    pub older_than: Option<Duration>,
    /// Poisoned, or received, no longer ago than this.
    pub newer_than: Option<Duration>,
    /// Says in so many words that everything is meant. An act with a filter that says nothing is refused.
    pub all: bool,
}

setters!(DeliveryFilter {} optional {
    handler_key: impl Into<String>,
    message_id: impl Into<String>,
    source: impl Into<String>,
    topic: impl Into<String>,
    reason: impl Into<String>,
    error: impl Into<String>,
    fingerprint: impl Into<String>,
    older_than: Duration,
    newer_than: Duration,
});

impl DeliveryFilter {
    /// Every delivery.
    pub fn all() -> Self {
        Self { all: true, ..Self::default() }
    }

    /// As it is written into the audit, and as PostgreSQL's functions take it.
    pub(crate) fn to_json(&self) -> String {
        let texts = [
            ("handler_key", &self.handler_key),
            ("message_id", &self.message_id),
            ("source", &self.source),
            ("topic", &self.topic),
            ("reason", &self.reason),
            ("error", &self.error),
            ("fingerprint", &self.fingerprint),
        ];
        json(&texts, self.older_than, self.newer_than, self.all).to_string()
    }

    /// As it is written into the audit, with the attempt that is meant, and the hash of a corrected payload.
    pub(crate) fn to_json_of(&self, attempt: i32, payload: Option<&[u8]>) -> String {
        let texts = [("handler_key", &self.handler_key), ("message_id", &self.message_id), ("source", &self.source)];
        let mut json = json(&texts, None, None, false);
        json["attempt"] = attempt.into();
        if let Some(payload) = payload {
            json["payload_sha256"] = format!("{:x}", Bytes::copy_from_slice(&Sha256::digest(payload))).into();
        }
        json.to_string()
    }

    pub(crate) fn refuse_empty(&self) -> Result<()> {
        if *self == Self::default() { Err(says_nothing()) } else { Ok(()) }
    }
}

/// Which quarantined records are meant: those that fit everything it says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuarantineFilter {
    /// This one.
    pub id: Option<i64>,
    /// Of this topic.
    pub topic: Option<String>,
    /// Quarantined for this reason.
    pub reason: Option<String>,
    /// With this text in the detail, in upper or lower case.
    pub detail: Option<String>,
    /// Quarantined longer ago than this.
    pub older_than: Option<Duration>,
    /// Quarantined no longer ago than this.
    pub newer_than: Option<Duration>,
    /// Says in so many words that everything is meant. An act with a filter that says nothing is refused.
    pub all: bool,
}

setters!(QuarantineFilter {} optional {
    id: i64,
    topic: impl Into<String>,
    reason: impl Into<String>,
    detail: impl Into<String>,
    older_than: Duration,
    newer_than: Duration,
});

impl QuarantineFilter {
    /// Every quarantined record.
    pub fn all() -> Self {
        Self { all: true, ..Self::default() }
    }

    pub(crate) fn to_json(&self) -> String {
        let texts = [("topic", &self.topic), ("reason", &self.reason), ("detail", &self.detail)];
        let mut filter = json(&texts, self.older_than, self.newer_than, self.all);
        if let (Some(id), Value::Object(filter)) = (self.id, &mut filter) {
            filter.insert("id".to_owned(), id.into());
        }
        filter.to_string()
    }

    pub(crate) fn refuse_empty(&self) -> Result<()> {
        if *self == Self::default() { Err(says_nothing()) } else { Ok(()) }
    }
}

pub(super) fn json(
    texts: &[(&str, &Option<String>)],
    older_than: Option<Duration>,
    newer_than: Option<Duration>,
    all: bool,
) -> Value {
    let texts = texts.iter().filter_map(|(name, text)| Some(((*name).to_owned(), Value::from(text.as_deref()?))));
    let mut filter: Map<String, Value> = texts.collect();
    for (name, duration) in [("older_than", older_than), ("newer_than", newer_than)] {
        if let Some(duration) = duration {
            // An interval of PostgreSQL.
            filter.insert(name.to_owned(), format!("{} seconds", duration.as_secs_f64()).into());
        }
    }
    if all {
        filter.insert("all".to_owned(), true.into());
    }
    Value::Object(filter)
}

pub(super) fn says_nothing() -> Error {
    Error::configuration("the filter says nothing and would take everything: say that all are meant, or which")
}
