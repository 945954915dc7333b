//! A database with hundreds of thousands of rows of every kind, on a server that logs the plan of every statement.

use std::time::Duration;

use serde_json::Value;
use tokio::sync::OnceCell;
use tokio_postgres::{Client, SimpleQueryMessage};
use wharf::{Inbox, Limits, Postgres, Store};

use super::explained::{Plan, plans};
use crate::scene::{Runs, record, within};
use support::postgres::{Cluster, connect};

/// Without autovacuum: the tests decide which statistics the planner has.
const SETTINGS: [(&str, &str); 10] = [
    ("session_preload_libraries", "auto_explain"),
    ("auto_explain.log_min_duration", "0"),
    ("auto_explain.log_format", "json"),
    ("auto_explain.log_nested_statements", "on"),
    ("auto_explain.log_analyze", "on"),
    ("auto_explain.log_buffers", "on"),
    ("auto_explain.log_timing", "off"),
    ("autovacuum", "off"),
    ("max_wal_size", "4GB"),
    ("log_line_prefix", "%m [%p] %d %a "),
];

/// 200,000 messages, 120,000 of them old; deliveries that are done, not yet due, due for a handler that no process has,
/// poisoned, and 3,000 that are due; 100,000 failed attempts; 200,000 identities of purged messages, 5,000 of them
/// expired.
const FILL: &str = r"
    INSERT INTO inbox_message (message_id, source, topic, received_at, payload_hash, payload)
    SELECT id, 'orders', 'orders', now() - CASE WHEN n <= 120000 THEN interval '2 days' ELSE interval '0' END,
           substring(sha256('\x01'::bytea || payload) FOR 16), payload
    FROM (SELECT n, 'old-' || n AS id, convert_to('payload of old-' || n, 'UTF8') AS payload
          FROM generate_series(1, 200000) n) o;
    INSERT INTO inbox_handler (key) VALUES ('stranger');
    INSERT INTO inbox_handler_key (key, handler_id) SELECT key, id FROM inbox_handler WHERE key = 'stranger';
    CREATE TEMP VIEW old AS
        SELECT m.seq, substring(m.message_id FROM 5)::int AS n, h.id, h.key
        FROM inbox_message m, inbox_handler h WHERE m.message_id LIKE 'old-%';
    INSERT INTO inbox_delivery (message_seq, handler_id, due_at, finished_at, attempts, status)
    SELECT seq, id, now() - interval '2 days', now() - interval '1 day', 1, 2 /* done */ FROM old WHERE key = 'stock';
    INSERT INTO inbox_delivery (message_seq, handler_id, due_at, errors)
    SELECT seq, id, now() + n * interval '1 second' + interval '1 day', 1 FROM old WHERE key = 'mail' AND n <= 100000;
    INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
    SELECT seq, id, now() - interval '1 hour' FROM old WHERE key = 'stranger' AND n <= 50000;
    INSERT INTO inbox_delivery (message_seq, handler_id, due_at, finished_at, attempts, status, reason)
    SELECT seq, id, now() - interval '2 days', now() - interval '1 day', 1, 3 /* poisoned */, 'permanent'
    FROM old WHERE key = 'audit' AND n BETWEEN 190001 AND 190200;
    INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
    SELECT seq, id, now() - interval '1 hour' FROM old WHERE key = 'audit' AND n BETWEEN 100001 AND 103000;
    INSERT INTO inbox_attempt (message_seq, handler_id, place, attempt, failed_at, why, error)
    SELECT seq, id, 0, 1, now() - interval '1 day', 'failed', 'no' FROM old WHERE key = 'mail' AND n <= 100000;
    INSERT INTO inbox_quarantine (topic, reason, payload, record_hash)
    SELECT 'orders', 'conflict', convert_to(n::text, 'UTF8'), sha256(convert_to(n::text, 'UTF8'))
    FROM generate_series(1, 200000) n;
    INSERT INTO inbox_identity (hash, purged_at, forget_at)
    SELECT inbox_identity_hash('gone-' || n, 'orders'), now() - interval '9 days', now() + (n - 5000) * interval '1 minute'
    FROM generate_series(1, 200000) n;
";

/// The statistics that the planner has of the tables.
#[derive(Clone, Copy, Debug)]
pub enum Statistics {
    /// Statistics from when the tables were almost empty.
    Stale,
    Fresh,
    /// Statistics from when everything was done: nothing open, nothing locked.
    Idle,
}

/// Hides the open deliveries while statistics are collected.
const LEARN_IDLE: &str = "
    CREATE TEMP TABLE open AS SELECT * FROM inbox_delivery WHERE finished_at IS NULL;
    DELETE FROM inbox_delivery WHERE finished_at IS NULL;
    ANALYZE;
    INSERT INTO inbox_delivery SELECT * FROM open";

