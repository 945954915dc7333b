//! The whole flow in one process, which needs nothing but Rust: a Kafka broker (librdkafka's in-process mock), an inbox
//! in `quickstart.db`, three handlers.
//!
//! ```sh
//! cargo run --example quickstart
//! ```
//!
//! Five orders arrive, one of them twice, and one invalid record. Stock is reserved exactly once, receipts are sent
//! although the mail server is down for a while, and one fraud check fails permanently and is poisoned. Afterwards:
//!
//! - `-- resume` starts with that handler repaired and runs the remaining deliveries.
//! - `-- crash` accepts an order without Kafka and is killed while it sends the receipt; `-- resume` then sends it.
//! - `-- --dashboard` shows the inbox in a browser, with that handler repaired: replay the poisoned delivery there and
//!   read its timeline.
//! - `-- renamed` registers the receipt handler under a new key: messages that were handled under the old key are not
//!   handled again.
#![allow(clippy::print_stdout, reason = "the output is for a person")]
#![allow(unreachable_pub, reason = "a binary has no public API")]

mod board;
mod shop;

use std::time::Duration;

use board::Board;
use rdkafka::ClientConfig;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use shop::{FraudService, MailServer};
use tokio::net::TcpListener;
use wharf::dashboard::{Access, Dashboard};
use wharf::kafka::Kafka;
use wharf::{
    HandlerKey, Identity, Inbox, Limits, Record, Registration, RetryPolicy, Sqlite, Store, handler, tx_handler,
};

const DATABASE: &str = "quickstart.db";
/// How long the claims of a killed process block its deliveries. Short, so that you do not wait long.
const LEASE: Duration = Duration::from_secs(5);
/// True when no delivery is pending or running.
const ALL_FINISHED: &str = "NOT EXISTS (SELECT 1 FROM inbox_delivery WHERE finished_at IS NULL)";
type AnyError = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    match std::env::args().nth(1).as_deref() {
        None => first_run().await,
        Some("resume") => resume().await,
        Some("crash") => crash().await,
        Some("renamed") => renamed().await,
        Some("--dashboard") => dashboard().await,
        Some(other) => Err(format!("unknown argument {other:?}: use resume, crash, renamed or --dashboard").into()),
    }
}

/// Builds the inbox: which handlers a topic has, and how to find the identity of its records.
fn inbox(
    store: Store<Sqlite>,
    receipt: Registration<Sqlite>,
    fraud_service: FraudService,
) -> Result<Inbox<Sqlite>, AnyError> {
    let check_fraud = move |order| shop::check_fraud(order, fraud_service);
    let inbox = Inbox::builder(store)
        .limits(Limits::default().lease(LEASE))
        .subscribe("orders", tx_handler(shop::RESERVE_STOCK, shop::reserve_stock))
        .subscribe("orders", receipt.retry(retry()))
        .subscribe("orders", handler(shop::CHECK_FRAUD, check_fraud).retry(retry()))
        .identity("orders", Identity::cloud_events())
        .build()?;
    Ok(inbox)
}

fn receipt(key: HandlerKey, mail_server: MailServer) -> Registration<Sqlite> {
    handler(key, move |order| shop::send_receipt(order, mail_server))
}

/// Retries quickly, so that you do not wait long.
fn retry() -> RetryPolicy {
    RetryPolicy::exponential().max_retries(3).max_delay(Duration::from_millis(800))
}

async fn first_run() -> Result<(), AnyError> {
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{DATABASE}{suffix}"));
    }
    let store = Store::<Sqlite>::open(DATABASE).await?;
    store.migrate().await?;
    let mut board = Board::open(DATABASE)?;
    board.execute("CREATE TABLE reservation (order_number INTEGER NOT NULL)")?;

    let broker = MockCluster::new(1)?;
    broker.create_topic("orders", 2, 1)?;
    let records = produce(&broker.bootstrap_servers())?;

    println!("{records} records wait in the topic orders; three handlers want them. Each line is a decision.");
    println!("First the broker assigns the partitions of the topic to this process, which takes a moment.\n");
    let inbox = inbox(store, receipt(shop::SEND_RECEIPT, MailServer::Flaky), FraudService::Broken)?;
    // Uses the newer group protocol: with the classic one the broker waits three seconds for more members.
    let kafka = Kafka::new(broker.bootstrap_servers(), "quickstart").set("group.protocol", "consumer");
    let running = inbox.start_from(kafka).await?;
    board.show_until(&format!("(SELECT sum(next_offset) FROM inbox_ledger) = 7 AND {ALL_FINISHED}")).await?;
    running.shutdown(Duration::from_secs(5)).await?;
    board.finish()?;

    println!(
        "\n7 records became 5 messages: one came twice, one is in quarantine. One delivery is left for a person:\n"
    );
    println!("  look at it   wharf --database sqlite:{DATABASE} poisoned show order-3 --show-payload");
    println!("  and that     wharf --database sqlite:{DATABASE} quarantine show 1 --show-payload");
    println!("  replay it    wharf --database sqlite:{DATABASE} poisoned replay --message order-3");
    println!("  run it       cargo run --example quickstart -- resume");
    println!("  crash it     cargo run --example quickstart -- crash");
    println!("  rename it    cargo run --example quickstart -- renamed");
    println!("  see it all   cargo run --example quickstart -- --dashboard");
    println!("  clean up     rm {DATABASE}*");
    println!("\nIn a clone, wharf is: cargo run --features cli --bin wharf --");
    println!("Or, in SQL:  sqlite3 {DATABASE} \"SELECT message_id, handler_key, last_error FROM inbox_poisoned\"");
    Ok(())
}

