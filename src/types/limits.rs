//! Every bound of the engine, with its default and the reason for it.
//!
//! Nothing in Wharf waits, queues or batches without one of these. `build()` refuses values that cannot work.

use std::time::Duration;

use super::{Error, Result, setters};

/// No duration is longer: clocks can be added to it without overflow.
pub(crate) const DURATION_MAX: Duration = Duration::from_secs(365 * 86_400);
/// No queue is longer: by then it is a leak.
const QUEUE_ROWS_MAX: usize = 1_000_000;

/// The bounds an inbox works within. Each has a default and a setter:
///
/// ```
/// use std::time::Duration;
/// use wharf::Limits;
/// let limits = Limits::default().lease(Duration::from_secs(10)).crash_limit(5);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Limits {
    /// How long a claim holds without renewal: what a dead process left is run again after this. It is renewed three
    /// times within the period, so a slow handler keeps it. Default: 30 s. Shorter recovers sooner and tolerates shorter
    /// database outages before running handlers are stopped.
    pub lease: Duration,
    /// How often an idle processor looks for due work that nobody told it of (retries, other processes' messages).
    /// Default: 1 s, jittered. Under load it plays no part.
    pub poll: Duration,
    /// Process deaths in a row a delivery may be part of before it is poisoned as `crashed`. When one more would poison it, it is
    /// run alone, so that none is poisoned for another's doing. Default: 3. With 1, everything a dying process was running is.
    pub crash_limit: u32,
    /// Runs in a row that the store itself may make fail (a lost session, a serialization conflict) before the delivery is poisoned as
    /// `store trouble`. They consume no retry. The pauses between them grow from one second to five minutes, and from half of the limit on
    /// the delivery runs alone. While other deliveries fail as well and nothing succeeds, nothing is counted: then the database is in
    /// trouble, not the delivery. Default: 8, which takes two minutes.
    pub trouble_limit: u32,
    /// How long a delivery may wait for a handler key that no live processor knows before it is poisoned. Default: 1 h, so
    /// that a rolling deploy or a rollback poisons nothing; 0 poisons as soon as it is noticed.
    pub unknown_key_grace: Duration,
    /// Messages in one accept statement. Default: 1,000. More buys nothing and holds memory.
    pub accept_batch_rows: usize,
    /// Bytes in one accept statement; a single larger record goes alone. Default: 4 MiB.
    pub accept_batch_bytes: usize,
    /// Batches of records from Kafka that are being written at a time, each on a connection of its own. Partitions share them; of a partition
    /// with more than a batch waiting, the next batches are sent before the first one is answered, so that a distant database costs it no
    /// round trips. From 3 on, one is kept for partitions of which nothing is being written. Default: 4. More pays off with more processors
    /// for the database than that, and takes as many connections of its pool; 1 writes one batch after the other.
    pub accept_batches: usize,
    /// Records waiting to be accepted by [`Inbox::accept`](crate::Inbox::accept) before callers wait; likewise records read from Kafka
    /// before its partitions are paused. One partition of Kafka has at most half of it. Default: 10,000.
    pub accept_queue_rows: usize,
    /// Bytes of records waiting to be accepted before callers wait, or Kafka's partitions are paused; a single larger record waits alone. One
    /// partition of Kafka has at most half of it. Default: 64 MiB.
    pub accept_queue_bytes: usize,
    /// How long [`Inbox::accept`](crate::Inbox::accept) goes on trying while the database is away before it returns a
    /// transient error. Default: 30 s.
    pub accept_patience: Duration,
    /// The largest payload that becomes a message; larger ones are quarantined whole. Default: 32 MiB.
    pub payload_bytes_max: usize,
    /// The largest sum of header names and values that becomes a message. Default: 4 MiB.
    pub headers_bytes_max: usize,
    /// Records of one topic that may be quarantined in a row before nothing more is taken in from Kafka, so that a wrong identity policy does
    /// not move a whole topic into the quarantine. It goes on when a person has replayed or discarded so many of the topic's quarantined
    /// records that fewer are left, or when the process is started again. Default: 1,000; `None` never stops.
    pub quarantine_run_max: Option<usize>,
    /// Deliveries of one handler claimed in one statement, however many could start. Default: 500. The next claim follows at once.
    pub claim_batch_rows: usize,
    /// How much work of a handler is claimed before it has a slot, as the time in which the handler works it off, so that a fast handler does
    /// not wait for its claims. It waits in memory; its claims are kept, and it is given back when it cannot start soon. Nothing is
    /// claimed ahead for a handler that takes longer, or of which nothing is known yet. Default: 250 ms; 0 claims nothing ahead. Nor is anything claimed
    /// ahead with a `crash_limit` below 3: a crash is counted for what waits, too.
    pub claim_ahead: Duration,
    /// Deliveries of one handler that may wait for a slot. Default: 2,000.
    pub claim_ahead_rows: usize,
    /// Bytes of messages of one handler that may wait for a slot, by the mean size of its messages. Default: 16 MiB.
    pub claim_ahead_bytes: usize,
    /// Outcomes written in one statement. Default: 500.
    pub settle_batch_rows: usize,
    /// Outcomes waiting to be written before no more work is claimed. Default: 10,000.
    pub settle_queue_rows: usize,
    /// Characters of a handler's error that are kept, in `last_error` and for each failed attempt. Default: 2,000.
    pub error_chars_max: usize,
    /// Failed attempts that are kept of one delivery in `inbox_attempt`: the first, and those among the newest. Default: 20.
    pub attempt_rows_max: usize,
    /// The longest pause between two tries while the database is away. Default: 5 s, jittered.
    pub backoff_max: Duration,
    /// Open deliveries of the inbox's handlers from which on no more records are read from Kafka, until there are fewer. Looked at every
    /// second. Default: none.
    pub backlog_rows_max: Option<usize>,
    /// Age of the oldest open delivery beyond which no more records are read from Kafka, until it is done. Looked at every second.
    /// Default: none.
    pub backlog_age_max: Option<Duration>,
    /// How long handlers may run without any of them returning before [`Running::health`](crate::Running::health) reports that nothing moves.
    /// Default: 5 min. Set it above the longest run that is normal for the service.
    pub no_progress_after: Duration,
    /// How long a delivery that has to run alone waits for the others of its process to end, and they for it, before they
    /// run side by side after all. Default: 30 s.
    pub solo_wait_max: Duration,
}

