//! The Rust crates `apalis` and `apalis-postgres`. Tuned as in the crate's example `basic`, with larger batches.

use apalis::prelude::*;
use apalis_postgres::{Config, PgPool, PostgresStorage};
use runner::{Run, handled, payload};
use serde::{Deserialize, Serialize};
use serde_json::json;

const TUNED_BATCH: usize = 500;

#[derive(Clone, Serialize, Deserialize)]
struct NoOp {
    data: String,
}

async fn no_op(_: NoOp) -> Result<(), BoxDynError> {
    handled(1);
    Ok(())
}

#[tokio::main]
async fn main() {
    let run = Run::from_arguments();
    let pool = PgPool::connect(&run.url).await.unwrap();
    PostgresStorage::setup(&pool).await.unwrap();
    let config = Config::default().queue("peer");
    let (config, settings) = if run.is_tuned {
        let settings = json!({ "batch_size": TUNED_BATCH, "lock_tasks": false, "parallelize": "tokio::spawn" });
        (config.batch_size(TUNED_BATCH).lock_tasks(false), settings)
    } else {
        (config, json!({}))
    };
    let mut storage = PostgresStorage::<NoOp>::new(&pool).with_config(config);
    for batch in run.batches() {
        storage.push_bulk(batch.map(|_| NoOp { data: payload() }).collect()).await.unwrap();
    }
    run.filled(settings);
    let builder = WorkerBuilder::new("peer").backend(storage);
    if run.is_tuned {
        let worker = builder.parallelize(tokio::spawn).build(no_op);
        tokio::select! { ended = worker.run() => panic!("the worker ended: {ended:?}"), never = run.finish() => never }
    } else {
        let worker = builder.build(no_op);
        tokio::select! { ended = worker.run() => panic!("the worker ended: {ended:?}"), never = run.finish() => never }
    }
}
