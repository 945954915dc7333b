//! Exactly once with tokio-postgres, in a transaction and in a stored procedure. Both settle their deliveries
//! themselves.
//!
//! ```sh
//! export DATABASE_URL=postgres://postgres@localhost/postgres
//! cargo run --example any_client_tokio_postgres
//! ```

#![allow(clippy::print_stdout, reason = "the output is for a person")]

use std::error::Error;
use std::sync::Arc;

use tokio::sync::Mutex;
use tokio_postgres::{Client, NoTls};
use wharf::{Failure, HandlerKey, Inbox, Message, Postgres, Raw, Record, Store, handler, with_state};

const BOOK: HandlerKey = HandlerKey::new("books.order");
const SHIP: HandlerKey = HandlerKey::new("shipping.order");

/// The tables that the handlers write to. The function also settles the delivery, so one call of it is a whole
/// transaction.
const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS booking (order_id text NOT NULL);
    CREATE TABLE IF NOT EXISTS shipment (order_id text NOT NULL);
    CREATE OR REPLACE FUNCTION ship(order_id text, claim text) RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO shipment VALUES (order_id);
        PERFORM inbox_settle(claim);
    END $$";

/// Books and settles in one transaction.
async fn book(client: Arc<Mutex<Client>>, order: Message<Raw>) -> Result<(), Failure> {
    let mut client = client.lock().await;
    let transaction = client.transaction().await?;
    transaction.execute("INSERT INTO booking VALUES ($1)", &[&order.id()]).await?;
    transaction.execute("SELECT inbox_settle($1)", &[&order.claim()]).await?;
    transaction.commit().await?;
    Ok(())
}

/// Ships and settles in one statement, which is a transaction of its own.
async fn ship(client: Arc<Mutex<Client>>, order: Message<Raw>) -> Result<(), Failure> {
    client.lock().await.execute("SELECT ship($1, $2)", &[&order.id(), &order.claim()]).await?;
    Ok(())
}

async fn connect(url: &str) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("DATABASE_URL")?;
    let store = Store::<Postgres>::connect(&url).await?;
    store.migrate().await?;
    let client = connect(&url).await?;
    client.batch_execute(TABLES).await?;
    let shared = Arc::new(Mutex::new(client));
    let inbox = Inbox::builder(store)
        .subscribe("orders", handler(BOOK, with_state(Arc::clone(&shared), book)).settles_itself())
        .subscribe("orders", handler(SHIP, with_state(Arc::clone(&shared), ship)).settles_itself())
        .build()?;

    for id in ["order-1", "order-2", "order-1"] {
        inbox.accept(Record::new("orders").with_id(id)).await?;
    }
    inbox.drain().await?;

    let client = shared.lock().await;
    for table in ["booking", "shipment"] {
        let rows = client.query(&format!("SELECT order_id FROM {table} ORDER BY 1"), &[]).await?;
        let orders: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        println!("{table}: {}", orders.join(", "));
    }
    Ok(())
}
