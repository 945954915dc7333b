//! Searches: reads whose filter may examine many rows before it finds enough. A few run at a time, so that visitors
//! cannot take all connections of the pool, which the dashboard may share with the service that serves it.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::Semaphore;

use super::refusal::Refusal;
use crate::types::Result;

/// How many searches run at a time.
const AT_ONCE_MAX: usize = 2;
/// How long a visitor waits for a search.
const WAIT_MAX: Duration = Duration::from_secs(10);

pub(super) struct Reads {
    places: Arc<Semaphore>,
    wait_max: Duration,
}

impl Default for Reads {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(AT_ONCE_MAX)), wait_max: WAIT_MAX }
    }
}

impl Reads {
    /// Runs a search in a task of its own. When the visitor has waited long enough, the task keeps its permit until the
    /// database has ended the statement, because the connection is in use until then.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        search: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T, Refusal> {
        let unexpected =
            || Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "the search ended unexpectedly: see the log");
        let searched = async {
            let permit = Arc::clone(&self.places).acquire_owned().await.map_err(|_| unexpected())?;
            let task = tokio::spawn(async move {
                let found = search.await;
                drop(permit);
                found
            });
            Ok::<T, Refusal>(task.await.map_err(|_| unexpected())??)
        };
        tokio::time::timeout(self.wait_max, searched).await.unwrap_or_else(|_| {
            let what = "the search took too long: narrow it with a handler, a message or a shorter time, or wait until other searches have ended";
            Err(Refusal::new(StatusCode::SERVICE_UNAVAILABLE, what))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_search_that_is_given_up_keeps_its_place_until_it_has_ended() {
        let mut reads = Reads { wait_max: Duration::from_millis(10), ..Reads::default() };
        let (end, _) = tokio::sync::broadcast::channel::<()>(1);
        for _ in 0..AT_ONCE_MAX {
            let mut ended = end.subscribe();
            let slow = reads.run(async move { Ok(ended.recv().await.is_ok()) }).await;
            assert_eq!(slow.unwrap_err().status, StatusCode::SERVICE_UNAVAILABLE);
        }
        // The visitors are gone, and their searches still run.
        assert_eq!(reads.run(async { Ok(1) }).await.unwrap_err().status, StatusCode::SERVICE_UNAVAILABLE);
        end.send(()).unwrap();
        reads.wait_max = WAIT_MAX;
        assert_eq!(reads.run(async { Ok(1) }).await.unwrap(), 1);
    }
}
