//! Claiming ahead: a fast handler has more claims than slots, and waiting deliveries are released, dropped or run like
//! any other claim.
//!
//! Each test lets a handler prove that it is fast, then closes its gate: the next deliveries fill its two slots and
//! wait.

use std::time::Duration;

use tokio::sync::watch;
use wharf::{Inbox, Limits, Record, Running};

use super::scene::{Db, Runs, Scene, State, quick, record, records};
use support::events::Events;

const SLOTS: usize = 2;
/// Runs that make the handler known as fast, and deliveries that arrive when its gate is closed.
const WARM_UP: usize = 200;
const LATE: usize = 100;

const HELD: &str = "inbox_delivery WHERE locked_until IS NOT NULL";

/// A handler that was fast and whose gate is now closed.
struct Stalled {
    scene: Scene,
    runs: Runs,
    gate: watch::Sender<bool>,
    inbox: Inbox<Db>,
    running: Running<Db>,
}

/// Deliveries may wait for longer than any test takes.
fn patient() -> Limits {
    quick().claim_ahead(Duration::from_secs(10))
}

fn late() -> Vec<Record> {
    // Other tests of the process wait for events of their own deliveries.
    let batch: u64 = rand::random();
    (0..LATE).map(|number| record(&format!("late-{batch}-{number}"))).collect()
}

impl Stalled {
    async fn with(limits: Limits) -> Self {
        let scene = Scene::new().await;
        let (runs, gate) = (Runs::new(), watch::Sender::new(true));
        let registration = runs.gated("stock", &gate).concurrency(SLOTS);
        let inbox = scene.inbox().limits(limits).subscribe("orders", registration).build().unwrap();
        let running = inbox.start().await.unwrap();
        inbox.accept_all(records(WARM_UP)).await.unwrap();
        scene.settled().await;
        gate.send_replace(false);
        Self { scene, runs, gate, inbox, running }
    }

    /// Two deliveries run, and the other accepted ones wait.
    async fn with_late_ones_waiting(limits: Limits) -> Self {
        let stalled = Self::with(limits).await;
        stalled.inbox.accept_all(late()).await.unwrap();
        stalled.runs.reached(WARM_UP + SLOTS).await;
        stalled.held_are(LATE).await;
        stalled
    }

    async fn held_are(&self, count: usize) {
        self.scene.until(&format!("SELECT (count(*) = {count})::int::bigint FROM {HELD}")).await;
    }

