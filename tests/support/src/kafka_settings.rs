//! The `server.properties` of a test's broker.
//!
//! Besides the plain listener, which the test helpers use, the broker can have one with TLS, one with TLS and SCRAM,
//! and one with OAuth tokens. It is as durable as one broker can be: a killed broker loses no acknowledged record.

use std::path::Path;
use std::time::Duration;

use crate::folder::ServiceFolder;
use crate::kafka::{KafkaOptions, KafkaTls};
use crate::kafka_binaries::NODE_ID;
use crate::ports::free_port;

/// Records up to 32 MiB, plus some overhead.
const MESSAGE_BYTES_MAX: usize = (32 << 20) + (64 << 10);

/// The ports of a broker; the same over restarts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KafkaPorts {
    pub plain: u16,
    pub controller: u16,
    pub tls: Option<u16>,
    pub scram: Option<u16>,
    pub tokens: Option<u16>,
}

impl KafkaPorts {
    pub(crate) fn choose(options: &KafkaOptions) -> KafkaPorts {
        KafkaPorts {
            plain: free_port(),
            controller: free_port(),
            tls: options.tls.as_ref().map(|_| free_port()),
            scram: options.scram.as_ref().map(|_| free_port()),
            tokens: options.tokens.map(|_| free_port()),
        }
    }
}

/// The content of the file. The server uses the last of two values, so the test's own settings come last.
pub(crate) fn server_properties(
    options: &KafkaOptions,
    ports: KafkaPorts,
    data: &Path,
    folder: &ServiceFolder,
) -> String {
    let mut settings = common_settings(ports, data);
    settings.extend(listener_settings(ports));
    if let Some(tls) = &options.tls {
        settings.extend(tls_settings("tls", tls, folder));
    }
    if let Some(tls) = &options.scram {
        settings.extend(tls_settings("scram", tls, folder));
        settings.extend(scram_settings());
    }
    if let Some(session) = options.tokens {
        settings.extend(token_settings(session));
    }
    settings.extend(options.settings.iter().cloned());
    settings.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
}

/// Settings that join a broker to the cluster whose controller listens on this port.
pub(crate) fn joining_settings(node_id: u16, ports: KafkaPorts, controller: u16) -> String {
    let plain = ports.plain;
    format!(
        "process.roles=broker\nnode.id={node_id}\ncontroller.quorum.voters={NODE_ID}@127.0.0.1:{controller}\n\
         listeners=PLAINTEXT://127.0.0.1:{plain}\nadvertised.listeners=PLAINTEXT://127.0.0.1:{plain}\n"
    )
}

fn common_settings(ports: KafkaPorts, data: &Path) -> Vec<(String, String)> {
    let message_bytes_max = MESSAGE_BYTES_MAX.to_string();
    owned(&[
        ("process.roles", "broker,controller"),
        ("node.id", &NODE_ID.to_string()),
        ("controller.quorum.voters", &format!("{NODE_ID}@127.0.0.1:{}", ports.controller)),
        ("log.dirs", &data.display().to_string()),
        ("auto.create.topics.enable", "false"),
        // One broker cannot keep the default of three copies, and one partition is enough for our few groups.
        ("offsets.topic.replication.factor", "1"),
        ("offsets.topic.num.partitions", "1"),
        ("transaction.state.log.replication.factor", "1"),
        ("transaction.state.log.min.isr", "1"),
        ("transaction.state.log.num.partitions", "1"),
        ("share.coordinator.state.topic.replication.factor", "1"),
        ("share.coordinator.state.topic.min.isr", "1"),
        ("share.coordinator.state.topic.num.partitions", "1"),
        ("message.max.bytes", &message_bytes_max),
        ("replica.fetch.max.bytes", &message_bytes_max),
        // A group does not wait for further members at its start.
        ("group.initial.rebalance.delay.ms", "0"),
        // Session timeouts may be short, so that tests need not wait long for a member to expire.
        ("group.min.session.timeout.ms", "500"),
        ("group.consumer.min.session.timeout.ms", "500"),
        ("group.consumer.min.heartbeat.interval.ms", "100"),
        // After a kill the broker waits for its own registration to expire: 13 s by default, 6 s with this setting.
        ("broker.session.timeout.ms", "1500"),
        ("broker.heartbeat.interval.ms", "300"),
        // Topics are compacted soon, instead of after fifteen seconds.
        ("log.cleaner.backoff.ms", "100"),
        // Deleted topics are removed from the disk soon, instead of after a minute.
        ("log.segment.delete.delay.ms", "1000"),
    ])
}

fn listener_settings(ports: KafkaPorts) -> Vec<(String, String)> {
    let listeners = [
        ("PLAINTEXT", "PLAINTEXT", Some(ports.plain)),
        ("TLS", "SSL", ports.tls),
        ("SCRAM", "SASL_SSL", ports.scram),
        ("TOKENS", "SASL_PLAINTEXT", ports.tokens),
        // Last, because it is not advertised.
        ("CONTROLLER", "PLAINTEXT", Some(ports.controller)),
    ];
    let open = || listeners.iter().filter_map(|(name, protocol, port)| Some((name, protocol, (*port)?)));
    let addresses: Vec<String> = open().map(|(name, _, port)| format!("{name}://127.0.0.1:{port}")).collect();
    let protocols: Vec<String> = open().map(|(name, protocol, _)| format!("{name}:{protocol}")).collect();
    owned(&[
        ("listeners", &addresses.join(",")),
        ("advertised.listeners", &addresses[..addresses.len() - 1].join(",")),
        ("listener.security.protocol.map", &protocols.join(",")),
        ("controller.listener.names", "CONTROLLER"),
        ("inter.broker.listener.name", "PLAINTEXT"),
    ])
}

fn tls_settings(listener: &str, tls: &KafkaTls, folder: &ServiceFolder) -> Vec<(String, String)> {
    let prefix = format!("listener.name.{listener}.ssl");
    let identity = format!("{}{}", tls.server.key_pem, tls.server.certificate_pem);
    let identity = folder.write(&format!("{listener}-identity.pem"), &identity).display().to_string();
    let mut settings =
        owned(&[(&format!("{prefix}.keystore.type"), "PEM"), (&format!("{prefix}.keystore.location"), &identity)]);
    if let Some(authority) = &tls.client_authority_pem {
        let authority = folder.write(&format!("{listener}-authority.pem"), authority).display().to_string();
        settings.extend(owned(&[
            (&format!("{prefix}.client.auth"), "required"),
            (&format!("{prefix}.truststore.type"), "PEM"),
            (&format!("{prefix}.truststore.location"), &authority),
        ]));
    }
    settings
}

fn scram_settings() -> Vec<(String, String)> {
    owned(&[
        ("listener.name.scram.sasl.enabled.mechanisms", "SCRAM-SHA-256"),
        (
            "listener.name.scram.scram-sha-256.sasl.jaas.config",
            "org.apache.kafka.common.security.scram.ScramLoginModule required;",
        ),
    ])
}

/// Accepts unsigned tokens, which is the default of Kafka's login module.
fn token_settings(session: Duration) -> Vec<(String, String)> {
    owned(&[
        ("listener.name.tokens.sasl.enabled.mechanisms", "OAUTHBEARER"),
        (
            "listener.name.tokens.oauthbearer.sasl.jaas.config",
            "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required \
             unsecuredLoginStringClaim_sub=\"broker\";",
        ),
        ("listener.name.tokens.oauthbearer.connections.max.reauth.ms", &session.as_millis().to_string()),
    ])
}

fn owned(settings: &[(&str, &str)]) -> Vec<(String, String)> {
    settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}
