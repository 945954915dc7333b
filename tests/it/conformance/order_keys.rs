//! Ordered handlers for operators: which keys are held, by which delivery, and which actions are refused.

use std::time::Duration;

use wharf::operate::{Backfill, DeliveryFilter};
use wharf::order::OrderKey;
use wharf::{Failure, Record, Registration};

use super::scene::{Db, Runs, Scene, record};

/// A record with this key.
fn of(key: &str, id: &str) -> Record {
    record(id).with_key(key.to_owned())
}

fn in_order(registration: Registration<Db>) -> Registration<Db> {
    registration.ordered_by(OrderKey::record_key())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_of_an_ordered_handler_is_refused() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", in_order(runs.handler("stock"))).build().unwrap();
    inbox.accept(of("a", "a1")).await.unwrap();
    let refused = scene.store.operate().backfill(&Backfill::new("stock", ["orders"]), |_| {}).await.unwrap_err();
    assert!(refused.to_string().contains("cannot backfill stock: it is ordered"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn held_keys_are_listed_with_the_delivery_that_holds_them() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let failing = runs.answering("stock", |message| match message.id() {
        "a1" => Err(Failure::poison("no")),
        "b1" => Err(Failure::retry_after(Duration::from_secs(600), "later")),
        _ => Ok(()),
    });
    let inbox = scene.inbox().subscribe("orders", in_order(failing)).build().unwrap();
    let records = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2"), ("c", "c1")];
    inbox.accept_all(records.map(|(key, id)| of(key, id))).await.unwrap();
    inbox.drain().await.unwrap();

    let operator = scene.store.operate();
    let keys = operator.held_keys("stock", 10).await.unwrap();
    let told: Vec<_> =
        keys.iter().map(|key| (key.message_id.as_deref().unwrap(), key.state.unwrap().as_str(), key.behind)).collect();
    assert_eq!(told, [("a1", "poisoned", 2), ("b1", "pending", 1)]);
    assert!(keys[0].held_since.is_some());
    assert_eq!((keys[0].record_key.as_deref(), keys[1].record_key.as_deref()), (Some("a"), Some("b")));
    assert!(operator.held_keys("nobody", 10).await.is_err());

    let status = operator.handlers().await.unwrap().remove(0);
    assert_eq!((status.held, status.later, status.due, status.is_ordered), (3, 1, 0, true));
    assert_eq!(scene.count("inbox_backlog WHERE held = 3 AND later = 1").await, 1);
    let diagnosis = operator.doctor().await.unwrap();
    let held = diagnosis.symptoms.iter().find(|symptom| symptom.code == "held keys").unwrap();
    assert_eq!(held.what, "1 key of stock is blocked by a poisoned delivery (message a1); waiting: 2 deliveries");
    let retried = diagnosis.symptoms.iter().find(|symptom| symptom.code == "keys wait for a retry").unwrap();
    assert_eq!(
        retried.what,
        "1 key of stock is blocked by a delivery that is retried later (message b1); waiting: 1 delivery"
    );
    // Held deliveries have no due time.
    let deliveries = operator.deliveries(&DeliveryFilter::default().handler_key("stock"), None, 10).await.unwrap();
    assert_eq!(deliveries.iter().filter(|one| one.due_at.is_none()).count(), 3);
}
