//! Operator actions of the library: show, replay, discard, pause. All of them are fenced, bounded, audited, and
//! harmless when repeated.

use std::time::Duration;

use wharf::operate::{DeliveryFilter, QuarantineFilter, State, fingerprint};
use wharf::{Failure, Record, RetryPolicy};

use super::scene::{Runs, Scene, key, record, within};

/// Deliveries of two handlers, poisoned by two kinds of errors.
async fn poisoned_scene() -> (Scene, Runs) {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let timeouts = runs.answering("mail", |message| Err(Failure::poison(format!("timeout of {}", message.id()))));
    let refusals = runs.answering("stock", |message| match message.id() {
        "m1" => Err(Failure::poison("out of stock")),
        _ => Ok(()),
    });
    let inbox = scene.inbox().subscribe("orders", timeouts).subscribe("orders", refusals).build().unwrap();
    inbox.accept_all(["m1", "m2", "m3"].map(record)).await.unwrap();
    inbox.drain().await.unwrap();
    (scene, runs)
}

fn of(handler_key: &str) -> DeliveryFilter {
    DeliveryFilter::default().handler_key(handler_key)
}

fn everything() -> DeliveryFilter {
    DeliveryFilter::all()
}

#[tokio::test(flavor = "multi_thread")]
async fn poisoned_deliveries_are_found_by_handler_error_fingerprint_reason_topic_and_age() {
    let (scene, _runs) = poisoned_scene().await;
    let operator = scene.store.operate();
    let found = async |filter: DeliveryFilter| {
        let list = operator.deliveries(&filter, Some(State::Poisoned), 100).await.unwrap();
        list.into_iter()
            .map(|found| format!("{} {}", found.message_id.unwrap(), found.handler_key.unwrap()))
            .collect::<Vec<_>>()
    };
    let nothing = DeliveryFilter::default;
    assert_eq!(found(nothing()).await.len(), 4);
    assert_eq!(found(of("stock")).await, ["m1 stock"]);
    assert_eq!(found(nothing().error("TIMEOUT")).await, ["m1 mail", "m2 mail", "m3 mail"]);
    assert_eq!(found(nothing().error("100%")).await, [""; 0]);
    assert_eq!(found(nothing().fingerprint(fingerprint("timeout of m77"))).await.len(), 3);
    assert_eq!(found(nothing().message_id("m1")).await.len(), 2);
    assert_eq!(found(nothing().reason("permanent")).await.len(), 4);
    assert_eq!(found(nothing().topic("returns")).await.len(), 0);
    assert_eq!(found(nothing().source("orders")).await.len(), 4);
    assert_eq!(found(nothing().older_than(Duration::from_secs(3600))).await.len(), 0);
    assert_eq!(found(nothing().newer_than(Duration::from_secs(3600))).await.len(), 4);
    assert_eq!(operator.deliveries(&nothing(), Some(State::Poisoned), 2).await.unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn poisoned_deliveries_are_counted_by_error() {
    let (scene, _runs) = poisoned_scene().await;
    let errors = scene.store.operate().poisoned_errors().await.unwrap();
    let told: Vec<_> = errors.iter().map(|e| (e.handler_key.as_deref().unwrap(), e.poisoned)).collect();
    assert_eq!(told, [("mail", 3), ("stock", 1)]);
    assert_eq!(errors[0].fingerprint, Some(fingerprint("timeout of m1")));
    assert_eq!(errors[1].example.as_deref(), Some("out of stock"));
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_are_listed_by_state_and_message() {
    let (scene, _runs) = poisoned_scene().await;
    let operator = scene.store.operate();
    let count = async |filter: &DeliveryFilter, state| operator.deliveries(filter, state, 100).await.unwrap().len();
    let m1 = DeliveryFilter::default().message_id("m1");
    assert_eq!(count(&DeliveryFilter::default(), None).await, 6);
    assert_eq!(count(&DeliveryFilter::default(), Some(State::Done)).await, 2);
    assert_eq!(count(&of("stock"), Some(State::Done)).await, 2);
    assert_eq!(count(&DeliveryFilter::default(), Some(State::Pending)).await, 0);
    assert_eq!(count(&m1, None).await, 2);
    operator.replay(&of("mail"), 2).await.unwrap();
    assert_eq!(count(&DeliveryFilter::default(), Some(State::Pending)).await, 2);
    assert_eq!(count(&m1, Some(State::Pending)).await, 1);
    assert_eq!(count(&of("mail"), Some(State::Running)).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_is_bounded_by_filter_and_limit_and_changes_nothing_when_repeated() {
    let (scene, _runs) = poisoned_scene().await;
    let operator = scene.store.operate().acting_as("alice").because("the mail server is back");
    let timeouts = of("mail").error("timeout");
    assert_eq!(operator.replay(&timeouts, 2).await.unwrap(), 2);
    assert_eq!(operator.replay(&timeouts, 10).await.unwrap(), 1);
    assert_eq!(operator.replay(&timeouts, 10).await.unwrap(), 0);
    assert_eq!(scene.count("inbox_status WHERE state = 'pending'").await, 3);
    assert_eq!(scene.count("inbox_status WHERE state = 'poisoned' AND handler_key = 'stock'").await, 1);
    let audit =
        "SELECT concat_ws('|', action, affected, actor, because, filter->>'error') FROM inbox_audit ORDER BY id";
    let told = |affected: u8| format!("replay|{affected}|alice|the mail server is back|timeout");
    assert_eq!(scene.database.query_texts(audit).await, [told(2), told(1), told(0)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_keeps_the_previous_state_in_the_history() {
    let (scene, runs) = poisoned_scene().await;
    let operator = scene.store.operate().acting_as("alice").because("again");
    operator.replay(&of("stock"), 10).await.unwrap();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.drain().await.unwrap();
    let m1 = of("stock").message_id("m1");
    let found = operator.deliveries(&m1, None, 10).await.unwrap().remove(0);
    assert_eq!((found.state, found.attempts, found.errors, found.replays), (State::Done, 2, 0, 1));
    let details = operator.delivery(&found).await.unwrap().unwrap();
    assert_eq!(details.record.unwrap().payload(), Some(&b"payload of m1"[..]));
    let [before] = details.history.as_slice() else { panic!("{:?}", details.history) };
    assert_eq!((before.state, before.attempts, before.errors), (State::Poisoned, 1, 1));
    assert_eq!(before.last_error.as_deref(), Some("out of stock"));
    assert_eq!((before.actor.as_deref(), before.because.as_deref()), (Some("alice"), Some("again")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_discarded_delivery_is_done_and_can_be_replayed_by_its_message() {
    let (scene, _runs) = poisoned_scene().await;
    let operator = scene.store.operate().because("a test order");
    assert_eq!(operator.discard(&of("stock"), 10).await.unwrap(), 1);
    assert_eq!(operator.discard(&of("stock"), 10).await.unwrap(), 0);
    let m1 = of("stock").message_id("m1");
    let found = operator.deliveries(&m1, None, 10).await.unwrap().remove(0);
    assert_eq!((found.state, found.reason.as_deref()), (State::Discarded, Some("a test order")));
    // Discarding does not run it: it ran once.
    assert_eq!((found.attempts, found.errors), (1, 1));
    assert_eq!(operator.replay(&m1, 10).await.unwrap(), 1);
    assert_eq!(operator.deliveries(&m1, Some(State::Pending), 10).await.unwrap().len(), 1);
    // By message, a pending delivery can be discarded too.
    assert_eq!(operator.discard(&m1, 10).await.unwrap(), 1);
    assert_eq!(scene.count("inbox_history").await, 3);
}

// An operator action must not change a delivery while a process runs it.
#[tokio::test(flavor = "multi_thread")]
async fn a_running_delivery_is_neither_replayed_nor_discarded() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let gate = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
    let inbox = scene.inbox().subscribe("orders", runs.held("stock", &gate)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("m1")).await.unwrap();
    runs.reached(1).await;
    let operator = scene.store.operate();
    let m1 = DeliveryFilter::default().message_id("m1");
    assert_eq!(operator.deliveries(&m1, Some(State::Running), 10).await.unwrap().len(), 1);
    assert_eq!(operator.discard(&m1, 10).await.unwrap(), 0);
    assert_eq!(operator.replay(&m1, 10).await.unwrap(), 0);
    gate.add_permits(1);
    scene.settled().await;
    assert_eq!(scene.states().await, ["m1 stock done"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_filter_or_an_unknown_handler_key_is_refused() {
    let (scene, _runs) = poisoned_scene().await;
    let operator = scene.store.operate();
    let error = operator.replay(&DeliveryFilter::default(), 10).await.unwrap_err();
    assert!(error.is_configuration() && error.to_string().contains("the filter is empty"), "{error}");
    let error = operator.discard(&of("mial"), 10).await.unwrap_err();
    assert!(error.is_configuration() && error.to_string().contains("mail, stock"), "{error}");
    assert!(operator.discard_quarantined(&QuarantineFilter::default(), 10).await.unwrap_err().is_configuration());
    assert!(operator.pause("mial").await.unwrap_err().is_configuration());
    assert_eq!(scene.count("inbox_audit").await, 0);
    assert_eq!(operator.discard(&everything(), 10).await.unwrap(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_handler_waits_and_continues_when_it_is_resumed() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock").formerly("store")).build().unwrap();
    inbox.accept(record("m1")).await.unwrap();
    let operator = scene.store.operate();
    assert!(operator.pause("store").await.unwrap());
    assert!(!operator.pause("stock").await.unwrap());
    assert_eq!(inbox.drain().await.unwrap(), 0);
    let [stock] = operator.handlers().await.unwrap().try_into().unwrap();
    assert!(stock.paused_at.is_some());
    assert_eq!((stock.due, stock.former_keys), (1, vec!["store".to_owned()]));
    assert!(operator.resume("stock").await.unwrap());
    assert!(!operator.resume("stock").await.unwrap());
    assert_eq!(inbox.drain().await.unwrap(), 1);
    let acts = scene.database.query_texts("SELECT concat_ws(' ', action, affected) FROM inbox_audit ORDER BY id").await;
    assert_eq!(acts, ["pause 1", "pause 0", "resume 1", "resume 0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_backlog_of_handlers_and_the_rates_of_live_processes_are_shown() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let policy = RetryPolicy::exponential().max_retries(3).delay_by(|_, _| Some(Duration::from_secs(3600)));
    let failing = runs.answering("mail", |_| Err(Failure::retry("no"))).retry(policy);
    let stock = runs.handler("stock");
    let inbox = scene.inbox().subscribe("orders", failing).subscribe(["orders", "more"], stock).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(["m1", "m2"].map(record)).await.unwrap();
    runs.reached(4).await;
    // A report covers the time since the previous one, so there must be new runs until it is read.
    let told = "inbox_processor WHERE CAST(report->'rates'->'stock'->>'done_per_sec' AS real) > 0";
    within(async {
        for number in 0.. {
            inbox.accept(Record::new("more").with_id(number.to_string())).await.unwrap();
            if scene.count(told).await > 0 {
                break;
            }
        }
    })
    .await;
    scene
        .until("SELECT (count(*) = 0)::int::bigint FROM inbox_status WHERE handler_key = 'stock' AND state <> 'done'")
        .await;
    let operator = scene.store.operate();
    let [mail, stock] = operator.handlers().await.unwrap().try_into().unwrap();
    assert_eq!((mail.due, mail.later, mail.running, mail.poisoned, mail.processors), (0, 2, 0, 0, 1));
    assert!(mail.next_due_at.is_some() && mail.oldest_due_secs.is_none());
    assert_eq!((stock.due, stock.later, stock.processors), (0, 0, 1));
    let [processor] = operator.processors().await.unwrap().try_into().unwrap();
    assert!(processor.is_alive && processor.report.unwrap().pool_size > 0);
    assert_eq!(processor.handler_keys, ["mail", "stock"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quarantined_record_is_shown_completely_and_leaves_only_by_an_operator_action() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    let broken = Record::new("orders").with_key("k").with_header("h", "v").with_payload(vec![0xff, 0]).with_position(3, 17);
    inbox.accept_or_quarantine([broken, record("fine")]).await.unwrap();
    let operator = scene.store.operate().because("junk");
    let all = QuarantineFilter::default();
    let [found] = operator.quarantined(&all, 10).await.unwrap().try_into().unwrap();
    assert_eq!(
        (found.reason.as_str(), found.kafka_offset, found.payload_bytes),
        ("missing identity", Some(17), Some(2))
    );
    let details = operator.quarantined_record(found.id).await.unwrap().unwrap();
    assert_eq!((details.record.payload(), details.record.key()), (Some(&[0xff, 0][..]), Some(&b"k"[..])));
    assert_eq!(details.record.headers().len(), 1);
    let elsewhere = all.clone().topic("returns");
    assert_eq!(operator.discard_quarantined(&elsewhere, 10).await.unwrap(), 0);
    let this = all.clone().id(found.id);
    assert_eq!(operator.discard_quarantined(&this, 10).await.unwrap(), 1);
    assert_eq!(operator.quarantined(&all, 10).await.unwrap(), []);
    let acts = "SELECT concat_ws('|', action, affected, because) FROM inbox_audit ORDER BY id";
    assert_eq!(scene.database.query_texts(acts).await, ["discard quarantined|0|junk", "discard quarantined|1|junk"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_quarantined_record_is_accepted_by_the_current_policy_or_stays_with_an_updated_reason() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    let with_id = Record::new("orders").with_header("id", "m1").with_payload("one");
    let without = Record::new("orders").with_payload("two");
    inbox.accept_or_quarantine([with_id, without]).await.unwrap();
    assert_eq!(scene.count("inbox_quarantine WHERE reason = 'missing identity'").await, 2);

    // A new build knows where the identity is.
    let identity = wharf::Identity::header("id");
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).identity("orders", identity).build().unwrap();
    let running = inbox.start().await.unwrap();
    let all = QuarantineFilter::all();
    assert_eq!(scene.store.operate().replay_quarantined(&all, 10).await.unwrap(), 2);
    runs.reached(1).await;
    scene.until("SELECT count(*) FROM inbox_quarantine WHERE replay_asked_at IS NULL AND replays = 1").await;
    // The other record leaves the quarantine when its message exists, which its handler may have received by then.
    scene.until("SELECT (count(*) = 1)::int::bigint FROM inbox_quarantine").await;
    scene.settled().await;
    assert_eq!(scene.states().await, ["m1 stock done"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_conflict_stays_one_quarantined_record() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let identity = || wharf::Identity::header("id");
    let inbox =
        scene.inbox().subscribe("orders", runs.handler("stock")).identity("orders", identity()).build().unwrap();
    let one = |payload: &'static str| Record::new("orders").with_header("id", "m1").with_payload(payload);
    inbox.accept_or_quarantine([one("one"), one("two")]).await.unwrap();
    let running = inbox.start().await.unwrap();
    let all = QuarantineFilter::all();
    for replays in 1..=2 {
        assert_eq!(scene.store.operate().replay_quarantined(&all, 10).await.unwrap(), 1);
        scene
            .until(&format!(
                "SELECT count(*) FROM inbox_quarantine WHERE replay_asked_at IS NULL AND replays = {replays}"
            ))
            .await;
    }
    assert_eq!(scene.count("inbox_quarantine WHERE reason = 'conflict'").await, 1);
    assert_eq!(scene.count("inbox_message").await, 1);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_examines_the_database() {
    let (scene, _runs) = poisoned_scene().await;
    let facts = scene.store.operate().facts().await.unwrap();
    assert!(!facts.is_read_only && facts.dead_claims.is_empty() && facts.unsafe_settings.is_empty(), "{facts:?}");
    assert_eq!(facts.lags.len(), 1);
    assert_eq!(facts.lags[0].handler_key, key("stock").as_str());
}
