//! librdkafka's settings: the user's, ours, and those that nobody may change because the guarantee depends on them.
//!
//! No value of a setting ever reaches an error: it may be a secret.

use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;

use super::{Kafka, Relay};
use crate::types::{Error, Result};

/// Settings that are refused, and why.
const REFUSED: &[(&str, &str)] = &[
    ("bootstrap.servers", "give the brokers to Kafka::new"),
    ("metadata.broker.list", "give the brokers to Kafka::new"),
    ("group.id", "give the group to Kafka::new"),
    ("enable.auto.commit", "an offset is committed only after its record is stored"),
    ("auto.commit.enable", "an offset is committed only after its record is stored"),
    ("enable.auto.offset.store", "an offset is committed only after its record is stored"),
    ("auto.offset.reset", "the position is the ledger's; a group without one begins at the earliest record"),
    ("enable.partition.eof", "the end of a partition is not a record"),
];

/// Defaults that the user may change. See [`Kafka::set`], which lists them.
const DEFAULTS: &[(&str, &str)] = &[
    ("queued.max.messages.kbytes", "16384"),
    ("fetch.max.bytes", "16777216"),
    // The default of a second is a second without records whenever what is read ahead has reached its bound.
    ("fetch.queue.backoff.ms", "5"),
    ("receive.message.max.bytes", "1000000000"),
    ("check.crcs", "true"),
    ("isolation.level", "read_committed"),
    ("client.id", "wharf"),
];

/// What the guarantee depends on. A position that does not exist is `earliest`: never a step over records; steps are noticed.
const FIXED: &[(&str, &str)] =
    &[("enable.auto.commit", "false"), ("enable.auto.offset.store", "false"), ("auto.offset.reset", "earliest")];

/// The configuration of the consumer.
///
/// # Errors
/// When settings are refused; all of them are named at once.
pub(super) fn config(kafka: &Kafka) -> Result<ClientConfig> {
    let mut problems = refused_settings(&kafka.settings, REFUSED);
    if kafka.brokers.trim().is_empty() {
        problems.push("no broker is given".to_owned());
    }
    if kafka.group.trim().is_empty() {
        problems.push("no consumer group is given".to_owned());
    }
    if !problems.is_empty() {
        return Err(Error::configuration(format!("cannot consume from Kafka: {}", problems.join("; "))));
    }
    let mut config = ClientConfig::new();
    set_log_level(&mut config, &kafka.settings);
    for (name, value) in DEFAULTS {
        config.set(*name, *value);
    }
    // With the broker's own protocol there is no such setting.
    let is_classic = !kafka.settings.iter().any(|(name, value)| name == "group.protocol" && value == "consumer");
    if is_classic {
        config.set("partition.assignment.strategy", "cooperative-sticky");
    }
    for (name, value) in &kafka.settings {
        config.set(name, value);
    }
    config.set("bootstrap.servers", &kafka.brokers).set("group.id", &kafka.group);
    for (name, value) in FIXED {
        config.set(*name, *value);
    }
    Ok(config)
}

/// Settings of the producer that are refused, and why.
const REFUSED_OF_PRODUCER: &[(&str, &str)] = &[
    ("bootstrap.servers", "give the brokers to Relay::new"),
    ("metadata.broker.list", "give the brokers to Relay::new"),
    ("enable.idempotence", "the order of a key depends on it"),
    ("enable.gapless.guarantee", "the order of a key depends on it"),
    ("max.in.flight.requests.per.connection", "the order of a key depends on it"),
    ("max.in.flight", "the order of a key depends on it"),
    ("acks", "a record is marked as sent when all replicas have it"),
    ("request.required.acks", "a record is marked as sent when all replicas have it"),
    ("message.timeout.ms", "records are sent for as long as it takes"),
    ("delivery.timeout.ms", "records are sent for as long as it takes"),
    ("retries", "records are sent for as long as it takes"),
    ("message.send.max.retries", "records are sent for as long as it takes"),
    ("transactional.id", "a relay sends no transactions"),
];

/// Defaults of the producer that the user may change. See `Relay::set`, which lists them.
const DEFAULTS_OF_PRODUCER: &[(&str, &str)] = &[
    ("partitioner", "murmur2_random"),
    ("message.max.bytes", "10000000"),
    // Below what any topic allows, so that a batch of several records is never refused for its size.
    ("batch.size", "131072"),
    ("linger.ms", "1"),
    ("client.id", "wharf"),
];

const FIXED_OF_PRODUCER: &[(&str, &str)] = &[
    ("enable.idempotence", "true"),
    ("enable.gapless.guarantee", "true"),
    ("acks", "all"),
    ("message.timeout.ms", "0"),
    ("max.in.flight.requests.per.connection", "5"),
    // What is on its way is bounded by the relay's batch.
    ("queue.buffering.max.messages", "1000000"),
    ("queue.buffering.max.kbytes", "2097151"),
];

