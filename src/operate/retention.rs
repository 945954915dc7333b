//! How long finished work is kept. A plain value; its users call `check`. `purge.rs` does the purging.

use std::time::Duration;

use crate::handler::HandlerKey;
use crate::types::{Error, Result};

/// The longest period. Timestamps can be shifted by it without overflow.
const PERIOD_MAX: Duration = Duration::from_secs(3_650 * 86_400);
/// With more rows in one transaction, statements that wait for one of the rows would wait too long.
const BATCH_ROWS_MAX: usize = 10_000;

/// How long finished messages are kept, and their identities after them.
///
/// A message is purged together with its deliveries when **every** delivery is done or discarded, each for longer than
/// the period of its handler. As long as one is pending, running or poisoned, all of them stay. Poisoned deliveries and
/// quarantined records are purged only where an expiry for them is set.
///
/// The cost of a purge depends on the number of purged messages, not on those that stay: the database records which
/// messages were examined, and when those that stayed can be purged at the earliest.
///
/// Retention is also the deduplication window: a record that arrives again after its message was purged is a new
/// message, and its handlers run again, unless its identity is kept ([`Retention::keep_identities`]). It applies to the
/// whole database: services that share an inbox must use the same retention.
///
/// ```
/// use std::time::Duration;
/// use wharf::Retention;
///
/// const DAY: Duration = Duration::from_secs(86_400);
/// let retention = Retention::after(7 * DAY).for_handler("audit.trail", 90 * DAY).keep_identities(30 * DAY);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "pass this retention to `InboxBuilder::retention` or `Store::purge`"]
pub struct Retention {
    /// For handlers without a period of their own.
    pub(crate) period: Duration,
    /// By handler key. Keys are resolved when a purge begins.
    pub(crate) of_handlers: Vec<(String, Duration)>,
    /// After the purge of their messages; `None`: identities are not kept.
    pub(crate) keep_identities: Option<Duration>,
    /// `None`: poisoned deliveries, and so their messages, are never purged.
    pub(crate) expire_poisoned: Option<Duration>,
    /// `None`: quarantined records are never purged.
    pub(crate) expire_quarantined: Option<Duration>,
    /// How often a running inbox purges.
    pub(crate) interval: Duration,
    /// The maximum of messages in one transaction.
    pub(crate) batch_rows: usize,
}

impl Retention {
    /// Purges messages that have been finished for this long, by the database's clock.
    ///
    /// ```
    /// # use wharf::{InboxBuilder, Postgres, Retention};
    /// # const DAY: std::time::Duration = std::time::Duration::from_secs(86_400);
    /// # fn example(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
    /// inbox.retention(Retention::after(7 * DAY))
    /// # }
    /// ```
    pub fn after(period: Duration) -> Self {
        Self {
            period,
            of_handlers: Vec::new(),
            keep_identities: None,
            expire_poisoned: None,
            expire_quarantined: None,
            interval: Duration::from_secs(10 * 60),
            batch_rows: 1_000,
        }
    }

    /// Sets another period for the deliveries of one handler, named by its key or a former one. A message stays until
    /// the longest period of its handlers is over. Default: the period of [`Retention::after`].
    ///
    /// ```
    /// # use wharf::Retention;
    /// # const DAY: std::time::Duration = std::time::Duration::from_secs(86_400);
    /// let retention = Retention::after(7 * DAY).for_handler("audit.trail", 90 * DAY);
    /// ```
    pub fn for_handler(mut self, key: impl Into<String>, period: Duration) -> Self {
        self.of_handlers.push((key.into(), period));
        self
    }

    /// Keeps the identity of a purged message for this long after its purge (56 bytes and two index entries each), so
    /// that a late redelivery is still recognized as a duplicate. The payload is not kept, so the same identity with
    /// another payload is a duplicate too. Default: not kept. Choose at least the topic's retention minus the period.
    ///
    /// ```
    /// # use wharf::Retention;
    /// # const DAY: std::time::Duration = std::time::Duration::from_secs(86_400);
    /// // Kafka keeps records for 30 days, so a reset of the group's offset can redeliver them that late.
    /// let retention = Retention::after(2 * DAY).keep_identities(28 * DAY);
    /// ```
    pub fn keep_identities(mut self, period: Duration) -> Self {
        self.keep_identities = Some(period);
        self
    }

    /// Treats a delivery that has been poisoned for this long as finished: it is purged with its message and cannot be
    /// replayed any more. Default: never; poisoned deliveries wait for a person. Set it where nobody reviews old ones.
    ///
    /// ```
    /// # use wharf::Retention;
    /// # const DAY: std::time::Duration = std::time::Duration::from_secs(86_400);
    /// let retention = Retention::after(7 * DAY).expire_poisoned(90 * DAY).expire_quarantined(90 * DAY);
    /// ```
    pub fn expire_poisoned(mut self, period: Duration) -> Self {
        self.expire_poisoned = Some(period);
        self
    }

