//! Backfills, replays, accepts and probes that run concurrently on the same rows, and on a server whose sequences lag.
//! SQLite has one writer, and takes the next number from the table itself.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use wharf::operate::{Backfill, Canary, DeliveryFilter, QuarantineFilter};
use wharf::order::OrderKey;
use wharf::{Failure, Identity, Inbox, Postgres, Record};

use super::refused::ACCEPTED;
use super::scene::{Runs, Scene, record, records, within};
use crate::dashboard::forms::{ended, form, send};
use crate::dashboard::served::Served;
use support::events::Events;

const WAITS: &str = "SELECT (count(*) > 0)::int::bigint FROM pg_stat_activity
                     WHERE datname = current_database() AND wait_event_type = 'Lock'";
const NEXT_SEQ: &str = "SELECT setval('inbox_message_seq', (SELECT max(seq) FROM inbox_message))";

/// An inbox with these messages and the handler `mail`, which has no deliveries of them.
async fn without_mail(scene: &Scene, count: usize) -> Inbox<Postgres> {
    let runs = Runs::new();
    let stock = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    stock.accept_all(records(count)).await.unwrap();
    let post = scene.inbox().subscribe("returns", runs.handler("post")).build().unwrap();
    post.accept_all([]).await.unwrap();
    post
}

fn mail() -> Backfill {
    Backfill::new("mail", ["orders"])
}

// `mail` and `post` were two handlers and became one. An older process knows only `post`, and adds its delivery for a
// redelivery.
#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_beside_a_redelivery_under_a_united_id_adds_no_second_delivery() {
    let scene = Scene::new().await;
    without_mail(&scene, 3).await;
    let runs = Runs::new();
    scene.inbox().subscribe("returns", runs.handler("mail")).build().unwrap().accept_all([]).await.unwrap();
    let united = scene.inbox().subscribe("returns", runs.handler("mail").formerly("post")).build().unwrap();
    united.accept_all([]).await.unwrap();
    let mut other = scene.database.client().await;
    let redelivery = other.transaction().await.unwrap();
    redelivery
        .execute("SELECT 1 FROM inbox_message WHERE message_id = 'm000001' FOR NO KEY UPDATE", &[])
        .await
        .unwrap();
    let post = "INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
                SELECT seq, (SELECT handler_id FROM inbox_handler_key WHERE key = 'post'), now()
                FROM inbox_message WHERE message_id = 'm000001'";
    redelivery.execute(post, &[]).await.unwrap();

    let operator = scene.store.operate();
    let backfilling = tokio::spawn(async move { operator.backfill(&mail(), |_| ()).await });
    scene.until(WAITS).await;
    redelivery.commit().await.unwrap();

    assert_eq!(within(backfilling).await.unwrap().unwrap(), 2);
    let twice = "SELECT count(*) FROM (
                     SELECT message_seq FROM inbox_delivery WHERE handler_id = ANY (inbox_handler_ids('mail'))
                     GROUP BY message_seq HAVING count(*) > 1) t";
    assert_eq!(scene.database.query_one_i64(twice).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_of_a_backfill_locks_the_messages_that_it_changes_and_no_others() {
    let scene = Scene::new().await;
    without_mail(&scene, 1_200).await;
    let runs = Runs::new();
    scene.inbox().subscribe("returns", runs.handler("mail")).build().unwrap().accept_all([]).await.unwrap();
    // The first delivery of the step waits for this one, while the step holds its locks.
    let mut other = scene.database.client().await;
    let adding = other.transaction().await.unwrap();
    let first = "INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
                 SELECT min(seq), (SELECT handler_id FROM inbox_handler_key WHERE key = 'mail'), now() FROM inbox_message";
    adding.execute(first, &[]).await.unwrap();
    let operator = scene.store.operate();
    let backfilling = tokio::spawn(async move { operator.backfill(&mail(), |_| ()).await });
    scene.until(WAITS).await;

    let free = "SELECT count(*) FROM (SELECT 1 FROM inbox_message FOR NO KEY UPDATE SKIP LOCKED) free";
    let free = scene.database.query_one_i64(free).await;
    adding.rollback().await.unwrap();

    assert_eq!(within(backfilling).await.unwrap().unwrap(), 1_200);
    assert_eq!(free, 700);
}

// The first step has created as many deliveries as a step may, so a second one looks for more.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_of_a_backfill_that_creates_nothing_does_not_write_the_audit_again() {
    let scene = Scene::new().await;
    without_mail(&scene, 500).await;
    scene.inbox().subscribe("returns", Runs::new().handler("mail")).build().unwrap().accept_all([]).await.unwrap();
    let mut steps = 0;
    assert_eq!(scene.store.operate().backfill(&mail(), |_| steps += 1).await.unwrap(), 500);
    let in_one_transaction = "SELECT count(*) FROM inbox_delivery d, inbox_audit a
                              WHERE d.xmin = a.xmin AND d.handler_id = ANY (inbox_handler_ids('mail'))";
    assert_eq!((steps, scene.database.query_one_i64(in_one_transaction).await), (2, 500));
}

