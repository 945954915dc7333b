//! The baseline: hand-written SQL on the same tables, with prepared statements, in batches and on two connections.

use tokio_postgres::Client;

use crate::{Scale, fresh_database, tidy_up};
use support::bench::{BATCH_ROWS, Measured, Meter, PAYLOAD_BYTES, done_with, on_each_connection};
use support::postgres::Cluster;

const INSERT: &str = "
    WITH message AS (
        INSERT INTO inbox_message (message_id, source, topic, payload_hash, payload)
        SELECT id, 'bench', 'bench', hash, payload FROM unnest($1::text[], $2::bytea[], $3::bytea[]) AS i (id, hash, payload)
        ON CONFLICT (message_id, source) DO NOTHING RETURNING seq)
    INSERT INTO inbox_delivery (message_seq, handler_id, due_at, attempts, locked_until)
    SELECT seq, 1, now(), $4::int, CASE WHEN $4::int > 0 THEN now() + interval '30 s' END FROM message RETURNING message_seq";

const CLAIM: &str = "
    WITH claimed AS (
        UPDATE inbox_delivery t SET locked_until = now() + interval '30 s', attempts = t.attempts + 1, locked_by = 1
        WHERE t.ctid = ANY (ARRAY(
            SELECT ctid FROM inbox_delivery
            WHERE handler_id = 1 AND finished_at IS NULL AND due_at <= now() AND (locked_until IS NULL OR locked_until <= now())
            ORDER BY due_at, message_seq LIMIT $1 FOR NO KEY UPDATE SKIP LOCKED))
        RETURNING t.message_seq, t.attempts)
    SELECT c.message_seq, c.attempts, m.message_id, m.payload FROM claimed c JOIN inbox_message m ON m.seq = c.message_seq";

const COMPLETE: &str = "
    UPDATE inbox_delivery d SET finished_at = now(), status = 2 /* done */, locked_until = NULL, locked_by = NULL
    FROM unnest($1::bigint[]) AS s (message_seq)
    WHERE d.message_seq = s.message_seq AND d.handler_id = 1 AND d.finished_at IS NULL";

pub async fn accept(cluster: &Cluster, scale: Scale) -> Measured {
    let url = fresh_database(cluster).await;
    let measured = insert_all(cluster, &url, scale, 0).await;
    done_with(cluster, &url, "accept, bare SQL").await;
    measured
}

pub async fn drain(cluster: &Cluster, scale: Scale) -> Measured {
    let url = fresh_database(cluster).await;
    insert_all(cluster, &url, scale, 0).await;
    tidy_up(&url).await;
    let measured = on_each_connection(
        || Meter::start(cluster, None),
        &url,
        scale.messages,
        |client, _| async move {
            let claim = client.prepare(CLAIM).await.unwrap();
            let complete = client.prepare(COMPLETE).await.unwrap();
            loop {
                let rows = client.query(&claim, &[&(BATCH_ROWS as i64)]).await.unwrap();
                if rows.is_empty() {
                    return;
                }
                let seqs: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
                client.execute(&complete, &[&seqs]).await.unwrap();
            }
        },
    )
    .await;
    done_with(cluster, &url, "drain, bare SQL").await;
    measured
}

pub async fn accept_to_done(cluster: &Cluster, scale: Scale) -> Measured {
    let url = fresh_database(cluster).await;
    let measured = insert_all(cluster, &url, scale, 1).await;
    done_with(cluster, &url, "accept to done, bare SQL").await;
    measured
}

/// Inserts all messages; see [`insert`].
pub async fn insert_all(cluster: &Cluster, url: &str, scale: Scale, attempts: i32) -> Measured {
    let meter = || Meter::start(cluster, None);
    on_each_connection(meter, url, scale.messages, |client, numbers| insert(client, numbers, attempts)).await
}

/// Inserts in batches; with `attempts` 1 each batch is inserted as claimed and completed at once.
async fn insert(client: Client, numbers: Vec<usize>, attempts: i32) {
    let insert = client.prepare(INSERT).await.unwrap();
    let complete = client.prepare(COMPLETE).await.unwrap();
    for batch in numbers.chunks(BATCH_ROWS) {
        let ids: Vec<String> = batch.iter().map(|number| format!("message-{number}")).collect();
        let hashes = vec![[7u8; 16].to_vec(); batch.len()];
        let payloads = vec![vec![b'x'; PAYLOAD_BYTES]; batch.len()];
        let rows = client.query(&insert, &[&ids, &hashes, &payloads, &attempts]).await.unwrap();
        if attempts > 0 {
            let seqs: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
            client.execute(&complete, &[&seqs]).await.unwrap();
        }
    }
}
