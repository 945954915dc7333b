//! The cost of the dashboard for the database, counted in statements and not in time.
//!
//! A *look* is one run of the sampler's queries. All open tabs share it.

use std::time::Duration;

use wharf::dashboard::{Access, Dashboard};
use wharf::{Failure, Inbox, Store};

use crate::scene::{Runs, quick, record, records};
use support::http::{EventStream, request};
use support::postgres::{Cluster, connect};

/// How many looks a measurement takes.
const LOOKS: usize = 8;

/// The most database pages that one look may read: about 50,000 rows of the deliveries' indexes and tables.
const PAGES_MAX: f64 = 60_000.0;

/// The most database pages that the web page of one message may read: a few rows, each found by an index.
const STORY_PAGES_MAX: i64 = 1_000;

/// The cost of one look.
struct Cost {
    statements: f64,
    /// Database pages of tables and indexes.
    pages: f64,
}

/// The web pages that the tabs show. Those with lists do not reload themselves.
const PAGES: [&str; 6] = ["/", "/kafka", "/processes", "/message?message=open", "/poisoned", "/deliveries"];

/// The cost per look while `tabs` tabs are open. Tabs of live pages reload after every look.
async fn cost_per_look(address: &str, database: &tokio_postgres::Client, tabs: usize) -> Cost {
    let mut streams = Vec::new();
    for tab in 0..tabs {
        let path = PAGES[tab % PAGES.len()];
        let page = request(address, "GET", path, &[], "").await.body;
        let path = Some(path).filter(|_| page.contains(" data-live-load"));
        // The first event is about a look from before the counters are reset.
        let (stream, _) = EventStream::open(address, "/live").await.next().await;
        streams.push((path, stream));
    }
    database.batch_execute("SELECT pg_stat_statements_reset()").await.unwrap();
    for _ in 0..LOOKS {
        let mut next = Vec::new();
        for (path, stream) in streams {
            let (stream, _) = stream.next().await;
            if let Some(path) = path {
                assert_eq!(request(address, "GET", path, &[], "").await.status, 200);
            }
            next.push((path, stream));
        }
        streams = next;
    }
    let sum = "SELECT coalesce(sum(calls), 0)::bigint, coalesce(sum(shared_blks_hit + shared_blks_read), 0)::bigint
               FROM pg_stat_statements WHERE query";
    let ask = async |of: &str| -> (i64, i64) {
        let row = database.query_one(&format!("{sum} {of}"), &[]).await.unwrap();
        (row.get(0), row.get(1))
    };
    let (statements, pages) = ask("NOT LIKE '%pg_stat_statements%'").await;
    let (looks, _) = ask("LIKE '%AS keeps_finished%'").await;
    assert!(looks >= LOOKS as i64, "{looks} looks");
    Cost { statements: statements as f64 / looks as f64, pages: pages as f64 / looks as f64 }
}

/// A server that counts statements, with an inbox of 50 poisoned deliveries, and a dashboard for it.
struct Scene {
    database: tokio_postgres::Client,
    address: String,
    server: tokio::task::JoinHandle<wharf::Result<()>>,
    _cluster: Cluster,
}

impl Scene {
    async fn new(sample_every: Duration) -> Self {
        let cluster = Cluster::start_with(&[("shared_preload_libraries", "pg_stat_statements")]).await;
        let database = connect(&cluster.url("postgres")).await;
        database.batch_execute("CREATE EXTENSION pg_stat_statements").await.unwrap();
        let store = Store::connect(&cluster.url("postgres")).await.unwrap();
        store.migrate().await.unwrap();
        let broken = Runs::new().answering("stock", |_| Err(Failure::poison("no shelf")));
        let inbox = Inbox::builder(store.clone()).limits(quick()).subscribe("orders", broken).build().unwrap();
        inbox.accept_all(records(50)).await.unwrap();
        inbox.drain().await.unwrap();
        // It is never run, so its page stays live.
        inbox.accept(record("open")).await.unwrap();
        drop(inbox);

        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let dashboard = Dashboard::new(&store, Access::on_this_machine()).sample_every(sample_every);
        let server = tokio::spawn(dashboard.serve(listener));
        Self { database, address, server, _cluster: cluster }
    }

    async fn cost(&self, tabs: usize) -> Cost {
        cost_per_look(&self.address, &self.database, tabs).await
    }

