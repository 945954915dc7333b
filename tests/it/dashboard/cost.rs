//! What it costs the database: one look for everybody, however many tabs are open. Counted in statements, not in time.

use std::time::Duration;

use wharf::dashboard::{Access, Dashboard};
use wharf::{Failure, Inbox, Store};

use crate::scene::{Runs, quick, records};
use support::http::{EventStream, request};
use support::postgres::{Cluster, connect};

/// Looks of the sampler that a measurement takes.
const LOOKS: usize = 8;

/// Statements for each look while so many tabs are open, each of which loads its page again whenever it hears of something new.
async fn statements_per_look(address: &str, database: &tokio_postgres::Client, tabs: usize) -> f64 {
    let mut streams = Vec::new();
    for tab in 0..tabs {
        let path = ["/", "/kafka", "/processes"][tab % 3];
        streams.push((path, EventStream::open(address, "/live").await));
    }
    database.batch_execute("SELECT pg_stat_statements_reset()").await.unwrap();
    for _ in 0..LOOKS {
        let mut next = Vec::new();
        for (path, stream) in streams {
            let (stream, _) = stream.next().await;
            assert_eq!(request(address, "GET", path, &[], "").await.status, 200);
            next.push((path, stream));
        }
        streams = next;
    }
    let count = |of: &str| format!("SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements WHERE query {of}");
    let ask = async |sql: &str| -> i64 { database.query_one(sql, &[]).await.unwrap().get(0) };
    let all = ask(&count("NOT LIKE '%pg_stat_statements%'")).await;
    let looks = ask(&count("LIKE '%AS keeps_finished%'")).await;
    assert!(looks >= LOOKS as i64, "{looks} looks");
    all as f64 / looks as f64
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_open_tabs_cost_the_database_what_one_costs() {
    let cluster = Cluster::start_with(&[("shared_preload_libraries", "pg_stat_statements")]).await;
    let database = connect(&cluster.url("postgres")).await;
    database.batch_execute("CREATE EXTENSION pg_stat_statements").await.unwrap();
    let store = Store::connect(&cluster.url("postgres")).await.unwrap();
    store.migrate().await.unwrap();
    let broken = Runs::new().answering("stock", |_| Err(Failure::poison("no shelf")));
    let inbox = Inbox::builder(store.clone()).limits(quick()).subscribe("orders", broken).build().unwrap();
    inbox.accept_all(records(50)).await.unwrap();
    inbox.drain().await.unwrap();
    drop(inbox);

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let dashboard = Dashboard::new(&store, Access::on_this_machine()).sample_every(Duration::from_millis(250));
    let server = tokio::spawn(dashboard.serve(listener));
    let one = statements_per_look(&address, &database, 1).await;
    // Those of one tab of each page: what Kafka's page shows is looked up apart.
    let three = statements_per_look(&address, &database, 3).await;
    let twenty = statements_per_look(&address, &database, 20).await;
    let told =
        format!("statements a look: {one:.2} with one tab, {three:.2} with one of each page, {twenty:.2} with twenty");
    let file = super::picture("cost").with_extension("txt");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, &told).unwrap();
    assert!(twenty < three + 1.0, "{told}");
    server.abort();
}
