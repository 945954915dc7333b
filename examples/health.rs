//! Health endpoints with axum: `/livez` for a liveness probe, `/readyz` for a readiness probe, `/metrics` for
//! Prometheus.
//!
//! Run `cargo run --example health`, then `curl -i localhost:8089/readyz` or `curl localhost:8089/metrics`.
//! `HEALTH_LISTEN` sets another address. The inbox is in memory here; a service does the same with its own inbox.

#![allow(clippy::print_stdout, reason = "it prints its address")]

use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use wharf::health::Monitor;
use wharf::observe::{MetricKind, metrics};
use wharf::{Failure, HandlerKey, Inbox, Message, Raw, Sqlite, Store, handler};

/// Returns 200 until a part of the inbox has ended that only a restart can bring back.
async fn livez(State(monitor): State<Monitor>) -> (StatusCode, String) {
    let health = monitor.health();
    (status(health.is_live), health.to_string())
}

/// Returns 200 while the inbox can do its work. The text has every reason for attention, also those that need no
/// restart.
async fn readyz(State(monitor): State<Monitor>) -> (StatusCode, String) {
    let health = monitor.health();
    (status(health.is_ready), health.to_string())
}

/// Records the metrics of the whole process. Histograms need fixed buckets, so that they can be added up over
/// processes.
fn recorder() -> Result<PrometheusHandle, BuildError> {
    let mut builder = PrometheusBuilder::new();
    for metric in metrics().iter().filter(|metric| metric.kind == MetricKind::Histogram) {
        builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), metric.buckets)?;
    }
    builder.install_recorder()
}

fn status(is_well: bool) -> StatusCode {
    if is_well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn send_receipt(_order: Message<Raw>) -> Result<(), Failure> {
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Installed before the inbox is built, because Wharf keeps the handles of its metrics.
    let recorder = recorder()?;
    let store = Store::<Sqlite>::in_memory().await?;
    store.migrate().await?;
    let inbox =
        Inbox::builder(store).subscribe("orders", handler(HandlerKey::new("mail.receipt"), send_receipt)).build()?;
    let mut running = inbox.start().await?;

    let address = std::env::var("HEALTH_LISTEN").unwrap_or_else(|_| "127.0.0.1:8089".to_owned());
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    let router = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(move || std::future::ready(recorder.render())))
        .with_state(running.monitor());
    let serving = tokio::spawn(async move { axum::serve(listener, router).await });

    let failure = tokio::select! {
        _ = tokio::signal::ctrl_c() => None,
        error = running.failure() => Some(error),
    };
    // The endpoints are served until the end, so that probes during the shutdown see that the inbox is not ready.
    running.shutdown(Duration::from_secs(20)).await?;
    serving.abort();
    failure.map_or(Ok(()), |error| Err(error.into()))
}
