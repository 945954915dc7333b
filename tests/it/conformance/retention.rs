//! Retention: messages that were finished long enough ago are deleted whole; nothing else is ever deleted.

use std::time::Duration;

use futures_util::future::join;
use wharf::{Failure, Inbox, Receipt, Retention};
use wharf::operate::{Purgeable, Purged};

use super::scene::{Database, Db, Runs, Scene, quick, record, records, status, within};

const DAY: Duration = Duration::from_secs(86_400);

/// Makes the deliveries of these messages look finished this many days ago.
async fn age(scene: &Scene, ids: &str, days: u32) {
    let seqs = format!("IN (SELECT seq FROM inbox_message WHERE message_id LIKE '{ids}')");
    let ago = format!("now() - interval '{days} days'");
    scene
        .database
        .execute(&format!(
            "UPDATE inbox_delivery SET finished_at = {ago} WHERE message_seq {seqs} AND finished_at IS NOT NULL;
             UPDATE inbox_message SET received_at = {ago} - interval '1 minute' WHERE seq {seqs}"
        ))
        .await;
}

async fn purge(scene: &Scene, retention: &Retention) -> Purged {
    within(scene.store.purge(retention, |_| {})).await.unwrap()
}

async fn message_ids(scene: &Scene) -> Vec<String> {
    scene.database.query_texts("SELECT message_id FROM inbox_message ORDER BY 1").await
}

#[tokio::test(flavor = "multi_thread")]
async fn old_done_and_discarded_deliveries_are_deleted_with_their_message() {
    let scene = Scene::new().await;
    let answering = Runs::new().answering("stock", |message| match message.id() {
        "discarded" => Err(Failure::discard("not ours")),
        "poisoned" => Err(Failure::poison("hopeless")),
        "later" => Err(Failure::snooze(DAY)),
        _ => Ok(()),
    });
    let inbox = scene.inbox().subscribe("orders", answering).build().unwrap();
    inbox.accept_all(["done", "discarded", "poisoned", "later"].map(record)).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.database.replay("discarded", "stock", None).await, 1);
    inbox.drain().await.unwrap();
    assert_eq!(scene.count("inbox_history").await, 1);
    age(&scene, "%", 8).await;
    inbox.accept(record("young")).await.unwrap();
    inbox.drain().await.unwrap();
    let retention = Retention::after(7 * DAY);

    let would = scene.store.purgeable(&retention).await.unwrap();
    assert_eq!((would.messages, would.deliveries, message_ids(&scene).await.len()), (2, 2, 5));
    let mut told = Vec::new();
    let purged = scene.store.purge(&retention, |so_far| told.push(so_far.messages)).await.unwrap();

    assert_eq!((purged.messages, purged.deliveries, purged.identities_kept), (2, 2, 0));
    assert_eq!(told.last(), Some(&2));
    assert_eq!(message_ids(&scene).await, ["later", "poisoned", "young"]);
    assert_eq!(scene.count("inbox_delivery").await, 3);
    assert_eq!(scene.store.purgeable(&retention).await.unwrap(), Purgeable::default());
    assert_eq!(scene.count("inbox_history WHERE message_seq NOT IN (SELECT seq FROM inbox_message)").await, 0);
    // Retention is the window of deduplication.
    assert_eq!(inbox.accept(record("done")).await.unwrap(), Receipt::Accepted { deliveries: 1 });
}

