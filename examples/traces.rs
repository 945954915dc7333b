//! Traces for OpenTelemetry: from the producer of a record to its acceptance, each run of its handler, and the records
//! that the handler publishes.
//!
//! `cargo run --example traces` sends them to an OTLP collector on `localhost:4318`, over HTTP;
//! `OTEL_EXPORTER_OTLP_ENDPOINT` sets another one. An order is placed; the warehouse does not answer at the first
//! attempt, and at the second one the stock is reserved and a record about it is published.

#![allow(clippy::print_stdout, reason = "it says which traces to look for")]

use std::time::Duration;

use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tokio::sync::mpsc;
use tracing::{Instrument, info_span};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::prelude::*;
use wharf::store::AsyncSqliteConnection;
use wharf::{Failure, HandlerKey, Inbox, Message, Outbox, Raw, Record, Sqlite, Store, traces, tx_handler, with_state};

const RESERVE_STOCK: HandlerKey = HandlerKey::new("stock.reserve");

/// The state of the handler.
#[derive(Clone)]
struct Stock {
    outbox: Outbox<Sqlite>,
    reserved: mpsc::UnboundedSender<i64>,
}

async fn reserve(stock: Stock, order: Message<Raw>, conn: &mut AsyncSqliteConnection) -> Result<(), Failure> {
    if order.attempt() == 1 {
        return Err(Failure::retry_after(Duration::from_millis(10), "the warehouse does not answer"));
    }
    // The published record continues the trace of this run.
    let row = stock.outbox.publish(conn, Record::new("stock.reserved").with_key(order.id().to_owned())).await?;
    stock.reserved.send(row)?;
    Ok(())
}

/// Accepts an order with the current span, as an HTTP endpoint would.
async fn place_order(inbox: &Inbox<Sqlite>) -> wharf::Result<()> {
    let record = Record::new("orders").with_id("order-17").json(&serde_json::json!({ "number": 17 }));
    let record = match traces::current() {
        Some(trace) => record.with_trace(&trace),
        None => record,
    };
    inbox.accept(record).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The usual set-up of OpenTelemetry.
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(SpanExporter::builder().with_http().build()?)
        .with_resource(Resource::builder().with_service_name("shop").build())
        .build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("shop")).with_filter(LevelFilter::INFO);
    tracing_subscriber::registry().with(layer).init();

    // The only line for Wharf.
    wharf::otel::install()?;

    let store = Store::<Sqlite>::in_memory().await?;
    store.migrate().await?;
    let (reserved, mut rows) = mpsc::unbounded_channel();
    let stock = Stock { outbox: Outbox::new(&store).with_source("/shop"), reserved };
    let inbox = Inbox::builder(store.clone())
        .subscribe("orders", tx_handler(RESERVE_STOCK, with_state(stock, reserve)))
        .build()?;
    let running = inbox.start().await?;
    place_order(&inbox).instrument(info_span!("publish orders", otel.kind = "producer")).await?;
    let row = rows.recv().await;
    running.shutdown(Duration::from_secs(20)).await?;

    // A relay would send it to Kafka with these headers.
    if let Some(published) = store.operate().outbox_record(row.unwrap_or_default()).await? {
        let header = published.record.headers().get("traceparent").unwrap_or_default();
        println!("published with traceparent {}", String::from_utf8_lossy(header));
    }
    // Exports the remaining spans.
    tokio::task::spawn_blocking(move || provider.shutdown()).await??;
    Ok(())
}
