//! Timestamps for serde: written as RFC 3339, read from RFC 3339 or from the stores' form (microseconds since 1970).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serializer, de};

pub(crate) fn serialize<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_rfc3339_micros(*time))
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SystemTime, D::Error> {
    Moment::deserialize(deserializer)?.read()
}

/// A timestamp in either form.
#[derive(Deserialize)]
#[serde(untagged)]
enum Moment {
    Micros(i64),
    Text(String),
}

impl Moment {
    fn read<E: de::Error>(self) -> Result<SystemTime, E> {
        match self {
            Self::Micros(micros) => Ok(from_micros(micros)),
            Self::Text(text) => {
                humantime::parse_rfc3339(&text).map_err(|error| E::custom(format!("{text:?}: {error}")))
            }
        }
    }
}

/// A time before 1970 becomes 1970. Stores do not write one.
fn from_micros(micros: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(u64::try_from(micros).unwrap_or_default())
}

/// The same for an optional timestamp.
pub(crate) mod option {
    use super::{Deserialize, Deserializer, Moment, Serializer, SystemTime};

    pub(crate) fn serialize<S: Serializer>(time: &Option<SystemTime>, serializer: S) -> Result<S::Ok, S::Error> {
        match time {
            Some(time) => super::serialize(time, serializer),
            None => serializer.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SystemTime>, D::Error> {
        Option::<Moment>::deserialize(deserializer)?.map(Moment::read).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Serialize;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Row {
        #[serde(with = "super")]
        at: SystemTime,
        #[serde(with = "super::option")]
        maybe: Option<SystemTime>,
    }

    #[test]
    fn written_values_are_read_back() {
        let at = UNIX_EPOCH + Duration::from_micros(1_700_000_000_123_456);
        for maybe in [None, Some(at)] {
            let row = Row { at, maybe };
            let text = serde_json::to_string(&row).unwrap();
            assert_eq!(serde_json::from_str::<Row>(&text).unwrap(), row, "{text}");
        }
        let of_a_store = r#"{"at": 1700000000123456, "maybe": 1700000000123456}"#;
        assert_eq!(serde_json::from_str::<Row>(of_a_store).unwrap(), Row { at, maybe: Some(at) });
        assert!(serde_json::from_str::<Row>(r#"{"at": "yesterday", "maybe": null}"#).is_err());
    }
}
