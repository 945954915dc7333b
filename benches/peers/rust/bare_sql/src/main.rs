//! The baseline: one table and prepared statements, without a queue library.
//!
//! `PEER_COMPLETES=delete` deletes a completed job, `PEER_COMPLETES=update` keeps it.

use runner::{PAYLOAD_BYTES, Run, handled};
use serde_json::json;
use tokio_postgres::{Client, NoTls};

const SCHEMA: &str = "
    CREATE TABLE job (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, run_at timestamptz NOT NULL DEFAULT now(), attempts int NOT NULL DEFAULT 0,
        locked_until timestamptz, finished_at timestamptz, payload bytea NOT NULL);
    CREATE INDEX job_due ON job (run_at, id) WHERE finished_at IS NULL";

const INSERT: &str = "INSERT INTO job (payload) SELECT unnest($1::bytea[])";

const CLAIM: &str = "
    UPDATE job SET locked_until = now() + interval '30 s', attempts = attempts + 1
    WHERE id = ANY (ARRAY(
        SELECT id FROM job
        WHERE finished_at IS NULL AND run_at <= now() AND (locked_until IS NULL OR locked_until <= now())
        ORDER BY run_at, id LIMIT $1 FOR NO KEY UPDATE SKIP LOCKED))
    RETURNING id, payload";

const DELETE: &str = "DELETE FROM job WHERE id = ANY ($1::bigint[])";
const UPDATE: &str = "UPDATE job SET finished_at = now(), locked_until = NULL WHERE id = ANY ($1::bigint[])";

#[tokio::main]
async fn main() {
    let run = Run::from_arguments();
    let complete = match std::env::var("PEER_COMPLETES").as_deref() {
        Ok("update") => UPDATE,
        _ => DELETE,
    };
    let (connections, batch) = if run.is_tuned { (2, 500) } else { (1, 1) };
    let client = connect(&run.url).await;
    client.batch_execute(SCHEMA).await.unwrap();
    for batch in run.batches() {
        client.execute(INSERT, &[&vec![vec![b'x'; PAYLOAD_BYTES]; batch.len()]]).await.unwrap();
    }
    run.filled(json!({ "connections": connections, "batch": batch }));
    for _ in 0..connections {
        tokio::spawn(drain(connect(&run.url).await, complete, batch));
    }
    run.finish().await
}

async fn drain(client: Client, complete: &str, batch: i64) {
    let claim = client.prepare(CLAIM).await.unwrap();
    let complete = client.prepare(complete).await.unwrap();
    loop {
        let rows = client.query(&claim, &[&batch]).await.unwrap();
        if rows.is_empty() {
            return;
        }
        let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        client.execute(&complete, &[&ids]).await.unwrap();
        handled(rows.len());
    }
}

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}
