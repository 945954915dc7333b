//! The Rust code of the README: compiled here, and its test runs. The README shows the lines between `begin: README` and
//! `end: README`, in this order and without their indentation.

#![allow(dead_code, reason = "the program needs a Kafka; the tests of `examples/service.rs` run one like it")]

// begin: README
use diesel::sql_types::BigInt;
use diesel_async::{AsyncPgConnection, RunQueryDsl};
use wharf::{Failure, HandlerKey, Message};

const RESERVE_STOCK: HandlerKey = HandlerKey::new("stock.reserve"); // an invalid key does not compile
const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");

#[derive(serde::Deserialize)]
struct OrderPlaced {
    number: i64,
    email: String,
}

/// Exactly once: what it writes through `conn` is committed together with the outcome.
async fn reserve_stock(order: Message<OrderPlaced>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
    let insert = diesel::sql_query("INSERT INTO reservation (order_number) VALUES ($1)");
    insert.bind::<BigInt, _>(order.payload.number).execute(conn).await?;
    Ok(())
}

/// The client of your mail service. Each call of the handler gets a clone of it.
#[derive(Clone)]
struct Mailer;

/// At least once: any error is retried later. `order.id()` is the idempotency key for the mail service.
async fn send_receipt(mailer: Mailer, order: Message<OrderPlaced>) -> Result<(), Failure> {
    mailer.send(&order.payload.email, order.payload.number, order.id()).await?;
    Ok(())
}
// end: README

impl Mailer {
    #[allow(clippy::unused_self, reason = "a real mailer has a connection")]
    async fn send(&self, _to: &str, _order: i64, _idempotency_key: &str) -> std::io::Result<()> {
        Ok(())
    }
}

// begin: README
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use wharf::kafka::Kafka;
use wharf::{Identity, Inbox, Postgres, Record, RetryPolicy, Store, handler, tx_handler, with_state};

fn shop(store: Store<Postgres>) -> wharf::Result<Inbox<Postgres>> {
    let reserve = tx_handler(RESERVE_STOCK, reserve_stock).formerly("reserve_stock").concurrency(8);
    let receipt = handler(SEND_RECEIPT, with_state(Mailer, send_receipt))
        .retry(RetryPolicy::exponential().max_retries(12).max_delay(Duration::from_secs(600)))
        .timeout(Duration::from_secs(30));
    Inbox::builder(store)
        .subscribe("orders", reserve)
        .subscribe("orders", receipt)
        .identity("orders", Identity::cloud_events()) // what makes a redelivered record a duplicate
        .retention(Duration::from_secs(30 * 86_400)) // finished messages are deleted after a month
        .build()
}
// end: README

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // begin: README
    let store = Store::<Postgres>::connect(&std::env::var("DATABASE_URL")?).await?;
    store.migrate().await?;
    let inbox = shop(store)?;
    let mut running = inbox.start_from(Kafka::new("localhost:9092", "shop")).await?;
    // end: README

    // begin: README
    let order = serde_json::json!({ "number": 17, "email": "ada@example.org" });
    inbox.accept(Record::new("orders").with_id("order-17/placed").json(&order)).await?;
    // end: README

    // begin: README
    let mut terminate = signal(SignalKind::terminate())?;
    let failure = tokio::select! {
        _ = terminate.recv() => None,
        error = running.failure() => Some(error), // only a restart helps
    };
    running.shutdown(Duration::from_secs(20)).await?;
    failure.map_or(Ok(()), |error| Err(error.into()))
    // end: README
}

// begin: README
use wharf::testing::{State, TestInbox};

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_receipt_is_sent_again() -> wharf::Result<()> {
    let fails_once = |order: Message<OrderPlaced>| async move {
        if order.attempt() == 1 { Err(Failure::retry("the mail server is down")) } else { Ok(()) }
    };
    let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", handler(SEND_RECEIPT, fails_once))).await?;
    let order = serde_json::json!({ "number": 17, "email": "ada@example.org" });
    inbox.accept(Record::new("orders").with_id("order-17").json(&order)).await?;
    inbox.drain().await?;
    inbox.advance(Duration::from_secs(3_600)).await?; // the retry is due
    inbox.drain().await?;
    inbox.assert_state("order-17", SEND_RECEIPT, State::Done).await;
    Ok(())
}
// end: README
