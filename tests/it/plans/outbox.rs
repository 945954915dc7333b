//! The cost of the outbox statements depends on their batch, not on sent records or on the planner's statistics.

use std::time::Duration;

use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use rdkafka::types::RDKafkaRespErr;
use wharf::kafka::Relay;
use wharf::{Outbox, Record};

use super::big::Big;
use super::explained::Plan;
use support::mock_kafka::MockKafka;
use support::postgres::connect;

/// A text of each statement that no other statement contains.
const STATEMENTS: [(&str, &str); 4] = [
    ("read", "found AS MATERIALIZED"),
    ("mark", "AS kafka_partition, unnest($"),
    ("purge", "WHERE s.status IN (2, 4) AND s.finished_at < now()"),
    ("hold slots", "WITH share AS MATERIALIZED"),
];

/// A text of the statement that reads while topics are held.
const BESIDE_HELD: &str = "WITH RECURSIVE topics";

const RECORDS: &str = "
    INSERT INTO inbox_outbox (slot, message_id, source, topic, record_key, payload)
    SELECT inbox_outbox_slot(k.key), 'record-' || n, 'test', 'orders', k.key, repeat('x', 100)::bytea
    FROM generate_series(1, {}) n CROSS JOIN LATERAL (SELECT convert_to('key-' || n % 500, 'UTF8') AS key) k";

/// All records were sent: most of them two days ago, some earlier.
const SENT: &str = "UPDATE inbox_outbox SET status = 2, finished_at = now() - CASE WHEN id <= 2500 THEN interval '5 days' ELSE interval '2 days' END";

/// When statistics of the table are collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Learns {
    /// While the table is empty.
    Before,
    /// While all records wait.
    WhileAllWait,
    /// After all records were sent.
    After,
}

fn records(count: usize) -> String {
    RECORDS.replace("{}", &count.to_string())
}

