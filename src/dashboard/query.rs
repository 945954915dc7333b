//! Filters as they stand in URLs and forms, and as the operator takes them.

use std::time::Duration;

use serde::Deserialize;

use super::refusal::Refusal;
use super::text;
use crate::types::{DeliveryFilter, QuarantineFilter, State};

/// Rows that a list shows, unless more are asked for.
pub(super) const ROWS: u32 = 50;
/// Rows that a list shows at the most.
pub(super) const ROWS_MAX: u32 = 1_000;

/// Which deliveries are meant. Empty is not said.
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
        match self.state.as_str() {
            "" => Ok(None),
            name => match states.into_iter().find(|state| state.as_str() == name) {
                Some(state) => Ok(Some(state)),
                None => Err(Refusal::wrong(format!("there is no state {name:?}"))),
            },
        }
    }

    /// As the query of a URL, without state and rows.
    pub(super) fn encoded(&self) -> String {
        encoded(&[
            ("handler", &self.handler),
            ("message", &self.message),
            ("source", &self.source),
            ("topic", &self.topic),
            ("reason", &self.reason),
            ("error", &self.error),
            ("fingerprint", &self.fingerprint),
            ("older", &self.older),
            ("newer", &self.newer),
        ])
    }

    pub(super) fn is_said(&self) -> bool {
        !self.encoded().is_empty() || !self.state.is_empty()
    }

    /// In words, for a heading.
    pub(super) fn words(&self) -> Vec<(&'static str, String)> {
        words(&[
            ("handler", &self.handler),
            ("message", &self.message),
            ("source", &self.source),
            ("topic", &self.topic),
            ("reason", &self.reason),
            ("error has", &self.error),
            ("fingerprint", &self.fingerprint),
            ("longer ago than", &self.older),
            ("no longer ago than", &self.newer),
        ])
    }
}

/// Which quarantined records are meant. Empty is not said.
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
        let id = id.transpose().map_err(|_| Refusal::wrong(format!("{:?} is no number of a record", self.id)))?;
        Ok(QuarantineFilter {
            id,
            topic: said(&self.topic),
            reason: said(&self.reason),
            detail: said(&self.detail),
            older_than: duration(&self.older)?,
            newer_than: duration(&self.newer)?,
            all: false,
        })
    }

    pub(super) fn encoded(&self) -> String {
        encoded(&[
            ("id", &self.id),
            ("topic", &self.topic),
            ("reason", &self.reason),
            ("detail", &self.detail),
            ("older", &self.older),
            ("newer", &self.newer),
        ])
    }

    pub(super) fn words(&self) -> Vec<(&'static str, String)> {
        words(&[
            ("record", &self.id),
            ("topic", &self.topic),
            ("reason", &self.reason),
            ("detail has", &self.detail),
            ("longer ago than", &self.older),
            ("no longer ago than", &self.newer),
        ])
    }
}

/// How many rows are asked for.
pub(super) fn rows(asked: &str) -> u32 {
    asked.parse::<u32>().map_or(ROWS, |rows| rows.clamp(1, ROWS_MAX))
}

/// Pairs of a query, without those that say nothing.
pub(super) fn encoded(pairs: &[(&str, &str)]) -> String {
    let said = pairs.iter().filter(|(_, value)| !value.trim().is_empty());
    said.map(|(name, value)| format!("{name}={}", text::encode(value))).collect::<Vec<_>>().join("&")
}

fn words(pairs: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
    let said = pairs.iter().filter(|(_, value)| !value.trim().is_empty());
    said.map(|(name, value)| (*name, (*value).to_owned())).collect()
}

/// What people type: blanks around it mean nothing.
fn said(value: &str) -> Option<String> {
    Some(value.trim()).filter(|value| !value.is_empty()).map(str::to_owned)
}

/// What came from a record: any blank is part of it.
fn given(value: &str) -> Option<String> {
    Some(value).filter(|value| !value.trim().is_empty()).map(str::to_owned)
}

fn duration(value: &str) -> Result<Option<Duration>, Refusal> {
    let parsed = said(value).map(|value| humantime::parse_duration(&value));
    parsed.transpose().map_err(|_| Refusal::wrong(format!("{value:?} is no time: write it like 90s, 3h or 2days")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_says_what_its_filter_says() {
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
        assert_eq!(query.encoded(), "handler=%20mail%20&message=a%20b%2F%26%3D%E2%80%AE&older=3h");
        assert!(DeliveryQuery { newer: "soon".to_owned(), ..query }.filter().is_err());
        assert!(DeliveryQuery { state: "lost".to_owned(), ..DeliveryQuery::default() }.state().is_err());
        assert!(!DeliveryQuery::default().is_said());
    }

    #[test]
    fn rows_have_a_bound() {
        assert_eq!([rows(""), rows("7"), rows("0"), rows("9999999")], [ROWS, 7, 1, ROWS_MAX]);
    }
}
