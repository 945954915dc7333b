//! Identities from decoded payloads: undecodable records are quarantined, and records wait while the registry is
//! unavailable.

use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use support::events::{Event, Events};
use support::kafka_records::TestRecord;
use support::registry::{Mood, TestRegistry};
use wharf::formats::{Avro, ByRegistry, Decoder, Encoded, Undecoded};
use wharf::health::HealthReason;
use wharf::operate::QuarantineFilter;
use wharf::{Identity, Inbox, Limits, Receipt, Record};

use super::{FIXTURES, client, fixture, started};
use crate::kafka::stage::Stage;
use crate::scene::{Db, Runs, Scene, quick, within};

fn inbox(scene: &Scene, registry: &TestRegistry, limits: Limits) -> Inbox<Db> {
    let identity = Identity::decoded(ByRegistry::new(&client(registry)), "/number");
    let builder = scene.inbox().limits(limits).subscribe("orders", Runs::new().handler("stock"));
    builder.identity("orders", identity).build().unwrap()
}

/// A record of the fixtures without an explicit id.
fn nameless(name: &str) -> Record {
    Record::new("orders").with_payload(fixture(name).payload().unwrap().to_vec())
}

async fn ids(scene: &Scene) -> Vec<String> {
    scene.database.query_texts("SELECT message_id FROM inbox_message ORDER BY 1").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_field_of_avro_protobuf_or_json_is_the_identity() {
    let (scene, registry) = (Scene::new().await, started());
    let inbox = inbox(&scene, &registry, quick());
    for name in ["avro", "protobuf", "avro"] {
        inbox.accept(nameless(name)).await.unwrap();
    }
    assert_eq!(ids(&scene).await, ["-17", "17"]);
    let other = inbox.accept(nameless("json")).await.unwrap_err();
    assert!(other.is_refused(), "identity 17 belongs to another payload: {other:#}");
    let missing = inbox.accept(nameless("avro_reference")).await.unwrap_err();
    assert!(
        missing.to_string().contains("missing identity (looked for \"/number\" of the decoded payload)"),
        "{missing}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_decoded_key_is_the_identity_even_of_a_tombstone() {
    let (scene, registry) = (Scene::new().await, started());
    let identity = Identity::decoded_key(ByRegistry::new(&client(&registry)), "");
    let builder = scene.inbox().subscribe("orders", Runs::new().handler("stock"));
    let inbox = builder.identity("orders", identity).build().unwrap();
    let key = fixture("avro_key").payload().unwrap().to_vec();
    inbox.accept(Record::new("orders").with_key(key)).await.unwrap();
    assert_eq!(ids(&scene).await, ["17"]);
    let unknown = Record::new("orders").with_key(&b"\0\0\0\0\x63x"[..]).with_payload("{}");
    let accepted = inbox.accept_or_quarantine([unknown]).await.unwrap();
    assert_eq!(accepted, [Receipt::Quarantined { reason: "key cannot be decoded" }]);
    let missing = inbox.accept(nameless("avro")).await.unwrap_err();
    assert!(missing.to_string().contains("looked for \"\" of the decoded key"), "{missing}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undecodable_record_is_quarantined_and_a_replay_decodes_it_again() {
    let (scene, registry) = (Scene::new().await, TestRegistry::start(Vec::new()));
    let accepted = inbox(&scene, &registry, quick()).accept_or_quarantine([nameless("avro")]).await.unwrap();
    assert_eq!(accepted, [Receipt::Quarantined { reason: "payload cannot be decoded" }]);
    let detail = "SELECT detail FROM inbox_quarantine";
    assert_eq!(scene.database.query_texts(detail).await, ["the registry does not know schema 1"]);

    FIXTURES["schemas"].as_array().unwrap().iter().for_each(|schema| registry.add(schema.clone()));
    scene.store.operate().replay_quarantined(&QuarantineFilter::all(), 10).await.unwrap();
    // A new inbox, because the first has cached that the schema is unknown.
    let running = inbox(&scene, &registry, quick()).start().await.unwrap();
    scene.until("SELECT (count(*) = 0)::int::bigint FROM inbox_quarantine").await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!(ids(&scene).await, ["-17"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn accepting_fails_while_the_registry_is_unavailable_and_quarantines_nothing() {
    let (scene, registry) = (Scene::new().await, started());
    registry.set(Mood::Fails(503));
    let inbox = inbox(&scene, &registry, quick().accept_patience(Duration::from_secs(1)));
    let error = inbox.accept_or_quarantine([nameless("avro")]).await.unwrap_err();
    assert!(error.is_transient() && format!("{error:#}").contains("answers 503"), "{error:#}");
    assert_eq!((scene.count("inbox_quarantine").await, scene.count("inbox_message").await), (0, 0));
}

/// A Kafka record with the payload of a fixture, whose frame has the schema id.
fn avro(name: &str) -> TestRecord {
    TestRecord::new(fixture(name).payload().unwrap().to_vec())
}

async fn panics() -> Result<(), Undecoded> {
    panic!("while it is waited for")
}

/// A user's decoder that is never ready at once. Depending on the payload, it fails or panics in `ready`.
struct Moody;

impl Decoder<Value> for Moody {
    fn decode(&self, encoded: &Encoded<'_>) -> Result<Value, Undecoded> {
        Ok(json!({ "number": String::from_utf8_lossy(encoded.bytes()) }))
    }

    fn ready<'a>(&'a self, encoded: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
        match encoded.bytes() {
            b"panics at once" => panic!("at once"),
            b"fails" => Some(Box::pin(async { Err(Undecoded::undecodable("no such version")) })),
            b"panics" => Some(Box::pin(panics())),
            _ => Some(Box::pin(async { Ok(()) })),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_can_never_be_decoded_is_quarantined_and_those_behind_it_are_accepted() {
    let (stage, registry, runs) = (Stage::new(2).await, started(), Runs::new());
    let unknown = |payload: &'static [u8]| TestRecord::new(payload.to_vec());
    let hostile = [unknown(b"\0\0\0\0\x63data"), unknown(b"\0\0\0"), unknown(b"\0\xff\xff\xff\xffdata")];
    let guid = unknown(b"\x01this is no Avro at all");
    let [first, second, third] = hostile;
    stage.kafka.produce(&stage.topic, 0, &[first, second, avro("avro"), third, guid, avro("avro_v2")]).await;
    stage.kafka.produce(&stage.topic, 1, &[unknown(b"\0\0\0\0\x62data"), avro("avro_reference")]).await;
    let by_number = Identity::decoded(Avro::new(&client(&registry)), "/number").or_position();
    let running = stage.start_with(by_number, quick(), &runs).await;
    runs.reached(3).await;
    within(running.shutdown(Duration::from_secs(5))).await.unwrap();
    assert_eq!((stage.ledger(0).await, stage.ledger(1).await), (Some(6), Some(2)));
    assert_eq!(stage.quarantined().await, ["payload cannot be decoded"; 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decoder_that_fails_or_panics_in_ready_quarantines_only_that_record() {
    let (stage, runs) = (Stage::new(1).await, Runs::new());
    let records = ["fails", "a", "panics", "b", "panics at once", "c"].map(TestRecord::new);
    stage.kafka.produce(&stage.topic, 0, &records).await;
    let running = stage.start_with(Identity::decoded(Moody, "/number"), quick(), &runs).await;
    runs.reached(3).await;
    within(running.shutdown(Duration::from_secs(5))).await.unwrap();
    assert_eq!((stage.ledger(0).await, runs.sorted()), (Some(6), vec!["a".into(), "b".into(), "c".into()]));
    let details = "SELECT detail FROM inbox_quarantine ORDER BY kafka_offset";
    let panicked = "the decoder panicked";
    assert_eq!(stage.scene.database.query_texts(details).await, ["no such version", panicked, panicked]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_waits_for_the_registry_and_others_continue() {
    let events = Events::capture();
    let (stage, registry, runs) = (Stage::new(2).await, started(), Runs::new());
    registry.set(Mood::Down);
    stage.kafka.produce(&stage.topic, 0, &[avro("avro"), avro("avro_v2")]).await;
    // These have their identity in a header, so their payload is not decoded.
    stage.kafka.produce(&stage.topic, 1, &["a", "b"].map(|id| avro("avro").with_header("id", id))).await;
    let by_number = Identity::decoded(Avro::new(&client(&registry)), "/number");
    let identity = Identity::first_of([Identity::header("id"), by_number]);
    let running = stage.start_with(identity, quick(), &runs).await;
    runs.reached(2).await;
    registry.reached(2).await;
    assert_eq!((stage.ledger(0).await.unwrap_or(0), stage.ledger(1).await), (0, Some(2)));
    assert_eq!(stage.scene.count("inbox_quarantine").await, 0);
    // The reason is in the health of the inbox and in the database.
    let health = running.health();
    let Some(HealthReason::PartitionWaits { topic, partition, why, .. }) = health.reasons.first() else {
        panic!("{health:?}")
    };
    assert!(*topic == stage.topic && *partition == 0 && why.contains("cannot be reached"), "{why}");
    let noted = "SELECT (count(*) = 1)::int::bigint FROM inbox_partition WHERE state = 'waiting' AND why LIKE '%cannot be reached%'";
    stage.scene.until(noted).await;
    let diagnosis = stage.scene.store.operate().doctor().await.unwrap();
    assert!(
        diagnosis.symptoms.iter().any(|symptom| symptom.advice.contains("check the schema registry")),
        "{diagnosis:?}"
    );

    registry.set(Mood::Well);
    runs.reached(4).await;
    let is_waiting = |reason: &HealthReason| matches!(reason, HealthReason::PartitionWaits { .. });
    assert!(!running.health().reasons.iter().any(is_waiting), "{}", running.health());
    within(running.shutdown(Duration::from_secs(5))).await.unwrap();
    let about = |start: &str| events.matching(|e: &Event| e.has("topic", &stage.topic) && e.message.starts_with(start));
    assert_eq!(
        (about("partition waits").len(), about("decoder is back").len()),
        (1, 1),
        "one event of each kind per outage"
    );
    assert_eq!(stage.ledger(0).await, Some(2));
    assert_eq!(ids(&stage.scene).await, ["-17", "1099511627776", "a", "b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_whose_registry_is_unavailable_does_not_block_the_replay_of_others() {
    let (scene, registry) = (Scene::new().await, started());
    registry.set(Mood::Down);
    let inbox = |orders: Identity, plain: Identity| {
        let builder = scene.inbox().subscribe(["orders", "plain"], Runs::new().handler("stock"));
        builder.identity("orders", orders).identity("plain", plain).build().unwrap()
    };
    let records = [nameless("avro"), Record::new("plain").with_key("a"), nameless("avro_v2")];
    let nowhere = || Identity::header("id");
    inbox(nowhere(), nowhere()).accept_or_quarantine(records).await.unwrap();
    assert_eq!(scene.store.operate().replay_quarantined(&QuarantineFilter::all(), 10).await.unwrap(), 3);

    let by_number = Identity::decoded(Avro::new(&client(&registry)), "/number");
    let running = inbox(by_number, Identity::key()).start().await.unwrap();
    scene.until("SELECT (count(*) = 2)::int::bigint FROM inbox_quarantine WHERE replay_asked_at IS NOT NULL").await;
    assert_eq!((ids(&scene).await, scene.count("inbox_quarantine").await), (vec!["a".to_owned()], 2));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}