async fn relay_reads_by_index(name: &str, learns: Learns, plan_cache_mode: &str) {
    let big = Big::almost_empty(name).await;
    big.execute(&format!("ALTER DATABASE {name} SET plan_cache_mode = {plan_cache_mode}")).await;
    // The test decides which statistics exist.
    big.execute("ALTER TABLE inbox_outbox SET (autovacuum_enabled = off)").await;
    big.execute(&records(100_000)).await;
    if learns == Learns::WhileAllWait {
        big.execute("ANALYZE inbox_outbox").await;
    }
    big.execute(SENT).await;
    if learns == Learns::After {
        big.execute("ANALYZE inbox_outbox").await;
    }
    big.execute(&records(3_000)).await;
    let mock = MockKafka::start(1);
    mock.create_topic("orders", 4);
    let from = big.log_length();
    let store = big.store().await;
    let relay =
        Relay::new(mock.brokers()).batch_rows(500).keep_sent(Duration::from_secs(4 * 86_400)).start(&store).unwrap();
    big.until("SELECT count(*) = 0 FROM inbox_outbox WHERE waiting IS NOT NULL").await;
    big.until("SELECT count(*) = 0 FROM inbox_outbox WHERE finished_at < now() - interval '4 days'").await;
    relay.shutdown(Duration::from_secs(5)).await;

    let plans = big.plans(from);
    for (what, piece) in STATEMENTS {
        assert!(plans.iter().any(|plan| plan.sql.contains(piece)), "{what} was never executed");
    }
    let offences: Vec<String> = plans.iter().flat_map(Plan::offences).collect();
    assert!(
        offences.is_empty(),
        "{learns:?} {plan_cache_mode}: {} of {}\n{}",
        offences.len(),
        plans.len(),
        offences[0]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_of_the_relay_reads_sent_records_with_custom_plans() {
    relay_reads_by_index("outbox_before_custom", Learns::Before, "force_custom_plan").await;
    relay_reads_by_index("outbox_wait_custom", Learns::WhileAllWait, "force_custom_plan").await;
    relay_reads_by_index("outbox_after_custom", Learns::After, "force_custom_plan").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_of_the_relay_reads_sent_records_with_generic_plans() {
    relay_reads_by_index("outbox_before_generic", Learns::Before, "force_generic_plan").await;
    relay_reads_by_index("outbox_wait_generic", Learns::WhileAllWait, "force_generic_plan").await;
    relay_reads_by_index("outbox_after_generic", Learns::After, "force_generic_plan").await;
}

// An open snapshot anywhere keeps the index entries of sent records.
#[tokio::test(flavor = "multi_thread")]
async fn a_poll_does_not_scan_sent_records_while_a_snapshot_blocks_vacuum() {
    let big = Big::almost_empty("outbox_pinned").await;
    big.execute(&records(20_000)).await;
    big.execute("ANALYZE inbox_outbox").await;
    let pin = connect(&big.cluster.url(&big.name)).await;
    pin.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM inbox_outbox").await.unwrap();
    let mock = MockKafka::start(1);
    mock.create_topic("orders", 4);
    let from = big.log_length();
    let store = big.store().await;
    let relay = Relay::new(mock.brokers()).batch_rows(500).start(&store).unwrap();
    big.until("SELECT count(*) = 0 FROM inbox_outbox WHERE waiting IS NOT NULL").await;
    relay.shutdown(Duration::from_secs(5)).await;

    let is_look = |plan: &Plan| plan.sql.contains(STATEMENTS[0].1) && plan.rows() > 499.0;
    let mut pages: Vec<u64> = big.plans(from).iter().filter(|plan| is_look(plan)).map(Plan::pages).collect();
    let late = pages.split_off(pages.len() * 3 / 4);
    let cheapest = late.iter().min().copied().unwrap_or(u64::MAX);
    // 500 rows, a few pages each; 15,000 were sent before.
    assert!(cheapest < 6_000, "{late:?} pages at the end, {pages:?} before");
}

// The same for a purge: the entries of records that were deleted stay in its index.
#[tokio::test(flavor = "multi_thread")]
async fn a_purge_does_not_scan_again_what_it_has_deleted_while_a_snapshot_blocks_vacuum() {
    let big = Big::almost_empty("outbox_purged").await;
    big.execute(&records(20_000)).await;
    // In an order that is not that of the table, so that each entry costs a page.
    big.execute(
        "UPDATE inbox_outbox SET status = 2, finished_at = now() - interval '5 days' - (id * 7919 % 20011) * interval '1 second'",
    )
    .await;
    big.execute("ANALYZE inbox_outbox").await;
    let pin = connect(&big.cluster.url(&big.name)).await;
    pin.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM inbox_outbox").await.unwrap();
    let mock = MockKafka::start(1);
    let from = big.log_length();
    let store = big.store().await;
    let relay = Relay::new(mock.brokers()).keep_sent(Duration::from_secs(4 * 86_400)).start(&store).unwrap();
    big.until("SELECT count(*) = 0 FROM inbox_outbox").await;
    relay.shutdown(Duration::from_secs(5)).await;

    let is_purge = |plan: &Plan| plan.sql.contains(STATEMENTS[2].1);
    let mut pages: Vec<u64> = big.plans(from).iter().filter(|plan| is_purge(plan)).map(Plan::pages).collect();
    let late = pages.split_off(pages.len() * 3 / 4);
    let costliest = late.iter().max().copied().unwrap_or(u64::MAX);
    // 1,000 rows, a few pages each; 15,000 were deleted before.
    assert!(costliest < 12_000, "{late:?} pages at the end, {pages:?} before");
}

// Records of a topic that may not be written to wait for as long as it takes.
#[tokio::test(flavor = "multi_thread")]
async fn a_held_topic_costs_other_topics_nothing() {
    let big = Big::almost_empty("outbox_held").await;
    big.execute(&records(40_000).replace("'orders'", "'denied'")).await;
    big.execute("ANALYZE inbox_outbox").await;
    big.execute(&records(3_000)).await;
    let mock = MockKafka::start(1);
    mock.create_topic("orders", 4);
    mock.create_topic("denied", 4);
    mock.fail_topic("denied", RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED);
    let from = big.log_length();
    let store = big.store().await;
    let relay = Relay::new(mock.brokers()).batch_rows(100).start(&store).unwrap();
    big.until("SELECT count(*) = 0 FROM inbox_outbox WHERE topic = 'orders' AND waiting IS NOT NULL").await;
    relay.shutdown(Duration::from_secs(5)).await;

    let plans = big.plans(from);
    let reads: Vec<u64> = plans.iter().filter(|plan| plan.sql.contains(STATEMENTS[0].1)).map(Plan::pages).collect();
    assert!(plans.iter().any(|plan| plan.sql.contains(BESIDE_HELD)), "no topic was held");
    // 100 rows, a few pages each, and a few pages for each topic of sixteen slots.
    assert!(reads.iter().all(|pages| *pages < 2_500), "{reads:?} pages");
    let offences: Vec<String> = plans.iter().flat_map(Plan::offences).collect();
    assert!(offences.is_empty(), "{}", offences[0]);
}

// A relay relies on it: a record with a lower id than one that it has read belongs to an older transaction.
#[tokio::test(flavor = "multi_thread")]
async fn publishing_assigns_the_transaction_number_before_the_record_ids() {
    let big = Big::almost_empty("outbox_publish").await;
    let from = big.log_length();
    let mut conn = AsyncPgConnection::establish(&big.cluster.url(&big.name)).await.unwrap();
    // As the sessions whose plans are read, with the columns of each step.
    conn.batch_execute("SET application_name = 'wharf'; SET auto_explain.log_verbose = on").await.unwrap();
    Outbox::new(&big.store().await).publish(&mut conn, Record::new("orders").with_key("k")).await.unwrap();

    let plans = big.plans(from);
    let publishing: Vec<&Plan> = plans.iter().filter(|plan| plan.sql.contains("INSERT INTO inbox_outbox")).collect();
    assert_eq!(publishing.len(), 1);
    assert!(publishing[0].mentions("pg_current_xact_id()"), "{}", publishing[0].sql);
}
