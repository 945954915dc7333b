//! The baseline: hand-written SQL on the same tables, with prepared statements, in batches and on two connections. The
//! records are already in memory.

use tokio_postgres::Client;

use crate::{Scale, Servers, fresh_database};
use support::bench::{BATCH_ROWS, Measured, Meter, PAYLOAD_BYTES, done_with, on_each_connection};

const INSERT: &str = "
    WITH message AS (
        INSERT INTO inbox_message (message_id, source, topic, payload_hash, payload)
        SELECT id, 'bench', 'bench', hash, payload FROM unnest($1::text[], $2::bytea[], $3::bytea[]) AS i (id, hash, payload)
        ON CONFLICT (message_id, source) DO NOTHING RETURNING seq)
    INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
    SELECT seq, handler_id, now() FROM message, unnest($4::smallint[]) AS h (handler_id)";

/// Inserts a message for each record, and a delivery of it for each handler.
pub async fn accept(servers: &Servers, scale: Scale, handlers: i16) -> Measured {
    let url = fresh_database(&servers.postgres).await;
    let meter = || Meter::start(&servers.postgres, Some(&servers.kafka));
    let insert = |client, numbers| insert(client, numbers, handlers);
    let measured = on_each_connection(meter, &url, scale.messages, insert).await;
    done_with(&servers.postgres, &url, "bare SQL").await;
    measured
}

async fn insert(client: Client, numbers: Vec<usize>, handlers: i16) {
    let insert = client.prepare(INSERT).await.unwrap();
    let handler_ids: Vec<i16> = (1..=handlers).collect();
    for batch in numbers.chunks(BATCH_ROWS) {
        let ids: Vec<String> = batch.iter().map(|number| format!("message-{number}")).collect();
        let hashes = vec![[7u8; 16].to_vec(); batch.len()];
        let payloads = vec![vec![b'x'; PAYLOAD_BYTES]; batch.len()];
        client.execute(&insert, &[&ids, &hashes, &payloads, &handler_ids]).await.unwrap();
    }
}