// The breaker is open for the higher id only. While a process is about to open it for both, so that it can be probed,
// another one closes it.
#[tokio::test(flavor = "multi_thread")]
async fn a_breaker_that_is_closed_while_a_process_asks_for_a_probe_stays_closed() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    for name in ["post", "mail"] {
        scene.inbox().subscribe("orders", runs.handler(name)).build().unwrap().drain().await.unwrap();
    }
    let united = scene.inbox().subscribe("orders", runs.handler("mail").formerly("post")).build().unwrap();
    united.accept(record("a")).await.unwrap();
    let open = "UPDATE inbox_handler SET breaker_opened_at = now(), breaker_probe_at = now() + interval '1 hour'
                WHERE id = (SELECT max(id) FROM inbox_handler)";
    scene.database.execute(open).await;
    let mut other = scene.database.client().await;
    let closing = other.transaction().await.unwrap();
    closing.execute("SELECT 1 FROM inbox_handler ORDER BY id LIMIT 1 FOR NO KEY UPDATE", &[]).await.unwrap();
    let draining = tokio::spawn(async move { united.drain().await });
    scene.until(WAITS).await;

    let close = "UPDATE inbox_handler SET breaker_opened_at = NULL, breaker_probe_at = NULL";
    closing.execute(close, &[]).await.unwrap();
    closing.commit().await.unwrap();

    assert_eq!(within(draining).await.unwrap().unwrap(), 1);
    assert_eq!(scene.count("inbox_handler WHERE breaker_opened_at IS NOT NULL").await, 0);
}

// This happens after a cut-over to a logical replica: rows are replicated, sequences are not.
#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_that_lags_behind_its_table_costs_no_record() {
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    inbox.accept_all(records(2_000)).await.unwrap();
    scene.database.execute("SELECT setval('inbox_message_seq', 1, false)").await;
    let events = Events::capture();
    let call = tokio::spawn({
        let inbox = inbox.clone();
        async move { inbox.accept_all((0..5).map(|number| record(&format!("new {number}")))).await }
    });

    let names_it = |error: &str| error.contains("inbox_message_pkey");
    events.wait_for_count(6, |event| event.field("error").is_some_and(names_it)).await;
    scene.database.execute(NEXT_SEQ).await;

    assert_eq!(within(call).await.unwrap().unwrap(), vec![ACCEPTED; 5]);
    assert_eq!((scene.count("inbox_message").await, scene.count("inbox_quarantine").await), (2_005, 0));
}

