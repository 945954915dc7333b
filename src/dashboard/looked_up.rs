//! A value that is looked up once for all requests. Requests that come while it is fresh or being looked up share the
//! result.

use std::collections::HashMap;
use std::future::Future;
use std::hash::Hash;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, OnceCell};

use crate::types::Result;

pub(super) struct LookedUp<T>(Mutex<Option<(Instant, Arc<T>)>>);

impl<T> Default for LookedUp<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T> LookedUp<T> {
    /// Returns the cached value if it is younger than `age_max`, otherwise the result of `look`. Concurrent callers
    /// wait for that result.
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

/// How many values of one snapshot are kept. When it is exceeded, they are looked up again.
const KEPT_MAX: usize = 100;

/// Values by key, each looked up once for a snapshot of the sampler. An action waits for a new snapshot, so that the
/// visitor sees its effect. A std mutex: nothing awaits while holding it.
pub(super) struct LookedUpBy<K, T>(std::sync::Mutex<HashMap<K, KeptValue<T>>>);

/// The number of the snapshot, and the value as soon as it is known.
type KeptValue<T> = (u64, Arc<OnceCell<Arc<T>>>);

impl<K, T> Default for LookedUpBy<K, T> {
    fn default() -> Self {
        Self(std::sync::Mutex::default())
    }
}

impl<K: Eq + Hash, T> LookedUpBy<K, T> {
    /// Returns the value for this snapshot, otherwise the result of `look`. Concurrent callers wait for that result.
    pub(super) async fn get(&self, key: K, snapshot: u64, look: impl Future<Output = Result<T>>) -> Result<Arc<T>> {
        let cell = {
            let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            kept.retain(|_, (of, _)| *of >= snapshot);
            if kept.len() >= KEPT_MAX {
                kept.clear();
            }
            Arc::clone(&kept.entry(key).or_insert_with(|| (snapshot, Arc::default())).1)
        };
        cell.get_or_try_init(|| async { look.await.map(Arc::new) }).await.map(Arc::clone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_value_is_looked_up_once_for_a_snapshot_and_anew_for_the_next() {
        let kept = LookedUpBy::default();
        let get = async |key: &'static str, snapshot, value: u32| {
            let look = async { if value == 0 { Err(crate::types::Error::configuration("no")) } else { Ok(value) } };
            kept.get(key, snapshot, look).await.map(|found| *found).ok()
        };
        assert_eq!(
            [get("a", 1, 10).await, get("a", 1, 11).await, get("b", 1, 12).await],
            [Some(10), Some(10), Some(12)]
        );
        // A failed look is not kept.
        assert_eq!([get("a", 2, 0).await, get("a", 2, 20).await], [None, Some(20)]);
        // A request that began with an earlier snapshot gets the newer value.
        assert_eq!(get("a", 1, 30).await, Some(20));
    }
}
