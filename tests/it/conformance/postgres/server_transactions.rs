//! Transactional handlers beside other sessions, and what PostgreSQL makes of an error in a transaction: all of it is lost, where SQLite
//! undoes the statement alone.

use wharf::{Failure, Message, Raw, tx_handler};

use super::effect::{self, Connection, effects};
use super::scene::{Runs, key, records};
use super::transactional::{once_more, outcome_of, scene};

// A worker whose claim is no longer valid must not commit what its handler wrote.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_lost_before_the_commit_rolls_the_writes_back() {
    let scene = scene().await;
    let (runs, url) = (Runs::new(), scene.database.url());
    // Somebody else claims it while the first run is under way, as after a lease that ran out.
    let robbed = effect::writing(&runs, "stock", move |message| {
        let url = url.clone();
        Box::pin(async move {
            if message.attempt() == 1 {
                let other = support::postgres::connect(&url).await;
                other.batch_execute("UPDATE inbox_delivery SET attempts = attempts + 1, locked_until = NULL").await?;
            }
            Ok(())
        })
    });
    assert_eq!(outcome_of(&scene, robbed).await, "done|0");
    assert_eq!((runs.count(), effects(&scene).await), (2, vec!["a".to_owned()]));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_sql_error_that_the_handler_swallows_is_a_failure() {
    async fn careless(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::write(conn, message.id()).await?;
        let _ = effect::execute(conn, "SELECT 1 / 0").await;
        Ok(())
    }
    let scene = scene().await;
    let registration = tx_handler(key("stock"), careless).retry(once_more());
    assert_eq!(outcome_of(&scene, registration).await, "poisoned|retries exhausted|2");
    assert!(effects(&scene).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_handler_left_in_the_session_does_not_reach_the_next() {
    async fn setting(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        effect::execute(conn, "SET LOCAL lock_timeout = '7s'").await?;
        effect::write(conn, message.id()).await?;
        Ok(())
    }
    let scene = scene().await;
    let inbox = scene.inbox().subscribe("orders", tx_handler(key("stock"), setting)).build().unwrap();
    inbox.accept_all(records(30)).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 30);
    assert_eq!(effects(&scene).await.len(), 30);
    let open = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = '{}' AND state LIKE 'idle in transaction%'",
        scene.database.name()
    );
    assert_eq!(scene.database.query_one_i64(&open).await, 0);
}
