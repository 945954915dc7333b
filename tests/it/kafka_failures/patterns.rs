//! Topic patterns: matching topics are picked up when they appear, with the identity policy and the handlers that match
//! them.

use wharf::{Identity, InboxBuilder, Postgres};

use super::stage::{Stage, end};
use crate::scene::{Runs, within};
use support::events::{Event, Events};
use support::kafka::Kafka;
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;

fn record(id: &str) -> TestRecord {
    TestRecord::new(format!("payload of {id}")).with_header("id", id)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_created_at_run_time_is_read_if_it_matches_a_pattern() {
    let (prefix, events) = (unique_name("orders"), Events::capture());
    let stage = Stage::about(Kafka::shared().await.clone(), format!("{prefix}.special")).await;
    let (every, eu) = (Runs::new(), Runs::new());
    let pattern = format!(r"^{prefix}\.");
    let inbox = stage
        .scene
        .inbox()
        .subscribe(&*pattern, every.handler("every"))
        .subscribe(format!(r"^{prefix}\.eu$"), eu.handler("eu"))
        .identity(&*pattern, Identity::header("id"))
        .identity(&*stage.topic, Identity::position())
        .build()
        .unwrap();
    let source = stage.source().set("topic.metadata.refresh.interval.ms", "200");
    let running = within(inbox.start_from(source)).await.unwrap();
    // No topic matches yet.
    let is_ours = |event: &Event| event.message == "topics changed" && event.has("group", &stage.group);
    let (europe, america) = (format!("{prefix}.eu"), format!("{prefix}.us"));
    stage.kafka.create_topic(&format!("{prefix}x"), 1, &[]).await;
    for (topic, id) in [(&europe, "e1"), (&america, "a1"), (&stage.topic, "s1")] {
        stage.kafka.create_topic(topic, 1, &[]).await;
        events.wait_for(|event| is_ours(event) && event.fields["added"].contains(&**topic)).await;
        stage.kafka.produce(topic, 0, &[record(id)]).await;
    }
    every.reached(3).await;
    eu.reached(1).await;

    stage.kafka.delete_topic(&europe).await;
    events.wait_for(|event| is_ours(event) && event.fields["removed"].contains(&*europe)).await;
    stage.kafka.produce(&america, 0, &[record("a2"), record("a1")]).await;
    every.reached(4).await;
    end(running).await;

    let mut ids = every.sorted();
    let by_position =
        ids.iter().position(|id| id.contains(&stage.topic)).expect("the name takes precedence over the pattern");
    ids.remove(by_position);
    assert_eq!((ids, eu.ids()), (vec!["a1".to_owned(), "a2".to_owned(), "e1".to_owned()], vec!["e1".to_owned()]));
    let ledger = "SELECT topic || ' ' || next_offset FROM inbox_ledger ORDER BY 1";
    let expected = [format!("{europe} 1"), format!("{} 1", stage.topic), format!("{america} 3")];
    assert_eq!(stage.scene.database.query_texts(ledger).await, expected);
}

#[test]
fn a_pattern_that_would_not_match_the_same_topics_everywhere_is_refused_by_build() {
    let refused = InboxBuilder::<Postgres>::without_store()
        .subscribe("^orders(", Runs::new().handler("a"))
        .subscribe(r"^orders\b", Runs::new().handler("b"))
        .subscribe("orders.*", Runs::new().handler("c"))
        .identity("^[", Identity::position())
        .build()
        .unwrap_err()
        .to_string();
    for problem in [
        r#"a subscribes to "^orders(": unclosed group"#,
        r#"b subscribes to "^orders\\b": the only anchors that a pattern may contain are ^ and $"#,
        r#"c subscribes to "orders.*": a topic name has 1 to 249 characters of A-Z a-z 0-9 . _ -, and a pattern begins with ^"#,
        r#"the identity of "^[": unclosed character class"#,
    ] {
        assert!(refused.contains(problem), "{problem}: {refused}");
    }
}
