//! Messages that any client accepts in SQL, in its own transaction: they are stored as by a process, or rejected.

use std::time::Duration;

use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use tokio_postgres::Client;
use wharf::flow::FairKey;
use wharf::order::OrderKey;
use wharf::{Inbox, InboxBuilder, Postgres, Receipt, Record, Store};

use crate::any_client::connect;
use crate::effect::{self, effects};
use crate::roles::{url_of, with_roles};
use crate::scene::{Runs, Scene, quick, record};
use support::proxy::{Fault, Proxy};

/// Calls `inbox_accept` with these arguments and returns its result.
async fn accept(client: &Client, arguments: &str) -> String {
    client.query_one(&format!("SELECT inbox_accept({arguments})"), &[]).await.expect(arguments).get(0)
}

/// The SQLSTATE of the error for these arguments.
async fn refusal(client: &Client, arguments: &str) -> String {
    let error = client.query_one(&format!("SELECT inbox_accept({arguments})"), &[]).await.expect_err(arguments);
    error.code().expect("an error of the server").code().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_accepted_in_sql_appears_with_the_callers_writes_and_is_found_by_a_poll() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    effect::prepare(&scene).await;
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).subscribe("orders", runs.handler("mail"));
    let inbox = inbox.build().unwrap();
    let running = inbox.start().await.unwrap();
    let mut client = connect(&scene.database.url()).await.unwrap();

    let undone = client.transaction().await.unwrap();
    undone
        .batch_execute("INSERT INTO effect VALUES ('undone'); SELECT inbox_accept('orders', 'undone', NULL)")
        .await
        .unwrap();
    undone.rollback().await.unwrap();
    let transaction = client.transaction().await.unwrap();
    transaction.batch_execute("INSERT INTO effect VALUES ('mine')").await.unwrap();
    let sql = "SELECT inbox_accept_json('orders', 'a', '{\"order\": 17}')";
    assert_eq!(transaction.query_one(sql, &[]).await.unwrap().get::<_, &str>(0), "accepted");
    assert_eq!(scene.count("inbox_message").await, 0);
    transaction.commit().await.unwrap();

    runs.reached(2).await;
    scene.settled().await;
    assert_eq!((runs.sorted(), effects(&scene).await), (vec!["a".to_owned(); 2], vec!["mine".to_owned()]));
    assert_eq!(accept(&client, "'orders', 'a', '{\"order\": 17}'::bytea").await, "duplicate");
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// The same record stored in both ways is one message: identity, payload, headers and order are computed alike.
#[tokio::test(flavor = "multi_thread")]
async fn sql_and_a_process_store_a_record_alike() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene
        .inbox()
        .subscribe("orders", runs.handler("by.key").ordered_by(OrderKey::record_key()))
        .subscribe("orders", runs.handler("by.header").ordered_by(OrderKey::header("customer")))
        .subscribe("orders", runs.handler("fair").fair_by(FairKey::header("customer")))
        .subscribe("orders", runs.handler("of.nobody").fair_by(FairKey::header("e")))
        .subscribe("orders", runs.handler("typed").event_type("placed").event_type("paid"))
        .subscribe("orders", runs.handler("delayed").delay(Duration::from_secs(3_600)))
        .build()
        .unwrap();
    let record = |id: &str| {
        let record = Record::new("orders").with_id(id.to_owned()).with_source("shop").with_key("k").with_payload("{}");
        record.with_header("ce_type", "paid").with_header("customer", "é").with_null_header("none").with_header("e", "")
    };
    inbox.accept(record("process")).await.unwrap();
    let client = connect(&scene.database.url()).await.unwrap();
    let rest = "'{}'::bytea, 'shop', 'k', '{\"ce_type\": \"paid\", \"customer\": \"é\", \"none\": null, \"e\": \"\"}'";

    assert_eq!(accept(&client, &format!("'orders', 'sql', {rest}")).await, "accepted");
    assert_eq!(accept(&client, &format!("'orders', 'process', {rest}")).await, "duplicate");
    assert_eq!(inbox.accept(record("sql")).await.unwrap(), Receipt::Duplicate { added: 0 });

    let stored = |id: &str| {
        format!(
            "SELECT concat_ws('|', m.source, m.topic, m.payload_hash, m.record_key, m.headers, m.payload, s.handler_key, d.order_hash, d.fair_hash,
                              s.due_at > now() + interval '50 minutes')
             FROM inbox_message m JOIN inbox_delivery d ON d.message_seq = m.seq JOIN inbox_status s USING (message_seq, handler_id)
             WHERE m.message_id = '{id}' AND d.due_at < 'infinity' ORDER BY 1"
        )
    };
    let by_sql = scene.database.query_texts(&stored("sql")).await;
    assert_eq!(by_sql.len(), 6);
    assert_eq!(by_sql, scene.database.query_texts(&stored("process")).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn sql_rejects_records_that_only_a_process_can_accept_and_invalid_records() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene
        .inbox()
        .subscribe("orders", runs.handler("typed").event_type("placed"))
        .subscribe("pointed", runs.handler("pointed").ordered_by(OrderKey::json_pointer("/id")))
        .subscribe("timed", runs.handler("timed").delay_header("due"))
        .build()
        .unwrap();
    inbox.accept(Record::new("timed").with_id("a")).await.unwrap();
    let client = connect(&scene.database.url()).await.unwrap();
    let typed = "'orders', 'a', '1'::bytea, headers => '{\"ce_type\": \"placed\"}'";

    assert_eq!(accept(&client, typed).await, "accepted");
    assert_eq!(accept(&client, "'orders', 'b', NULL").await, "unwanted");
    assert_eq!(accept(&client, "'timed', 'b', NULL").await, "accepted");
    // The header does not count, except for a tombstone, as in a process.
    let event = |payload: &str, content_type: &str| {
        format!(
            "'orders', 'c', {payload}, headers => '{{\"content-type\": \"{content_type}\", \"ce_type\": \"placed\"}}'"
        )
    };
    let structured = [
        "application/cloudevents+json; charset=utf-8",
        " Application/CloudEvents+Protobuf ;",
        "application/cloudevents+avro",
        "application/cloudevents+xml",
        "application/cloudevents-batch+json",
    ];
    for content_type in structured {
        assert_eq!(refusal(&client, &event("'{}'", content_type)).await, "0A000", "{content_type}");
    }
    assert_eq!(refusal(&client, &event("NULL", "application/cloudevents-batch+json")).await, "0A000");
    assert_eq!(accept(&client, &event("NULL", "application/cloudevents+avro")).await, "accepted");
    let refused = [
        ("'nobody', 'a', NULL", "WH004"),
        (&typed.replace("'1'", "'2'"), "WH003"),
        ("'pointed', 'a', '{}'", "0A000"),
        ("'timed', 'c', '{}', headers => '{\"due\": \"1h\"}'", "0A000"),
        ("'timed', '', NULL", "22023"),
        ("'timed', NULL, NULL", "22023"),
        ("'timed', repeat('x', 201), NULL", "22023"),
        ("'timed', 'x', NULL, headers => '[]'", "22023"),
    ];
    for (arguments, expected) in refused {
        assert_eq!(refusal(&client, arguments).await, expected, "{arguments}");
    }
    // An operator tells the database that a handler is gone for good.
    assert_eq!(scene.database.query_one_i64("SELECT inbox_unsubscribe('timed', because => 'retired')").await, 1);
    assert_eq!(refusal(&client, "'timed', 'd', NULL").await, "WH004");
    assert_eq!(scene.count("inbox_audit WHERE action = 'unsubscribe' AND affected = 1").await, 1);
    assert_eq!(scene.count("inbox_message").await, 4);
}

