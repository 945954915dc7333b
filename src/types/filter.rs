//! Filters for deliveries and quarantined records.
//!
//! An empty filter matches everything. Listing accepts it; actions refuse it unless `all` is set.

use std::time::Duration;

use bytes::Bytes;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::{Error, Result, setters};

/// The state of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum State {
    /// It is due now or later, or waits for its order key.
    Pending,
    /// A process has claimed it.
    Running,
    /// Its handler has succeeded.
    Done,
    /// The engine has given it up, and a person decides what to do.
    Poisoned,
    /// A person or the handler has discarded it, or it has expired.
    Discarded,
}

impl State {
    /// Returns the name of the state.
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

/// Which deliveries to list or change: those that match every field that is set.
///
/// ```
/// use wharf::operate::DeliveryFilter;
///
/// let failed = DeliveryFilter::default().handler_key("mail.receipt").error("timeout");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeliveryFilter {
    /// The handler, by its key or a former one.
    pub handler_key: Option<String>,
    /// The id of the message. It matches several messages when several sources use the id.
    pub message_id: Option<String>,
    /// The source of the message.
    pub source: Option<String>,
    /// The topic of the message.
    pub topic: Option<String>,
    /// Why the delivery was poisoned or discarded.
    pub reason: Option<String>,
    /// A text that the last error contains. Case is ignored.
    pub error: Option<String>,
    /// The [`fingerprint`](crate::operate::fingerprint) of the last error, or `none` for deliveries without an error.
    pub fingerprint: Option<String>,
    /// The minimum time since the delivery was poisoned. For other deliveries, since the message was received.
    pub older_than: Option<Duration>,
    /// The maximum time since then.
    pub newer_than: Option<Duration>,
    /// Confirms that the action applies to everything. Without it, actions refuse an empty filter.
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
    /// Matches every delivery.
    pub fn all() -> Self {
        Self { all: true, ..Self::default() }
    }

    /// The JSON for the audit and for the SQL functions of PostgreSQL.
    pub(crate) fn to_json(&self) -> String {
        self.to_value().to_string()
    }

    fn to_value(&self) -> Value {
        let texts = [
            ("handler_key", &self.handler_key),
            ("message_id", &self.message_id),
            ("source", &self.source),
            ("topic", &self.topic),
            ("reason", &self.reason),
            ("error", &self.error),
            ("fingerprint", &self.fingerprint),
        ];
        json(&texts, self.older_than, self.newer_than, self.all)
    }

    /// The JSON for the audit of an action on deliveries in this state.
    pub(crate) fn to_json_in(&self, state: State) -> String {
        let mut json = self.to_value();
        json["state"] = state.as_str().into();
        json.to_string()
    }

    /// The JSON for the audit of an action on one attempt. A corrected payload is recorded by its hash only.
    pub(crate) fn to_json_of(&self, attempt: i32, payload: Option<&[u8]>) -> String {
        let texts = [("handler_key", &self.handler_key), ("message_id", &self.message_id), ("source", &self.source)];
        let mut json = json(&texts, None, None, false);
        json["attempt"] = attempt.into();
        if let Some(payload) = payload {
            json["payload_sha256"] = format!("{:x}", Bytes::copy_from_slice(&Sha256::digest(payload))).into();
        }
        json.to_string()
    }

    /// Refuses a filter that matches everything by mistake.
    pub(crate) fn refuse_empty(&self) -> Result<()> {
        if *self == Self::default() { Err(says_nothing()) } else { Ok(()) }
    }
}

/// Which quarantined records to list or change: those that match every field that is set.
///
/// ```
/// use wharf::operate::QuarantineFilter;
///
/// let without_identity = QuarantineFilter::default().topic("orders").reason("missing identity");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuarantineFilter {
    /// The id of the record.
    pub id: Option<i64>,
    /// The topic of the record.
    pub topic: Option<String>,
    /// Kafka's own id of the cluster that the record was read from.
    pub cluster_id: Option<String>,
    /// Why the record was quarantined.
    pub reason: Option<String>,
    /// A text that the detail contains. Case is ignored.
    pub detail: Option<String>,
    /// The minimum time in quarantine.
    pub older_than: Option<Duration>,
    /// The maximum time in quarantine.
    pub newer_than: Option<Duration>,
    /// Only records with a higher id: the next portion, because records are listed and changed in the order of their
    /// ids.
    pub after_id: Option<i64>,
    /// Confirms that the action applies to everything. Without it, actions refuse an empty filter.
    pub all: bool,
}

setters!(QuarantineFilter {} optional {
    id: i64,
    after_id: i64,
    topic: impl Into<String>,
    cluster_id: impl Into<String>,
    reason: impl Into<String>,
    detail: impl Into<String>,
    older_than: Duration,
    newer_than: Duration,
});

impl QuarantineFilter {
    /// Matches every quarantined record.
    pub fn all() -> Self {
        Self { all: true, ..Self::default() }
    }

    /// The JSON for the audit and for the SQL functions of PostgreSQL.
    pub(crate) fn to_json(&self) -> String {
        let texts = [
            ("topic", &self.topic),
            ("cluster_id", &self.cluster_id),
            ("reason", &self.reason),
            ("detail", &self.detail),
        ];
        let mut filter = json(&texts, self.older_than, self.newer_than, self.all);
        for (name, id) in [("id", self.id), ("after_id", self.after_id)] {
            if let Some(id) = id {
                filter[name] = id.into();
            }
        }
        filter.to_string()
    }

    /// Refuses a filter that matches everything by mistake.
    pub(crate) fn refuse_empty(&self) -> Result<()> {
        if *self == Self::default() { Err(says_nothing()) } else { Ok(()) }
    }
}

/// The conditions that are set, as a JSON object.
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
            // The text of a PostgreSQL interval.
            filter.insert(name.to_owned(), format!("{} seconds", duration.as_secs_f64()).into());
        }
    }
    if all {
        filter.insert("all".to_owned(), true.into());
    }
    Value::Object(filter)
}

/// The error for an action with an empty filter.
pub(super) fn says_nothing() -> Error {
    Error::configuration("the filter is empty and would match everything: set a condition, or `all`")
}
