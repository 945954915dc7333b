//! The limits of the engine that a service can change, with their defaults and the reasons for them.
//!
//! They bound the queues, batches, retries and waits of accepting and processing. Fixed timeouts, such as those for
//! answers of Kafka, are constants in the files that use them. `build()` refuses invalid values.

use std::time::Duration;

use super::{Error, Result, setters};

/// The longest duration of any option. Timestamps can be shifted by it without overflow.
pub(crate) const DURATION_MAX: Duration = Duration::from_secs(365 * 86_400);
/// The longest queue that can be configured. A longer one would only hide that work makes no progress.
const QUEUE_ROWS_MAX: usize = 1_000_000;

/// The limits of an inbox. Each has a default that suits most services, and a setter.
/// [`InboxBuilder::limits`](crate::InboxBuilder::limits) takes them.
///
/// ```
/// use std::time::Duration;
/// use wharf::Limits;
///
/// let limits = Limits::default()
///     .lease(Duration::from_secs(10)) // recover from a crash sooner
///     .accept_queue_bytes(16 << 20)   // use less memory
///     .backlog_rows_max(1_000_000);   // stop reading from Kafka when handlers fall behind
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Limits {
    /// How long a claim is valid without renewal: deliveries of a crashed process run again after this time. A claim is
    /// renewed three times within it, so a slow handler keeps its claim. Default: 30 s. With a shorter lease, work
    /// resumes sooner after a crash, but running handlers are stopped sooner when the database is unavailable.
    pub lease: Duration,
    /// How often an idle process looks for due deliveries: retries, and messages that other processes accepted.
    /// Default: 1 s, with jitter. Under load it does not matter, because work wakes the process.
    pub poll: Duration,
    /// How many process crashes in a row poison a delivery that was running, as `crashed`. Before the last one the
    /// delivery runs alone, so that no other delivery is poisoned because of it. Default: 3. With 1, every delivery
    /// that was running when a process crashed is poisoned.
    pub crash_limit: u32,
    /// How many runs in a row may fail because of the database (a lost session, a serialization conflict) before the
    /// delivery is poisoned as `store error`. They consume no retry. The pauses between them grow from one second to
    /// five minutes, and after half of the limit the delivery runs alone. While other deliveries fail too and none
    /// succeeds, nothing is counted, because then the database is the cause. Default: 8, which takes two minutes.
    pub store_error_limit: u32,
    /// How long deliveries of a handler that no live process has wait before they are poisoned as `unknown key`.
    /// Default: 1 h, so that a rolling deploy or a rollback poisons nothing. With 0 they are poisoned as soon as a
    /// process notices it.
    pub unknown_key_grace: Duration,
    /// The maximum number of messages in one accept statement. Default: 1,000. More does not increase throughput and
    /// uses more memory.
    pub accept_batch_rows: usize,
    /// The maximum size of one accept statement in bytes. A larger record is sent alone. Default: 4 MiB.
    pub accept_batch_bytes: usize,
    /// How many batches of records from Kafka are written at a time, each on its own connection. All partitions share
    /// them. A partition with more than one batch waiting sends the next batches before the first one is acknowledged,
    /// so that the round trip to a distant database matters less. From 3 on, one is reserved for partitions without a
    /// batch in progress. Default: 4. Raise it if the database has more CPUs than that; each needs a connection of the
    /// pool. With 1, batches are written one after the other.
    pub accept_batches: usize,
    /// How many records may wait to be accepted before [`Inbox::accept`](crate::Inbox::accept) waits and Kafka
    /// partitions are paused. One partition may use half of it. Default: 10,000.
    pub accept_queue_rows: usize,
    /// How many bytes of records may wait to be accepted before callers wait and Kafka partitions are paused. A larger
    /// record waits alone. One partition may use half of it. Default: 64 MiB. Lower it to use less memory.
    pub accept_queue_bytes: usize,
    /// How long [`Inbox::accept`](crate::Inbox::accept) retries while the database is unavailable, before it returns a
    /// transient error. Default: 30 s. Lower it if the caller has a shorter timeout.
    pub accept_patience: Duration,
    /// The largest payload of a message. Larger records are quarantined. Default: 32 MiB.
    pub payload_bytes_max: usize,
    /// The largest sum of header names and values of a message. Larger records are quarantined. Default: 4 MiB.
    pub headers_bytes_max: usize,
    /// How many records of a topic may be quarantined in a row before intake from Kafka stops, so that a wrong identity
    /// policy does not quarantine a whole topic. Intake resumes when a person has replayed or discarded enough of the
    /// topic's quarantined records that fewer are left, or when the process is restarted. Default: 1,000; `None` never
    /// stops.
    pub quarantine_run_max: Option<usize>,
    /// How many deliveries of a handler one statement claims at most. Default: 500. The next claim follows at once.
    pub claim_batch_rows: usize,
    /// How much work of a handler is claimed before a slot is free, measured as the time in which the handler processes
    /// it, so that a fast handler does not wait for claims. It waits in memory, its claims are renewed, and it is
    /// released if it cannot start soon. Nothing is claimed ahead for handlers that have not run yet, that take longer
    /// than their concurrency times this, or with a `crash_limit` below 3 (a crash also counts for deliveries that only
    /// wait). Default: 250 ms. With 0 nothing is claimed ahead, and after a crash fewer deliveries wait for the lease.
    pub claim_ahead: Duration,
    /// How many deliveries of a handler may wait for a slot. Default: 2,000.
    pub claim_ahead_rows: usize,
    /// How many bytes of messages of a handler may wait for a slot. Default: 16 MiB. Claims are sized by the mean size
    /// of its messages, and large payloads are loaded only as long as they fit. Lower it to use less memory.
    pub claim_ahead_bytes: usize,
    /// How many outcomes one statement writes at most. Default: 500.
    pub settle_batch_rows: usize,
    /// How many outcomes may wait to be written before no more work is claimed. Default: 10,000.
    pub settle_queue_rows: usize,
    /// How many characters of a handler's error are kept, in `last_error` and for each failed attempt. Default: 2,000.
    pub error_chars_max: usize,
    /// How many failed attempts of a delivery are kept in `inbox_attempt`: attempt 1, and those of the newest
    /// `attempt_rows_max - 1` attempts, whatever became of the others. An older one stays until an attempt fails whose
    /// number is higher by a multiple of `attempt_rows_max - 1`. Default: 20.
    pub attempt_rows_max: usize,
    /// The longest pause between two tries while the database is unavailable. Default: 5 s, with jitter.
    pub backoff_max: Duration,
    /// Nothing is read from Kafka while the inbox's handlers have this many open deliveries or more. Checked every
    /// second, or less often if counting takes long. Default: none. Set it if the backlog should stay in Kafka and not
    /// in the database.
    pub backlog_rows_max: Option<usize>,
    /// Nothing is read from Kafka while the oldest open delivery is older than this. Checked like `backlog_rows_max`.
    /// Default: none.
    pub backlog_age_max: Option<Duration>,
    /// How long handlers may run without any of them returning before [`Running::health`](crate::Running::health)
    /// reports it. Default: 5 min. Set it to more than the longest normal run.
    pub no_progress_after: Duration,
    /// How long a delivery that has to run alone waits for the other runs of its process to end, and how long they wait
    /// for it. After that they run concurrently. Default: 30 s.
    pub suspect_wait_max: Duration,
}

