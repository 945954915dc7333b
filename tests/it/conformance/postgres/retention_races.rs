//! Retention that runs concurrently with operators, accepts and lock holders on the same rows.

use std::time::Duration;

use tokio::sync::oneshot;
use wharf::{Failure, Inbox, Postgres, Receipt, Retention};

use super::scene::{Runs, Scene, record, records, within};

const DAY: Duration = Duration::from_secs(86_400);
const WAITS: &str = "SELECT (count(*) > 0)::int::bigint FROM pg_stat_activity
                     WHERE datname = current_database() AND wait_event_type = 'Lock'";

/// An inbox with these messages, all discarded.
async fn discarded(scene: &Scene, count: usize) -> Inbox<Postgres> {
    let discarding = Runs::new().answering("stock", |_| Err(Failure::discard("not ours")));
    let inbox = scene.inbox().subscribe("orders", discarding).build().unwrap();
    inbox.accept_all(records(count)).await.unwrap();
    inbox.drain().await.unwrap();
    inbox
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_is_replayed_while_it_is_purged_stays_with_its_message() {
    let scene = Scene::new().await;
    discarded(&scene, 5).await;
    let mut operator = scene.database.client().await;
    let replay = operator.transaction().await.unwrap();
    replay.execute("SELECT inbox_replay('m000002', 'stock')", &[]).await.unwrap();
    let store = scene.store.clone();
    let purging = tokio::spawn(async move { store.purge(&Retention::after(Duration::ZERO), |_| {}).await });
    scene.until(WAITS).await;
    replay.commit().await.unwrap();

    assert_eq!(within(purging).await.unwrap().unwrap().messages, 4);
    assert_eq!(scene.states().await, ["m000002 stock pending"]);
}

// A purge never waits for a lock, because others would then wait behind it.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_message_is_skipped_and_purged_the_next_time() {
    let scene = Scene::new().await;
    discarded(&scene, 5).await;
    let mut other = scene.database.client().await;
    let holding = other.transaction().await.unwrap();
    let lock = "SELECT 1 FROM inbox_message WHERE message_id = 'm000002' FOR NO KEY UPDATE";
    holding.execute(lock, &[]).await.unwrap();

    let retention = Retention::after(Duration::ZERO);
    assert_eq!(within(scene.store.purge(&retention, |_| {})).await.unwrap().messages, 4);
    holding.rollback().await.unwrap();
    assert_eq!(within(scene.store.purge(&retention, |_| {})).await.unwrap().messages, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_the_server_cancels_is_retried_smaller_and_grows_again() {
    let scene = Scene::new().await;
    discarded(&scene, 400).await;
    scene
        .database
        .execute(
            "CREATE FUNCTION too_many() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF (SELECT count(*) FROM gone) > 30 THEN RAISE EXCEPTION 'canceling statement due to statement timeout'; END IF;
                 RETURN NULL;
             END $$;
             CREATE TRIGGER too_many AFTER DELETE ON inbox_message REFERENCING OLD TABLE AS gone
             FOR EACH STATEMENT EXECUTE FUNCTION too_many()",
        )
        .await;
    let mut steps = Vec::new();
    let retention = Retention::after(Duration::ZERO).batch_rows(200);
    let purged = within(scene.store.purge(&retention, |so_far| steps.push(so_far.messages))).await.unwrap();
    assert_eq!((purged.messages, scene.count("inbox_message").await), (400, 0));
    let sizes: Vec<u64> = steps.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(steps[0] == 25 && sizes.iter().all(|size| *size <= 30), "{steps:?}");
    assert!(sizes.iter().any(|size| *size > 25), "{steps:?}");
}

// An accept that looked for the identity before it was written must not find the message gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_not_purged_while_an_accept_may_have_missed_its_identity() {
    let scene = Scene::new().await;
    // Identities are settled one second after they were written, unless a transaction runs for longer.
    super::scene::Database::age_identities(&scene.database, 119).await;
    let runs = Runs::new();
    let inbox = scene.inbox().subscribe("orders", runs.handler("stock")).build().unwrap();
    inbox.accept(record("z")).await.unwrap();
    inbox.drain().await.unwrap();
    // The accept has begun, and waits for another transaction that accepts a record of its batch.
    let mut other = scene.database.client().await;
    let accepting = other.transaction().await.unwrap();
    let insert =
        "INSERT INTO inbox_message (message_id, source, topic, payload_hash) VALUES ('a', 'orders', 'orders', '')";
    accepting.execute(insert, &[]).await.unwrap();
    let (tell, told) = oneshot::channel();
    let accepted = tokio::spawn({
        let inbox = inbox.clone();
        async move { drop(tell.send(inbox.accept_all([record("a"), record("z")]).await.unwrap())) }
    });
    scene.until(WAITS).await;

    let store = scene.store.clone();
    let keeping = Retention::after(Duration::ZERO).keep_identities(DAY);
    let purging = tokio::spawn(async move { store.purge(&keeping, |_| {}).await });
    scene.until("SELECT count(*) FROM inbox_identity").await;
    // Long enough that the identity would be settled: the lease is renewed meanwhile.
    let waited = "SELECT (held_until - interval '63 seconds' > purged_at + interval '119 seconds')::int::bigint
                  FROM inbox_lease, inbox_identity";
    scene.until(waited).await;
    assert_eq!(scene.count("inbox_message WHERE message_id = 'z'").await, 1);
    accepting.rollback().await.unwrap();

    let receipts = within(told).await.unwrap();
    assert_eq!(receipts, [Receipt::Accepted { deliveries: 1 }, Receipt::Duplicate { added: 0 }]);
    accepted.await.unwrap();
    assert_eq!(within(purging).await.unwrap().unwrap().messages, 1);
    assert_eq!(inbox.accept(record("z")).await.unwrap(), Receipt::Duplicate { added: 0 });
    inbox.drain().await.unwrap();
    assert_eq!(runs.sorted(), ["a", "z"]);
}

// A marked message that is replayed keeps its identity, and is a normal message again.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_replayed_after_its_identity_was_written_stays_a_message() {
    let scene = Scene::new().await;
    let inbox = discarded(&scene, 1).await;
    let store = scene.store.clone();
    let keeping = Retention::after(Duration::ZERO).keep_identities(DAY);
    let purging = tokio::spawn(async move { store.purge(&keeping, |_| {}).await });
    scene.until("SELECT count(*) FROM inbox_identity").await;
    assert_eq!(scene.database.query_one_i64("SELECT inbox_replay('m000000', 'stock')").await, 1);
    scene.database.execute("UPDATE inbox_identity SET purged_at = now() - interval '1 hour'").await;

    assert_eq!(within(purging).await.unwrap().unwrap().messages, 0);
    let more = scene.another_inbox().await.subscribe("orders", Runs::new().handler("mail")).build().unwrap();
    assert_eq!(more.accept_all(records(1)).await.unwrap(), [Receipt::Duplicate { added: 1 }]);
    assert_eq!(inbox.drain().await.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kept_identity_takes_no_more_than_64_bytes() {
    let scene = Scene::new().await;
    super::scene::Database::age_identities(&scene.database, 3_600).await;
    discarded(&scene, 1).await;
    let keeping = Retention::after(Duration::ZERO).keep_identities(DAY);
    within(scene.store.purge(&keeping, |_| {})).await.unwrap();
    // The size includes the row header.
    let size = scene.database.query_one_i64("SELECT pg_column_size(i)::bigint FROM inbox_identity i").await;
    assert!(size <= 64, "{size}");
}
