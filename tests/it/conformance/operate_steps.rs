//! Operator actions in steps: a canary replay that stops when it fails, and a backfill of a handler that was added
//! later.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use wharf::operate::{Backfill, Canary, CanaryStop, DeliveryFilter, HandlerStatus, State};
use wharf::{Failure, Record};

use super::scene::{Runs, Scene, record, records};

fn of(handler_key: &str) -> DeliveryFilter {
    DeliveryFilter::default().handler_key(handler_key)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_canary_replay_stops_at_the_first_failure_and_completes_after_a_fix() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let is_mended = Arc::new(AtomicBool::new(false));
    let mended = Arc::clone(&is_mended);
    let answer = move |_: &_| if mended.load(Ordering::SeqCst) { Ok(()) } else { Err(Failure::poison("broken")) };
    let inbox = scene.inbox().subscribe("orders", runs.answering("stock", answer)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(records(40)).await.unwrap();
    scene.settled().await;
    let operator = scene.store.operate().because("canary");
    let canary = Canary::default().steps(vec![1, 10, 20]);

    let ended = operator.replay_canary(&of("stock"), 100, &canary, |_| ControlFlow::Continue(())).await.unwrap();
    assert_eq!((ended.replayed, ended.failed, ended.stopped), (1, 1, Some(CanaryStop::Failures)));
    assert_eq!(scene.count("inbox_poisoned").await, 40);

    is_mended.store(true, Ordering::SeqCst);
    let mut seen = Vec::new();
    let ended = operator.replay_canary(&of("stock"), 35, &canary, |progress| {
            seen.push(progress.replayed);
            ControlFlow::Continue(())
        }).await.unwrap();
    assert_eq!((ended.replayed, ended.done, ended.failed, ended.stopped), (35, 35, 0, None));
    seen.dedup();
    assert_eq!(seen, [1, 11, 31, 35]);
    assert_eq!(scene.count("inbox_poisoned").await, 5);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_canary_replay_makes_no_further_step() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("stock", |_| Err(Failure::poison("broken")));
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept_all(records(3)).await.unwrap();
    inbox.drain().await.unwrap();
    let careful = Canary::default();
    let operator = scene.store.operate();
    let stopped = operator.replay_canary(&of("stock"), 100, &careful, |_| ControlFlow::Break(())).await.unwrap();
    assert_eq!((stopped.replayed, stopped.stopped), (1, Some(CanaryStop::Asked)));
    assert_eq!(scene.count("inbox_poisoned").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_canary_whose_deliveries_no_process_runs_stops() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("stock", |_| Err(Failure::poison("broken")));
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept_all(records(3)).await.unwrap();
    inbox.drain().await.unwrap();
    let canary = Canary::default().step_wait_max(Duration::ZERO);
    let ended = scene.store.operate().replay_canary(&of("stock"), 100, &canary, |_| ControlFlow::Continue(())).await.unwrap();
    assert_eq!((ended.replayed, ended.done, ended.stopped), (1, 0, Some(CanaryStop::Waited)));
    let broken = Canary::default().steps(vec![]);
    assert!(scene.store.operate().replay_canary(&of("stock"), 1, &broken, |_| ControlFlow::Continue(())).await.unwrap_err().is_configuration());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_canary_replay_of_a_message_takes_its_discarded_deliveries_too_and_each_once() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let mail = runs.answering("mail", |_| Err(Failure::poison("broken")));
    let stock = runs.answering("stock", |message| match message.attempt() {
        1 => Err(Failure::poison("broken")),
        _ => Ok(()),
    });
    let inbox = scene.inbox().subscribe("orders", mail).subscribe("orders", stock);
    let inbox = inbox.subscribe("orders", runs.handler("audit")).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all([record("a"), record("b")]).await.unwrap();
    scene.settled().await;
    let operator = scene.store.operate();
    assert_eq!(operator.discard(&of("stock").message_id("a"), 1).await.unwrap(), 1);

    // One at a time: the failure of `mail` neither hides the others nor is replayed again.
    let canary = Canary::default().steps(vec![1]).failure_ratio_max(1.0);
    let of_message = DeliveryFilter::default().message_id("a");
    let ended = operator.replay_canary(&of_message, 100, &canary, |_| ControlFlow::Continue(())).await.unwrap();
    assert_eq!((ended.replayed, ended.done, ended.failed, ended.stopped), (2, 1, 1, None));
    let states = ["a audit done", "a mail poisoned", "a stock done", "b audit done", "b mail poisoned", "b stock poisoned"];
    assert_eq!(scene.states().await, states);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// A poisoned delivery has an age since it was poisoned, any other since its message was received.
#[tokio::test(flavor = "multi_thread")]
async fn an_age_together_with_a_message_id_means_the_same_in_lists_and_actions() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("stock", |_| Err(Failure::poison("broken")));
    let later = runs.handler("mail").delay(Duration::from_secs(3_600));
    let inbox = scene.inbox().subscribe("orders", failing).subscribe("orders", later).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    // `stock` was poisoned just now, and the message is old.
    scene.database.execute("UPDATE inbox_message SET received_at = now() - interval '40 days'").await;
    let day = Duration::from_secs(86_400);
    let operator = scene.store.operate();
    let old = DeliveryFilter::default().message_id("a").older_than(day);
    let young = DeliveryFilter::default().message_id("a").newer_than(day);
    for (filter, handler_key) in [(&old, "mail"), (&young, "stock")] {
        let listed = operator.deliveries(filter, None, 10).await.unwrap();
        let keys: Vec<_> = listed.iter().map(|one| one.handler_key.as_deref().unwrap()).collect();
        assert_eq!(keys, [handler_key]);
    }
    let without_id = operator.deliveries(&DeliveryFilter::default().older_than(day), None, 10).await.unwrap();
    assert_eq!(without_id.len(), 1);
    assert_eq!(operator.replay(&old, 10).await.unwrap(), 0);
    assert_eq!(operator.discard(&old, 10).await.unwrap(), 1);
    assert_eq!(scene.states().await, ["a mail discarded", "a stock poisoned"]);
    // A discarded delivery too has the age of its message.
    assert_eq!(operator.replay(&young, 10).await.unwrap(), 1);
    assert_eq!(operator.replay(&old, 10).await.unwrap(), 1);
    assert_eq!(scene.states().await, ["a mail pending", "a stock pending"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_gives_a_new_handler_each_retained_message_once() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let old = scene.inbox().subscribe(["orders", "returns"], runs.handler("stock")).build().unwrap();
    old.accept_all(records(1_200)).await.unwrap();
    old.accept(Record::new("returns").with_id("r1")).await.unwrap();
    old.drain().await.unwrap();
    // The handler is added later, and has had two keys.
    let mail = Runs::new();
    let new = scene.inbox().subscribe("orders", mail.handler("mail").formerly("post")).build().unwrap();
    new.accept(record("fresh")).await.unwrap();
    new.drain().await.unwrap();

    let operator = scene.store.operate();
    let backfill = Backfill::new("mail", ["orders"]);
    let mut steps = Vec::new();
    assert_eq!(operator.backfill(&backfill, |made| steps.push(made)).await.unwrap(), 1_200);
    assert!(steps.len() >= 3 && steps.is_sorted(), "{steps:?}");
    let former = Backfill::new("post", ["orders"]);
    assert_eq!(operator.backfill(&former, |_| ()).await.unwrap(), 0);
    let young = Backfill::new("stock", ["orders"]).newer_than(Duration::ZERO);
    assert_eq!(operator.backfill(&young, |_| ()).await.unwrap(), 0);
    assert_eq!(new.drain().await.unwrap(), 1_200);
    assert_eq!(mail.ids().len(), 1_201);
    assert_eq!(scene.count("inbox_status WHERE handler_key = 'stock' AND attempts = 1").await, 1_201);
    let nowhere = Backfill::new("mail", [""; 0]);
    assert!(operator.backfill(&nowhere, |_| ()).await.unwrap_err().is_configuration());
    let audited = "SELECT concat_ws(' ', action, affected) FROM inbox_audit ORDER BY id";
    assert_eq!(scene.database.query_texts(audited).await, ["backfill 1200", "backfill 0", "backfill 0"]);
}

// Messages that are accepted later have their delivery.
#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_ends_while_messages_are_accepted_between_its_steps() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let old = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    old.accept_all(records(600)).await.unwrap();
    let new = scene.inbox().subscribe("orders", runs.handler("mail")).build().unwrap();
    new.accept(record("fresh")).await.unwrap();
    let mut steps = Vec::new();
    let accept_more = |made| {
        steps.push(made);
        assert!(steps.len() < 10, "{steps:?}");
        let accepting = new.accept(record(&format!("late {}", steps.len())));
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(accepting)).unwrap();
    };

    let made = scene.store.operate().backfill(&Backfill::new("mail", ["orders"]), accept_more).await.unwrap();

    assert_eq!((made, steps), (600, vec![500, 600]));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_names_paused_unknown_and_poisoned_handlers_until_they_are_resolved() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("mail", |_| Err(Failure::poison("broken")));
    let inbox = scene.inbox().subscribe("orders", failing).subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    let operator = scene.store.operate();
    operator.pause("stock").await.unwrap();
    inbox.drain().await.unwrap();
    let codes = async || {
        let diagnosis = operator.doctor().await.unwrap();
        let codes = diagnosis.symptoms.iter().map(|symptom| symptom.code.to_string()).collect::<Vec<_>>();
        (codes.join(", "), diagnosis.is_well())
    };
    assert_eq!(codes().await, ("poisoned, paused".to_owned(), false));
    operator.discard(&of("mail"), 1).await.unwrap();
    operator.resume("stock").await.unwrap();
    // Between two drains no process is alive.
    assert_eq!(codes().await, ("unknown key".to_owned(), false));
    inbox.drain().await.unwrap();
    assert_eq!(codes().await, (String::new(), true));
    assert_eq!(operator.deliveries(&of("stock"), Some(State::Done), 10).await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_manifest_of_a_build_shows_which_deliveries_it_would_leave_behind() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let old = scene.inbox().subscribe("orders", runs.handler("stock")).subscribe("orders", runs.handler("mail"));
    old.build().unwrap().accept(record("a")).await.unwrap();
    let new = scene.inbox().subscribe("orders", runs.handler("store").formerly("stock")).build().unwrap();
    let stored = scene.store.operate().handlers().await.unwrap();
    let plan = new.manifest().plan(&stored);
    let unsafe_keys: Vec<_> = plan.iter().filter(|one| !one.is_safe()).map(|one| one.handler_key.as_str()).collect();
    assert_eq!(unsafe_keys, ["mail"]);
}

// The cost of counting is bounded, whatever the size of the backlog.
#[tokio::test(flavor = "multi_thread")]
async fn the_backlog_is_counted_exactly_up_to_ten_thousand() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    let operator = scene.store.operate();
    inbox.accept_all(records(9_999)).await.unwrap();
    assert_eq!(operator.handlers().await.unwrap()[0].due, 9_999);
    let more: Vec<Record> = (0..2_100).map(|number| record(&format!("more-{number}"))).collect();
    inbox.accept_all(more).await.unwrap();
    assert_eq!(operator.handlers().await.unwrap()[0].due, HandlerStatus::COUNT_MAX);
    let symptoms = operator.doctor().await.unwrap().symptoms;
    assert!(symptoms.iter().any(|symptom| symptom.what.contains("10,000+ deliveries")), "{symptoms:?}");
    let shown = "SELECT concat_ws('|', due, later, running, poisoned) FROM inbox_backlog";
    assert_eq!(scene.database.query_texts(shown).await, ["10000|0|0|0"]);
}
