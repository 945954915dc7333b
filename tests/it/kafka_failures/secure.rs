//! Settings: those that the guarantees depend on are refused, TLS and SCRAM work as documented, and no secret is ever
//! shown.

use std::error::Error as _;

use tokio::sync::OnceCell;
use wharf::kafka::Kafka as Source;
use wharf::{Error, Identity};

use super::sources::{has_kafka_error, until};
use super::stage::{Stage, end, range};
use crate::scene::{Runs, within};
use support::events::{Event, Events};
use support::kafka::{Kafka, KafkaOptions, KafkaTls, SCRAM_PASSWORD, SCRAM_USER};
use support::tls::Certificates;

const WRONG_PASSWORD: &str = "hunter2-is-not-the-password";

/// A broker with both listeners, for the tests of this file.
struct Secured {
    kafka: Kafka,
    certificates: Certificates,
}

async fn secured() -> &'static Secured {
    static SECURED: OnceCell<Secured> = OnceCell::const_new();
    let start = || async {
        let certificates = Certificates::generate();
        let tls = KafkaTls::from(certificates.server.clone());
        let mutual = KafkaTls {
            client_authority_pem: Some(certificates.authority_pem.clone()),
            ..KafkaTls::from(certificates.server.clone())
        };
        let options = KafkaOptions { tls: Some(mutual), scram: Some(tls), ..KafkaOptions::steady() };
        Secured { kafka: Kafka::start_with(options).await, certificates }
    };
    SECURED.get_or_init(start).await
}

impl Secured {
    async fn stage(&self) -> Stage {
        Stage::on(self.kafka.clone(), 1).await
    }

    fn over_tls(&self, stage: &Stage, authority: &std::path::Path) -> Source {
        Source::new(self.kafka.tls_brokers(), &stage.group)
            .set("security.protocol", "ssl")
            .set("ssl.ca.location", authority.display().to_string())
            .set("ssl.certificate.pem", &*self.certificates.client.certificate_pem)
            .set("ssl.key.pem", &*self.certificates.client.key_pem)
    }

    fn over_scram(&self, stage: &Stage, password: &str) -> Source {
        Source::new(self.kafka.scram_brokers(), &stage.group)
            .set("security.protocol", "sasl_ssl")
            .set("ssl.ca.location", self.certificates.authority_path.display().to_string())
            .set("sasl.mechanism", "SCRAM-SHA-256")
            .set("sasl.username", SCRAM_USER)
            .set("sasl.password", password)
    }
}

/// Reads three records through this source.
async fn flows(stage: &Stage, source: Source) {
    let runs = Runs::new();
    stage.produce(0, 3).await;
    let running = stage.start_from(source, &runs).await;
    runs.reached(3).await;
    end(running).await;
    assert_eq!(stage.positions().await, range(0, 0..3));
    assert_eq!(stage.committed(0).await, Some(3));
}

/// The full text of an error and its causes.
fn shown(error: &Error) -> String {
    let mut text = format!("{error} {error:?}");
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(" {cause} {cause:?}");
        source = cause.source();
    }
    text
}

fn is_error_of(stage: &Stage, event: &Event) -> bool {
    event.message == "kafka error" && event.has("group", &stage.group)
}