/// A later deploy with the fraud check repaired. No record arrives; deliveries that were replayed or interrupted by a
/// crash run.
async fn resume() -> Result<(), AnyError> {
    let (store, mut board) = open().await?;
    let open = board.ask("(SELECT count(*) FROM inbox_delivery WHERE finished_at IS NULL)")?;
    let inbox = inbox(store, receipt(shop::SEND_RECEIPT, MailServer::Flaky), FraudService::Repaired)?;
    let running = inbox.start().await?;
    board.show_until(ALL_FINISHED).await?;
    running.shutdown(LEASE).await?;
    board.finish()?;
    match open {
        0 => println!("\nNothing was left to do. Replay the poisoned delivery first."),
        open => println!("\nDeliveries that ran: {open}."),
    }
    Ok(())
}

/// Accepts an order from this program, without Kafka. The process is killed while it sends the receipt.
async fn crash() -> Result<(), AnyError> {
    let (store, mut board) = open().await?;
    let inbox = inbox(store, receipt(shop::SEND_RECEIPT, MailServer::Deadly), FraudService::Repaired)?;
    let running = inbox.start().await?;
    println!("order-6 is accepted, and its receipt kills this process. Then run it again:");
    println!("\n  cargo run --example quickstart -- resume");
    println!("\nThe receipt is sent as soon as the claim of the killed process has expired, after {LEASE:?}.\n");
    inbox.accept(direct(6)).await?;
    board.show_until(ALL_FINISHED).await?;
    running.shutdown(LEASE).await?;
    println!("No crash: order-6 was handled before.");
    Ok(())
}

/// A later deploy in which the receipt handler has another key. The former key makes it the same handler.
async fn renamed() -> Result<(), AnyError> {
    let (store, mut board) = open().await?;
    let confirmation = receipt(shop::SEND_CONFIRMATION, MailServer::Flaky).formerly(shop::SEND_RECEIPT.as_str());
    let inbox = inbox(store, confirmation, FraudService::Repaired)?;
    println!("order-1 once more: {:?}\n", inbox.accept(direct(1)).await?);
    inbox.drain().await?;
    board.finish()?;
    let (new, former) = (shop::SEND_CONFIRMATION, shop::SEND_RECEIPT);
    println!("\nNo handler ran for it: {former} is a former key of {new}, so both are one handler.");
    Ok(())
}

/// Serves the inbox in a browser, beside a running inbox with the repaired fraud check, which runs replayed deliveries.
async fn dashboard() -> Result<(), AnyError> {
    if !std::path::Path::new(DATABASE).exists() {
        first_run().await?;
    }
    let store = Store::<Sqlite>::open(DATABASE).await?;
    let inbox = inbox(store.clone(), receipt(shop::SEND_RECEIPT, MailServer::Flaky), FraudService::Repaired)?;
    let running = inbox.start().await?;
    let listener = match TcpListener::bind("127.0.0.1:8088").await {
        Ok(listener) => listener,
        Err(_) => TcpListener::bind("127.0.0.1:0").await?,
    };
    println!("\nThe dashboard is at http://{}/ until you press Ctrl-C.", listener.local_addr()?);
    Dashboard::new(&store, Access::on_this_machine()).acting_as("you").serve(listener).await?;
    running.shutdown(LEASE).await?;
    Ok(())
}

/// Opens the database of the first run.
async fn open() -> Result<(Store<Sqlite>, Board), AnyError> {
    if !std::path::Path::new(DATABASE).exists() {
        return Err(format!("there is no {DATABASE} here: run cargo run --example quickstart first").into());
    }
    Ok((Store::<Sqlite>::open(DATABASE).await?, Board::open(DATABASE)?))
}

/// An order with the same identity as its CloudEvent.
fn direct(number: i32) -> Record {
    Record::new("orders").with_source("/shop").with_id(format!("order-{number}")).with_payload(shop::order(number))
}

/// Produces five orders as CloudEvents, the first of them twice, and one record that claims to be a CloudEvent and is
/// not.
fn produce(brokers: &str) -> Result<usize, AnyError> {
    let producer: BaseProducer = ClientConfig::new().set("bootstrap.servers", brokers).create()?;
    let numbers = [1, 2, 3, 4, 1, 5];
    for number in numbers {
        let (id, payload) = (format!("order-{number}"), shop::order(number));
        let headers = OwnedHeaders::new()
            .insert(Header { key: "ce_specversion", value: Some("1.0") })
            .insert(Header { key: "ce_id", value: Some(&id) })
            .insert(Header { key: "ce_source", value: Some("/shop") })
            .insert(Header { key: "ce_type", value: Some("order.placed") });
        let record = BaseRecord::to("orders").partition(number % 2).key(&id).payload(&payload).headers(headers);
        producer.send(record).map_err(|(error, _)| error)?;
    }
    let headers =
        OwnedHeaders::new().insert(Header { key: "content-type", value: Some("application/cloudevents+json") });
    let broken = BaseRecord::to("orders")
        .partition(0)
        .key("order-6")
        .payload(r#"{"specversion": "1.0", "id": "#)
        .headers(headers);
    producer.send(broken).map_err(|(error, _)| error)?;
    producer.flush(Duration::from_secs(10))?;
    Ok(numbers.len() + 1)
}
