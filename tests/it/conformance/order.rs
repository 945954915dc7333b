//! Ordered handlers: deliveries of one key run one at a time, in accept order, whatever their outcomes. Other keys and
//! handlers are not delayed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Semaphore;
use wharf::operate::DeliveryFilter;
use wharf::order::{OnPoison, OrderKey};
use wharf::{Failure, Message, Raw, Receipt, Record, Registration, RetryPolicy, handler};

use super::effect;
use super::scene::{Database, Db, Runs, Scene, key, quick, record};

/// A record with this key.
fn of(key: &str, id: &str) -> Record {
    record(id).with_key(key.to_owned())
}

fn in_order(registration: Registration<Db>) -> Registration<Db> {
    registration.ordered_by(OrderKey::record_key())
}

fn passing(registration: Registration<Db>) -> Registration<Db> {
    registration.ordered_by(OrderKey::record_key().on_poison(OnPoison::Pass))
}

/// The runs of each key: which messages started, in order, and how many ran at a time.
#[derive(Clone, Default)]
struct Turns {
    begun: Arc<Mutex<HashMap<String, Vec<String>>>>,
    running: Arc<Mutex<HashMap<String, usize>>>,
    /// Runs that started while another run of their key was active.
    beside: Arc<AtomicUsize>,
}

impl Turns {
    /// A handler that records its run, works for a moment, and fails the first attempt of some messages.
    fn handler(&self, name: &'static str, fails_first: fn(&str) -> bool) -> Registration<Db> {
        let turns = self.clone();
        let work = move |message: Message<Raw>| {
            let turns = turns.clone();
            async move {
                let key = String::from_utf8(message.key().unwrap_or_default().to_vec()).unwrap();
                turns.begun.lock().unwrap().entry(key.clone()).or_default().push(message.id().to_owned());
                let others = std::mem::replace(turns.running.lock().unwrap().entry(key.clone()).or_default(), 1);
                turns.beside.fetch_add(others, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(1)).await;
                turns.running.lock().unwrap().insert(key, 0);
                match fails_first(message.id()) && message.attempt() == 1 {
                    true => Err(Failure::retry_after(Duration::ZERO, "not yet")),
                    false => Ok(()),
                }
            }
        };
        in_order(handler(key(name), work))
    }

