//! An OTLP collector: an HTTP server in this process, to which the example sends its traces.

use std::process::Stdio;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::scene::within;
use support::child::example;

pub struct Collector {
    pub endpoint: String,
    spans: watch::Receiver<Vec<Span>>,
    serving: AbortHandle,
}

impl Collector {
    pub async fn start() -> Self {
        let (sender, spans) = watch::channel(Vec::new());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().route("/v1/traces", post(take)).with_state(sender);
        let serving = tokio::spawn(async move { axum::serve(listener, router).await }).abort_handle();
        Self { endpoint, spans, serving }
    }

    /// Waits until the received spans satisfy the condition, and returns them.
    pub async fn until(&mut self, is_wanted: impl Fn(&[Span]) -> bool) -> Vec<Span> {
        within(self.spans.wait_for(|spans| is_wanted(spans))).await.unwrap().clone()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Stores the spans. An empty answer means that all were accepted.
async fn take(State(spans): State<watch::Sender<Vec<Span>>>, body: Bytes) -> Bytes {
    let request = ExportTraceServiceRequest::decode(body).unwrap();
    let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
    spans.send_modify(|spans| spans.extend(scopes.flat_map(|scope| scope.spans)));
    Bytes::new()
}

pub fn named<'s>(spans: &'s [Span], name: &str) -> Vec<&'s Span> {
    spans.iter().filter(|span| span.name == name).collect()
}

pub fn attribute(span: &Span, name: &str) -> Option<String> {
    let found = span.attributes.iter().find(|attribute| attribute.key == name)?;
    match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        Value::IntValue(number) => Some(number.to_string()),
        other => panic!("{other:?}"),
    }
}

/// The `traceparent` of a record that is published within this span.
pub fn traceparent(span: &Span) -> String {
    let hex = |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02x}")).collect() };
    format!("00-{}-{}-01", hex(&span.trace_id), hex(&span.span_id))
}

/// The spans and the output of the example.
async fn collected() -> (Vec<Span>, String) {
    let mut collector = Collector::start().await;
    let run = tokio::process::Command::new(example("traces"))
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.endpoint)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = within(run).await.unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    (collector.until(|_| true).await, stdout.into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_receives_the_spans_of_a_record_from_its_producer_to_the_attempt_that_publishes() {
    let (spans, output) = collected().await;
    let named = |name: &str| named(&spans, name);
    let [produced] = named("publish orders")[..] else { panic!("{spans:#?}") };
    let [accepted] = named("accept orders")[..] else { panic!("{spans:#?}") };
    let mut runs = named("process orders");
    runs.sort_by_key(|span| span.start_time_unix_nano);
    let [first, second] = runs[..] else { panic!("{spans:#?}") };

    // Acceptance and the first attempt are children of the producer's span.
    for child in [accepted, first] {
        assert_eq!((&child.trace_id, &child.parent_span_id), (&produced.trace_id, &produced.span_id), "{child:#?}");
    }
    assert_eq!(
        (produced.kind(), accepted.kind(), first.kind()),
        (SpanKind::Producer, SpanKind::Client, SpanKind::Consumer)
    );
    assert_eq!(attribute(first, "error.type").as_deref(), Some("failed"));
    assert_eq!(first.status.as_ref().unwrap().message, "the warehouse does not answer");

    // The second attempt begins a trace, which is linked to the producer's span.
    assert!(second.parent_span_id.is_empty() && second.trace_id != produced.trace_id, "{second:#?}");
    let [link] = &second.links[..] else { panic!("{second:#?}") };
    assert_eq!((&link.trace_id, &link.span_id), (&produced.trace_id, &produced.span_id));
    let said = ["handler", "attempt", "messaging.destination.name", "messaging.message.id", "wharf.outcome"];
    let said = said.map(|name| attribute(second, name).unwrap_or_default());
    assert_eq!(said, ["stock.reserve", "2", "orders", "order-17", "done"]);

    // A record that the second attempt publishes continues its trace.
    assert_eq!(output, format!("published with traceparent {}\n", traceparent(second)));
    assert!(!named("settle").is_empty(), "{spans:#?}");
}