    /// The database pages that a web page reads, without those of the looks.
    async fn pages_of(&self, path: &str) -> i64 {
        self.cost(1).await;
        let of_looks: Vec<Option<i64>> =
            self.database.query_one("SELECT array_agg(queryid) FROM pg_stat_statements", &[]).await.unwrap().get(0);
        self.database.batch_execute("SELECT pg_stat_statements_reset()").await.unwrap();
        let page = request(&self.address, "GET", path, &[], "").await;
        assert_eq!(page.status, 200, "{}", page.body);
        let sum = "SELECT coalesce(sum(shared_blks_hit + shared_blks_read), 0)::bigint FROM pg_stat_statements
                   WHERE queryid <> ALL ($1) AND query NOT LIKE '%pg_stat_statements%'";
        self.database.query_one(sum, &[&of_looks]).await.unwrap().get(0)
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.server.abort();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_open_tabs_cost_the_database_no_more_than_one_tab_of_each_page() {
    let scene = Scene::new(Duration::from_millis(250)).await;
    let one = scene.cost(1).await.statements;
    // The pages for Kafka and for one message run their own queries, so the baseline has one tab of each page.
    let each = scene.cost(PAGES.len()).await.statements;
    let twenty = scene.cost(20).await.statements;
    let told = format!(
        "statements per look: {one:.2} with one tab, {each:.2} with one tab of each page, {twenty:.2} with twenty"
    );
    note("cost", &told);
    assert!(twenty < each + 1.0, "{told}");
}

/// Five million messages: 4.5 million done, 400,000 due, 100,000 poisoned with a thousand different errors.
const FIVE_MILLION: &str = r"
    SET synchronous_commit = off;
    INSERT INTO inbox_message (message_id, source, topic, payload_hash, payload)
    SELECT 'old-' || n, 'orders', 'orders', substring(sha256(convert_to(n::text, 'UTF8')) FOR 16), '\x00'
    FROM generate_series(1, 5000000) n;
    INSERT INTO inbox_delivery (message_seq, handler_id, due_at, finished_at, attempts, status, reason, last_error)
    SELECT m.seq, h.id, now() - interval '2 days',
           CASE WHEN m.seq % 50 > 4 OR m.seq % 50 = 0 THEN now() - interval '1 day' END,
           1, CASE WHEN m.seq % 50 = 0 THEN 3 WHEN m.seq % 50 > 4 THEN 2 ELSE 0 END,
           CASE WHEN m.seq % 50 = 0 THEN 'permanent' END,
           CASE WHEN m.seq % 50 = 0 THEN 'no shelf ' || chr(97 + (m.seq / 50 % 26)::int) || repeat('x', (m.seq / 1300 % 40)::int) END
    FROM inbox_message m, inbox_handler h WHERE h.key = 'stock' AND m.message_id LIKE 'old-%';
    VACUUM ANALYZE inbox_message; VACUUM ANALYZE inbox_delivery;";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "five million rows: scripts/nightly"]
async fn twenty_open_tabs_cost_no_more_than_one_of_each_page_with_five_million_messages() {
    // Slow enough for every tab to reload its page before the next look, even on a busy machine.
    let scene = Scene::new(Duration::from_secs(2)).await;
    let empty = scene.cost(PAGES.len()).await;
    for statement in FIVE_MILLION.split(';').filter(|statement| !statement.trim().is_empty()) {
        scene.database.batch_execute(statement).await.unwrap();
    }
    let each = scene.cost(PAGES.len()).await;
    let twenty = scene.cost(20).await;
    let story = scene.pages_of("/message?message=old-2500000&payload=show").await;
    let told = format!(
        "per look: {:.2} statements and {:.0} pages with 50 messages; {:.2} and {:.0} with five million; {:.2} and {:.0} with twenty tabs; \
         the page of one message: {story} pages",
        empty.statements, empty.pages, each.statements, each.pages, twenty.statements, twenty.pages
    );
    note("cost_of_five_million", &told);
    assert!(twenty.statements < each.statements + 1.0 && twenty.pages < each.pages * 1.5, "{told}");
    // Counts stop at 10,000 for each handler and state, so the number of pages that a look reads is bounded.
    assert!(each.pages < PAGES_MAX, "{told}");
    assert!((1..STORY_PAGES_MAX).contains(&story), "{told}");
}

/// Saves the figures beside the screenshots.
fn note(name: &str, told: &str) {
    let file = super::picture(name).with_extension("txt");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, told).unwrap();
}
