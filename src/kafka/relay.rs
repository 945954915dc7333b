//! The relay as a user sees it: where it sends, within which bounds, and how it is started and ended.

use std::fmt;
use std::time::{Duration, Instant};

use super::produce::Producing;
use super::settings;
use crate::outbox::{RelayHandle, RelaySettings, WireTrouble};
use crate::store::{Backend, Store};
use crate::types::{DURATION_MAX, Error, HealthReason, Result};

/// How long the last batch may take when the grace is shorter.
const END_WAIT_MIN: Duration = Duration::from_secs(1);

/// Sends the records of the outbox ([`Outbox`](crate::Outbox)) to Kafka. Give it to [`InboxBuilder::relay`](crate::InboxBuilder::relay), or start it
/// alone in a service that only publishes ([`Relay::start`]).
///
/// ```
/// use std::time::Duration;
/// use wharf::kafka::Relay;
/// let relay = Relay::new("broker-1:9092,broker-2:9092")
///     .set("compression.type", "lz4")
///     .keep_sent(Duration::from_secs(3_600));
/// ```
///
/// Any number of processes may run one. Keys are spread over sixteen slots, and each slot is held by one relay at a time, for a lease; when a
/// relay dies, others take over its slots when the lease has run out.
///
/// A record is marked as sent only when the brokers have acknowledged it (`acks=all`, an idempotent producer), and it is sent again for as
/// long as that takes. Records of one key are sent in order. After a crash, a record may be on the topic twice, with the same id; the first
/// occurrences are in order.
///
/// A record is poisoned, kept for a person, when Kafka refuses it for good: it is too large or invalid, or its topic has not existed for longer than
/// [`Relay::unknown_topic_grace`]. The records behind it go on. A topic that may not be written to is tried for ever.
///
/// A partition without a leader holds up the batch that has records for it, and so everything behind it, until it has one.
#[derive(Clone)]
#[must_use = "nothing is sent until the relay is started, or given to an inbox that is"]
pub struct Relay {
    pub(super) brokers: String,
    pub(super) settings: Vec<(String, String)>,
    work: RelaySettings,
}

impl Relay {
    /// Brokers as `host:port`, separated by commas.
    pub fn new(brokers: impl Into<String>) -> Self {
        let work = RelaySettings {
            lease: Duration::from_secs(10),
            poll: Duration::from_millis(250),
            batch_rows: 1_000,
            batch_bytes: 8 * 1024 * 1024,
            keep_sent: Duration::from_secs(86_400),
            unknown_topic_grace: Duration::from_secs(60),
        };
        Self { brokers: brokers.into(), settings: Vec::new(), work }
    }

    /// Any setting of librdkafka's producer, passed through, but for those that the guarantee depends on: those are refused when the relay is
    /// started, with the reason.
    ///
    /// What Wharf sets otherwise than librdkafka, and you may set back: `partitioner` murmur2_random (a key goes to the partition where a Java
    /// producer would put it), `message.max.bytes` 10000000 (larger records are poisoned without asking the broker), `batch.size` 131072,
    /// `linger.ms` 1 and `client.id` wharf.
    pub fn set(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// How long a slot is held without renewal: when a relay has died, another one goes on after this. Default: 10 s. Shorter recovers sooner, and
    /// is lost sooner to a database that does not answer.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.work.lease = lease;
        self
    }

    /// How often an idle relay looks for records of other processes, at the most. Default: 250 ms. Records that this process has published are looked
    /// for at once.
    pub fn poll(mut self, poll: Duration) -> Self {
        self.work.poll = poll;
        self
    }

    /// Records that are on their way at a time. Default: 1,000.
    pub fn batch_rows(mut self, rows: u32) -> Self {
        self.work.batch_rows = rows;
        self
    }

    /// Bytes of records that are on their way at a time; a single larger record goes alone. Default: 8 MiB.
    pub fn batch_bytes(mut self, bytes: u64) -> Self {
        self.work.batch_bytes = bytes;
        self
    }

