//! A missing permission is reported once, with its topic or group: in the log, in health and in the database. When it
//! is granted, reading resumes.

use std::time::Duration;

use wharf::Identity;
use wharf::kafka::Kafka as Source;

use super::stage::{Stage, end, range};
use super::tokens::{guarded, is_refused, source, token};
use crate::scene::{Runs, within};
use support::events::Events;
use support::kafka_acls::{Operation, Resource};

/// A user for this test, without any permission yet.
fn user(stage: &Stage) -> String {
    format!("user-{}", stage.group)
}

fn source_of(stage: &Stage) -> Source {
    let user = user(stage);
    source(stage).token_from(move || {
        let user = user.clone();
        async move { Ok::<_, String>(token(&user, Duration::from_secs(60))) }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_topic_permission_is_reported_once_and_delays_no_other_topic() {
    let stage = Stage::on(guarded().await.clone(), 1).await;
    let open = stage.kafka.create_unique_topic(1).await;
    let (user, runs, others, events) = (user(&stage), Runs::new(), Runs::new(), Events::capture());
    stage.kafka.grant(&user, Operation::Read, Resource::Group(&stage.group)).await;
    stage.kafka.grant(&user, Operation::Read, Resource::Topic(&open)).await;
    stage.kafka.grant(&user, Operation::Describe, Resource::Topic(&stage.topic)).await;
    stage.produce(0, 3).await;
    let inbox = stage.scene.inbox().subscribe(&*open, others.handler("b")).identity(&*open, Identity::position());
    let running = within(stage.build(inbox, &runs).start_from(source_of(&stage))).await.unwrap();

    let told = events.wait_for(is_refused(&stage, "topic")).await;
    assert!(told.fields["why"].contains(&stage.topic) && told.fields["why"].contains("READ"), "{told:?}");
    stage.kafka.produce(&open, 0, &[support::kafka_records::TestRecord::new("flows")]).await;
    others.reached(1).await;
    // Records of other topics do not hide the problem.
    let health = running.health().to_string();
    assert!(health.contains(&format!("topic {} may not be read", stage.topic)), "{health}");
    let said = format!("why LIKE 'topic {} may not be read%'", stage.topic);
    stage.scene.until(&format!("SELECT count(*) FROM inbox_partition WHERE state = 'refused' AND {said}")).await;
    stage.scene.until("SELECT count(*) FROM inbox_ingest WHERE problem LIKE 'topic % may not be read%'").await;
    assert_eq!(events.matching(is_refused(&stage, "topic")).len(), 1);
    // The advice is to grant access. A skip would lose good records.
    let diagnosis = stage.scene.store.operate().doctor().await.unwrap();
    let of_partition: Vec<_> = diagnosis.symptoms.iter().filter(|one| one.code.starts_with("partition ")).collect();
    let [refused] = &of_partition[..] else { panic!("{diagnosis:?}") };
    assert_eq!(refused.code, "partition refused");
    assert!(refused.advice.contains("grant READ") && !refused.advice.contains("wharf ledger"), "{refused:?}");

    stage.kafka.grant(&user, Operation::Read, Resource::Topic(&stage.topic)).await;
    runs.reached(3).await;
    end(running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_group_permission_is_reported_once_and_reading_begins_when_it_is_granted() {
    let stage = Stage::on(guarded().await.clone(), 1).await;
    let (user, runs, events) = (user(&stage), Runs::new(), Events::capture());
    stage.kafka.grant(&user, Operation::Read, Resource::Topic(&stage.topic)).await;
    stage.produce(0, 3).await;
    let running = stage.start_from(source_of(&stage), &runs).await;

    let told = events.wait_for(is_refused(&stage, "group")).await;
    assert!(told.fields["why"].contains(&stage.group) && told.fields["why"].contains("READ"), "{told:?}");
    let health = running.health().to_string();
    assert!(health.contains(&format!("consumer group {} may not be used", stage.group)), "{health}");
    stage.scene.until("SELECT count(*) FROM inbox_ingest WHERE problem LIKE 'consumer group % may not be used%'").await;

    stage.kafka.grant(&user, Operation::Read, Resource::Group(&stage.group)).await;
    runs.reached(3).await;
    assert_eq!(events.matching(is_refused(&stage, "group")).len(), 1);
    assert!(!running.health().is_degraded(), "{}", running.health());
    end(running).await;
    assert_eq!(stage.positions().await, range(0, 0..3));
}

// The topic is not even in the metadata of this user.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_without_describe_permission_is_reported() {
    let stage = Stage::on(guarded().await.clone(), 1).await;
    let (runs, events) = (Runs::new(), Events::capture());
    stage.kafka.grant(&user(&stage), Operation::Read, Resource::Group(&stage.group)).await;
    let running = stage.start_from(source_of(&stage), &runs).await;
    let told = events.wait_for(is_refused(&stage, "topic")).await;
    assert!(told.fields["why"].contains(&stage.topic), "{told:?}");
    assert!(running.health().to_string().contains(&stage.topic), "{}", running.health());
    end(running).await;
}