    /// Deletes records that have been in quarantine for this long, except those whose replay is requested. Default:
    /// never; quarantined records wait for a person. Set it where nobody reviews old ones.
    ///
    /// ```
    /// # use wharf::Retention;
    /// # const DAY: std::time::Duration = std::time::Duration::from_secs(86_400);
    /// let retention = Retention::after(7 * DAY).expire_quarantined(90 * DAY);
    /// ```
    pub fn expire_quarantined(mut self, period: Duration) -> Self {
        self.expire_quarantined = Some(period);
        self
    }

    /// Sets how often a running inbox purges, with jitter. Default: 10 minutes, so that each purge is small and vacuum
    /// keeps up.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use wharf::Retention;
    /// # const DAY: std::time::Duration = std::time::Duration::from_secs(86_400);
    /// let retention = Retention::after(7 * DAY).every(Duration::from_secs(3_600));
    /// ```
    pub fn every(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Sets how many messages one transaction examines. Default: 1,000, which takes tens of milliseconds. When the
    /// database is slow, steps are made smaller automatically.
    ///
    /// ```
    /// # use wharf::Retention;
    /// # const DAY: std::time::Duration = std::time::Duration::from_secs(86_400);
    /// let retention = Retention::after(7 * DAY).batch_rows(200); // shorter locks
    /// ```
    pub fn batch_rows(mut self, rows: usize) -> Self {
        self.batch_rows = rows;
        self
    }

    /// The minimum time for which an identity is known. Compared with the retention of topics, to warn about records
    /// that would run again.
    #[cfg(feature = "kafka")]
    pub(crate) fn window(&self) -> Duration {
        let own = self.of_handlers.iter().map(|(_, period)| *period).chain(self.expire_poisoned);
        let shortest = own.fold(self.period, Duration::min);
        shortest + self.keep_identities.unwrap_or_default()
    }

    /// Returns every invalid option.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut refuse = |is_wrong: bool, problem: String| {
            if is_wrong {
                problems.push(problem);
            }
        };
        refuse(self.period > PERIOD_MAX, "the retention must be at most 3650days".to_owned());
        for (at, (key, period)) in self.of_handlers.iter().enumerate() {
            if let Err(error) = HandlerKey::parse(key.clone()) {
                refuse(true, format!("the retention of a handler: {error}"));
            }
            refuse(*period > PERIOD_MAX, format!("the retention of {key} must be at most 3650days"));
            let is_repeated = self.of_handlers[..at].iter().any(|(other, _)| other == key);
            refuse(is_repeated, format!("the retention of {key} is given twice"));
        }
        let (poisoned, quarantined) = ("poisoned deliveries", "quarantined records");
        for (what, expiry) in [(poisoned, self.expire_poisoned), (quarantined, self.expire_quarantined)] {
            refuse(expiry > Some(PERIOD_MAX), format!("the expiry of {what} must be at most 3650days"));
        }
        let keep = self.keep_identities.unwrap_or(PERIOD_MAX);
        let keep_is_wrong = keep < Duration::from_secs(1) || keep > PERIOD_MAX;
        refuse(keep_is_wrong, "the period for which identities are kept must be 1s to 3650days".to_owned());
        let is_wrong = self.interval < Duration::from_secs(1) || self.interval > crate::types::DURATION_MAX;
        refuse(is_wrong, "the interval of retention must be 1s to 365days".to_owned());
        let is_wrong = !(1..=BATCH_ROWS_MAX).contains(&self.batch_rows);
        refuse(is_wrong, format!("`batch_rows` of retention must be 1 to {BATCH_ROWS_MAX}"));
        problems
    }

    /// All problems in one error.
    pub(crate) fn check(&self) -> Result<()> {
        match self.problems() {
            problems if problems.is_empty() => Ok(()),
            problems => Err(Error::configuration(format!("cannot purge: {}", problems.join("; ")))),
        }
    }
}

impl From<Duration> for Retention {
    fn from(period: Duration) -> Self {
        Self::after(period)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    #[test]
    fn all_problems_are_named_at_once() {
        assert_eq!(Retention::from(DAY).problems(), Vec::<String>::new());
        let wrong = Retention::after(4_000 * DAY)
            .for_handler("no spaces", DAY)
            .for_handler("stock", DAY)
            .for_handler("stock", 4_000 * DAY)
            .keep_identities(Duration::ZERO)
            .every(Duration::ZERO)
            .batch_rows(0);
        let text = wrong.check().unwrap_err().to_string();
        for part in [
            "at most 3650days",
            "no spaces",
            "stock is given twice",
            "stock must be at most",
            "identities are kept must be 1s",
            "the interval of retention must be 1s",
            "1 to 10000",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[cfg(feature = "kafka")]
    #[test]
    fn the_deduplication_window_is_the_shortest_period_plus_that_of_identities() {
        let retention = Retention::after(7 * DAY).for_handler("a", DAY).for_handler("b", 90 * DAY);
        assert_eq!(retention.keep_identities(30 * DAY).window(), 31 * DAY);
    }
}