pub struct Big {
    pub cluster: &'static Cluster,
    pub name: String,
    pub client: Client,
}

/// The filled database that the tests get copies of.
const TEMPLATE: &str = "filled";

impl Big {
    /// A migrated database with a few rows, the handlers `stock`, `mail` and `audit` registered, analyzed as it is.
    pub async fn almost_empty(name: &str) -> Big {
        let big = Big::create(cluster().await, name, "").await;
        big.prepare().await;
        big
    }

    /// The same with all the rows of [`FILL`], which are not in the statistics yet.
    pub async fn full(name: &str) -> Big {
        let cluster = cluster().await;
        // Copying files is much faster than writing and syncing their WAL. Before PostgreSQL 15 it is the only
        // strategy.
        let client = connect(&cluster.url("postgres")).await;
        let sql = "SELECT CASE WHEN current_setting('server_version_num')::int >= 150000 THEN 'STRATEGY file_copy' ELSE '' END";
        let strategy: String = client.query_one(sql, &[]).await.unwrap().get(0);
        Big::create(cluster, name, &format!("TEMPLATE {TEMPLATE} {strategy}")).await
    }

    async fn create(cluster: &'static Cluster, name: &str, template: &str) -> Big {
        cluster.execute(&format!("CREATE DATABASE {name} {template}")).await;
        let client = connect(&cluster.url(name)).await;
        Big { cluster, name: name.to_owned(), client }
    }

    async fn prepare(&self) {
        self.store().await.migrate().await.unwrap();
        self.inbox(Limits::default(), 16).await.accept(record("first")).await.unwrap();
        self.execute("ANALYZE").await;
    }

    /// Gives the planner these statistics.
    pub async fn learn(&self, statistics: Statistics) {
        match statistics {
            Statistics::Stale => {}
            Statistics::Fresh => self.execute("ANALYZE").await,
            Statistics::Idle => self.execute(LEARN_IDLE).await,
        }
    }

    pub async fn store(&self) -> Store<Postgres> {
        Store::connect(&self.cluster.url(&self.name)).await.unwrap()
    }

    /// An inbox with the three handlers, which succeed with every delivery.
    pub async fn inbox(&self, limits: Limits, concurrency: usize) -> Inbox<Postgres> {
        let runs = Runs::new();
        let builder = Inbox::builder(self.store().await).limits(limits);
        let builder = ["stock", "mail", "audit"]
            .into_iter()
            .fold(builder, |builder, name| builder.subscribe("orders", runs.handler(name).concurrency(concurrency)));
        builder.build().unwrap()
    }

    pub async fn execute(&self, sql: &str) {
        self.client.batch_execute(sql).await.unwrap_or_else(|error| panic!("cannot execute {sql}: {error:?}"));
    }

    /// Waits until the query returns true.
    pub async fn until(&self, sql: &str) {
        within(async {
            while !self.client.query_one(sql, &[]).await.unwrap().get::<_, bool>(0) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }

    /// The plan the statement would have.
    pub async fn explain(&self, sql: &str) -> Value {
        let messages = self.client.simple_query(&format!("EXPLAIN (FORMAT JSON) {sql}")).await.unwrap();
        let text = messages.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        });
        serde_json::from_str(text.expect("a plan")).unwrap()
    }

    /// The plans that were logged after the first `from` bytes of the log.
    pub fn plans(&self, from: usize) -> Vec<Plan> {
        plans(&self.cluster.log()[from..], &self.name)
    }

    pub fn log_length(&self) -> usize {
        self.cluster.log().len()
    }
}

/// The server of all these tests, with the template on it.
async fn cluster() -> &'static Cluster {
    static CLUSTER: OnceCell<Cluster> = OnceCell::const_new();
    static FILLED: OnceCell<()> = OnceCell::const_new();
    let cluster = CLUSTER.get_or_init(|| Cluster::start_with(&SETTINGS)).await;
    let fill = async || {
        let big = Big::create(cluster, TEMPLATE, "").await;
        big.prepare().await;
        big.execute("SET auto_explain.log_min_duration = -1").await;
        big.execute(FILL).await;
        drop(big);
        // A template can be copied only while it has no connections.
        cluster.execute(&format!("ALTER DATABASE {TEMPLATE} ALLOW_CONNECTIONS false")).await;
        let end = "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname";
        cluster.execute(&format!("{end} = '{TEMPLATE}'")).await;
    };
    FILLED.get_or_init(fill).await;
    cluster
}
