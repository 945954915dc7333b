//! Kafka: where records come from. The only folder that knows rdkafka.
//!
//! `ingest.rs` polls on a thread of its own and never waits for the database; `desk.rs` is what it knows of its partitions (pure);
//! `rebalance.rs` is called by librdkafka when they come and go; `find.rs` asks where a partition begins and `position.rs` decides it
//! (pure). An offset is committed only after everything before it is a message, a quarantine row or unwanted, and the ledger says so.

mod audit;
mod backlog;
mod condition;
mod desk;
mod find;
mod for_ever;
mod ingest;
mod native;
mod outage;
mod position;
mod produce;
mod rebalance;
mod record;
mod relay;
mod retention;
mod settings;
mod watch;

use std::fmt;

pub use crate::store::ledger::Gap;
pub use audit::{Audit, Finding, PartitionAudit};
pub(crate) use ingest::Ingest;
pub use relay::{Relay, RunningRelay};

/// A Kafka to consume from: the brokers and the consumer group. The topics are those of the inbox's subscriptions.
///
/// ```
/// use wharf::kafka::Kafka;
/// let kafka = Kafka::new("broker-1:9092,broker-2:9092", "shop")
///     .set("group.instance.id", "shop-1");
/// ```
///
/// Any setting of librdkafka is passed through ([`Kafka::set`]). With TLS (feature `ssl`):
///
/// ```
/// # use wharf::kafka::Kafka;
/// let kafka = Kafka::new("broker-1:9093", "shop")
///     .set("security.protocol", "ssl")
///     .set("ssl.ca.location", "/etc/kafka/ca.pem");
/// ```
///
/// With SASL: SCRAM and PLAIN over TLS need the feature `ssl`, Kerberos (GSSAPI) the feature `sasl`. Take secrets from where your service
/// keeps them; they are shown in no error, event or `Debug`.
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
    pub(crate) brokers: String,
    pub(crate) group: String,
    pub(crate) settings: Vec<(String, String)>,
}

impl Kafka {
    /// Brokers as `host:port`, separated by commas, and the consumer group.
    pub fn new(brokers: impl Into<String>, group: impl Into<String>) -> Self {
        Self { brokers: brokers.into(), group: group.into(), settings: Vec::new() }
    }

    /// Any setting of librdkafka, passed through, but for those that the guarantee depends on: those are refused when the inbox is
    /// started, with the reason.
    ///
    /// What Wharf sets otherwise than librdkafka, and you may set back: `queued.max.messages.kbytes` 16384 and `fetch.max.bytes`
    /// 16777216 (what is read ahead stays bounded), `fetch.queue.backoff.ms` 5, `receive.message.max.bytes` 1000000000 (a record that
    /// cannot be received would stop its partition for ever), `check.crcs` true, `isolation.level` read_committed, `client.id` wharf, and `partition.assignment.strategy`
    /// cooperative-sticky: a rebalance takes only the partitions that move. A group cannot change from an eager strategy to it while old members
    /// run: stop them first, or set the old strategy.
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
            .field("settings", &names)
            .finish()
    }
}