    /// The messages of each key in the order of their start, without repeated attempts.
    fn by_key(&self) -> HashMap<String, Vec<String>> {
        let mut begun = self.begun.lock().unwrap().clone();
        begun.values_mut().for_each(Vec::dedup);
        begun
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn four_processors_run_deliveries_of_a_key_one_at_a_time_in_accept_order() {
    const KEYS: usize = 40;
    let scene = Scene::new().await;
    let turns = Turns::default();
    let ordered = || turns.handler("stock", |id| id.ends_with('7'));
    let mut running = Vec::new();
    for _ in 0..4 {
        let builder = scene.another_inbox().await.limits(quick().lease(Duration::from_secs(30)));
        running.push(builder.subscribe("orders", ordered()).build().unwrap().start().await.unwrap());
    }
    let inbox = scene.inbox().subscribe("orders", ordered()).build().unwrap();
    // At their accept, some keys have waiting deliveries, others running ones, others none.
    for part in 0..10 {
        let records = (0..100).map(|n| part * 100 + n).map(|n| of(&format!("k{}", n % KEYS), &format!("m{n:04}")));
        inbox.accept_all(records).await.unwrap();
    }
    scene.settled().await;
    for running in running {
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
    assert_eq!(turns.beside.load(Ordering::SeqCst), 0);
    for (key, begun) in turns.by_key() {
        let number: usize = key[1..].parse().unwrap();
        let accepted: Vec<String> = (0..1_000 / KEYS).map(|n| format!("m{:04}", n * KEYS + number)).collect();
        assert_eq!(begun, accepted, "{key}");
    }
    assert_eq!(scene.count("inbox_status WHERE state = 'done'").await, 1_000);
}

// The order of two records that are accepted at the same time is not defined. They never run at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn accepts_that_race_for_one_key_lose_nothing_and_never_run_two_at_a_time() {
    let scene = Scene::new().await;
    let turns = Turns::default();
    let mut accepting = Vec::new();
    let mut running = Vec::new();
    for process in 0..3 {
        let builder = scene.another_inbox().await.limits(quick().lease(Duration::from_secs(30)));
        let inbox = builder.subscribe("orders", turns.handler("stock", |_| false)).build().unwrap();
        running.push(inbox.start().await.unwrap());
        accepting.push(tokio::spawn(async move {
            for number in 0..60 {
                inbox.accept(of(&format!("k{}", number % 2), &format!("p{process}-{number:02}"))).await.unwrap();
            }
        }));
    }
    for accepting in accepting {
        accepting.await.unwrap();
    }
    scene.settled().await;
    for running in running {
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
    assert_eq!(turns.beside.load(Ordering::SeqCst), 0);
    for (key, begun) in turns.by_key() {
        assert_eq!(begun.len(), 90, "{key}");
        // Each process accepted its own records one after another.
        for process in ["p0", "p1", "p2"] {
            let own: Vec<&String> = begun.iter().filter(|id| id.starts_with(process)).collect();
            assert!(own.is_sorted(), "{key}: {own:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poisoned_head_holds_its_key_until_it_is_discarded_and_delays_no_other_key() {
    let scene = Scene::new().await;
    let (ordered, free) = (Runs::new(), Runs::new());
    let hopeless = ordered.answering("stock", |message| match message.id() {
        "a1" => Err(Failure::poison("no")),
        _ => Ok(()),
    });
    let inbox = scene.inbox().subscribe("orders", in_order(hopeless)).subscribe("orders", free.handler("mail"));
    let inbox = inbox.build().unwrap();
    inbox.accept_all([of("a", "a1"), of("a", "a2"), of("b", "b1"), of("a", "a3")]).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(ordered.sorted(), ["a1", "b1"]);
    assert_eq!(free.count(), 4);
    // Later records wait as well.
    inbox.accept_all([of("a", "a4"), of("b", "b2")]).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(ordered.sorted(), ["a1", "b1", "b2"]);

    let filter = DeliveryFilter::default().handler_key("stock").message_id("a1");
    assert_eq!(scene.store.operate().discard(&filter, 10).await.unwrap(), 1);
    inbox.drain().await.unwrap();
    let of_a: Vec<String> = ordered.ids().into_iter().filter(|id| id.starts_with('a')).collect();
    assert_eq!(of_a, ["a1", "a2", "a3", "a4"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_head_runs_before_the_deliveries_behind_it() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let healed = runs.answering("stock", |message| match (message.id(), message.attempt()) {
        ("a1", 1) => Err(Failure::poison("not yet")),
        _ => Ok(()),
    });
    let inbox = scene.inbox().subscribe("orders", in_order(healed)).build().unwrap();
    inbox.accept_all([of("a", "a1"), of("a", "a2"), of("a", "a3")]).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(runs.ids(), ["a1"]);
    assert_eq!(scene.database.replay("a1", "stock", None).await, 1);
    inbox.drain().await.unwrap();
    assert_eq!(runs.ids(), ["a1", "a1", "a2", "a3"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poisoned_head_is_skipped_if_configured_and_its_replay_waits_for_its_turn() {
    let scene = Scene::new().await;
    let (gate, runs) = (Arc::new(Semaphore::new(0)), Runs::new());
    let (noted, opened) = (runs.clone(), Arc::clone(&gate));
    let work = move |message: Message<Raw>| {
        noted.note(&message);
        let gate = Arc::clone(&opened);
        async move {
            match (message.id(), message.attempt()) {
                ("a1", 1) => Err(Failure::poison("no")),
                ("a2", _) => {
                    gate.acquire().await?.forget();
                    Ok(())
                }
                _ => Ok(()),
            }
        }
    };
    let inbox = scene.inbox().subscribe("orders", passing(handler(key("stock"), work))).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_all([of("a", "a1"), of("a", "a2"), of("a", "a3")]).await.unwrap();
    runs.reached(2).await;
    assert_eq!(runs.ids(), ["a1", "a2"]);
    // It is older than the running one, and waits until that one has ended. Then it is first.
    assert_eq!(scene.database.replay("a1", "stock", None).await, 1);
    inbox.accept(of("b", "b1")).await.unwrap();
    runs.reached(3).await;
    assert_eq!(runs.ids(), ["a1", "a2", "b1"]);
    gate.add_permits(1);
    scene.settled().await;
    assert_eq!(runs.ids(), ["a1", "a2", "b1", "a1", "a3"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_replays_of_one_key_run_in_accept_order() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let healed = runs.answering("stock", |message| match message.attempt() {
        1 => Err(Failure::poison("not yet")),
        _ => Ok(()),
    });
    let inbox = scene.inbox().subscribe("orders", passing(healed)).build().unwrap();
    let ids: Vec<String> = (0..1_100).map(|number| format!("a{number:04}")).collect();
    inbox.accept_all(ids.iter().map(|id| of("a", id))).await.unwrap();
    let running = inbox.start().await.unwrap();
    scene.settled().await;
    assert_eq!(runs.ids(), ids);
    assert_eq!(
        scene.store.operate().replay(&DeliveryFilter::default().handler_key("stock"), 2_000).await.unwrap(),
        1_100
    );
    scene.settled().await;
    assert_eq!(runs.ids()[1_100..], ids);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_behind_a_retry_wait_for_it_and_other_keys_do_not() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let failing = runs.answering("stock", |message| match message.id() {
        "a1" => Err(Failure::retry_after(Duration::from_secs(600), "later")),
        "b1" if message.attempt() == 1 => Err(Failure::snooze(Duration::ZERO)),
        _ => Ok(()),
    });
    let inbox = scene.inbox().subscribe("orders", in_order(failing)).build().unwrap();
    inbox.accept_all([of("a", "a1"), of("b", "b1"), of("a", "a2"), of("b", "b2")]).await.unwrap();
    inbox.drain().await.unwrap();
    inbox.accept(of("a", "a3")).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(runs.sorted(), ["a1", "b1", "b1", "b2"]);
    // An operator discards the head while it waits.
    let filter = DeliveryFilter::default().handler_key("stock").message_id("a1");
    assert_eq!(scene.store.operate().discard(&filter, 10).await.unwrap(), 1);
    inbox.drain().await.unwrap();
    assert_eq!(runs.ids()[runs.count() - 2..], ["a2", "a3"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_without_a_key_is_unordered_and_runs_at_once() {
    let scene = Scene::new().await;
    let (gate, runs) = (Arc::new(Semaphore::new(0)), Runs::new());
    let inbox = scene.inbox().subscribe("orders", in_order(runs.held("stock", &gate))).build().unwrap();
    inbox.accept_all([of("a", "a1"), of("a", "a2"), record("free-1"), of("", "free-2")]).await.unwrap();
    let running = inbox.start().await.unwrap();
    runs.reached(3).await;
    assert_eq!(runs.sorted(), ["a1", "free-1", "free-2"]);
    inbox.accept(record("free-3")).await.unwrap();
    runs.reached(4).await;
    gate.add_permits(5);
    scene.settled().await;
    assert_eq!(runs.count(), 5);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// The first record of a key in a batch may already be known: then nothing comes before the second.
#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_at_the_head_of_a_batch_holds_nothing() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", in_order(runs.handler("stock"))).build().unwrap();
    inbox.accept(of("a", "a1")).await.unwrap();
    inbox.drain().await.unwrap();
    let receipts = inbox.accept_all([of("a", "a1"), of("a", "a2"), of("a", "a3"), of("b", "b1")]).await.unwrap();
    assert_eq!(receipts[0], Receipt::Duplicate { added: 0 });
    inbox.drain().await.unwrap();
    let of_a: Vec<String> = runs.ids().into_iter().filter(|id| id.starts_with('a')).collect();
    assert_eq!(of_a, ["a1", "a2", "a3"]);
    assert_eq!(scene.count("inbox_delivery WHERE finished_at IS NULL").await, 0);
}

// A handler that was added later gets its delivery of an old message by a redelivery. It is older than the waiting
// ones, and runs first.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_is_added_later_takes_its_place_by_the_age_of_its_message() {
    let scene = Scene::new().await;
    let (runs, mail) = (Runs::new(), Runs::new());
    let before = scene.inbox().subscribe("orders", mail.handler("mail")).build().unwrap();
    before.accept(of("a", "a1")).await.unwrap();
    let builder = scene.inbox().subscribe("orders", mail.handler("mail"));
    let inbox = builder.subscribe("orders", in_order(runs.handler("stock"))).build().unwrap();
    inbox.accept_all([of("a", "a2"), of("a", "a3")]).await.unwrap();
    assert_eq!(inbox.accept(of("a", "a1")).await.unwrap(), Receipt::Duplicate { added: 1 });
    inbox.drain().await.unwrap();
    assert_eq!(runs.ids(), ["a1", "a2", "a3"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renamed_handler_continues_in_order() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let old = || in_order(runs.handler("old"));
    let new = || in_order(runs.handler("new"));
    scene.inbox().subscribe("orders", old()).build().unwrap().accept_all([of("a", "a1"), of("a", "a2")]).await.unwrap();
    // Both keys have ids before they become one handler.
    scene.inbox().subscribe("orders", new()).build().unwrap().accept(of("b", "b1")).await.unwrap();
    let inbox = scene.inbox().subscribe("orders", new().formerly("old").concurrency(1)).build().unwrap();
    inbox.accept_all([of("a", "a3"), of("a", "a4"), of("b", "b2")]).await.unwrap();
    let running = inbox.start().await.unwrap();
    scene.settled().await;
    let of_a: Vec<String> = runs.ids().into_iter().filter(|id| id.starts_with('a')).collect();
    assert_eq!(of_a, ["a1", "a2", "a3", "a4"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_keep_the_ordering_under_which_they_were_stored() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let unordered = || runs.handler("stock");
    let accept = async |registration, ids: [&str; 2]| {
        let inbox = scene.inbox().subscribe("orders", registration).build().unwrap();
        inbox.accept_all(ids.map(|id| of("a", id))).await.unwrap();
        inbox
    };
    let held = "inbox_delivery WHERE due_at > now() + interval '1 year'";
    accept(unordered(), ["a1", "a2"]).await;
    assert_eq!(scene.count(held).await, 0);
    // The two existing deliveries block no other.
    accept(in_order(unordered()), ["a3", "a4"]).await;
    assert_eq!(scene.count(held).await, 1);
    // Deliveries that were stored in order are run in order by a build without ordering, beside new ones.
    let inbox = accept(unordered(), ["a5", "a6"]).await;
    assert_eq!(scene.count(held).await, 1);
    inbox.drain().await.unwrap();
    let ids = runs.ids();
    let place = |id: &str| ids.iter().position(|ran| ran == id);
    assert!(place("a3") < place("a4"), "{ids:?}");
    assert_eq!(runs.sorted(), ["a1", "a2", "a3", "a4", "a5", "a6"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn transactional_handlers_take_effect_in_order() {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    let runs = Runs::new();
    let ordered = in_order(effect::writing_only(&runs, "stock")).retry(RetryPolicy::exponential());
    let inbox = scene.inbox().subscribe("orders", ordered).build().unwrap();
    let ids: Vec<String> = (0..30).map(|number| format!("a{number:02}")).collect();
    inbox.accept_all(ids.iter().map(|id| of("a", id))).await.unwrap();
    let running = inbox.start().await.unwrap();
    scene.settled().await;
    assert_eq!(runs.ids(), ids);
    assert_eq!(effect::effects(&scene).await, ids);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ordered_handler_is_neither_delayed_nor_does_it_share_transactions() {
    let scene = Scene::new().await;
    let refusal = |registration| scene.inbox().subscribe("orders", registration).build().unwrap_err().to_string();
    let ordered = || Runs::new().handler("stock").ordered_by(OrderKey::record_key());
    for delayed in [ordered().delay(Duration::from_secs(1)), ordered().delay_header("due")] {
        let error = refusal(delayed);
        assert!(error.contains("stock is ordered: its deliveries cannot be delayed"), "{error}");
    }
    let error = refusal(ordered().share_transaction(2));
    assert!(error.contains("stock is ordered: its deliveries cannot share transactions"), "{error}");
}
