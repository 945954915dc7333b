//! Breakers: while a dependency of a handler is unavailable, only one probe at a time starts, and no retry is consumed.
//!
//! The pause between probes is an hour. A test that needs the next probe moves its time in the database.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use wharf::batch::batch_handler;
use wharf::flow::Breaker;
use wharf::order::OrderKey;
use wharf::{Failure, Message, Raw, Record, Registration, RetryPolicy};

use super::effect::{self, effects};
use super::scene::{Database, Db, Runs, Scene, key, quick, record, records};
use support::events::{Event, Events};

const HOUR: Duration = Duration::from_secs(3_600);
pub const FAILURES: u32 = 3;
pub const SLOTS: usize = 4;
const MESSAGES: usize = 40;

pub const IS_OPEN: &str = "SELECT (count(*) > 0)::int::bigint FROM inbox_handler WHERE breaker_opened_at IS NOT NULL";
const IS_CLOSED: &str = "SELECT (count(*) = 0)::int::bigint FROM inbox_handler WHERE breaker_opened_at IS NOT NULL";
const NOTHING_HELD: &str = "SELECT (count(*) = 0)::int::bigint FROM inbox_delivery WHERE locked_until IS NOT NULL";
pub const PROBE_NOW: &str = "UPDATE inbox_handler SET breaker_probe_at = now()";
/// No process may probe, and the last probe has failed.
const PROBE_HAS_FAILED: &str = "SELECT (count(*) > 0)::int::bigint FROM inbox_handler WHERE breaker_probe_at > now() AND breaker_probe_until IS NULL";
pub const ALL_DUE: &str = "UPDATE inbox_delivery SET due_at = now() WHERE due_at > now() AND locked_until IS NULL AND finished_at IS NULL AND order_hash IS NULL";

/// Whether the dependency of the handlers is available.
#[derive(Clone, Default)]
pub struct Service(Arc<AtomicBool>);

