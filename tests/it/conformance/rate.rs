//! Rate limits: no more deliveries start than the limit allows, across all processes or in one, and operators can
//! change it at run time.
//!
//! The limits of these tests allow a burst and then one start per hour. The tests count starts and never wait for time
//! to pass.

use std::time::Duration;

use wharf::flow::RateLimit;
use wharf::order::OrderKey;
use wharf::{Inbox, Record, Registration};

use super::effect;
use super::scene::{Database, Db, Runs, Scene, record, records};

const BURST: u32 = 5;
const ALLOWED: usize = 5;
const MESSAGES: usize = 30;

/// As if the time for a full burst had passed.
const ALLOW_MORE: &str = "UPDATE inbox_handler SET rate_next_at = NULL";

fn hourly() -> RateLimit {
    RateLimit::per_hour(1).burst(BURST)
}

fn keyed() -> Vec<Record> {
    records(MESSAGES).into_iter().enumerate().map(|(n, record)| record.with_key(format!("k{n}"))).collect()
}

async fn inbox_of(scene: &Scene, registration: Registration<Db>) -> Inbox<Db> {
    scene.another_inbox().await.subscribe("orders", registration).build().unwrap()
}

/// Two inboxes, each with its own store, share the limit.
async fn two_share_the_limit(scene: &Scene, registration: impl Fn() -> Registration<Db>) {
    let first = inbox_of(scene, registration().rate(hourly())).await;
    let second = inbox_of(scene, registration().rate(hourly())).await;
    first.accept_all(keyed()).await.unwrap();

    assert_eq!(first.drain().await.unwrap(), ALLOWED);
    assert_eq!(second.drain().await.unwrap(), 0);
    scene.database.execute(ALLOW_MORE).await;
    assert_eq!(second.drain().await.unwrap(), ALLOWED);
    assert_eq!(first.drain().await.unwrap(), 0);
    assert_eq!(scene.count_done_at_first().await, i64::try_from(2 * ALLOWED).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_share_a_limit() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    two_share_the_limit(&scene, || runs.handler("mail")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ordered_handler_obeys_its_limit() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    two_share_the_limit(&scene, || runs.handler("mail").ordered_by(OrderKey::record_key())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transactional_handler_that_shares_transactions_obeys_its_limit() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    effect::prepare(&scene).await;
    two_share_the_limit(&scene, || effect::writing_only(&runs, "mail").share_transaction(8)).await;
    assert_eq!(effect::effects(&scene).await.len(), 2 * ALLOWED);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_under_two_ids_has_one_limit() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    for (name, topic) in [("mail", "orders"), ("post", "returns")] {
        let inbox = scene.inbox().subscribe(topic, runs.handler(name)).build().unwrap();
        let of_topic = |n: usize| Record::new(topic).with_id(format!("{topic} {n}"));
        inbox.accept_all((0..MESSAGES).map(of_topic)).await.unwrap();
    }
    let united = runs.handler("mail").formerly("post").rate(hourly());
    let inbox = scene.inbox().subscribe(["orders", "returns"], united).build().unwrap();

    assert_eq!(inbox.drain().await.unwrap(), ALLOWED);
}

// The claim that finds a suspect takes it from the limit; the claim with which it runs alone must not take it again.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_has_to_run_alone_is_taken_from_the_limit_once() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let one_an_hour = runs.handler("mail").rate(RateLimit::per_hour(1).burst(1));
    let inbox = inbox_of(&scene, one_an_hour).await;
    inbox.accept_all(records(2)).await.unwrap();
    scene.database.execute("UPDATE inbox_delivery SET crashes = 2").await;

    inbox.drain().await.unwrap();

    assert_eq!((runs.count(), scene.count("inbox_status WHERE state = 'done'").await), (1, 1));
    scene.database.execute(ALLOW_MORE).await;
    inbox.drain().await.unwrap();
    assert_eq!((runs.count(), scene.count("inbox_status WHERE state = 'done'").await), (2, 2));
}

// Claims read the limit of the lower id.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_an_operator_set_for_one_of_two_keys_applies_when_both_are_one_handler() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    for name in ["post", "mail"] {
        let inbox = inbox_of(&scene, runs.handler(name)).await;
        inbox.accept_all((0..MESSAGES).map(|n| record(&format!("{name} {n}")))).await.unwrap();
    }
    let operator = scene.store.operate();
    assert!(operator.limit_rate("mail", hourly()).await.unwrap());
    let united = async || inbox_of(&scene, runs.handler("mail").formerly("post")).await;

    assert_eq!(united().await.drain().await.unwrap(), ALLOWED);

    // A restart grants no new burst.
    assert_eq!(united().await.drain().await.unwrap(), 0);
    assert!(operator.reset_rate("mail").await.unwrap());
    assert_eq!(united().await.drain().await.unwrap(), 2 * MESSAGES - ALLOWED);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_set_again_in_sql_changes_nothing_and_grants_no_new_burst() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = inbox_of(&scene, runs.handler("mail")).await;
    inbox.accept_all(records(MESSAGES)).await.unwrap();
    let set = async |per_sec| {
        let more = [("per_sec", per_sec), ("burst", "3")];
        scene.database.act_on_handler("set_rate", "mail", &more).await
    };
    assert_eq!((set("0.001").await, inbox.drain().await.unwrap()), (1, 3));

    assert_eq!((set("0.001").await, inbox.drain().await.unwrap()), (0, 0));

    assert_eq!((set("0.002").await, inbox.drain().await.unwrap()), (1, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn hand_over_obeys_both_kinds_of_limits_and_other_handlers_continue() {
    let (scene, rated, throttled, free) = (Scene::new().await, Runs::new(), Runs::new(), Runs::new());
    let inbox = scene
        .inbox()
        .subscribe("orders", rated.handler("rated").rate(hourly()))
        .subscribe("orders", throttled.handler("throttled").rate_per_process(hourly()))
        .subscribe("orders", free.handler("free"))
        .build()
        .unwrap();
    let running = inbox.start().await.unwrap();
    for record in records(MESSAGES) {
        inbox.accept(record).await.unwrap();
    }
    free.reached(MESSAGES).await;
    rated.reached(ALLOWED).await;
    throttled.reached(ALLOWED).await;
    // Claims continue for at least as long as this takes.
    inbox.accept_all((0..100).map(|number| record(&format!("late {number}")))).await.unwrap();
    free.reached(MESSAGES + 100).await;

    running.shutdown(Duration::from_secs(5)).await.unwrap();

    assert_eq!((rated.count(), throttled.count()), (ALLOWED, ALLOWED));
    assert_eq!(scene.count("inbox_delivery WHERE attempts > 0 AND finished_at IS NULL").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_per_process_applies_to_each_process() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let first = inbox_of(&scene, runs.handler("mail").rate_per_process(hourly())).await;
    let second = inbox_of(&scene, runs.handler("mail").rate_per_process(hourly())).await;
    first.accept_all(records(MESSAGES)).await.unwrap();

    assert_eq!((first.drain().await.unwrap(), first.drain().await.unwrap()), (ALLOWED, 0));
    assert_eq!((second.drain().await.unwrap(), second.drain().await.unwrap()), (ALLOWED, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_consumes_the_limit_only_for_deliveries_it_finds() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = inbox_of(&scene, runs.handler("mail").rate(hourly()).rate_per_process(hourly())).await;
    assert_eq!(inbox.drain().await.unwrap(), 0);
    for number in 0..ALLOWED {
        inbox.accept(record(&format!("m{number}"))).await.unwrap();
        assert_eq!(inbox.drain().await.unwrap(), 1);
    }
    inbox.accept(record("one too many")).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raised_limit_applies_at_once_to_running_processes() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = inbox_of(&scene, runs.handler("mail").rate(hourly())).await;
    inbox.accept_all(records(MESSAGES)).await.unwrap();
    let running = inbox.start().await.unwrap();
    runs.reached(ALLOWED).await;

    assert!(scene.store.operate().limit_rate("mail", RateLimit::per_second(10_000)).await.unwrap());

    scene.settled().await;
    assert_eq!(runs.count(), MESSAGES);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_set_by_an_operator_survives_restarts_until_it_is_reset_and_is_audited() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let build = || runs.handler("mail").rate(hourly());
    inbox_of(&scene, build()).await.accept_all(records(MESSAGES)).await.unwrap();
    let operator = scene.store.operate().acting_as("alice");
    let status = async || {
        let status = operator.handlers().await.unwrap().remove(0);
        (status.rate_per_sec.map(|rate| (rate * 3600.0).round()), status.rate_burst, status.is_rate_set)
    };
    assert_eq!(status().await, (Some(1.0), Some(BURST), false));
    let two = RateLimit::per_hour(1).burst(2);
    assert!(operator.limit_rate("mail", two).await.unwrap() && !operator.limit_rate("mail", two).await.unwrap());
    assert_eq!(inbox_of(&scene, build()).await.drain().await.unwrap(), 2);
    assert_eq!(status().await, (Some(1.0), Some(2), true));
    assert!(operator.reset_rate("mail").await.unwrap());
    assert_eq!(inbox_of(&scene, build()).await.drain().await.unwrap(), ALLOWED);
    assert!(operator.lift_rate("mail").await.unwrap());
    assert_eq!(status().await, (None, None, true));
    assert_eq!(inbox_of(&scene, build()).await.drain().await.unwrap(), MESSAGES - ALLOWED - 2);
    let audit = "SELECT concat_ws('|', action, affected, filter->>'burst', actor) FROM inbox_audit ORDER BY id";
    let told = ["set rate|1|2|alice", "set rate|0|2|alice", "set rate|1|alice", "set rate|1|alice"];
    assert_eq!(scene.database.query_texts(audit).await, told);
    assert!(operator.limit_rate("mail", RateLimit::per_second(0)).await.is_err());
    assert!(operator.limit_rate("nobody", two).await.is_err());
}

// The claim of a process that does not know the limit yet skips the handler.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_set_in_sql_applies_to_a_handler_that_had_none() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = inbox_of(&scene, runs.handler("mail")).await;
    inbox.accept_all(records(MESSAGES)).await.unwrap();

    scene.database.act_on_handler("set_rate", "mail", &[("per_sec", "0.001"), ("burst", "3")]).await;

    assert_eq!(inbox.drain().await.unwrap(), 3);
    scene.database.act_on_handler("set_rate", "mail", &[("per_sec", "NULL")]).await;
    assert_eq!(inbox.drain().await.unwrap(), MESSAGES - 3);
    assert_eq!(scene.count("inbox_audit WHERE action = 'set rate' AND affected = 1").await, 2);
}
