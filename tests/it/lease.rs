//! A claim is a lease: it is renewed while its handler runs, given up before another process may take it, and void
//! afterwards.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use wharf::{Failure, Inbox, Message, Raw, handler};

use crate::own_server::OwnServer;
use crate::scene::{Runs, Scene, key, quick, record, records, within};
use crate::worker::{Worker, accept, order};
use support::proxy::Fault;

const COUNTERS: &str = "SELECT concat_ws(' ', state, 'errors', errors, 'crashes', crashes) FROM inbox_status";

// A slow handler in a live process must not count as crashed and run a second time.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_takes_three_leases_runs_once() {
    let scene = Scene::new().await;
    let limits = quick().lease(Duration::from_secs(3));
    let runs = Runs::new();
    let slow = || {
        let runs = runs.clone();
        handler(key("stock"), move |message: Message<Raw>| {
            runs.note(&message);
            async {
                tokio::time::sleep(Duration::from_secs(9)).await;
                Ok::<(), Failure>(())
            }
        })
    };
    let here = scene.inbox().limits(limits.clone()).subscribe("orders", slow()).build().unwrap();
    let there = scene.another_inbox().await.limits(limits).subscribe("orders", slow()).build().unwrap();
    here.accept_all(records(30)).await.unwrap();
    let _running = (here.start().await.unwrap(), there.start().await.unwrap());

    scene.settled().await;

    assert_eq!(runs.count(), 30);
    let once = "SELECT count(*) FROM inbox_delivery WHERE attempts = 1 AND errors = 0 AND crashes = 0";
    assert_eq!(scene.database.query_one_i64(once).await, 30);
}