fn assert_never_logged(events: &Events, secret: &str) {
    let says = |event: &Event| format!("{event:?}").contains(secret);
    assert_eq!(events.matching(says), Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_read_over_tls_with_a_client_certificate() {
    let secured = secured().await;
    let stage = secured.stage().await;
    let source = secured.over_tls(&stage, &secured.certificates.authority_path);
    assert!(!format!("{source:?}").contains("PRIVATE KEY"));
    flows(&stage, source).await;
}

// With all debug output of librdkafka.
#[tokio::test(flavor = "multi_thread")]
async fn records_are_read_over_scram_and_the_password_is_never_shown() {
    let secured = secured().await;
    let stage = secured.stage().await;
    let events = Events::capture();
    let source = secured.over_scram(&stage, SCRAM_PASSWORD).set("debug", "security,conf,broker");
    assert!(!format!("{source:?}").contains(SCRAM_PASSWORD));
    flows(&stage, source).await;
    assert_never_logged(&events, SCRAM_PASSWORD);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_reported_without_its_value_and_a_correct_one_works() {
    let secured = secured().await;
    let stage = secured.stage().await;
    let (runs, events) = (Runs::new(), Events::capture());
    let running = stage.start_from(secured.over_scram(&stage, WRONG_PASSWORD), &runs).await;
    let refused = |event: &Event| event.message == "access refused" && event.has("group", &stage.group);
    let told = events.wait_for(refused).await;
    assert!(told.has("resource", "credentials"), "{told:?}");
    assert!(running.health().to_string().contains("Kafka refuses the credentials"), "{}", running.health());
    stage.scene.until("SELECT count(*) FROM inbox_ingest WHERE problem LIKE 'Kafka refuses the credentials%'").await;
    // The password was refused again since then, which is logged at debug level.
    events.wait_for(|event| is_error_of(&stage, event)).await;
    assert_eq!(events.matching(refused).len(), 1);
    end(running).await;
    assert_never_logged(&events, WRONG_PASSWORD);
    flows(&stage, secured.over_scram(&stage, SCRAM_PASSWORD)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_with_a_wrong_password_is_named_and_delays_no_other() {
    let secured = secured().await;
    let (stage, runs) = (secured.stage().await, Runs::new());
    stage.produce(0, 3).await;
    let inbox = stage.scene.inbox().subscribe(&*stage.topic, runs.handler("a"));
    let inbox = inbox
        .identity(&*stage.topic, Identity::position())
        .source(stage.source().named("open"))
        .source(secured.over_scram(&stage, WRONG_PASSWORD).named("locked"))
        .build()
        .unwrap();
    let running = within(inbox.start()).await.unwrap();
    runs.reached(3).await;
    let health = until(&running.monitor(), |health| has_kafka_error(health, "locked")).await;
    assert!(health.is_ready && !has_kafka_error(&health, "open"), "{health}");
    assert!(!health.to_string().contains(WRONG_PASSWORD), "{health}");
    end(running).await;
    assert_eq!(stage.positions().await, range(0, 0..3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_certificate_of_another_authority_is_refused_and_reported() {
    let secured = secured().await;
    let stage = secured.stage().await;
    let (runs, events) = (Runs::new(), Events::capture());
    stage.produce(0, 1).await;
    let source = secured.over_tls(&stage, &secured.certificates.other_authority_path);
    let running = stage.start_from(source, &runs).await;
    let refused = |event: &Event| is_error_of(&stage, event) && event.fields["error"].to_lowercase().contains("ssl");
    events.wait_for(refused).await;
    end(running).await;
    assert_eq!(runs.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_the_guarantee_depends_on_are_refused_with_the_reason_before_anything_runs() {
    let stage = Stage::new(1).await;
    let only_after = "only after its record is stored";
    let refused = [
        ("bootstrap.servers", "Kafka::new"),
        ("metadata.broker.list", "Kafka::new"),
        ("group.id", "Kafka::new"),
        ("enable.auto.commit", only_after),
        ("auto.commit.enable", only_after),
        ("enable.auto.offset.store", only_after),
        ("auto.offset.reset", "the position is the ledger's"),
        ("enable.partition.eof", "not a record"),
    ];
    for (name, reason) in refused {
        let source = stage.source().set(name, "hunter2");
        let error = within(stage.inbox(&Runs::new()).start_from(source)).await.unwrap_err();
        let text = shown(&error);
        assert!(error.is_configuration() && !error.is_transient(), "{text}");
        assert!(text.contains(&format!("{name} cannot be set")) && text.contains(reason), "{text}");
        assert!(!text.contains("hunter2"), "{text}");
    }
    assert_eq!(stage.scene.count("inbox_processor").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_setting_that_librdkafka_refuses_is_named_and_its_value_is_not() {
    let stage = Stage::new(1).await;
    let secret = "hunter2-secret";
    let wrong: [&[(&str, &str)]; 6] = [
        &[("no.such.setting", secret)],
        &[("session.timeout.ms", secret)],
        &[("ssl.key.pem", secret), ("security.protocol", "ssl")],
        &[("ssl.ca.pem", secret), ("security.protocol", "ssl")],
        &[("ssl.keystore.location", "/nowhere"), ("ssl.keystore.password", secret), ("security.protocol", "ssl")],
        &[("sasl.mechanism", "GSSAPI-hunter2"), ("sasl.password", secret), ("security.protocol", "sasl_ssl")],
    ];
    for settings in wrong {
        let source = settings.iter().fold(stage.source(), |source, (name, value)| source.set(*name, *value));
        let events = Events::capture();
        let error = within(stage.inbox(&Runs::new()).start_from(source)).await.unwrap_err();
        assert!(error.is_configuration(), "{error}");
        assert!(!shown(&error).contains(secret), "{}", shown(&error));
        assert_never_logged(&events, secret);
    }
    assert_eq!(stage.scene.count("inbox_processor").await, 0);
}

// librdkafka quotes the part that it does not understand.
#[tokio::test(flavor = "multi_thread")]
async fn a_broken_oauthbearer_setting_is_not_quoted() {
    let stage = Stage::new(1).await;
    let events = Events::capture();
    let source = stage
        .source()
        .set("security.protocol", "sasl_plaintext")
        .set("sasl.mechanism", "OAUTHBEARER")
        .set("enable.sasl.oauthbearer.unsecure.jwt", "true")
        .set("sasl.oauthbearer.config", "hunter2-token");
    let runs = Runs::new();
    match within(stage.inbox(&runs).start_from(source)).await {
        Err(error) => assert!(!shown(&error).contains("hunter2-token"), "{}", shown(&error)),
        Ok(running) => {
            events.wait_for(|event| is_error_of(&stage, event)).await;
            end(running).await;
        }
    }
    assert_never_logged(&events, "hunter2-token");
}