setters!(Limits {
    lease: Duration,
    poll: Duration,
    crash_limit: u32,
    trouble_limit: u32,
    unknown_key_grace: Duration,
    accept_batch_rows: usize,
    accept_batch_bytes: usize,
    accept_batches: usize,
    accept_queue_rows: usize,
    accept_queue_bytes: usize,
    accept_patience: Duration,
    payload_bytes_max: usize,
    headers_bytes_max: usize,
    claim_batch_rows: usize,
    claim_ahead: Duration,
    claim_ahead_rows: usize,
    claim_ahead_bytes: usize,
    settle_batch_rows: usize,
    settle_queue_rows: usize,
    error_chars_max: usize,
    attempt_rows_max: usize,
    backoff_max: Duration,
    no_progress_after: Duration,
    solo_wait_max: Duration,
} optional {
    quarantine_run_max: usize,
    backlog_rows_max: usize,
    backlog_age_max: Duration,
});

impl Default for Limits {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(30),
            poll: Duration::from_secs(1),
            crash_limit: 3,
            trouble_limit: 8,
            unknown_key_grace: Duration::from_secs(60 * 60),
            accept_batch_rows: 1_000,
            accept_batch_bytes: 4 << 20,
            accept_batches: 4,
            accept_queue_rows: 10_000,
            accept_queue_bytes: 64 << 20,
            accept_patience: Duration::from_secs(30),
            payload_bytes_max: 32 << 20,
            headers_bytes_max: 4 << 20,
            quarantine_run_max: Some(1_000),
            claim_batch_rows: 500,
            claim_ahead: Duration::from_millis(250),
            claim_ahead_rows: 2_000,
            claim_ahead_bytes: 16 << 20,
            settle_batch_rows: 500,
            settle_queue_rows: 10_000,
            error_chars_max: 2_000,
            attempt_rows_max: 20,
            backoff_max: Duration::from_secs(5),
            backlog_rows_max: None,
            backlog_age_max: None,
            no_progress_after: Duration::from_secs(5 * 60),
            solo_wait_max: Duration::from_secs(30),
        }
    }
}

