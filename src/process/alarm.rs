//! Calls the service's function for poisoned deliveries. A call is a row that the poisoning transaction wrote; it stays until the function has
//! returned without an error, so a crash in between means one more call.

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
/// How long a call waits after it has failed once; doubled for each that follows.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(300);

/// Runs until the engine stops.
pub(super) async fn alarm_loop<B: Backend>(engine: Arc<Engine<B>>, hook: PoisonHook) {
    loop {
        // As long as all claimed calls can take: another process makes them after that.
        let claimed = engine.store.backend.claim_poison_calls(CALL_MAX * (CALLS_MAX + 1), CALLS_MAX).await;
        let calls = match claimed {
            Ok(calls) => calls,
            Err(error) => {
                events::store_trouble("look for poisoned deliveries", &error);
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

async fn make<B: Backend>(engine: &Arc<Engine<B>>, hook: &PoisonHook, call: PoisonCall) {
    let (id, calls, handler_key) = (call.id, call.calls, call.handler_key.clone());
    let calling = hook.clone();
    // The user's code: on the user's threads.
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
        events::store_trouble("note the call for a poisoned delivery", &error);
    }
}