// Processes and PostgreSQL use different pattern syntaxes: both must match the same topics.
#[tokio::test(flavor = "multi_thread")]
async fn a_pattern_matches_the_same_topics_in_sql_and_in_a_process() {
    const PATTERNS: [(&str, &str); 12] = [
        ("p01", r"^orders\..*"),
        ("p02", "^(eu|us)-[a-c]+$"),
        ("p03", r"^a{2,3}\d?$"),
        ("p04", "^[^x]*$"),
        ("p05", "^(?i)ABC"),
        ("p06", r"^\w+-\W"),
        ("p07", "^(|b)c"),
        ("p08", "^a*?b"),
        ("p09", "^.$"),
        ("p10", "^__x|b"),
        ("p11", "^[[:alpha:]]{1,255}$"),
        ("p12", "^a|é|c$"),
    ];
    const TOPICS: [&str; 18] = [
        "orders.eu",
        "orders",
        "eu-abc",
        "eu-abd",
        "aa",
        "aaa7",
        "aaaa",
        "x",
        "abc",
        "ABC",
        "a-.",
        "c",
        "bc",
        "b",
        "aab",
        "__x",
        "orders/x",
        "a b",
    ];
    let (scene, runs) = (Scene::new().await, Runs::new());
    let subscribed = |inbox: InboxBuilder<Postgres>, (key, pattern)| inbox.subscribe(pattern, runs.handler(key));
    let inbox = PATTERNS.into_iter().fold(scene.inbox(), subscribed).build().unwrap();
    inbox.accept_all(TOPICS.map(|topic| Record::new(topic).with_id(format!("{topic} in a process")))).await.unwrap();
    let client = connect(&scene.database.url()).await.unwrap();
    for topic in TOPICS {
        let arguments = format!("'{topic}', '{topic} in sql', NULL");
        let is_wanted = scene.count(&format!("inbox_message WHERE topic = '{topic}'")).await == 1;
        match is_wanted {
            true => assert_eq!(accept(&client, &arguments).await, "accepted"),
            false => assert_eq!(refusal(&client, &arguments).await, "WH004"),
        }
    }
    let wanted = async |how: &str| {
        let sql = format!(
            "SELECT topic || ': ' || string_agg(handler_key, ' ' ORDER BY handler_key) FROM inbox_status \
             WHERE message_id LIKE '%{how}' GROUP BY topic ORDER BY 1"
        );
        scene.database.query_texts(&sql).await
    };
    let in_a_process = wanted("in a process").await;
    assert_eq!(wanted("in sql").await, in_a_process);
    assert_eq!(in_a_process.len(), 15, "{in_a_process:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_registration_replaces_the_sql_subscriptions_of_its_handlers_only() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let first = scene.inbox().subscribe("orders", runs.handler("stock")).subscribe("orders", runs.handler("mail"));
    first.build().unwrap().accept(record("a")).await.unwrap();
    let second =
        scene.inbox().subscribe(["returns", "orders"], runs.handler("depot").formerly("stock").event_type("x"));
    second.build().unwrap().accept(Record::new("returns").with_id("b").with_header("ce_type", "x")).await.unwrap();
    let subscriptions = "SELECT concat_ws(' ', s.topic, h.key, s.event_types) FROM inbox_subscription s
                         JOIN inbox_handler h ON h.id = s.handler_id ORDER BY 1";
    assert_eq!(
        scene.database.query_texts(subscriptions).await,
        ["orders depot {x}", "orders mail", "returns depot {x}"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_table_privileges_accepts_in_sql_and_in_a_process() {
    let (scene, runs) = (with_roles().await, Runs::new());
    let inbox = Inbox::builder(Store::<Postgres>::connect(&url_of(&scene, "accept")).await.unwrap()).limits(quick());
    let inbox = inbox.subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    let client = connect(&url_of(&scene, "client")).await.unwrap();
    assert_eq!(accept(&client, "'orders', 'b', NULL").await, "accepted");
    let insert =
        client.batch_execute("INSERT INTO inbox_delivery (message_seq, handler_id, due_at) VALUES (1, 1, now())");
    assert_eq!(insert.await.unwrap_err().code().unwrap().code(), "42501");

    let mut conn = AsyncPgConnection::establish(&url_of(&scene, "client")).await.unwrap();
    conn.batch_execute("BEGIN").await.unwrap();
    inbox.accept_in(&mut conn, [record("c")]).await.unwrap();
    conn.batch_execute("COMMIT").await.unwrap();
    assert_eq!(scene.states().await, ["a stock pending", "b stock pending", "c stock pending"]);
    let reader = connect(&url_of(&scene, "read")).await.unwrap();
    assert_eq!(refusal(&reader, "'orders', 'd', NULL").await, "42501");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_to_another_inbox_is_rejected_and_keeps_its_settings() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    scene.database.execute("CREATE SCHEMA second").await;
    let second = format!("{}?options=-c%20search_path%3Dsecond", scene.database.url());
    Store::<Postgres>::connect(&second).await.unwrap().migrate().await.unwrap();
    let mut conn = AsyncPgConnection::establish(&scene.database.url()).await.unwrap();

    conn.batch_execute("BEGIN; SET LOCAL search_path = second").await.unwrap();
    let error = inbox.accept_in(&mut conn, [record("b")]).await.unwrap_err();
    assert!(format!("{error:#}").contains("reaches the inbox of schema second"), "{error:#}");
    conn.batch_execute(
        "SET LOCAL search_path = public; SET LOCAL lock_timeout = '7s'; SET LOCAL synchronous_commit = off",
    )
    .await
    .unwrap();
    inbox.accept_in(&mut conn, [record("a"), record("b")]).await.unwrap();
    let unchanged = "DO $$ BEGIN
                         ASSERT current_setting('lock_timeout') = '7s' AND current_setting('synchronous_commit') = 'off'
                            AND current_setting('enable_seqscan') = 'on';
                     END $$; COMMIT";
    conn.batch_execute(unchanged).await.unwrap();

    assert_eq!(scene.states().await, ["a stock pending", "b stock pending"]);
    assert_eq!(scene.count("second.inbox_message").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_retries_after_a_lost_commit_reply_stores_the_message_once() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    effect::prepare(&scene).await;
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    let running = inbox.start().await.unwrap();
    let proxy = Proxy::start_for(&scene.database.url()).await;
    for (round, fault) in [Fault::LoseReply, Fault::LoseRequest].into_iter().enumerate() {
        let id = format!("m{round}");
        let armed = proxy.on_next_commit(fault);
        let mut tries = 0;
        loop {
            tries += 1;
            let mut conn = AsyncPgConnection::establish(&proxy.url(&scene.database.url())).await.unwrap();
            conn.batch_execute("BEGIN").await.unwrap();
            inbox.accept_in(&mut conn, [record(&id)]).await.unwrap();
            if conn.batch_execute("COMMIT").await.is_ok() {
                break;
            }
        }
        assert!(armed.has_fired() && tries == 2, "{fault:?}: {tries}");
    }
    runs.reached(2).await;
    scene.settled().await;
    assert_eq!(runs.sorted(), ["m0", "m1"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}
