//! A renamed handler stays the same handler: it owns deliveries under a former key, and does not get a message again
//! that it has had, whichever versions run side by side.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::Semaphore;
use wharf::operate::KeyChange;
use wharf::order::OrderKey;
use wharf::{Inbox, InboxBuilder, Receipt, Registration};

use super::breaker::breaking;
use super::scene::{Database, Db, Runs, Scene, State, record, records};

const DUPLICATE: Receipt = Receipt::Duplicate { added: 0 };

/// An inbox of a separate process with one handler of `orders`.
async fn version(scene: &Scene, handler: Registration<Db>) -> Inbox<Db> {
    scene.another_inbox().await.subscribe("orders", handler).build().unwrap()
}

/// Gives `old` and `new` separate ids, as after a deploy that forgot the former key.
async fn give_both_keys_ids(scene: &Scene) {
    for key in ["old", "new"] {
        version(scene, Runs::new().handler(key)).await.drain().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_under_the_old_key_run_under_the_new_one() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    version(&scene, runs.handler("old")).await.accept_all(records(20)).await.unwrap();

    let renamed = version(&scene, runs.handler("new").formerly("old")).await;

    assert_eq!(renamed.drain().await.unwrap(), 20);
    assert_eq!(scene.count("inbox_status WHERE handler_key = 'new' AND state = 'done'").await, 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn renamed_twice_and_back_a_redelivery_stays_a_duplicate() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let first = version(&scene, runs.handler("a")).await;
    first.accept_all(records(200)).await.unwrap();
    first.drain().await.unwrap();

    for renamed in [
        runs.handler("b").formerly("a"),
        runs.handler("c").formerly("b").formerly("a"),
        // The first key may be left out once it is an alias.
        runs.handler("d").formerly("c"),
        runs.handler("a").formerly("d"),
        runs.handler("a"),
    ] {
        let inbox = version(&scene, renamed).await;
        assert_eq!(inbox.accept_all(records(200)).await.unwrap(), vec![DUPLICATE; 200]);
        assert_eq!(inbox.drain().await.unwrap(), 0);
    }
    assert_eq!((runs.count(), scene.count("inbox_delivery").await), (200, 200));
}

#[tokio::test(flavor = "multi_thread")]
async fn old_and_new_version_side_by_side_run_each_message_once() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let old = version(&scene, runs.handler("old")).await;
    let old_running = old.start().await.unwrap();
    old.accept_all(records(50)).await.unwrap();
    let new = version(&scene, runs.handler("new").formerly("old")).await;
    let new_running = new.start().await.unwrap();
    // The deploy is rolled back on one machine, after the rename.
    let back = version(&scene, runs.handler("old")).await;
    let back_running = back.start().await.unwrap();

    let everyone = [&old, &new, &back].map(|inbox| inbox.accept_all(records(300)));
    let receipts: Vec<Receipt> = join_all(everyone).await.into_iter().flat_map(Result::unwrap).collect();

    scene.settled().await;
    assert_eq!(receipts.iter().filter(|receipt| **receipt == Receipt::Accepted { deliveries: 1 }).count(), 250);
    assert_eq!(receipts.iter().filter(|receipt| **receipt == DUPLICATE).count(), 650);
    assert_eq!((runs.count(), scene.count("inbox_delivery").await), (300, 300));
    for running in [old_running, new_running, back_running] {
        running.shutdown(Duration::from_secs(5)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_whose_two_keys_had_ids_owns_the_deliveries_of_both() {
    let scene = Scene::new().await;
    give_both_keys_ids(&scene).await;
    let runs = Runs::new();
    version(&scene, runs.handler("old")).await.accept_all((0..20).map(|n| record(&format!("old {n}")))).await.unwrap();
    version(&scene, runs.handler("new")).await.accept_all((0..20).map(|n| record(&format!("new {n}")))).await.unwrap();

    let renamed = version(&scene, runs.handler("new").formerly("old").concurrency(3)).await;
    renamed.accept(record("later")).await.unwrap();

    assert_eq!(renamed.drain().await.unwrap(), 41);
    assert_eq!(runs.count(), 41);
    let later = "SELECT k.key FROM inbox_message m JOIN inbox_delivery d ON d.message_seq = m.seq
                 JOIN inbox_handler_key k ON k.handler_id = d.handler_id WHERE m.message_id = 'later'";
    assert_eq!(scene.database.query_texts(later).await, ["new"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_one_slot_and_two_ids_neither_id_is_starved() {
    let scene = Scene::new().await;
    give_both_keys_ids(&scene).await;
    let runs = Runs::new();
    version(&scene, runs.handler("old")).await.accept_all((0..10).map(|n| record(&format!("old {n}")))).await.unwrap();
    version(&scene, runs.handler("new")).await.accept_all((0..10).map(|n| record(&format!("new {n}")))).await.unwrap();
    let renamed = version(&scene, runs.handler("new").formerly("old").concurrency(1)).await;

    assert_eq!(renamed.drain().await.unwrap(), 20);
    let running = renamed.start().await.unwrap();
    version(&scene, runs.handler("old")).await.accept(record("last")).await.unwrap();

    runs.reached(21).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_stored_under_the_other_of_two_ids_is_a_duplicate() {
    let scene = Scene::new().await;
    give_both_keys_ids(&scene).await;
    let runs = Runs::new();
    version(&scene, runs.handler("old")).await.accept_all(records(10)).await.unwrap();
    let renamed = version(&scene, runs.handler("new").formerly("old")).await;

    assert_eq!(renamed.accept_all(records(10)).await.unwrap(), vec![DUPLICATE; 10]);

    renamed.drain().await.unwrap();
    assert_eq!((runs.count(), scene.count("inbox_delivery").await), (10, 10));
}

// The old process does not know the new key. It learns from the database that both are one handler.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_process_adds_no_second_delivery_for_the_renamed_handler() {
    let scene = Scene::new().await;
    give_both_keys_ids(&scene).await;
    let runs = Runs::new();
    let old = version(&scene, runs.handler("old")).await;
    old.drain().await.unwrap();
    let renamed = version(&scene, runs.handler("new").formerly("old")).await;
    renamed.accept_all(records(10)).await.unwrap();
    renamed.drain().await.unwrap();

    assert_eq!(old.accept_all(records(10)).await.unwrap(), vec![DUPLICATE; 10]);

    let back = version(&scene, runs.handler("old")).await;
    assert_eq!(back.accept_all(records(10)).await.unwrap(), vec![DUPLICATE; 10]);
    assert_eq!(renamed.drain().await.unwrap(), 0);
    assert_eq!((runs.count(), scene.count("inbox_delivery").await), (10, 10));
}

#[tokio::test(flavor = "multi_thread")]
async fn old_and_new_redelivering_at_once_add_one_delivery() {
    let scene = Scene::new().await;
    give_both_keys_ids(&scene).await;
    let runs = Runs::new();
    // The messages exist, for another handler.
    version(&scene, Runs::new().handler("other")).await.accept_all(records(200)).await.unwrap();
    let old = version(&scene, runs.handler("old")).await;
    let new = version(&scene, runs.handler("new").formerly("old")).await;
    new.drain().await.unwrap();

    let forwards = records(200);
    let backwards: Vec<_> = forwards.iter().rev().cloned().collect();
    // In small batches, so that both meet in the middle.
    let piecewise = async |inbox: &Inbox<Db>, records: &[wharf::Record]| {
        for part in records.chunks(10) {
            inbox.accept_all(part.to_vec()).await.unwrap();
        }
    };
    tokio::join!(piecewise(&old, &forwards), piecewise(&new, &backwards));

    new.drain().await.unwrap();
    let twice = "(SELECT message_seq FROM inbox_delivery d JOIN inbox_handler_key k ON k.handler_id = d.handler_id
                  WHERE k.key IN ('old', 'new') GROUP BY 1 HAVING count(*) <> 1) t";
    assert_eq!((scene.count(twice).await, runs.count()), (0, 200));
}

// Two handlers became one, and the deploy was rolled back.
#[tokio::test(flavor = "multi_thread")]
async fn handlers_that_are_separate_again_each_get_their_delivery() {
    let scene = Scene::new().await;
    let (old, new) = (Runs::new(), Runs::new());
    let two = async || {
        let builder = scene.another_inbox().await.subscribe("orders", old.handler("old"));
        builder.subscribe("orders", new.handler("new")).build().unwrap()
    };
    two().await.accept(record("first")).await.unwrap();
    two().await.drain().await.unwrap();
    let one = version(&scene, new.handler("new").formerly("old")).await;
    one.accept(record("second")).await.unwrap();
    one.drain().await.unwrap();

    let stored = scene.store.operate().handlers().await.unwrap();
    let change = |builder: InboxBuilder<Db>| builder.manifest().plan(&stored).swap_remove(0).change;
    let builder = scene.another_inbox().await;
    let parted = builder.subscribe("orders", old.handler("old")).subscribe("orders", new.handler("new"));
    assert_eq!(change(parted), KeyChange::Separated { into: vec!["old".to_owned(), "new".to_owned()] });

    let again = two().await;
    assert_eq!(again.accept(record("second")).await.unwrap(), Receipt::Duplicate { added: 1 });
    assert_eq!(again.accept(record("third")).await.unwrap(), Receipt::Accepted { deliveries: 2 });
    again.drain().await.unwrap();

    assert_eq!((old.count(), new.count()), (3, 3));
}

// While both were one handler, deliveries of one id were held behind those of the other.
#[tokio::test(flavor = "multi_thread")]
async fn ordered_handlers_that_are_separate_again_run_what_was_held() {
    let scene = Scene::new().await;
    let (old, new) = (Runs::new(), Runs::new());
    let ordered = |registration: Registration<Db>| registration.ordered_by(OrderKey::record_key()).concurrency(1);
    let two = async || {
        let builder = scene.another_inbox().await.subscribe("orders", ordered(old.handler("old")));
        builder.subscribe("orders", ordered(new.handler("new"))).build().unwrap()
    };
    let of_key = |id: &str| record(id).with_key("k".to_owned());
    two().await.accept_all(["m1", "m2", "m3"].map(of_key)).await.unwrap();
    let gate = Arc::new(Semaphore::new(0));
    let one = version(&scene, ordered(new.held("new", &gate)).formerly("old")).await;
    let running = one.start().await.unwrap();
    new.reached(1).await;

    let again = two().await;
    again.accept(of_key("m4")).await.unwrap();
    let open = async { gate.add_permits(1) };
    tokio::join!(running.shutdown(Duration::from_secs(5)), open).0.unwrap();
    again.drain().await.unwrap();

    assert_eq!((old.count() + new.count(), scene.count_in(State::Done).await), (8, 8));
    assert!(old.ids().is_sorted() && new.ids().is_sorted(), "{:?} {:?}", old.ids(), new.ids());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poisoned_delivery_is_found_and_replayed_by_its_old_and_by_its_new_key() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let poisoning = runs.answering("old", |_| Err(wharf::Failure::poison("no")));
    let old = version(&scene, poisoning).await;
    old.accept_all([record("a"), record("b")]).await.unwrap();
    old.drain().await.unwrap();
    let renamed = version(&scene, runs.handler("new").formerly("old")).await;
    renamed.drain().await.unwrap();

    assert_eq!(scene.count("inbox_poisoned WHERE handler_key = 'new'").await, 2);
    assert_eq!(scene.database.replay("a", "old", None).await, 1);
    assert_eq!(scene.database.replay("b", "new", None).await, 1);

    assert_eq!(renamed.drain().await.unwrap(), 2);
    assert_eq!(scene.states().await, ["a new done", "b new done"]);
}

// As if it had been opened while the ids were being united. The probe is stored under the lower id.
#[tokio::test(flavor = "multi_thread")]
async fn a_breaker_that_is_opened_for_the_higher_of_two_ids_is_probed_and_closes() {
    let scene = Scene::new().await;
    give_both_keys_ids(&scene).await;
    let runs = Runs::new();
    let renamed = version(&scene, breaking(runs.handler("new").formerly("old"))).await;
    renamed.accept(record("a")).await.unwrap();
    let open = "UPDATE inbox_handler SET breaker_opened_at = now(), breaker_error = 'away', breaker_probe_at = now()
                WHERE id = (SELECT max(id) FROM inbox_handler)";
    scene.database.execute(open).await;

    assert_eq!(renamed.drain().await.unwrap(), 1);

    assert_eq!(scene.count("inbox_handler WHERE breaker_opened_at IS NULL").await, 2);
}
