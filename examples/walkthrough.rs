//! One order, two handlers, on your PostgreSQL: one is done, the other fails, is retried and ends poisoned.
//!
//! ```sh
//! DATABASE_URL=postgres://postgres@localhost/postgres cargo run --example walkthrough
//! ```
//!
//! `-- slow` makes the receipt take a minute: kill it with `kill -9` and start it again, the delivery is run again when its claim
//! (5 s here) has run out. `-- renamed` registers the receipt handler under a new key, with the old one as a former key: what was
//! handled under the old name stays handled.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program that talks to a person")]

use std::time::Duration;

use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
use wharf::{
    Failure, HandlerKey, Inbox, Limits, Message, Postgres, Raw, Record, RetryPolicy, Store, handler, tx_handler,
};

const RESERVE_STOCK: HandlerKey = HandlerKey::new("stock.reserve");
const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
const CONFIRM: HandlerKey = HandlerKey::new("mail.confirmation");

async fn reserve_stock(order: Message<Raw>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
    conn.batch_execute("UPDATE walkthrough_stock SET reserved = reserved + 1").await?;
    println!("stock.reserve  {} reserved, in the transaction that makes it done", order.id());
    Ok(())
}

async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> {
    if std::env::args().any(|argument| argument == "slow") {
        println!("mail.receipt   {} attempt {}: a minute's work, kill me", order.id(), order.attempt());
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    println!("mail.receipt   {} attempt {}: the mail server is down", order.id(), order.attempt());
    Err(Failure::retry("connection refused by mail.example"))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a PostgreSQL you can write to")?;
    let store = Store::<Postgres>::connect(&url).await?;
    store.migrate().await?;
    prepare(&url).await?;

    let receipt = match std::env::args().any(|argument| argument == "renamed") {
        true => handler(CONFIRM, send_receipt).formerly(SEND_RECEIPT.as_str()),
        false => handler(SEND_RECEIPT, send_receipt),
    };
    let retry = RetryPolicy::exponential().max_retries(2).max_delay(Duration::from_secs(1));
    let inbox = Inbox::builder(store)
        .limits(Limits { lease: Duration::from_secs(5), ..Limits::default() })
        .subscribe("orders", tx_handler(RESERVE_STOCK, reserve_stock))
        .subscribe("orders", receipt.retry(retry))
        .build()?;
    let running = inbox.start().await?;

    let order = Record::new("orders").id("order-17/placed").json(&serde_json::json!({ "order": 17 }));
    println!("accepted       {:?}", inbox.accept(order.clone()).await?);
    println!("and again      {:?}", inbox.accept(order).await?);

    settled(&url).await?;
    running.shutdown(Duration::from_secs(5)).await?;
    println!("\nlook at it:    SELECT message_id, handler_key, state, attempts FROM inbox_status;");
    println!("               SELECT message_id, handler_key, reason, last_error, payload FROM inbox_poisoned;");
    println!("once more:     SELECT inbox_replay('order-17/placed', 'mail.receipt');");
    Ok(())
}

/// The table that the transactional handler writes to.
async fn prepare(url: &str) -> Result<(), tokio_postgres::Error> {
    let sql = "CREATE TABLE IF NOT EXISTS walkthrough_stock (reserved integer NOT NULL);
               INSERT INTO walkthrough_stock SELECT 0 WHERE NOT EXISTS (SELECT FROM walkthrough_stock)";
    connect(url).await?.batch_execute(sql).await
}

/// Waits until no delivery is open.
async fn settled(url: &str) -> Result<(), tokio_postgres::Error> {
    let client = connect(url).await?;
    while client.query_one("SELECT EXISTS (SELECT FROM inbox_delivery WHERE finished_at IS NULL)", &[]).await?.get(0) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

async fn connect(url: &str) -> Result<tokio_postgres::Client, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    drop(tokio::spawn(connection));
    Ok(client)
}
