//! Wharf, as a service uses it: an inbox with one handler, filled through `accept_all`.

use runner::{Run, handled, payload};
use serde_json::json;
use wharf::{Failure, HandlerKey, Inbox, Message, Postgres, Raw, Record, Store, handler};

/// The same value as in the benchmark of the engine.
const TUNED_CONCURRENCY: usize = 2_000;

#[tokio::main]
async fn main() {
    let run = Run::from_arguments();
    let store = Store::<Postgres>::connect(&run.url).await.unwrap();
    store.migrate().await.unwrap();
    let no_op = handler(HandlerKey::new("peer"), |_: Message<Raw>| {
        handled(1);
        async { Ok::<(), Failure>(()) }
    });
    let (no_op, settings) = if run.is_tuned {
        (no_op.concurrency(TUNED_CONCURRENCY), json!({ "concurrency": TUNED_CONCURRENCY }))
    } else {
        (no_op, json!({}))
    };
    let inbox = Inbox::builder(store).subscribe("peer", no_op).build().unwrap();
    for batch in run.batches() {
        let records = batch.map(|number| Record::new("peer").with_id(format!("job-{number}")).with_payload(payload()));
        inbox.accept_all(records).await.unwrap();
    }
    run.filled(settings);
    let _running = inbox.start().await.unwrap();
    run.finish().await
}
