//! The cost of retention depends on the deleted messages, not on the kept ones: a kept message is checked again only
//! when it can be deleted. Also the expiry of poisoned deliveries and quarantined records.

use std::time::Duration;

use wharf::operate::QuarantineFilter;
use wharf::{Failure, Record, Retention};

use super::scene::{Database, Runs, Scene, record, records};

const DAY: Duration = Duration::from_secs(86_400);

/// Makes deliveries and messages look finished this many days ago. The marks of a purge stay unchanged.
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
async fn kept_messages_are_not_checked_again_until_they_can_be_deleted() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let both = scene.inbox().subscribe("orders", runs.handler("mail")).subscribe("orders", runs.handler("audit"));
    let inbox = both.subscribe("returns", runs.handler("refund")).build().unwrap();
    inbox.accept_all(records(1_100)).await.unwrap();
    inbox.drain().await.unwrap();
    age(&scene, 8).await;
    let retention = Retention::after(7 * DAY).for_handler("audit", 90 * DAY);
    assert_eq!(purged(&scene, &retention).await, 0);
    assert_eq!(scene.count("inbox_kept WHERE check_at > now() + interval '81 days'").await, 3);

    // If they were checked now, they would be deleted.
    age(&scene, 91).await;
    let returned = |number: usize| Record::new("returns").with_id(format!("r{number}")).with_payload("back");
    inbox.accept_all((0..20).map(returned).collect::<Vec<_>>()).await.unwrap();
    inbox.drain().await.unwrap();
    age(&scene, 91).await;
    // New messages are found, by another process too, and other periods have their own marks.
    let other = scene.another_store().await;
    assert_eq!(other.purge(&retention, |_| {}).await.unwrap().messages, 20);
    assert_eq!(scene.store.purgeable(&retention).await.unwrap().messages, 1_100);
    scene.database.execute("UPDATE inbox_kept SET check_at = now() - interval '1 days' WHERE block = 1").await;
    // Includes the 101 messages of the block that the new ones were in: this block was checked.
    assert_eq!(purged(&scene, &retention).await, 601);
    assert_eq!(purged(&scene, &Retention::after(7 * DAY)).await, 499);
    assert_eq!(scene.count("inbox_message").await, 0);
}

// The earliest time of deletion is also a bound for unfinished messages: they finish now at the earliest.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_kept_for_a_poisoned_delivery_is_deleted_one_period_after_it_is_done() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("stock", |_| Err(Failure::poison("no")));
    scene.inbox().subscribe("orders", failing).build().unwrap().accept(record("a")).await.unwrap();
    let failing = runs.answering("stock", |_| Err(Failure::poison("no")));
    scene.inbox().subscribe("orders", failing).build().unwrap().drain().await.unwrap();
    age(&scene, 8).await;
    let retention = Retention::after(7 * DAY);
    assert_eq!(purged(&scene, &retention).await, 0);
    let in_a_week = "inbox_kept WHERE check_at > now() + interval '6 days' AND check_at <= now() + interval '7 days'";
    assert_eq!(scene.count(in_a_week).await, 1);

    assert_eq!(scene.database.replay("a", "stock", None).await, 1);
    scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap().drain().await.unwrap();
    age(&scene, 8).await;
    scene.database.execute("UPDATE inbox_kept SET check_at = now() - interval '1 days'").await;
    assert_eq!(purged(&scene, &retention).await, 1);
    assert_eq!(scene.count("inbox_kept").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn poisoned_and_quarantined_rows_expire_only_if_configured() {
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

// It waits for a process that subscribes to its topic; there may be none for long.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_whose_replay_is_requested_does_not_keep_later_ones_from_expiring() {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    let records = ["requested", "later"].map(|payload| Record::new("orders").with_payload(payload));
    inbox.accept_or_quarantine(records).await.unwrap();
    let operator = scene.store.operate();
    assert_eq!(operator.replay_quarantined(&QuarantineFilter::all(), 1).await.unwrap(), 1);
    scene.database.execute("UPDATE inbox_quarantine SET quarantined_at = now() - interval '40 days'").await;

    let retention = Retention::after(DAY).expire_quarantined(30 * DAY).batch_rows(1);
    let purged = scene.store.purge(&retention, |_| {}).await.unwrap();

    assert_eq!((purged.quarantined, scene.count("inbox_quarantine").await), (1, 1));
}

// An open delivery may be poisoned at any moment, and poisoned ones may expire before the others.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_with_an_open_delivery_is_checked_again_when_that_could_expire_as_poisoned() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let snoozing = runs.answering("stock", |_| Err(Failure::snooze(DAY)));
    let inbox = scene.inbox().subscribe("orders", snoozing).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    age(&scene, 40).await;

    assert_eq!(purged(&scene, &Retention::after(30 * DAY).expire_poisoned(2 * DAY)).await, 0);

    let soon = "inbox_kept WHERE check_at > now() + interval '1 days' AND check_at <= now() + interval '2 days'";
    assert_eq!(scene.count(soon).await, 1);
}
