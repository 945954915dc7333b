//! A settlement by a handler is fenced: it is rejected unless it belongs to the current attempt, and a rejected
//! transaction cannot commit.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use wharf::order::OrderKey;
use wharf::{Failure, RetryPolicy, Sqlite, Store};

use crate::any_client::{acting, connect, settle, settling, soon};
use crate::effect::{self, effects};
use crate::scene::{Runs, Scene, State, key, record};
use support::events::Events;

/// The SQLSTATE of a client error.
async fn sqlstate_of(client: &tokio_postgres::Client, sql: &str) -> String {
    let error = client.batch_execute(sql).await.expect_err(sql);
    error.code().expect("an error of the server").code().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_returns_ok_without_a_settlement_fails_with_the_reason() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let forgetful = acting(&runs, "stock", |_| Box::pin(async { Ok(()) })).retry(RetryPolicy::never());
    let inbox = scene.inbox().subscribe("orders", forgetful).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.states().await, ["a stock poisoned"]);
    let error = scene.database.query_texts("SELECT last_error FROM inbox_poisoned").await.remove(0);
    assert!(error.contains("did not settle") && error.contains("inbox_settle"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_after_the_committed_settlement_changes_nothing_and_is_reported() {
    let events = Events::capture();
    let (scene, runs) = (Scene::new().await, Runs::new());
    effect::prepare(&scene).await;
    let url = scene.database.url();
    let failing = acting(&runs, "any.error", move |message| {
        let url = url.clone();
        Box::pin(async move {
            settle(&url, &message).await?;
            match message.id() {
                "panics" => panic!("after the commit"),
                _ => Err(Failure::poison("after the commit")),
            }
        })
    });
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    inbox.accept_all([record("fails"), record("panics")]).await.unwrap();
    inbox.drain().await.unwrap();
    let told = |event: &support::events::Event| {
        event.message == "settled before it failed" && event.has("handler", "any.error")
    };
    assert_eq!(events.wait_for_count(2, told).await.len(), 2);
    assert_eq!(scene.states().await, ["fails any.error done", "panics any.error done"]);
    assert_eq!((scene.count_done_at_first().await, scene.count("inbox_failures").await), (2, 0));
    assert_eq!(effects(&scene).await, ["fails", "panics"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_released_claim_settles_nothing_and_its_writes_are_rolled_back() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    effect::prepare(&scene).await;
    let gate = Arc::new(Semaphore::new(0));
    let (url, waiting) = (scene.database.url(), Arc::clone(&gate));
    let slow = acting(&runs, "stock", move |message| {
        let (url, waiting) = (url.clone(), Arc::clone(&waiting));
        Box::pin(async move {
            if message.attempt() == 1 {
                waiting.acquire().await?.forget();
            }
            settle(&url, &message).await.map_err(|failure| soon(&failure))
        })
    });
    // With one slot, the second attempt would wait for the first. The long lease keeps the handler from being stopped
    // before it settles.
    let inbox = scene.inbox().limits(crate::scene::quick().lease(Duration::from_secs(60))).subscribe("orders", slow);
    let running = inbox.build().unwrap();
    let running = (running.start().await.unwrap(), running);
    running.1.accept(record("a")).await.unwrap();
    runs.reached(1).await;

    assert_eq!(scene.database.query_one_i64("SELECT inbox_release('a', 'stock')").await, 1);
    runs.reached(2).await;
    scene.settled().await;
    gate.add_permits(1);

    running.0.shutdown(Duration::from_secs(10)).await.unwrap();
    assert_eq!(effects(&scene).await, ["a"]);
    assert_eq!(scene.count("inbox_status WHERE state = 'done' AND attempts = 2 AND errors = 0").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_function_distinguishes_lost_settled_and_invalid_claims() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    effect::prepare(&scene).await;
    let inbox = scene.inbox().subscribe("orders", settling(&runs, "stock", &scene.database.url())).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    let claim = "SELECT format('[%s,%s,%s,%s]', message_seq, handler_id, attempts, 1) FROM inbox_delivery";
    let claim = scene.database.query_texts(claim).await.remove(0);
    let client = connect(&scene.database.url()).await.unwrap();

    assert_eq!(sqlstate_of(&client, &format!("SELECT inbox_settle('{claim}')")).await, "WH002");
    for lost in ["[1,1,7,1]", "[99,1,1,1]", "[0,0,1,0]"] {
        assert_eq!(sqlstate_of(&client, &format!("SELECT inbox_settle('{lost}')")).await, "WH001", "{lost}");
    }
    for wrong in ["NULL", "''", "'a'", "'[1,1,1]'", "'[1,1,1,-1]'", "'{1,1,1,1}'", "'[1,1,1,1],'"] {
        assert_eq!(sqlstate_of(&client, &format!("SELECT inbox_settle({wrong})")).await, "22023", "{wrong}");
    }
    // The handler committed its effect in its only run.
    assert_eq!((runs.count(), effects(&scene).await.len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_may_run_longer_than_the_lease_after_its_commit() {
    let events = Events::capture();
    let (scene, runs, gate) = (Scene::new().await, Runs::new(), Arc::new(Semaphore::new(0)));
    effect::prepare(&scene).await;
    let (url, waiting) = (scene.database.url(), Arc::clone(&gate));
    let slow = acting(&runs, "any.slow", move |message| {
        let (url, waiting) = (url.clone(), Arc::clone(&waiting));
        Box::pin(async move {
            settle(&url, &message).await?;
            waiting.acquire().await?.forget();
            Ok(())
        })
    });
    // The lease is long enough for a loaded machine to renew in time: a handler whose claim cannot be renewed is
    // stopped.
    let limits = crate::scene::quick().lease(Duration::from_secs(3));
    let inbox = scene.inbox().limits(limits).subscribe("orders", slow).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("a")).await.unwrap();
    scene.settled().await;
    // The heartbeats of the process show that more than a lease has passed. Claims are renewed three times per lease.
    scene.until("SELECT (seen_at > started_at + interval '4 seconds')::int::bigint FROM inbox_processor").await;

    gate.add_permits(1);

    let about = |event: &support::events::Event| {
        event.has("handler", "any.slow") && !["handed over", "claimed"].contains(&&*event.message)
    };
    events.wait_for(|event| about(event) && event.message == "done").await;
    let told: Vec<String> = events.matching(about).iter().map(|event| event.message.clone()).collect();
    assert_eq!(told, ["done"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_of_an_ordered_self_settling_handler_run_in_order() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    effect::prepare(&scene).await;
    let ordered = settling(&runs, "stock", &scene.database.url()).ordered_by(OrderKey::record_key());
    let inbox = scene.inbox().subscribe("orders", ordered).build().unwrap();
    let ids: Vec<String> = (0..12).map(|number| format!("m{number:02}")).collect();
    inbox.accept_all(ids.iter().map(|id| record(id).with_key("one"))).await.unwrap();

    let running = inbox.start().await.unwrap();
    scene.settled().await;

    assert_eq!(runs.ids(), ids);
    assert_eq!(scene.count_done_at_first().await, 12);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

// With the snapshot of its transaction, the settlement would not see the delivery that was held meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn an_ordered_handler_under_repeatable_read_is_refused_and_strands_nothing() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    effect::prepare(&scene).await;
    let (url, gate) = (scene.database.url(), Arc::new(Semaphore::new(0)));
    let waiting = Arc::clone(&gate);
    let strict_at_first = acting(&runs, "stock", move |message| {
        let (url, waiting) = (url.clone(), Arc::clone(&waiting));
        Box::pin(async move {
            if message.attempt() > 1 || message.id() != "a" {
                return settle(&url, &message).await.map_err(|failure| soon(&failure));
            }
            let client = connect(&url).await?;
            client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM effect").await?;
            waiting.acquire().await?.forget();
            let settled = client.execute("SELECT inbox_settle($1)", &[&message.claim()]).await;
            let refused = settled.expect_err("it is refused");
            let code = refused.code().expect("an error of the server").code();
            Err(Failure::retry_after(Duration::ZERO, format!("refused with {code}")))
        })
    });
    // No claim is renewed meanwhile: that would be another error.
    let limits = crate::scene::quick().lease(Duration::from_secs(600));
    let ordered = strict_at_first.ordered_by(OrderKey::record_key());
    let inbox = scene.inbox().limits(limits).subscribe("orders", ordered).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(record("a").with_key("one")).await.unwrap();
    runs.reached(1).await;
    inbox.accept(record("b").with_key("one")).await.unwrap();
    gate.add_permits(1);

    scene.settled().await;

    assert_eq!(effects(&scene).await, ["a", "b"]);
    assert_eq!(runs.ids(), ["a", "a", "b"]);
    let failures = "SELECT concat_ws(' ', message_id, error) FROM inbox_failures";
    assert_eq!(scene.database.query_texts(failures).await, ["a refused with WH005"]);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn transactional_handlers_and_handlers_on_sqlite_cannot_settle_their_own_deliveries() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    effect::prepare(&scene).await;
    let said = scene.inbox().subscribe("orders", effect::writing_only(&runs, "stock").settles_itself()).build();
    assert!(said.unwrap_err().to_string().contains("stock is transactional"));
    let store = Store::<Sqlite>::in_memory().await.unwrap();
    let said = wharf::Inbox::builder(store).subscribe("orders", runs.handler("stock").settles_itself()).build();
    assert!(said.unwrap_err().to_string().contains("use tx_handler"));

    // If the handler tries it in SQL, its transaction fails as after any other error.
    let settling = wharf::tx_handler(key("books"), CallsSettle).retry(RetryPolicy::never());
    let inbox = scene.inbox().subscribe("orders", settling).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.count_in(State::Poisoned).await, 1);
    let error = scene.database.query_texts("SELECT last_error FROM inbox_poisoned").await.remove(0);
    assert!(error.contains("transaction of a transactional handler"), "{error}");
    assert_eq!(effects(&scene).await, [""; 0]);
}

struct CallsSettle;

impl wharf::TxHandler<wharf::Raw, effect::Connection> for CallsSettle {
    async fn handle(&self, message: wharf::Message<wharf::Raw>, conn: &mut effect::Connection) -> Result<(), Failure> {
        effect::write(conn, message.id()).await?;
        effect::execute(conn, &format!("SELECT inbox_settle('{}')", message.claim())).await?;
        Ok(())
    }
}
