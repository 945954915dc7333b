//! Every decision of the engine is one event that names its subject, and no event contains data that it must not.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use wharf::{Failure, Inbox, Message, Raw, Record, RetryPolicy, Store, handler};

use crate::scene::{Runs, Scene, key, quick, within};
use support::events::{Event, Events};
use support::postgres::{Cluster, connect};

/// The events about a delivery, apart from its start.
const DECISIONS: [&str; 7] = ["done", "retried", "snoozed", "discarded", "poisoned", "released", "claim lost"];

fn to(topic: &str, id: &str) -> Record {
    Record::new(topic).with_id(id.to_owned()).with_payload("anything")
}

/// `event attempt` of each decision on a message for a handler, in order.
fn decisions(events: &Events, handler: &str, id: &str) -> Vec<String> {
    let about = |e: &Event| e.has("handler", handler) && e.has("message_id", id) && DECISIONS.contains(&&*e.message);
    let found = events.matching(about);
    found.iter().map(|e| format!("{} {}", e.message, e.field("attempt").unwrap_or("?"))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_record_emits_one_event_with_its_result() {
    let events = Events::capture();
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("events.accept", Runs::new().handler("events.accept")).build().unwrap();
    inbox.accept(to("events.accept", "one")).await.unwrap();
    inbox.accept(to("events.accept", "one")).await.unwrap();
    inbox.accept_or_quarantine([to("events.accept", "one").with_payload("another")]).await.unwrap();
    inbox.accept_or_quarantine([Record::new("events.accept").with_position(3, 17)]).await.unwrap();
    inbox.accept(to("events.accept.unwanted", "one")).await.unwrap();

    let seen: Vec<String> = events
        .matching(|e| e.field("topic").is_some_and(|topic| topic.starts_with("events.accept")))
        .iter()
        .map(|e| format!("{} {}", e.message, e.field("message_id").or(e.field("reason")).unwrap_or("-")))
        .collect();
    let quarantined = events.matching(|e| e.message == "quarantined" && e.has("topic", "events.accept")).remove(0);
    assert_eq!((quarantined.field("partition"), quarantined.field("offset")), (Some("3"), Some("17")));
    assert_eq!(seen, ["accepted one", "duplicate one", "conflict one", "quarantined missing identity", "unwanted -"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_outcome_is_one_event_with_message_handler_and_attempt() {
    let events = Events::capture();
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().obeying("events.outcome")).build().unwrap();
    inbox.accept_all(Runs::ORDERS.map(|id| to("orders", id))).await.unwrap();
    inbox.drain().await.unwrap();

    let expected: [(&str, &[&str]); 5] = [
        ("done", &["done 1"]),
        ("retry", &["retried 1", "done 2"]),
        ("snooze", &["snoozed 1", "done 2"]),
        ("discard", &["discarded 1"]),
        ("poison", &["poisoned 1"]),
    ];
    for (id, decided) in expected {
        assert_eq!(decisions(&events, "events.outcome", id), decided, "{id}");
        let claimed =
            |e: &Event| e.message == "claimed" && e.has("handler", "events.outcome") && e.has("message_id", id);
        assert_eq!(events.matching(claimed).len(), decided.len(), "{id}");
    }
    let why = |what: &str| {
        let found = events.matching(|e| e.message == what && e.has("handler", "events.outcome"));
        format!("{:?} {:?}", found[0].field("reason"), found[0].field("error"))
    };
    assert_eq!(why("poisoned"), "Some(\"permanent\") Some(\"hopeless\")");
    assert_eq!(why("discarded"), "Some(\"not needed\") None");
    assert_eq!(why("retried"), "None Some(\"no\")");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_released_at_shutdown_has_an_event() {
    let events = Events::capture();
    let scene = Scene::new().await;
    let runs = Runs::new();
    let noted = runs.clone();
    let stuck = handler(key("events.released"), move |message: Message<Raw>| {
        noted.note(&message);
        std::future::pending::<Result<(), Failure>>()
    });
    let inbox = scene.inbox().subscribe("orders", stuck).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(to("orders", "held")).await.unwrap();
    runs.reached(1).await;
    running.shutdown(Duration::ZERO).await.unwrap();
    // A claim in progress may have claimed it once more, and released it as well.
    let decided = decisions(&events, "events.released", "held");
    assert!(decided[0] == "released 1" && decided.iter().all(|what| what.starts_with("released ")), "{decided:?}");
}

// A decision can differ from the stored outcome: an attempt that lost its claim is not done.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_claim_is_the_only_event_of_its_attempt() {
    let events = Events::capture();
    let scene = Scene::new().await;
    let thief = Arc::new(scene.database.client().await);
    let robbed = handler(key("events.lost"), move |message: Message<Raw>| {
        let thief = Arc::clone(&thief);
        async move {
            if message.attempt() == 1 {
                thief.batch_execute("UPDATE inbox_delivery SET attempts = attempts + 1").await?;
            }
            Ok::<(), Failure>(())
        }
    });
    let limits = quick().lease(Duration::from_secs(1));
    let inbox = scene.inbox().limits(limits).subscribe("orders", robbed).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(to("orders", "robbed")).await.unwrap();
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    let of_first: Vec<String> =
        decisions(&events, "events.lost", "robbed").into_iter().filter(|decision| decision.ends_with(" 1")).collect();
    assert_eq!(of_first, ["claim lost 1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reclaimed_delivery_and_its_crash_have_events() {
    let events = Events::capture();
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("events.reclaimed")).build().unwrap();
    inbox.accept(to("orders", "dead")).await.unwrap();
    let die = "UPDATE inbox_delivery SET attempts = 1, locked_by = 999, locked_until = now() - interval '1 second'";
    scene.database.execute(die).await;
    assert!(inbox.drain().await.unwrap() >= 1);
    let found = events.matching(|e| e.message == "reclaimed" && e.has("handler", "events.reclaimed"));
    assert_eq!(found.len(), 1);
    assert!(found[0].has("message_id", "dead") && found[0].has("crashes", "1"), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_key_is_reported_at_the_start_and_with_the_poisoned_deliveries() {
    let events = Events::capture();
    let scene = Scene::new().await;
    let gone = scene.inbox().subscribe("orders", Runs::new().handler("events.unknown")).build().unwrap();
    gone.accept_all(["a", "b"].map(|id| to("orders", id))).await.unwrap();
    let unknown = |poisoned: &'static str| {
        move |e: &Event| e.message == "unknown key" && e.has("handler", "events.unknown") && e.has("poisoned", poisoned)
    };
    for (grace, poisoned) in [(Duration::from_secs(3_600), "0"), (Duration::ZERO, "2")] {
        let limits = quick().unknown_key_grace(grace);
        let inbox = scene.inbox().limits(limits).subscribe("other", Runs::new().handler("known")).build().unwrap();
        let running = inbox.start().await.unwrap();
        events.wait_for(unknown(poisoned)).await;
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
    let rows = "SELECT concat_ws('|', message_id, reason, errors) FROM inbox_poisoned ORDER BY 1";
    assert_eq!(scene.database.query_texts(rows).await, ["a|unknown key|0", "b|unknown key|0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_with_terminal_control_sequences_is_escaped() {
    let events = Events::capture();
    let scene = Scene::new().await;
    let hostile = "x\u{1b}[2J\nfake line\r\u{202e}txt.exe\u{2066}\u{200b}\u{7f}";
    let failing = Runs::new().answering("events.hostile", move |_| Err(Failure::poison(hostile)));
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept(to("orders", hostile)).await.unwrap();
    inbox.accept(to("orders", hostile)).await.unwrap();
    inbox.accept_or_quarantine([to("orders", hostile).with_payload("another")]).await.unwrap();
    inbox.drain().await.unwrap();
    let about = events.matching(|e| e.field("message_id").is_some_and(|id| id.contains("fake line")));
    assert!(about.len() >= 5, "{about:?}");
    for event in about {
        let id = event.field("message_id").unwrap_or_default();
        assert!(id.chars().all(|c| c.is_ascii_graphic() || c == ' '), "{id:?}");
        let error = event.field("error").unwrap_or_default();
        assert!(!error.contains(['\u{1b}', '\r', '\u{202e}', '\u{2066}', '\u{7f}']), "{error:?}");
    }
}

#[derive(Debug, Deserialize)]
#[allow(dead_code, reason = "decoding it always fails")]
struct Card {
    number: u32,
}

#[tokio::test(flavor = "multi_thread")]
async fn no_event_and_no_error_shows_a_payload_a_key_a_header_or_a_password() {
    let events = Events::capture();
    let cluster = Cluster::start_with(&[]).await;
    let url = cluster.url("postgres").replacen("postgres@", "postgres:canary-password@", 1);
    let store = Store::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    let typed = handler(key("events.typed"), async |_: Message<Card>| Ok::<(), Failure>(()));
    let failing = Runs::new().answering("events.failing", |_| Err(Failure::retry("no")));
    let limits = quick().accept_patience(Duration::from_millis(200));
    let inbox = Inbox::builder(store.clone())
        .limits(limits)
        .subscribe("orders", typed)
        .subscribe("orders", failing.retry(RetryPolicy::never()))
        .build()
        .unwrap();
    let running = inbox.start().await.unwrap();
    let secret = |id: &str, payload: &str| {
        to("orders", id)
            .with_payload(payload.to_owned())
            .with_key("canary-key")
            .with_header("canary-header", "canary-value")
    };
    inbox.accept(secret("a", r#"{"number": "canary-payload"}"#)).await.unwrap();
    inbox.accept(secret("b", r#"{"canary-payload": 1, "number": -17}"#)).await.unwrap();
    inbox.accept(secret("c", "canary-payload")).await.unwrap();
    inbox.accept_or_quarantine([secret("a", "canary-payload")]).await.unwrap();
    inbox.accept_or_quarantine([secret("", "canary-payload")]).await.unwrap();
    let is_poisoned =
        |e: &Event| e.message == "poisoned" && (e.has("handler", "events.typed") || e.has("handler", "events.failing"));
    events.wait_for_count(6, is_poisoned).await;

    let client = connect(&cluster.url("postgres")).await;
    let kept = "SELECT count(*) FROM inbox_delivery WHERE last_error LIKE '%canary%'";
    assert_eq!(client.query_one(kept, &[]).await.unwrap().get::<_, i64>(0), 0, "a payload in last_error");
    let mut said = vec![format!("{inbox:?} {store:?} {running:?}")];
    cluster.stop_immediate().await;
    let refused = within(inbox.accept(secret("d", "canary-payload"))).await.unwrap_err();
    said.push(format!("{refused} {refused:?}"));
    for unusable in [url.clone(), url.replace("127.0.0.1", "[nowhere"), format!("{url}?sslmode=nonsense")] {
        let refused = Store::connect(&unusable).await.unwrap_err();
        said.push(format!("{refused} {refused:?}"));
    }
    // The database is unavailable, so the claims cannot be released.
    drop(running.shutdown(Duration::ZERO).await);
    said.extend(events.matching(|_| true).iter().map(|event| format!("{event:?}")));
    let leaks: Vec<&String> = said.iter().filter(|text| text.contains("canary-")).collect();
    assert!(leaks.is_empty(), "{leaks:#?}");
}
