//! A service that reads two Kafka clusters: orders in Avro from one that requires a token, payments in JSON from
//! another.
//!
//! ```sh
//! export DATABASE_URL=postgres://postgres@localhost/postgres
//! export ORDERS_BROKERS=orders-1:9094 REGISTRY_URL=https://schemas.example.com TOKEN_FILE=/run/secrets/kafka-token
//! export PAYMENTS_BROKERS=payments-1:9092
//! cargo run --features ssl --example two_clusters
//! ```
//!
//! `ORDERS_TOPIC`, `PAYMENTS_TOPIC` and `KAFKA_GROUP` have defaults. `ORDERS_SECURITY_PROTOCOL` is `sasl_ssl`, or
//! `sasl_plaintext` for a broker without TLS. If one cluster is down, the service keeps reading the other one.

use std::env;
use std::error::Error;
use std::io;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use serde::Deserialize;
use tokio::signal::unix::{SignalKind, signal};
use wharf::formats::{Avro, Registry};
use wharf::kafka::{Kafka, Token};
use wharf::{Failure, HandlerKey, Identity, Inbox, Message, Postgres, Store, handler};

const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
const BOOK_PAYMENT: HandlerKey = HandlerKey::new("books.payment");

/// The token file is read again after at most this time, because another program replaces it before its token expires.
const TOKEN_READ_EVERY: Duration = Duration::from_secs(60);

/// An order, as Avro. Fields of the writer's schema that are not named here are ignored.
#[derive(Deserialize)]
struct Order {
    number: i64,
    customer: String,
}

/// A payment, as JSON.
#[derive(Deserialize)]
struct Payment {
    order: i64,
    cents: u64,
}

async fn send_receipt(message: Message<Order>) -> Result<(), Failure> {
    let Order { number, customer } = message.payload;
    tracing::info!(order = number, customer, "receipt sent");
    Ok(())
}

async fn book_payment(message: Message<Payment>) -> Result<(), Failure> {
    let Payment { order, cents } = message.payload;
    tracing::info!(order, cents, "payment booked");
    Ok(())
}

/// The token provider. A service in a cloud calls the SDK of that cloud here instead: see `docs/kafka.md`.
async fn read_token() -> Result<Token, Box<dyn Error + Send + Sync>> {
    let file = variable("TOKEN_FILE")?;
    let token = tokio::fs::read_to_string(&file).await.map_err(|error| format!("cannot read {file}: {error}"))?;
    Ok(Token::new(token.trim(), SystemTime::now() + TOKEN_READ_EVERY))
}

async fn run() -> Result<(), Box<dyn Error + Send + Sync>> {
    let (orders, payments) = (variable_or("ORDERS_TOPIC", "orders"), variable_or("PAYMENTS_TOPIC", "payments"));
    let group = variable_or("KAFKA_GROUP", "shop");
    let registry = Registry::at(variable("REGISTRY_URL")?).build()?;

    let orders_cluster = Kafka::new(variable("ORDERS_BROKERS")?, &group)
        .named("orders")
        .topics([&orders])
        .set("security.protocol", variable_or("ORDERS_SECURITY_PROTOCOL", "sasl_ssl"))
        .token_from(read_token);
    let payments_cluster = Kafka::new(variable("PAYMENTS_BROKERS")?, &group).named("payments").topics([&payments]);

    let store = Store::<Postgres>::connect(&variable("DATABASE_URL")?).await?;
    store.migrate().await?;
    let inbox = Inbox::builder(store)
        .subscribe(&*orders, handler(SEND_RECEIPT, send_receipt).decoded_by(Avro::<Order>::new(&registry)))
        .identity(&*orders, Identity::decoded(Avro::new(&registry), "/number"))
        .subscribe(&*payments, handler(BOOK_PAYMENT, book_payment))
        .identity(&*payments, Identity::json_pointer("/id"))
        .source(orders_cluster)
        .source(payments_cluster)
        .build()?;
    let mut running = inbox.start().await?;
    tracing::info!("the inbox is running");

    let mut terminate = signal(SignalKind::terminate())?;
    let failure = tokio::select! {
        _ = terminate.recv() => None,
        _ = tokio::signal::ctrl_c() => None,
        // Resolves only for an error that a person must fix. It names the source.
        error = running.failure() => Some(error),
    };
    running.shutdown(Duration::from_secs(20)).await?;
    failure.map_or(Ok(()), |error| Err(error.into()))
}

fn variable(name: &str) -> Result<String, io::Error> {
    env::var(name).map_err(|_| io::Error::other(format!("set {name}")))
}

fn variable_or(name: &str, default: &str) -> String {
    env::var(name).unwrap_or_else(|_| default.to_owned())
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
