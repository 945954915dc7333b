//! Retries a database call until it succeeds: the database may come back, or its schema may be repaired. Only aborting
//! the task ends the retries early.

use std::future::Future;
use std::time::Duration;

use crate::telemetry::events;
use crate::types::{Backoff, Result};

/// Calls `act` until it succeeds, with pauses of at most `backoff_max`. Each error is an event that names `what`.
pub(super) async fn retry_forever<T, F>(backoff_max: Duration, what: &'static str, act: impl Fn() -> F) -> T
where
    F: Future<Output = Result<T>>,
{
    let mut backoff = Backoff::new(backoff_max);
    loop {
        match act().await {
            Ok(done) => return done,
            Err(error) => events::store_error(what, &error),
        }
        backoff.pause().await;
    }
}
