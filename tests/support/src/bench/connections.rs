//! Runs the baseline: divides the messages among a few connections, which work concurrently.

use tokio_postgres::Client;

use super::CONNECTIONS;
use super::meter::{Measured, Meter};
use crate::postgres::connect;

/// Divides the numbers below `messages` among the connections, runs `work` on all of them concurrently, and returns the
/// measurement. `meter` is called when all are connected.
pub async fn on_each_connection<'a, F>(
    meter: impl FnOnce() -> Meter<'a>,
    url: &str,
    messages: usize,
    work: impl Fn(Client, Vec<usize>) -> F,
) -> Measured
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut prepared = Vec::new();
    for share in 0..CONNECTIONS {
        let numbers: Vec<usize> = (0..messages).filter(|number| number % CONNECTIONS == share).collect();
        prepared.push((connect(url).await, numbers));
    }
    let meter = meter();
    let tasks: Vec<_> = prepared.into_iter().map(|(client, numbers)| tokio::spawn(work(client, numbers))).collect();
    for task in tasks {
        task.await.unwrap();
    }
    meter.stop(messages)
}
