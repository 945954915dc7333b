//! Health endpoints with axum: `/livez` for a liveness probe, `/readyz` for a readiness probe.
//!
//! `cargo run --example health`, then `curl -i localhost:8089/readyz`. `HEALTH_LISTEN` names another address. The inbox is in
//! memory here; a service does the same with its own.

#![allow(clippy::print_stdout, reason = "it says where it listens")]

use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use wharf::health::Monitor;
use wharf::{Failure, HandlerKey, Inbox, Message, Raw, Sqlite, Store, handler};

/// 200 until something has ended that only a restart brings back.
async fn livez(State(monitor): State<Monitor>) -> (StatusCode, String) {
    let health = monitor.health();
    (status(health.is_live), health.to_string())
}

/// 200 while the inbox can do its work. The text has every reason, also those that need no restart.
async fn readyz(State(monitor): State<Monitor>) -> (StatusCode, String) {
    let health = monitor.health();
    (status(health.is_ready), health.to_string())
}

fn status(is_well: bool) -> StatusCode {
    if is_well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn send_receipt(_order: Message<Raw>) -> Result<(), Failure> {
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = Store::<Sqlite>::in_memory().await?;
    store.migrate().await?;
    let inbox =
        Inbox::builder(store).subscribe("orders", handler(HandlerKey::new("mail.receipt"), send_receipt)).build()?;
    let mut running = inbox.start().await?;

    let address = std::env::var("HEALTH_LISTEN").unwrap_or_else(|_| "127.0.0.1:8089".to_owned());
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    let router = Router::new().route("/livez", get(livez)).route("/readyz", get(readyz)).with_state(running.monitor());
    let serving = tokio::spawn(async move { axum::serve(listener, router).await });

    let failure = tokio::select! {
        _ = tokio::signal::ctrl_c() => None,
        error = running.failure() => Some(error),
    };
    // Served to the end: whoever asks during the shutdown is told that the inbox is not ready.
    running.shutdown(Duration::from_secs(20)).await?;
    serving.abort();
    failure.map_or(Ok(()), |error| Err(error.into()))
}
