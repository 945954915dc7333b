//! Clients that Wharf does not depend on: handlers that settle their own deliveries, and messages that are accepted in
//! SQL. These tests use tokio-postgres; the examples also use sqlx.

mod accept;
mod child;
mod examples;
mod faults;
mod refusals;
mod rights;

use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio_postgres::{Client, NoTls};
use wharf::{Failure, Message, Postgres, Raw, Registration, handler};

use crate::scene::{Runs, key};
pub use child::ROLE;

/// A connection of the handler.
async fn connect(url: &str) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// Writes the effect and settles the delivery in one transaction on a separate connection.
async fn settle(url: &str, message: &Message<Raw>) -> Result<(), Failure> {
    let mut client = connect(url).await?;
    let transaction = client.transaction().await?;
    transaction.execute("INSERT INTO effect VALUES ($1)", &[&message.id()]).await?;
    transaction.execute("SELECT inbox_settle($1)", &[&message.claim()]).await?;
    transaction.commit().await?;
    Ok(())
}

/// A handler that records its run and settles its delivery through the database at this URL.
fn settling(runs: &Runs, name: &'static str, url: &str) -> Registration<Postgres> {
    let url = url.to_owned();
    acting(runs, name, move |message| {
        let url = url.clone();
        Box::pin(async move { settle(&url, &message).await.map_err(|failure| soon(&failure)) })
    })
}

/// A handler that records its run, calls `act`, and is registered as one that settles its own deliveries.
fn acting(
    runs: &Runs,
    name: &'static str,
    act: impl Fn(Message<Raw>) -> BoxFuture<'static, Result<(), Failure>> + Send + Sync + 'static,
) -> Registration<Postgres> {
    let runs = runs.clone();
    let run = move |message: Message<Raw>| {
        runs.note(&message);
        act(message)
    };
    handler(key(name), run).settles_itself()
}

/// The same failure, with a retry at once.
fn soon(failure: &Failure) -> Failure {
    Failure::retry_after(Duration::ZERO, format!("{failure:?}"))
}
