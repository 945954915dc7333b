//! Calls the service's `on_poison` function. Each call is a row that the poisoning transaction wrote. The row stays
//! until the function has returned `Ok`, so a crash in between repeats the call.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;

use super::engine::Engine;
use crate::handler::{PoisonHook, Poisoned};
use crate::store::Backend;
use crate::store::outbound::PoisonCall;
use crate::telemetry::events;
use crate::types::{jittered, panic_text, sanitize};

/// Calls that are claimed at a time; they are made one after the other.
const CALLS_MAX: u32 = 10;
/// How long one call may take.
const CALL_MAX: Duration = Duration::from_secs(30);
/// How long a call waits after its first failure; doubled for each further failure, up to `PAUSE_MAX`. The number of
/// calls is not bounded: otherwise the service might never learn of the poisoned delivery.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(300);

/// Claims and makes calls until the engine stops. Claimed calls that were not made by then run again in another
/// process, when their lease expires.
pub(super) async fn alarm_loop<B: Backend>(engine: Arc<Engine<B>>, hook: PoisonHook) {
    loop {
        // The lease covers the longest time that all claimed calls can take. After that, another process makes them.
        let claimed = engine.store.backend.claim_poison_calls(CALL_MAX * (CALLS_MAX + 1), CALLS_MAX).await;
        let calls = match claimed {
            Ok(calls) => calls,
            Err(error) => {
                events::store_error("look for poisoned deliveries", &error);
                Vec::new()
            }
        };
        let found = calls.len();
        for call in calls {
            if !engine.is_running() {
                return;
            }
            make(&engine, &hook, call).await;
        }
        if found == 0 {
            tokio::select! {
                () = tokio::time::sleep(jittered(engine.limits.poll)) => {}
                () = engine.stopping() => return,
            }
        }
    }
}

/// Makes one call and writes its result. If the result cannot be written, the row keeps its lease, and the call is made
/// again after it: the function has to tolerate a repeated call.
async fn make<B: Backend>(engine: &Arc<Engine<B>>, hook: &PoisonHook, call: PoisonCall) {
    let (id, calls, handler_key) = (call.id, call.calls, call.handler_key.clone());
    let calling = hook.clone();
    // User code runs on the user's runtime.
    let called = engine.runtime.spawn(async move {
        let poisoned = Poisoned {
            message_id: call.message_id,
            source: call.source,
            topic: call.topic,
            handler_key: call.handler_key,
            reason: call.reason,
            error: call.error,
            attempts: call.attempts.unsigned_abs(),
            poisoned_at: call.poisoned_at,
            call: calls.unsigned_abs(),
        };
        let answer = AssertUnwindSafe(async { calling.call(poisoned).await }).catch_unwind();
        match tokio::time::timeout(CALL_MAX, answer).await {
            Ok(Ok(Ok(()))) => Ok(()),
            Ok(Ok(Err(failure))) => Err(failure.error),
            Ok(Err(panic)) => Err(format!("it panicked: {}", panic_text(panic))),
            Err(_) => Err("it took too long".to_owned()),
        }
    });
    let called = called.await.unwrap_or_else(|_| Err("the runtime that handlers run on has ended".to_owned()));
    let written = match called {
        Ok(()) => engine.store.backend.end_poison_call(id).await,
        Err(error) => {
            events::poison_call_failed(&handler_key, calls, &sanitize::text(&error, engine.limits.error_chars_max));
            let doublings = calls.unsigned_abs().saturating_sub(1).min(16);
            let after = (PAUSE * (1 << doublings)).min(PAUSE_MAX);
            engine.store.backend.delay_poison_call(id, after).await
        }
    };
    if let Err(error) = written {
        events::store_error("note the call for a poisoned delivery", &error);
    }
}