setters!(Limits {
    lease: Duration,
    poll: Duration,
    crash_limit: u32,
    store_error_limit: u32,
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
    suspect_wait_max: Duration,
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
            store_error_limit: 8,
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
            suspect_wait_max: Duration::from_secs(30),
        }
    }
}

impl Limits {
    /// Sets a limit by its name from text, for configuration files and command lines. Durations are written like `30s`
    /// or `1h 30m`.
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
    /// When there is no such limit, or the text is not a valid value for it.
    pub fn set(&mut self, name: &str, text: &str) -> Result<()> {
        match name {
            "lease" => self.lease = duration(name, text)?,
            "poll" => self.poll = duration(name, text)?,
            "crash_limit" => self.crash_limit = number(name, text)?,
            "store_error_limit" => self.store_error_limit = number(name, text)?,
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
            "suspect_wait_max" => self.suspect_wait_max = duration(name, text)?,
            _ => return Err(Error::configuration(format!("unknown limit {name:?}"))),
        }
        Ok(())
    }

    /// The number of crashes from which on a delivery has to run alone: one below `crash_limit`, but at least 1.
    pub(crate) fn suspect_from_crashes(&self) -> i32 {
        i32::try_from(self.crash_limit).unwrap_or(i32::MAX).saturating_sub(1).max(1)
    }