impl Service {
    pub fn returns(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    fn answer(&self) -> Result<(), Failure> {
        match self.0.load(Ordering::SeqCst) {
            true => Ok(()),
            false => Err(Failure::unavailable("the mail server is away")),
        }
    }

    pub fn plain(&self, runs: &Runs) -> Registration<Db> {
        let service = self.clone();
        runs.answering("mail", move |_| service.answer())
    }

    fn transactional(&self, runs: &Runs) -> Registration<Db> {
        let service = self.clone();
        effect::writing(runs, "mail", move |_| {
            let answer = service.answer();
            Box::pin(async { answer })
        })
    }
}

/// One failure would poison, if it consumed a retry.
pub fn breaking(registration: Registration<Db>) -> Registration<Db> {
    let breaker = Breaker::new().failures(FAILURES).probe_every(HOUR);
    registration.concurrency(SLOTS).retry(RetryPolicy::never()).breaker(breaker)
}

/// An outage that begins before the start and ends after three probes.
async fn outage(scene: &Scene, service: &Service, runs: &Runs, registration: Registration<Db>, accepted: Vec<Record>) {
    effect::prepare(scene).await;
    let count = i64::try_from(accepted.len()).unwrap();
    let inbox = scene.inbox().subscribe("orders", breaking(registration)).build().unwrap();
    inbox.accept_all(accepted).await.unwrap();
    let running = inbox.start().await.unwrap();
    scene.until(IS_OPEN).await;
    scene.until(NOTHING_HELD).await;
    let failures_max = usize::try_from(FAILURES).unwrap() + SLOTS;
    assert!(runs.count() <= failures_max, "{} runs", runs.count());
    for _ in 0..2 {
        let before = runs.count();
        scene.database.execute(PROBE_NOW).await;
        scene.until(PROBE_HAS_FAILED).await;
        assert_eq!(runs.count(), before + 1);
    }
    service.returns();

    scene.database.execute(PROBE_NOW).await;

    scene.until(IS_CLOSED).await;
    scene.database.execute(ALL_DUE).await;
    scene.database.execute("UPDATE inbox_delivery SET due_at = now() WHERE due_at < 'infinity' AND due_at > now()").await;
    scene.settled().await;
    assert_eq!(scene.count_done_uncharged().await, count);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_costs_a_few_runs_and_one_probe_at_a_time_and_no_retry() {
    let (scene, service, runs) = (Scene::new().await, Service::default(), Runs::new());
    outage(&scene, &service, &runs, service.plain(&runs), records(MESSAGES)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_an_ordered_handler_costs_no_retry() {
    let (scene, service, runs) = (Scene::new().await, Service::default(), Runs::new());
    let ordered = service.plain(&runs).ordered_by(OrderKey::record_key());
    let keyed = records(MESSAGES).into_iter().enumerate().map(|(n, record)| record.with_key(format!("k{}", n % 10)));
    outage(&scene, &service, &runs, ordered, keyed.collect()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_a_transactional_handler_leaves_one_effect_each() {
    let (scene, service, runs) = (Scene::new().await, Service::default(), Runs::new());
    outage(&scene, &service, &runs, service.transactional(&runs), records(MESSAGES)).await;
    assert_eq!(effects(&scene).await.len(), MESSAGES);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_a_handler_that_shares_transactions_leaves_one_effect_each() {
    let (scene, service, runs) = (Scene::new().await, Service::default(), Runs::new());
    let sharing = service.transactional(&runs).share_transaction(8);
    outage(&scene, &service, &runs, sharing, records(MESSAGES)).await;
    assert_eq!(effects(&scene).await.len(), MESSAGES);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unavailable_batch_opens_the_breaker_and_one_message_probes() {
    let (scene, service, runs) = (Scene::new().await, Service::default(), Runs::new());
    let (answering, noted) = (service.clone(), runs.clone());
    let batches = batch_handler(key("mail"), move |messages: Vec<Message<Raw>>| {
        messages.iter().for_each(|message| noted.note(message));
        let answer = answering.answer();
        async { answer }
    });
    let inbox = scene.inbox().subscribe("orders", breaking(batches).concurrency(1)).build().unwrap();
    inbox.accept_all(records(MESSAGES)).await.unwrap();
    inbox.drain().await.unwrap();
    scene.until(IS_OPEN).await;
    // There is one call, and its one answer counts for each message.
    let before = runs.count();
    assert_eq!(before, MESSAGES);
    scene.database.execute(PROBE_NOW).await;
    scene.database.execute(ALL_DUE).await;
    assert_eq!(inbox.drain().await.unwrap(), 1);
    assert_eq!(runs.count(), before + 1);
    service.returns();
    scene.database.execute(PROBE_NOW).await;
    scene.database.execute(ALL_DUE).await;

    inbox.drain().await.unwrap();

    assert_eq!(scene.count_done_uncharged().await, i64::try_from(MESSAGES).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_handed_over_while_the_breaker_is_open_and_other_handlers_continue() {
    let (scene, service, runs, others) = (Scene::new().await, Service::default(), Runs::new(), Runs::new());
    let builder = scene.inbox().subscribe("orders", breaking(service.plain(&runs)));
    let inbox = builder.subscribe("orders", others.handler("stock")).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(MESSAGES)).await.unwrap();
    scene.until(IS_OPEN).await;

    inbox.accept(record("late")).await.unwrap();

    others.reached(MESSAGES + 1).await;
    let untouched = "inbox_status WHERE message_id = 'late' AND handler_key = 'mail' AND attempts = 0";
    assert_eq!(scene.count(untouched).await, 1);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn timeouts_and_refused_connections_open_the_breaker_and_other_failures_do_not() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let refused = || std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
    let refusing = breaking(runs.answering("refusing", move |_| Err(refused().into())));
    let failing = breaking(runs.answering("failing", |_| Err(Failure::retry("no"))));
    let hanging = breaking(runs.held("hanging", &Arc::new(tokio::sync::Semaphore::new(0))));
    let inbox = scene
        .inbox()
        .subscribe("orders", refusing)
        .subscribe("orders", failing)
        .subscribe("orders", hanging.timeout(Duration::from_millis(1)))
        .build()
        .unwrap();
    inbox.accept_all(records(10)).await.unwrap();

    inbox.drain().await.unwrap();

    let open = "SELECT key FROM inbox_handler WHERE breaker_opened_at IS NOT NULL ORDER BY 1";
    assert_eq!(scene.database.query_texts(open).await, ["hanging", "refusing"]);
    assert_eq!(scene.database.query_texts("SELECT DISTINCT handler_key FROM inbox_poisoned").await, ["failing"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_stays_unavailable_while_others_succeed_is_poisoned_when_its_retries_are_used_up() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let answer = runs.answering("mail", |message| match message.id() {
        "bad" => Err(Failure::unavailable("no such server")),
        _ => Ok(()),
    });
    let retries = 2;
    let mail = breaking(answer).concurrency(1).retry(RetryPolicy::exponential().max_retries(retries));
    let builder = scene.inbox().limits(quick().store_error_limit(1));
    let inbox = builder.subscribe("orders", mail).build().unwrap();
    inbox.accept(record("bad")).await.unwrap();
    // As many as open a breaker consume nothing.
    for number in 0..FAILURES + retries + 1 {
        assert_eq!(scene.count("inbox_poisoned").await, 0);
        inbox.drain().await.unwrap();
        inbox.accept(record(&format!("good {number}"))).await.unwrap();
        inbox.drain().await.unwrap();
        scene.database.execute(ALL_DUE).await;
    }
    let poisoned = "SELECT concat_ws('|', message_id, reason, errors, last_error) FROM inbox_poisoned";
    assert_eq!(scene.database.query_texts(poisoned).await, ["bad|unavailable|3|no such server"]);
    assert_eq!(scene.count("inbox_handler WHERE breaker_opened_at IS NOT NULL").await, 0);
}

// A suspect runs alone. If nothing else is due, it is the probe.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_has_to_run_alone_can_be_the_probe() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", breaking(runs.handler("mail"))).build().unwrap();
    inbox.accept(record("suspect")).await.unwrap();
    scene.database.execute("UPDATE inbox_delivery SET crashes = 2").await;
    assert!(scene.store.operate().open_breaker("mail").await.unwrap());
    let running = inbox.start().await.unwrap();

    scene.database.execute(PROBE_NOW).await;

    scene.settled().await;
    scene.until(IS_CLOSED).await;
    assert_eq!(runs.count(), 1);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_probes_once_and_continues_when_the_probe_succeeds() {
    let (scene, service, runs) = (Scene::new().await, Service::default(), Runs::new());
    let inbox = scene.inbox().subscribe("orders", breaking(service.plain(&runs))).build().unwrap();
    inbox.accept_all(records(MESSAGES)).await.unwrap();
    inbox.drain().await.unwrap();
    let before = runs.count();
    assert_eq!(inbox.drain().await.unwrap(), 0);
    scene.database.execute(PROBE_NOW).await;
    assert_eq!(inbox.drain().await.unwrap(), 1);
    assert_eq!(runs.count(), before + 1);
    service.returns();
    scene.database.execute(PROBE_NOW).await;
    scene.database.execute(ALL_DUE).await;

    assert_eq!(inbox.drain().await.unwrap(), MESSAGES);

    assert_eq!(scene.count_done_uncharged().await, i64::try_from(MESSAGES).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_opens_and_closes_the_breaker_of_any_handler_and_it_is_audited() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("mail")).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    let operator = scene.store.operate().acting_as("alice").because("maintenance");
    assert!(operator.open_breaker("mail").await.unwrap() && !operator.open_breaker("mail").await.unwrap());
    assert_eq!(inbox.drain().await.unwrap(), 0);
    let [status] = &operator.handlers().await.unwrap()[..] else { panic!("one handler") };
    assert!(status.breaker_opened_at.is_some());
    assert_eq!(status.breaker_error.as_deref(), Some("by a person: maintenance"));
    let doctor = operator.doctor().await.unwrap();
    assert!(doctor.symptoms.iter().any(|symptom| symptom.code == "breaker open"), "{doctor:?}");
    assert!(operator.close_breaker("mail").await.unwrap() && !operator.close_breaker("mail").await.unwrap());
    assert_eq!(inbox.drain().await.unwrap(), 1);
    for (act, changed) in [("open_breaker", 1), ("open_breaker", 0), ("close_breaker", 1), ("close_breaker", 0)] {
        assert_eq!(scene.database.act_on_handler(act, "mail", &[]).await, changed);
    }
    let audit = "SELECT concat_ws('|', action, affected, actor) FROM inbox_audit ORDER BY id";
    let by_alice = ["open breaker|1|alice", "open breaker|0|alice", "close breaker|1|alice", "close breaker|0|alice"];
    let in_sql = ["open breaker|1", "open breaker|0", "close breaker|1", "close breaker|0"];
    assert_eq!(scene.database.query_texts(audit).await, [by_alice, in_sql].concat());
    assert!(operator.open_breaker("nobody").await.is_err());
}

// The probe is stored under the lower id, whose breaker was closed.
#[tokio::test(flavor = "multi_thread")]
async fn a_breaker_that_was_open_for_one_of_two_ids_is_probed_and_closes() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    for name in ["post", "mail"] {
        let inbox = scene.another_inbox().await.subscribe("orders", runs.handler(name)).build().unwrap();
        inbox.accept(record(&format!("of {name}"))).await.unwrap();
    }
    assert!(scene.store.operate().open_breaker("mail").await.unwrap());
    scene.database.execute(PROBE_NOW).await;
    let united = breaking(runs.handler("mail")).formerly("post");
    assert_eq!(scene.inbox().subscribe("orders", united).build().unwrap().drain().await.unwrap(), 2);
    assert_eq!(scene.database.query_one_i64(IS_CLOSED).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_breaker_opened_by_a_process_that_knows_one_of_two_ids_is_closed_by_one_that_knows_both() {
    let (scene, service, runs) = (Scene::new().await, Service::default(), Runs::new());
    scene.another_inbox().await.subscribe("orders", runs.handler("post")).build().unwrap().drain().await.unwrap();
    let old = scene.another_inbox().await.subscribe("orders", breaking(service.plain(&runs))).build().unwrap();
    old.accept_all(records(MESSAGES)).await.unwrap();
    let united = breaking(runs.handler("mail")).formerly("post");
    let united = scene.inbox().subscribe("returns", united).build().unwrap();
    united.accept(Record::new("nothing").with_id("a")).await.unwrap();
    old.drain().await.unwrap();
    scene.database.execute(PROBE_NOW).await;
    scene.database.execute(ALL_DUE).await;
    assert_eq!(united.drain().await.unwrap(), MESSAGES);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_is_reported_by_two_events() {
    let (scene, service, runs) = (Scene::new().await, Service::default(), Runs::new());
    let events = Events::capture();
    let inbox = scene.inbox().subscribe("orders", breaking(service.plain(&runs))).build().unwrap();
    inbox.accept_all(records(MESSAGES)).await.unwrap();
    inbox.drain().await.unwrap();
    let says = |error: &str| error == "the mail server is away";
    events.wait_for(|event| event.message == "breaker opened" && event.field("error").is_some_and(says)).await;
    service.returns();
    scene.database.execute(PROBE_NOW).await;

    inbox.drain().await.unwrap();

    events.wait_for(|event| event.message == "breaker closed" && event.has("handler", "mail")).await;
}

/// Waits until a process has used the answer to a heartbeat that it sent after this call.
async fn heartbeat(scene: &Scene) {
    scene.database.execute("CREATE TABLE seen AS SELECT max(alive_until) AS alive_until FROM inbox_processor").await;
    let is_later = "SELECT (count(*) > 0)::int::bigint FROM inbox_processor p, seen s WHERE p.alive_until > s.alive_until";
    // The second one is sent after the answer to the first.
    for _ in 0..2 {
        scene.until(is_later).await;
        scene.database.execute("UPDATE seen SET alive_until = (SELECT max(p.alive_until) FROM inbox_processor p)").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_without_a_free_slot_leaves_the_probe_to_others() {
    let (scene, runs, ticks, others) = (Scene::new().await, Runs::new(), Runs::new(), Runs::new());
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let full = scene.inbox().limits(quick().lease(Duration::from_secs(3)));
    let full = full.subscribe("orders", breaking(runs.held("mail", &gate)).concurrency(1));
    let full = full.subscribe("ticks", ticks.handler("tick")).build().unwrap();
    let running = full.start().await.unwrap();
    full.accept(record("a")).await.unwrap();
    runs.reached(1).await;
    let other = scene.another_inbox().await.subscribe("orders", breaking(others.handler("mail")));
    let other = other.subscribe("ticks", others.handler("tick")).build().unwrap();
    other.accept(record("b")).await.unwrap();
    assert!(scene.store.operate().open_breaker("mail").await.unwrap());
    scene.database.execute(PROBE_NOW).await;

    // The process knows that the breaker is open, and after that it claims for another handler.
    heartbeat(&scene).await;
    other.accept(Record::new("ticks").with_id("t")).await.unwrap();
    ticks.reached(1).await;

    assert_eq!(scene.count("inbox_handler WHERE breaker_probe_until IS NOT NULL").await, 0);
    assert_eq!(other.drain().await.unwrap(), 1);
    assert_eq!(scene.count("inbox_handler WHERE breaker_opened_at IS NOT NULL").await, 0);
    assert_eq!((runs.sorted(), others.sorted()), (vec!["a".to_owned()], vec!["b".to_owned()]));
    gate.add_permits(1);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// A failed request is due again at once. The claim loop must not repeat it, and its claims for other handlers, without a
// pause: the poll interval is an hour, so a correct loop makes a few requests, however long this takes.
#[tokio::test(flavor = "multi_thread")]
async fn a_right_to_probe_that_cannot_be_requested_does_not_keep_the_claim_loop_busy() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let limits = quick().lease(Duration::from_secs(3)).poll(HOUR);
    let inbox = scene.inbox().limits(limits);
    let inbox = inbox.subscribe("orders", breaking(runs.handler("mail"))).subscribe("orders", runs.handler("stock"));
    let inbox = inbox.build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    assert!(scene.store.operate().open_breaker("mail").await.unwrap());
    // The number of the next probe is taken.
    scene.database.execute("UPDATE inbox_handler SET breaker_probe_no = CASE key WHEN 'stock' THEN 10 ELSE 9 END").await;
    scene.database.execute("CREATE UNIQUE INDEX one_probe ON inbox_handler (breaker_probe_no) WHERE breaker_probe_no > 0").await;
    scene.database.execute(PROBE_NOW).await;
    let events = Events::capture();
    let is_refused = |error: &str| error.contains("one_probe") || error.contains("inbox_handler.breaker_probe_no");
    let is_request = |event: &Event| event.has("operation", "breaker") && event.field("error").is_some_and(is_refused);
    let running = inbox.start().await.unwrap();
    events.wait_for(is_request).await;

    heartbeat(&scene).await;

    let requests = events.matching(is_request).len();
    assert!(requests < 20, "{requests} requests");
    assert_eq!(runs.count(), 1);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}
