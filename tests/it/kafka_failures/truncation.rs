//! Logs that lose their end: a broker that lost data, an unclean leader election. Offsets below the ledger then hold
//! other records, which must not be skipped silently: the partition stops until an operator acts.

use wharf::operate::LedgerFilter;
use wharf::{Identity, Running};

use super::stage::{Stage, end};
use crate::scene::{Db, Runs, quick, within};
use support::events::{Event, Events};
use support::kafka::{Kafka, KafkaOptions};
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;

/// Produces records with these names in a separate batch.
async fn produce(stage: &Stage, name: &str, count: usize) {
    let records: Vec<TestRecord> =
        (0..count).map(|number| TestRecord::keyed(format!("{name}-{number}"), name.to_owned())).collect();
    stage.kafka.produce(&stage.topic, 0, &records).await;
}

/// Records are identified by their key, because two records may have the same offset.
async fn start(stage: &Stage, runs: &Runs) -> Running<Db> {
    let inbox = stage.scene.inbox().limits(quick()).subscribe(&*stage.topic, runs.handler("a").concurrency(100));
    let inbox = inbox.identity(&*stage.topic, Identity::key()).build().unwrap();
    let source = stage.source().set("topic.metadata.refresh.interval.ms", "200");
    within(inbox.start_from(source)).await.unwrap()
}

async fn stopped(events: &Events, stage: &Stage) -> String {
    let is_stopped = |event: &Event| event.message.starts_with("partition stopped") && event.has("topic", &stage.topic);
    events.wait_for(is_stopped).await.field("why").unwrap().to_owned()
}

async fn stored(stage: &Stage, name: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM inbox_message WHERE message_id LIKE '{name}-%'");
    stage.scene.database.query_one_i64(&sql).await
}

/// Resets the partition to where its log was cut, and asserts that every later record is stored.
async fn reset_and_read_on(stage: &Stage, runs: &Runs, to_offset: i64, count: i64) {
    let operator = stage.scene.store.operate().acting_as("alice").because("the tail is lost");
    let filter = LedgerFilter::topic(&stage.group, &stage.topic).partition(0);
    assert_eq!(operator.reset_ledger(&filter, Some(to_offset)).await.unwrap(), 1);
    let running = start(stage, runs).await;
    let is_read =
        format!("SELECT (count(*) = {count})::int::bigint FROM inbox_message WHERE message_id LIKE 'after-%'");
    stage.scene.until(&is_read).await;
    end(running).await;
}

// The ledger is at 10 and the log is cut to 6 while the service is down. Then 8 more records are written: the log is
// longer than the ledger when it is checked again.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_was_cut_and_grew_past_the_ledger_stops_its_partition_until_an_operator_acts() {
    let stage = Stage::on(Kafka::start().await, 1).await;
    let (runs, events) = (Runs::new(), Events::capture());
    produce(&stage, "kept", 6).await;
    produce(&stage, "lost", 4).await;
    let running = start(&stage, &runs).await;
    runs.reached(10).await;
    end(running).await;
    stage.kafka.stop().await;
    stage.kafka.cut_log(&stage.topic, 0, 6).await;
    stage.kafka.start_again().await;
    assert_eq!(stage.kafka.watermarks(&stage.topic, 0).await.high, 6, "the log was cut");
    produce(&stage, "after", 8).await;

    let running = start(&stage, &runs).await;
    let why = stopped(&events, &stage).await;
    let health = running.health();
    end(running).await;

    assert!(
        health.is_ready && health.to_string().contains(&format!("partition 0 of {} is stopped", stage.topic)),
        "{health}"
    );
    assert!(why.contains("truncated") && why.contains("offset 10 (leader epoch"), "{why}");
    assert!(why.contains("offset 6 (leader epoch"), "{why}");
    assert_eq!((stage.ledger(0).await, stored(&stage, "after").await), (Some(10), 0));
    let rows = "SELECT stopped_why FROM inbox_ledger WHERE stopped_at IS NOT NULL";
    assert_eq!(stage.scene.database.query_texts(rows).await, [why]);

    // However long the log has become, the next process does not start by itself either.
    produce(&stage, "after-more", 5).await;
    let events = Events::capture();
    let running = start(&stage, &runs).await;
    stopped(&events, &stage).await;
    end(running).await;
    assert_eq!((stage.ledger(0).await, stored(&stage, "after").await), (Some(10), 0));

    reset_and_read_on(&stage, &runs, 6, 13).await;
    assert_eq!((stage.ledger(0).await, stored(&stage, "lost").await), (Some(19), 4));
    let audit = "SELECT concat_ws('|', action, affected) FROM inbox_audit";
    assert_eq!(stage.scene.database.query_texts(audit).await, ["reset ledger|1"]);
}

/// Two brokers that hold the topics, and one that holds the group's offsets and is the controller.
struct Cluster {
    first: Kafka,
    second: Kafka,
    third: Kafka,
}

impl Cluster {
    async fn start() -> Self {
        let first = Kafka::start().await;
        // The topic of the group's offsets is created while only this broker exists, so it stays there.
        let topic = first.create_unique_topic(1).await;
        first.commit(&unique_name("group"), &topic, 0, 0).await;
        let joining = |node_id| KafkaOptions { joins: Some((node_id, first.clone())), ..KafkaOptions::default() };
        let (second, third) = tokio::join!(Kafka::start_with(joining(2)), Kafka::start_with(joining(3)));
        Self { first, second, third }
    }

    async fn stage(&self) -> Stage {
        let topic = unique_name("topic");
        let settings = [("unclean.leader.election.enable", "true"), ("min.insync.replicas", "1")];
        self.first.create_topic_on(&topic, &[2, 3], &settings).await;
        Stage::about(self.first.clone(), topic).await
    }
}

// The leader has records that its follower does not have. It crashes and the follower becomes leader: acknowledged and
// stored records are gone from the log, and others have their offsets. Once under a running service, once while it is
// down.
#[tokio::test(flavor = "multi_thread")]
async fn an_unclean_leader_election_stops_the_partition_of_a_running_and_of_a_stopped_service() {
    let cluster = Cluster::start().await;
    let (up, down) = (cluster.stage().await, cluster.stage().await);
    let (runs, events) = (Runs::new(), Events::capture());
    for stage in [&up, &down] {
        produce(stage, "kept", 5).await;
    }
    cluster.third.kill().await;
    for stage in [&up, &down] {
        produce(stage, "lost", 5).await;
    }
    let (running, ending) = (start(&up, &runs).await, start(&down, &runs).await);
    runs.reached(20).await;
    end(ending).await;
    cluster.second.kill().await;
    cluster.third.start_again().await;
    for stage in [&up, &down] {
        produce(stage, "after", 8).await;
    }

    let why = stopped(&events, &up).await;
    end(running).await;
    assert!(why.contains("offset 10 (leader epoch") && why.contains("offset 5 (leader epoch"), "{why}");

    let running = start(&down, &runs).await;
    let why = stopped(&events, &down).await;
    end(running).await;
    assert!(why.contains("offset 10 (leader epoch") && why.contains("offset 5 (leader epoch"), "{why}");

    for stage in [&up, &down] {
        assert_eq!((stage.ledger(0).await, stored(stage, "after").await), (Some(10), 0));
        reset_and_read_on(stage, &runs, 5, 8).await;
        assert_eq!(stage.ledger(0).await, Some(13));
    }
}
