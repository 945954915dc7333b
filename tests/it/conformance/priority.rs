//! Priority as a rule of order: two transactional handlers have one connection between them, and their runs are counted
//! in order.

use std::ops::Range;
use std::time::Duration;

use wharf::flow::{Priority, RateLimit};
use wharf::{Inbox, Record, Registration};

use super::effect::{self, effects};
use super::scene::{Db, Runs, Scene, quick, with_one_handler_connection};

/// The backlog of each handler.
const EACH: usize = 64;

fn of(topic: &'static str, numbers: Range<usize>) -> impl Iterator<Item = Record> {
    numbers.map(move |n| Record::new(topic).with_id(format!("{topic}-{n:03}")))
}

// A claim finds a place for a handler only while a connection is free or kept for it. So the backlogs arrive together, when both handlers are idle and known as fast: one claim takes them all, and from then on priority alone
// decides. While another handler waits, a turn has one run. Of eight turns, one belongs to the handler of low priority;
// other passes over the waiting handlers count too, so the order is not always the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_of_high_priority_leads_and_one_of_low_priority_goes_on_beside_it() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let (runs, nowhere) = (Runs::new(), Runs::new());
    let inbox = Inbox::builder(with_one_handler_connection(&scene).await)
        .limits(quick().claim_ahead(Duration::from_secs(10)))
        .subscribe("low", effect::writing_only(&runs, "low").priority(Priority::Low))
        .subscribe("high", effect::writing_only(&runs, "high").priority(Priority::High))
        .build()
        .unwrap();
    let running = inbox.start().await.unwrap();
    for topic in ["low", "high"] {
        inbox.accept_all(of(topic, 0..EACH)).await.unwrap();
        scene.settled().await;
    }
    // This inbox is not started: its deliveries can only be claimed.
    let elsewhere = scene.another_inbox().await.subscribe("low", nowhere.handler("low"));
    let elsewhere = elsewhere.subscribe("high", nowhere.handler("high")).build().unwrap();
    let both = of("low", EACH..2 * EACH).chain(of("high", EACH..2 * EACH));

    elsewhere.accept_all(both).await.unwrap();

    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    let order: String = runs.ids()[2 * EACH..].iter().map(|id| &id[..1]).collect();
    let low_before_high_has_ended = order[..order.rfind('h').unwrap()].matches('l').count();
    assert!((1..EACH / 2).contains(&low_before_high_has_ended), "{order}");
    assert_eq!((effects(&scene).await.len(), scene.count_done_at_first().await), (4 * EACH, 4 * EACH as i64));
}

/// Turns until every handler has been first: each fourth pass begins with another of the two.
const TURNS: usize = 8;
/// Deliveries that a handler may run with a connection before it returns it.
const RUNS_IN_A_TURN: usize = 32;

// The busy handler always has more deliveries in memory, so the connection is never free when something is claimed.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_gets_the_connection_beside_a_busy_one_also_if_its_deliveries_come_later() {
    for (busy, late) in [(Priority::High, Priority::Low), (Priority::Normal, Priority::Normal), (Priority::Low, Priority::High)] {
        gets_the_connection(busy, |handler| handler.priority(late)).await;
    }
}

// Nothing is claimed ahead for these: no delivery of theirs waits for the connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_with_a_rate_limit_gets_the_connection_beside_a_busy_one() {
    let often = || RateLimit::per_second(10_000);
    gets_the_connection(Priority::Normal, |handler| handler.rate(often())).await;
    gets_the_connection(Priority::Normal, |handler| handler.rate_per_process(often())).await;
}

/// Two handlers share one connection, and `late` sets the options of the second one.
async fn gets_the_connection(busy: Priority, late: impl FnOnce(Registration<Db>) -> Registration<Db>) {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let runs = Runs::new();
    let inbox = Inbox::builder(with_one_handler_connection(&scene).await)
        .limits(quick())
        .subscribe("busy", effect::writing_only(&runs, "busy").priority(busy))
        .subscribe("late", late(effect::writing_only(&runs, "late")))
        .build()
        .unwrap();
    inbox.accept_all(of("busy", 0..800)).await.unwrap();
    let running = inbox.start().await.unwrap();
    runs.reached(100).await;

    inbox.accept_all(of("late", 0..5)).await.unwrap();
    let before = runs.count();

    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    let order: String = runs.ids().iter().map(|id| &id[..1]).collect();
    assert!(order.find('l').unwrap() <= before + TURNS * RUNS_IN_A_TURN, "{order}");
}