// A process without heartbeats counts as crashed. The server takes its time for each step, and notes the last heartbeat that it has seen.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_expires_a_long_backlog_sends_its_heartbeats_meanwhile() {
    let scene = Scene::new().await;
    let stock = Runs::new().handler("stock").expires_after(Duration::from_secs(3_600));
    let limits = quick().lease(Duration::from_millis(600));
    let inbox = scene.inbox().limits(limits).subscribe("orders", stock).build().unwrap();
    inbox.accept_all([]).await.unwrap();
    // Nothing is claimed, so everything is left to expire.
    scene.store.operate().open_breaker("stock").await.unwrap();
    let slow = "CREATE TABLE beats (seen_at timestamptz);
        CREATE FUNCTION slow_step() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO beats SELECT max(seen_at) FROM inbox_processor;
            PERFORM pg_sleep(0.1);
            RETURN NULL;
        END $$;
        CREATE TRIGGER slow_step AFTER UPDATE ON inbox_delivery FOR EACH ROW
        WHEN (NEW.reason = 'expired' AND NEW.message_seq % 1000 = 0) EXECUTE FUNCTION slow_step();
        INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
        SELECT n, h.id, now() - interval '2 hours' FROM generate_series(1, 12000) n, inbox_handler h";
    scene.database.execute(slow).await;

    let running = inbox.start().await.unwrap();

    scene.until("SELECT (count(*) = 12)::int::bigint FROM beats").await;
    let beats = scene.database.query_one_i64("SELECT count(DISTINCT seen_at) FROM beats").await;
    assert!(beats > 1, "twelve steps, and no heartbeat between them");
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_whose_claim_cannot_be_renewed_is_stopped_before_another_starts() {
    let scene = Scene::new().await;
    let (proxy, cut_off) = scene.store_behind_a_proxy().await;
    let limits = quick().lease(Duration::from_secs(10));
    let story = Story::default();
    let (first, second) = (story.clone(), story.clone());
    let hanging = handler(key("stock"), move |_: Message<Raw>| {
        first.tell("started");
        let stopped = first.tell_at_end("stopped");
        async move {
            let _stopped = stopped;
            std::future::pending::<Result<(), Failure>>().await
        }
    });
    let here = Inbox::builder(cut_off).limits(limits.clone()).subscribe("orders", hanging).build().unwrap();
    let there = scene.another_inbox().await.limits(limits).subscribe(
        "orders",
        handler(key("stock"), move |_: Message<Raw>| {
            second.tell("started elsewhere");
            async { Ok::<(), Failure>(()) }
        }),
    );
    let running = here.start().await.unwrap();
    here.accept(record("a")).await.unwrap();
    story.reached(1).await;

    proxy.black_hole().await;
    let _there = there.build().unwrap().start().await.unwrap();

    scene.settled().await;
    assert_eq!(story.told(), ["started", "stopped", "started elsewhere"]);
    proxy.pass().await;
    running.shutdown(Duration::ZERO).await.unwrap();
    assert_eq!(scene.database.query_texts(COUNTERS).await, ["done errors 0 crashes 0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_was_stopped_for_its_lease_runs_again_and_consumes_no_retry() {
    let scene = Scene::new().await;
    let (proxy, store) = scene.store_behind_a_proxy().await;
    let (runs, gate, stopped) = (Runs::new(), watch::Sender::new(false), Story::default());
    let (noting, opened, telling) = (runs.clone(), gate.clone(), stopped.clone());
    let once_hanging = handler(key("stock"), move |message: Message<Raw>| {
        noting.note(&message);
        let (mut opened, at_end) = (opened.subscribe(), telling.tell_at_end("ended"));
        async move {
            let _at_end = at_end;
            let _ = opened.wait_for(|is_open| *is_open).await;
            Ok::<(), Failure>(())
        }
    });
    let limits = quick().lease(Duration::from_secs(3));
    let inbox = Inbox::builder(store).limits(limits).subscribe("orders", once_hanging).build().unwrap();
    let _running = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();
    runs.reached(1).await;

    proxy.black_hole().await;
    stopped.reached(1).await;
    gate.send_replace(true);
    proxy.pass().await;

    scene.settled().await;
    assert_eq!(runs.count(), 2);
    assert_eq!(scene.database.query_texts(COUNTERS).await, ["done errors 0 crashes 0"]);
}

// A hanging connection must not lose the claims that are renewed through it.
#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_renewal_is_retried_on_a_new_connection_before_the_lease_expires() {
    let scene = Scene::new().await;
    let (proxy, store) = scene.store_behind_a_proxy().await;
    let (runs, gate) = (Runs::new(), watch::Sender::new(false));
    let limits = quick().lease(Duration::from_secs(12));
    let inbox = Inbox::builder(store).limits(limits).subscribe("orders", runs.gated("stock", &gate)).build().unwrap();
    let running = inbox.start().await.unwrap();
    let hangs = proxy.on_next_statement("WITH renewed AS", Fault::Hang);
    inbox.accept(record("a")).await.unwrap();
    runs.reached(1).await;

    let lock = "SELECT (extract(epoch FROM locked_until) * 1000000)::bigint FROM inbox_delivery";
    let first = scene.database.query_one_i64(lock).await;
    hangs.fired().await;
    scene.until(&format!("SELECT (coalesce(({lock}), 0) <> {first})::int::bigint")).await;
    gate.send_replace(true);

    scene.settled().await;
    assert_eq!((runs.count(), scene.count_done_at_first().await), (1, 1));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// A worker that was frozen past its lease must not overwrite the result of the new owner of the delivery.
#[tokio::test(flavor = "multi_thread")]
async fn a_stale_worker_changes_nothing_and_reports_the_lost_claim() {
    let scene = Scene::new().await;
    let worker = Worker::on(&scene).await;
    let (before, after) = finish_while_another_is_frozen(worker, &scene).await;
    assert_eq!(before, after);
    assert_eq!(scene.states().await, ["a stock done"]);
}

// It must not commit the writes of its handler either.
#[tokio::test(flavor = "multi_thread")]
async fn a_stale_transactional_worker_leaves_no_second_effect() {
    let scene = Scene::new().await;
    let worker = Worker { is_transactional: true, ..Worker::on(&scene).await };
    let (before, after) = finish_while_another_is_frozen(worker, &scene).await;
    assert_eq!(before, after);
    assert_eq!(scene.states().await, ["a stock done"]);
    assert_eq!(scene.database.query_texts("SELECT message_id FROM effect").await, ["a"]);
}

/// Freezes a worker at the end of its handler, lets another one finish the delivery, and continues the first. Returns
/// the delivery as it was before that, and after the first has lost its claim.
async fn finish_while_another_is_frozen(worker: Worker, scene: &Scene) -> (Vec<String>, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("gate");
    let worker = Worker { gate: gate.display().to_string(), ..worker };
    accept(scene, &["stock"], vec![order("a", "gate")]).await;
    let frozen = worker.spawn();
    frozen.await_said("at the gate").await;
    frozen.stop();
    let _other = worker.spawn();
    scene.settled().await;
    let delivery = "SELECT d::text FROM inbox_delivery d";
    let before = scene.database.query_texts(delivery).await;
    std::fs::write(&gate, "open").unwrap();
    frozen.cont();
    frozen.await_said("claim lost").await;
    (before, scene.database.query_texts(delivery).await)
}

// During a database outage no process could renew: this alone is no reason to run everything again.
#[tokio::test(flavor = "multi_thread")]
async fn deliveries_finished_during_an_outage_of_two_leases_do_not_run_again() {
    let server = OwnServer::start().await;
    let limits = quick();
    let (runs, gate) = (Runs::new(), watch::Sender::new(false));
    let here = server.inbox().limits(limits.clone());
    let here = here.subscribe("orders", runs.gated("stock", &gate).concurrency(20)).build().unwrap();
    let there = Inbox::builder(server.another_store().await).limits(limits.clone());
    let there = there.subscribe("orders", runs.gated("stock", &gate).concurrency(20)).build().unwrap();
    here.accept_all(records(30)).await.unwrap();
    let _running = (here.start().await.unwrap(), there.start().await.unwrap());
    runs.reached(30).await;

    server.cluster.stop_immediate().await;
    gate.send_replace(true);
    // The outage itself: every lease expires in it.
    tokio::time::sleep(limits.lease * 2).await;
    server.cluster.start_again().await;

    server.settled().await;
    assert_eq!(runs.count(), 30);
    server.assert_done_and_not_charged(30, &["stock"]).await;
}

/// The events, in order.
#[derive(Clone)]
struct Story {
    events: Arc<Mutex<Vec<&'static str>>>,
    count: watch::Sender<usize>,
}

impl Default for Story {
    fn default() -> Self {
        Self { events: Arc::default(), count: watch::Sender::new(0) }
    }
}

impl Story {
    fn tell(&self, event: &'static str) {
        self.events.lock().unwrap().push(event);
        self.count.send_modify(|count| *count += 1);
    }

    /// Records an event when the returned value is dropped for any reason.
    fn tell_at_end(&self, event: &'static str) -> impl Drop + Send + use<> {
        struct AtEnd(Story, &'static str);
        impl Drop for AtEnd {
            fn drop(&mut self) {
                self.0.tell(self.1);
            }
        }
        AtEnd(self.clone(), event)
    }

    fn told(&self) -> Vec<&'static str> {
        self.events.lock().unwrap().clone()
    }

    async fn reached(&self, count: usize) {
        within(self.count.subscribe().wait_for(|current| *current >= count)).await.unwrap();
    }
}

// A process registers its handlers under a lock, before it has any claim. Frozen at that point, it holds the lock.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_frozen_during_registration_does_not_prevent_others_from_starting() {
    let scene = Scene::new().await;
    let worker = Worker::on(&scene).await;
    let client = scene.database.client().await;
    client.batch_execute("BEGIN; LOCK TABLE inbox_handler_key IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let frozen = worker.spawn();
    let sessions = "FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'wharf'";
    scene.until(&format!("SELECT count(*) {sessions} AND wait_event = 'relation'")).await;
    frozen.stop();
    client.batch_execute("ROLLBACK").await.unwrap();
    scene.until(&format!("SELECT count(*) {sessions} AND state = 'idle in transaction'")).await;

    let runs = Runs::new();
    let other = scene.another_inbox().await.subscribe("orders", runs.handler("stock")).build().unwrap();
    other.accept(record("a")).await.unwrap();
    assert_eq!(other.drain().await.unwrap(), 1);
}
