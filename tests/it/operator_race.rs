//! An operator who replays with plain SQL during live load breaks nothing: each action and each outcome counts once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio_postgres::error::SqlState;
use wharf::operate::DeliveryFilter;
use wharf::{Failure, RetryPolicy};

use crate::scene::{Runs, Scene, State, records};

const MESSAGES: usize = 200;
/// How often each delivery is poisoned before it is done.
const LIVES: u32 = 4;

#[tokio::test(flavor = "multi_thread")]
async fn replays_in_a_loop_under_live_load_settle_each_attempt_once() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    // Each life ends poisoned at its first failure; the last is done.
    let mortal = runs.answering("stock", |message| match message.attempt() {
        attempt if attempt <= LIVES => Err(Failure::retry("given up")),
        _ => Ok(()),
    });
    let registration = mortal.retry(RetryPolicy::never()).concurrency(8);
    let inbox = scene.inbox().subscribe("orders", registration).build().unwrap();
    let running = inbox.start().await.unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let mut operators = Vec::new();
    for _ in 0..3 {
        let (client, is_over) = (scene.database.client().await, Arc::clone(&is_over));
        operators.push(tokio::spawn(async move {
            let mut replayed = 0;
            while !is_over.load(Ordering::SeqCst) {
                // Replays every delivery, whatever state it is in.
                let replay = "SELECT coalesce(sum(inbox_replay(message_id, 'stock')), 0)::bigint
                              FROM (SELECT message_id FROM inbox_message ORDER BY random() LIMIT 40) m";
                match client.query_one(replay, &[]).await {
                    Ok(row) => replayed += row.get::<_, i64>(0),
                    // A deadlock between two operators: one of them gets the error, and nothing of that action was
                    // done.
                    Err(error) => assert_eq!(error.code(), Some(&SqlState::T_R_DEADLOCK_DETECTED), "{error:?}"),
                }
            }
            replayed
        }));
    }
    inbox.accept_all(records(MESSAGES)).await.unwrap();

    let all_done = format!("SELECT (count(*) = {MESSAGES})::int::bigint FROM inbox_status WHERE state = 'done'");
    scene.until(&all_done).await;
    is_over.store(true, Ordering::SeqCst);
    let mut replayed = 0;
    for operator in operators {
        replayed += operator.await.unwrap();
    }
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    // Each life took one run and one replay: nothing ran twice, and no old claim settled anything.
    let lives = MESSAGES * LIVES as usize;
    assert_eq!(usize::try_from(replayed).unwrap(), lives);
    assert_eq!(runs.count(), lives + MESSAGES);
    let odd =
        format!("SELECT count(*) FROM inbox_delivery WHERE attempts <> {} OR errors <> 0 OR crashes <> 0", LIVES + 1);
    assert_eq!(scene.database.query_one_i64(&odd).await, 0);
    let audited = "SELECT sum(affected)::bigint FROM inbox_audit WHERE action = 'replay'";
    assert_eq!(scene.database.query_one_i64(audited).await, replayed);
}

#[tokio::test(flavor = "multi_thread")]
async fn replays_discards_and_pauses_under_live_load_disturb_no_running_attempt() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    // Every second attempt fails permanently.
    let moody = runs.answering("stock", |message| match message.attempt() % 2 {
        1 => Err(Failure::poison("not this time")),
        _ => Ok(()),
    });
    let inbox = scene.inbox().subscribe("orders", moody.concurrency(8)).build().unwrap();
    let running = inbox.start().await.unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let mut operators = Vec::new();
    for number in 0..3 {
        let (operator, is_over) = (scene.another_store().await.operate().because("a race"), Arc::clone(&is_over));
        operators.push(tokio::spawn(async move {
            let any = DeliveryFilter::default().error("TIME");
            let (mut replayed, mut discarded) = (0, 0);
            while !is_over.load(Ordering::SeqCst) {
                replayed += operator.replay(&any, 7).await.unwrap();
                if number == 0 {
                    discarded += operator.discard(&any, 1).await.unwrap();
                    operator.pause("stock").await.unwrap();
                    operator.resume("stock").await.unwrap();
                }
            }
            (replayed, discarded)
        }));
    }
    inbox.accept_all(records(MESSAGES)).await.unwrap();

    let all =
        format!("SELECT (count(*) = {MESSAGES})::int::bigint FROM inbox_status WHERE state IN ('done', 'discarded')");
    scene.until(&all).await;
    is_over.store(true, Ordering::SeqCst);
    let (mut replayed, mut discarded) = (0, 0);
    for operator in operators {
        let (more, fewer) = operator.await.unwrap();
        replayed += more;
        discarded += fewer;
    }
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    // Each replay led to one run, each run to one outcome; discarded deliveries stayed discarded.
    assert_eq!(scene.count_in(State::Discarded).await, i64::try_from(discarded).unwrap());
    assert_eq!(runs.count() as u64, MESSAGES as u64 + replayed);
    assert_eq!(scene.count("inbox_history").await, i64::try_from(replayed + discarded).unwrap());
    let audited = "SELECT sum(affected)::bigint FROM inbox_audit WHERE action IN ('replay', 'discard')";
    assert_eq!(scene.database.query_one_i64(audited).await, i64::try_from(replayed + discarded).unwrap());
    assert_eq!(scene.count("inbox_delivery WHERE crashes <> 0").await, 0);
}
