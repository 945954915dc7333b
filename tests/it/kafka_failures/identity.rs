//! Identity policies on records from Kafka: each finds its id, records without a valid id are quarantined, and reading
//! a topic again runs nothing twice.

use wharf::Identity;

use super::stage::{Stage, end};
use crate::scene::{Runs, quick};
use support::events::Events;
use support::kafka_records::TestRecord;

const STRUCTURED: (&str, &str) = ("content-type", "application/cloudevents+json; charset=utf-8");

fn binary_event(id: &str, payload: &str) -> TestRecord {
    TestRecord::new(payload).with_header("ce_id", id).with_header("ce_source", "/shop")
}

fn structured_event(payload: &str) -> TestRecord {
    TestRecord::new(payload).with_header(STRUCTURED.0, STRUCTURED.1)
}

/// The result for the records, read once and then again: `source id` of the messages, reasons of the quarantined
/// records.
async fn stored_as(identity: Identity, records: &[TestRecord], messages: usize) -> (Vec<String>, Vec<String>) {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    stage.kafka.produce(&stage.topic, 0, records).await;
    for _ in 0..2 {
        let running = stage.start_with(identity.clone(), quick(), &runs).await;
        let count = records.len();
        let is_read = format!("SELECT count(*) FROM inbox_ledger WHERE next_offset = {count}");
        stage.scene.until(&is_read).await;
        stage.scene.settled().await;
        end(running).await;
        rewind(&stage).await;
    }
    assert_eq!(runs.count(), messages, "each message runs once");
    let ids = "SELECT replace(source || ' ' || regexp_replace(message_id, '@[A-Za-z0-9_-]{22}$', '@cluster'), $$TOPIC$$, 'topic')
               FROM inbox_message ORDER BY kafka_offset";
    let ids = stage.scene.database.query_texts(&ids.replace("TOPIC", &stage.topic)).await;
    (ids, stage.quarantined().await)
}

