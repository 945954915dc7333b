//! An inbox whose registry is unavailable, comes back, or does not know a schema.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::Value;
use support::registry::Mood;
use wharf::formats::{Avro, ProtobufJson};
use wharf::{Failure, Message, Registration, RetryPolicy, handler};

use super::{client, fixture, started};
use crate::scene::{Db, Scene, key};

fn reading(name: &'static str, count: &Arc<AtomicUsize>) -> Registration<Db> {
    let count = Arc::clone(count);
    let reading = handler(key(name), move |_: Message<Value>| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Ok::<(), Failure>(()) }
    });
    reading.retry(RetryPolicy::never()).timeout(Duration::from_secs(60))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_the_registry_consumes_no_retries() {
    let (scene, registry, count) = (Scene::new().await, started(), Arc::default());
    registry.set(Mood::Down);
    let avro = Avro::<Value>::new(&client(&registry));
    let inbox = scene.inbox().subscribe("orders", reading("mail", &count).decoded_by(avro)).build().unwrap();
    for name in ["avro", "avro_v2", "avro_header", "avro_reference"] {
        inbox.accept(fixture(name)).await.unwrap();
    }
    let running = inbox.start().await.unwrap();
    registry.reached(6).await;
    assert_eq!(scene.count("inbox_status WHERE errors > 0 OR state IN ('poisoned', 'done')").await, 0);
    registry.set(Mood::Well);
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!((scene.count_done_uncharged().await, count.load(Ordering::SeqCst)), (4, 4));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undecodable_record_is_poisoned_only_for_the_handlers_that_cannot_decode_it() {
    let (scene, registry, count) = (Scene::new().await, started(), Arc::default());
    let known = client(&registry);
    let inbox = scene
        .inbox()
        .subscribe("orders", reading("avro", &count).decoded_by(Avro::<Value>::new(&known)))
        .subscribe("orders", reading("protobuf", &count).decoded_by(ProtobufJson::<Value>::new(&known)))
        .build()
        .unwrap();
    inbox.accept(fixture("avro")).await.unwrap();
    inbox.accept(fixture("avro_key").with_id("foreign").with_payload(&b"\0\0\0\x01\x01\x22"[..])).await.unwrap();
    inbox.accept(fixture("avro").with_id("cut off").with_payload(&b"\0\0"[..])).await.unwrap();
    inbox.accept(fixture("protobuf")).await.unwrap();
    inbox.drain().await.unwrap();
    let states = "SELECT concat_ws(' ', message_id, handler_key, state, reason) FROM inbox_status ORDER BY 1";
    let expected = [
        "avro avro done",
        "avro protobuf poisoned undecodable",
        "cut off avro poisoned undecodable",
        "cut off protobuf poisoned undecodable",
        "foreign avro poisoned undecodable",
        "foreign protobuf poisoned undecodable",
        "protobuf avro poisoned undecodable",
        "protobuf protobuf done",
    ];
    assert_eq!(scene.database.query_texts(states).await, expected);
    assert_eq!(scene.count("inbox_status WHERE errors > 0").await, 0);
}
