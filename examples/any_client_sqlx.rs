//! Exactly once with sqlx: a handler books an order and settles its delivery in one transaction, on its own connection
//! pool.
//!
//! ```sh
//! export DATABASE_URL=postgres://postgres@localhost/postgres
//! cargo run --example any_client_sqlx
//! ```

#![allow(clippy::print_stdout, reason = "the output is for a person")]

use std::error::Error;

use sqlx::PgPool;
use wharf::{Failure, HandlerKey, Inbox, Message, Postgres, Raw, Record, Store, handler, with_state};

const BOOK: HandlerKey = HandlerKey::new("books.order");

/// The booking and the settlement are committed together, or neither is. Any error is retried, except when the COMMIT
/// took effect before the error: then the delivery is done.
async fn book(pool: PgPool, order: Message<Raw>) -> Result<(), Failure> {
    let mut transaction = pool.begin().await?;
    sqlx::query("INSERT INTO booking (order_id) VALUES ($1)").bind(order.id()).execute(&mut *transaction).await?;
    if order.id() == "order-2" && order.attempt() == 1 {
        return Err(Failure::retry_after(std::time::Duration::ZERO, "the booking is rolled back, and tried again"));
    }
    // The last statement. It fails if another process has claimed the delivery, and then nothing is committed.
    sqlx::query("SELECT inbox_settle($1)").bind(order.claim()).execute(&mut *transaction).await?;
    transaction.commit().await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("DATABASE_URL")?;
    let pool = PgPool::connect(&url).await?;
    sqlx::query("CREATE TABLE IF NOT EXISTS booking (order_id text NOT NULL)").execute(&pool).await?;
    let store = Store::<Postgres>::connect(&url).await?;
    store.migrate().await?;
    let registration = handler(BOOK, with_state(pool.clone(), book)).settles_itself();
    let inbox = Inbox::builder(store).subscribe("orders", registration).build()?;

    // order-1 is accepted twice.
    for id in ["order-1", "order-2", "order-1", "order-3"] {
        inbox.accept(Record::new("orders").with_id(id)).await?;
    }
    inbox.drain().await?;

    let rows: Vec<(String,)> = sqlx::query_as("SELECT order_id FROM booking ORDER BY 1").fetch_all(&pool).await?;
    let booked: Vec<String> = rows.into_iter().map(|(order,)| order).collect();
    println!("booked: {}", booked.join(", "));
    Ok(())
}
