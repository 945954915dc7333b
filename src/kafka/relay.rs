//! The public interface of the relay: its settings, start and end.

use std::fmt;
use std::time::{Duration, Instant};

use super::produce::Producing;
use super::settings;
use super::token::TokenProvider;
use crate::outbox::{RelayHandle, RelaySettings, WireProblem};
use crate::store::{Backend, Store};
use crate::types::{DURATION_MAX, Error, HealthReason, Result};

/// The shortest time that the last batch gets, even with a shorter grace.
const END_WAIT_MIN: Duration = Duration::from_secs(1);

/// Sends the records of the [`Outbox`](crate::Outbox) to Kafka. Give it to
/// [`InboxBuilder::relay`](crate::InboxBuilder::relay), or start it alone in a service that only publishes
/// ([`Relay::start`]).
///
/// ```
/// use std::time::Duration;
/// use wharf::kafka::Relay;
/// let relay = Relay::new("broker-1:9092,broker-2:9092")
///     .set("compression.type", "lz4")
///     .keep_sent(Duration::from_secs(3_600));
/// ```
///
/// Any number of processes may run a relay. Keys are spread over sixteen slots, and one relay at a time leases each
/// slot. If a relay crashes, others take over its slots when the lease expires.
///
/// A record is marked as sent only when the brokers have acknowledged it (`acks=all`, an idempotent producer); until
/// then it is sent again. Records of one key are sent in order. After a crash, a record may be on the topic twice, with
/// the same id; the first occurrences are in order.
///
/// A record is poisoned and kept for a person when Kafka rejects it permanently: it is too large or invalid, or its
/// topic has not existed for longer than [`Relay::unknown_topic_grace`]. The records behind it continue. A topic that
/// the relay may not write to is retried indefinitely.
///
/// A partition without a leader delays the batch that has records for it, and so everything behind the batch, until it
/// has a leader.
#[derive(Clone)]
#[must_use = "nothing is sent until the relay is started, or given to an inbox that is"]
pub struct Relay {
    pub(super) brokers: String,
    pub(super) settings: Vec<(String, String)>,
    pub(super) tokens: Option<TokenProvider>,
    work: RelaySettings,
}

impl Relay {
    /// Sends to these brokers, as `host:port` separated by commas.
    ///
    /// ```
    /// # use wharf::kafka::Relay;
    /// # fn example(inbox: wharf::InboxBuilder<wharf::Postgres>) -> wharf::InboxBuilder<wharf::Postgres> {
    /// inbox.relay(Relay::new("broker-1:9092,broker-2:9092"))
    /// # }
    /// ```
    pub fn new(brokers: impl Into<String>) -> Self {
        let work = RelaySettings {
            lease: Duration::from_secs(10),
            poll: Duration::from_millis(250),
            batch_rows: 1_000,
            batch_bytes: 8 * 1024 * 1024,
            keep_sent: Duration::from_secs(86_400),
            unknown_topic_grace: Duration::from_secs(60),
        };
        Self { brokers: brokers.into(), settings: Vec::new(), tokens: None, work }
    }

