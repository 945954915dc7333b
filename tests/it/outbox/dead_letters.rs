//! Dead letters: every way to poison a delivery publishes it in the transaction that poisons it. A later replay or
//! discard is published too.

use std::time::Duration;

use wharf::operate::DeliveryFilter;
use wharf::poison::Reason;
use wharf::{Failure, Inbox, Message, Raw, Record, Registration, RetryPolicy, Sqlite, Store, handler};

use crate::scene::{Db, Runs, Scene, key, quick, record};

const DEAD: &str = "orders.dead";

/// The published records in order: `topic|type|reason|handler|attempts|origin|payload`.
async fn letters(scene: &Scene) -> Vec<String> {
    let header = |name: &str| {
        format!("(SELECT inbox_text(h.value) FROM inbox_headers(o.headers) h WHERE h.name = '{name}' LIMIT 1)")
    };
    let columns = ["ce_type", "wharf_reason", "wharf_handler", "wharf_attempts", "wharf_origin_id"].map(header);
    let sql = format!(
        "SELECT concat_ws('|', o.topic, {}, inbox_text(o.payload)) FROM inbox_outbox o ORDER BY o.id",
        columns.join(", ")
    );
    scene.database.query_texts(&sql).await
}

fn dead(registration: Registration<Db>) -> Registration<Db> {
    registration.retry(RetryPolicy::never()).dead_letter(DEAD)
}

