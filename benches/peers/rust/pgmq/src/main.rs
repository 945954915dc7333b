//! PGMQ, installed from the SQL in its Rust crate. It has no workers: the user writes the loop that reads and deletes.

use pgmq::PGMQueueExt;
use runner::{Run, handled, payload};
use serde::{Deserialize, Serialize};
use serde_json::json;

const QUEUE: &str = "peer";
const VISIBILITY_TIMEOUT_S: i32 = 30;

#[derive(Clone, Serialize, Deserialize)]
struct NoOp {
    data: String,
}

#[tokio::main]
async fn main() {
    let run = Run::from_arguments();
    let (connections, batch) = if run.is_tuned { (2, 500) } else { (1, 1) };
    let queue = PGMQueueExt::new(run.url.clone(), connections).await.unwrap();
    queue.install_sql_from_embedded().await.unwrap();
    queue.create(QUEUE).await.unwrap();
    for batch in run.batches() {
        queue.send_batch(QUEUE, &vec![NoOp { data: payload() }; batch.len()]).await.unwrap();
    }
    let version = queue.installed_version().await.unwrap().map(|version| version.to_string());
    run.filled(json!({ "connections": connections, "batch": batch, "SQL version": version }));
    for _ in 0..connections {
        tokio::spawn(drain(queue.clone(), batch));
    }
    run.finish().await
}

async fn drain(queue: PGMQueueExt, batch: i32) {
    loop {
        let messages = queue.read_batch::<NoOp>(QUEUE, VISIBILITY_TIMEOUT_S, batch).await.unwrap();
        if messages.is_empty() {
            return;
        }
        let ids: Vec<i64> = messages.iter().map(|message| message.msg_id).collect();
        queue.delete_batch(QUEUE, &ids).await.unwrap();
        handled(ids.len());
    }
}