    /// How long records that were sent, or discarded by a person, stay in `inbox_outbox`, with their partition and offset. Default: a day. Zero deletes a
    /// record as soon as it is acknowledged, which is less work for the database. Poisoned records stay until a person acts.
    pub fn keep_sent(mut self, period: Duration) -> Self {
        self.work.keep_sent = period;
        self
    }

    /// How long records wait for a topic that does not exist before they are poisoned as `unknown topic`. Default: 60 s. Others go on meanwhile.
    /// Each look of the relay passes over those that wait, so a long grace costs while it lasts.
    pub fn unknown_topic_grace(mut self, grace: Duration) -> Self {
        self.work.unknown_topic_grace = grace;
        self
    }

    /// Starts sending, without an inbox: for a service that publishes and has no handlers. Kafka need not be there yet.
    ///
    /// ```no_run
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use wharf::kafka::Relay;
    /// use wharf::{Postgres, Store};
    ///
    /// let store = Store::<Postgres>::connect(&std::env::var("DATABASE_URL")?).await?;
    /// let relay = Relay::new("broker-1:9092").start(&store)?;
    /// // ... until the service ends:
    /// relay.shutdown(Duration::from_secs(5)).await;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When a bound or a setting of Kafka cannot be used, all of them named.
    pub fn start<B: Backend>(&self, store: &Store<B>) -> Result<RunningRelay> {
        let mut problems = self.problems();
        let config = settings::producer_config(self).map_err(|error| problems.push(error.to_string())).ok();
        let Some(config) = config.filter(|_| problems.is_empty()) else {
            return Err(Error::configuration(format!("cannot start the relay: {}", problems.join("; "))));
        };
        let trouble = WireTrouble::default();
        // Made once here, so that a setting that librdkafka does not know is an error now.
        drop(Producing::new(&config, trouble.clone())?);
        let of_wire = trouble.clone();
        let make = move || Producing::new(&config, of_wire.clone());
        Ok(RunningRelay(RelayHandle::start(store, self.work.clone(), trouble, make)))
    }

    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let work = &self.work;
        if !(Duration::from_secs(1)..=DURATION_MAX).contains(&work.lease) {
            problems.push("the lease is 1s to 365days".to_owned());
        }
        if work.poll.is_zero() || work.poll > DURATION_MAX {
            problems.push("poll is more than zero and at most 365days".to_owned());
        }
        if !(1..=100_000).contains(&work.batch_rows) || work.batch_bytes == 0 {
            problems.push("batch_rows is 1 to 100000, and batch_bytes is not zero".to_owned());
        }
        if work.keep_sent > DURATION_MAX || work.unknown_topic_grace > DURATION_MAX {
            problems.push("keep_sent and unknown_topic_grace are at most 365days".to_owned());
        }
        problems
    }
}

impl fmt::Debug for Relay {
    /// Values of settings may be secrets; their names are enough.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.settings.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Relay")
            .field("brokers", &self.brokers)
            .field("settings", &names)
            .field("work", &self.work)
            .finish()
    }
}

/// A relay at work. Dropping it stops it; what waits is sent by another one, or later.
#[must_use = "the relay stops when this is dropped"]
pub struct RunningRelay(RelayHandle);

impl RunningRelay {
    /// Resolves with the error that ended the relay. Stays pending while it is healthy: neither a database nor a broker that is away ends it.
    pub async fn failure(&mut self) -> Error {
        self.0.failure().await
    }

    /// Stops: the batch that is on its way is waited for, for five seconds or `grace` if that is shorter, and marked; then the slots are given up, so that
    /// another relay can go on at once.
    pub async fn shutdown(self, grace: Duration) {
        self.end(Instant::now() + grace.min(DURATION_MAX).max(END_WAIT_MIN)).await;
    }

    pub(crate) fn health(&self) -> impl Fn() -> Vec<HealthReason> + Send + Sync + 'static {
        self.0.health()
    }

    pub(crate) async fn end(self, deadline: Instant) {
        self.0.end(deadline).await;
    }
}

impl fmt::Debug for RunningRelay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RunningRelay")
    }
}
