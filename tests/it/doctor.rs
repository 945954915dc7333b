//! The doctor on a real server: it reports what is wrong.

use std::time::Duration;

use wharf::{Postgres, Store};

use crate::scene::Scene;
use crate::worker::{Worker, accept, order};
use support::database::TestDatabase;
use support::postgres::Cluster;

async fn codes(store: &Store<Postgres>) -> Vec<String> {
    store.operate().doctor().await.unwrap().symptoms.into_iter().map(|symptom| symptom.code.into()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_without_an_inbox_and_a_read_only_one_are_reported() {
    let database = TestDatabase::create().await;
    let store = Store::<Postgres>::connect(&database.url()).await.unwrap();
    assert_eq!(codes(&store).await, ["no inbox"]);
    store.migrate().await.unwrap();
    assert_eq!(codes(&store).await, [""; 0]);
    let name = database.name();
    database.execute(&format!("ALTER DATABASE {name} SET default_transaction_read_only = on")).await;
    let store = Store::<Postgres>::connect(&database.url()).await.unwrap();
    assert_eq!(codes(&store).await, ["read-only"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_may_lose_acknowledged_data_is_reported() {
    let cluster = Cluster::start_with(&[("fsync", "off"), ("full_page_writes", "off")]).await;
    let store = Store::<Postgres>::connect(&cluster.url("postgres")).await.unwrap();
    store.migrate().await.unwrap();
    assert_eq!(codes(&store).await, ["unsafe durability", "unsafe durability"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_of_a_killed_process_and_the_holder_of_the_oldest_snapshot_are_reported() {
    let scene = Scene::new().await;
    let worker = Worker { lease: Duration::from_secs(60), ..Worker::on(&scene).await };
    accept(&scene, &["stock"], vec![order("held", "hang once")]).await;
    let child = worker.spawn();
    child.await_said("hanging").await;
    child.kill9().await;
    scene.database.execute("UPDATE inbox_processor SET alive_until = now()").await;
    // The server may still be executing a statement of the killed process, whose snapshot would be the oldest.
    let statements_ended = "SELECT (count(*) = 0)::int::bigint FROM pg_stat_activity
                            WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
                              AND backend_type = 'client backend'";
    scene.until(statements_ended).await;
    let client = scene.database.client().await;
    client
        .batch_execute("SET application_name = 'a report'; BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        .await
        .unwrap();

    scene.until("SELECT count(*) FROM inbox_processor WHERE alive_until < now()").await;
    let diagnosis = scene.store.operate().doctor().await.unwrap();
    let dead = diagnosis.symptoms.iter().find(|symptom| symptom.code == "dead process").unwrap();
    assert!(dead.what.contains("1 delivery of stock"), "{dead:?}");
    let oldest = diagnosis.facts.unwrap().oldest_transaction.unwrap();
    assert!(oldest.who.contains("a report") && oldest.who.contains("idle in transaction"), "{oldest:?}");
}