// This happens when the process crashes in between: the record is stored and is still in the quarantine.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_without_identity_that_is_stored_and_cannot_leave_the_quarantine_is_not_stored_again() {
    let scene = Scene::new().await;
    let strict = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    strict.accept_or_quarantine([Record::new("orders").with_payload("one")]).await.unwrap();
    scene
        .database
        .execute(
            "CREATE SEQUENCE tries;
             CREATE FUNCTION refuse_at_first() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF nextval('tries') <= 2 THEN RAISE EXCEPTION 'not now'; END IF;
                 RETURN OLD;
             END $$;
             CREATE TRIGGER refuse_at_first BEFORE DELETE ON inbox_quarantine FOR EACH ROW EXECUTE FUNCTION refuse_at_first()",
        )
        .await;
    let all = QuarantineFilter::all();
    assert_eq!(scene.store.operate().replay_quarantined(&all, 1).await.unwrap(), 1);
    let identity = Identity::header("id").or_undeduplicated();
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).identity("orders", identity).build().unwrap();
    let running = inbox.start().await.unwrap();

    scene.until("SELECT (count(*) = 0)::int::bigint FROM inbox_quarantine").await;
    scene.settled().await;

    running.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!((scene.count("inbox_message").await, runs.count()), (1, 1));
}

// The library refuses before it calls the function.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_of_a_backfill_in_sql_refuses_an_ordered_handler() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    let ordered = runs.handler("stock").ordered_by(OrderKey::record_key()).formerly("storage");
    scene.inbox().subscribe("orders", ordered).build().unwrap().accept(record("a")).await.unwrap();
    let client = scene.database.client().await;
    for key in ["stock", "storage"] {
        let refused = client.execute("SELECT inbox_backfill_step($1, ARRAY[1], '{}')", &[&key]).await.unwrap_err();
        let message = refused.as_db_error().unwrap().message();
        assert!(message.starts_with(&format!("cannot backfill {key}: it is ordered")), "{message}");
    }
}

// Accept locks the poisoned head of an order key, and a person may have a transaction open.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_delivery_ends_neither_a_canary_nor_a_bulk_discard() {
    let (scene, is_mended) = (Scene::new().await, Arc::new(AtomicBool::new(false)));
    let mended = Arc::clone(&is_mended);
    let answer = move |_: &_| if mended.load(Ordering::SeqCst) { Ok(()) } else { Err(Failure::poison("broken")) };
    let inbox = scene.inbox().subscribe("orders", Runs::new().answering("stock", answer)).build().unwrap();
    inbox.accept(record("oldest")).await.unwrap();
    inbox.drain().await.unwrap();
    inbox.accept_all(records(1_100)).await.unwrap();
    inbox.drain().await.unwrap();
    let mut other = scene.database.client().await;
    let locking = other.transaction().await.unwrap();
    let oldest =
        "SELECT 1 FROM inbox_delivery WHERE message_seq = (SELECT seq FROM inbox_message WHERE message_id = 'oldest')
                  FOR NO KEY UPDATE";
    assert_eq!(locking.execute(oldest, &[]).await.unwrap(), 1);

    let served = Served::on(&scene).await;
    let discard = form(&served.address, "verb=discard&handler=stock").await;
    let end = ended(&served.address, &send(&served.address, &discard).await).await;
    assert_eq!(end, "finished: 1,100 discarded");

    inbox.accept_all((0..39).map(|number| record(&format!("more-{number}")))).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.count("inbox_poisoned").await, 40);
    is_mended.store(true, Ordering::SeqCst);
    let running = inbox.start().await.unwrap();
    let (operator, canary) = (scene.store.operate(), Canary::default().steps([1, 10, 20]));
    let of_stock = DeliveryFilter::default().handler_key("stock");
    let mut steps = Vec::new();
    let on_progress = |progress: &wharf::operate::CanaryProgress| {
        steps.push(progress.replayed);
        ControlFlow::Continue(())
    };
    let end = operator.replay_canary(&of_stock, 100, &canary, on_progress).await.unwrap();
    assert_eq!((end.replayed, end.done, end.failed, end.stopped), (39, 39, 0, None));
    assert_eq!(steps[0], 1, "{steps:?}");
    assert_eq!(scene.count("inbox_poisoned").await, 1);
    locking.rollback().await.unwrap();
    let end = operator.replay_canary(&of_stock, 100, &canary, |_| ControlFlow::Continue(())).await.unwrap();
    assert_eq!((end.replayed, end.done), (1, 1));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}