/// Resets the positions as if nothing had been read.
async fn rewind(stage: &Stage) {
    stage.kafka.delete_group(&stage.group).await;
    stage.scene.database.execute("DELETE FROM inbox_ledger").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cloud_events_in_binary_mode_are_known_by_source_and_id() {
    let other_source = TestRecord::new("c").with_header("ce_id", "1").with_header("ce_source", "/other");
    let records = [
        binary_event("1", "a"),
        binary_event("2", "b"),
        binary_event("1", "a"),
        other_source,
        TestRecord::new("d").with_header("ce_id", "1"),
        binary_event("", "e"),
        binary_event(&"x".repeat(201), "f"),
        TestRecord::new("g").with_header("ce_id", [0xff]).with_header("ce_source", "/shop"),
        TestRecord::new("h"),
        binary_event(&"é".repeat(200), "i"),
    ];

    let (ids, quarantined) = stored_as(Identity::cloud_events(), &records, 4).await;

    assert_eq!(ids[..3], ["/shop 1", "/shop 2", "/other 1"]);
    assert_eq!(
        quarantined,
        ["missing source", "empty identity", "identity too long", "identity is not text", "missing identity"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn cloud_events_in_structured_mode_are_known_by_source_and_id_and_broken_json_is_quarantined() {
    let records = [
        structured_event(r#"{"id": "1", "source": "/shop", "data": 1}"#),
        structured_event(r#"{"id": "1", "source": "/shop", "data"#),
        structured_event("\0\u{ff}"),
        structured_event(""),
        structured_event(r#"{"id": 17, "source": "/shop"}"#),
        structured_event(r#"{"id": "a\u0000b", "source": "/shop"}"#),
        structured_event(r#"{"id": "2", "source": "/shop"}"#),
    ];

    let (ids, quarantined) = stored_as(Identity::cloud_events(), &records, 2).await;

    assert_eq!(ids, ["/shop 1", "/shop 2"]);
    let broken = "cloud event is not a JSON object";
    let not_text = "cloud event has an attribute that is not text";
    assert_eq!(quarantined, [broken, broken, broken, not_text, "identity is not text"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_can_be_the_identity() {
    let with_id = |id: &str| TestRecord::new("p").with_header("message-id", id);
    let records = [with_id("1"), with_id("1"), with_id("2"), TestRecord::new("p").with_null_header("message-id")];

    let (ids, quarantined) = stored_as(Identity::header("message-id"), &records, 2).await;

    assert_eq!(ids, ["topic 1", "topic 2"]);
    assert_eq!(quarantined, ["missing identity"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_key_can_be_the_identity() {
    let binary = TestRecord::keyed([0xff], "p");
    let records = [TestRecord::keyed("1", "p"), TestRecord::tombstone("2"), TestRecord::keyed("1", "p"), binary];

    let (ids, quarantined) = stored_as(Identity::key(), &records, 2).await;

    assert_eq!(ids, ["topic 1", "topic 2"]);
    assert_eq!(quarantined, ["identity is not text"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_in_the_payload_can_be_the_identity() {
    let records = [
        TestRecord::new(r#"{"order": {"id": "1"}}"#),
        TestRecord::new(r#"{"order": {"id": 2}}"#),
        TestRecord::new(r#"{"order": {}}"#),
        TestRecord::new(r#"{"order": "#),
        TestRecord::tombstone("k"),
    ];

    let (ids, quarantined) = stored_as(Identity::json_pointer("/order/id"), &records, 2).await;

    assert_eq!(ids, ["topic 1", "topic 2"]);
    assert_eq!(quarantined, ["missing identity", "payload is not JSON", "missing identity"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_position_can_be_the_identity() {
    let (ids, quarantined) = stored_as(Identity::position(), &[TestRecord::new("p"), TestRecord::new("p")], 2).await;
    assert_eq!(ids, ["topic topic/0/0@cluster", "topic topic/0/1@cluster"]);
    assert!(quarantined.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_position_can_replace_a_missing_identity() {
    let records = [binary_event("1", "a"), TestRecord::new("p"), TestRecord::new("p"), binary_event("1", "a")];

    let (ids, quarantined) = stored_as(Identity::cloud_events().or_position(), &records, 3).await;

    assert_eq!(ids, ["/shop 1", "topic topic/0/1@cluster", "topic topic/0/2@cluster"]);
    assert!(quarantined.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_deduplication_a_record_without_identity_runs_each_time_it_is_read() {
    let records = [binary_event("1", "a"), TestRecord::new("p"), TestRecord::new("p")];

    // The second reading adds the two records without identity again, but not the one with an identity.
    let (ids, quarantined) = stored_as(Identity::cloud_events().or_undeduplicated(), &records, 1 + 2 * 2).await;

    assert_eq!(ids.len(), 5);
    assert_eq!(ids.iter().filter(|id| id.contains("undeduplicated/")).count(), 4);
    assert!(quarantined.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_id_with_another_payload_is_quarantined_as_a_conflict_and_reported() {
    let stage = Stage::new(2).await;
    let (runs, events) = (Runs::new(), Events::capture());
    stage.kafka.produce(&stage.topic, 0, &[binary_event("1", "first"), binary_event("1", "first")]).await;
    let running = stage.start_with(Identity::cloud_events(), quick(), &runs).await;
    runs.reached(1).await;

    stage.kafka.produce(&stage.topic, 1, &[binary_event("1", "second"), binary_event("2", "third")]).await;
    runs.reached(2).await;
    end(running).await;

    let conflicts = events.matching(|event| event.message == "conflict" && event.has("topic", &stage.topic));
    assert_eq!(conflicts.len(), 1);
    let payloads = "SELECT reason || ': ' || convert_from(payload, 'UTF8') FROM inbox_quarantine";
    assert_eq!(stage.scene.database.query_texts(payloads).await, ["conflict: second"]);
    assert_eq!((stage.committed(0).await, stage.committed(1).await), (Some(2), Some(2)));
}
