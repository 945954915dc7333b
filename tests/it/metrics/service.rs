//! The child process whose metrics are read: a metrics recorder is global, so it cannot run in the test process.
//!
//! It has an inbox on PostgreSQL, which consumes a topic and sends the outbox, and an idle inbox in memory, whose
//! handler has the same key. A request ends the second inbox.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::{get, post};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use tokio::sync::Mutex;
use wharf::kafka::{Kafka, Relay};
use wharf::observe::{MetricKind, metrics};
use wharf::{Failure, Identity, Inbox, Message, Postgres, Raw, RetryPolicy, Running, Sqlite, Store, handler};

use crate::kafka::stage::Stage;
use crate::scene::{key, quick};
use support::child::{Child, Role, parameter, say};

pub const ROLE: (&str, Role) = ("metered", serve);

const URL: &str = "METERED_URL";
const BROKERS: &str = "METERED_BROKERS";
const GROUP: &str = "METERED_GROUP";
const TOPIC: &str = "METERED_TOPIC";

/// The concurrency of the handler.
pub const SLOTS: usize = 4;
/// The concurrency of the handler in the other inbox.
pub const OTHER_SLOTS: usize = 3;
/// The default of `PostgresOptions::pool_size`.
pub const CONNECTIONS: usize = 10;

pub fn spawn(stage: &Stage) -> Child {
    let (url, brokers) = (stage.scene.database.url(), stage.kafka.brokers());
    Child::spawn(ROLE.0, &[(URL, &url), (BROKERS, brokers), (GROUP, &stage.group), (TOPIC, &stage.topic)])
}

/// Poisons messages whose payload is `bad`.
async fn answer(message: Message<Raw>) -> Result<(), Failure> {
    match message.payload.0.as_deref() {
        Some(b"bad") => Err(Failure::poison("as it says")),
        _ => Ok(()),
    }
}

/// The other inbox of the process.
async fn other() -> Running<Sqlite> {
    let store = Store::<Sqlite>::in_memory().await.unwrap();
    store.migrate().await.unwrap();
    let same_key = handler(key("metered"), answer).concurrency(OTHER_SLOTS);
    Inbox::builder(store).limits(quick()).subscribe("elsewhere", same_key).build().unwrap().start().await.unwrap()
}

#[tokio::main]
async fn serve() {
    let mut builder = PrometheusBuilder::new();
    for metric in metrics().iter().filter(|metric| metric.kind == MetricKind::Histogram) {
        builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), metric.buckets).unwrap();
    }
    let exported = builder.install_recorder().unwrap();
    let (topic, brokers) = (parameter(TOPIC), parameter(BROKERS));
    let store = Store::<Postgres>::connect(&parameter(URL)).await.unwrap();
    let inbox = Inbox::builder(store)
        .limits(quick())
        .subscribe(&*topic, handler(key("metered"), answer).concurrency(SLOTS).retry(RetryPolicy::never()))
        .identity(&*topic, Identity::position())
        .relay(Relay::new(&brokers).lease(Duration::from_secs(2)).poll(Duration::from_millis(50)))
        .build()
        .unwrap();
    let mut running = inbox.start_from(Kafka::new(&brokers, parameter(GROUP))).await.unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let other = Arc::new(Mutex::new(Some(other().await)));
    let end_other = move || {
        let other = Arc::clone(&other);
        async move {
            let other = other.lock().await.take().unwrap();
            other.shutdown(Duration::from_secs(20)).await.unwrap();
        }
    };
    let router = Router::new()
        .route("/metrics", get(move || std::future::ready(exported.render())))
        .route("/end-other", post(end_other));
    say(format!("listening on {}", listener.local_addr().unwrap()));
    tokio::select! {
        served = axum::serve(listener, router) => panic!("{served:?}"),
        failure = running.failure() => panic!("{failure}"),
    }
}
