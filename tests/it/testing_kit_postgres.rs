//! The kit for users' tests on their own PostgreSQL: a transactional handler gets the same connection as in production,
//! and only the handler's own writes stay behind.

use std::time::Duration;

use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
use wharf::flow::RateLimit;
use wharf::testing::{CrashPoint, State, TestInbox};
use wharf::{Failure, HandlerKey, Inbox, Message, Postgres, Raw, Record, RetryPolicy, handler, tx_handler};

use crate::scene::Scene;
use support::database::TestDatabase;

const KEY: HandlerKey = HandlerKey::new("stock.reserve");

/// The service's own table, in `public` as in production.
async fn own_table() -> TestDatabase {
    let database = TestDatabase::create().await;
    database.execute("CREATE TABLE reserved (id bigint GENERATED ALWAYS AS IDENTITY)").await;
    database
}

async fn reserve(_: Message<Raw>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
    conn.batch_execute("INSERT INTO reserved DEFAULT VALUES").await?;
    Ok(())
}

async fn test_inbox(database: &TestDatabase) -> TestInbox<Postgres> {
    TestInbox::on_postgres(&database.url(), |inbox| inbox.subscribe("orders", tx_handler(KEY, reserve))).await.unwrap()
}

async fn schemas(database: &TestDatabase) -> Vec<String> {
    database.query_texts("SELECT nspname::text FROM pg_namespace WHERE starts_with(nspname, 'wharf_test_')").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transactional_handler_that_crashes_leaves_nothing_and_takes_effect_once() {
    let database = own_table().await;
    let inbox = test_inbox(&database).await;
    let reserved = "SELECT count(*) FROM reserved";
    inbox.accept(Record::new("orders").with_id("order-17")).await.unwrap();
    inbox.crash_at(CrashPoint::AfterHandler);
    inbox.drain().await.unwrap();
    assert_eq!(database.query_one_i64(reserved).await, 0);
    inbox.assert_state("order-17", KEY, State::Running).await;
    inbox.advance_past_lease().await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 1);
    let done = inbox.assert_state("order-17", KEY, State::Done).await;
    assert_eq!((done.attempts, done.crashes), (2, 0));
    assert_eq!(database.query_one_i64(reserved).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn idempotence_is_asserted_for_both_kinds_of_handler() {
    let database = own_table().await;
    let inbox = test_inbox(&database).await;
    let count = async || database.query_one_i64("SELECT count(*) FROM reserved").await;
    inbox.assert_idempotent(Record::new("orders").with_id("order-17"), count).await;
    assert_eq!(count().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_are_due_when_the_time_has_passed() {
    let database = TestDatabase::create().await;
    let failing = handler(KEY, async |_: Message<Raw>| Err::<(), _>(Failure::retry("no")))
        .retry(RetryPolicy::exponential().max_retries(1));
    let inbox = TestInbox::on_postgres(&database.url(), |inbox| inbox.subscribe("orders", failing)).await.unwrap();
    inbox.accept(Record::new("orders").with_id("order-17")).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 1);
    let first = inbox.assert_state("order-17", KEY, State::Pending).await;
    assert!(!first.due_in.is_zero());
    assert_eq!(inbox.drain().await.unwrap(), 0);
    inbox.advance(Duration::from_secs(3_600)).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 1);
    inbox.assert_state("order-17", KEY, State::Poisoned).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_schema_of_a_test_is_dropped_with_its_inbox_and_not_shared() {
    let database = own_table().await;
    let (one, other) = (test_inbox(&database).await, test_inbox(&database).await);
    assert_eq!(schemas(&database).await.len(), 2);
    one.accept(Record::new("orders").with_id("order-17")).await.unwrap();
    assert_eq!(other.drain().await.unwrap(), 0);
    drop((one, other));
    assert_eq!(schemas(&database).await, [""; 0]);
    assert_eq!(database.query_one_i64("SELECT count(*) FROM pg_tables WHERE tablename LIKE 'inbox%'").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_schema_of_a_killed_test_is_removed_by_a_later_one() {
    let database = own_table().await;
    database.execute("CREATE SCHEMA wharf_test_0000000001_0123456789abcdef").await;
    database.execute("CREATE SCHEMA wharf_test_of_mine").await;
    let inbox = test_inbox(&database).await;
    let left = schemas(&database).await;
    assert!(!left.contains(&"wharf_test_0000000001_0123456789abcdef".to_owned()), "{left:?}");
    assert!(left.contains(&"wharf_test_of_mine".to_owned()), "only what the kit made is removed: {left:?}");
    drop(inbox);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inbox_that_cannot_be_built_leaves_no_schema() {
    let database = TestDatabase::create().await;
    let refused = TestInbox::on_postgres(&database.url(), |inbox| inbox).await.unwrap_err();
    assert!(refused.is_configuration());
    assert_eq!(schemas(&database).await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_keys_of_a_build_are_known_without_a_database() {
    let scene = Scene::new().await;
    let configure = |inbox: wharf::InboxBuilder<Postgres>| {
        inbox.subscribe("orders", tx_handler(KEY, reserve).formerly("reserve_stock"))
    };
    let manifest = configure(wharf::InboxBuilder::without_store()).manifest();
    let built = configure(Inbox::builder(scene.store.clone())).build().unwrap();
    assert_eq!(manifest, built.manifest());
    let refused = configure(wharf::InboxBuilder::<Postgres>::without_store()).build().unwrap_err();
    assert!(refused.to_string().contains("no store"), "{refused}");
}

// The server's clock cannot be moved, so the kit moves every stored timestamp instead: a column that it leaves out
// would not move.
#[tokio::test(flavor = "multi_thread")]
async fn moving_the_clock_moves_every_timestamp_of_the_schema() {
    let scene = Scene::new().await;
    let stamps = "SELECT c.table_name || ' ' || c.column_name FROM information_schema.columns c
                  JOIN information_schema.tables t USING (table_schema, table_name)
                  WHERE c.table_schema = current_schema() AND c.data_type LIKE 'timestamp%' AND t.table_type = 'BASE TABLE'
                    AND c.table_name LIKE 'inbox%' AND c.table_name <> 'inbox_migration'";
    let statement = include_str!("../../src/store/postgres/testing.rs");
    let moves = |stamp: &str| {
        let (table, column) = stamp.split_once(' ').unwrap();
        let of_table = statement.split("UPDATE ").find(|part| part.split_whitespace().next() == Some(table));
        of_table.is_some_and(|part| part.contains(&format!("{column} = {column} - elapsed")))
    };
    let stamps = scene.database.query_texts(stamps).await;
    assert!(stamps.len() > 20, "{stamps:?}");
    let forgotten: Vec<_> = stamps.iter().filter(|stamp| !moves(stamp)).collect();
    assert!(forgotten.is_empty(), "MoveClock leaves out {forgotten:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_limit_allows_more_when_the_clock_has_moved() {
    let database = TestDatabase::create().await;
    let limited = handler(KEY, async |_: Message<Raw>| Ok::<(), Failure>(())).rate(RateLimit::per_hour(1).burst(3));
    let inbox = TestInbox::on_postgres(&database.url(), |inbox| inbox.subscribe("orders", limited)).await.unwrap();
    for number in 0..20 {
        inbox.accept(Record::new("orders").with_id(format!("order-{number}"))).await.unwrap();
    }
    let hour = Duration::from_secs(3_600);
    assert_eq!(inbox.drain().await.unwrap(), 3);
    assert_eq!(inbox.drain().await.unwrap(), 0);
    for hours in [1, 2, 1] {
        inbox.advance(hour * hours).await.unwrap();
        assert_eq!(inbox.drain().await.unwrap(), usize::try_from(hours).unwrap());
    }
    // At most a burst is saved up.
    inbox.advance(hour * 100).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 3);
}