impl Limits {
    /// Sets one bound by its name from text, for configuration files and command lines. Durations are humantime: `30s`, `1h`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let mut limits = wharf::Limits::default();
    /// limits.set("lease", "90s")?;
    /// assert_eq!(limits.lease, Duration::from_secs(90));
    /// # Ok::<(), wharf::Error>(())
    /// ```
    ///
    /// # Errors
    /// When there is no such bound or the text is not a value for it.
    pub fn set(&mut self, name: &str, text: &str) -> Result<()> {
        match name {
            "lease" => self.lease = duration(name, text)?,
            "poll" => self.poll = duration(name, text)?,
            "crash_limit" => self.crash_limit = number(name, text)?,
            "trouble_limit" => self.trouble_limit = number(name, text)?,
            "unknown_key_grace" => self.unknown_key_grace = duration(name, text)?,
            "accept_batch_rows" => self.accept_batch_rows = number(name, text)?,
            "accept_batch_bytes" => self.accept_batch_bytes = number(name, text)?,
            "accept_batches" => self.accept_batches = number(name, text)?,
            "accept_queue_rows" => self.accept_queue_rows = number(name, text)?,
            "accept_queue_bytes" => self.accept_queue_bytes = number(name, text)?,
            "accept_patience" => self.accept_patience = duration(name, text)?,
            "payload_bytes_max" => self.payload_bytes_max = number(name, text)?,
            "headers_bytes_max" => self.headers_bytes_max = number(name, text)?,
            "quarantine_run_max" => self.quarantine_run_max = Some(number(name, text)?),
            "claim_batch_rows" => self.claim_batch_rows = number(name, text)?,
            "claim_ahead" => self.claim_ahead = duration(name, text)?,
            "claim_ahead_rows" => self.claim_ahead_rows = number(name, text)?,
            "claim_ahead_bytes" => self.claim_ahead_bytes = number(name, text)?,
            "settle_batch_rows" => self.settle_batch_rows = number(name, text)?,
            "settle_queue_rows" => self.settle_queue_rows = number(name, text)?,
            "error_chars_max" => self.error_chars_max = number(name, text)?,
            "attempt_rows_max" => self.attempt_rows_max = number(name, text)?,
            "backoff_max" => self.backoff_max = duration(name, text)?,
            "backlog_rows_max" => self.backlog_rows_max = Some(number(name, text)?),
            "backlog_age_max" => self.backlog_age_max = Some(duration(name, text)?),
            "no_progress_after" => self.no_progress_after = duration(name, text)?,
            "solo_wait_max" => self.solo_wait_max = duration(name, text)?,
            _ => return Err(Error::configuration(format!("there is no limit named {name:?}"))),
        }
        Ok(())
    }

    /// Crashes from which on a delivery has to run alone: one below the limit.
    pub(crate) fn solo_from(&self) -> i32 {
        i32::try_from(self.crash_limit).unwrap_or(i32::MAX).saturating_sub(1).max(1)
    }

    /// Crashes from which on a delivery does not wait for a slot: it starts at once or is given back. So the next crash, which makes a
    /// suspect of it, is counted for no more than were running.
    pub(crate) fn starts_at_once_from(&self) -> i32 {
        self.solo_from() - 1
    }

    /// Troubles from which on a delivery has to run alone: half of the limit.
    pub(crate) fn solo_from_troubles(&self) -> i32 {
        i32::try_from(self.trouble_limit / 2).unwrap_or(i32::MAX).max(1)
    }

