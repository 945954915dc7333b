//! Purges every now and then while the inbox runs. Trouble with the database is an event and the next time, as is another process that
//! is at it; shutdown ends it between two steps.

use std::sync::Arc;
use std::time::Duration;

use super::engine::Engine;
use crate::operate::{Retention, purge};
use crate::store::Backend;
use crate::telemetry::events;
use crate::types::{Purged, jittered};

/// The first time is at most this late, so that a process that never lives for an interval purges all the same.
const FIRST_MAX: Duration = Duration::from_secs(60);

/// Runs until the engine stops.
pub(super) async fn retain_loop<B: Backend>(engine: Arc<Engine<B>>, retention: Retention) {
    let mut pause = jittered(retention.interval.min(FIRST_MAX));
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = engine.stopping() => return,
        }
        let mut last = Purged::default();
        let ended = purge(&engine.store, &retention, |so_far| last = *so_far, engine.stopping()).await;
        events::count_purged(&last);
        match ended {
            Ok(purged) => events::purged(&purged),
            Err(error) => events::store_trouble("purge", &error),
        }
        pause = jittered(retention.interval);
    }
}
