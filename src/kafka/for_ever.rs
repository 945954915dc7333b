//! Tries until it is done: the database may come back, its schema may be put right. Who waits is ended by ending its task.

use std::future::Future;
use std::time::Duration;

use crate::telemetry::events;
use crate::types::{Backoff, Result};

pub(super) async fn for_ever<T, F>(backoff_max: Duration, what: &'static str, act: impl Fn() -> F) -> T
where
    F: Future<Output = Result<T>>,
{
    let mut backoff = Backoff::new(backoff_max);
    loop {
        match act().await {
            Ok(done) => return done,
            Err(error) => events::store_trouble(what, &error),
        }
        backoff.pause().await;
    }
}
