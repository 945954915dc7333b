//! Fair handlers: tenants take turns, so that a burst of one does not delay the others. The tests count turns and
//! measure no time.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, watch};
use wharf::batch::batch_handler;
use wharf::flow::{FairKey, RateLimit};
use wharf::operate::Backfill;
use wharf::order::OrderKey;
use wharf::{Failure, Message, Raw, Record, Registration};

use super::effect;
use super::scene::{Db, Runs, Scene, key, quick, record};

fn fair(registration: Registration<Db>) -> Registration<Db> {
    registration.fair_by(FairKey::header("tenant"))
}

/// Records of a tenant, with its name in their ids.
fn of(tenant: &str, count: usize) -> Vec<Record> {
    (0..count).map(|n| record(&format!("{tenant}-{n:03}")).with_header("tenant", tenant.to_owned())).collect()
}

/// How many of these ids belong to a tenant.
fn count(ids: &[String], tenant: &str) -> usize {
    ids.iter().filter(|id| id.starts_with(tenant)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_of_one_tenant_does_not_delay_the_others() {
    const OTHERS: usize = 10;
    let (scene, runs) = (Scene::new().await, Runs::new());
    // Nothing is claimed ahead, so the runs show the order of claims.
    let inbox = scene.inbox().limits(quick().claim_ahead(Duration::ZERO));
    let inbox = inbox.subscribe("orders", fair(runs.handler("mail")).concurrency(4)).build().unwrap();
    let others = (0..OTHERS).flat_map(|n| of(&format!("small{n}"), 3));
    inbox.accept_all(of("burst", 200).into_iter().chain(others)).await.unwrap();

    let running = inbox.start().await.unwrap();
    runs.reached(200 + 3 * OTHERS).await;
    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    // Eleven tenants take turns, three times. Four deliveries run at a time and start in any order.
    let first = &runs.ids()[..3 * (OTHERS + 1) + 4];
    assert_eq!(count(first, "small"), 3 * OTHERS, "{first:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_tenant_is_in_the_next_claim_despite_the_backlog_of_another() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().limits(quick().claim_ahead(Duration::ZERO));
    let inbox = inbox.subscribe("orders", fair(runs.handler("mail")).concurrency(8)).build().unwrap();
    inbox.accept_all(of("burst", 100)).await.unwrap();
    assert_eq!(inbox.run_due().await.unwrap(), 8, "alone, it has everything");

    inbox.accept_all(of("small", 10)).await.unwrap();
    for round in 1..=2 {
        assert_eq!(inbox.run_due().await.unwrap(), 8);
        assert_eq!(count(&runs.ids(), "small"), 4 * round);
    }
    // Two deliveries of the second tenant are left: the claim takes them and its share of the first tenant.
    assert_eq!(inbox.run_due().await.unwrap(), 6);
    assert_eq!(count(&runs.ids(), "small"), 10);
    assert_eq!(inbox.drain().await.unwrap(), 110 - 8 * 3 - 6);
    let burst: Vec<String> = runs.ids().into_iter().filter(|id| id.starts_with("burst")).collect();
    assert_eq!(burst.len(), 100);
}

// The limit of rows is lower than its default, so that a burst of a thousand exceeds it, and the limit of time is higher,
// so that the measured pace of the handler does not matter.
#[tokio::test(flavor = "multi_thread")]
async fn a_small_tenant_waits_for_what_is_claimed_ahead_and_for_one_more_claim_but_not_for_the_burst() {
    const SLOTS: usize = 2;
    const AHEAD: usize = 100;
    const WARM_UP: usize = 200;
    const SMALL: usize = 10;
    let (scene, runs, gate) = (Scene::new().await, Runs::new(), watch::Sender::new(true));
    let limits = quick().claim_ahead_rows(AHEAD).claim_ahead(Duration::from_secs(10));
    let mail = fair(runs.gated("mail", &gate)).concurrency(SLOTS);
    let inbox = scene.inbox().limits(limits).subscribe("orders", mail).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all(of("warm-up", WARM_UP)).await.unwrap();
    scene.settled().await;
    gate.send_replace(false);
    inbox.accept_all(of("burst", 1_000)).await.unwrap();
    let is_full = format!("(count(*) = {})::int::bigint", SLOTS + AHEAD);
    scene.until(&format!("SELECT {is_full} FROM inbox_delivery WHERE locked_until IS NOT NULL")).await;
    inbox.accept_all(of("small", SMALL)).await.unwrap();
    let started = runs.count();
    assert_eq!(started, WARM_UP + SLOTS);

    gate.send_replace(true);

    scene.settled().await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
    let later = &runs.ids()[started..];
    assert_eq!((later.len(), count(later, "small")), (1_000 - SLOTS + SMALL, SMALL));
    // Of a claim that is too small for all ten, at most two thirds are of the burst: with an odd number it has one more.
    // The last claim is at most as large as everything that may be claimed at a time.
    let bound = AHEAD + 3 * SMALL + (AHEAD + SLOTS);
    assert_eq!(count(&later[..bound], "small"), SMALL, "{later:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_one_slot_tenants_take_turns_one_by_one() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().limits(quick().claim_ahead(Duration::ZERO));
    let inbox = inbox.subscribe("orders", fair(runs.handler("mail")).concurrency(1)).build().unwrap();
    inbox.accept_all(of("a", 6).into_iter().chain(of("b", 6)).chain(of("c", 6))).await.unwrap();
    let running = inbox.start().await.unwrap();
    runs.reached(18).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    for turns in runs.ids().chunks(3) {
        assert_eq!(["a", "b", "c"].map(|tenant| count(turns, tenant)), [1; 3], "{:?}", runs.ids());
    }
}

// Each process takes turns on its own, with one slot and so one delivery in a claim. With three tenants, each of them has
// its turn within three claims of a process, whatever the other one claims between.
#[tokio::test(flavor = "multi_thread")]
async fn each_of_two_processes_serves_a_new_tenant_within_the_documented_number_of_claims() {
    const CLAIMS: usize = 3;
    let scene = Scene::new().await;
    let mut processes = Vec::new();
    for _ in 0..2 {
        let (runs, gate) = (Runs::new(), Arc::new(Semaphore::new(0)));
        let mail = fair(runs.held("mail", &gate)).concurrency(1);
        let inbox = scene.another_inbox().await.limits(quick().claim_ahead(Duration::ZERO));
        processes.push((inbox.subscribe("orders", mail).build().unwrap(), runs, gate));
    }
    processes[0].0.accept_all(of("burst", 40).into_iter().chain(of("other", 40))).await.unwrap();
    let mut running = Vec::new();
    for (inbox, runs, _) in &processes {
        running.push(inbox.start().await.unwrap());
        runs.reached(1).await;
    }
    processes[0].0.accept_all(of("small", 6)).await.unwrap();

    for claim in 1..=3 * CLAIMS {
        for (_, runs, gate) in &processes {
            gate.add_permits(1);
            runs.reached(1 + claim).await;
        }
    }

    for (_, runs, _) in &processes {
        for turns in runs.ids()[1..].chunks(CLAIMS) {
            assert_eq!(count(turns, "small"), 1, "{:?}", runs.ids());
        }
    }
    for (running, (_, _, gate)) in running.into_iter().zip(processes) {
        gate.add_permits(100);
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_without_due_deliveries_do_not_delay_others() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", fair(runs.handler("mail")).concurrency(2)).build().unwrap();
    inbox.accept_all((0..900).flat_map(|n| of(&format!("later{n}"), 1))).await.unwrap();
    scene.database.execute("UPDATE inbox_delivery SET due_at = due_at + interval '1 day'").await;
    inbox.accept_all(of("small", 3).into_iter().chain(of("burst", 5))).await.unwrap();

    assert_eq!(inbox.drain().await.unwrap(), 8);
    assert_eq!(count(&runs.ids(), "small"), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_stored_before_the_handler_was_fair_take_turns_with_the_tenants() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let before = scene.inbox().subscribe("orders", runs.handler("mail")).build().unwrap();
    before.accept_all((0..20).map(|n| record(&format!("before-{n}")))).await.unwrap();
    let inbox = scene.inbox().subscribe("orders", fair(runs.handler("mail")).concurrency(4)).build().unwrap();
    inbox.accept_all(of("tenant", 20)).await.unwrap();

    assert_eq!(inbox.run_due().await.unwrap(), 4);
    assert_eq!((count(&runs.ids(), "before"), count(&runs.ids(), "tenant")), (2, 2));
    assert_eq!(inbox.drain().await.unwrap(), 36);
    // When the handler is no longer fair, deliveries with a tenant are claimed like any other.
    inbox.accept_all(of("later", 20)).await.unwrap();
    let after = scene.inbox().subscribe("orders", runs.handler("mail")).build().unwrap();
    assert_eq!(after.drain().await.unwrap(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn backfilled_deliveries_take_turns_like_one_tenant() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let other = scene.inbox().subscribe("orders", Runs::new().handler("other")).build().unwrap();
    other.accept_all((0..30).map(|n| record(&format!("past-{n}")))).await.unwrap();
    other.drain().await.unwrap();
    let inbox = scene.inbox().subscribe("orders", fair(runs.handler("mail")).concurrency(4)).build().unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 0);
    let backfill = Backfill::new("mail", ["orders"]);
    assert_eq!(scene.store.operate().backfill(&backfill, |_| {}).await.unwrap(), 30);
    inbox.accept_all(of("new", 4)).await.unwrap();

    assert_eq!(inbox.run_due().await.unwrap(), 4);
    assert_eq!((count(&runs.ids(), "past"), count(&runs.ids(), "new")), (2, 2));
    assert_eq!(inbox.drain().await.unwrap(), 30);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_and_a_replay_stay_with_their_tenant() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let failing = runs.answering("mail", |message| match message.id() {
        "tired-000" if message.attempt() == 1 => Err(Failure::retry_after(Duration::ZERO, "no")),
        "hopeless-000" if message.attempt() == 1 => Err(Failure::poison("no")),
        _ => Ok(()),
    });
    let inbox = scene.inbox().limits(quick().claim_ahead(Duration::ZERO));
    let inbox = inbox.subscribe("orders", fair(failing).concurrency(3)).build().unwrap();
    inbox.accept_all(of("tired", 1).into_iter().chain(of("hopeless", 1))).await.unwrap();
    assert_eq!(inbox.run_due().await.unwrap(), 2);
    let replay = wharf::operate::DeliveryFilter::default().handler_key("mail");
    assert_eq!(scene.store.operate().replay(&replay, 10).await.unwrap(), 1);
    inbox.accept_all(of("burst", 100)).await.unwrap();

    assert_eq!(inbox.run_due().await.unwrap(), 2 + 1, "of the burst its share");
    assert_eq!((count(&runs.ids(), "tired"), count(&runs.ids(), "hopeless")), (2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn records_without_a_tenant_take_turns_like_one() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", fair(runs.handler("mail")).concurrency(6)).build().unwrap();
    let nobody = (0..20).map(|n| record(&format!("nobody-{n}")));
    let empty = (0..20).map(|n| record(&format!("nobody-e{n}")).with_header("tenant", ""));
    inbox.accept_all(nobody.chain(empty).chain(of("small", 3))).await.unwrap();

    assert_eq!(inbox.run_due().await.unwrap(), 6);
    assert_eq!((count(&runs.ids(), "nobody"), count(&runs.ids(), "small")), (3, 3));
    assert_eq!(inbox.drain().await.unwrap(), 37);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_of_a_fair_batch_handler_and_a_shared_transaction_have_several_tenants() {
    let (scene, calls) = (Scene::new().await, Runs::new());
    effect::prepare(&scene).await;
    let noting = calls.clone();
    let batch = batch_handler(key("mail"), move |messages: Vec<Message<Raw>>| {
        messages.iter().for_each(|message| noting.note(message));
        async { Ok::<(), Failure>(()) }
    });
    let sharing = Runs::new();
    let inbox = scene
        .inbox()
        .subscribe("orders", fair(batch).batch(6, Duration::ZERO).concurrency(1))
        .subscribe("orders", fair(effect::writing_only(&sharing, "stock")).share_transaction(4).concurrency(1))
        .build()
        .unwrap();
    inbox.accept_all(of("burst", 30).into_iter().chain(of("small", 3))).await.unwrap();

    inbox.run_due().await.unwrap();
    assert_eq!(count(&calls.ids(), "small"), 3, "{:?}", calls.ids());
    inbox.drain().await.unwrap();
    assert_eq!((calls.count(), sharing.count(), effect::effects(&scene).await.len()), (33, 33, 33));
}

#[tokio::test(flavor = "multi_thread")]
async fn under_a_rate_limit_tenants_take_turns() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let mail = fair(runs.handler("mail")).rate(RateLimit::per_hour(1).burst(2));
    let inbox = scene.inbox().subscribe("orders", mail).build().unwrap();
    inbox.accept_all(of("burst", 50).into_iter().chain(of("small", 2))).await.unwrap();
    for round in 1..=2 {
        assert_eq!(inbox.drain().await.unwrap(), 2);
        assert_eq!(count(&runs.ids(), "small"), round);
        scene.database.execute("UPDATE inbox_handler SET rate_next_at = NULL").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_tenants_of_a_handler_with_two_ids_take_turns() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    for (name, topic) in [("mail", "orders"), ("post", "returns")] {
        let inbox = scene.inbox().subscribe(topic, fair(runs.handler(name))).build().unwrap();
        let records = of("burst", 20).into_iter().chain(of("small", 2));
        let of_topic = |record: Record| {
            let id = format!("{}-{topic}", String::from_utf8_lossy(record.id().unwrap_or_default()));
            Record::new(topic).with_id(id).with_header("tenant", record.headers().get("tenant").unwrap().to_vec())
        };
        inbox.accept_all(records.map(of_topic)).await.unwrap();
    }
    let united = fair(runs.handler("mail").formerly("post")).concurrency(8);
    let inbox = scene.inbox().subscribe(["orders", "returns"], united).build().unwrap();

    assert_eq!(inbox.run_due().await.unwrap(), 8);
    assert_eq!((count(&runs.ids(), "burst"), count(&runs.ids(), "small")), (4, 4));
    assert_eq!(inbox.drain().await.unwrap(), 36);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_is_ordered_and_fair_or_whose_tenants_cannot_be_read_is_refused() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let both = fair(runs.handler("mail").ordered_by(OrderKey::record_key()));
    let nameless = runs.handler("stock").fair_by(FairKey::header(""));
    let pointed = runs.handler("audit").fair_by(FairKey::json_pointer("tenant"));
    let builder = scene.inbox().subscribe("orders", both).subscribe("orders", nameless).subscribe("orders", pointed);
    let refused = builder.build().unwrap_err().to_string();

    assert!(refused.contains("mail is ordered: it cannot be fair as well"), "{refused}");
    assert!(refused.contains("the tenants of stock: the header name is empty"), "{refused}");
    assert!(refused.contains("the tenants of audit: \"tenant\": a JSON pointer begins with a slash"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_fair_handler_gets_no_delivery_until_it_is_resumed() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", fair(runs.handler("mail"))).build().unwrap();
    inbox.accept_all(of("a", 3).into_iter().chain(of("b", 3))).await.unwrap();
    scene.store.operate().pause("mail").await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 0);
    scene.store.operate().resume("mail").await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 6);
}
