//! Whether a redelivered record is a duplicate, by the identity policy of its topic.

use std::time::Duration;

use wharf::operate::QuarantineFilter;
use wharf::{Identity, Inbox, InboxBuilder, Receipt, Record};

use super::scene::{Db, Runs, Scene};
use support::events::Events;

const ACCEPTED: Receipt = Receipt::Accepted { deliveries: 1 };
const DUPLICATE: Receipt = Receipt::Duplicate { added: 0 };

fn quarantined(reason: &'static str) -> Receipt {
    Receipt::Quarantined { reason }
}

fn structured(payload: &'static str) -> Record {
    Record::new("orders").with_header("content-type", "application/cloudevents+json; charset=UTF-8").with_payload(payload)
}

/// An inbox with one handler for `orders`.
fn inbox(scene: &Scene, identity: Identity) -> Inbox<Db> {
    let builder = scene.inbox().subscribe("orders", Runs::new().handler("stock"));
    builder.identity("orders", identity).build().unwrap()
}

async fn ids(scene: &Scene) -> Vec<String> {
    scene.database.query_texts("SELECT concat_ws(' @ ', message_id, source) FROM inbox_message ORDER BY seq").await
}

async fn accept_each(inbox: &Inbox<Db>, records: impl IntoIterator<Item = Record>) -> Vec<Receipt> {
    inbox.accept_or_quarantine(records).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cloud_event_is_one_message_in_either_mode_and_the_source_is_part_of_its_identity() {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    let binary = |source: &'static str| {
        let record = Record::new("orders").with_header("ce_id", "1").with_header("ce_source", source);
        record.with_header("ce_id", "a second id does not count").with_payload("p")
    };
    let json = r#"{"id": "2", "source": "/shop", "type": "placed"}"#;

    let receipts = accept_each(
        &inbox,
        [binary("/shop"), binary("/shop"), binary("/mall"), structured(json), structured(json), structured("{\"id\"")],
    )
    .await;

    let broken = quarantined("cloud event is not a JSON object");
    assert_eq!(receipts, [ACCEPTED, DUPLICATE, ACCEPTED, ACCEPTED, DUPLICATE, broken]);
    assert_eq!(ids(&scene).await, ["1 @ /shop", "1 @ /mall", "2 @ /shop"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_identity_policy_recognizes_a_duplicate() {
    let record = || {
        let record = Record::new("orders").with_position(1, 7).with_key("k").with_header("h", "v").with_header("h", "w");
        record.with_payload(r#"{"order": {"id": 17}}"#)
    };
    let both = Identity::all_of([Identity::key(), Identity::json_pointer("/order/id")]);
    let policies = [
        (Identity::header("h"), "v @ orders"),
        (Identity::key(), "k @ orders"),
        (Identity::json_pointer("/order/id"), "17 @ orders"),
        (both, "k|17 @ orders"),
        (Identity::position(), "orders/1/7 @ orders"),
        (Identity::by(|record| record.position().map(|at| format!("#{}", at.offset))), "#7 @ orders"),
    ];
    let scene = Scene::new().await;
    let mut expected = Vec::new();
    for (policy, id) in policies {
        let inbox = inbox(&scene, policy);
        assert_eq!(accept_each(&inbox, [record(), record()]).await, [ACCEPTED, DUPLICATE], "{id}");
        assert_eq!(accept_each(&inbox, [record()]).await, [DUPLICATE], "{id}");
        expected.push(id);
    }
    assert_eq!(ids(&scene).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_of_a_combined_identity_are_separated_unambiguously() {
    let scene = Scene::new().await;
    let inbox = inbox(&scene, Identity::all_of([Identity::header("a"), Identity::header("b")]));
    let record = |a: &'static str, b: &'static str| Record::new("orders").with_header("a", a).with_header("b", b);

    let receipts = accept_each(&inbox, [record("a", "b|c"), record("a|b", "c"), record("a", "b|c")]).await;

    assert_eq!(receipts, [ACCEPTED, ACCEPTED, DUPLICATE]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_without_identity_is_quarantined_once_unless_the_policy_allows_it() {
    let scene = Scene::new().await;
    let inbox = inbox(&scene, Identity::header("h"));
    let record = || Record::new("orders").with_position(0, 5).with_key("k").with_payload("p");

    let receipts = accept_each(&inbox, [record(), record(), record().with_id("explicit")]).await;

    let missing = quarantined("missing identity");
    assert_eq!(receipts, [missing.clone(), missing, ACCEPTED]);
    let rows = "SELECT concat_ws('|', reason, detail, message_id, kafka_offset, inbox_text(record_key),
                inbox_text(payload)) FROM inbox_quarantine";
    assert_eq!(scene.database.query_texts(rows).await, [r#"missing identity|looked for the header "h"|5|k|p"#]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_position_replaces_a_missing_identity_and_this_is_reported() {
    let scene = Scene::new().await;
    let events = Events::capture();
    let topic = "orders-by-position";
    let builder = scene.inbox().subscribe(topic, Runs::new().handler("stock"));
    let inbox = builder.identity(topic, Identity::header("h").or_position()).build().unwrap();
    let at = |offset| Record::new(topic).with_position(0, offset).with_payload("the same");

    let receipts = accept_each(
        &inbox,
        [at(1), at(2), at(1), at(3).with_header("h", "own"), at(4).with_header("h", format!("{topic}/0/9")), Record::new(topic)],
    )
    .await;

    let (reserved, missing) = (quarantined("identity has the form of a position"), quarantined("missing identity"));
    assert_eq!(receipts, [ACCEPTED, ACCEPTED, DUPLICATE, ACCEPTED, reserved, missing]);
    let used = events.matching(|event| event.message == "identified by position" && event.has("topic", topic));
    let used: Vec<&str> = used.iter().filter_map(|event| event.field("message_id")).collect();
    assert_eq!(used, ["orders-by-position/0/1", "orders-by-position/0/2", "orders-by-position/0/1"]);
}

// Two Kafka clusters feed one database.
#[tokio::test(flavor = "multi_thread")]
async fn records_at_the_same_position_of_two_clusters_are_two_messages() {
    let scene = Scene::new().await;
    let at = || Record::new("orders").with_position(0, 1);
    let inbox = inbox(&scene, Identity::position());

    let receipts = accept_each(
        &inbox,
        [at().with_cluster("a").with_payload("p"), at().with_cluster("b").with_payload("p"), at().with_cluster("b").with_payload("p")]
            .into_iter()
            .chain([at().with_payload("another"), at().with_payload("another")]),
    )
    .await;

    assert_eq!(receipts, [ACCEPTED, ACCEPTED, DUPLICATE, ACCEPTED, DUPLICATE]);
    assert_eq!(ids(&scene).await, ["orders/0/1@a @ orders", "orders/0/1@b @ orders", "orders/0/1 @ orders"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn records_at_the_same_position_of_two_clusters_are_quarantined_each_and_replayed_under_their_own_identity() {
    let scene = Scene::new().await;
    let of = |cluster: &'static str| Record::new("orders").with_position(0, 1).with_cluster(cluster).with_payload("p");
    let receipts = accept_each(&inbox(&scene, Identity::header("h")), [of("a"), of("b"), of("b")]).await;
    assert_eq!(receipts, vec![quarantined("missing identity"); 3]);
    assert_eq!(scene.count("inbox_quarantine").await, 2);

    assert_eq!(scene.store.operate().replay_quarantined(&QuarantineFilter::all(), 10).await.unwrap(), 2);
    let running = inbox(&scene, Identity::header("h").or_position()).start().await.unwrap();
    scene.until("SELECT (count(*) = 0)::int::bigint FROM inbox_quarantine").await;

    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!(ids(&scene).await, ["orders/0/1@a @ orders", "orders/0/1@b @ orders"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn undeduplicated_records_are_accepted_each_time_and_reported() {
    let scene = Scene::new().await;
    let events = Events::capture();
    let (topic, runs) = ("orders-undeduplicated", Runs::new());
    let builder = scene.inbox().subscribe(topic, runs.handler("stock"));
    let inbox = builder.identity(topic, Identity::cloud_events().or_undeduplicated()).build().unwrap();

    let same = || Record::new(topic).with_position(0, 1).with_payload("the same");
    assert_eq!(accept_each(&inbox, [same(), same()]).await, [ACCEPTED, ACCEPTED]);

    let running = inbox.start().await.unwrap();
    runs.reached(2).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    let said = events.matching(|event| event.message == "undeduplicated" && event.has("topic", topic));
    let mut said: Vec<String> = said.iter().filter_map(|event| event.field("message_id").map(str::to_owned)).collect();
    said.sort();
    assert_eq!(said, runs.sorted());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_identity_or_a_panicking_function_affects_its_own_record_only() {
    let scene = Scene::new().await;
    let by_key = Identity::by(|record| {
        let key = record.key()?;
        assert_ne!(key, b"panic", "on purpose");
        Some(key.to_vec())
    });
    let inbox = inbox(&scene, by_key.or_undeduplicated());
    let keyed = |key: &'static [u8]| Record::new("orders").with_key(key).with_header(vec![0xff, 0], "hostile");

    let receipts = accept_each(
        &inbox,
        [keyed(b"a"), keyed(b"panic"), keyed(b"\xff"), keyed(b"a\0b"), keyed(&[b'x'; 201]), keyed(b"b")],
    )
    .await;

    let reasons = ["identity function panicked", "identity is not text", "identity is not text", "identity too long"];
    let [panicked, binary, nul, long] = reasons.map(quarantined);
    assert_eq!(receipts, [ACCEPTED, panicked, binary, nul, long, ACCEPTED]);
    assert_eq!(ids(&scene).await, ["a @ orders", "b @ orders"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_of_one_type_gets_structured_events_and_broken_events_are_quarantined() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock").event_type("placed")).build().unwrap();

    let receipts = accept_each(
        &inbox,
        [
            structured(r#"{"id": "1", "source": "/shop", "type": "placed"}"#),
            structured(r#"{"id": "2", "source": "/shop", "type": "returned"}"#),
            structured(r#"{"id": "3", "source": "/shop", "type": "pla"#),
        ],
    )
    .await;

    assert_eq!(receipts, [ACCEPTED, Receipt::Unwanted, quarantined("cloud event is not a JSON object")]);
    inbox.drain().await.unwrap();
    assert_eq!(runs.ids(), ["1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn all_invalid_policies_are_reported_at_once() {
    let scene = Scene::new().await;
    let refused = |builder: InboxBuilder<Db>| builder.build().unwrap_err().to_string();
    let builder = scene.inbox().subscribe(["orders", "returns"], Runs::new().handler("stock"));

    let error = refused(
        builder
            .identity("order", Identity::key())
            .identity(["orders", "returns"], Identity::key())
            .identity("returns", Identity::json_pointer("id")),
    );

    for problem in [
        r#"the identity of "order" is given, but no handler subscribes to it"#,
        r#"the identity of "returns" is given 2 times"#,
        r#"the identity of "returns": "id": a JSON pointer begins with a slash"#,
    ] {
        assert!(error.contains(problem), "{error}");
    }
}
