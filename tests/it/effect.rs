//! Transactional handlers of the tests: each run writes a row to the table `effect`, and the test counts the committed
//! rows.

use std::time::Duration;

use diesel::sql_types::Text;
use futures_util::future::BoxFuture;
use wharf::{Failure, Message, Raw, Registration, TxHandler, tx_handler};

pub use super::scene::Connection;
use super::scene::{Db, Runs, Scene, key};

/// Creates the table.
pub async fn prepare(scene: &Scene) {
    scene.database.execute("CREATE TABLE IF NOT EXISTS effect (message_id text)").await;
}

/// The messages with effects, sorted; a message with two effects is listed twice.
pub async fn effects(scene: &Scene) -> Vec<String> {
    scene.database.query_texts("SELECT message_id FROM effect ORDER BY 1").await
}

/// Writes the effect of a message.
pub async fn write(conn: &mut Connection, message_id: &str) -> Result<(), diesel::result::Error> {
    use diesel_async::RunQueryDsl;
    diesel::sql_query("INSERT INTO effect VALUES ($1)").bind::<Text, _>(message_id).execute(conn).await?;
    Ok(())
}

/// Runs any statement.
pub async fn execute(conn: &mut Connection, sql: &str) -> Result<(), diesel::result::Error> {
    use diesel_async::RunQueryDsl;
    diesel::sql_query(sql).execute(conn).await?;
    Ok(())
}

/// A transactional handler that records its run, writes the effect, and returns the result of `then`.
pub fn writing<F>(runs: &Runs, name: &'static str, then: F) -> Registration<Db>
where
    F: Fn(Message<Raw>) -> BoxFuture<'static, Result<(), Failure>> + Send + Sync + 'static,
{
    tx_handler(key(name), Writing { runs: runs.clone(), then })
}

struct Writing<F> {
    runs: Runs,
    then: F,
}

impl<F> TxHandler<Raw, Connection> for Writing<F>
where
    F: Fn(Message<Raw>) -> BoxFuture<'static, Result<(), Failure>> + Send + Sync + 'static,
{
    async fn handle(&self, message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
        self.runs.note(&message);
        write(conn, message.id()).await?;
        (self.then)(message).await
    }
}

/// Like [`writing`], then works for this long.
pub fn writing_for(runs: &Runs, name: &'static str, duration: Duration) -> Registration<Db> {
    writing(runs, name, move |_| {
        Box::pin(async move {
            tokio::time::sleep(duration).await;
            Ok(())
        })
    })
}

/// Like [`writing`], with nothing after it.
pub fn writing_only(runs: &Runs, name: &'static str) -> Registration<Db> {
    writing(runs, name, |_| Box::pin(async { Ok(()) }))
}
