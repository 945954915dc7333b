//! Accepting: a record becomes one message with one delivery for each handler that subscribes to it, however often it
//! arrives and with whatever other records.

use std::collections::{BTreeSet, HashMap};

use futures_util::FutureExt;
use futures_util::future::join_all;
use wharf::{Receipt, Record};

use super::scene::{Runs, Scene, quick, record, records};

const CONFLICT: Receipt = Receipt::Quarantined { reason: "conflict" };

fn accepted(deliveries: usize) -> Receipt {
    Receipt::Accepted { deliveries }
}

fn duplicate(added: usize) -> Receipt {
    Receipt::Duplicate { added }
}

// Identities are per source: one producer cannot suppress the messages of another by using its ids.
#[tokio::test(flavor = "multi_thread")]
async fn the_same_id_from_two_sources_is_two_messages() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe(["orders", "returns"], runs.handler("stock")).build().unwrap();

    // Without a source, the topic is the source.
    let batch = [
        record("a"),
        record("a").with_source("shop"),
        record("a").with_source("market"),
        Record::new("returns").with_id("a"),
        record("a").with_source("orders"),
    ];
    let receipts = inbox.accept_or_quarantine(batch).await.unwrap();

    assert_eq!(receipts, [accepted(1), accepted(1), accepted(1), accepted(1), duplicate(0)]);
    inbox.drain().await.unwrap();
    assert_eq!(runs.ids(), ["a", "a", "a", "a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_copies_in_one_batch_are_one_message() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    let running = inbox.start().await.unwrap();

    let receipts = inbox.accept_all(vec![record("a"); 500]).await.unwrap();

    assert_eq!(receipts[0], accepted(1));
    assert!(receipts[1..].iter().all(|receipt| *receipt == duplicate(0)), "{receipts:?}");
    scene.settled().await;
    assert_eq!((runs.count(), scene.count("inbox_message").await, scene.count("inbox_delivery").await), (1, 1, 1));
    running.shutdown(std::time::Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redelivery_adds_only_the_deliveries_of_handlers_that_did_not_have_it() {
    let scene = Scene::new().await;
    let (stock, mail) = (Runs::new(), Runs::new());
    let first = scene.inbox().subscribe("orders", stock.handler("stock")).build().unwrap();
    first.accept_all(records(3)).await.unwrap();
    first.drain().await.unwrap();
    let second = scene
        .another_inbox()
        .await
        .subscribe("orders", stock.handler("stock"))
        .subscribe("orders", mail.handler("mail"))
        .build()
        .unwrap();

    let receipts = second.accept_all(records(4)).await.unwrap();

    assert_eq!(receipts, [duplicate(1), duplicate(1), duplicate(1), accepted(2)]);
    second.drain().await.unwrap();
    assert_eq!((stock.count(), mail.count()), (4, 4));
    assert_eq!(second.accept_all(records(4)).await.unwrap(), vec![duplicate(0); 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_of_a_redelivery_in_one_batch_report_an_added_delivery_once() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let first = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    first.accept(record("a")).await.unwrap();
    let second = scene.another_inbox().await.subscribe("orders", runs.handler("mail")).build().unwrap();

    let receipts = second.accept_all(vec![record("a"); 5]).await.unwrap();

    let added: usize = receipts.iter().map(|receipt| if *receipt == duplicate(1) { 1 } else { 0 }).sum();
    assert_eq!((added, scene.count("inbox_delivery").await), (1, 2), "{receipts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_in_one_batch_reach_every_handler_that_subscribes_to_one_of_them() {
    let scene = Scene::new().await;
    let (stock, mail) = (Runs::new(), Runs::new());
    let inbox = scene
        .inbox()
        .subscribe("orders", stock.handler("stock"))
        .subscribe("letters", mail.handler("mail"))
        .build()
        .unwrap();
    let copy = |topic| Record::new(topic).with_id("a").with_source("shop").with_payload("the same");

    let receipts = inbox.accept_all([copy("orders"), copy("letters"), copy("orders")]).await.unwrap();

    assert_eq!((&receipts[0], &receipts[1]), (&accepted(1), &duplicate(1)));
    inbox.drain().await.unwrap();
    assert_eq!(scene.states().await, ["a mail done", "a stock done"]);
}

// The number of bound parameters is constant, so PostgreSQL's limit on them (32,767 through this driver) does not bound
// a batch.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_any_size_is_one_statement() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene
        .inbox()
        .limits(quick().accept_batch_rows(10_000))
        .subscribe("orders", runs.handler("stock"))
        .subscribe("orders", runs.handler("mail"))
        .subscribe("orders", runs.handler("audit"))
        .build()
        .unwrap();
    for size in [1, 2, 999, 1_000, 1_001, 3_276, 3_277, 10_000] {
        let batch = (0..size).map(|number| record(&format!("{size}/{number}")));

        let receipts = inbox.accept_or_quarantine(batch).await.unwrap();

        assert_eq!(receipts, vec![accepted(3); size]);
        let stored = format!(
            "SELECT concat_ws(' ', count(DISTINCT m.seq), count(*), count(DISTINCT m.received_at))
             FROM inbox_message m JOIN inbox_delivery d ON d.message_seq = m.seq WHERE m.message_id LIKE '{size}/%'"
        );
        assert_eq!(scene.database.query_texts(&stored).await, [format!("{size} {} 1", 3 * size)]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn receipts_are_in_the_order_of_the_records() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let limits = quick().accept_batch_rows(7);
    let inbox = scene.inbox().limits(limits).subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept(record("known")).await.unwrap();
    let kinds = [
        |number| (record(&format!("new {number}")), accepted(1)),
        |_| (record("known"), duplicate(0)),
        |_| (Record::new("elsewhere").with_id("x"), Receipt::Unwanted),
        |number| (record("known").with_payload(format!("other {number}")), CONFLICT),
        |_| (record(""), Receipt::Quarantined { reason: "empty identity" }),
    ];
    // 5 kinds and batches of 7: every kind occurs at every place of a batch.
    let (batch, expected): (Vec<Record>, Vec<Receipt>) = (0..350).map(|number| kinds[number % 5](number)).unzip();

    assert_eq!(inbox.accept_or_quarantine(batch).await.unwrap(), expected);
}

// A producer that reuses an id for another payload is noticed, and its record is not dropped as a duplicate.
#[tokio::test(flavor = "multi_thread")]
async fn another_payload_under_a_known_identity_is_quarantined_once() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    let forged = || record("a").with_payload("forged").with_position(3, 77).with_key("k").with_header("h", "v");
    inbox.accept(record("a")).await.unwrap();

    let refused = inbox.accept(forged()).await.unwrap_err();
    assert!(refused.is_refused() && !refused.is_transient(), "{refused}");
    assert!(refused.to_string().contains("quarantine: conflict"), "{refused}");
    assert_eq!(inbox.accept_or_quarantine([forged(), forged()]).await.unwrap(), [CONFLICT, CONFLICT]);

    let kept = "SELECT concat_ws('|', reason, topic, kafka_partition, kafka_offset, inbox_text(message_id),
                                 inbox_text(record_key), inbox_text(payload)) FROM inbox_quarantine";
    assert_eq!(scene.database.query_texts(kept).await, ["conflict|orders|3|77|a|k|forged"]);
    assert_eq!(scene.database.query_texts("SELECT inbox_text(payload) FROM inbox_message").await, ["payload of a"]);
    assert_eq!(inbox.accept(record("a")).await.unwrap(), duplicate(0));
    assert_eq!(inbox.drain().await.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_payloads_under_one_id_in_one_batch_the_first_is_the_message() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    let batch = [
        record("z"),
        record("a").with_payload("first"),
        record("a").with_payload("second"),
        record("a").with_payload("first"),
        Record::new("orders").with_id("a"),
        record("b"),
    ];

    let receipts = inbox.accept_or_quarantine(batch).await.unwrap();

    assert_eq!(receipts, [accepted(1), accepted(1), CONFLICT, duplicate(0), CONFLICT, accepted(1)]);
    let stored = "SELECT inbox_text(payload) FROM inbox_message WHERE message_id = 'a'";
    assert_eq!(scene.database.query_texts(stored).await, ["first"]);
    assert_eq!(scene.count("inbox_quarantine").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_goes_to_the_handlers_of_its_topic_and_type_only() {
    let scene = Scene::new().await;
    let (all, placed, both) = (Runs::new(), Runs::new(), Runs::new());
    let inbox = scene
        .inbox()
        .subscribe(["orders", "returns"], all.handler("all"))
        .subscribe("orders", placed.handler("placed").event_type("order.placed"))
        .subscribe("orders", both.handler("both").event_type("order.placed").event_type("order.paid"))
        .build()
        .unwrap();
    let typed = |id: &str, event_type: &str| record(id).with_header("ce_type", event_type.to_owned());

    let batch = [
        typed("placed", "order.placed"),
        typed("paid", "order.paid"),
        typed("unknown", "order.placed2"),
        record("untyped"),
        record("without value").with_null_header("ce_type"),
        Record::new("returns").with_id("returned").with_header("ce_type", "order.placed"),
        Record::new("Orders").with_id("case matters"),
    ];
    let receipts = inbox.accept_all(batch).await.unwrap();

    let expected = [accepted(3), accepted(2), accepted(1), accepted(1), accepted(1), accepted(1), Receipt::Unwanted];
    assert_eq!(receipts, expected);
    inbox.drain().await.unwrap();
    assert_eq!(all.sorted(), ["paid", "placed", "returned", "unknown", "untyped", "without value"]);
    assert_eq!(
        (placed.sorted(), both.sorted()),
        (vec!["placed".to_owned()], vec!["paid".to_owned(), "placed".to_owned()])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_without_a_handler_is_not_stored_even_if_it_is_invalid() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock").event_type("wanted")).build().unwrap();

    let batch = [record("a"), Record::new("elsewhere").with_id("b"), Record::new("el\0sewhere"), Record::new("")];
    let receipts = inbox.accept_all(batch).await.unwrap();

    assert_eq!(receipts, vec![Receipt::Unwanted; 4]);
    assert_eq!((scene.count("inbox_message").await, scene.count("inbox_quarantine").await), (0, 0));
    assert_eq!(inbox.accept_all([]).await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_callers_with_one_record_each_share_statements() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();

    let calls = records(600).into_iter().map(|record| inbox.accept(record));
    let receipts = join_all(calls).await;

    assert!(receipts.into_iter().all(|receipt| receipt.unwrap() == accepted(1)));
    // The timestamp is that of the transaction.
    let transactions = scene.database.query_one_i64("SELECT count(DISTINCT received_at) FROM inbox_message").await;
    assert!(transactions <= 30, "600 records in {transactions} transactions");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_is_stored_even_if_its_caller_is_dropped() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept(record("first")).await.unwrap();

    for number in 0..50 {
        // The future is polled once, then dropped.
        drop(inbox.accept(record(&number.to_string())).now_or_never());
    }

    scene.until("SELECT (count(*) = 51)::int::bigint FROM inbox_message").await;
    assert_eq!(inbox.drain().await.unwrap(), 51);
    assert_eq!(runs.sorted().into_iter().collect::<BTreeSet<_>>().len(), 51);
}

#[tokio::test(flavor = "multi_thread")]
async fn records_passed_before_the_inbox_is_dropped_are_written() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept(record("first")).await.unwrap();

    for number in 0..5 {
        let batch = (0..60).map(|n| record(&format!("{number} {n}")));
        drop(inbox.accept_all(batch).now_or_never());
    }
    drop(inbox);

    scene.until("SELECT (count(*) = 301)::int::bigint FROM inbox_message").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_record_is_an_error_and_nothing_of_the_call_is_stored() {
    let scene = Scene::new().await;
    let limits = quick().payload_bytes_max(100);
    let inbox = scene.inbox().limits(limits).subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    let unwritable: HashMap<(u8, u8), u8> = HashMap::from([((1, 2), 3)]);
    let cases = [
        (Record::new("orders"), "missing identity"),
        (record(""), "empty identity"),
        (Record::new("orders").with_id("x".repeat(201)), "identity too long"),
        (record("large").with_payload("x".repeat(101)), "payload too large"),
        (record("unwritable").json(&unwritable), "payload cannot be written as JSON"),
    ];
    for (bad, reason) in cases {
        let alone = inbox.accept(bad.clone()).await.unwrap_err();
        assert!(alone.is_refused() && !alone.is_transient(), "{alone}");
        assert!(alone.to_string().contains(reason), "{alone}");
        let among_others = inbox.accept_all([record("a"), bad, record("b")]).await.unwrap_err();
        assert!(among_others.to_string().contains(&format!("record 2 of topic orders: {reason}")), "{among_others}");
    }
    assert_eq!((scene.count("inbox_message").await, scene.count("inbox_quarantine").await), (0, 0));
    inbox.accept_all([record("a"), record("b")]).await.unwrap();
    assert_eq!(scene.count("inbox_message").await, 2);
}