    fn late_runs(&self) -> usize {
        self.runs.count() - WARM_UP
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fast_handler_has_more_claims_than_slots_and_keeps_its_concurrency() {
    let stalled = Stalled::with_late_ones_waiting(patient()).await;
    assert_eq!(stalled.late_runs(), SLOTS);

    stalled.gate.send_replace(true);

    stalled.scene.settled().await;
    assert_eq!(stalled.scene.count_done_at_first().await, i64::try_from(WARM_UP + LATE).unwrap());
    assert_eq!(stalled.late_runs(), LATE);
    stalled.running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_deliveries_can_be_claimed_or_handed_over() {
    let stalled = Stalled::with(patient()).await;
    // This inbox is not started: its deliveries can only be claimed.
    let elsewhere = stalled.scene.another_inbox().await.subscribe("orders", Runs::new().handler("stock"));
    elsewhere.build().unwrap().accept_all(late()).await.unwrap();
    stalled.runs.reached(WARM_UP + SLOTS).await;
    stalled.held_are(LATE).await;
    assert_eq!(stalled.late_runs(), SLOTS);

    stalled.gate.send_replace(true);

    stalled.scene.settled().await;
    assert_eq!(stalled.late_runs(), LATE);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_claimed_ahead_if_disabled_or_if_one_crash_makes_a_suspect() {
    for limits in [patient().claim_ahead(Duration::ZERO), patient().claim_ahead_rows(0), patient().crash_limit(2)] {
        let stalled = Stalled::with(limits).await;
        stalled.inbox.accept_all(late()).await.unwrap();
        stalled.runs.reached(WARM_UP + SLOTS).await;
        assert_eq!(stalled.scene.count(HELD).await, i64::try_from(SLOTS).unwrap());
        stalled.running.shutdown(Duration::ZERO).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_releases_deliveries_claimed_ahead_without_consuming_a_retry() {
    let Stalled { scene, runs, gate, running, .. } = Stalled::with_late_ones_waiting(patient()).await;

    running.shutdown(Duration::ZERO).await.unwrap();

    assert_eq!((runs.count(), scene.count(HELD).await), (WARM_UP + SLOTS, 0));
    let unharmed = "inbox_status WHERE state = 'pending' AND errors = 0 AND crashes = 0";
    assert_eq!(scene.count(unharmed).await, i64::try_from(LATE).unwrap());
    drop(gate);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_with_grace_lets_runs_end_and_starts_no_waiting_delivery() {
    let Stalled { scene, runs, gate, running, .. } = Stalled::with_late_ones_waiting(patient()).await;

    // Polled in this order: the gate is opened after the shutdown has begun.
    let (ended, _) =
        tokio::join!(running.shutdown(Duration::from_secs(60)), async { gate.send_replace(true) });

    ended.unwrap();
    assert_eq!(runs.count(), WARM_UP + SLOTS);
    assert_eq!(scene.count_in(State::Done).await, i64::try_from(WARM_UP + SLOTS).unwrap());
    assert_eq!(scene.count(HELD).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_deliveries_of_a_paused_handler_are_released() {
    let stalled = Stalled::with_late_ones_waiting(patient()).await;

    stalled.scene.database.execute("UPDATE inbox_handler SET paused_at = now()").await;

    stalled.held_are(SLOTS).await;
    stalled.gate.send_replace(true);
    stalled.held_are(0).await;
    assert_eq!(stalled.late_runs(), SLOTS);
    stalled.scene.database.execute("UPDATE inbox_handler SET paused_at = NULL").await;
    stalled.scene.settled().await;
    assert_eq!(stalled.late_runs(), LATE);
    assert_eq!(stalled.scene.count_done_uncharged().await, i64::try_from(WARM_UP + LATE).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_delivery_that_loses_its_claim_never_starts() {
    let events = Events::capture();
    let stalled = Stalled::with_late_ones_waiting(patient()).await;

    let finished = "UPDATE inbox_delivery SET locked_until = NULL, locked_by = NULL, status = 4, finished_at = due_at
                    WHERE finished_at IS NULL";
    stalled.scene.database.execute(finished).await;
    let ids = "SELECT message_id FROM inbox_status WHERE state = 'discarded'";
    for id in stalled.scene.database.query_texts(ids).await {
        events.wait_for(|event| event.message == "claim lost" && event.has("message_id", &id)).await;
    }
    stalled.gate.send_replace(true);

    stalled.running.shutdown(Duration::from_secs(60)).await.unwrap();
    assert_eq!(stalled.runs.count(), WARM_UP + SLOTS);
}

// A handler that is no longer fast must not hold deliveries that another process could run.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_has_waited_too_long_is_released() {
    let stalled = Stalled::with(quick()).await;
    stalled.inbox.accept_all(late()).await.unwrap();
    stalled.runs.reached(WARM_UP + SLOTS).await;

    stalled.held_are(SLOTS).await;

    let claimed = stalled.scene.count("inbox_delivery WHERE finished_at IS NULL AND attempts > 0").await;
    assert!(claimed > i64::try_from(SLOTS).unwrap(), "only {claimed} were claimed");
    let free = Runs::new();
    let other = stalled.scene.another_inbox().await.subscribe("orders", free.handler("stock")).build().unwrap();
    let _other = other.start().await.unwrap();
    free.reached(LATE - SLOTS).await;
    assert_eq!(stalled.late_runs(), SLOTS);
    stalled.running.shutdown(Duration::ZERO).await.unwrap();
}

// A crash is counted for every claimed delivery. A delivery that one more crash would make a suspect does not wait in
// memory.
#[tokio::test(flavor = "multi_thread")]
async fn suspect_deliveries_start_at_once_or_are_released() {
    let stalled = Stalled::with(patient()).await;
    let paused = "UPDATE inbox_handler SET paused_at = now()";
    stalled.scene.database.execute(paused).await;
    let elsewhere = stalled.scene.another_inbox().await.subscribe("orders", Runs::new().handler("stock"));
    elsewhere.build().unwrap().accept_all(late()).await.unwrap();
    stalled.scene.database.execute("UPDATE inbox_delivery SET crashes = 1 WHERE finished_at IS NULL").await;

    stalled.scene.database.execute("UPDATE inbox_handler SET paused_at = NULL").await;

    stalled.runs.reached(WARM_UP + SLOTS).await;
    stalled.held_are(SLOTS).await;
    stalled.gate.send_replace(true);
    stalled.scene.settled().await;
    assert_eq!(stalled.late_runs(), LATE);
    assert_eq!(stalled.scene.count_done_uncharged().await, i64::try_from(WARM_UP + LATE).unwrap());
}
