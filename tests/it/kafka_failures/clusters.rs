//! Two Kafka clusters that feed one database: a position in one is not a position in the other. On librdkafka's mock
//! clusters, each of which has its own id.

use wharf::kafka::Kafka as Source;

use super::stage::{Stage, end};
use crate::scene::{Runs, within};
use support::kafka::Kafka;
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;
use support::mock_kafka::MockKafka;

#[tokio::test(flavor = "multi_thread")]
async fn records_at_the_same_position_of_two_clusters_are_both_stored() {
    let (here, there) = (MockKafka::start(1), MockKafka::start(1));
    let topic = unique_name("topic");
    here.create_topic(&topic, 1);
    there.create_topic(&topic, 1);
    let stage = Stage::about(Kafka::at(here.brokers()), topic).await;
    stage.produce(0, 2).await;
    // The first two have the same payloads as the records of the other cluster: by position alone they would be
    // duplicates.
    let records = ["payload 0", "payload 1", "payload 2"].map(TestRecord::new);
    Kafka::at(there.brokers()).produce(&stage.topic, 0, &records).await;

    let runs = Runs::new();
    let first = stage.start(&runs).await;
    runs.reached(2).await;
    let second = stage.build(stage.scene.another_inbox().await, &runs);
    let second = within(second.start_from(Source::new(there.brokers(), &stage.group))).await.unwrap();
    runs.reached(5).await;

    end(first).await;
    end(second).await;
    assert_eq!(stage.positions().await, ["0/0", "0/0", "0/1", "0/1", "0/2"]);
    assert_eq!((stage.scene.count("inbox_ledger").await, stage.scene.count("inbox_quarantine").await), (2, 0));
}
