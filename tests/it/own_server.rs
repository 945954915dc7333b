//! A separate PostgreSQL server for a test that stops, kills or configures it, with an inbox schema.

use std::time::Duration;

use tokio_postgres::NoTls;
use wharf::{Inbox, InboxBuilder, Postgres, Store};

use crate::scene::{quick, within};
use support::postgres::{Cluster, ClusterOptions};

pub struct OwnServer {
    pub cluster: Cluster,
    pub store: Store<Postgres>,
}

impl OwnServer {
    pub async fn start() -> OwnServer {
        let cluster = Cluster::start(ClusterOptions::default()).await;
        let store = Store::connect(&cluster.url("postgres")).await.unwrap();
        store.migrate().await.unwrap();
        cluster.execute("CREATE TABLE effect (message_id text)").await;
        OwnServer { cluster, store }
    }

    pub fn inbox(&self) -> InboxBuilder<Postgres> {
        Inbox::builder(self.store.clone()).limits(quick())
    }

    /// Another store, as in another process.
    pub async fn another_store(&self) -> Store<Postgres> {
        Store::connect(&self.cluster.url("postgres")).await.unwrap()
    }

    /// Waits until there is a delivery and none is pending or running.
    pub async fn settled(&self) {
        self.until("SELECT (count(*) > 0 AND count(*) = count(finished_at))::int::bigint FROM inbox_delivery").await;
    }

    /// Waits until the query returns 1, and retries while the server is unavailable.
    pub async fn until(&self, sql: &str) {
        within(async {
            while self.try_one(sql).await.unwrap_or(0) != 1 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    }

    pub async fn one(&self, sql: &str) -> i64 {
        self.try_one(sql).await.unwrap()
    }

    async fn try_one(&self, sql: &str) -> Result<i64, tokio_postgres::Error> {
        let (client, connection) = tokio_postgres::connect(&self.cluster.url("postgres"), NoTls).await?;
        tokio::spawn(connection);
        Ok(client.query_one(sql, &[]).await?.get(0))
    }

    /// Asserts that all of this many deliveries are done, and that those of these handlers consumed no retry.
    pub async fn assert_done_and_not_charged(&self, deliveries: i64, handlers: &[&str]) {
        assert_eq!(self.one("SELECT count(*) FROM inbox_quarantine").await, 0, "records were quarantined");
        assert_eq!(self.one("SELECT count(*) FROM inbox_delivery").await, deliveries, "deliveries were lost");
        assert_eq!(self.one("SELECT count(*) FROM inbox_status WHERE state = 'done'").await, deliveries);
        let charged = format!(
            "SELECT count(*) FROM inbox_status WHERE errors + crashes > 0 AND handler_key = ANY ('{{{}}}')",
            handlers.join(",")
        );
        assert_eq!(self.one(&charged).await, 0, "deliveries were charged");
    }
}
