//! Settings of PostgreSQL sessions: the engine and each handler find their own.

use std::time::Duration;

use wharf::store::PostgresOptions;
use wharf::{Failure, Inbox, Message, Postgres, Raw, RetryPolicy, Store, tx_handler};

use crate::effect::{self, Connection, effects};
use crate::scene::{Scene, key, quick, records};

const SHARED: usize = 16;

/// Handlers share one session.
async fn store(scene: &Scene) -> Store<Postgres> {
    let options = PostgresOptions::default().handler_connections(1);
    Store::<Postgres>::connect_with(&scene.database.url(), options).await.unwrap()
}

async fn scene() -> Scene {
    let scene = Scene::new().await;
    effect::prepare(&scene).await;
    scene
}

// The engine's statements keep one plan for a session. A handler's statements are planned as the server is configured,
// also after a delivery that was rolled back.
#[tokio::test(flavor = "multi_thread")]
async fn the_engine_and_handlers_plan_with_their_own_settings() {
    async fn noting(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        let seen = "INSERT INTO effect SELECT concat_ws(' ', current_setting('plan_cache_mode'), current_setting('enable_seqscan'))";
        effect::execute(conn, seen).await?;
        let fails = message.attempt() == 1 && message.id().ends_with('7');
        if fails { Err(Failure::retry("the first attempt")) } else { Ok(()) }
    }
    for share in [1, SHARED] {
        let scene = scene().await;
        let note = "CREATE TABLE of_engine (settings text);
                    CREATE FUNCTION note_engine() RETURNS trigger LANGUAGE plpgsql AS $$
                    BEGIN
                        INSERT INTO of_engine SELECT concat_ws(' ', current_setting('plan_cache_mode'), current_setting('enable_seqscan'));
                        RETURN NULL;
                    END $$;
                    CREATE TRIGGER note_engine AFTER UPDATE ON inbox_delivery FOR EACH ROW
                    WHEN (NEW.status <> 2) EXECUTE FUNCTION note_engine()";
        scene.database.execute(note).await;
        let at_once = RetryPolicy::exponential().delay_by(|_, _| Some(Duration::ZERO));
        let handler = tx_handler(key("stock"), noting).concurrency(1).share_transaction(share).retry(at_once);
        let inbox = Inbox::builder(store(&scene).await).limits(quick()).subscribe("orders", handler).build().unwrap();
        inbox.accept_all(records(100)).await.unwrap();
        let running = inbox.start().await.unwrap();
        scene.settled().await;
        running.shutdown(Duration::from_secs(5)).await.unwrap();

        let mut of_handlers = effects(&scene).await;
        assert_eq!(of_handlers.len(), 100);
        of_handlers.dedup();
        assert_eq!(of_handlers, ["auto on"], "with {share} in a transaction");
        let of_engine = scene.database.query_texts("SELECT DISTINCT settings FROM of_engine").await;
        assert_eq!(of_engine, ["force_generic_plan off"], "with {share} in a transaction");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn session_settings_of_one_handler_do_not_reach_the_next() {
    async fn setting(_: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        let seen = "INSERT INTO effect SELECT concat_ws(' ', current_setting('work_mem'), current_setting('TimeZone'), current_user)";
        effect::execute(conn, seen).await?;
        let set =
            ["SET work_mem = '7MB'", "SET LOCAL TIME ZONE 'Asia/Tokyo'", "SET ROLE pg_monitor", "SET LOCAL ROLE NONE"];
        for set in set {
            effect::execute(conn, set).await?;
        }
        Ok(())
    }
    let scene = scene().await;
    let handler = tx_handler(key("stock"), setting).concurrency(1).share_transaction(SHARED);
    let inbox = Inbox::builder(store(&scene).await).limits(quick()).subscribe("orders", handler).build().unwrap();
    inbox.accept_all(records(100)).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 100);

    let mut seen = effects(&scene).await;
    assert_eq!(seen.len(), 100);
    seen.dedup();
    let fresh = "SELECT concat_ws(' ', current_setting('work_mem'), 'UTC', current_user)";
    assert_eq!(seen, scene.database.query_texts(fresh).await);
}

// A hanging statement is cancelled with its handler, and the others continue in the same transaction.
