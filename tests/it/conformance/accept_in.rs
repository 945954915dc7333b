//! Messages that are accepted in the caller's transaction: they appear with its writes, or not at all.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use diesel_async::{AsyncConnection, SimpleAsyncConnection};
use wharf::order::OrderKey;
use wharf::{Failure, Inbox, Message, Raw, Receipt, Record, Registration, RetryPolicy, tx_handler, with_state};

use super::effect::{self, Connection, effects};
use super::scene::{Database, Db, Runs, Scene, State, key, record, records};

async fn scene() -> Scene {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    scene
}

/// A separate connection for the caller.
async fn connection(scene: &Scene) -> Connection {
    let mut conn = Connection::establish(&Database::url(&scene.database)).await.unwrap();
    // SQLite has one writer, for which the caller must wait. PostgreSQL does not know the statement.
    let _ = conn.batch_execute("PRAGMA busy_timeout = 60000").await;
    conn
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_appear_with_the_commit_and_not_before() {
    let (scene, runs) = (scene().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    let running = inbox.start().await.unwrap();
    let mut conn = connection(&scene).await;

    conn.batch_execute("BEGIN").await.unwrap();
    effect::write(&mut conn, "mine").await.unwrap();
    let receipts = inbox.accept_in(&mut conn, records(3)).await.unwrap();
    assert_eq!(receipts, vec![Receipt::Accepted { deliveries: 1 }; 3]);
    assert_eq!((scene.count("inbox_message").await, effects(&scene).await.len()), (0, 0));
    conn.batch_execute("COMMIT").await.unwrap();
    inbox.wake();

    runs.reached(3).await;
    scene.settled().await;
    assert_eq!(scene.count_done_at_first().await, 3);
    assert_eq!(effects(&scene).await, ["mine"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_a_rolled_back_transaction_do_not_exist() {
    let (scene, runs) = (scene().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept(record("before")).await.unwrap();
    let mut conn = connection(&scene).await;

    let ended = conn
        .transaction::<(), Failure, _>(async |conn| {
            effect::write(conn, "mine").await?;
            inbox.accept_in(conn, records(3)).await?;
            Err(Failure::poison("no"))
        })
        .await;

    assert!(ended.is_err());
    assert_eq!((scene.count("inbox_message").await, effects(&scene).await.len()), (1, 0));
    assert_eq!(inbox.accept_all(records(3)).await.unwrap(), vec![Receipt::Accepted { deliveries: 1 }; 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicates_are_found_and_unwanted_records_are_not_stored() {
    let (scene, runs) = (scene().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    let more = scene.inbox().subscribe("orders", runs.handler("stock")).subscribe("orders", runs.handler("mail"));
    let more = more.build().unwrap();
    let mut conn = connection(&scene).await;

    let records = [record("a"), Record::new("others").with_id("x"), record("b"), record("b")];
    let receipts = conn.transaction::<_, Failure, _>(async |conn| Ok(more.accept_in(conn, records).await?)).await.unwrap();

    let expected = [
        Receipt::Duplicate { added: 1 },
        Receipt::Unwanted,
        Receipt::Accepted { deliveries: 2 },
        Receipt::Duplicate { added: 0 },
    ];
    assert_eq!(receipts, expected);
    assert_eq!(scene.states().await, ["a mail pending", "a stock pending", "b mail pending", "b stock pending"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_call_stores_nothing_and_the_transaction_continues() {
    let (scene, runs) = (scene().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    let mut conn = connection(&scene).await;

    conn.batch_execute("BEGIN").await.unwrap();
    effect::write(&mut conn, "mine").await.unwrap();
    let conflict = inbox.accept_in(&mut conn, [record("b"), record("a").with_payload("another")]).await.unwrap_err();
    let unfit = inbox.accept_in(&mut conn, [record("c"), Record::new("orders")]).await.unwrap_err();
    let kept = inbox.accept_in(&mut conn, [record("d")]).await.unwrap();
    conn.batch_execute("COMMIT").await.unwrap();

    assert!(conflict.is_refused() && conflict.to_string().contains("record 2 of topic orders"), "{conflict}");
    assert!(unfit.is_refused() && unfit.to_string().contains("missing identity"), "{unfit}");
    assert_eq!(kept, [Receipt::Accepted { deliveries: 1 }]);
    assert_eq!(scene.states().await, ["a stock pending", "d stock pending"]);
    assert_eq!((scene.count("inbox_quarantine").await, effects(&scene).await.len()), (0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_open_transaction_nothing_is_accepted() {
    let (scene, runs) = (scene().await, Runs::new());
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    let mut conn = connection(&scene).await;
    let error = inbox.accept_in(&mut conn, [record("a")]).await.unwrap_err();
    assert!(error.to_string().contains("none is open"), "{error}");
    assert_eq!(scene.count("inbox_message").await, 0);
    // The connection is unchanged.
    conn.batch_execute("BEGIN").await.unwrap();
    inbox.accept_in(&mut conn, [record("a")]).await.unwrap();
    conn.batch_execute("COMMIT").await.unwrap();
    assert_eq!(scene.states().await, ["a stock pending"]);
}

type Later = Arc<OnceLock<Inbox<Db>>>;

/// Accepts a shipment in the transaction of its own delivery. After that, the first attempt fails.
async fn ship(inbox: Later, order: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
    let inbox = inbox.get().expect("the inbox is set before any handler runs");
    let shipment = Record::new("shipments").with_id(format!("{}/{}", order.id(), order.attempt()));
    inbox.accept_in(conn, [shipment]).await?;
    match order.attempt() {
        1 => Err(Failure::retry_after(Duration::ZERO, "once more")),
        _ => Ok(()),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_accepted_by_a_transactional_handler_appear_with_its_outcome_and_run_at_once() {
    let (scene, runs) = (scene().await, Runs::new());
    let later = Later::default();
    let shipping: Registration<Db> = tx_handler(key("ship"), with_state(Arc::clone(&later), ship));
    // Without polling: the delivery is found only if the claim loop was woken for it.
    let limits = super::scene::quick().poll(Duration::from_secs(3_600));
    let inbox = scene.inbox().limits(limits);
    let inbox = inbox.subscribe("orders", shipping).subscribe("shipments", runs.handler("book")).build().unwrap();
    later.set(inbox.clone()).unwrap_or_else(|_| panic!("set once"));
    let running = inbox.start().await.unwrap();

    inbox.accept_all([record("a"), record("b")]).await.unwrap();

    runs.reached(2).await;
    scene.settled().await;
    assert_eq!(runs.sorted(), ["a/2", "b/2"]);
    assert_eq!(scene.count_in(State::Done).await, 4);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_an_ordered_handler_run_in_accept_order() {
    let (scene, runs) = (scene().await, Runs::new());
    let ordered = runs.handler("stock").ordered_by(OrderKey::record_key()).retry(RetryPolicy::never());
    let inbox = scene.inbox().subscribe("orders", ordered).build().unwrap();
    let mut conn = connection(&scene).await;
    let ids: Vec<String> = (0..12).map(|number| format!("m{number:02}")).collect();
    let keyed = |ids: &[String]| ids.iter().map(|id| record(id).with_key("one")).collect::<Vec<_>>();
    inbox.accept_all(keyed(&ids[..3])).await.unwrap();
    for part in [&ids[3..7], &ids[7..9]] {
        conn.batch_execute("BEGIN").await.unwrap();
        inbox.accept_in(&mut conn, keyed(part)).await.unwrap();
        conn.batch_execute("COMMIT").await.unwrap();
    }
    inbox.accept_all(keyed(&ids[9..])).await.unwrap();

    let running = inbox.start().await.unwrap();
    scene.settled().await;

    assert_eq!(runs.ids(), ids);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_handler_is_due_later() {
    let (scene, runs) = (scene().await, Runs::new());
    let delayed = runs.handler("remind").delay(Duration::from_secs(3_600)).delay_header("due");
    let inbox = scene.inbox().subscribe("orders", delayed).build().unwrap();
    let mut conn = connection(&scene).await;
    conn.batch_execute("BEGIN").await.unwrap();
    let records = [record("later"), record("now").with_header("due", "0s")];
    inbox.accept_in(&mut conn, records).await.unwrap();
    conn.batch_execute("COMMIT").await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(runs.ids(), ["now"]);
}
