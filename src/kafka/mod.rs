//! Reads records from Kafka, and sends those of the outbox. The only folder that uses rdkafka.
//!
//! `ingest.rs` polls on its own thread and never waits for the database. `assigned.rs` holds the state of the assigned
//! partitions (pure). `rebalance.rs` has librdkafka's callbacks. `find.rs` collects the facts about a partition, and
//! `position.rs` derives the position from them (pure). `watch.rs` compares the ledger with the running ingest and
//! writes the status rows. `native.rs` calls librdkafka directly where rdkafka has no function. `produce.rs` and
//! `relay.rs` send the outbox. `audit.rs` and `retention.rs` only read.
//!
//! An offset is committed only when every record before it is stored, quarantined or unwanted, and the ledger has
//! moved. The ledger in the database, not the group's offset, decides where reading begins.

mod access;
mod assigned;
mod audit;
mod backlog;
mod begin;
mod condition;
mod find;
mod gauges;
mod ingest;
mod native;
mod outage;
mod position;
mod produce;
mod rebalance;
mod record;
mod relay;
mod retention;
mod retry_forever;
mod settings;
mod sources;
mod statistics;
mod token;
mod watch;

use std::fmt;

pub use crate::store::ledger::Gap;
pub use audit::{Audit, Finding, PartitionAudit};
pub use begin::Begin;
use begin::Begins;
pub(crate) use ingest::Ingest;
pub use relay::{Relay, RunningRelay};
pub(crate) use sources::{duplicate_names, source_problems};
pub use token::Token;
use token::TokenProvider;

/// A Kafka cluster and a consumer group to read records from. The topics are those that handlers subscribe to, unless
/// [`Kafka::topics`] names some of them. [`Inbox::start_from`](crate::Inbox::start_from) takes it. An inbox can have
/// several sources: see [`InboxBuilder::source`](crate::InboxBuilder::source).
///
/// ```
/// use wharf::kafka::Kafka;
///
/// let kafka = Kafka::new("broker-1:9092,broker-2:9092", "shop")
///     .set("group.instance.id", "shop-1");
/// ```
///
/// [`Kafka::set`] passes any setting to librdkafka. With TLS (feature `ssl`):
///
/// ```
/// # use wharf::kafka::Kafka;
/// let kafka = Kafka::new("broker-1:9093", "shop")
///     .set("security.protocol", "ssl")
///     .set("ssl.ca.location", "/etc/kafka/ca.pem");
/// ```
///
/// SASL PLAIN, SCRAM and OAUTHBEARER ([`Kafka::token_from`]) need the feature `ssl`, Kerberos (GSSAPI) needs `sasl`.
/// Secrets appear in no error, event or `Debug` output.
///
/// ```
/// # use wharf::kafka::Kafka;
/// # let password = String::new();
/// let kafka = Kafka::new("broker-1:9094", "shop")
///     .set("security.protocol", "sasl_ssl")
///     .set("sasl.mechanism", "SCRAM-SHA-512")
///     .set("sasl.username", "shop")
///     .set("sasl.password", password);
/// ```
#[derive(Clone)]
#[must_use = "nothing is read until an inbox is started from this"]
pub struct Kafka {
    /// `host:port`, separated by commas.
    pub(crate) brokers: String,
    pub(crate) group: String,
    /// In the order of the calls; for a name that is set twice, the last value counts.
    pub(crate) settings: Vec<(String, String)>,
    /// Where topics begin that are not in the ledger.
    pub(crate) begins: Begins,
    /// Provides tokens for SASL/OAUTHBEARER.
    tokens: Option<TokenProvider>,
    /// `None`: the name of the group.
    name: Option<String>,
    /// Empty: all topics that handlers subscribe to.
    topics: Vec<String>,
}

impl Kafka {
    /// Reads from these brokers, as `host:port` separated by commas, in this consumer group.
    ///
    /// ```
    /// let kafka = wharf::kafka::Kafka::new("broker-1:9092,broker-2:9092", "shop");
    /// ```
    pub fn new(brokers: impl Into<String>, group: impl Into<String>) -> Self {
        Self {
            brokers: brokers.into(),
            group: group.into(),
            settings: Vec::new(),
            begins: Begins::default(),
            tokens: None,
            name: None,
            topics: Vec::new(),
        }
    }

    /// Sets the name of this source in events, metrics, [`Health`](crate::health::Health), `doctor` and errors. It must
    /// be unique within the inbox. 1 to 60 characters of A-Z a-z 0-9 . _ -. Default: the name of the consumer group.
    /// Set it if the inbox has several sources.
    ///
    /// ```
    /// # use wharf::kafka::Kafka;
    /// # fn example(inbox: wharf::InboxBuilder<wharf::Postgres>) -> wharf::InboxBuilder<wharf::Postgres> {
    /// inbox
    ///     .source(Kafka::new("eu-broker:9092", "shop").named("eu"))
    ///     .source(Kafka::new("us-broker:9092", "shop").named("us"))
    /// # }
    /// ```
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Reads only these topics of those that handlers subscribe to, by name or by pattern. Default: all of them.
    ///
    /// ```
    /// # use wharf::kafka::Kafka;
    /// let kafka = Kafka::new("eu-broker:9092", "shop").named("eu").topics(["orders", "returns"]);
    /// ```
    pub fn topics(mut self, topics: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.topics.extend(topics.into_iter().map(Into::into));
        self
    }

    /// Passes a setting to librdkafka, except for those that the guarantees depend on: the start of the inbox refuses
    /// them with the reason.
    ///
    /// ```
    /// # use wharf::kafka::Kafka;
    /// let kafka = Kafka::new("broker-1:9092", "shop")
    ///     .set("group.instance.id", "shop-1")    // static membership
    ///     .set("fetch.max.bytes", "4194304");    // less memory for each broker
    /// ```
    ///
    /// These defaults differ from librdkafka's, and you may change them: `queued.max.messages.kbytes` 16384 and
    /// `fetch.max.bytes` 16777216 (to bound memory), `fetch.queue.backoff.ms` 5, `receive.message.max.bytes` 1000000000
    /// (a record that cannot be received would stop its partition forever), `check.crcs` true, `isolation.level`
    /// read_committed, `statistics.interval.ms` 5000 (for lag and gauges; 0 turns them off), `client.id` wharf, and
    /// `partition.assignment.strategy` cooperative-sticky, with which a rebalance moves only the partitions that have
    /// to move. A group cannot change to it from an eager strategy while old members run: stop them first, or set the
    /// old strategy.
    pub fn set(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }
}

impl fmt::Debug for Kafka {
    /// Values of settings may be secrets; their names are enough.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.settings.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Kafka")
            .field("brokers", &self.brokers)
            .field("group", &self.group)
            .field("name", &self.name)
            .field("topics", &self.topics)
            .field("settings", &names)
            .field("begins", &self.begins)
            .field("has_tokens", &self.tokens.is_some())
            .finish()
    }
}
