//! Which processor may run a delivery, and when: one processor at a time, within the handler's slots, not before it is
//! due, not while the handler is paused.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use wharf::{Failure, Message, Raw, Registration, handler};

use super::scene::{Db, Runs, Scene, key, quick, record, records};
use support::events::Events;

/// Runs `count` deliveries on four processors, each with its own store.
pub(super) async fn four_processors_run(scene: &Scene, count: usize) -> Runs {
    let runs = Runs::new();
    scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap().accept_all(records(count)).await.unwrap();
    let limits = quick().lease(Duration::from_secs(30));
    let mut running = Vec::new();
    for _ in 0..4 {
        let builder = scene.another_inbox().await.limits(limits.clone());
        let inbox = builder.subscribe("orders", runs.handler("stock").concurrency(64)).build().unwrap();
        running.push(inbox.start().await.unwrap());
    }
    scene.settled().await;
    for running in running {
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
    runs
}

// No delivery is claimed by two processors.
#[tokio::test(flavor = "multi_thread")]
pub(super) async fn four_processors_run_each_of_20000_deliveries_once() {
    let scene = Scene::new().await;
    let runs = four_processors_run(&scene, 20_000).await;
    assert_eq!(runs.count(), 20_000);
    assert_eq!(runs.ids().into_iter().collect::<HashSet<_>>().len(), 20_000);
    assert_eq!(scene.count_not_done_at_first().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_never_runs_more_deliveries_at_a_time_than_it_allows() {
    let scene = Scene::new().await;
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let counting = handler(key("stock"), {
        let (now, most) = (Arc::clone(&now), Arc::clone(&most));
        move |_: Message<Raw>| {
            let (now, most) = (Arc::clone(&now), Arc::clone(&most));
            async move {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(2)).await;
                now.fetch_sub(1, Ordering::SeqCst);
                Ok::<(), Failure>(())
            }
        }
    });
    let inbox = scene.inbox().subscribe("orders", counting.concurrency(3)).build().unwrap();
    inbox.accept_all(records(150)).await.unwrap();
    let running = inbox.start().await.unwrap();
    // Some are handed over while others are claimed.
    for number in 0..150 {
        inbox.accept(record(&format!("late-{number}"))).await.unwrap();
    }
    scene.settled().await;
    assert_eq!(most.load(Ordering::SeqCst), 3);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

pub(super) fn stuck(name: &'static str) -> Registration<Db> {
    handler(key(name), async |_: Message<Raw>| std::future::pending::<Result<(), Failure>>().await)
}

// A slow or failing handler delays only its own deliveries.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_completes_while_another_hangs_and_a_third_fails() {
    let scene = Scene::new().await;
    let (healthy, failing) = (Runs::new(), Runs::new());
    let inbox = scene
        .inbox()
        .subscribe("orders", stuck("stuck").concurrency(2))
        .subscribe("orders", failing.answering("failing", |_| Err(Failure::retry("no"))))
        .subscribe("orders", healthy.handler("healthy").concurrency(4))
        .build()
        .unwrap();
    inbox.accept_all(records(300)).await.unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all((0..300).map(|number| record(&format!("late-{number}")))).await.unwrap();

    let done =
        "SELECT (count(*) = 600)::int::bigint FROM inbox_status WHERE handler_key = 'healthy' AND state = 'done'";
    scene.until(done).await;
    failing.reached(600).await;
    running.shutdown(Duration::ZERO).await.unwrap();
    let open = "SELECT count(*) FROM inbox_status WHERE handler_key = 'stuck' AND state = 'pending' AND errors = 0";
    assert_eq!(scene.database.query_one_i64(open).await, 600);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_handler_gets_no_delivery_until_it_is_resumed() {
    let scene = Scene::new().await;
    let (paused, other) = (Runs::new(), Runs::new());
    let inbox = scene
        .inbox()
        .subscribe("orders", paused.handler("paused"))
        .subscribe("orders", other.handler("other"))
        .build()
        .unwrap();
    inbox.accept_all(records(20)).await.unwrap();
    scene.database.execute("UPDATE inbox_handler SET paused_at = now() WHERE key = 'paused'").await;

    let running = inbox.start().await.unwrap();
    inbox.accept_all((0..20).map(|number| record(&format!("late-{number}")))).await.unwrap();
    other.reached(40).await;
    inbox.accept(record("last")).await.unwrap();
    other.reached(41).await;
    assert_eq!(paused.ids(), Vec::<String>::new());

    scene.database.execute("UPDATE inbox_handler SET paused_at = NULL").await;
    paused.reached(41).await;
    scene.settled().await;
    assert_eq!(scene.count_not_done_at_first().await, 0);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// Only the database's clock decides whether a delivery is due.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_never_runs_before_it_is_due_by_the_databases_clock() {
    let scene = Arc::new(Scene::new().await);
    let stage = Arc::clone(&scene);
    let early = handler(key("stock"), move |message: Message<Raw>| {
        let scene = Arc::clone(&stage);
        async move {
            let sql = format!(
                "SELECT CASE WHEN now() >= due_at THEN seq ELSE -1 END FROM inbox_delivery d
                 JOIN inbox_message m ON m.seq = d.message_seq WHERE message_id = '{}'",
                message.id()
            );
            let seq = scene.database.query_one_i64(&sql).await;
            match message.attempt() {
                _ if seq < 0 => Err(Failure::poison("early")),
                1..=3 => Err(Failure::retry_after(Duration::from_millis(seq.unsigned_abs() * 3), "again")),
                _ => Ok(()),
            }
        }
    });
    let inbox = scene.inbox().subscribe("orders", early).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(60)).await.unwrap();
    scene.settled().await;
    assert_eq!(scene.count("inbox_status WHERE state = 'done' AND attempts = 4 AND errors = 3").await, 60);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_accepted_while_a_slot_is_free_is_handed_over_without_a_claim() {
    let events = Events::capture();
    let scene = Scene::new().await;
    let runs = Runs::new();
    let limits = quick().poll(Duration::from_secs(60));
    let inbox = scene.inbox().limits(limits).subscribe("orders", runs.handler("handed.over")).build().unwrap();
    let running = inbox.start().await.unwrap();
    for number in 1..=100 {
        inbox.accept(record(&format!("m{number}"))).await.unwrap();
        scene.settled().await;
    }
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    let started = |message: &str| events.matching(|e| e.message == message && e.has("handler", "handed.over")).len();
    // A claim that runs at this moment holds the slots; the rest is handed over.
    assert_eq!(started("handed over") + started("claimed"), 100);
    assert!(started("handed over") >= 50, "{} handed over", started("handed over"));
    assert_eq!(scene.count_not_done_at_first().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_without_a_free_slot_is_claimed_when_there_is_one() {
    let scene = Scene::new().await;
    let (gate, runs) = (Arc::new(Semaphore::new(0)), Runs::new());
    let held = handler(key("stock"), {
        let (gate, runs) = (Arc::clone(&gate), runs.clone());
        move |message: Message<Raw>| {
            runs.note(&message);
            let gate = Arc::clone(&gate);
            async move { gate.acquire().await.map(drop) }
        }
    });
    let limits = quick().poll(Duration::from_secs(60));
    let inbox = scene.inbox().limits(limits).subscribe("orders", held.concurrency(2)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(10)).await.unwrap();
    runs.reached(2).await;
    let held = "SELECT count(*) FROM inbox_delivery WHERE locked_until IS NOT NULL";
    assert_eq!(scene.database.query_one_i64(held).await, 2);
    gate.add_permits(10);
    scene.settled().await;
    assert_eq!(runs.count(), 10);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// Only the lock of a crashed process counts as a crash. A live process can be late.
#[tokio::test(flavor = "multi_thread")]
async fn an_expired_lock_is_a_crash_only_if_its_process_has_crashed() {
    let scene = Scene::new().await;
    let (runs, others) = (Runs::new(), Runs::new());
    let alive = quick().lease(Duration::from_secs(600));
    let other = scene.another_inbox().await.limits(alive).subscribe("others", others.handler("other")).build().unwrap();
    let running = other.start().await.unwrap();
    let inbox =
        scene.inbox().subscribe("orders", runs.answering("stock", |_| Err(Failure::poison("no")))).build().unwrap();
    inbox.accept_all([record("late"), record("dead")]).await.unwrap();
    let run_out = "UPDATE inbox_delivery AS d SET attempts = 1, locked_until = now() - interval '1 s',
                   locked_by = CASE WHEN m.message_id = 'late' THEN (SELECT max(id) FROM inbox_processor) ELSE -1 END
                   FROM inbox_message m WHERE m.seq = d.message_seq";
    scene.database.execute(run_out).await;

    assert_eq!(inbox.drain().await.unwrap(), 2);

    let crashes = "SELECT concat_ws(' ', message_id, attempts, crashes) FROM inbox_poisoned ORDER BY 1";
    assert_eq!(scene.database.query_texts(crashes).await, ["dead 2 1", "late 2 0"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}
