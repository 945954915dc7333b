//! Filters in URLs and forms, and their conversion to the operator's filters.

use std::time::Duration;

use serde::Deserialize;

use super::refusal::Refusal;
use super::text;
use crate::types::{DeliveryFilter, QuarantineFilter, State};

/// How many rows a list shows by default.
pub(super) const ROWS: u32 = 50;
/// The maximum number of rows of a list.
pub(super) const ROWS_MAX: u32 = 1_000;

/// A filter for deliveries. An empty field is not part of the filter.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct DeliveryQuery {
    pub(super) handler: String,
    pub(super) message: String,
    pub(super) source: String,
    pub(super) topic: String,
    pub(super) reason: String,
    pub(super) error: String,
    pub(super) fingerprint: String,
    pub(super) older: String,
    pub(super) newer: String,
    pub(super) state: String,
    pub(super) rows: String,
}

impl DeliveryQuery {
    pub(super) fn filter(&self) -> Result<DeliveryFilter, Refusal> {
        Ok(DeliveryFilter {
            handler_key: said(&self.handler),
            message_id: given(&self.message),
            source: given(&self.source),
            topic: said(&self.topic),
            reason: said(&self.reason),
            error: said(&self.error),
            fingerprint: said(&self.fingerprint),
            older_than: duration(&self.older)?,
            newer_than: duration(&self.newer)?,
            all: false,
        })
    }

    pub(super) fn state(&self) -> Result<Option<State>, Refusal> {
        let states = [State::Pending, State::Running, State::Done, State::Poisoned, State::Discarded];
        match self.state.trim() {
            "" => Ok(None),
            name => match states.into_iter().find(|state| state.as_str() == name) {
                Some(state) => Ok(Some(state)),
                None => Err(Refusal::wrong(format!("there is no state {name:?}"))),
            },
        }
    }

    /// The filter as a URL query, without the number of rows.
    pub(super) fn encoded(&self) -> String {
        encoded(&self.pairs())
    }

    /// The fields of the filter. Blanks around typed text are not part of it, so that query, words and filter agree.
    fn pairs(&self) -> [(&'static str, &str); 10] {
        [
            ("state", self.state.trim()),
            ("handler", self.handler.trim()),
            ("message", &self.message),
            ("source", &self.source),
            ("topic", self.topic.trim()),
            ("reason", self.reason.trim()),
            ("error", self.error.trim()),
            ("fingerprint", self.fingerprint.trim()),
            ("older", self.older.trim()),
            ("newer", self.newer.trim()),
        ]
    }

    /// The page that lists the deliveries in this state that match.
    pub(super) fn path(&self, state: State) -> &'static str {
        if state == State::Poisoned && self.state.is_empty() { "/poisoned" } else { "/deliveries" }
    }

    pub(super) fn is_said(&self) -> bool {
        !self.encoded().is_empty()
    }

    /// The filter in words, for a heading.
    pub(super) fn words(&self) -> Vec<(&'static str, String)> {
        words(&self.pairs())
    }
}

/// A filter for quarantined records. An empty field is not part of the filter.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct QuarantineQuery {
    pub(super) id: String,
    pub(super) topic: String,
    pub(super) reason: String,
    pub(super) detail: String,
    pub(super) older: String,
    pub(super) newer: String,
    pub(super) rows: String,
}

impl QuarantineQuery {
    pub(super) fn filter(&self) -> Result<QuarantineFilter, Refusal> {
        let id = said(&self.id).map(|id| id.parse::<i64>());
        let id = id.transpose().map_err(|_| Refusal::wrong(format!("{:?} is not a record id", self.id)))?;
        Ok(QuarantineFilter {
            id,
            topic: said(&self.topic),
            cluster_id: None,
            reason: said(&self.reason),
            detail: said(&self.detail),
            older_than: duration(&self.older)?,
            newer_than: duration(&self.newer)?,
            after_id: None,
            all: false,
        })
    }

    pub(super) fn encoded(&self) -> String {
        encoded(&self.pairs())
    }

    pub(super) fn words(&self) -> Vec<(&'static str, String)> {
        words(&self.pairs())
    }

