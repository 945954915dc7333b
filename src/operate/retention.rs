//! How long finished work is kept. A value, checked by whoever is given it; the purging itself is `purge.rs`.

use std::time::Duration;

use crate::handler::HandlerKey;
use crate::types::{Error, Result};

/// No period is longer: stamps can be moved by it without overflow.
const PERIOD_MAX: Duration = Duration::from_secs(3_650 * 86_400);
/// More rows in one transaction would hold up whoever waits for one of them.
const BATCH_ROWS_MAX: usize = 10_000;

/// How long finished messages are kept, and their identities after them.
///
/// A message is purged when **every** delivery of it is done or discarded, each for longer than the period of its handler; the message
/// and its deliveries go together. As long as one is pending, running or poisoned, all of them stay. Poisoned deliveries and quarantined records are
/// purged only where an expiry for them is set.
///
/// A purge costs what goes, not what stays: it remembers which messages it has looked at and when those that were kept can go at the earliest.
///
/// Retention is the window of deduplication: a record that comes again after its message was purged is a new message, and its handlers
/// run again, unless its identity is kept ([`Retention::keep_identities`]). It is the database's: where several services share an
/// inbox, give them all the same.
///
/// ```
/// use std::time::Duration;
/// use wharf::Retention;
/// const DAY: Duration = Duration::from_secs(86_400);
/// let retention = Retention::after(7 * DAY).for_handler("audit.trail", 90 * DAY).keep_identities(30 * DAY);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "nothing is purged until an inbox or a store is given this"]
pub struct Retention {
    pub(crate) period: Duration,
    pub(crate) of_handlers: Vec<(String, Duration)>,
    pub(crate) keep_identities: Option<Duration>,
    pub(crate) expire_poisoned: Option<Duration>,
    pub(crate) expire_quarantined: Option<Duration>,
    pub(crate) interval: Duration,
    pub(crate) batch_rows: usize,
}

impl Retention {
    /// Purges what has been finished for this long, by the database's clock.
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

    /// Another period for the deliveries of one handler, by its key or a former one. A message stays until the longest period of its
    /// handlers is over. Default: that of [`Retention::after`].
    pub fn for_handler(mut self, key: impl Into<String>, period: Duration) -> Self {
        self.of_handlers.push((key.into(), period));
        self
    }

    /// Keeps the identity of a purged message for this long from its purge on, 56 bytes and two index entries of it, so that a late
    /// redelivery is still a duplicate. What became of the payload is not known by then: the same identity with another payload is a
    /// duplicate too. Default: not kept. Choose at least what the topic's own retention is beyond the period.
    pub fn keep_identities(mut self, period: Duration) -> Self {
        self.keep_identities = Some(period);
        self
    }

    /// Counts a delivery that has been poisoned for this long as finished: it goes with its message, and nobody can replay it any more. Default: never;
    /// poisoned deliveries wait for a person. Set it where nobody looks at old ones.
    pub fn expire_poisoned(mut self, period: Duration) -> Self {
        self.expire_poisoned = Some(period);
        self
    }

    /// Deletes records that have been in quarantine for this long, except those whose replay was asked for. Default: never; quarantined records wait for a
    /// person. Set it where nobody looks at old ones.
    pub fn expire_quarantined(mut self, period: Duration) -> Self {
        self.expire_quarantined = Some(period);
        self
    }

    /// How often a running inbox purges, jittered. Default: 10 minutes, so that there is little to do each time and vacuum keeps up.
    pub fn every(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Messages that are looked at in one transaction. Default: 1,000, which takes tens of milliseconds. Fewer when the database is
    /// slow, by itself.
    pub fn batch_rows(mut self, rows: usize) -> Self {
        self.batch_rows = rows;
        self
    }

    /// How long an identity is known at the least.
    #[cfg(feature = "kafka")]
    pub(crate) fn window(&self) -> Duration {
        let own = self.of_handlers.iter().map(|(_, period)| *period).chain(self.expire_poisoned);
        let shortest = own.fold(self.period, Duration::min);
        shortest + self.keep_identities.unwrap_or_default()
    }

    /// Every reason why this cannot work.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut refuse = |is_wrong: bool, problem: String| {
            if is_wrong {
                problems.push(problem);
            }
        };
        refuse(self.period > PERIOD_MAX, "the retention is at most 3650days".to_owned());
        for (at, (key, period)) in self.of_handlers.iter().enumerate() {
            if let Err(error) = HandlerKey::parse(key.clone()) {
                refuse(true, format!("the retention of a handler: {error}"));
            }
            refuse(*period > PERIOD_MAX, format!("the retention of {key} is at most 3650days"));
            let is_repeated = self.of_handlers[..at].iter().any(|(other, _)| other == key);
            refuse(is_repeated, format!("the retention of {key} is given twice"));
        }
        for (what, expiry) in [("poisoned", self.expire_poisoned), ("quarantined", self.expire_quarantined)] {
            refuse(expiry > Some(PERIOD_MAX), format!("the expiry of what is {what} is at most 3650days"));
        }
        let keep = self.keep_identities.unwrap_or(PERIOD_MAX);
        let keep_is_wrong = keep < Duration::from_secs(1) || keep > PERIOD_MAX;
        refuse(keep_is_wrong, "identities are kept for 1s to 3650days".to_owned());
        let is_wrong = self.interval < Duration::from_secs(1) || self.interval > crate::types::DURATION_MAX;
        refuse(is_wrong, "retention works every 1s to 365days".to_owned());
        let is_wrong = !(1..=BATCH_ROWS_MAX).contains(&self.batch_rows);
        refuse(is_wrong, format!("retention works in batches of 1 to {BATCH_ROWS_MAX} rows"));
        problems
    }

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
    fn every_problem_is_named_at_once() {
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
            "stock is at most",
            "kept for",
            "every",
            "1 to 10000",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[cfg(feature = "kafka")]
    #[test]
    fn the_window_is_the_shortest_period_and_what_identities_are_kept_for() {
        let retention = Retention::after(7 * DAY).for_handler("a", DAY).for_handler("b", 90 * DAY);
        assert_eq!(retention.keep_identities(30 * DAY).window(), 31 * DAY);
    }
}
