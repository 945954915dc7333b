//! Identities that are kept longer than their messages: a late redelivery is still a duplicate although the message was
//! purged.

use std::time::Duration;

use futures_util::future::join;
use sha2::{Digest, Sha256};
use wharf::{Inbox, Receipt, Retention};
use wharf::operate::Purged;

use super::scene::{Database, Db, Runs, Scene, record, records, within};

const DAY: Duration = Duration::from_secs(86_400);
const DUPLICATE: Receipt = Receipt::Duplicate { added: 0 };

fn keeping() -> Retention {
    Retention::after(Duration::ZERO).keep_identities(30 * DAY)
}

async fn purge(scene: &Scene, retention: &Retention) -> Purged {
    within(scene.store.purge(retention, |_| {})).await.unwrap()
}

/// A scene where no test waits until identities are settled, and an inbox.
async fn quick_scene(runs: &Runs) -> (Scene, Inbox<Db>) {
    let scene = Scene::new().await;
    scene.database.age_identities(3_600).await;
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    (scene, inbox)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redelivery_after_the_purge_is_a_duplicate_and_runs_nothing() {
    let runs = Runs::new();
    let (scene, inbox) = quick_scene(&runs).await;
    inbox.accept_all(records(50)).await.unwrap();
    inbox.drain().await.unwrap();

    let purged = purge(&scene, &keeping()).await;
    assert_eq!((purged.messages, purged.deliveries, purged.identities_kept), (50, 50, 50));

    // Beside new records in one batch; and with a payload that can no longer be compared.
    let mut again = records(60);
    again[3] = record("m000003").with_payload("another");
    let receipts = inbox.accept_all(again).await.unwrap();
    assert!(receipts[..50].iter().all(|receipt| *receipt == DUPLICATE), "{receipts:?}");
    assert!(receipts[50..].iter().all(|receipt| *receipt == Receipt::Accepted { deliveries: 1 }), "{receipts:?}");
    assert_eq!(inbox.drain().await.unwrap(), 10);
    assert_eq!((runs.count(), scene.count("inbox_message").await), (60, 10));
    // The same id from another source is another message.
    assert_eq!(inbox.accept(record("m000003").with_source("shop")).await.unwrap(), Receipt::Accepted { deliveries: 1 });
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_is_deleted_after_its_period() {
    let runs = Runs::new();
    let (scene, inbox) = quick_scene(&runs).await;
    inbox.accept_all(records(20)).await.unwrap();
    inbox.drain().await.unwrap();
    purge(&scene, &keeping().batch_rows(7)).await;
    let oldest = "(SELECT hash FROM inbox_identity ORDER BY hash LIMIT 15)";
    let over = "UPDATE inbox_identity SET forget_at = now() - interval '1 second' WHERE hash IN";
    scene.database.execute(&format!("{over} {oldest}")).await;

    // Also by a retention that keeps no identities.
    assert_eq!(scene.store.purgeable(&Retention::after(DAY)).await.unwrap().identities, 15);
    assert_eq!(purge(&scene, &Retention::after(DAY).batch_rows(4)).await.identities_forgotten, 15);

    let receipts = inbox.accept_all(records(20)).await.unwrap();
    assert_eq!(receipts.iter().filter(|receipt| **receipt == DUPLICATE).count(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_can_delete_an_identity_and_it_is_audited() {
    let runs = Runs::new();
    let (scene, inbox) = quick_scene(&runs).await;
    inbox.accept_all(records(2)).await.unwrap();
    inbox.drain().await.unwrap();
    purge(&scene, &keeping()).await;
    let operator = scene.store.operate().because("sent again on purpose");

    assert!(operator.forget_identity("m000001", "orders").await.unwrap());
    assert!(!operator.forget_identity("m000001", "orders").await.unwrap(), "it is forgotten already");
    assert!(!operator.forget_identity("m000000", "shop").await.unwrap(), "the id of another source");

    let receipts = inbox.accept_all(records(2)).await.unwrap();
    assert_eq!(receipts, [DUPLICATE, Receipt::Accepted { deliveries: 1 }]);
    let audit = "SELECT action || ' ' || affected || ' ' || because FROM inbox_audit ORDER BY id LIMIT 1";
    assert_eq!(scene.database.query_texts(audit).await, ["forget identity 1 sent again on purpose"]);
    let named = "SELECT count(*) FROM inbox_audit WHERE filter->>'message_id' = 'm000001' AND filter->>'source' = 'orders'";
    assert_eq!(scene.database.query_one_i64(named).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_store_keeps_the_same_16_byte_hash_of_an_identity() {
    let runs = Runs::new();
    let (scene, inbox) = quick_scene(&runs).await;
    let long = "é".repeat(200);
    let identities = [("a", "bc"), ("ab", "c"), ("o'brien \"\\ \u{1}", "%s$1?1"), ("消息🦀", "ünï"), (long.as_str(), "x")];
    let records = identities.map(|(id, source)| record(id).with_source(source));
    inbox.accept_all(records.clone()).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(purge(&scene, &keeping()).await.identities_kept, 5);

    let mut expected = identities.map(|(id, source)| {
        let length = |text: &str| u32::try_from(text.len()).unwrap().to_be_bytes();
        let bytes = [&length(id)[..], id.as_bytes(), &length(source), source.as_bytes()].concat();
        Sha256::digest(bytes)[..16].iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    });
    expected.sort();
    assert_eq!(scene.database.identity_hashes().await, expected);
    assert_eq!(inbox.accept_all(records).await.unwrap(), vec![DUPLICATE; 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_purged_records_beside_a_quarantined_one_gets_all_receipts() {
    let runs = Runs::new();
    let (scene, inbox) = quick_scene(&runs).await;
    inbox.accept_all(records(3)).await.unwrap();
    inbox.drain().await.unwrap();
    purge(&scene, &keeping()).await;
    let batch = [record("m000000"), record(""), record("m000000"), record("m000002")];
    let receipts = inbox.accept_or_quarantine(batch).await.unwrap();
    let quarantined = Receipt::Quarantined { reason: "empty identity" };
    assert_eq!(receipts, [DUPLICATE, quarantined, DUPLICATE, DUPLICATE]);
    assert_eq!((scene.count("inbox_message").await, scene.count("inbox_quarantine").await), (0, 1));
}

// A redelivery that arrives while its message is being purged must not count as new.
#[tokio::test(flavor = "multi_thread")]
async fn under_continuous_redeliveries_and_purges_each_identity_runs_once() {
    let scene = Scene::new().await;
    // Identities are settled two seconds after they were written: longer than an accept takes here.
    scene.database.age_identities(118).await;
    let runs = Runs::new();
    let one = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    let two = scene.another_inbox().await.subscribe("orders", runs.handler("stock")).build().unwrap();
    let (one_runs, two_runs) = (one.start().await.unwrap(), two.start().await.unwrap());
    let redeliver = async |inbox: &Inbox<Db>, stopped: tokio::sync::watch::Receiver<bool>| {
        let mut accepted = 0;
        while !*stopped.borrow() {
            let receipts = inbox.accept_all(records(100)).await.unwrap();
            accepted += receipts.iter().filter(|receipt| **receipt != DUPLICATE).count();
        }
        accepted
    };
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let purger = scene.another_store().await;
    let purging = async {
        let mut purged = 0;
        while purged < 100 {
            purged += purger.purge(&keeping(), |_| {}).await.unwrap().messages;
        }
        stop.send_replace(true);
        purged
    };

    let (purged, (by_one, by_two)) =
        within(join(purging, join(redeliver(&one, stopped.clone()), redeliver(&two, stopped)))).await;

    assert_eq!((purged, by_one + by_two), (100, 100));
    scene.settled().await;
    assert_eq!(runs.count(), 100);
    for running in [one_runs, two_runs] {
        within(running.shutdown(Duration::from_secs(5))).await.unwrap();
    }
}
