//! Measures how long a purge takes with and without messages that stay.
//!
//! A handler with a retention of 90 days finished each message that stays two days ago. An earlier purge has scanned
//! them, as in any service that has run for a while.

use std::time::{Duration, Instant};

use support::postgres::{Cluster, connect};
use wharf::{Postgres, Retention, Store};

const DAY: Duration = Duration::from_secs(86_400);

/// Messages that a handler finished two days ago.
const FILL: &str = r"
    INSERT INTO inbox_message (message_id, source, topic, received_at, payload_hash, payload)
    SELECT '$handler-' || n, 'bench', 'bench', now() - interval '2 days', '\x00112233445566778899aabbccddeeff', '\x0011223344556677'
    FROM generate_series(1, $rows) n;
    INSERT INTO inbox_delivery (message_seq, handler_id, due_at, finished_at, attempts, status)
    SELECT m.seq, h.id, m.received_at, m.received_at, 1, 2 /* done */ FROM inbox_message m, inbox_handler h
    WHERE h.key = '$handler' AND m.message_id LIKE '$handler-%'";

/// Messages that stay and messages that go.
#[derive(Debug, Clone, Copy)]
pub struct Kept {
    pub stay: usize,
    pub go: usize,
}

/// How many times longer the purge takes with messages that stay.
pub async fn growth(cluster: &Cluster, Kept { stay, go }: Kept) -> f64 {
    let alone = purge_takes(cluster, "alone", 0, go).await;
    let beside = purge_takes(cluster, "beside", stay, go).await;
    let growth = beside.as_secs_f64() / alone.as_secs_f64();
    println!("{go} messages purged in {alone:.1?}, beside {stay} that stay in {beside:.1?}: {growth:.2} times as long");
    growth
}

async fn purge_takes(cluster: &Cluster, name: &str, stay: usize, go: usize) -> Duration {
    cluster.execute(&format!("CREATE DATABASE {name}")).await;
    let url = cluster.url(name);
    let client = connect(&url).await;
    let fill = async |handler: &str, rows: usize| {
        let filled = FILL.replace("$handler", handler).replace("$rows", &rows.to_string());
        for sql in [filled.as_str(), "VACUUM ANALYZE", "CHECKPOINT"] {
            client.batch_execute(sql).await.unwrap();
        }
    };
    let retention = Retention::after(DAY).for_handler("stays", 90 * DAY);
    let store = Store::<Postgres>::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    let handlers = "INSERT INTO inbox_handler (key) VALUES ('stays'), ('goes');
                    INSERT INTO inbox_handler_key (key, handler_id) SELECT key, id FROM inbox_handler";
    client.batch_execute(handlers).await.unwrap();
    fill("stays", stay).await;
    let looked = store.purge(&retention.clone().batch_rows(10_000), |_| {}).await.unwrap();
    assert_eq!(looked.messages, 0, "{looked}");
    fill("goes", go).await;

    // A new store, as in another process: the purge can use only the progress that the first one wrote to the database.
    let store = Store::<Postgres>::connect(&url).await.unwrap();
    let begun_at = Instant::now();
    let purged = store.purge(&retention, |_| {}).await.unwrap();
    assert_eq!(purged.messages, go as u64, "{purged}");
    begun_at.elapsed()
}
