//! The parents, links and attributes of spans.

use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use wharf::batch::batch_handler;
use wharf::traces::{SpanKind, TraceContext, install};
use wharf::{Failure, Message, Raw, Record, handler, tx_handler};

use super::recorder::{PANICKED, PANICS, Told, ended, record};
use crate::kafka::stage::{Stage, end};
use crate::scene::{Connection, Runs, Scene, key};
use support::kafka_records::TestRecord;

/// A producer's span.
fn producer(number: u8) -> TraceContext {
    TraceContext::new([number; 16], [number; 8], 1).unwrap()
}

fn to(topic: &str, id: &str, trace: &TraceContext) -> Record {
    Record::new(topic).with_id(id.to_owned()).with_payload("anything").with_trace(trace)
}

fn connections(told: &[Told]) -> Vec<(&str, Vec<&str>)> {
    told.iter().map(|told| (told.parent.as_str(), told.links.iter().map(String::as_str).collect())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_run_is_a_child_of_the_producers_span_and_a_retry_begins_a_linked_trace() {
    record();
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("traces.retry", Runs::new().obeying("traces.retry")).build().unwrap();
    let running = inbox.start().await.unwrap();
    let trace = producer(1).with_baggage("tenant=a");
    inbox.accept(to("traces.retry", "retry", &trace)).await.unwrap();
    let runs = ended("process traces.retry", 2).await;
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let traceparent = trace.traceparent();
    assert_eq!(connections(&runs), [(traceparent.as_str(), vec![]), ("none", vec![traceparent.as_str()])]);
    assert_eq!(runs[0].end, Some(Some(("failed", "no".to_owned()))));
    assert_eq!(runs[1].end, Some(None));
    assert!(runs.iter().all(|run| run.baggage.as_deref() == Some("tenant=a")), "{runs:?}");
    assert_eq!(
        runs.iter().map(|run| run.attribute("wharf.outcome")).collect::<Vec<_>>(),
        [Some("retried"), Some("done")]
    );
    assert_eq!(runs[0].kind, SpanKind::Consumer);
    let attributes = [
        ("messaging.system", "wharf"),
        ("messaging.operation.name", "process"),
        ("messaging.operation.type", "process"),
        ("messaging.destination.name", "traces.retry"),
        ("messaging.message.id", "retry"),
    ];
    for (name, value) in attributes {
        assert_eq!(runs[0].attribute(name), Some(value), "{name}");
    }

    let accepted = ended("accept traces.retry", 1).await;
    assert_eq!(connections(&accepted), [(traceparent.as_str(), vec![])]);
    assert_eq!((accepted[0].kind, accepted[0].end.clone()), (SpanKind::Client, Some(None)));
    assert_eq!(accepted[0].attribute("messaging.operation.type"), Some("receive"));
    assert_eq!(accepted[0].attribute("messaging.batch.message_count"), Some("1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_message_and_one_with_an_invalid_trace_begin_a_new_trace() {
    record();
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene
        .inbox()
        .subscribe("traces.old", runs.handler("traces.old"))
        .subscribe("traces.hostile", runs.handler("traces.hostile"))
        .build()
        .unwrap();
    let hour_ago = SystemTime::now() - Duration::from_secs(3_600);
    inbox.accept(to("traces.old", "old", &producer(2)).with_recorded_at(hour_ago)).await.unwrap();
    let hostile = [&b"\xff\xfe"[..], b"", b"00-zz", &[b'0'; 70_000]];
    let records = hostile.iter().enumerate().map(|(number, value)| {
        let record =
            Record::new("traces.hostile").with_id(number.to_string()).with_header("traceparent", value.to_vec());
        record.with_header("tracestate", value.to_vec()).with_header("baggage", value.to_vec())
    });
    inbox.accept_all(records).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 5);

    let old = ended("process traces.old", 1).await;
    assert_eq!(connections(&old), [("none", vec![&*producer(2).traceparent()])]);
    assert_eq!(connections(&ended("accept traces.old", 1).await), [("none", vec![&*producer(2).traceparent()])]);
    assert_eq!(
        connections(&ended("process traces.hostile", 4).await),
        [("none", vec![]), ("none", vec![]), ("none", vec![]), ("none", vec![])]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_span_of_a_batch_is_linked_to_each_of_its_messages() {
    record();
    let scene = Scene::new().await;
    let batch = batch_handler(key("traces.batch"), |messages: Vec<Message<Raw>>| async move {
        if messages.iter().any(|message| message.id() == "bad") { Err(Failure::poison("not this one")) } else { Ok(()) }
    });
    let inbox = scene.inbox().subscribe("traces.batch", batch.batch(8, Duration::ZERO)).build().unwrap();
    let records = [("good", 1), ("bad", 2)].map(|(id, number)| to("traces.batch", id, &producer(number)));
    inbox.accept_all(records).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 2);

    let told = ended("process traces.batch", 3).await;
    let (links, batch) = ([1, 2].map(|number| producer(number).traceparent()), &told[0]);
    assert_eq!((batch.parent.as_str(), &batch.links[..]), ("none", &links[..]));
    assert_eq!(batch.attribute("messaging.batch.message_count"), Some("2"));
    assert_eq!(batch.end, Some(Some(("failed", "not this one".to_owned()))));
    // After the failed batch, each message runs alone.
    let mut errors: Vec<_> = told[1..].iter().map(|told| told.end.clone().flatten()).collect();
    errors.sort();
    assert_eq!(errors, [None, Some(("permanent", "not this one".to_owned()))]);
    assert_eq!(
        connections(&ended("accept traces.batch", 1).await),
        [("none", links.iter().map(String::as_str).collect())]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn records_without_a_trace_do_not_join_the_trace_of_another_record_in_the_batch() {
    record();
    let scene = Scene::new().await;
    let batch = batch_handler(key("traces.mixed"), |_: Vec<Message<Raw>>| async { Ok::<(), Failure>(()) });
    let inbox = scene.inbox().subscribe("traces.mixed", batch.batch(8, Duration::ZERO)).build().unwrap();
    let trace = producer(6).with_baggage("tenant=a");
    let untraced = |id: &str| Record::new("traces.mixed").with_id(id.to_owned()).with_payload("anything");
    inbox.accept_all([untraced("before"), to("traces.mixed", "traced", &trace), untraced("after")]).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 3);

    let traceparent = trace.traceparent();
    let linked = [("none", vec![traceparent.as_str()])];
    for name in ["accept traces.mixed", "process traces.mixed"] {
        let told = ended(name, 1).await;
        assert_eq!((connections(&told).as_slice(), &told[0].baggage), (&linked[..], &None), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_span_has_the_kind_of_its_runs_failure() {
    record();
    let scene = Scene::new().await;
    let ends = async |message: Message<Raw>, _: &mut Connection| -> Result<(), Failure> {
        match message.id() {
            "hang" => std::future::pending().await,
            "panic" => panic!("on purpose"),
            "away" => Err(Failure::unavailable("nobody there")),
            _ => Ok(()),
        }
    };
    let never = wharf::RetryPolicy::never();
    let transactional = tx_handler(key("traces.failing"), ends).timeout(Duration::from_millis(50)).retry(never);
    let inbox = scene.inbox().subscribe("traces.failing", transactional.share_transaction(4)).build().unwrap();
    let ids = ["away", "done", "hang", "panic"];
    inbox.accept_all(ids.map(|id| to("traces.failing", id, &producer(3)))).await.unwrap();
    inbox.drain().await.unwrap();

    let told = ended("process traces.failing", 4).await;
    let kind = |id: &str| {
        let of_it = told.iter().rfind(|told| told.attribute("messaging.message.id") == Some(id)).unwrap();
        of_it.end.clone().unwrap().map(|(kind, _)| kind)
    };
    assert_eq!(ids.map(kind), [Some("unavailable"), None, Some("timed out"), Some("panicked")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_spans_of_a_kafka_record_have_its_position_and_the_consumer_group() {
    record();
    let stage = Stage::about(
        support::kafka::Kafka::shared().await.clone(),
        format!("traces.{}", support::kafka_admin::unique_name("kafka")),
    )
    .await;
    stage.kafka.create_topic(&stage.topic, 1, &[]).await;
    let trace = producer(4);
    let record = TestRecord::new("payload").with_header("traceparent", trace.traceparent());
    stage.kafka.produce(&stage.topic, 0, &[record]).await;
    let runs = Runs::new();
    let running = stage.start(&runs).await;
    runs.reached(1).await;

    let run = &ended(&format!("process {}", stage.topic), 1).await[0];
    let accepted = &ended(&format!("accept {}", stage.topic), 1).await[0];
    assert_eq!((&run.parent, &accepted.parent), (&trace.traceparent(), &trace.traceparent()));
    for (span, name, value) in [
        (run, "messaging.system", "kafka"),
        (run, "messaging.destination.partition.id", "0"),
        (run, "messaging.kafka.offset", "0"),
        (accepted, "messaging.system", "kafka"),
        (accepted, "messaging.destination.partition.id", "0"),
        (accepted, "messaging.consumer.group.name", stage.group.as_str()),
    ] {
        assert_eq!(span.attribute(name), Some(value), "{name}");
    }
    end(running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_that_panics_fails_no_run_and_a_second_bridge_is_refused() {
    record();
    let scene = Scene::new().await;
    let done = handler(key("traces.panics"), async |_: Message<Raw>| Ok::<(), Failure>(()));
    let inbox = scene.inbox().subscribe(PANICS, done).build().unwrap();
    inbox.accept(to(PANICS, "one", &producer(5))).await.unwrap();
    assert_eq!(inbox.drain().await.unwrap(), 1);
    assert_eq!(scene.count_done_at_first().await, 1);
    assert!(PANICKED.load(Ordering::Relaxed) > 0, "the bridge was not called");
    let refused = install(wharf::otel::OtelBridge::new()).unwrap_err();
    assert!(refused.is_configuration(), "{refused}");
}
