//! The bridge to OpenTelemetry through `tracing-opentelemetry`: the only file that uses either crate.
//!
//! The subscriber's layer has an OpenTelemetry span for each `tracing` span. The bridge sets its name, kind,
//! attributes, parent and links before it is started. `Cargo.toml` has the versions of both crates. If the layer has
//! another version, the bridge cannot find it and warns once.

use std::str::FromStr;
use std::sync::Once;
use std::time::Duration;

use opentelemetry::baggage::{Baggage, BaggageExt};
use opentelemetry::trace::{SpanContext, SpanId, Status, TraceContextExt, TraceFlags, TraceId, TraceState};
use opentelemetry::{Context, Key, Value};
use tracing::Span;
use tracing_opentelemetry::{OpenTelemetrySpanExt, SetParentError};

use super::events;
use super::traces::{self, Attribute, Bridge, SpanEnd, SpanKind, SpanParent, SpanStart};
use crate::types::{Result, TraceContext};

/// The bridge from Wharf's spans to OpenTelemetry. [`install`] is enough, unless you change a setting:
///
/// ```
/// use std::time::Duration;
/// use wharf::otel::OtelBridge;
///
/// # fn example() -> wharf::Result<()> {
/// wharf::traces::install(OtelBridge::new().with_parent_age_max(Duration::from_secs(600)))?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "a bridge does nothing until it is installed"]
pub struct OtelBridge {
    /// `None`: the default of [`Bridge::parent_age_max`].
    parent_age_max: Option<Duration>,
}

/// Installs the bridge to OpenTelemetry for this process, beside the subscriber that has a layer of
/// `tracing-opentelemetry`:
///
/// ```
/// use opentelemetry::trace::TracerProvider;
/// use opentelemetry_sdk::trace::SdkTracerProvider;
/// use tracing_subscriber::prelude::*;
///
/// # fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let provider = SdkTracerProvider::builder().build(); // with an exporter, as the service has it anyway
/// tracing_subscriber::registry().with(tracing_opentelemetry::layer().with_tracer(provider.tracer("shop"))).init();
/// wharf::otel::install()?;
/// # Ok(()) }
/// ```
///
/// # Errors
/// When this process has a bridge already.
pub fn install() -> Result<()> {
    traces::install(OtelBridge::new())
}

impl OtelBridge {
    /// The bridge with its defaults.
    ///
    /// ```
    /// # fn example() -> wharf::Result<()> {
    /// wharf::traces::install(wharf::otel::OtelBridge::new())?; // the same as `wharf::otel::install()`
    /// # Ok(()) }
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// The maximum age of a message for which the first run of a handler is a child of the producer's span. The run of
    /// an older message begins a trace that is linked to it. With tail-based sampling, keep it below the time for which
    /// the collector waits for the end of a trace. Default: one minute.
    ///
    /// ```
    /// use std::time::Duration;
    /// use wharf::otel::OtelBridge;
    ///
    /// let bridge = OtelBridge::new().with_parent_age_max(Duration::from_secs(600));
    /// ```
    pub fn with_parent_age_max(mut self, age: Duration) -> Self {
        self.parent_age_max = Some(age);
        self
    }
}

impl Bridge for OtelBridge {
    fn begin(&self, span: &Span, start: &SpanStart<'_>) {
        span.record("otel.name", start.name);
        let kind = match start.kind {
            SpanKind::Consumer => "consumer",
            SpanKind::Client => "client",
        };
        span.record("otel.kind", kind);
        set_attributes(span, start.attributes);
        let parent = match start.parent {
            SpanParent::Remote(parent) => Some(Context::new().with_remote_span_context(span_context(parent))),
            SpanParent::None => Some(Context::new()),
            SpanParent::Current => None,
        };
        let parent = parent.map(|context| with_baggage(context, start.baggage));
        if let Some(Err(SetParentError::LayerNotFound)) = parent.map(|parent| span.set_parent(parent)) {
            static TOLD: Once = Once::new();
            TOLD.call_once(events::no_otel_layer);
        }
        start.links.iter().for_each(|link| span.add_link(span_context(link)));
    }

    fn end(&self, span: &Span, end: &SpanEnd<'_>) {
        set_attributes(span, end.attributes);
        if let Some(error) = end.error {
            span.set_attribute("error.type", error.kind);
            span.set_status(Status::error(error.text.to_owned()));
        }
    }

