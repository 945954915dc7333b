//! Invalid settings are refused: `build()` reports all problems of the program at once, and the first use reports those
//! that only the database can show.

use std::time::Duration;

use futures_util::future::join_all;
use wharf::{HandlerKey, Inbox, Limits, Registration};

use super::scene::{Db, Runs, Scene, record, records};

fn stock() -> Registration<Db> {
    Runs::new().handler("stock")
}

fn named(key: &'static str) -> Registration<Db> {
    Runs::new().handler(key)
}

/// The text of the error, which is a configuration error.
fn refusal(inbox: wharf::Result<Inbox<Db>>) -> String {
    let error = inbox.unwrap_err();
    assert!(error.is_configuration() && !error.is_transient(), "{error:?}");
    error.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_key_is_refused_wherever_it_is() {
    let scene = Scene::new().await;
    for second in [stock(), named("mail").formerly("stock"), named("mail").formerly("post").formerly("stock")] {
        let inbox = scene.inbox().subscribe("orders", stock()).subscribe("returns", second).build();
        assert!(refusal(inbox).contains("the handler key stock is used 2 times"));
    }
    for wrong in [stock().formerly("stock"), named("mail").formerly("stock").formerly("stock")] {
        assert!(refusal(scene.inbox().subscribe("orders", wrong).build()).contains("stock is used 2 times"));
    }
    let two_that_were_one = scene
        .inbox()
        .subscribe("orders", named("a").formerly("once"))
        .subscribe("orders", named("b").formerly("once"))
        .build();
    assert!(refusal(two_that_were_one).contains("as a former key of a, as a former key of b"));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_former_keys_are_refused() {
    let scene = Scene::new().await;
    for former in ["", "no spaces", "nul\0", "é", &"x".repeat(101)] {
        let error = refusal(scene.inbox().subscribe("orders", stock().formerly(former)).build());
        assert!(error.contains("a former key of stock"), "{error}");
        assert!(!error.contains('\0'), "{error:?}");
    }
    for key in ["", "no spaces", "nul\0", "é", &"x".repeat(101)] {
        assert!(HandlerKey::parse(key).unwrap_err().is_configuration());
    }
    scene.inbox().subscribe("orders", stock().formerly("x".repeat(100))).build().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn topic_names_that_are_invalid_in_kafka_are_refused() {
    let scene = Scene::new().await;
    for topic in ["", "no spaces", "nul\0", "é", "a/b", &"x".repeat(250)] {
        let error = refusal(scene.inbox().subscribe(topic.to_owned(), stock()).build());
        assert!(error.contains("stock subscribes to"), "{error}");
        assert!(!error.contains('\0'), "{error:?}");
    }
    let none: Vec<String> = vec![];
    assert!(refusal(scene.inbox().subscribe(none, stock()).build()).contains("stock subscribes to no topic"));
    scene.inbox().subscribe("x".repeat(249), stock()).build().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_problem_is_named_in_one_error() {
    let scene = Scene::new().await;
    let limits = Limits::default().lease(Duration::ZERO).poll(Duration::ZERO).crash_limit(0).accept_batch_rows(0).accept_batch_bytes(0).accept_batches(0).accept_queue_rows(0).payload_bytes_max(usize::MAX).headers_bytes_max(usize::MAX).settle_batch_rows(501).settle_queue_rows(0).backoff_max(Duration::ZERO);
    let wrong = stock().concurrency(0).timeout(Duration::ZERO).formerly("no spaces");

    let error = refusal(scene.inbox().limits(limits).subscribe("a b", wrong).subscribe("orders", stock()).build());

    let names = [
        ["lease", "poll", "crash_limit", "accept_batch_rows", "accept_batch_bytes", "accept_queue_rows"],
        [
            "payload_bytes_max",
            "headers_bytes_max",
            "settle_batch_rows",
            "settle_queue_rows",
            "backoff_max",
            "concurrency",
        ],
        [
            "timeout of stock",
            "former key of stock",
            "\"a b\"",
            "stock is used 2 times",
            "no spaces",
            "cannot build the inbox",
        ],
    ];
    for name in names.as_flattened() {
        assert!(error.contains(name), "{name} is not in {error}");
    }
    assert!(error.contains("accept_batches must be 1 to 64"), "{error}");
    assert!(refusal(scene.inbox().build()).contains("at least one handler"));
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_that_would_overflow_a_clock_are_refused_or_work() {
    let scene = Scene::new().await;
    let endless = Limits::default().poll(Duration::MAX).unknown_key_grace(Duration::MAX).accept_patience(Duration::MAX).backoff_max(Duration::MAX).suspect_wait_max(Duration::MAX).accept_queue_rows(usize::MAX).settle_queue_rows(usize::MAX).error_chars_max(usize::MAX);
    let runs = Runs::new();
    let slow = runs.handler("stock").timeout(Duration::MAX);
    let built = scene.inbox().limits(endless).subscribe("orders", slow).build();

    // An error is fine, and so is an inbox that works. A panic is not.
    if let Ok(inbox) = built {
        let running = inbox.start().await.unwrap();
        inbox.accept(record("a")).await.unwrap();
        runs.reached(1).await;
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_smallest_allowed_limits_work() {
    let scene = Scene::new().await;
    let smallest = Limits::default().lease(Duration::from_millis(100)).poll(Duration::from_millis(1)).crash_limit(1).store_error_limit(1).unknown_key_grace(Duration::ZERO).accept_batch_rows(1).accept_batch_bytes(1).accept_batches(1).accept_queue_rows(1).accept_queue_bytes(1).accept_patience(Duration::ZERO).payload_bytes_max(100).headers_bytes_max(0).quarantine_run_max(1).claim_batch_rows(1).claim_ahead(Duration::ZERO).claim_ahead_rows(0).claim_ahead_bytes(0).settle_batch_rows(1).settle_queue_rows(1).error_chars_max(0).backoff_max(Duration::from_nanos(1)).backlog_rows_max(1).backlog_age_max(Duration::ZERO).suspect_wait_max(Duration::ZERO);
    let runs = Runs::new();
    let failing = runs.answering("stock", |_| Err(wharf::Failure::poison("no"))).concurrency(1);
    let inbox = scene.inbox().limits(smallest).subscribe("orders", failing).build().unwrap();

    inbox.accept_all(records(10)).await.unwrap();
    inbox.drain().await.unwrap();

    assert_eq!(scene.count("inbox_poisoned WHERE length(last_error) <= 1").await, 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_has_to_run_alone_runs_although_it_waits_for_nothing() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let limits = Limits::default().suspect_wait_max(Duration::ZERO);
    let inbox = scene.inbox().limits(limits).subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept_all(records(3)).await.unwrap();
    scene.database.execute("UPDATE inbox_delivery SET crashes = 2").await;

    inbox.drain().await.unwrap();

    assert_eq!((runs.count(), scene.count("inbox_status WHERE state = 'done'").await), (3, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_was_another_handlers_former_key_is_refused_at_the_start() {
    let scene = Scene::new().await;
    let renamed = scene.inbox().subscribe("orders", named("new").formerly("old")).build().unwrap();
    renamed.drain().await.unwrap();
    let registry = "SELECT concat_ws(' ', k.key, k.handler_id, h.key) FROM inbox_handler_key k
                    JOIN inbox_handler h ON h.id = k.handler_id ORDER BY 1";
    let before = scene.database.query_texts(registry).await;
    let reused = || async {
        scene
            .another_inbox()
            .await
            .subscribe("orders", named("new"))
            .subscribe("orders", named("old"))
            .subscribe("orders", named("unrelated"))
            .build()
            .unwrap()
    };

    let error = reused().await.start().await.unwrap_err();

    assert!(error.is_configuration(), "{error:?}");
    assert!(error.to_string().contains("new and old name the same handler"), "{error}");
    assert!(reused().await.accept(record("a")).await.unwrap_err().is_configuration());
    // The refused process has changed nothing.
    assert_eq!(scene.database.query_texts(registry).await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_processes_that_start_at_once_give_a_handler_one_id() {
    let scene = Scene::new().await;
    let inboxes = join_all((0..8).map(async |number: usize| {
        // Half of them are the next version, in which stock is called store.
        let builder = scene.another_inbox().await.subscribe("orders", named("mail"));
        let renamed = named("store").formerly("stock");
        builder.subscribe("orders", if number.is_multiple_of(2) { stock() } else { renamed }).build().unwrap()
    }))
    .await;

    let started = join_all(inboxes.iter().map(Inbox::start)).await;

    assert_eq!((scene.count("inbox_handler").await, scene.count("inbox_handler_key").await), (2, 3));
    let ids_known = "SELECT count(DISTINCT handler_ids::text) FROM inbox_processor";
    assert_eq!(scene.database.query_one_i64(ids_known).await, 1);
    for running in started {
        running.unwrap().shutdown(Duration::from_secs(5)).await.unwrap();
    }
    assert_eq!(scene.count("inbox_processor").await, 0);
}
