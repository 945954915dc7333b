//! librdkafka's settings: the user's, Wharf's defaults, and those that the user cannot change because the guarantees
//! depend on them.
//!
//! Errors never contain the value of a setting: it may be a secret.

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
    // With librdkafka's default of 1 s, reading would stop for a second whenever the prefetch queue is full.
    ("fetch.queue.backoff.ms", "5"),
    ("receive.message.max.bytes", "1000000000"),
    ("check.crcs", "true"),
    ("isolation.level", "read_committed"),
    // For lag and gauges. Not more often, because the text grows with the number of partitions.
    ("statistics.interval.ms", "5000"),
    ("client.id", "wharf"),
];

/// The guarantees depend on these. A position that does not exist becomes `earliest`, which never skips records, and
/// the jump is detected when the next record is read.
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
    problems.extend(token_problems(&kafka.settings, kafka.tokens.is_some(), "Kafka::token_from"));
    if !problems.is_empty() {
        return Err(Error::configuration(format!("cannot consume from Kafka: {}", problems.join("; "))));
    }
    let mut config = ClientConfig::new();
    set_log_level(&mut config, &kafka.settings);
    for (name, value) in DEFAULTS {
        config.set(*name, *value);
    }
    // The `consumer` protocol has no such setting: the broker assigns the partitions.
    let is_classic = !kafka.settings.iter().any(|(name, value)| name == "group.protocol" && value == "consumer");
    if is_classic {
        config.set("partition.assignment.strategy", "cooperative-sticky");
    }
    if kafka.tokens.is_some() {
        config.set("sasl.mechanism", OAUTHBEARER);
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

/// The configuration of a client for admin requests and audits: the consumer's, without statistics.
pub(super) fn to_ask(config: &ClientConfig) -> ClientConfig {
    let mut config = config.clone();
    config.set("statistics.interval.ms", "0");
    config
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
    ("queue.buffering.max.messages", "the batch size of the relay bounds the queue"),
    ("queue.buffering.max.kbytes", "the batch size of the relay bounds the queue"),
];

/// Defaults of the producer that the user may change. See `Relay::set`, which lists them.
const DEFAULTS_OF_PRODUCER: &[(&str, &str)] = &[
    ("partitioner", "murmur2_random"),
    ("message.max.bytes", "10000000"),
    // Below the limit of any topic, so that a batch of several records is never refused for its size.
    ("batch.size", "131072"),
    ("linger.ms", "1"),
    ("client.id", "wharf"),
];

/// The guarantees of the relay depend on these.
const FIXED_OF_PRODUCER: &[(&str, &str)] = &[
    ("enable.idempotence", "true"),
    ("enable.gapless.guarantee", "true"),
    ("acks", "all"),
    ("message.timeout.ms", "0"),
    ("max.in.flight.requests.per.connection", "5"),
    // librdkafka's own queue must never be full: the batch size of the relay bounds the records in it.
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
    problems.extend(token_problems(&relay.settings, relay.tokens.is_some(), "Relay::token_from"));
    if !problems.is_empty() {
        return Err(Error::configuration(problems.join("; ")));
    }
    let mut config = ClientConfig::new();
    set_log_level(&mut config, &relay.settings);
    for (name, value) in DEFAULTS_OF_PRODUCER {
        config.set(*name, *value);
    }
    if relay.tokens.is_some() {
        config.set("sasl.mechanism", OAUTHBEARER);
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

const OAUTHBEARER: &str = "OAUTHBEARER";

/// Why a client that authenticates with tokens would never get one. librdkafka would wait for a token forever, without
/// an error.
fn token_problems(settings: &[(String, String)], has_provider: bool, way: &str) -> Option<String> {
    let value = |names: &[&str]| {
        let named = settings.iter().rev().find(|(name, _)| names.contains(&name.as_str()));
        named.map(|(_, value)| value.trim().to_ascii_lowercase())
    };
    let is_on = |name: &str| value(&[name]).is_some_and(|value| ["true", "t", "1"].contains(&value.as_str()));
    let is_oauth = value(&["sasl.mechanism", "sasl.mechanisms"]).map(|value| value == "oauthbearer");
    let is_oidc = value(&["sasl.oauthbearer.method"]).is_some_and(|value| value == "oidc");
    let is_sasl = value(&["security.protocol"]).is_some_and(|value| value.starts_with("sasl_"));
    match (has_provider, is_oauth) {
        (true, Some(false)) => Some(format!("{way} needs sasl.mechanism {OAUTHBEARER}")),
        (true, _) if !is_sasl => Some(format!("{way} needs security.protocol sasl_ssl (or sasl_plaintext)")),
        (true, _) if is_oidc => Some(format!("{way} and sasl.oauthbearer.method oidc exclude each other")),
        (true, _) | (false, Some(true)) if !cfg!(feature = "ssl") => {
            Some(format!("{OAUTHBEARER} needs the feature ssl"))
        }
        (false, Some(true)) if is_oidc => (!cfg!(feature = "oidc"))
            .then(|| format!("sasl.oauthbearer.method oidc needs the feature oidc; without it, give {way} a function")),
        (false, Some(true)) => {
            let unsecured = match is_on("enable.sasl.oauthbearer.unsecure.jwt") {
                true => " (librdkafka's unsecured tokens would end without being renewed)",
                false => "",
            };
            Some(format!(
                "sasl.mechanism {OAUTHBEARER} needs tokens: give {way} a function that returns them{unsecured}"
            ))
        }
        (true, _) | (false, Some(false) | None) => None,
    }
}

/// Describes each setting that is refused.
fn refused_settings(settings: &[(String, String)], refused: &[(&str, &str)]) -> Vec<String> {
    settings
        .iter()
        .filter_map(|(name, _)| refused.iter().find(|(refused, _)| refused == name))
        .map(|(name, reason)| format!("{name} cannot be set: {reason}"))
        .collect()
}

/// Sets librdkafka's log level. rdkafka's default depends on the logger of the `log` crate, which is not used here.
/// librdkafka's log lines become events, which tracing filters.
fn set_log_level(config: &mut ClientConfig, settings: &[(String, String)]) {
    let wants_debug = settings.iter().any(|(name, _)| name == "debug");
    config.set_log_level(if wants_debug { RDKafkaLogLevel::Debug } else { RDKafkaLogLevel::Info });
}

/// Why a producer could not be created, without the values of settings.
pub(super) fn cannot_produce(error: KafkaError) -> Error {
    not_made("cannot produce to Kafka", error)
}

/// Why a consumer could not be created, without the values of settings.
pub(super) fn refused(error: KafkaError) -> Error {
    not_made("cannot consume from Kafka", error)
}

/// librdkafka's error has the value of the setting, which may be a secret, so only the name is kept.
fn not_made(cannot: &str, error: KafkaError) -> Error {
    match error {
        KafkaError::ClientConfig(_, _, name, _) => Error::configuration(format!(
            "{cannot}: librdkafka does not know the setting {name}, or not with this value, or not in this build \
             (TLS needs the feature ssl, Kerberos the feature sasl, OIDC the feature oidc and libcurl)"
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
    fn every_setting_that_the_relay_fixes_is_refused_by_name() {
        for (name, _) in FIXED_OF_PRODUCER {
            let error = producer_config(&Relay::new("b").set(*name, "1")).unwrap_err();
            assert!(error.is_configuration() && error.to_string().contains(name), "{name}: {error}");
        }
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

    fn problem(settings: &[(&str, &str)], has_provider: bool) -> Option<String> {
        let settings: Vec<_> = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        token_problems(&settings, has_provider, "Kafka::token_from")
    }

    #[cfg(feature = "ssl")]
    #[test]
    fn a_client_that_would_never_have_a_token_is_refused_with_what_to_do() {
        let sasl = ("security.protocol", "SASL_SSL");
        let without = problem(&[sasl, ("sasl.mechanisms", "OAuthBearer")], false).unwrap();
        assert!(without.contains("Kafka::token_from"), "{without}");
        let unsecured = [("sasl.mechanism", "OAUTHBEARER"), ("enable.sasl.oauthbearer.unsecure.jwt", "true")];
        assert!(problem(&unsecured, false).unwrap().contains("without being renewed"));
        assert!(problem(&[], true).unwrap().contains("security.protocol"));
        assert!(problem(&[sasl, ("sasl.mechanism", "PLAIN")], true).unwrap().contains("OAUTHBEARER"));
        let oidc = ("sasl.oauthbearer.method", "oidc");
        assert!(problem(&[sasl, oidc], true).unwrap().contains("exclude each other"));
        let own = problem(&[sasl, ("sasl.mechanism", "OAUTHBEARER"), oidc], false);
        let says_what_to_do =
            |text: &String| text.contains("needs the feature oidc") && text.contains("Kafka::token_from");
        assert_eq!(own.is_none(), cfg!(feature = "oidc"), "{own:?}");
        assert!(own.as_ref().is_none_or(says_what_to_do), "{own:?}");
        assert_eq!((problem(&[sasl], true), problem(&[sasl, ("sasl.mechanism", "PLAIN")], false)), (None, None));
    }

    #[test]
    fn a_group_and_a_broker_are_needed() {
        let text = config(&Kafka::new(" ", "")).unwrap_err().to_string();
        assert!(text.contains("no broker") && text.contains("no consumer group"), "{text}");
    }
}
