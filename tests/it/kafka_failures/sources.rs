//! Several sources in one inbox: clusters with a topic of the same name, one of them killed, one unreachable.

use std::time::Duration;

use wharf::health::{Health, HealthReason, Monitor};
use wharf::kafka::Kafka as Source;
use wharf::{Identity, InboxBuilder, Postgres};

use super::stage::{Stage, end};
use crate::scene::{Runs, within};
use support::kafka::{Kafka, KafkaOptions};
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;

/// Waits until the health matches.
pub async fn until(monitor: &Monitor, is_wanted: impl Fn(&Health) -> bool) -> Health {
    within(async {
        loop {
            let health = monitor.health();
            if is_wanted(&health) {
                return health;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
}

/// Whether health reports a Kafka problem for this source.
pub fn has_kafka_error(health: &Health, name: &str) -> bool {
    let is_it = |reason: &HealthReason| match reason {
        HealthReason::KafkaError { source, .. } => source.as_deref() == Some(name),
        _ => false,
    };
    health.reasons.iter().any(is_it)
}

/// Reconnects quickly.
fn eager(source: Source) -> Source {
    source.set("reconnect.backoff.ms", "20").set("reconnect.backoff.max.ms", "200").set("session.timeout.ms", "6000")
}

/// One record per name: the two clusters have different records at the same positions.
fn records(names: &[&str]) -> Vec<TestRecord> {
    names.iter().map(|name| TestRecord::new(*name)).collect()
}

/// The next offsets of all ledger rows of the group, with the topics.
async fn ledger(stage: &Stage) -> Vec<String> {
    let sql = format!(
        "SELECT topic || ' ' || next_offset FROM inbox_ledger WHERE consumer_group = '{}' ORDER BY topic, next_offset",
        stage.group
    );
    stage.scene.database.query_texts(&sql).await
}

#[tokio::test(flavor = "multi_thread")]
async fn when_one_of_two_clusters_with_the_same_topic_is_killed_the_other_continues() {
    let stage = Stage::new(1).await;
    let options = KafkaOptions { is_another_cluster: true, ..KafkaOptions::default() };
    let (runs, other) = (Runs::new(), Kafka::start_with(options).await);
    other.create_topic(&stage.topic, 1, &[]).await;
    stage.kafka.produce(&stage.topic, 0, &records(&["eu 0", "eu 1"])).await;
    other.produce(&stage.topic, 0, &records(&["us 0", "us 1", "us 2"])).await;
    let inbox = stage
        .scene
        .inbox()
        .subscribe(&*stage.topic, runs.handler("a"))
        .identity(&*stage.topic, Identity::position())
        .source(stage.source().named("eu"))
        .source(eager(Source::new(other.brokers(), &stage.group)).named("us"))
        .build()
        .unwrap();
    let running = within(inbox.start()).await.unwrap();
    runs.reached(5).await;
    let monitor = running.monitor();

    other.kill().await;
    let away = until(&monitor, |health| has_kafka_error(health, "us")).await;
    assert!(away.is_ready && !has_kafka_error(&away, "eu") && away.to_string().contains("Kafka source us: "), "{away}");
    stage.kafka.produce(&stage.topic, 0, &records(&["eu 2", "eu 3"])).await;
    runs.reached(7).await;
    stage.scene.until("SELECT count(*) FROM inbox_ingest WHERE source = 'us' AND problem IS NOT NULL").await;
    let diagnosis = stage.scene.store.operate().doctor().await.unwrap();
    let told: Vec<&str> = diagnosis.symptoms.iter().map(|symptom| &*symptom.what).collect();
    let named = format!("source us (group {})", stage.group);
    assert!(
        told.iter().any(|told| told.contains(&named)) && !told.iter().any(|told| told.contains("source eu")),
        "{told:?}"
    );

    other.start_again().await;
    other.produce(&stage.topic, 0, &records(&["us 3"])).await;
    runs.reached(8).await;
    until(&monitor, |health| !health.is_degraded()).await;
    end(running).await;
    assert_eq!((runs.count(), stage.scene.count("inbox_message").await), (8, 8));
    assert_eq!(ledger(&stage).await, [format!("{} 4", stage.topic), format!("{} 4", stage.topic)]);
    assert_eq!(stage.scene.count("(SELECT DISTINCT cluster_id FROM inbox_ledger) c").await, 2);
    assert_eq!(stage.scene.count("inbox_ingest").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_reads_only_its_topics_and_an_unreachable_one_delays_no_other() {
    let (stage, runs) = (Stage::new(1).await, Runs::new());
    let other_topic = stage.kafka.create_unique_topic(1).await;
    let other_group = unique_name("group");
    let topics = [&*stage.topic, &*other_topic];
    let inbox = stage
        .scene
        .inbox()
        .subscribe(topics, runs.handler("a"))
        .identity(topics, Identity::position())
        .source(stage.source().topics([&stage.topic]))
        .source(Source::new(stage.kafka.brokers(), &other_group).named("second").topics([&other_topic]))
        .source(Source::new("127.0.0.1:1", &stage.group).named("nowhere"))
        .build()
        .unwrap();
    for topic in topics {
        stage.kafka.produce(topic, 0, &records(&["a", "b"])).await;
    }
    let running = within(inbox.start()).await.unwrap();
    runs.reached(4).await;
    let health = until(&running.monitor(), |health| has_kafka_error(health, "nowhere")).await;
    assert!(health.is_live && health.is_ready, "{health}");
    end(running).await;
    let sql = "SELECT consumer_group || ' ' || topic || ' ' || next_offset FROM inbox_ledger ORDER BY 1";
    let mut expected = [format!("{} {} 2", stage.group, stage.topic), format!("{other_group} {other_topic} 2")];
    expected.sort();
    assert_eq!(stage.scene.database.query_texts(sql).await, expected);
}

#[test]
fn build_reports_all_invalid_sources_at_once() {
    let refused = InboxBuilder::<Postgres>::without_store()
        .subscribe("orders", Runs::new().handler("a"))
        .source(Source::new("b:9092", "shop"))
        .source(Source::new("c:9092", "shop"))
        .source(Source::new("d:9092", "shop").named("d d"))
        .source(Source::new("e:9092", "shop").named("e").topics(["returns", "^(", "^ret"]))
        .source(Source::new("", "shop").named("f").set("enable.auto.commit", "true"))
        .build()
        .unwrap_err()
        .to_string();
    for problem in [
        r#"2 sources have the name "shop": tell them apart with Kafka::named"#,
        r#"the source name "d d" is not 1 to 60 of"#,
        r#"source e (group shop) reads "returns", but no handler subscribes to it"#,
        r#"source e (group shop) reads "^(": unclosed group"#,
        r#"source e (group shop) reads "^ret", but no handler subscribes to it"#,
        "source f (group shop): ",
        "enable.auto.commit cannot be set",
        "no broker is given",
    ] {
        assert!(refused.contains(problem), "{problem}: {refused}");
    }
}
