//! A service with two handlers for every order on a Kafka topic. No order is lost when a process, a broker or the
//! database crashes: start it, kill it, start several.
//!
//! ```sh
//! export DATABASE_URL=postgres://postgres@localhost/postgres
//! psql $DATABASE_URL -c 'CREATE TABLE reservation (order_id bigint, sku text)'
//! cargo run --example service
//! echo '{"order":17,"sku":"tea"}' | kcat -P -b localhost:9092 -t orders -H message-id=order-17/placed
//! ```
//!
//! `KAFKA_BROKERS`, `KAFKA_GROUP` and `KAFKA_TOPIC` set where orders come from. Variables also set every limit of Wharf
//! by its name (`LIMIT_LEASE=10s`) and every librdkafka setting (`RDKAFKA_GROUP_INSTANCE_ID=shop-1`).

#![allow(missing_docs, reason = "the code of the `table!` macro has no documentation")]

use std::env;
use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use diesel::ExpressionMethods;
use diesel_async::{AsyncPgConnection, RunQueryDsl};
use serde::Deserialize;
use tokio::signal::unix::{SignalKind, signal};
use wharf::kafka::Kafka;
use wharf::{Failure, HandlerKey, Identity, Inbox, Limits, Message, Postgres, Store, handler, tx_handler};

const RESERVE_STOCK: HandlerKey = HandlerKey::new("stock.reserve");
const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");

diesel::table! { reservation (order_id) { order_id -> BigInt, sku -> Text } }

#[derive(Deserialize)]
struct OrderPlaced {
    order: i64,
    sku: String,
}

/// Exactly once: the row and the outcome are committed together, or neither is.
async fn reserve_stock(message: Message<OrderPlaced>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
    let OrderPlaced { order, sku } = message.payload;
    let row = (reservation::order_id.eq(order), reservation::sku.eq(sku));
    diesel::insert_into(reservation::table).values(row).execute(conn).await?;
    Ok(())
}

/// At least once: sending a mail cannot be rolled back. An error is retried with backoff.
async fn send_receipt(message: Message<OrderPlaced>) -> Result<(), Failure> {
    tracing::info!(order = message.payload.order, attempt = message.attempt(), "receipt sent");
    Ok(())
}

async fn run() -> Result<(), Box<dyn Error>> {
    let topic = variable("KAFKA_TOPIC", "orders");
    let mut kafka = Kafka::new(variable("KAFKA_BROKERS", "localhost:9092"), variable("KAFKA_GROUP", "shop"));
    for (name, value) in variables("RDKAFKA_") {
        kafka = kafka.set(name.replace('_', "."), value);
    }
    let mut limits = Limits::default();
    for (name, value) in variables("LIMIT_") {
        limits.set(&name, &value)?;
    }

    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a PostgreSQL you can write to")?;
    let store = Store::<Postgres>::connect(&url).await?;
    store.migrate().await?;
    let inbox = Inbox::builder(store)
        .limits(limits)
        .subscribe(&*topic, tx_handler(RESERVE_STOCK, reserve_stock))
        .subscribe(&*topic, handler(SEND_RECEIPT, send_receipt).timeout(Duration::from_secs(30)))
        .identity(&*topic, Identity::header("message-id"))
        .build()?;
    let mut running = inbox.start_from(kafka).await?;
    tracing::info!(topic, "the inbox is running");

    let mut terminate = signal(SignalKind::terminate())?;
    let failure = tokio::select! {
        _ = terminate.recv() => None,
        _ = tokio::signal::ctrl_c() => None,
        // Resolves only for errors that a person must fix. When brokers or the database are unreachable, even for a
        // day, the inbox waits and resumes.
        error = running.failure() => Some(error),
    };
    running.shutdown(Duration::from_secs(20)).await?;
    failure.map_or(Ok(()), |error| Err(error.into()))
}

fn variable(name: &str, default: &str) -> String {
    env::var(name).unwrap_or_else(|_| default.to_owned())
}

/// The variables with this prefix. Their names are without the prefix and in lower case.
fn variables(prefix: &str) -> impl Iterator<Item = (String, String)> {
    env::vars().filter_map(move |(name, value)| Some((name.strip_prefix(prefix)?.to_lowercase(), value)))
}

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt::init();
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("the service ends: {error:#}");
            ExitCode::FAILURE
        }
    }
}