    fn pairs(&self) -> [(&'static str, &str); 6] {
        [
            ("id", self.id.trim()),
            ("topic", self.topic.trim()),
            ("reason", self.reason.trim()),
            ("detail", self.detail.trim()),
            ("older", self.older.trim()),
            ("newer", self.newer.trim()),
        ]
    }
}

/// The query of a longer list, if more rows were found than a list of this length shows.
pub(super) fn more(query: &str, found: usize, rows: u32) -> Option<String> {
    (found > rows as usize && rows < ROWS_MAX).then(|| format!("{query}&rows={ROWS_MAX}"))
}

/// How many rows to show.
pub(super) fn rows(asked: &str) -> u32 {
    asked.parse::<u32>().map_or(ROWS, |rows| rows.clamp(1, ROWS_MAX))
}

/// The pairs as a URL query, without empty values. A blank is a value: an id or a source can consist of blanks, and
/// without its id an action on one delivery would be one on many.
pub(super) fn encoded(pairs: &[(&str, &str)]) -> String {
    let said = pairs.iter().filter(|(_, value)| !value.is_empty());
    said.map(|(name, value)| format!("{name}={}", text::encode(value))).collect::<Vec<_>>().join("&")
}

fn words(pairs: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
    let said = pairs.iter().filter(|(_, value)| !value.is_empty());
    let word = |name| match name {
        "id" => "record",
        "error" => "error contains",
        "detail" => "detail contains",
        "older" => "older than",
        "newer" => "newer than",
        name => name,
    };
    said.map(|(name, value)| (word(*name), (*value).to_owned())).collect()
}

/// Text that people type: surrounding blanks are ignored.
fn said(value: &str) -> Option<String> {
    Some(value.trim()).filter(|value| !value.is_empty()).map(str::to_owned)
}

/// Text that came from a record: every blank is part of it.
fn given(value: &str) -> Option<String> {
    Some(value).filter(|value| !value.is_empty()).map(str::to_owned)
}

fn duration(value: &str) -> Result<Option<Duration>, Refusal> {
    let parsed = said(value).map(|value| humantime::parse_duration(&value));
    parsed.transpose().map_err(|_| Refusal::wrong(format!("{value:?} is not a duration: write 90s, 3h or 2days")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_and_its_filter_have_the_same_conditions() {
        let query = DeliveryQuery {
            handler: " mail ".to_owned(),
            message: "a b/&=\u{202e}".to_owned(),
            older: "3h".to_owned(),
            ..DeliveryQuery::default()
        };
        let filter = query.filter().unwrap();
        assert_eq!(
            (filter.handler_key.as_deref(), filter.message_id.as_deref()),
            (Some("mail"), Some("a b/&=\u{202e}"))
        );
        assert_eq!(filter.older_than, Some(Duration::from_secs(10_800)));
        assert_eq!(query.encoded(), "handler=mail&message=a%20b%2F%26%3D%E2%80%AE&older=3h");
        assert!(DeliveryQuery { newer: "soon".to_owned(), ..query }.filter().is_err());
        assert!(DeliveryQuery { state: "lost".to_owned(), ..DeliveryQuery::default() }.state().is_err());
        assert!(!DeliveryQuery::default().is_said());
    }

    #[test]
    fn an_id_of_blanks_is_an_id_and_typed_blanks_are_nothing() {
        let query = DeliveryQuery {
            message: " ".to_owned(),
            source: "\t".to_owned(),
            error: "  ".to_owned(),
            ..DeliveryQuery::default()
        };
        let filter = query.filter().unwrap();
        assert_eq!((filter.message_id.as_deref(), filter.source.as_deref()), (Some(" "), Some("\t")));
        assert_eq!(filter.error, None);
        assert_eq!(query.encoded(), "message=%20&source=%09");
        assert_eq!(query.words(), [("message", " ".to_owned()), ("source", "\t".to_owned())]);
        assert_eq!(encoded(&[("message", " "), ("source", "")]), "message=%20");
    }

    #[test]
    fn rows_have_a_bound() {
        assert_eq!([rows(""), rows("7"), rows("0"), rows("9999999")], [ROWS, 7, 1, ROWS_MAX]);
    }
}
