//! The handlers: plain async functions. They contain your code; Wharf decides when and how often they run.

use diesel::sql_types::Integer;
use diesel_async::RunQueryDsl;
use serde::Deserialize;
use wharf::store::AsyncSqliteConnection;
use wharf::{Failure, HandlerKey, Message};

pub const RESERVE_STOCK: HandlerKey = HandlerKey::new("stock.reserve");
pub const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
/// The key of [`SEND_RECEIPT`] after a rename.
pub const SEND_CONFIRMATION: HandlerKey = HandlerKey::new("mail.confirm");
pub const CHECK_FRAUD: HandlerKey = HandlerKey::new("fraud.check");

#[derive(Debug, Deserialize)]
pub struct Order {
    number: i32,
    customer: String,
}

pub fn order(number: i32) -> String {
    let customer = if number == 3 { "mallory" } else { "alice" };
    serde_json::json!({ "number": number, "customer": customer }).to_string()
}

/// Exactly once: the row and the outcome are committed together.
pub async fn reserve_stock(order: Message<Order>, conn: &mut AsyncSqliteConnection) -> Result<(), Failure> {
    diesel::sql_query("INSERT INTO reservation (order_number) VALUES (?)")
        .bind::<Integer, _>(order.payload.number)
        .execute(conn)
        .await?;
    Ok(())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MailServer {
    /// Fails for the second order, and succeeds at its third attempt.
    Flaky,
    /// The first attempt to send the receipt of the sixth order kills the process.
    Deadly,
}

/// At least once: it is retried until it succeeds, also after a crash.
pub async fn send_receipt(order: Message<Order>, server: MailServer) -> Result<(), Failure> {
    match (order.payload.number, order.attempt(), server) {
        (2, 1..=2, MailServer::Flaky) => Err(Failure::retry("the mail server is down")),
        (6, 1, MailServer::Deadly) => kill_this_process(),
        _ => Ok(()),
    }
}

/// Does the same as `kill -9` from another terminal.
fn kill_this_process() -> ! {
    let _ = std::process::Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
    std::process::abort()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FraudService {
    /// Fails for the customer mallory.
    Broken,
    Repaired,
}

/// Fails for one customer until the service is repaired.
pub async fn check_fraud(order: Message<Order>, service: FraudService) -> Result<(), Failure> {
    match (order.payload.customer.as_str(), service) {
        ("mallory", FraudService::Broken) => Err(Failure::retry("the fraud service does not know mallory")),
        _ => Ok(()),
    }
}