    fn current(&self) -> Option<TraceContext> {
        // The layer makes its context the current one, unless it is configured otherwise. Then the context is taken
        // from the `tracing` span.
        let context = Some(Context::current()).filter(Context::has_active_span);
        let context = context.unwrap_or_else(|| Span::current().context());
        let span = context.span().span_context().clone();
        let (trace_id, span_id) = (span.trace_id().to_bytes(), span.span_id().to_bytes());
        let current = TraceContext::new(trace_id, span_id, span.trace_flags().to_u8())?;
        Some(current.with_state(&span.trace_state().header()).with_baggage(&encoded(context.baggage())))
    }

    fn parent_age_max(&self) -> Duration {
        self.parent_age_max.unwrap_or(traces::PARENT_AGE_MAX)
    }
}

/// Adds attributes to the OpenTelemetry span.
fn set_attributes(span: &Span, attributes: &[(&'static str, Attribute<'_>)]) {
    for (name, attribute) in attributes {
        let value = match *attribute {
            Attribute::Text(text) => Value::from(text.to_owned()),
            Attribute::Number(number) => Value::from(number),
            Attribute::Flag(is_set) => Value::from(is_set),
        };
        span.set_attribute(Key::from_static_str(name), value);
    }
}

/// The context as OpenTelemetry's type. An invalid trace state is left out.
fn span_context(trace: &TraceContext) -> SpanContext {
    let state = trace.state().and_then(|state| TraceState::from_str(state).ok()).unwrap_or_default();
    let (trace_id, span_id) = (TraceId::from_bytes(trace.trace_id()), SpanId::from_bytes(trace.span_id()));
    SpanContext::new(trace_id, span_id, TraceFlags::new(trace.flags()), true, state)
}

fn with_baggage(context: Context, baggage: Option<&str>) -> Context {
    match baggage.map(decoded) {
        Some(baggage) if !baggage.is_empty() => context.with_baggage(baggage),
        Some(_) | None => context,
    }
}

/// The members of a `baggage` header. Members that are not UTF-8 after decoding are left out.
fn decoded(list: &str) -> Baggage {
    let mut baggage = Baggage::new();
    for member in list.split(',') {
        let (pair, properties) = member.split_once(';').unwrap_or((member, ""));
        let Some((key, value)) = pair.split_once('=') else { continue };
        if let Some(value) = percent_decoded(value.trim()) {
            baggage.insert_with_metadata(key.trim().to_owned(), value, properties.trim());
        }
    }
    baggage
}

/// Baggage as the value of a `baggage` header; empty without baggage.
fn encoded(baggage: &Baggage) -> String {
    let member = |(key, (value, properties)): (&Key, &(opentelemetry::StringValue, _))| -> String {
        let properties: &opentelemetry::baggage::BaggageMetadata = properties;
        let properties = Some(properties.as_str()).filter(|text| !text.is_empty());
        let properties = properties.map(|text| format!(";{text}")).unwrap_or_default();
        format!("{key}={}{properties}", percent_encoded(value.as_str()))
    };
    let members: Vec<String> = baggage.iter().map(member).collect();
    members.join(",")
}

/// Undoes percent-encoding; `None` if an escape is malformed or the result is not UTF-8.
fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, behind)) = rest.split_first() {
        rest = behind;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let (digits, behind) = rest.split_at_checked(2)?;
        let digits =
            std::str::from_utf8(digits).ok().filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = behind;
    }
    String::from_utf8(bytes).ok()
}

/// Escapes every byte that is not unreserved in RFC 3986.
fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_context_goes_through_opentelemetry_unchanged() {
        let trace =
            TraceContext::new([1; 16], [2; 8], 1).unwrap().with_state("a=1,b=2").with_baggage("tenant=a%20b;p=1");
        let context = Context::new().with_remote_span_context(span_context(&trace));
        let _entered = with_baggage(context, trace.baggage()).attach();
        assert_eq!(OtelBridge::new().current(), Some(trace));
    }

    #[test]
    fn without_a_span_there_is_no_context() {
        assert_eq!(OtelBridge::new().current(), None);
    }

    proptest! {
        #[test]
        fn baggage_is_read_back_as_it_was_written(text in any::<String>()) {
            prop_assert_eq!(percent_decoded(&percent_encoded(&text)), Some(text));
        }

        #[test]
        fn hostile_baggage_never_panics_the_reader(text in any::<String>()) {
            let _ = decoded(&text);
        }
    }
}
