//! The function for settling needs no privilege on a table, finds its own inbox, and works through a pooler.

use std::time::Duration;

use wharf::{Inbox, Postgres, Store};

use crate::any_client::{acting, connect, settling, soon};
use crate::effect::{self, effects};
use crate::roles::{url_of, with_roles};
use crate::scene::{Runs, Scene, quick, record};
use support::database_server::Server;
use support::pgbouncer::PgBouncer;

#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_table_privileges_settles_its_deliveries() {
    let (scene, runs) = (with_roles().await, Runs::new());
    effect::prepare(&scene).await;
    let name = scene.database.name();
    scene.database.execute(&format!("GRANT INSERT ON effect TO {name}_client")).await;
    let select = "SELECT 1 FROM inbox_delivery";
    for (role, sql) in
        [("read", "SELECT inbox_settle('[1,1,1,1]')"), ("client", select), ("client", "SELECT * FROM inbox_status")]
    {
        let client = connect(&url_of(&scene, role)).await.unwrap();
        assert_eq!(client.batch_execute(sql).await.unwrap_err().code().unwrap().code(), "42501", "{role}: {sql}");
    }
    let url = url_of(&scene, "client");
    let inbox = scene.inbox().subscribe("orders", settling(&runs, "stock", &url)).build().unwrap();

    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();

    assert_eq!((scene.count_done_at_first().await, effects(&scene).await.len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn with_an_inbox_in_each_of_two_schemas_a_claim_settles_in_the_schema_that_is_named() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    effect::prepare(&scene).await;
    scene.database.execute("CREATE SCHEMA second").await;
    let second = format!("{}?options=-c%20search_path%3Dsecond", scene.database.url());
    let store = Store::<Postgres>::connect(&second).await.unwrap();
    store.migrate().await.unwrap();
    let url = scene.database.url();
    // Both inboxes have a delivery with the same ids.
    scene.inbox().subscribe("orders", Runs::new().handler("stock")).build().unwrap().accept(record("a")).await.unwrap();
    let settling = acting(&runs, "stock", move |message| {
        let url = url.clone();
        Box::pin(async move {
            let client = connect(&url).await?;
            client
                .execute("SELECT second.inbox_settle($1)", &[&message.claim()])
                .await
                .map_err(|error| soon(&error.into()))?;
            Ok(())
        })
    });
    let inbox = Inbox::builder(store).limits(quick()).subscribe("orders", settling).build().unwrap();

    inbox.accept(record("a")).await.unwrap();
    inbox.drain().await.unwrap();

    assert_eq!(runs.count(), 1);
    assert_eq!(scene.count("second.inbox_status WHERE state = 'done'").await, 1);
    assert_eq!(scene.states().await, ["a stock pending"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn handlers_settle_through_a_pooler_in_transaction_mode() {
    let (scene, runs) = (Scene::new().await, Runs::new());
    effect::prepare(&scene).await;
    let pgbouncer = PgBouncer::start(Server::shared().await.url()).await;
    let url = pgbouncer.url(scene.database.name());
    let inbox = Inbox::builder(Store::<Postgres>::connect(&url).await.unwrap()).limits(quick());
    let inbox = inbox.subscribe("orders", settling(&runs, "stock", &url)).build().unwrap();
    let running = inbox.start().await.unwrap();

    inbox.accept_all(crate::scene::records(30)).await.unwrap();
    scene.settled().await;

    assert_eq!((scene.count_done_at_first().await, effects(&scene).await.len()), (30, 30));
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}