/// The configuration of the producer.
///
/// # Errors
/// When settings are refused; all of them are named at once.
pub(super) fn producer_config(relay: &Relay) -> Result<ClientConfig> {
    let mut problems = refused_settings(&relay.settings, REFUSED_OF_PRODUCER);
    if relay.brokers.trim().is_empty() {
        problems.push("no broker is given".to_owned());
    }
    if !problems.is_empty() {
        return Err(Error::configuration(problems.join("; ")));
    }
    let mut config = ClientConfig::new();
    set_log_level(&mut config, &relay.settings);
    for (name, value) in DEFAULTS_OF_PRODUCER {
        config.set(*name, *value);
    }
    for (name, value) in &relay.settings {
        config.set(name, value);
    }
    config.set("bootstrap.servers", &relay.brokers);
    for (name, value) in FIXED_OF_PRODUCER {
        config.set(*name, *value);
    }
    Ok(config)
}

fn refused_settings(settings: &[(String, String)], refused: &[(&str, &str)]) -> Vec<String> {
    settings
        .iter()
        .filter_map(|(name, _)| refused.iter().find(|(refused, _)| refused == name))
        .map(|(name, reason)| format!("{name} cannot be set: {reason}"))
        .collect()
}

/// Else it is what the log crate's logger wants, and there is none: what librdkafka says becomes events, and tracing filters those.
fn set_log_level(config: &mut ClientConfig, settings: &[(String, String)]) {
    let wants_debug = settings.iter().any(|(name, _)| name == "debug");
    config.set_log_level(if wants_debug { RDKafkaLogLevel::Debug } else { RDKafkaLogLevel::Info });
}

/// Why a producer could not be made, without the values that were given.
pub(super) fn cannot_produce(error: KafkaError) -> Error {
    not_made("cannot produce to Kafka", error)
}

/// Why a client could not be made, without the values that were given.
pub(super) fn refused(error: KafkaError) -> Error {
    not_made("cannot consume from Kafka", error)
}

fn not_made(cannot: &str, error: KafkaError) -> Error {
    match error {
        KafkaError::ClientConfig(_, _, name, _) => Error::configuration(format!(
            "{cannot}: librdkafka does not know the setting {name}, or not with this value, or not in this build \
             (TLS takes the feature ssl, Kerberos the feature sasl)"
        )),
        error => Error::configuration(cannot).with_source(error),
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::consumer::BaseConsumer;

    use super::*;

    #[test]
    fn settings_that_the_guarantee_depends_on_are_refused_by_name() {
        let kafka = Kafka::new("b", "g").set("enable.auto.commit", "true").set("group.id", "x").set("client.id", "me");
        let error = config(&kafka).unwrap_err();
        assert!(error.is_configuration());
        let text = error.to_string();
        assert!(
            text.contains("enable.auto.commit") && text.contains("group.id") && !text.contains("client.id"),
            "{text}"
        );
    }

    #[test]
    fn what_the_guarantee_depends_on_is_set_whatever_the_user_sets() {
        let config = config(&Kafka::new("b", "g").set("fetch.max.bytes", "1000")).unwrap();
        assert_eq!(config.get("enable.auto.commit"), Some("false"));
        assert_eq!(config.get("enable.auto.offset.store"), Some("false"));
        assert_eq!(config.get("auto.offset.reset"), Some("earliest"));
        assert_eq!(config.get("fetch.max.bytes"), Some("1000"));
    }

    #[test]
    fn no_value_of_a_setting_is_shown() {
        let kafka = Kafka::new("b", "g").set("sasl.password", "hunter2").set("sasl.mechanism", "hunter2");
        assert!(!format!("{kafka:?}").contains("hunter2"));
        let error =
            config(&kafka).unwrap().set("debug", "hunter2").create::<BaseConsumer>().err().map(refused).unwrap();
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(shown.contains("debug") || shown.contains("sasl.mechanism"), "{shown}");
    }

    #[test]
    fn partitions_are_moved_one_by_one_unless_the_user_or_the_broker_assigns_them() {
        let strategy = |kafka: &Kafka| config(kafka).unwrap().get("partition.assignment.strategy").map(str::to_owned);
        let kafka = Kafka::new("b", "g");
        assert_eq!(strategy(&kafka).as_deref(), Some("cooperative-sticky"));
        let eager = kafka.clone().set("partition.assignment.strategy", "range");
        assert_eq!(strategy(&eager).as_deref(), Some("range"));
        assert_eq!(strategy(&kafka.set("group.protocol", "consumer")), None);
    }

    #[test]
    fn a_group_and_a_broker_are_needed() {
        let text = config(&Kafka::new(" ", "")).unwrap_err().to_string();
        assert!(text.contains("no broker") && text.contains("no consumer group"), "{text}");
    }
}
