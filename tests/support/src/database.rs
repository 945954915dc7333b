//! A fresh database for each test, on one server shared by the whole test process.
//!
//! The server is a [`Cluster`] started on first use, or the one that `DATABASE_URL` names. A database becomes unusable,
//! even for leaked pools, as soon as its [`TestDatabase`] is dropped, and is removed a little later.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use tokio_postgres::Client;
use tokio_postgres::types::FromSqlOwned;

use crate::database_server::Server;
use crate::postgres::connect;
use crate::url::with_database;

/// The database of one test; removed when dropped.
#[derive(Debug)]
pub struct TestDatabase {
    name: String,
    server: &'static Server,
    /// For the helpers below; opened on first use, and again if the server closed it during the test.
    helper: Mutex<Option<Arc<Client>>>,
}

impl TestDatabase {
    /// Creates an empty database.
    pub async fn create() -> TestDatabase {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // The random part separates processes that share a server through `DATABASE_URL`.
        let name = format!("wharf_test_{:08x}_{number}", rand::random::<u32>());
        let server = Server::shared().await;
        server.create_database(&name).await;
        TestDatabase { name, server, helper: Mutex::new(None) }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn url(&self) -> String {
        with_database(self.server.url(), &self.name)
    }

    /// A separate connection, for raw SQL.
    pub async fn client(&self) -> Client {
        connect(&self.url()).await
    }

    /// Runs one or more statements.
    pub async fn execute(&self, sql: &str) {
        let client = self.helper().await;
        client.batch_execute(sql).await.unwrap_or_else(|error| panic!("cannot execute {sql}: {error:?}"));
    }

    /// The only value of the only row, a `bigint`.
    pub async fn query_one_i64(&self, sql: &str) -> i64 {
        let values = self.query_column(sql).await;
        let [value] = values[..] else { panic!("not one row but {} from {sql}", values.len()) };
        value
    }

    /// The first column of every row, a `text`.
    pub async fn query_texts(&self, sql: &str) -> Vec<String> {
        self.query_column(sql).await
    }

    async fn query_column<T: FromSqlOwned>(&self, sql: &str) -> Vec<T> {
        let client = self.helper().await;
        let rows = client.query(sql, &[]).await.unwrap_or_else(|error| panic!("cannot query {sql}: {error:?}"));
        rows.iter()
            .map(|row| row.try_get(0).unwrap_or_else(|error| panic!("not the type asked for from {sql}: {error}")))
            .collect()
    }

    async fn helper(&self) -> Arc<Client> {
        let kept = self.helper.lock().expect("nothing panics while holding it").clone();
        match kept {
            Some(client) if !client.is_closed() => client,
            Some(_) | None => {
                let client = Arc::new(self.client().await);
                *self.helper.lock().expect("nothing panics while holding it") = Some(Arc::clone(&client));
                client
            }
        }
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        self.server.remove_database(std::mem::take(&mut self.name));
    }
}