    /// The number of crashes from which on a delivery does not wait for a slot: it starts at once or is released. So
    /// the next crash, which makes it a suspect, counts only for deliveries that were running.
    pub(crate) fn starts_at_once_from(&self) -> i32 {
        self.suspect_from_crashes() - 1
    }

    /// The number of database failures from which on a delivery has to run alone: half of the limit.
    pub(crate) fn suspect_from_store_errors(&self) -> i32 {
        i32::try_from(self.store_error_limit / 2).unwrap_or(i32::MAX).max(1)
    }

    /// Returns every invalid limit.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut refuse = |is_wrong: bool, problem: &str| {
            if is_wrong {
                problems.push(problem.to_owned());
            }
        };
        refuse(self.lease < Duration::from_millis(100), "lease must be at least 100ms");
        refuse(
            self.lease > Duration::from_secs(86_400),
            "lease must be at most 1day: deliveries of a crashed process wait that long",
        );
        refuse(self.poll < Duration::from_millis(1), "poll must be at least 1ms");
        refuse(self.crash_limit == 0, "crash_limit must be at least 1");
        refuse(self.store_error_limit == 0, "store_error_limit must be at least 1");
        refuse(!(1..=10_000).contains(&self.accept_batch_rows), "accept_batch_rows must be 1 to 10000");
        refuse(self.accept_batch_bytes == 0, "accept_batch_bytes must be at least 1");
        refuse(!(1..=64).contains(&self.accept_batches), "accept_batches must be 1 to 64");
        refuse(self.accept_queue_rows == 0, "accept_queue_rows must be at least 1");
        refuse(self.accept_queue_bytes == 0, "accept_queue_bytes must be at least 1");
        refuse(self.accept_queue_bytes > 1 << 40, "accept_queue_bytes must be at most 1 TiB");
        // A bytea and a protocol message can have 1 GiB, and the encoding may double the size. 256 MiB leaves room.
        refuse(self.payload_bytes_max > 256 << 20, "payload_bytes_max must be at most 268435456");
        refuse(self.headers_bytes_max > 256 << 20, "headers_bytes_max must be at most 268435456");
        refuse(!(1..=10_000).contains(&self.claim_batch_rows), "claim_batch_rows must be 1 to 10000");
        refuse(!(1..=500).contains(&self.settle_batch_rows), "settle_batch_rows must be 1 to 500");
        refuse(
            self.claim_ahead > Duration::from_secs(10),
            "claim_ahead must be at most 10s: other processes cannot run the waiting deliveries",
        );
        refuse(self.claim_ahead_rows > 100_000, "claim_ahead_rows must be at most 100000");
        refuse(self.claim_ahead_bytes > 1 << 40, "claim_ahead_bytes must be at most 1 TiB");
        refuse(self.settle_queue_rows == 0, "settle_queue_rows must be at least 1");
        refuse(!(2..=1_000).contains(&self.attempt_rows_max), "attempt_rows_max must be 2 to 1000");
        refuse(self.backoff_max.is_zero(), "backoff_max must not be zero");
        refuse(self.backlog_rows_max == Some(0), "backlog_rows_max must be at least 1");
        refuse(self.quarantine_run_max == Some(0), "quarantine_run_max must be at least 1");
        refuse(self.accept_queue_rows > QUEUE_ROWS_MAX, "accept_queue_rows must be at most 1000000");
        refuse(self.settle_queue_rows > QUEUE_ROWS_MAX, "settle_queue_rows must be at most 1000000");
        let durations = [
            (self.poll, "poll must be at most 365days"),
            (self.unknown_key_grace, "unknown_key_grace must be at most 365days"),
            (self.accept_patience, "accept_patience must be at most 365days"),
            (self.backoff_max, "backoff_max must be at most 365days"),
            (self.suspect_wait_max, "suspect_wait_max must be at most 365days"),
        ];
        for (duration, problem) in durations {
            refuse(duration > DURATION_MAX, problem);
        }
        problems
    }
}

fn duration(name: &str, text: &str) -> Result<Duration> {
    humantime::parse_duration(text).map_err(|error| {
        Error::configuration(format!("cannot set {name} to {text:?}, expected a duration like 30s or 1h 30m"))
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
