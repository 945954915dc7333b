//! The event of a quarantined record has the id of its quarantine row, also when the record was quarantined before.

use wharf::{Identity, Inbox, Record};

use super::scene::{Db, Runs, Scene};
use support::events::Events;

/// An inbox for a topic of this test alone, with a header as identity.
fn inbox(scene: &Scene, topic: &str) -> Inbox<Db> {
    let builder = scene.inbox().subscribe(topic, Runs::new().handler("stock"));
    builder.identity(topic, Identity::header("h")).build().unwrap()
}

/// `message id` of the events about quarantined records of this topic.
fn told(events: &Events, topic: &str) -> Vec<String> {
    let told = events.matching(|event| ["quarantined", "conflict"].contains(&&*event.message) && event.has("topic", topic));
    told.iter().map(|event| format!("{} {}", event.message, event.field("id").unwrap_or("-"))).collect()
}

/// `reason id` of the quarantine, in the order of payloads.
async fn rows(scene: &Scene) -> Vec<String> {
    let rows = "SELECT CASE reason WHEN 'conflict' THEN 'conflict ' ELSE 'quarantined ' END || id FROM inbox_quarantine ORDER BY inbox_text(payload)";
    scene.database.query_texts(rows).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_event_of_a_quarantined_record_names_its_row() {
    let scene = Scene::new().await;
    let (events, topic) = (Events::capture(), "quarantine-ids");
    let inbox = inbox(&scene, topic);
    let bad = |payload: &'static str| Record::new(topic).with_payload(payload);
    let good = |id: &'static str, payload: &'static str| Record::new(topic).with_header("h", id).with_payload(payload);

    // Alone, beside messages, and as conflicts.
    inbox.accept_or_quarantine([bad("a"), bad("b")]).await.unwrap();
    inbox.accept_or_quarantine([good("1", "fine"), bad("c"), good("2", "fine")]).await.unwrap();
    inbox.accept_or_quarantine([good("2", "d"), good("1", "fine"), good("1", "e")]).await.unwrap();

    let rows = rows(&scene).await;
    assert_eq!(rows.len(), 5);
    assert_eq!(told(&events, topic), rows);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redelivered_record_keeps_its_quarantine_row() {
    let scene = Scene::new().await;
    let (events, topic) = (Events::capture(), "quarantine-ids-again");
    let inbox = inbox(&scene, topic);
    let bad = |payload: &'static str| Record::new(topic).with_payload(payload);
    let conflict = || Record::new(topic).with_header("h", "1").with_payload("z");
    inbox.accept_or_quarantine([Record::new(topic).with_header("h", "1").with_payload("fine")]).await.unwrap();

    inbox.accept_or_quarantine([bad("a"), bad("b"), conflict()]).await.unwrap();
    inbox.accept_or_quarantine([bad("b"), bad("a"), bad("b")]).await.unwrap();
    inbox.accept_or_quarantine([conflict()]).await.unwrap();

    let [a, b, conflict] = rows(&scene).await.try_into().unwrap();
    let expected = [&a, &b, &conflict, &b, &a, &b, &conflict].map(String::clone);
    assert_eq!(told(&events, topic), expected);
}
