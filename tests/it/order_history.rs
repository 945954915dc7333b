//! The history of ordered handlers while processes are killed and frozen: each effect of a key exists once, in accept
//! order.
//!
//! Effects are rows that a transactional handler commits together with its outcome. If a frozen process continues with
//! a claim that another process has by then, its work is rolled back, so the rows are the history that counts.
//! PostgreSQL only: on SQLite one transactional handler runs at a time.

use wharf::order::OrderKey;

use crate::scene::{Runs, Scene};
use crate::worker::{Worker, order};
use support::child::Child;

const KEYS: usize = 15;
const MESSAGES: usize = 450;

#[tokio::test(flavor = "multi_thread")]
async fn effects_of_a_key_stay_in_order_over_kills_freezes_and_retries() {
    let scene = Scene::new().await;
    // In the order in which they were written.
    let table = "CREATE TABLE effect (message_id text, written_as bigint GENERATED ALWAYS AS IDENTITY)";
    scene.database.execute(table).await;
    let worker = Worker {
        is_transactional: true,
        is_ordered: true,
        concurrency: 4,
        // The kills have another cause, so they must not poison any delivery.
        crash_limit: 1_000,
        ..Worker::on(&scene).await
    };
    let mut workers = [worker.spawn(), worker.spawn(), worker.spawn()];
    let accepting = tokio::spawn(accept_all(scene.inbox()));

    for round in 0..6 {
        written(&scene, 40 * (round + 1)).await;
        let place = round % workers.len();
        if round % 2 == 0 {
            workers[place].kill9().await;
            workers[place] = worker.spawn();
        } else {
            freeze_past_its_lease(&scene, &workers[place]).await;
        }
    }
    accepting.await.unwrap();
    scene.settled().await;

    let written = scene.database.query_texts("SELECT message_id FROM effect ORDER BY written_as").await;
    assert_eq!(written.len(), MESSAGES);
    for key in 0..KEYS {
        let of_key: Vec<&String> = written.iter().filter(|id| number(id) % KEYS == key).collect();
        let accepted: Vec<String> = (0..MESSAGES).filter(|n| n % KEYS == key).map(id).collect();
        assert_eq!(of_key, accepted.iter().collect::<Vec<_>>(), "key {key}");
    }
    assert_eq!(scene.count("inbox_delivery WHERE status <> 2").await, 0);
}

async fn accept_all(inbox: wharf::InboxBuilder<wharf::Postgres>) {
    let stock = Runs::new().handler("stock").ordered_by(OrderKey::record_key());
    let inbox = inbox.subscribe("orders", stock).build().unwrap();
    let records: Vec<_> = (0..MESSAGES)
        .map(|n| order(&id(n), if n % 9 == 0 { "fail once" } else { "work" }).with_key(format!("k{}", n % KEYS)))
        .collect();
    for batch in records.chunks(25) {
        inbox.accept_all(batch.to_vec()).await.unwrap();
    }
}

/// Freezes a worker until all its claims have expired and the others have continued for a while, then continues it.
async fn freeze_past_its_lease(scene: &Scene, child: &Child) {
    child.stop();
    // It may have been frozen between its settlement and its COMMIT: then it keeps the row lock, and its key waits
    // until it continues.
    let claims = format!(
        "SELECT (count(*) = 0)::int::bigint FROM inbox_delivery d JOIN inbox_processor p ON p.id = d.locked_by
         WHERE p.name LIKE '%/{}' AND d.locked_until > now()",
        child.id()
    );
    scene.until(&claims).await;
    // Near the end, what is left may be behind keys of the frozen worker, or done already.
    let so_far = usize::try_from(scene.count("effect").await).unwrap();
    if so_far + 120 < MESSAGES {
        written(scene, so_far + 20).await;
    }
    child.cont();
}

async fn written(scene: &Scene, count: usize) {
    scene.until(&format!("SELECT (count(*) >= {count})::int::bigint FROM effect")).await;
}

fn id(number: usize) -> String {
    format!("m{number:04}")
}

fn number(id: &str) -> usize {
    id[1..].parse().unwrap()
}
