//! The Rust crate `graphile_worker`. Tuned as in its own benchmark (`benches/perf_test.rs`).

use std::time::Duration;

use graphile_worker::{
    IntoTaskHandlerResult, JobSpec, LocalQueueConfig, RawJobSpec, TaskHandler, WorkerContext, WorkerOptions,
};
use runner::{Run, handled, payload};
use serde::{Deserialize, Serialize};
use serde_json::json;

#[derive(Serialize, Deserialize)]
struct NoOp {
    data: String,
}

impl TaskHandler for NoOp {
    const IDENTIFIER: &'static str = "no_op";

    async fn run(self, _: WorkerContext) -> impl IntoTaskHandlerResult {
        handled(1);
        Ok::<(), String>(())
    }
}

#[tokio::main]
async fn main() {
    let run = Run::from_arguments();
    let options = WorkerOptions::default().database_url(&run.url).define_job::<NoOp>();
    let (options, settings) = if run.is_tuned {
        let options = options
            .concurrency(500)
            .poll_interval(Duration::from_millis(5))
            .complete_job_batch_delay(Duration::from_millis(5))
            .max_pg_conn(100)
            .local_queue(LocalQueueConfig::default().with_size(5_000));
        let settings = json!({
            "concurrency": 500, "poll_interval": "5 ms", "complete_job_batch_delay": "5 ms", "max_pg_conn": 100, "local_queue.size": 5_000,
        });
        (options, settings)
    } else {
        (options, json!({}))
    };
    let worker = options.init().await.unwrap();
    let utils = worker.create_utils();
    for batch in run.batches() {
        let job = |_| RawJobSpec {
            identifier: NoOp::IDENTIFIER.to_owned(),
            payload: json!({ "data": payload() }),
            spec: JobSpec::default(),
        };
        utils.add_raw_jobs(&batch.map(job).collect::<Vec<_>>()).await.unwrap();
    }
    run.filled(settings);
    tokio::spawn(async move { worker.run().await.unwrap() });
    run.finish().await
}