    /// Every reason why these limits cannot work.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut refuse = |is_wrong: bool, problem: &str| {
            if is_wrong {
                problems.push(problem.to_owned());
            }
        };
        refuse(self.lease < Duration::from_millis(100), "lease is at least 100ms");
        refuse(
            self.lease > Duration::from_secs(86_400),
            "lease is at most 1day: it is how long a dead process's work waits",
        );
        refuse(self.poll < Duration::from_millis(1), "poll is at least 1ms");
        refuse(self.crash_limit == 0, "crash_limit is at least 1");
        refuse(self.trouble_limit == 0, "trouble_limit is at least 1");
        refuse(!(1..=10_000).contains(&self.accept_batch_rows), "accept_batch_rows is 1 to 10000");
        refuse(self.accept_batch_bytes == 0, "accept_batch_bytes is at least 1");
        refuse(!(1..=64).contains(&self.accept_batches), "accept_batches is 1 to 64");
        refuse(self.accept_queue_rows == 0, "accept_queue_rows is at least 1");
        refuse(self.accept_queue_bytes == 0, "accept_queue_bytes is at least 1");
        refuse(self.accept_queue_bytes > 1 << 40, "accept_queue_bytes is at most 1 TiB");
        // 256 MiB keeps a statement far below what the protocol and a bytea can carry (1 GiB), doubled by encoding.
        refuse(self.payload_bytes_max > 256 << 20, "payload_bytes_max is at most 268435456");
        refuse(self.headers_bytes_max > 256 << 20, "headers_bytes_max is at most 268435456");
        refuse(!(1..=10_000).contains(&self.claim_batch_rows), "claim_batch_rows is 1 to 10000");
        refuse(!(1..=500).contains(&self.settle_batch_rows), "settle_batch_rows is 1 to 500");
        refuse(self.claim_ahead > Duration::from_secs(10), "claim_ahead is at most 10s: others could do what waits");
        refuse(self.claim_ahead_rows > 100_000, "claim_ahead_rows is at most 100000");
        refuse(self.claim_ahead_bytes > 1 << 40, "claim_ahead_bytes is at most 1 TiB");
        refuse(self.settle_queue_rows == 0, "settle_queue_rows is at least 1");
        refuse(!(2..=1_000).contains(&self.attempt_rows_max), "attempt_rows_max is 2 to 1000");
        refuse(self.backoff_max.is_zero(), "backoff_max is not zero");
        refuse(self.backlog_rows_max == Some(0), "backlog_rows_max is at least 1");
        refuse(self.quarantine_run_max == Some(0), "quarantine_run_max is at least 1");
        refuse(self.accept_queue_rows > QUEUE_ROWS_MAX, "accept_queue_rows is at most 1000000");
        refuse(self.settle_queue_rows > QUEUE_ROWS_MAX, "settle_queue_rows is at most 1000000");
        let durations = [
            (self.poll, "poll is at most 365days"),
            (self.unknown_key_grace, "unknown_key_grace is at most 365days"),
            (self.accept_patience, "accept_patience is at most 365days"),
            (self.backoff_max, "backoff_max is at most 365days"),
            (self.solo_wait_max, "solo_wait_max is at most 365days"),
        ];
        for (duration, problem) in durations {
            refuse(duration > DURATION_MAX, problem);
        }
        problems
    }
}

fn duration(name: &str, text: &str) -> Result<Duration> {
    humantime::parse_duration(text).map_err(|error| {
        Error::configuration(format!("cannot set {name} to {text:?}, a duration is written like 30s or 1h 30m"))
            .with_source(error)
    })
}

fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T>
where
    T::Err: std::error::Error + Send + Sync + 'static,
{
    text.parse()
        .map_err(|error: T::Err| Error::configuration(format!("cannot set {name} to {text:?}")).with_source(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_work() {
        assert_eq!(Limits::default().problems(), Vec::<String>::new());
    }

    #[test]
    fn limits_are_set_from_text_and_refused_with_their_name() {
        let mut limits = Limits::default();
        limits.set("unknown_key_grace", "2h").unwrap();
        assert_eq!(limits.unknown_key_grace, Duration::from_secs(7200));
        assert!(limits.set("lease", "soon").unwrap_err().to_string().contains("lease"));
        assert!(limits.set("leese", "1s").unwrap_err().to_string().contains("leese"));
        limits.lease = Duration::ZERO;
        limits.crash_limit = 0;
        assert_eq!(limits.problems().len(), 2);
    }
}
