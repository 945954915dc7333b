//! A claim is a lock with an end: kept while its handler runs, given up before it is another's, worth nothing afterwards.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use wharf::{Failure, Inbox, Message, Raw, handler};

use crate::own_server::OwnServer;
use crate::scene::{Runs, Scene, key, quick, record, records, within};
use crate::worker::{Worker, accept, order};
use support::proxy::Fault;

const COUNTERS: &str = "SELECT concat_ws(' ', state, 'errors', errors, 'crashes', crashes) FROM inbox_status";

// A slow handler that is alive must not be taken for a dead one and run a second time.
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
async fn a_handler_that_was_stopped_for_its_lease_runs_again_and_nothing_is_charged() {
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

// One connection that hangs must not cost the claims that are renewed through it.
#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_that_hangs_is_tried_again_on_a_fresh_connection_before_the_lease_ends() {
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

// A worker that was stopped past its lease must not overwrite what the new owner of the delivery did.
#[tokio::test(flavor = "multi_thread")]
async fn a_stale_worker_changes_nothing_and_says_so() {
    let scene = Scene::new().await;
    let worker = Worker::on(&scene).await;
    let (before, after) = finish_behind_the_back_of_a_frozen(worker, &scene).await;
    assert_eq!(before, after);
    assert_eq!(scene.states().await, ["a stock done"]);
}

// Nor may it commit what its handler wrote.
#[tokio::test(flavor = "multi_thread")]
async fn a_stale_transactional_worker_leaves_no_second_effect() {
    let scene = Scene::new().await;
    let worker = Worker { is_transactional: true, ..Worker::on(&scene).await };
    let (before, after) = finish_behind_the_back_of_a_frozen(worker, &scene).await;
    assert_eq!(before, after);
    assert_eq!(scene.states().await, ["a stock done"]);
    assert_eq!(scene.database.query_texts("SELECT message_id FROM effect").await, ["a"]);
}

/// Freezes a worker at the end of its handler, has another one finish the delivery, and thaws the first. Returns the delivery as it
/// was before the thaw and after the first has lost its claim.
async fn finish_behind_the_back_of_a_frozen(worker: Worker, scene: &Scene) -> (Vec<String>, Vec<String>) {
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

// After an outage of the database nobody could renew: that alone is no reason to run everything again.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_finished_while_the_database_was_away_for_two_leases_is_not_run_again() {
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
    // The outage itself: every lock ends in it.
    tokio::time::sleep(limits.lease * 2).await;
    server.cluster.start_again().await;

    server.settled().await;
    assert_eq!(runs.count(), 30);
    server.assert_done_and_not_charged(30, &["stock"]).await;
}

/// What happened, in order.
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

    /// Told when the value is dropped, whyever.
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
