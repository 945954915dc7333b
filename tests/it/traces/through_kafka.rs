//! A Kafka record with `traceparent`, `tracestate` and `baggage`: the collector receives a span for each run, and
//! records that handlers publish arrive in Kafka with the context of the run.
//!
//! The service is a child process, because a process can have only one bridge and the test process has another.

use std::time::Duration;

use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::SpanExporter;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::prelude::*;
use wharf::kafka::{Kafka, Relay};
use wharf::traces::TraceContext;
use wharf::{
    Failure, Identity, Inbox, Message, Outbox, Postgres, Raw, Record, Registration, Store, tx_handler, with_state,
};

use super::collector::{Collector, attribute, named, traceparent};
use crate::kafka::stage::Stage;
use crate::scene::{Connection, key, quick};
use support::child::{Child, Role, parameter};
use support::kafka_records::TestRecord;

pub const ROLE: (&str, Role) = ("traced", serve);

const URL: &str = "TRACED_URL";
const BROKERS: &str = "TRACED_BROKERS";
const GROUP: &str = "TRACED_GROUP";
const TOPIC: &str = "TRACED_TOPIC";
const SENT_TO: &str = "TRACED_SENT_TO";

/// A handler that publishes a record with its own key at attempt `at`, and fails before.
#[derive(Clone)]
struct Publishes {
    outbox: Outbox<Postgres>,
    key: &'static str,
    at: u32,
}

async fn publish(state: Publishes, message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
    if message.attempt() < state.at {
        return Err(Failure::retry_after(Duration::from_millis(10), "not yet"));
    }
    state.outbox.publish(conn, Record::new(parameter(SENT_TO)).with_key(state.key)).await?;
    Ok(())
}

#[tokio::main]
async fn serve() {
    let provider =
        SdkTracerProvider::builder().with_batch_exporter(SpanExporter::builder().with_http().build().unwrap()).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("shop")).with_filter(LevelFilter::INFO);
    tracing_subscriber::registry().with(layer).init();
    // Long enough for a busy machine.
    let bridge = wharf::otel::OtelBridge::new().with_parent_age_max(Duration::from_secs(600));
    wharf::traces::install(bridge).unwrap();

    let (topic, brokers) = (parameter(TOPIC), parameter(BROKERS));
    let store = Store::<Postgres>::connect(&parameter(URL)).await.unwrap();
    let outbox = Outbox::new(&store).with_source("/shop");
    let publishing = |name: &'static str, at| -> Registration<Postgres> {
        tx_handler(key(name), with_state(Publishes { outbox: outbox.clone(), key: name, at }, publish))
    };
    let inbox = Inbox::builder(store)
        .limits(quick())
        .subscribe(&*topic, publishing("at-once", 1))
        .subscribe(&*topic, publishing("fails-once", 2))
        .identity(&*topic, Identity::position())
        .relay(Relay::new(&brokers).lease(Duration::from_secs(2)).poll(Duration::from_millis(50)))
        .build()
        .unwrap();
    let mut running = inbox.start_from(Kafka::new(&brokers, parameter(GROUP))).await.unwrap();
    panic!("{}", running.failure().await);
}

/// The trace id and span id by which a child or a link refers to this span.
fn ids(trace: &TraceContext) -> (Vec<u8>, Vec<u8>) {
    (trace.trace_id().to_vec(), trace.span_id().to_vec())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_continues_from_a_kafka_record_through_each_attempt_to_the_published_records() {
    let stage = Stage::new(1).await;
    let sent_to = stage.kafka.create_unique_topic(1).await;
    let producer = TraceContext::new([0x77; 16], [0x78; 8], 1).unwrap();
    let record = TestRecord::new("payload")
        .with_header("traceparent", producer.traceparent())
        .with_header("tracestate", "vendor=1")
        .with_header("baggage", "tenant=a%20b");
    stage.kafka.produce(&stage.topic, 0, &[record]).await;
    let mut collector = Collector::start().await;
    let (url, brokers) = (stage.scene.database.url(), stage.kafka.brokers());
    let service = Child::spawn(
        ROLE.0,
        &[
            (URL, &url),
            (BROKERS, brokers),
            (GROUP, &stage.group),
            (TOPIC, &stage.topic),
            (SENT_TO, &sent_to),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.endpoint),
            ("OTEL_BSP_SCHEDULE_DELAY", "100"),
        ],
    );
    let (accepts, processes) = (format!("accept {}", stage.topic), format!("process {}", stage.topic));
    let spans =
        collector.until(|spans| named(spans, &processes).len() == 3 && !named(spans, &accepts).is_empty()).await;
    stage.scene.until("SELECT (count(*) = 2)::int::bigint FROM inbox_outbox WHERE kafka_offset IS NOT NULL").await;
    service.kill9().await;

    // The acceptance and the first attempts are children of the producer's span.
    let runs = |handler: &str, attempt: &str| -> &Span {
        let is_it = |span: &&&Span| {
            attribute(span, "handler").as_deref() == Some(handler)
                && attribute(span, "attempt").as_deref() == Some(attempt)
        };
        named(&spans, &processes).iter().find(is_it).copied().unwrap_or_else(|| panic!("{spans:#?}"))
    };
    let (at_once, first, second) = (runs("at-once", "1"), runs("fails-once", "1"), runs("fails-once", "2"));
    let [accepted] = named(&spans, &accepts)[..] else { panic!("{spans:#?}") };
    for child in [accepted, at_once, first] {
        assert_eq!((child.trace_id.clone(), child.parent_span_id.clone()), ids(&producer), "{child:#?}");
        assert_eq!(child.trace_state, "vendor=1");
    }
    assert_eq!(attribute(first, "error.type").as_deref(), Some("failed"));
    assert_eq!(attribute(accepted, "messaging.consumer.group.name").as_ref(), Some(&stage.group));
    assert!(attribute(accepted, "messaging.kafka.cluster.id").is_some_and(|id| !id.is_empty()), "{accepted:#?}");

    // The second attempt begins a trace, and is linked to the producer's span.
    assert!(second.parent_span_id.is_empty() && second.trace_id != producer.trace_id(), "{second:#?}");
    let [link] = &second.links[..] else { panic!("{second:#?}") };
    assert_eq!((link.trace_id.clone(), link.span_id.clone()), ids(&producer));
    assert_eq!(link.trace_state, "vendor=1");

    // Each published record has the context of the run that published it, and the baggage of the consumed record.
    let sent = stage.kafka.read_all(&sent_to, 1).await;
    for (handler, run, state) in [("at-once", at_once, Some("vendor=1")), ("fails-once", second, None)] {
        let record = sent.iter().find(|record| record.key.as_deref() == Some(handler)).unwrap();
        let context = ["traceparent", "tracestate", "baggage"].map(|name| record.header(name));
        assert_eq!(context, [Some(&*traceparent(run)), state, Some("tenant=a%20b")], "{handler}");
    }
}
