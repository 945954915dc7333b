//! Retention with Kafka: a group that is set back reads everything again, and no handler runs again.

use std::time::Duration;

use wharf::{Identity, Retention};

use super::stage::{Stage, end};
use crate::scene::{Database, Runs, quick, within};
use support::events::{Event, Events};
use support::kafka_admin::unique_name;

const DAY: Duration = Duration::from_secs(86_400);

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_is_reset_to_the_beginning_after_a_purge_runs_nothing_again() {
    let stage = Stage::new(1).await;
    stage.scene.database.age_identities(3_600).await;
    let runs = Runs::new();
    stage.produce(0, 200).await;
    let running = stage.start(&runs).await;
    runs.reached(200).await;
    stage.scene.settled().await;
    end(running).await;
    let keeping = Retention::after(Duration::ZERO).keep_identities(DAY);
    assert_eq!(within(stage.scene.store.purge(&keeping, |_| {})).await.unwrap().messages, 200);

    stage.scene.database.execute("DELETE FROM inbox_ledger").await;
    stage.kafka.commit(&stage.group, &stage.topic, 0, 0).await;
    stage.produce(0, 10).await;
    let running = stage.start(&runs).await;
    runs.reached(210).await;
    stage.scene.settled().await;
    end(running).await;

    assert_eq!((runs.count(), stage.ledger(0).await), (210, Some(210)));
    assert_eq!(stage.scene.count("inbox_message").await, 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_with_longer_retention_than_the_inbox_is_reported() {
    let stage = Stage::new(1).await;
    let [week, ever, compacted] = [(); 3].map(|()| unique_name("retention"));
    stage.kafka.create_topic(&week, 1, &[("retention.ms", "604800000")]).await;
    stage.kafka.create_topic(&ever, 1, &[("retention.ms", "-1")]).await;
    stage.kafka.create_topic(&compacted, 1, &[("cleanup.policy", "compact")]).await;
    let warned = async |retention: Retention| {
        let events = Events::capture();
        let topics = [week.as_str(), &ever, &compacted];
        let inbox = stage.scene.inbox().limits(quick()).subscribe(topics, Runs::new().handler("a"));
        let inbox = inbox.identity(topics, Identity::position()).retention(retention).build().unwrap();
        let running = within(inbox.start_from(stage.source())).await.unwrap();
        let is_warning =
            |event: &Event, topic: &str| event.message.starts_with("retention is shorter") && event.has("topic", topic);
        events.wait_for(|event| is_warning(event, &ever)).await;
        events.wait_for(|event| is_warning(event, &compacted)).await;
        end(running).await;
        events.matching(|event| is_warning(event, &week)).len()
    };

    assert_eq!(warned(Retention::after(6 * DAY)).await, 1);
    assert_eq!(warned(Retention::after(6 * DAY).keep_identities(DAY)).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_topic_retention_is_reported_at_debug_level() {
    let stage = Stage::about(support::kafka::Kafka::shared().await.clone(), unique_name("missing")).await;
    let events = Events::capture();
    let inbox = stage.build(stage.scene.inbox().retention(DAY), &Runs::new());
    let running = within(inbox.start_from(stage.source())).await.unwrap();
    let unknown =
        events.wait_for(|event| event.message == "retention unknown" && event.has("group", &stage.group)).await;
    assert_eq!(unknown.level, tracing::Level::DEBUG);
    end(running).await;
}
