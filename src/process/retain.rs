//! Purges periodically while the inbox runs. If the database fails or another process is purging, an event reports it,
//! and the next interval tries again. Shutdown ends a purge between two steps.

use std::sync::Arc;
use std::time::Duration;

use super::engine::Engine;
use crate::operate::{Retention, purge};
use crate::store::Backend;
use crate::telemetry::events;
use crate::types::{Purged, jittered};

/// The first purge comes after at most this time, so that a process which restarts more often than the interval purges
/// too.
const FIRST_MAX: Duration = Duration::from_secs(60);

/// Purges until the engine stops. The interval counts from the end of a purge.
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
            Err(error) => events::store_error("purge", &error),
        }
        pause = jittered(retention.interval);
    }
}
