//! The whole flow in one process, with nothing installed but Rust: a Kafka broker (librdkafka's in-process mock), an inbox in
//! `quickstart.db`, three handlers.
//!
//! ```sh
//! cargo run --example quickstart
//! ```
//!
//! Five orders come in, one of them twice, and a record that is broken. Stock is reserved exactly once, receipts go out although the mail
//! server is down for a while, and one fraud check is hopeless and left for a person. `-- resume` repairs that handler and runs what was
//! replayed.
#![allow(clippy::print_stdout, reason = "a program that talks to a person")]
#![allow(unreachable_pub, reason = "nothing of a program is reachable from outside")]

mod board;
mod shop;

use std::time::Duration;

use board::Board;
use rdkafka::ClientConfig;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use shop::FraudService;
use wharf::{Identity, Inbox, Kafka, RetryPolicy, Sqlite, Store, handler, tx_handler};

const DATABASE: &str = "quickstart.db";
type AnyError = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    match std::env::args().nth(1).as_deref() {
        None => first_run().await,
        Some("resume") => resume().await,
        Some(other) => Err(format!("{other:?}? There is only: resume").into()),
    }
}

/// The inbox: what is wanted of a topic, and where a record of it has its identity.
async fn inbox(store: &Store<Sqlite>, fraud_service: FraudService) -> Result<Inbox<Sqlite>, AnyError> {
    // Impatient, so that you see the end of it.
    let retry = || RetryPolicy::exponential().max_retries(3).max_delay(Duration::from_millis(800));
    let check_fraud = move |order| shop::check_fraud(order, fraud_service);
    let inbox = Inbox::builder(store.clone())
        .subscribe("orders", tx_handler(shop::RESERVE_STOCK, shop::reserve_stock))
        .subscribe("orders", handler(shop::SEND_RECEIPT, shop::send_receipt).retry(retry()))
        .subscribe("orders", handler(shop::CHECK_FRAUD, check_fraud).retry(retry()))
        .identity("orders", Identity::cloud_events())
        .build()?;
    Ok(inbox)
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

    println!("{records} records wait in the topic orders; three handlers want them. Each line is a decision.\n");
    let inbox = inbox(&store, FraudService::Broken).await?;
    let running = inbox.start_from(Kafka::new(broker.bootstrap_servers(), "quickstart")).await?;
    board.show_until("(SELECT sum(next_offset) FROM inbox_ledger) = 7 AND NOT EXISTS (SELECT 1 FROM inbox_delivery WHERE finished_at IS NULL)").await?;
    running.shutdown(Duration::from_secs(5)).await?;
    board.finish()?;

    println!(
        "\n7 records became 5 messages: one came twice, one is in quarantine. One delivery is left for a person:\n"
    );
    println!("  look at it   wharf --database sqlite:{DATABASE} poisoned show order-3 --show-payload");
    println!("  and that     wharf --database sqlite:{DATABASE} quarantine show 1 --show-payload");
    println!("  replay it    wharf --database sqlite:{DATABASE} poisoned replay --message order-3");
    println!("  run it       cargo run --example quickstart -- resume");
    println!("  clean up     rm {DATABASE}*");
    println!("\nIn a clone, wharf is: cargo run --features cli --bin wharf --");
    println!("Or, in SQL:  sqlite3 {DATABASE} \"SELECT message_id, handler_key, last_error FROM inbox_poisoned\"");
    Ok(())
}

/// A later deploy: the handler is repaired. Nothing new comes in; what was replayed is due.
async fn resume() -> Result<(), AnyError> {
    if !std::path::Path::new(DATABASE).exists() {
        return Err(format!("there is no {DATABASE} here: run cargo run --example quickstart first").into());
    }
    let store = Store::<Sqlite>::open(DATABASE).await?;
    let mut board = Board::open(DATABASE)?;
    let ran = inbox(&store, FraudService::Repaired).await?.drain().await?;
    board.finish()?;
    match ran {
        0 => println!("\nNothing was due. Replay the poisoned delivery first."),
        ran => println!("\n{ran} run."),
    }
    Ok(())
}

/// Five orders as CloudEvents, the first of them twice, and one record that is no CloudEvent although it says so.
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
