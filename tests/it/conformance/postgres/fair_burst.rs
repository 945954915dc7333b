//! Fairness beside a burst of a million deliveries, which only a server stores quickly enough. Claims are counted, not
//! time.

use std::time::Duration;

use wharf::Record;
use wharf::flow::FairKey;

use super::scene::{Runs, Scene, quick, record};
use support::postgres::connect;

const AT_A_TIME: usize = 8;

/// A million more deliveries of the tenant of the only one, all due before it.
const BURST: &str = r"
    SET synchronous_commit = off;
    INSERT INTO inbox_message (message_id, source, topic, payload_hash)
    SELECT 'burst-' || n, 'orders', 'orders', '\x00' FROM generate_series(1, 1000000) n;
    INSERT INTO inbox_delivery (message_seq, handler_id, fair_hash, due_at)
    SELECT m.seq, first.handler_id, first.fair_hash, first.due_at - interval '1 hour'
    FROM inbox_message m, inbox_delivery first WHERE m.seq <> first.message_seq";

fn of(tenant: &'static str, count: usize) -> Vec<Record> {
    (0..count).map(|n| record(&format!("{tenant}-first-{n}")).with_header("tenant", tenant)).collect()
}

// For scripts/nightly: filling the tables takes a minute.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a million rows: scripts/nightly"]
async fn ten_deliveries_behind_a_million_of_another_tenant_run_within_three_claims() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().limits(quick().claim_ahead(Duration::ZERO));
    let mail = runs.handler("mail").fair_by(FairKey::header("tenant")).concurrency(AT_A_TIME);
    let inbox = inbox.subscribe("orders", mail).build().unwrap();
    inbox.accept_all(of("burst", 1)).await.unwrap();
    connect(&scene.database.url()).await.batch_execute(BURST).await.unwrap();
    inbox.accept_all(of("small", 10)).await.unwrap();

    let small = || runs.ids().iter().filter(|id| id.starts_with("small")).count();
    let mut shares = Vec::new();
    while small() < 10 && shares.len() < 10 {
        let before = small();
        assert!(inbox.run_due().await.unwrap() <= AT_A_TIME);
        shares.push(small() - before);
    }
    // Half of each claim, whatever the other tenant has.
    assert_eq!(shares, [4, 4, 2]);
    assert_eq!(scene.count("inbox_delivery WHERE finished_at IS NULL").await, 1_000_001 - (runs.count() as i64 - 10));
}
