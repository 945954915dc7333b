//! Many processes accept the same records at once, in different orders: nothing is lost or stored twice, and nothing
//! deadlocks.

use std::time::Duration;

use futures_util::future::join_all;
use rand::seq::SliceRandom;
use wharf::store::PostgresOptions;
use wharf::{Inbox, Receipt, Record, Store};

use crate::scene::{Runs, Scene, State, quick, record, records, within};

const ACCEPTORS: usize = 8;
/// How many of the five hundred records of each acceptor all others also have.
const SHARED: usize = 350;
const OWN: usize = 150;
/// Ids that half of the acceptors have with another payload than the other half.
const CONTESTED: usize = 20;

fn records_of(acceptor: usize) -> Vec<Record> {
    let shared = (0..SHARED).map(|number| record(&format!("shared {number}")));
    let own = (0..OWN).map(|number| record(&format!("own {acceptor} {number}")));
    let contested =
        (0..CONTESTED).map(|number| record(&format!("contested {number}")).with_payload(format!("{}", acceptor % 2)));
    let mut records: Vec<Record> = shared.chain(own).chain(contested).collect();
    records.shuffle(&mut rand::rng());
    records
}

// Two statements that insert the same identities in different orders would deadlock: batches are sorted by identity.
#[tokio::test(flavor = "multi_thread")]
async fn eight_processes_with_overlapping_batches_lose_and_double_nothing_and_never_deadlock() {
    let scene = Scene::new().await;
    let (stock, mail) = (Runs::new(), Runs::new());
    // Long leases: even on a busy machine no claim expires during the test.
    let limits = quick().lease(Duration::from_secs(60)).accept_batch_rows(100);
    let mut inboxes = Vec::new();
    let mut all_running = Vec::new();
    for _ in 0..ACCEPTORS {
        let options = PostgresOptions::default().pool_size(3);
        let store = Store::connect_with(&scene.database.url(), options).await.unwrap();
        let builder = Inbox::builder(store).limits(limits.clone());
        let builder = builder.subscribe("orders", stock.handler("stock")).subscribe("orders", mail.handler("mail"));
        let inbox = builder.build().unwrap();
        all_running.push(inbox.start().await.unwrap());
        inboxes.push(inbox);
    }

    let work = inboxes.iter().enumerate().map(async |(acceptor, inbox)| {
        let mut receipts = Vec::new();
        // Every record comes twice, in another order.
        for _ in 0..2 {
            receipts.extend(inbox.accept_or_quarantine(records_of(acceptor)).await.unwrap());
        }
        receipts
    });
    let receipts: Vec<Receipt> = join_all(work).await.into_iter().flatten().collect();

    scene.settled().await;
    let messages = SHARED + ACCEPTORS * OWN + CONTESTED;
    assert_eq!(receipts.iter().filter(|receipt| **receipt == Receipt::Accepted { deliveries: 2 }).count(), messages);
    let messages_stored = usize::try_from(scene.count("inbox_message").await).unwrap();
    let deliveries_done = usize::try_from(scene.count_in(State::Done).await).unwrap();
    assert_eq!((messages_stored, deliveries_done), (messages, 2 * messages));
    for runs in [&stock, &mail] {
        let mut ids = runs.sorted();
        assert_eq!(ids.len(), messages);
        ids.dedup();
        assert_eq!(ids.len(), messages);
    }
    // For each contested id, the payload that came first is the message; the other is quarantined once.
    assert_eq!(usize::try_from(scene.count("inbox_quarantine WHERE reason = 'conflict'").await).unwrap(), CONTESTED);
    assert_eq!(usize::try_from(scene.count("inbox_quarantine").await).unwrap(), CONTESTED);

    for running in all_running {
        running.shutdown(Duration::from_secs(10)).await.unwrap();
    }
    // A session writes its statistics at its end at the latest.
    drop(inboxes);
    let Scene { database, store } = scene;
    drop(store);
    let open =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'wharf'";
    within(async {
        while database.query_one_i64(open).await > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    assert_eq!(database.query_one_i64(deadlocks).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_deleted_during_its_redelivery_is_accepted_again() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept_all(records(100)).await.unwrap();
    let client = scene.database.client().await;
    let deleting = tokio::spawn(async move {
        for _ in 0..200 {
            let some = "DELETE FROM inbox_message WHERE random() < 0.5 RETURNING seq";
            let both =
                format!("WITH gone AS ({some}) DELETE FROM inbox_delivery WHERE message_seq IN (SELECT seq FROM gone)");
            client.batch_execute(&both).await.unwrap();
        }
    });

    while !deleting.is_finished() {
        assert_eq!(inbox.accept_all(records(100)).await.unwrap().len(), 100);
    }
    deleting.await.unwrap();
    inbox.accept_all(records(100)).await.unwrap();

    let whole = "inbox_message m JOIN inbox_delivery d ON d.message_seq = m.seq";
    assert_eq!((scene.count(whole).await, scene.count("inbox_quarantine").await), (100, 0));
}
