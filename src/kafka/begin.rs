//! Where reading of a new topic begins, as configured for each topic.

use std::fmt;
use std::time::SystemTime;

use super::Kafka;

/// Where the inbox begins to read a topic that its ledger does not know yet. [`Kafka::begin`] takes it.
///
/// It is used once. The offsets are written to the ledger before the first record is read, and from then on the ledger
/// decides: a crash in between, a restart or another value here changes nothing.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use wharf::kafka::{Begin, Kafka};
///
/// let yesterday = SystemTime::now() - Duration::from_secs(86_400);
/// let kafka = Kafka::new("broker-1:9092", "shop").begin("orders", Begin::At(yesterday));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Begin {
    /// At the committed offset of the consumer group, so that an inbox takes over from another consumer of the group. A
    /// partition without a committed offset begins at its earliest record. This is the default.
    #[default]
    Group,
    /// At the earliest record that Kafka has; the committed offset of the group is ignored.
    Earliest,
    /// At the end: records that are in the topic when the inbox first reads it are skipped. Records of a transaction
    /// that is open at that time are read when it commits.
    Latest,
    /// At the first record with this timestamp or a later one; at the end if there is none yet. Kafka compares the
    /// timestamps of records, which producers set unless the topic has `message.timestamp.type=LogAppendTime`.
    At(SystemTime),
}

impl fmt::Display for Begin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Group => f.write_str("group"),
            Self::Earliest => f.write_str("earliest"),
            Self::Latest => f.write_str("latest"),
            Self::At(time) => match time.duration_since(SystemTime::UNIX_EPOCH) {
                // RFC 3339 has years up to 9999, and times before 1970 cannot be formatted.
                Ok(since) if since.as_secs() < 253_402_300_800 => {
                    write!(f, "{}", humantime::format_rfc3339_millis(*time))
                }
                Ok(_) | Err(_) => write!(f, "{} ms", millis(*time)),
            },
        }
    }
}

/// Milliseconds since 1970, as Kafka's requests need them. A time before 1970 becomes 0, which is before every record.
pub(super) fn millis(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// The configuration of [`Begin`] for all topics.
#[derive(Debug, Clone, Default)]
pub(crate) struct Begins {
    /// For topics that are not in `topics`.
    default: Begin,
    topics: Vec<(String, Begin)>,
}

impl Begins {
    /// The configuration of a topic. If it is configured twice, the last value counts.
    pub(super) fn of(&self, topic: &str) -> Begin {
        self.topics.iter().rev().find(|(name, _)| name == topic).map_or(self.default, |(_, begin)| *begin)
    }

    /// Configured topics without a subscription. They are refused: a misspelt name would make a topic begin elsewhere
    /// than intended.
    pub(super) fn unknown(&self, is_subscribed: impl Fn(&str) -> bool) -> Vec<&str> {
        self.topics.iter().map(|(name, _)| name.as_str()).filter(|name| !is_subscribed(name)).collect()
    }
}

impl Kafka {
    /// Sets where the inbox begins to read this topic if the ledger has none of its partitions. Default:
    /// [`Begin::Group`].
    ///
    /// ```
    /// use wharf::kafka::{Begin, Kafka};
    /// let kafka = Kafka::new("broker-1:9092", "shop")
    ///     .begin_all(Begin::Earliest)
    ///     .begin("clicks", Begin::Latest);
    /// ```
    ///
    /// [`Begin::Latest`] and [`Begin::At`] are resolved for all partitions of the topic at once, so every partition
    /// must have a leader. A partition that is added later begins at its earliest record, because all of its records
    /// are newer.
    ///
    /// If an inbox has committed offsets of the topic for this group and the ledger has none, the database has lost its
    /// ledger. Then everything that Kafka has is read again, and this option is ignored.
    ///
    /// The start of the inbox refuses a topic that no handler subscribes to.
    pub fn begin(mut self, topic: impl Into<String>, begin: Begin) -> Self {
        self.begins.topics.push((topic.into(), begin));
        self
    }

    /// Like [`Kafka::begin`], for all topics without a value of their own. Default: [`Begin::Group`].
    ///
    /// ```
    /// use wharf::kafka::{Begin, Kafka};
    ///
    /// let kafka = Kafka::new("broker-1:9092", "shop").begin_all(Begin::Latest);
    /// ```
    pub fn begin_all(mut self, begin: Begin) -> Self {
        self.begins.default = begin;
        self
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_last_word_on_a_topic_counts_and_the_default_is_for_the_others() {
        let kafka = Kafka::new("b", "g").begin("a", Begin::Latest).begin("a", Begin::Earliest);
        assert_eq!((kafka.begins.of("a"), kafka.begins.of("b")), (Begin::Earliest, Begin::Group));
        assert_eq!(kafka.begin_all(Begin::Latest).begins.of("b"), Begin::Latest);
    }

    #[test]
    fn any_time_can_be_asked_for_and_shown() {
        let past = SystemTime::UNIX_EPOCH - Duration::from_secs(1);
        let far = SystemTime::UNIX_EPOCH + Duration::from_secs(300_000_000_000);
        assert_eq!((millis(past), millis(far)), (0, 300_000_000_000_000));
        assert_eq!(Begin::At(SystemTime::UNIX_EPOCH).to_string(), "1970-01-01T00:00:00.000Z");
        assert_eq!(
            (Begin::At(past).to_string(), Begin::At(far).to_string()),
            ("0 ms".into(), "300000000000000 ms".into())
        );
    }
}