fn inbox(scene: &Scene, registration: Registration<Db>) -> Inbox<Db> {
    scene.inbox().subscribe("orders", registration).build().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poisoned_delivery_is_published_with_its_origin_and_stays() {
    let scene = Scene::new().await;
    let inbox = inbox(&scene, dead(Runs::new().obeying("stock")));
    let order =
        Record::new("orders").with_id("poison").with_source("/shop").with_key("customer-1").with_payload("payload");
    let order =
        order.with_header("traceparent", "00-1-2-01").with_header("ce_id", "other").with_header("ce_type", "placed");
    inbox.accept(order.with_position(3, 17)).await.unwrap();
    inbox.drain().await.unwrap();

    let headers =
        "SELECT inbox_text(h.name) || '=' || inbox_text(h.value) FROM inbox_outbox o, inbox_headers(o.headers) h
                   WHERE h.name <> 'ce_id' ORDER BY h.ordinal";
    let expected = [
        "ce_specversion=1.0",
        "ce_source=wharf",
        "ce_type=wharf.delivery.poisoned",
        "wharf_handler=stock",
        "wharf_reason=permanent",
        "wharf_attempts=1",
        "wharf_replays=0",
        "wharf_error=hopeless",
        "wharf_origin_id=poison",
        "wharf_origin_source=/shop",
        "wharf_origin_topic=orders",
        "wharf_origin_partition=3",
        "wharf_origin_offset=17",
        "traceparent=00-1-2-01",
        "wharf_origin_type=placed",
    ];
    assert_eq!(scene.database.query_texts(headers).await, expected);
    let row = "SELECT concat_ws('|', topic, inbox_text(record_key), inbox_text(payload), status) FROM inbox_outbox";
    assert_eq!(scene.database.query_texts(row).await, [format!("{DEAD}|customer-1|payload|0")]);
    assert_eq!(scene.count("inbox_poisoned").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_and_discard_are_published_on_the_same_topic() {
    let scene = Scene::new().await;
    let inbox = inbox(&scene, dead(Runs::new().obeying("stock")));
    inbox.accept(record("poison")).await.unwrap();
    inbox.drain().await.unwrap();
    let filter = DeliveryFilter::default().message_id("poison");
    scene.store.operate().replay(&filter, 10).await.unwrap();
    inbox.drain().await.unwrap();
    scene.store.operate().discard(&filter, 10).await.unwrap();

    let told = |event: &str, replays: u32| {
        format!(
            "{{\"event\": \"{event}\", \"source\": \"orders\", \"replays\": {replays}, \"message_id\": \"poison\", \"handler_key\": \"stock\"}}"
        )
    };
    let expected = [
        format!("{DEAD}|wharf.delivery.poisoned|permanent|stock|1|poison|payload of poison"),
        format!("{DEAD}|wharf.delivery.replayed|permanent|stock|1|poison|{}", told("replayed", 1)),
        format!("{DEAD}|wharf.delivery.poisoned|permanent|stock|2|poison|payload of poison"),
        format!("{DEAD}|wharf.delivery.discarded|permanent|stock|2|poison|{}", told("discarded", 1)),
    ];
    assert_eq!(letters(&scene).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_reason_can_have_its_own_topic() {
    let scene = Scene::new().await;
    let number = handler(key("stock"), async |_: Message<u32>| Err::<(), Failure>(Failure::retry("busy")));
    let inbox = inbox(&scene, dead(number).dead_letter_for(Reason::Undecodable, "orders.unreadable"));
    inbox.accept(record("text")).await.unwrap();
    inbox.accept(Record::new("orders").with_id("number").json(&1)).await.unwrap();
    inbox.drain().await.unwrap();
    let mut letters = letters(&scene).await;
    letters.sort();
    let expected = [
        format!("{DEAD}|wharf.delivery.poisoned|retries exhausted|stock|1|number|1"),
        "orders.unreadable|wharf.delivery.poisoned|undecodable|stock|1|text|payload of text".to_owned(),
    ];
    assert_eq!(letters, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_is_poisoned_without_a_run_is_published_too() {
    let scene = Scene::new().await;
    let inbox = inbox(&scene, dead(Runs::new().handler("stock")));
    inbox.accept_all(["crashed", "missing", "unknown"].map(record)).await.unwrap();
    let only = |id: &str| format!("message_seq = (SELECT seq FROM inbox_message WHERE message_id = '{id}')");
    let crashed = format!(
        "UPDATE inbox_delivery SET attempts = 3, crashes = 2, locked_by = 999, locked_until = now() - interval '1 s' WHERE {}",
        only("crashed")
    );
    scene.database.execute(&crashed).await;
    let later = format!("UPDATE inbox_delivery SET due_at = now() + interval '1 hour' WHERE {}", only("unknown"));
    scene.database.execute(&format!("{later}; DELETE FROM inbox_message WHERE message_id = 'missing'")).await;
    inbox.drain().await.unwrap();
    // A process that does not have the handler.
    scene.database.execute(&format!("UPDATE inbox_delivery SET due_at = now() WHERE {}", only("unknown"))).await;
    let other = scene.another_inbox().await.limits(quick().unknown_key_grace(Duration::ZERO));
    let other = other.subscribe("orders", Runs::new().handler("other")).build().unwrap().start().await.unwrap();
    scene.settled().await;
    other.shutdown(Duration::from_secs(5)).await.unwrap();

    let mut letters = letters(&scene).await;
    letters.sort();
    let expected = [
        format!("{DEAD}|wharf.delivery.poisoned|crashed|stock|4|crashed|payload of crashed"),
        format!("{DEAD}|wharf.delivery.poisoned|message missing|stock|1"),
        format!("{DEAD}|wharf.delivery.poisoned|unknown key|stock|0|unknown|payload of unknown"),
    ];
    assert_eq!(letters, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registration_without_a_topic_ends_dead_letters_and_bad_topics_are_rejected() {
    let scene = Scene::new().await;
    inbox(&scene, dead(Runs::new().obeying("stock"))).accept(record("done")).await.unwrap();
    assert_eq!(scene.count("inbox_dead_letter").await, 1);
    let without = inbox(&scene, Runs::new().obeying("stock"));
    without.accept(record("poison")).await.unwrap();
    without.drain().await.unwrap();
    assert_eq!((scene.count("inbox_dead_letter").await, scene.count("inbox_outbox").await), (0, 0));

    let twice = Runs::new().handler::<Db>("stock").dead_letter("a b").dead_letter("c");
    let error = scene.inbox().subscribe("orders", twice).build().unwrap_err().to_string();
    assert!(error.contains("\"a b\"") && error.contains("two dead-letter topics"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_on_sqlite_are_rejected() {
    let store = Store::<Sqlite>::in_memory().await.unwrap();
    let registration = handler(key("stock"), async |_: Message<Raw>| Ok::<(), Failure>(())).dead_letter(DEAD);
    let error = Inbox::builder(store).subscribe("orders", registration).build().unwrap_err();
    assert!(error.is_configuration() && error.to_string().contains("PostgreSQL"), "{error}");
}
