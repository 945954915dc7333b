//! The database server crashes, or is replaced by a standby, right after an offset commit: every committed offset has
//! its rows, or its records are read again.

use std::time::Duration;

use wharf::kafka::Kafka as Source;
use wharf::{Inbox, Postgres, Running, Store};

use super::observer::{Observer, Watched};
use crate::own_server::OwnServer;
use crate::scene::{Runs, quick, within};
use support::kafka::Kafka;
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;
use support::proxy::Proxy;

// An offset is committed only after the rows before it are durable.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_killed_right_after_an_offset_commit_has_everything_before_it() {
    const CUTS: i64 = 4;
    const RECORDS: i64 = 50;
    let server = OwnServer::start().await;
    let kafka = Kafka::shared().await;
    let (topic, group) = (kafka.create_unique_topic(1).await, unique_name("group"));
    let runs = Runs::new();
    let url = server.cluster.url("postgres");
    let running = start(&url, Source::new(kafka.brokers(), &group), &topic, &runs).await;
    let observer = Observer::watch(Watched {
        kafka: kafka.clone(),
        database_url: url,
        group: group.clone(),
        topic: topic.clone(),
        partitions: 1,
    });

    for cut in 1..=CUTS {
        kafka.produce(&topic, 0, &vec![TestRecord::new("payload"); usize::try_from(RECORDS).unwrap()]).await;
        within(async { while kafka.committed(&group, &topic, 0).await < Some(cut * RECORDS) {} }).await;
        server.cluster.kill().await;
        server.cluster.start_again().await;
        assert_eq!(server.one("SELECT count(*) FROM inbox_message").await, cut * RECORDS);
    }

    server.settled().await;
    within(running.shutdown(Duration::from_secs(5))).await.unwrap();
    observer.finish().await;
    assert_eq!(server.one("SELECT next_offset FROM inbox_ledger").await, CUTS * RECORDS);
    server.assert_done_and_not_charged(CUTS * RECORDS, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_failover_to_a_lagging_standby_missing_records_are_read_again() {
    let primary = OwnServer::start().await;
    let proxy = Proxy::start(primary.cluster.port()).await;
    let kafka = Kafka::shared().await;
    let (topic, group) = (kafka.create_unique_topic(1).await, unique_name("group"));
    let payloads = vec![TestRecord::new("payload"); 50];
    let runs = Runs::new();
    let url = proxy.url(&primary.cluster.url("postgres"));
    let running = start(&url, Source::new(kafka.brokers(), &group), &topic, &runs).await;
    kafka.produce(&topic, 0, &payloads).await;
    primary.until("SELECT coalesce(max(next_offset), 0) - 49 FROM inbox_ledger").await;
    let standby = primary.cluster.fall_behind().await;
    kafka.produce(&topic, 0, &payloads).await;
    within(async { while kafka.committed(&group, &topic, 0).await < Some(100) {} }).await;

    primary.cluster.kill().await;
    proxy.repoint(standby.port());
    proxy.reset_all().await;

    // The group's committed offset covers records that the promoted server has never received.
    kafka.produce(&topic, 0, &payloads).await;
    let promoted = OwnServer { cluster: standby, store: primary.store.clone() };
    promoted.until("SELECT (max(next_offset) = 150)::int::bigint FROM inbox_ledger").await;
    promoted.settled().await;
    within(running.shutdown(Duration::from_secs(5))).await.unwrap();
    promoted.assert_done_and_not_charged(150, &[]).await;
    assert_eq!(promoted.one("SELECT count(DISTINCT kafka_offset) FROM inbox_message").await, 150);
}

async fn start(url: &str, source: Source, topic: &str, runs: &Runs) -> Running<Postgres> {
    let limits = quick().backoff_max(Duration::from_millis(200)).crash_limit(1_000);
    let inbox = Inbox::builder(Store::connect(url).await.unwrap())
        .limits(limits)
        .subscribe(topic, runs.handler("a").concurrency(100))
        .identity(topic, wharf::Identity::position())
        .build()
        .unwrap();
    within(inbox.start_from(source)).await.unwrap()
}
