//! A bridge that records spans. The whole test process has only one; a test finds its own spans by their topic.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once};
use std::time::Duration;

use tokio::sync::watch;
use tracing::Span;
use wharf::traces::{Attribute, Bridge, SpanEnd, SpanKind, SpanParent, SpanStart, TraceContext, install};

use crate::scene::within;
use support::events::Events;

/// Only spans of topics with this prefix are recorded.
pub const TOPICS: &str = "traces.";
/// The bridge panics for this topic.
pub const PANICS: &str = "traces.panics";

/// A recorded span.
#[derive(Debug, Clone)]
pub struct Told {
    pub name: String,
    pub kind: SpanKind,
    pub attributes: BTreeMap<&'static str, String>,
    /// The `traceparent` of the parent, or `none`, or `current`.
    pub parent: String,
    pub links: Vec<String>,
    pub baggage: Option<String>,
    /// The kind and the text of the error, once it has ended.
    pub end: Option<Option<(&'static str, String)>>,
    id: Option<tracing::Id>,
}

impl Told {
    pub fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.get(name).map(String::as_str)
    }
}

/// How often the bridge has panicked.
pub static PANICKED: AtomicUsize = AtomicUsize::new(0);

static TOLD: Mutex<Vec<Told>> = Mutex::new(Vec::new());
static CHANGES: std::sync::LazyLock<watch::Sender<()>> = std::sync::LazyLock::new(|| watch::Sender::new(()));

struct Recorder;

impl Bridge for Recorder {
    fn begin(&self, span: &Span, start: &SpanStart<'_>) {
        if start.name.contains(PANICS) {
            PANICKED.fetch_add(1, Ordering::Relaxed);
            panic!("the bridge panics for this topic");
        }
        if !start.name.contains(TOPICS) {
            return;
        }
        let parent = match start.parent {
            SpanParent::Remote(parent) => parent.traceparent(),
            SpanParent::Current => "current".to_owned(),
            SpanParent::None => "none".to_owned(),
            other => panic!("{other:?}"),
        };
        let told = Told {
            name: start.name.to_owned(),
            kind: start.kind,
            attributes: texts(start.attributes).collect(),
            parent,
            links: start.links.iter().map(TraceContext::traceparent).collect(),
            baggage: start.baggage.map(str::to_owned),
            end: None,
            id: span.id(),
        };
        TOLD.lock().unwrap().push(told);
        CHANGES.send_replace(());
    }

    fn end(&self, span: &Span, end: &SpanEnd<'_>) {
        let mut told = TOLD.lock().unwrap();
        let ended = told.iter_mut().rev().find(|told| told.id == span.id() && told.end.is_none());
        if let Some(ended) = ended {
            ended.attributes.extend(texts(end.attributes));
            ended.end = Some(end.error.map(|error| (error.kind, error.text.to_owned())));
            // The subscriber may reuse the id for another span.
            ended.id = None;
        }
        drop(told);
        CHANGES.send_replace(());
    }

    fn current(&self) -> Option<TraceContext> {
        None
    }

    fn parent_age_max(&self) -> Duration {
        // Long enough for a busy machine.
        Duration::from_secs(600)
    }
}

fn texts<'a>(attributes: &'a [(&'static str, Attribute<'a>)]) -> impl Iterator<Item = (&'static str, String)> + 'a {
    attributes.iter().map(|(name, value)| (*name, value.to_string()))
}

/// Installs the bridge, and a subscriber that enables the spans.
pub fn record() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| install(Recorder).unwrap());
    Events::capture();
}

/// Waits until this many spans with this name have ended, and returns them in the order in which they began.
pub async fn ended(name: &str, count: usize) -> Vec<Told> {
    let mut changes = CHANGES.subscribe();
    within(async {
        loop {
            changes.mark_unchanged();
            let told = TOLD.lock().unwrap().clone();
            let ended: Vec<Told> = told.into_iter().filter(|told| told.name == name && told.end.is_some()).collect();
            if ended.len() >= count {
                return ended;
            }
            changes.changed().await.unwrap();
        }
    })
    .await
}