/// One delivery of the matrix: handler, state, days since it was finished.
type Cell = (usize, &'static str, u64);

const HANDLERS: [&str; 3] = ["stock", "mail", "audit"];
const PERIODS: [u64; 3] = [5, 20, 1];

fn may_go((handler, state, days): &Cell) -> bool {
    matches!(*state, "done" | "discarded") && *days > PERIODS[*handler]
}

fn cell_sql(seq: usize, (handler, state, days): &Cell) -> String {
    let id = format!("(SELECT handler_id FROM inbox_handler_key WHERE key = '{}')", HANDLERS[*handler]);
    let finished = format!("now() - interval '{days} days' - interval '1 minute'");
    let (status, finished_at, locked_until) = match *state {
        "pending" => (status::OPEN, "NULL", "NULL"),
        "running" => (status::OPEN, "NULL", "now() + interval '1 day'"),
        "done" => (status::DONE, finished.as_str(), "NULL"),
        // Set by hand: its time is unknown.
        "done some time" => (status::DONE, "NULL", "NULL"),
        "poisoned" => (status::POISONED, finished.as_str(), "NULL"),
        "discarded" => (status::DISCARDED, finished.as_str(), "NULL"),
        other => panic!("no such state: {other}"),
    };
    format!(
        "INSERT INTO inbox_delivery (message_seq, handler_id, due_at, finished_at, locked_until, status)
         VALUES ({seq}, {id}, now() - interval '50 days', {finished_at}, {locked_until}, {status});"
    )
}

// A message is deleted only when each of its deliveries is done or discarded and old enough. Poisoned ones are never
// deleted.
#[tokio::test(flavor = "multi_thread")]
async fn of_a_random_matrix_of_states_exactly_the_expired_messages_are_deleted() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox =
        HANDLERS.into_iter().fold(scene.inbox(), |inbox, name| inbox.subscribe("orders", runs.handler(name)));
    inbox.build().unwrap().accept_or_quarantine([record("").with_payload("quarantined")]).await.unwrap();
    scene.database.refuse_deleting_unfinished_rows().await;
    let states = ["pending", "running", "done", "done", "done", "done some time", "poisoned", "discarded"];
    let (mut sql, mut expected, mut deliveries) = (String::new(), Vec::new(), 0);
    for seq in 1..=400 {
        // Every twentieth message lost its deliveries, or never had any.
        let is_orphan = seq % 20 == 0;
        let days = [0, 3, 10, 30][rand::random_range(0..4)];
        let received = if is_orphan { days } else { 40 };
        sql.push_str(&format!(
            "INSERT INTO inbox_message (seq, message_id, source, topic, payload_hash, received_at)
             VALUES ({seq}, 'm{seq:03}', 'orders', 'orders', 'x'::bytea, now() - interval '{received} days');"
        ));
        let cells: Vec<Cell> = (0..HANDLERS.len())
            .filter(|_| !is_orphan && rand::random_range(0..3) > 0)
            .map(|handler| {
                let days = [0, 3, 10, 30][rand::random_range(0..4)];
                (handler, states[rand::random_range(0..states.len())], days)
            })
            .collect();
        sql.extend(cells.iter().map(|cell| cell_sql(seq, cell)));
        let goes = if cells.is_empty() { received > PERIODS[0] } else { cells.iter().all(may_go) };
        if goes {
            deliveries += cells.len() as u64;
        } else {
            expected.push(format!("m{seq:03} {}", cells.len()));
        }
    }
    scene.database.execute(&sql).await;
    let retention = Retention::after(5 * DAY).for_handler("mail", 20 * DAY).for_handler("audit", DAY).batch_rows(30);

    let would = scene.store.purgeable(&retention).await.unwrap();
    let purged = purge(&scene, &retention).await;

    let left = "SELECT concat_ws(' ', m.message_id, (SELECT count(*) FROM inbox_delivery d WHERE d.message_seq = m.seq))
                FROM inbox_message m ORDER BY 1";
    assert_eq!(scene.database.query_texts(left).await, expected);
    assert_eq!((purged.messages, purged.deliveries), (400 - expected.len() as u64, deliveries));
    assert_eq!((would.messages, would.deliveries), (purged.messages, purged.deliveries));
    assert_eq!(scene.count("inbox_quarantine").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_stays_until_the_longest_period_of_its_handlers_is_over() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene
        .inbox()
        .subscribe("orders", runs.handler("stock"))
        .subscribe("orders", runs.handler("audit.now").formerly("audit"))
        .build()
        .unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    age(&scene, "a", 8).await;

    // The same with a former key.
    assert_eq!(purge(&scene, &Retention::after(DAY).for_handler("audit", 9 * DAY)).await.messages, 0);
    // Both deliveries exist, so a redelivery adds none.
    assert_eq!(inbox.accept(record("a")).await.unwrap(), Receipt::Duplicate { added: 0 });
    assert_eq!(purge(&scene, &Retention::after(DAY).for_handler("audit.now", 7 * DAY)).await.deliveries, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_retention_or_one_with_an_unknown_handler_key_is_refused() {
    let scene = Scene::new().await;
    let build = scene.inbox().subscribe("orders", Runs::new().handler("stock"));
    let error = build.retention(Retention::after(DAY).batch_rows(0).every(Duration::ZERO)).build().unwrap_err();
    assert!(error.is_configuration());
    assert!(error.to_string().contains("`batch_rows` of retention") && error.to_string().contains("the interval of"), "{error}");

    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();
    age(&scene, "a", 8).await;
    for wrong in [Retention::after(DAY).batch_rows(0), Retention::after(DAY).for_handler("stok", 30 * DAY)] {
        let error = scene.store.purge(&wrong, |_| {}).await.unwrap_err();
        assert!(error.is_configuration(), "{error}");
        assert!(scene.store.purgeable(&wrong).await.unwrap_err().is_configuration());
    }
    assert_eq!(scene.count("inbox_message").await, 1);
}

/// This many messages that were finished nine days ago.
async fn finished(scene: &Scene, count: usize) {
    let inbox = scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap();
    inbox.accept_all(records(count)).await.unwrap();
    inbox.drain().await.unwrap();
    age(scene, "%", 9).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_concurrent_purges_count_each_message_once() {
    let scene = Scene::new().await;
    finished(&scene, 300).await;
    let (other, retention) = (scene.another_store().await, Retention::after(DAY).batch_rows(10));

    let (one, two) = within(join(scene.store.purge(&retention, |_| {}), other.purge(&retention, |_| {}))).await;

    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!(one.messages + two.messages, 300, "{one} and {two}");
    assert!(one.is_locked_out() || two.is_locked_out() || one.messages == 0 || two.messages == 0, "{one} and {two}");
    assert_eq!(scene.count("inbox_message").await + scene.count("inbox_delivery").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_of_a_crashed_process_is_continued_when_its_lease_expires() {
    let scene = Scene::new().await;
    finished(&scene, 100).await;
    let (dying, retention) = (scene.another_store().await, Retention::after(DAY).batch_rows(10));
    // The purge is dropped in the pause after its first step, which it cannot leave before.
    let (first, mut begun) = tokio::sync::mpsc::unbounded_channel();
    let (is_aborted, aborted) = std::sync::mpsc::channel::<()>();
    let task = {
        let retention = retention.clone();
        let on_step = move |_: &Purged| {
            first.send(()).unwrap_or_default();
            let _ = aborted.recv();
        };
        tokio::spawn(async move { dying.purge(&retention, on_step).await })
    };
    within(begun.recv()).await.unwrap();
    task.abort();
    drop(is_aborted);
    drop(task.await);
    let left = scene.count("inbox_message").await;
    let lease = "UPDATE inbox_lease SET held_until = now()";
    // A step that has begun is completed, and no further one starts.
    scene.database.execute(&format!("{lease} + interval '1 minute', holder = 1")).await;

    let locked_out = purge(&scene, &retention).await;
    assert!(locked_out.is_locked_out() && locked_out.messages == 0, "{locked_out}");
    scene.database.execute(&format!("{lease} - interval '1 second'")).await;
    let purged = purge(&scene, &retention).await;

    assert!(!purged.is_locked_out() && left < 100 && left > 0, "{purged}, {left} left");
    assert_eq!(scene.count("inbox_message").await, 0);
    // The lease is free as soon as a purge has ended.
    assert!(!purge(&scene, &retention).await.is_locked_out());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_inbox_purges_and_shutdown_ends_the_purge_between_two_steps() {
    let scene = Scene::new().await;
    finished(&scene, 2_000).await;
    let builder = scene.inbox().limits(quick()).subscribe("orders", Runs::new().handler("stock"));
    let retention = Retention::after(DAY).every(Duration::from_secs(1)).batch_rows(1);
    let inbox = builder.retention(retention).build().unwrap();

    let running = inbox.start().await.unwrap();
    scene.until("SELECT (count(*) < 2000)::int::bigint FROM inbox_message").await;
    within(running.shutdown(Duration::from_secs(5))).await.unwrap();

    assert!(scene.count("inbox_message").await > 0);
    // The lease was released.
    assert_eq!(scene.count("inbox_lease WHERE held_until > now()").await, 0);
    let builder = scene.inbox().subscribe("orders", Runs::new().handler("stock"));
    let inbox = builder.retention(Retention::after(DAY).every(Duration::from_secs(1))).build().unwrap();
    let running = inbox.start().await.unwrap();
    scene.until("SELECT (count(*) = 0)::int::bigint FROM inbox_message").await;
    within(running.shutdown(Duration::from_secs(5))).await.unwrap();
}

// A purge that deletes a message while it is redelivered must neither fail the accept nor lose a delivery.
#[tokio::test(flavor = "multi_thread")]
async fn continuous_redeliveries_and_purges_lose_nothing_and_cause_no_error() {
    let scene = Scene::new().await;
    let (stock, mail) = (Runs::new(), Runs::new());
    let one = scene.inbox().subscribe("orders", stock.handler("stock")).build().unwrap();
    // This inbox adds deliveries to messages that the other one has accepted and run.
    let two = scene.another_inbox().await;
    let two = two.subscribe("orders", stock.handler("stock")).subscribe("orders", mail.handler("mail")).build().unwrap();
    let (one_runs, two_runs) = (one.start().await.unwrap(), two.start().await.unwrap());
    let redeliver = async |inbox: &Inbox<Db>, stopped: tokio::sync::watch::Receiver<bool>| {
        let mut wanted = 0;
        while !*stopped.borrow() {
            for receipt in inbox.accept_all(records(40)).await.unwrap() {
                wanted += match receipt {
                    Receipt::Accepted { deliveries } => deliveries,
                    Receipt::Duplicate { added } => added,
                    other => panic!("{other:?}"),
                };
            }
        }
        wanted
    };
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let purger = scene.another_store().await;
    // Each record is purged and accepted again several times.
    let purging = async {
        let mut purged = 0;
        while purged < 200 {
            purged += purger.purge(&Retention::after(Duration::ZERO), |_| {}).await.unwrap().messages;
        }
        stop.send_replace(true);
    };

    let ((), (by_one, by_two)) =
        within(join(purging, join(redeliver(&one, stopped.clone()), redeliver(&two, stopped)))).await;
    scene.settled().await;

    assert_eq!(stock.count() + mail.count(), by_one + by_two);
    assert_eq!(scene.count("inbox_delivery WHERE message_seq NOT IN (SELECT seq FROM inbox_message)").await, 0);
    assert_eq!(scene.count("inbox_poisoned").await + scene.count("inbox_quarantine").await, 0);
    for running in [one_runs, two_runs] {
        within(running.shutdown(Duration::from_secs(5))).await.unwrap();
    }
}
