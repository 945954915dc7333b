//! The Rust crate `awa`. Tuned as in its `docs/benchmarking.md`; the batch size given there is now the default.

use std::time::Duration;

use awa::{Client, InsertOpts, JobArgs, JobResult, QueueConfig};
use runner::{Run, handled, payload};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::postgres::PgPoolOptions;

#[derive(Debug, Serialize, Deserialize, JobArgs)]
struct NoOp {
    data: String,
}

#[tokio::main]
async fn main() {
    let run = Run::from_arguments();
    let (connections, queue, settings) = if run.is_tuned {
        let queue =
            QueueConfig { max_workers: 1_024, poll_interval: Duration::from_millis(50), ..QueueConfig::default() };
        let settings = json!({ "max_workers": 1_024, "poll_interval": "50 ms", "connections": 20 });
        (20, queue, settings)
    } else {
        (10, QueueConfig::default(), json!({}))
    };
    let pool = PgPoolOptions::new().max_connections(connections).connect(&run.url).await.unwrap();
    awa::migrations::run(&pool).await.unwrap();
    // The storage of a new installation. Without this line, a database uses the former storage until its first worker
    // starts.
    awa::QueueStorage::new(awa::QueueStorageConfig::default()).unwrap().install(&pool).await.unwrap();
    let client = Client::builder(pool.clone())
        .queue("peer", queue)
        .register::<NoOp, _, _>(|_, _| async {
            handled(1);
            Ok(JobResult::Completed)
        })
        .build()
        .unwrap();
    for batch in run.batches() {
        let job = |_| {
            let options = InsertOpts { queue: "peer".to_owned(), ..InsertOpts::default() };
            awa::model::insert::params_with(&NoOp { data: payload() }, options).unwrap()
        };
        awa::insert_many_copy_from_pool(&pool, &batch.map(job).collect::<Vec<_>>()).await.unwrap();
    }
    run.filled(settings);
    client.start().await.unwrap();
    run.finish().await
}
