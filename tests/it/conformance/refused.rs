//! Records that the database rejects because of their content are found and quarantined; the others of the batch are
//! accepted.

use std::time::Duration;

use wharf::operate::QuarantineFilter;
use wharf::{Inbox, Receipt, Record};

use super::scene::{Database, Db, Runs, Scene, record};

const REFUSED: Receipt = Receipt::Quarantined { reason: "refused by the database" };
pub(super) const ACCEPTED: Receipt = Receipt::Accepted { deliveries: 1 };

fn with_bad_ones(count: usize, every: usize) -> (Vec<Record>, Vec<Receipt>) {
    let one = |number| {
        if number % every == every - 1 {
            (record(&format!("bad {number}")), REFUSED)
        } else {
            (record(&format!("good {number}")), ACCEPTED)
        }
    };
    (0..count).map(one).unzip()
}

pub(super) async fn stock_inbox(scene: &Scene, runs: &Runs) -> Inbox<Db> {
    scene.another_inbox().await.subscribe("orders", runs.handler("stock").concurrency(1_000)).build().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_violates_a_constraint_is_quarantined_and_its_batch_accepted() {
    let scene = Scene::new().await;
    scene.database.refuse_bad_by_constraint().await;
    let runs = Runs::new();
    let inbox = stock_inbox(&scene, &runs).await;
    let (batch, expected) = with_bad_ones(500, 50);

    assert_eq!(inbox.accept_or_quarantine(batch.clone()).await.unwrap(), expected);

    assert_eq!(scene.count("inbox_quarantine").await, 10);
    assert_eq!(inbox.drain().await.unwrap(), 490);
    // A redelivery changes nothing.
    inbox.accept_or_quarantine(batch).await.unwrap();
    assert_eq!(scene.count("inbox_quarantine").await, 10);
    assert_eq!(inbox.drain().await.unwrap(), 0);
    let kept = "SELECT concat_ws('|', reason, inbox_text(payload)) FROM inbox_quarantine ORDER BY id LIMIT 1";
    assert_eq!(scene.database.query_texts(kept).await, ["refused by the database|payload of bad 49"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_a_trigger_refuses_is_quarantined_and_its_batch_accepted() {
    let scene = Scene::new().await;
    scene.database.refuse_bad_by_trigger().await;
    let runs = Runs::new();
    let inbox = stock_inbox(&scene, &runs).await;
    let (batch, expected) = with_bad_ones(64, 32);

    assert_eq!(inbox.accept_or_quarantine(batch).await.unwrap(), expected);

    assert_eq!(scene.count("inbox_quarantine").await, 2);
    assert_eq!(inbox.drain().await.unwrap(), 62);
}

#[tokio::test(flavor = "multi_thread")]
async fn neighbours_of_a_refused_record_run_once_and_count_no_crash() {
    let scene = Scene::new().await;
    scene.database.refuse_bad_by_constraint().await;
    let runs = Runs::new();
    let inbox = stock_inbox(&scene, &runs).await;
    let running = inbox.start().await.unwrap();
    let (batch, expected) = with_bad_ones(100, 20);

    assert_eq!(inbox.accept_or_quarantine(batch).await.unwrap(), expected);

    scene.settled().await;
    assert_eq!(runs.count(), 95);
    assert_eq!(scene.count_done_at_first().await, 95);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// An operator finds the records of a cluster, whatever they are quarantined for.
#[tokio::test(flavor = "multi_thread")]
async fn conflicts_and_refused_records_are_found_by_their_cluster() {
    let scene = Scene::new().await;
    scene.database.refuse_bad_by_constraint().await;
    let runs = Runs::new();
    let inbox = stock_inbox(&scene, &runs).await;
    let forged = record("a").with_payload("forged");
    let records = [record("a"), forged, record("bad")].map(|record| record.with_position(0, 1).with_cluster("here"));

    inbox.accept_or_quarantine(records).await.unwrap();

    let of_cluster = QuarantineFilter::default().cluster_id("here");
    let found = scene.store.operate().quarantined(&of_cluster, 10).await.unwrap();
    let mut reasons: Vec<&str> = found.iter().map(|row| row.reason.as_str()).collect();
    reasons.sort_unstable();
    assert_eq!(reasons, ["conflict", "refused by the database"]);
}
