//! A database full of messages that were finished two days ago.

use crate::Scale;
use support::postgres::{Cluster, connect};

/// Messages with one delivery each, which is done.
const FILL: &str = r"
    INSERT INTO inbox_handler (key) VALUES ('bench');
    INSERT INTO inbox_handler_key (key, handler_id) SELECT key, id FROM inbox_handler;
    INSERT INTO inbox_message (message_id, source, topic, received_at, payload_hash, payload)
    SELECT 'old-' || n, 'bench', 'bench', now() - interval '2 days', '\x00112233445566778899aabbccddeeff', '\x0011223344556677'
    FROM generate_series(1, $rows) n;
    INSERT INTO inbox_delivery (message_seq, handler_id, due_at, finished_at, attempts, status)
    SELECT m.seq, h.id, m.received_at, m.received_at, 1, 2 /* done */ FROM inbox_message m, inbox_handler h";

pub async fn database(cluster: &Cluster, scale: Scale) -> String {
    cluster.execute("CREATE DATABASE bench").await;
    let url = cluster.url("bench");
    wharf::Store::<wharf::Postgres>::connect(&url).await.unwrap().migrate().await.unwrap();
    let client = connect(&url).await;
    // As in production, the table is vacuumed, analysed and written to disk. The statements are separate, because
    // VACUUM cannot run in a transaction.
    for sql in [FILL.replace("$rows", &scale.rows.to_string()).as_str(), "VACUUM ANALYZE", "CHECKPOINT"] {
        client.batch_execute(sql).await.unwrap();
    }
    url
}
