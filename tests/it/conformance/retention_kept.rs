//! Retention costs what goes, not what stays: what was kept is looked at again when it can go, and not before. The expiry of what waits for a person.

use std::time::Duration;

use wharf::{Failure, Record, Retention};

use super::scene::{Database, Runs, Scene, record, records};

const DAY: Duration = Duration::from_secs(86_400);

/// Deliveries and messages look as if they had been finished this many days ago. What a purge has written down stays as it is.
async fn age(scene: &Scene, days: u32) {
    let ago = format!("now() - interval '{days} days'");
    let sql = format!(
        "UPDATE inbox_delivery SET finished_at = {ago} WHERE finished_at IS NOT NULL;
         UPDATE inbox_message SET received_at = {ago} - interval '1 minute'"
    );
    scene.database.execute(&sql).await;
}

async fn purged(scene: &Scene, retention: &Retention) -> u64 {
    scene.store.purge(retention, |_| {}).await.unwrap().messages
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_kept_is_not_looked_at_again_until_it_can_go() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let both = scene.inbox().subscribe("orders", runs.handler("mail")).subscribe("orders", runs.handler("audit"));
    let inbox = both.subscribe("returns", runs.handler("refund")).build().unwrap();
    inbox.accept_all(records(1_100)).await.unwrap();
    inbox.drain().await.unwrap();
    age(&scene, 8).await;
    let retention = Retention::after(7 * DAY).for_handler("audit", 90 * DAY);
    assert_eq!(purged(&scene, &retention).await, 0);
    assert_eq!(scene.count("inbox_kept WHERE look_at > now() + interval '81 days'").await, 3);

    // Were they looked at, they would go.
    age(&scene, 91).await;
    let returned = |number: usize| Record::new("returns").with_id(format!("r{number}")).with_payload("back");
    inbox.accept_all((0..20).map(returned).collect::<Vec<_>>()).await.unwrap();
    inbox.drain().await.unwrap();
    age(&scene, 91).await;
    // What is new is found, by another process too, and other periods look for themselves.
    let other = scene.another_store().await;
    assert_eq!(other.purge(&retention, |_| {}).await.unwrap().messages, 20);
    assert_eq!(scene.store.purgeable(&retention).await.unwrap().messages, 1_100);
    scene.database.execute("UPDATE inbox_kept SET look_at = now() - interval '1 days' WHERE block = 1").await;
    // With the 101 of the block that the new ones were in: it was looked at.
    assert_eq!(purged(&scene, &retention).await, 601);
    assert_eq!(purged(&scene, &Retention::after(7 * DAY)).await, 499);
    assert_eq!(scene.count("inbox_message").await, 0);
}

// The earliest it can go is a bound for what is not finished too: it is done now at the earliest.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_was_kept_for_a_poisoned_delivery_goes_its_time_after_it_is_done() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("stock", |_| Err(Failure::poison("no")));
    scene.inbox().subscribe("orders", failing).build().unwrap().accept(record("a")).await.unwrap();
    let failing = runs.answering("stock", |_| Err(Failure::poison("no")));
    scene.inbox().subscribe("orders", failing).build().unwrap().drain().await.unwrap();
    age(&scene, 8).await;
    let retention = Retention::after(7 * DAY);
    assert_eq!(purged(&scene, &retention).await, 0);
    let in_a_week = "inbox_kept WHERE look_at > now() + interval '6 days' AND look_at <= now() + interval '7 days'";
    assert_eq!(scene.count(in_a_week).await, 1);

    assert_eq!(scene.database.replay("a", "stock", None).await, 1);
    scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap().drain().await.unwrap();
    age(&scene, 8).await;
    scene.database.execute("UPDATE inbox_kept SET look_at = now() - interval '1 days'").await;
    assert_eq!(purged(&scene, &retention).await, 1);
    assert_eq!(scene.count("inbox_kept").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_for_a_person_expires_only_where_that_is_asked_for() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("stock", |_| Err(Failure::poison("no")));
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept_or_quarantine([record("a"), Record::new("orders").with_payload("no id")]).await.unwrap();
    inbox.drain().await.unwrap();
    age(&scene, 40).await;
    scene.database.execute("UPDATE inbox_quarantine SET quarantined_at = now() - interval '40 days'").await;
    let kept = Retention::after(DAY);
    let young = kept.clone().expire_poisoned(50 * DAY).expire_quarantined(50 * DAY);
    for retention in [&kept, &young] {
        let purged = scene.store.purge(retention, |_| {}).await.unwrap();
        assert_eq!((purged.messages, purged.quarantined), (0, 0));
    }
    let purged = scene.store.purge(&kept.expire_poisoned(30 * DAY).expire_quarantined(30 * DAY), |_| {}).await.unwrap();
    assert_eq!((purged.messages, purged.deliveries, purged.quarantined), (1, 1, 1));
    assert_eq!((scene.count("inbox_message").await, scene.count("inbox_quarantine").await), (0, 0));
}
