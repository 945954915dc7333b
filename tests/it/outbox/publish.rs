//! Publishing: records are sent if and only if the transaction commits, from Rust and from SQL, with everything another
//! service needs to accept a record once.

use std::time::Duration;

use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use wharf::kafka::Kafka as Source;
use wharf::{Failure, Message, Outbox, Postgres, Raw, Record, Store, tx_handler, with_state};

use super::post::{Post, end};
use crate::effect;
use crate::scene::{Runs, Scene, key, within};
use support::kafka_admin::unique_name;

async fn conn(scene: &Scene) -> AsyncPgConnection {
    AsyncPgConnection::establish(&scene.database.url()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_sent_when_their_transaction_commits_and_never_after_a_rollback() {
    let post = Post::new(1).await;
    let relay = post.start();
    let outbox = Outbox::new(&post.scene.store).with_source("/shop");
    let mut conn = conn(&post.scene).await;
    let record = |payload: &str| Record::new(&*post.topic).with_key("k").with_payload(payload.to_owned());

    conn.batch_execute("BEGIN").await.unwrap();
    outbox.publish(&mut conn, record("undone")).await.unwrap();
    conn.batch_execute("ROLLBACK; BEGIN").await.unwrap();
    outbox.publish_all(&mut conn, [record("a"), record("b").with_id("mine")]).await.unwrap();
    assert_eq!(post.scene.count("inbox_outbox").await, 0);
    conn.batch_execute("COMMIT").await.unwrap();
    post.sent().await;

    let read = post.read().await;
    assert_eq!(read.iter().map(|record| record.text()).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!((read[1].header("ce_id"), read[1].header("ce_source")), (Some("mine"), Some("/shop")));
    assert_eq!(read[0].header("ce_specversion"), Some("1.0"));
    let marked = "SELECT concat_ws('/', message_id, kafka_partition, kafka_offset) FROM inbox_outbox ORDER BY id";
    let ids = [read[0].header("ce_id").unwrap(), "mine"];
    assert_eq!(post.scene.database.query_texts(marked).await, [format!("{}/0/0", ids[0]), format!("{}/0/1", ids[1])]);
    end(relay).await;
    assert_eq!(post.scene.count("inbox_relay").await, 0);
    assert_eq!(post.scene.count("inbox_outbox_slots WHERE holder IS NOT NULL").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_record_is_rejected_and_the_transaction_continues() {
    let scene = Scene::new().await;
    let outbox = Outbox::new(&scene.store);
    let mut conn = conn(&scene).await;
    conn.batch_execute("BEGIN").await.unwrap();
    let refused = outbox.publish(&mut conn, Record::new("no such topic!")).await.unwrap_err();
    assert!(refused.is_refused(), "{refused}");
    outbox.publish(&mut conn, Record::new("fine")).await.unwrap();
    conn.batch_execute("COMMIT").await.unwrap();
    assert_eq!(scene.count("inbox_outbox").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn sql_publishes_with_the_headers_and_the_trace_of_the_handled_message() {
    let post = Post::new(1).await;
    let inbox = post.scene.inbox().subscribe("orders", Runs::new().handler("a")).build().unwrap();
    let order = Record::new("orders").with_id("order-1").with_header("traceparent", "00-1-2-01");
    inbox.accept(order.with_header("tracestate", "k=v")).await.unwrap();
    let relay = post.start();

    let publish = format!(
        "SELECT inbox_publish('{}', convert_to('payload', 'UTF8'), headers => '{{\"ce_type\": \"order.placed\", \"tenant\": \"x\", \
         \"tracestate\": \"own\"}}', message_id => 'id-1', source => '/sql', origin_id => 'order-1', origin_source => 'orders')",
        post.topic
    );
    post.scene.database.execute(&publish).await;
    post.sent().await;

    let expected = [
        ("ce_specversion", "1.0"),
        ("ce_id", "id-1"),
        ("ce_source", "/sql"),
        ("ce_type", "order.placed"),
        ("wharf_origin_id", "order-1"),
        ("wharf_origin_source", "orders"),
        ("traceparent", "00-1-2-01"),
        ("tenant", "x"),
        ("tracestate", "own"),
    ];
    let mut headers = post.read().await.remove(0).headers;
    headers[7..].sort();
    assert_eq!(headers, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    end(relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sql_refuses_what_the_library_refuses() {
    let scene = Scene::new().await;
    let outbox = Outbox::new(&scene.store);
    let mut conn = conn(&scene).await;
    let (long, fits) = ("é".repeat(201), "é".repeat(200));
    let record = || Record::new("stock");
    let cases = [
        (record().with_id(""), "message_id => ''".to_owned(), false),
        (record().with_source(""), "source => ''".to_owned(), false),
        (record().with_id(long.clone()), format!("message_id => '{long}'"), false),
        (record().with_header("ce_id", ""), r#"headers => '{"ce_id": ""}'"#.to_owned(), false),
        (record().with_header("ce_source", long.clone()), format!(r#"headers => '{{"ce_source": "{long}"}}'"#), false),
        (record().with_id(fits.clone()).with_source("s"), format!("message_id => '{fits}', source => 's'"), true),
    ];
    for (record, arguments, is_accepted) in cases {
        conn.batch_execute("BEGIN").await.unwrap();
        assert_eq!(outbox.publish(&mut conn, record).await.is_ok(), is_accepted, "{arguments}");
        let published = conn.batch_execute(&format!("SELECT inbox_publish('stock', 'x', {arguments})")).await;
        assert_eq!(published.is_ok(), is_accepted, "{arguments}: {published:?}");
        conn.batch_execute("ROLLBACK").await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sql_adds_no_headers_to_a_structured_event_and_no_trace_state_to_another_trace() {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("a")).build().unwrap();
    let order = Record::new("orders").with_id("order-1").with_header("traceparent", "00-1-2-01");
    inbox.accept(order.with_header("tracestate", "k=v").with_header("baggage", "tenant=a")).await.unwrap();
    for headers in [
        r#"{"content-type": "Application/CloudEvents+JSON; charset=utf-8", "ce_id": "as it was"}"#,
        r#"{"traceparent": "own"}"#,
        "{}",
    ] {
        let publish = format!(
            "SELECT inbox_publish('stock', 'x', headers => '{headers}', message_id => 'b', origin_id => 'order-1')"
        );
        scene.database.execute(&publish).await;
    }

    let headers = "SELECT string_agg(inbox_text(h.name) || '=' || inbox_text(h.value), ' ' ORDER BY inbox_text(h.name) COLLATE \"C\")
                   FROM inbox_outbox o, inbox_headers(o.headers) h
                   WHERE inbox_text(h.name) NOT IN ('ce_source', 'ce_specversion', 'ce_type') GROUP BY o.id ORDER BY o.id";
    let expected = [
        "baggage=tenant=a ce_id=as it was content-type=Application/CloudEvents+JSON; charset=utf-8 traceparent=00-1-2-01 \
         tracestate=k=v wharf_origin_id=order-1",
        "baggage=tenant=a ce_id=b traceparent=own wharf_origin_id=order-1",
        "baggage=tenant=a ce_id=b traceparent=00-1-2-01 tracestate=k=v wharf_origin_id=order-1",
    ];
    assert_eq!(scene.database.query_texts(headers).await, expected);
}

/// Writes the effect and publishes the message.
async fn pass_on(
    (outbox, topic): (Outbox<Postgres>, String),
    message: Message<Raw>,
    conn: &mut AsyncPgConnection,
) -> Result<(), Failure> {
    effect::write(conn, message.id()).await?;
    let next = Record::new(topic).with_key(message.id().to_owned()).with_payload(message.payload.to_vec());
    outbox.publish(conn, next).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_published_by_a_handler_is_accepted_by_the_next_inbox_and_names_its_message() {
    let post = Post::new(2).await;
    effect::prepare(&post.scene).await;
    let state = (Outbox::new(&post.scene.store), post.topic.clone());
    let first = post.scene.inbox().subscribe("orders", tx_handler(key("pass"), with_state(state, pass_on)));
    let first = first.relay(post.relay()).build().unwrap();
    let next = Scene::new().await;
    let runs = Runs::new();
    let second = next.inbox().subscribe(&*post.topic, runs.handler("b")).build().unwrap();
    let running = first.start().await.unwrap();
    let reading = second.start_from(Source::new(post.kafka.brokers(), unique_name("group"))).await.unwrap();

    first.accept_all((0..50).map(|n| Record::new("orders").with_id(format!("order-{n:02}")))).await.unwrap();
    runs.reached(50).await;

    let origins = "SELECT inbox_text(h.value) FROM inbox_message m, inbox_headers(m.headers) h
                   WHERE h.name = 'wharf_origin_id' ORDER BY 1";
    let expected: Vec<String> = (0..50).map(|n| format!("order-{n:02}")).collect();
    assert_eq!(next.database.query_texts(origins).await, expected);
    assert_eq!(effect::effects(&post.scene).await, expected);
    within(reading.shutdown(Duration::from_secs(10))).await.unwrap();
    within(running.shutdown(Duration::from_secs(10))).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_settings_and_bounds_are_rejected_by_name() {
    let scene = Scene::new().await;
    let start = |relay: wharf::kafka::Relay, store: &Store<Postgres>| relay.start(store).unwrap_err().to_string();
    let relay = || wharf::kafka::Relay::new("b:9092");
    let wrong = relay().set("enable.idempotence", "false").set("acks", "1").lease(Duration::ZERO).batch_rows(0);
    let text = start(wrong, &scene.store);
    for named in ["enable.idempotence", "acks", "lease", "batch_rows"] {
        assert!(text.contains(named), "{text}");
    }
    let text = start(relay().set("sasl.mechanism", "hunter2").set("no.such.setting", "hunter2"), &scene.store);
    assert!(!text.contains("hunter2"), "{text}");
    assert!(!format!("{:?}", relay().set("sasl.password", "hunter2")).contains("hunter2"));
}

#[tokio::test(flavor = "multi_thread")]
async fn sent_records_are_kept_for_the_configured_period_or_not_at_all() {
    let post = Post::new(1).await;
    let relay = post.relay().keep_sent(Duration::ZERO).start(&post.scene.store).unwrap();
    post.publish("k", &["a", "b"]).await;
    post.scene.until("SELECT (count(*) = 0)::int::bigint FROM inbox_outbox").await;
    assert_eq!(post.payloads().await, ["a", "b"]);
    end(relay).await;
}
