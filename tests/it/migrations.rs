//! The schema: many processes may create it at once, and a build that does not know it never changes it.

use futures_util::future::join_all;
use wharf::{Inbox, Postgres, Store};

use crate::scene::{Runs, Scene, quick, record};
use support::database::TestDatabase;

fn inbox(store: &Store<Postgres>) -> Inbox<Postgres> {
    Inbox::builder(store.clone()).limits(quick()).subscribe("orders", Runs::new().handler("stock")).build().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn many_processes_can_migrate_at_once_and_again() {
    let database = TestDatabase::create().await;
    let stores = join_all((0..8).map(|_| async { Store::connect(&database.url()).await.unwrap() })).await;

    for _ in 0..2 {
        for migrated in join_all(stores.iter().map(Store::migrate)).await {
            migrated.unwrap();
        }
    }

    let twice = "SELECT count(*) FROM (SELECT version FROM inbox_migration GROUP BY 1 HAVING count(*) > 1) versions";
    assert_eq!(database.query_one_i64(twice).await, 0);
    inbox(&stores[0]).accept(record("a")).await.unwrap();
    assert_eq!(inbox(&stores[7]).drain().await.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn migrating_keeps_existing_rows() {
    let scene = Scene::new().await;
    inbox(&scene.store).accept(record("a")).await.unwrap();

    scene.store.migrate().await.unwrap();

    assert_eq!(scene.states().await, ["a stock pending"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_schema_that_this_build_does_not_know_is_refused() {
    let scene = Scene::new().await;
    scene.database.execute("INSERT INTO inbox_migration (version, compatible_with) VALUES (999, 999)").await;

    let refusals = [
        scene.store.migrate().await.unwrap_err(),
        inbox(&scene.store).accept(record("a")).await.unwrap_err(),
        inbox(&scene.store).start().await.map(drop).unwrap_err(),
        inbox(&scene.store).drain().await.unwrap_err(),
    ];

    for error in refusals {
        assert!(error.is_schema() && !error.is_transient(), "{error}");
        assert!(error.to_string().contains("999"), "{error}");
    }
    assert_eq!(scene.database.query_one_i64("SELECT count(*) FROM inbox_message").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_schema_that_is_marked_as_compatible_works() {
    let scene = Scene::new().await;
    scene.database.execute("INSERT INTO inbox_migration (version, compatible_with) VALUES (999, 1)").await;

    scene.store.migrate().await.unwrap();

    inbox(&scene.store).accept(record("a")).await.unwrap();
    assert_eq!(inbox(&scene.store).drain().await.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_schema_is_named_with_its_remedy() {
    let database = TestDatabase::create().await;
    let store = Store::connect(&database.url()).await.unwrap();

    let refusals = [
        inbox(&store).accept(record("a")).await.unwrap_err(),
        inbox(&store).start().await.map(drop).unwrap_err(),
        inbox(&store).drain().await.unwrap_err(),
    ];

    for error in refusals {
        assert!(error.is_schema(), "{error}");
        assert!(error.to_string().contains("migrate()"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_inbox_works_once_the_schema_exists() {
    let database = TestDatabase::create().await;
    let store = Store::connect(&database.url()).await.unwrap();
    let inbox = inbox(&store);
    inbox.accept(record("a")).await.unwrap_err();

    store.migrate().await.unwrap();

    inbox.accept(record("a")).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 1);
}