    /// Passes a setting to librdkafka's producer, except for those that the guarantees depend on: the start of the
    /// relay refuses them with the reason.
    ///
    /// ```
    /// let relay = wharf::kafka::Relay::new("broker-1:9092").set("compression.type", "zstd").set("linger.ms", "5");
    /// ```
    ///
    /// These defaults differ from librdkafka's, and you may change them: `partitioner` murmur2_random (a key is sent to
    /// the same partition as by a Java producer), `message.max.bytes` 10000000 (larger records are poisoned without
    /// asking the broker), `batch.size` 131072, `linger.ms` 1 and `client.id` wharf.
    pub fn set(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Sets how long a slot is leased without renewal: after a crash, another relay continues after this time. Default:
    /// 10 s. With a shorter lease it continues sooner, but a slow database ends the lease sooner, too.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let relay = wharf::kafka::Relay::new("broker-1:9092").lease(Duration::from_secs(30));
    /// ```
    pub fn lease(mut self, lease: Duration) -> Self {
        self.work.lease = lease;
        self
    }

    /// Sets how often an idle relay looks for records of other processes. Default: 250 ms. It finds records of its own
    /// process at once.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let relay = wharf::kafka::Relay::new("broker-1:9092").poll(Duration::from_millis(50));
    /// ```
    pub fn poll(mut self, poll: Duration) -> Self {
        self.work.poll = poll;
        self
    }

    /// Sets how many records are sent at a time before they are acknowledged. Default: 1,000.
    ///
    /// ```
    /// let relay = wharf::kafka::Relay::new("broker-1:9092").batch_rows(5_000);
    /// ```
    pub fn batch_rows(mut self, rows: u32) -> Self {
        self.work.batch_rows = rows;
        self
    }

    /// Sets how many bytes of records are sent at a time before they are acknowledged. A larger record is sent alone.
    /// Default: 8 MiB.
    ///
    /// ```
    /// let relay = wharf::kafka::Relay::new("broker-1:9092").batch_bytes(1 << 20); // less memory
    /// ```
    pub fn batch_bytes(mut self, bytes: u64) -> Self {
        self.work.batch_bytes = bytes;
        self
    }

    /// Sets how long sent and discarded records stay in `inbox_outbox`, with their partition and offset. Default: a
    /// day. With zero, a record is deleted as soon as it is acknowledged, which is less work for the database. Poisoned
    /// records stay until a person acts.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let relay = wharf::kafka::Relay::new("broker-1:9092").keep_sent(Duration::ZERO);
    /// ```
    pub fn keep_sent(mut self, period: Duration) -> Self {
        self.work.keep_sent = period;
        self
    }

    /// Sets how long records wait for a topic that does not exist before they are poisoned as `unknown topic`. Default:
    /// 60 s. Other records continue.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let relay = wharf::kafka::Relay::new("broker-1:9092").unknown_topic_grace(Duration::from_secs(600));
    /// ```
    pub fn unknown_topic_grace(mut self, grace: Duration) -> Self {
        self.work.unknown_topic_grace = grace;
        self
    }

    /// Starts the relay without an inbox, for a service that publishes and has no handlers. The brokers need not be
    /// available yet.
    ///
    /// ```no_run
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use wharf::kafka::Relay;
    /// use wharf::{Postgres, Store};
    ///
    /// let store = Store::<Postgres>::connect(&std::env::var("DATABASE_URL")?).await?;
    /// let relay = Relay::new("broker-1:9092").start(&store)?;
    /// // … when the service ends:
    /// relay.shutdown(Duration::from_secs(5)).await;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When a limit or a Kafka setting is invalid. The error contains all problems.
    pub fn start<B: Backend>(&self, store: &Store<B>) -> Result<RunningRelay> {
        let mut problems = self.problems();
        let config = settings::producer_config(self).map_err(|error| problems.push(error.to_string())).ok();
        let Some(config) = config.filter(|_| problems.is_empty()) else {
            return Err(Error::configuration(format!("cannot start the relay: {}", problems.join("; "))));
        };
        let problem = WireProblem::default();
        // Created once here, so that an invalid setting is an error of this call. The relay creates its own producer.
        drop(Producing::new(&config, problem.clone(), None)?);
        let of_wire = problem.clone();
        let tokens = self.tokens.clone().map(|tokens| (tokens, store.backend.reactor().clone()));
        let make = move || Producing::new(&config, of_wire.clone(), tokens.as_ref());
        Ok(RunningRelay(RelayHandle::start(store, self.work.clone(), problem, make)))
    }

    /// All limits that are out of range.
    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let work = &self.work;
        if !(Duration::from_secs(1)..=DURATION_MAX).contains(&work.lease) {
            problems.push("lease must be 1s to 365days".to_owned());
        }
        if work.poll.is_zero() || work.poll > DURATION_MAX {
            problems.push("poll must be greater than 0 and at most 365days".to_owned());
        }
        if !(1..=100_000).contains(&work.batch_rows) || work.batch_bytes == 0 {
            problems.push("batch_rows must be 1 to 100000, and batch_bytes greater than 0".to_owned());
        }
        if work.keep_sent > DURATION_MAX || work.unknown_topic_grace > DURATION_MAX {
            problems.push("keep_sent and unknown_topic_grace must be at most 365days".to_owned());
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
            .field("has_tokens", &self.tokens.is_some())
            .field("work", &self.work)
            .finish()
    }
}

/// A running relay. [`Relay::start`] returns it. Dropping it stops it; the remaining records are sent by another relay,
/// or later.
#[must_use = "the relay stops when this is dropped"]
pub struct RunningRelay(RelayHandle);

impl RunningRelay {
    /// Resolves with the error that ended the relay. Stays pending while it is healthy. An unavailable database or
    /// broker does not end it.
    pub async fn failure(&mut self) -> Error {
        self.0.failure().await
    }

    /// Stops the relay: waits for the batch that is being sent, for `grace` but at least one second and at most five,
    /// and marks it. Then the slots are released, so that another relay can continue at once.
    pub async fn shutdown(self, grace: Duration) {
        self.end(Instant::now() + grace.min(DURATION_MAX).max(END_WAIT_MIN)).await;
    }

    /// Returns a function that lists health problems. It asks no broker.
    pub(crate) fn health(&self) -> impl Fn() -> Vec<HealthReason> + Send + Sync + 'static {
        self.0.health()
    }

    /// Like `shutdown`, with a deadline.
    pub(crate) async fn end(self, deadline: Instant) {
        self.0.end(deadline).await;
    }
}

impl fmt::Debug for RunningRelay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RunningRelay")
    }
}
