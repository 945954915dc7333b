//! A consumer with a rack reads from the replica in that rack (KIP-392), and the result is the same as from the leader.

use super::stage::{Stage, end, range};
use crate::scene::Runs;
use support::events::{Event, Events};
use support::kafka::{Kafka, KafkaOptions};
use support::kafka_admin::unique_name;

/// A broker in this rack, as a new cluster or as a member of another broker's cluster.
fn in_rack(rack: &str, joins: Option<(u16, Kafka)>) -> KafkaOptions {
    let selector = "org.apache.kafka.common.replica.RackAwareReplicaSelector";
    let settings = [("broker.rack", rack), ("replica.selector.class", selector)];
    let mut options = KafkaOptions { joins, ..KafkaOptions::steady() };
    options.settings.extend(settings.map(|(name, value)| (name.to_owned(), value.to_owned())));
    options
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_with_a_rack_reads_from_the_replica_in_that_rack() {
    let leader = Kafka::start_with(in_rack("rack-a", None)).await;
    let _follower = Kafka::start_with(in_rack("rack-b", Some((2, leader.clone())))).await;
    let topic = unique_name("topic");
    leader.create_topic_on(&topic, &[1, 2], &[]).await;
    let stage = Stage::about(leader, topic).await;
    stage.produce(0, 3).await;
    let (runs, events) = (Runs::new(), Events::capture());
    let source = stage.source().set("client.rack", "rack-b").set("debug", "topic,fetch");
    let running = stage.start_from(source, &runs).await;
    let is_there = |event: &Event| {
        let line = event.field("line").unwrap_or_default();
        event.has("group", &stage.group) && line.contains(&stage.topic) && line.contains("preferred replica updated")
    };
    events.wait_for(is_there).await;
    stage.produce(0, 3).await;
    runs.reached(6).await;
    end(running).await;
    assert_eq!(stage.positions().await, range(0, 0..6));
}
