//! The interface between Wharf's spans and a tracing system.
//!
//! The core knows `tracing` and the W3C headers, but no tracing system. A bridge is user code: its panics are caught,
//! so a panic costs the span its attributes, but never a run. Without a bridge, no header is read and nothing is
//! allocated.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::OnceLock;
use std::time::Duration;

use tracing::Span;

use crate::types::{Error, Result, TraceContext};

/// The default maximum age of a message for which the first run is part of the producer's trace.
pub(super) const PARENT_AGE_MAX: Duration = Duration::from_secs(60);

/// The bridge of this process. It can be set once.
static BRIDGE: OnceLock<Box<dyn Bridge>> = OnceLock::new();

/// Connects Wharf's spans with a tracing system. `wharf::otel` implements it for OpenTelemetry. Implement it yourself
/// for another system, or for another version of OpenTelemetry's crates.
///
/// Its methods are called during every run, so they must not block. They are called only for spans that a `tracing`
/// subscriber has enabled.
///
/// ```
/// use tracing::Span;
/// use wharf::traces::{Bridge, SpanEnd, SpanStart, TraceContext};
///
/// struct Printer;
///
/// impl Bridge for Printer {
///     fn begin(&self, _: &Span, start: &SpanStart<'_>) {
///         println!("{} begins, with {} links", start.name, start.links.len());
///     }
///
///     fn end(&self, _: &Span, end: &SpanEnd<'_>) {
///         println!("ended with {:?}", end.error);
///     }
///
///     fn current(&self) -> Option<TraceContext> {
///         None // this system has no current span
///     }
/// }
///
/// # fn example() -> wharf::Result<()> {
/// wharf::traces::install(Printer)?;
/// # Ok(()) }
/// ```
pub trait Bridge: Send + Sync + 'static {
    /// Called when a span was created and not entered yet: the bridge can set its name, attributes, parent and links.
    fn begin(&self, span: &Span, start: &SpanStart<'_>);

    /// Called when the operation of a span has ended. The span is closed right after this.
    fn end(&self, span: &Span, end: &SpanEnd<'_>);

    /// The current span of the calling code. Records that are published now become part of its trace.
    fn current(&self) -> Option<TraceContext>;

    /// The maximum age of a message for which the first run of a handler is a child of the producer's span. Default:
    /// one minute.
    fn parent_age_max(&self) -> Duration {
        PARENT_AGE_MAX
    }
}

/// A span that begins. Names follow OpenTelemetry's semantic conventions for messaging.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SpanStart<'a> {
    /// The name in the tracing system: `process orders`.
    pub name: &'a str,
    /// The kind of the span.
    pub kind: SpanKind,
    /// Its attributes. The fields of the `tracing` span are not repeated here.
    pub attributes: &'a [(&'static str, Attribute<'a>)],
    /// The parent span.
    pub parent: SpanParent<'a>,
    /// The spans of the producers of its messages, if they are not the parent.
    pub links: &'a [TraceContext],
    /// The baggage of its messages, if all of them come from one span. It belongs to every attempt, also to one that
    /// begins a trace.
    pub baggage: Option<&'a str>,
}

/// A span that has ended.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SpanEnd<'a> {
    /// Further attributes, which are known only at the end.
    pub attributes: &'a [(&'static str, Attribute<'a>)],
    /// The error, if the operation failed.
    pub error: Option<SpanError<'a>>,
}

/// The error of a span.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SpanError<'a> {
    /// The attribute `error.type`: one of a fixed set of words.
    pub kind: &'static str,
    /// The error text as it is stored with the delivery: redacted and escaped.
    pub text: &'a str,
}

/// The kind of a span, as OpenTelemetry defines it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SpanKind {
    /// Processes messages.
    Consumer,
    /// A request to another system.
    Client,
}

/// The parent of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SpanParent<'a> {
    /// The span of another process.
    Remote(&'a TraceContext),
    /// The span that the calling code is in, if any.
    Current,
    /// No parent: the span begins a trace.
    None,
}

/// The value of an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Attribute<'a> {
    /// A text.
    Text(&'a str),
    /// A number.
    Number(i64),
    /// A boolean.
    Flag(bool),
}

/// Installs the bridge of this process, for every inbox and outbox in it. Call it once, before the inboxes are started.
///
/// # Errors
/// When there is one already ([`Error::is_configuration`](crate::Error::is_configuration)).
pub fn install(bridge: impl Bridge) -> Result<()> {
    let refused = |_| Error::configuration("cannot install a trace bridge: this process has one");
    BRIDGE.set(Box::new(bridge)).map_err(refused)
}

/// The current span of the calling code, from the bridge of this process. Use it for a record that is passed to
/// [`Inbox::accept`](crate::Inbox::accept) within a request ([`Record::with_trace`](crate::Record::with_trace)). `None`
/// without a bridge.
pub fn current() -> Option<TraceContext> {
    guarded(|bridge| bridge.current()).flatten()
}

/// Whether there is a bridge and the span is enabled.
pub(super) fn is_wanted(span: &Span) -> bool {
    is_bridged() && !span.is_disabled()
}

/// Whether this process has a bridge.
pub(crate) fn is_bridged() -> bool {
    BRIDGE.get().is_some()
}

pub(super) fn begin(span: &Span, start: &SpanStart<'_>) {
    guarded(|bridge| bridge.begin(span, start));
}

pub(super) fn end(span: &Span, end: &SpanEnd<'_>) {
    guarded(|bridge| bridge.end(span, end));
}

pub(super) fn parent_age_max() -> Duration {
    guarded(|bridge| bridge.parent_age_max()).unwrap_or(PARENT_AGE_MAX)
}

/// Calls the bridge; `None` if there is none, or if it panics.
fn guarded<T>(ask: impl FnOnce(&dyn Bridge) -> T) -> Option<T> {
    let bridge = BRIDGE.get()?;
    std::panic::catch_unwind(AssertUnwindSafe(|| ask(&**bridge))).ok()
}

impl fmt::Display for Attribute<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Number(number) => write!(f, "{number}"),
            Self::Flag(is_set) => write!(f, "{is_set}"),
        }
    }
}
