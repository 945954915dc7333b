//! Looked up once for everybody: who asks while it is fresh, or being looked up, gets the same answer.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use crate::types::Result;

pub(super) struct LookedUp<T>(Mutex<Option<(Instant, Arc<T>)>>);

impl<T> Default for LookedUp<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T> LookedUp<T> {
    /// What was looked up no longer ago than `age_max`, or what `look` finds now. Those who ask meanwhile wait for it.
    pub(super) async fn get(&self, age_max: Duration, look: impl Future<Output = Result<T>>) -> Result<Arc<T>> {
        let mut kept = self.0.lock().await;
        if let Some((at, value)) = &*kept
            && at.elapsed() < age_max
        {
            return Ok(Arc::clone(value));
        }
        let value = Arc::new(look.await?);
        *kept = Some((Instant::now(), Arc::clone(&value)));
        Ok(value)
    }
}
