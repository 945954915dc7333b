//! The engine on the same tables, with the same batches, a no-op handler and as many concurrent statements as the
//! baseline has connections.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use wharf::batch::batch_handler;
use wharf::order::OrderKey;
use wharf::{Failure, HandlerKey, Inbox, Limits, Message, Postgres, Raw, Record, Store, handler};

use crate::{Scale, fresh_database, tidy_up};
use support::bench::{BATCH_ROWS, CONNECTIONS, Measured, Meter, PAYLOAD_BYTES, done_with};
use support::postgres::{Cluster, connect};

/// More slots than the engine can fill, so that the concurrency is not the limit.
pub const MANY: Option<usize> = Some(8 * BATCH_ROWS);
/// The concurrency that a user would set for a fast handler.
pub const TUNED: Option<usize> = Some(2_000);
/// The default of a handler.
pub const DEFAULT: Option<usize> = None;

/// Counts runs of the handler without a query, which would disturb the measurement.
static HANDLED: AtomicUsize = AtomicUsize::new(0);

pub async fn accept(cluster: &Cluster, scale: Scale) -> Measured {
    let url = fresh_database(cluster).await;
    let inbox = inbox(&url).await;
    // Registration happens on first use and is not measured.
    inbox.accept_all([]).await.unwrap();
    let meter = Meter::start(cluster, None);
    accept_all(&inbox, scale).await;
    let measured = meter.stop(scale.messages);
    done_with(cluster, &url, "accept, ours").await;
    measured
}

pub async fn drain(cluster: &Cluster, scale: Scale, concurrency: Option<usize>, order: Order) -> Measured {
    let url = fresh_database(cluster).await;
    let inbox = inbox_with(&url, concurrency, order).await;
    accept_all(&inbox, scale).await;
    tidy_up(&url).await;
    let measured = drain_in_background(cluster, &inbox, &url, scale.messages).await;
    done_with(cluster, &url, "drain, ours").await;
    measured
}

/// A batch handler with the default concurrency; each call gets up to `BATCH_ROWS` messages.
pub async fn drain_in_batches(cluster: &Cluster, scale: Scale) -> Measured {
    let url = fresh_database(cluster).await;
    let store = Store::<Postgres>::connect(&url).await.unwrap();
    let no_op = batch_handler(HandlerKey::new("bench"), |messages: Vec<Message<Raw>>| {
        HANDLED.fetch_add(messages.len(), Ordering::Relaxed);
        async { Ok::<(), Failure>(()) }
    });
    let limits = Limits::default().accept_batch_rows(BATCH_ROWS);
    let inbox =
        Inbox::builder(store).limits(limits).subscribe("bench", no_op.batch(BATCH_ROWS, Duration::ZERO)).build();
    let inbox = inbox.unwrap();
    accept_all(&inbox, scale).await;
    tidy_up(&url).await;
    let measured = drain_in_background(cluster, &inbox, &url, scale.messages).await;
    done_with(cluster, &url, "drain, batches").await;
    measured
}

pub async fn accept_to_done(cluster: &Cluster, scale: Scale, concurrency: Option<usize>, order: Order) -> Measured {
    let url = fresh_database(cluster).await;
    let inbox = inbox_with(&url, concurrency, order).await;
    let running = inbox.start().await.unwrap();
    HANDLED.store(0, Ordering::Relaxed);
    let meter = Meter::start(cluster, None);
    accept_all(&inbox, scale).await;
    all_done(&url, scale.messages).await;
    let measured = meter.stop(scale.messages);
    running.shutdown(Duration::from_secs(10)).await.unwrap();
    done_with(cluster, &url, "accept to done, ours").await;
    measured
}

/// Starts the inbox, waits until nothing that is due is unfinished, and returns the measurement.
pub async fn drain_in_background(cluster: &Cluster, inbox: &Inbox<Postgres>, url: &str, messages: usize) -> Measured {
    HANDLED.store(0, Ordering::Relaxed);
    let meter = Meter::start(cluster, None);
    let running = inbox.start().await.unwrap();
    all_done(url, messages).await;
    let measured = meter.stop(messages);
    running.shutdown(Duration::from_secs(10)).await.unwrap();
    measured
}

/// Whether the handler is ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    None,
    /// By one of 10,000 keys.
    ByKey,
}

/// An inbox with a no-op handler that may run many deliveries at a time.
pub async fn inbox(url: &str) -> Inbox<Postgres> {
    inbox_in(url, Order::None).await
}

pub async fn inbox_in(url: &str, order: Order) -> Inbox<Postgres> {
    inbox_with(url, MANY, order).await
}

/// An inbox with a no-op handler; a concurrency of `None` is the default.
async fn inbox_with(url: &str, concurrency: Option<usize>, order: Order) -> Inbox<Postgres> {
    let store = Store::<Postgres>::connect(url).await.unwrap();
    let limits = Limits::default().accept_batch_rows(BATCH_ROWS);
    let no_op = handler(HandlerKey::new("bench"), |_: Message<Raw>| {
        HANDLED.fetch_add(1, Ordering::Relaxed);
        async { Ok::<(), Failure>(()) }
    });
    let no_op = match concurrency {
        Some(concurrency) => no_op.concurrency(concurrency),
        None => no_op,
    };
    // Derived from the id, so that the records are the same with and without order.
    let key = OrderKey::by(|record| record.id().map(|id| id[id.len().saturating_sub(4)..].to_vec()));
    let no_op = if order == Order::ByKey { no_op.ordered_by(key) } else { no_op };
    Inbox::builder(store).limits(limits).subscribe("bench", no_op).build().unwrap()
}

/// Accepts all messages in batches, from twice as many tasks as there are concurrent statements, so that a next batch
/// is always ready.
pub async fn accept_all(inbox: &Inbox<Postgres>, scale: Scale) {
    const CALLERS: usize = 2 * CONNECTIONS;
    let tasks: Vec<_> = (0..CALLERS)
        .map(|share| {
            let inbox = inbox.clone();
            tokio::spawn(async move {
                let numbers: Vec<usize> = (0..scale.messages).filter(|number| number % CALLERS == share).collect();
                for batch in numbers.chunks(BATCH_ROWS) {
                    inbox.accept_all(batch.iter().map(|number| record(*number))).await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
}

fn record(number: usize) -> Record {
    Record::new("bench").with_id(format!("message-{number}")).with_payload(vec![b'x'; PAYLOAD_BYTES])
}

/// Waits until the handler was called for all messages and nothing that is due is unfinished.
async fn all_done(url: &str, messages: usize) {
    while HANDLED.load(Ordering::Relaxed) < messages {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    nothing_open(url).await;
}

/// Waits until no due delivery is unfinished.
pub async fn nothing_open(url: &str) {
    let client = connect(url).await;
    let open =
        "SELECT EXISTS (SELECT FROM inbox_delivery WHERE handler_id = 1 AND due_at <= now() AND finished_at IS NULL)";
    let open = client.prepare(open).await.unwrap();
    while client.query_one(&open, &[]).await.unwrap().get::<_, bool>(0) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
