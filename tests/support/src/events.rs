//! Captures Wharf's `tracing` events, so that tests await events instead of sleeping.
//!
//! One subscriber serves the whole test process, in which tests run in parallel: a test recognizes its own events by
//! the value of a field. The fields of the spans around an event count as fields of the event. The last 200,000 events
//! are kept.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// Only targets with this prefix are captured.
const TARGET_PREFIX: &str = "wharf";

const EVENTS_MAX: usize = 200_000;

/// How long a test waits for an event.
const EVENT_DEADLINE: Duration = Duration::from_secs(180);

/// How many of the captured events a failing wait lists.
const LISTED_MAX: usize = 200;

/// One captured event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The name given with `name:`; otherwise the location in the source.
    pub name: String,
    pub message: String,
    pub target: String,
    pub level: Level,
    /// Without the message.
    pub fields: BTreeMap<String, String>,
}

impl Event {
    /// The value of a field.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str)
    }

    /// Whether the event has the field with this value.
    pub fn has(&self, name: &str, value: &str) -> bool {
        self.field(name) == Some(value)
    }
}

/// A view of the events since its creation.
#[derive(Clone, Debug)]
pub struct Events {
    /// The number of the first event in view.
    from: u64,
}

impl Events {
    /// Captures events from now on.
    pub fn capture() -> Events {
        Events { from: CAPTURE.log().end() }
    }

    /// The events so far that match, in order.
    pub fn matching(&self, is_wanted: impl Fn(&Event) -> bool) -> Vec<Arc<Event>> {
        let events = CAPTURE.log().since(self.from);
        events.into_iter().filter(|event| is_wanted(event)).collect()
    }

    /// Waits for an event that matches, which may already have happened, and returns the first. Panics after
    /// `EVENT_DEADLINE` with a list of the captured events.
    pub async fn wait_for(&self, is_wanted: impl Fn(&Event) -> bool) -> Arc<Event> {
        let found = self.wait_for_count(1, is_wanted).await;
        Arc::clone(&found[0])
    }

    /// Like [`Events::wait_for`] without a time limit: for a child that reports an event which may never happen.
    pub async fn wait_for_ever(&self, is_wanted: impl Fn(&Event) -> bool) {
        self.search(1, is_wanted, &mut Vec::new()).await;
    }

    /// Passes every event to `act`, forever: for a child that reports to its parent.
    pub async fn for_each(&self, act: impl Fn(&Event)) -> Infallible {
        let mut reader = self.reader();
        loop {
            reader.read().iter().for_each(|event| act(event));
            reader.changed().await;
        }
    }

    /// Waits for `count` matching events and returns them.
    pub async fn wait_for_count(&self, count: usize, is_wanted: impl Fn(&Event) -> bool) -> Vec<Arc<Event>> {
        let mut found = Vec::new();
        let search = self.search(count, is_wanted, &mut found);
        let in_time = tokio::time::timeout(EVENT_DEADLINE, search).await.is_ok();
        assert!(in_time, "{} of {count} events in {EVENT_DEADLINE:?}; seen:\n{}", found.len(), self.list());
        found
    }

    async fn search(&self, count: usize, is_wanted: impl Fn(&Event) -> bool, found: &mut Vec<Arc<Event>>) {
        let mut reader = self.reader();
        loop {
            found.extend(reader.read().into_iter().filter(|event| is_wanted(event)));
            if found.len() >= count {
                return;
            }
            reader.changed().await;
        }
    }

    fn reader(&self) -> Reader {
        Reader { next: self.from, arrivals: CAPTURE.arrivals.subscribe() }
    }

    fn list(&self) -> String {
        let events = CAPTURE.log().since(self.from);
        let skipped = events.len().saturating_sub(LISTED_MAX);
        let lines = events[skipped..].iter().map(|event| format!("{event:?}"));
        let lines: Vec<String> = lines.collect();
        format!("({skipped} earlier ones)\n{}", lines.join("\n"))
    }
}

/// Reads events one after the other, each once.
struct Reader {
    next: u64,
    arrivals: watch::Receiver<u64>,
}

impl Reader {
    /// The events since the last call.
    fn read(&mut self) -> Vec<Arc<Event>> {
        // Marked as seen before reading: an event that arrives during the read wakes us again.
        self.arrivals.mark_unchanged();
        let log = CAPTURE.log();
        let events = log.since(self.next);
        self.next = log.end();
        events
    }

    /// Waits until there is more to read.
    async fn changed(&mut self) {
        self.arrivals.changed().await.expect("the capture is never dropped");
    }
}

/// The capture of this process; created and installed on first use.
static CAPTURE: LazyLock<Capture> = LazyLock::new(|| {
    let subscriber = tracing_subscriber::registry().with(CaptureLayer);
    tracing::subscriber::set_global_default(subscriber).expect("no other code installs a subscriber");
    Capture { log: Mutex::default(), arrivals: watch::Sender::new(0) }
});

struct Capture {
    /// A std mutex: nothing awaits while holding it.
    log: Mutex<Log>,
    /// The number of events so far.
    arrivals: watch::Sender<u64>,
}

impl Capture {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().expect("nothing panics while holding it")
    }
}

#[derive(Default)]
struct Log {
    events: VecDeque<Arc<Event>>,
    /// How many were dropped because of [`EVENTS_MAX`].
    forgotten: u64,
}

impl Log {
    fn end(&self) -> u64 {
        self.forgotten + self.events.len() as u64
    }

    fn push(&mut self, event: Event) {
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
            self.forgotten += 1;
        }
        self.events.push_back(Arc::new(event));
    }

    fn since(&self, from: u64) -> Vec<Arc<Event>> {
        let skip = usize::try_from(from.saturating_sub(self.forgotten)).expect("within the ring");
        self.events.iter().skip(skip).cloned().collect()
    }
}

struct CaptureLayer;

impl<S: Subscriber + for<'span> LookupSpan<'span>> Layer<S> for CaptureLayer {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        metadata.target().starts_with(TARGET_PREFIX)
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        context.span(id).expect("a new span is registered").extensions_mut().insert(fields);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let span = context.span(id).expect("a recorded span is registered");
        if let Some(fields) = span.extensions_mut().get_mut::<Fields>() {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &tracing::Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        // From the outermost span inwards: the nearer value wins.
        for span in context.event_scope(event).into_iter().flat_map(|scope| scope.from_root()) {
            fields.0.extend(span.extensions().get::<Fields>().into_iter().flat_map(|fields| fields.0.clone()));
        }
        event.record(&mut fields);
        let metadata = event.metadata();
        let captured = Event {
            name: metadata.name().to_owned(),
            message: fields.0.remove("message").unwrap_or_default(),
            target: metadata.target().to_owned(),
            level: *metadata.level(),
            fields: fields.0,
        };
        let end = {
            let mut log = CAPTURE.log();
            log.push(captured);
            log.end()
        };
        // Two threads may arrive here in either order.
        CAPTURE.arrivals.send_modify(|arrivals| *arrivals = end.max(*arrivals));
    }
}

#[derive(Clone, Default)]
struct Fields(BTreeMap<String, String>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }
}
