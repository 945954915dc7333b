//! The baseline: hand-written SQL on the same tables, prepared, batched, two connections, nothing around it, records already in memory.

use std::time::Instant;

use tokio_postgres::Client;

use crate::support::postgres::{Cluster, connect};
use crate::{BATCH_ROWS, CONNECTIONS, PAYLOAD_BYTES, Scale, fresh_database};

const INSERT: &str = "
    WITH message AS (
        INSERT INTO inbox_message (message_id, source, topic, payload_hash, payload)
        SELECT id, 'bench', 'bench', hash, payload FROM unnest($1::text[], $2::bytea[], $3::bytea[]) AS i (id, hash, payload)
        ON CONFLICT (message_id, source) DO NOTHING RETURNING seq)
    INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
    SELECT seq, handler_id, now() FROM message, unnest($4::smallint[]) AS h (handler_id)";

/// Records a second that become a message and a delivery for each handler.
pub async fn accept(cluster: &Cluster, scale: Scale, handlers: i16) -> f64 {
    let url = fresh_database(cluster).await;
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        clients.push(connect(&url).await);
    }
    let started_at = Instant::now();
    let tasks: Vec<_> = clients
        .into_iter()
        .enumerate()
        .map(|(share, client)| tokio::spawn(insert(client, share, scale.messages, handlers)))
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    scale.messages as f64 / started_at.elapsed().as_secs_f64()
}

async fn insert(client: Client, share: usize, messages: usize, handlers: i16) {
    let insert = client.prepare(INSERT).await.unwrap();
    let handler_ids: Vec<i16> = (1..=handlers).collect();
    let numbers: Vec<usize> = (0..messages).filter(|number| number % CONNECTIONS == share).collect();
    for batch in numbers.chunks(BATCH_ROWS) {
        let ids: Vec<String> = batch.iter().map(|number| format!("message-{number}")).collect();
        let hashes = vec![[7u8; 16].to_vec(); batch.len()];
        let payloads = vec![vec![b'x'; PAYLOAD_BYTES]; batch.len()];
        client.execute(&insert, &[&ids, &hashes, &payloads, &handler_ids]).await.unwrap();
    }
}
