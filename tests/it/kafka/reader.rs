//! The child process that the tests of the group kill, stop and continue: an inbox that reads the test's topic.
//!
//! It says whatever Wharf says at level INFO and above, as `message field=value ...`, and what became of it.

use std::fmt::{Debug, Write};
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tracing::field::{Field, Visit};
use tracing::{Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use wharf::kafka::Kafka;
use wharf::{Failure, Identity, Inbox, Message, Raw, Store, handler};

use super::stage::Stage;
use crate::scene::{key, quick};
use support::child::{Child, Role, parameter, say};

pub const ROLE: (&str, Role) = ("reader", read);

const URL: &str = "READER_URL";
const BROKERS: &str = "READER_BROKERS";
const GROUP: &str = "READER_GROUP";
const TOPIC: &str = "READER_TOPIC";
/// `name=value`, one a line.
const SETTINGS: &str = "READER_SETTINGS";
/// Of `Limits`, the same way.
const LIMITS: &str = "READER_LIMITS";
/// Not empty: records have no identity, and each time one is stored it is a message of its own.
const UNDEDUPLICATED: &str = "READER_UNDEDUPLICATED";
/// The event at which whatever emits it panics; empty for none.
const PANICS_AT: &str = "READER_PANICS_AT";

/// A member that has died is known to be dead after this, in milliseconds.
const SESSION_MS: &str = "1500";
const HEARTBEAT_MS: &str = "300";

/// How a reader is started.
#[derive(Clone)]
pub struct Reader {
    pub url: String,
    brokers: String,
    group: String,
    topic: String,
    settings: Vec<(String, String)>,
    limits: &'static str,
    undeduplicated: &'static str,
    panics_at: &'static str,
}

impl Reader {
    /// A reader of the stage's topic into the stage's database.
    pub fn on(stage: &Stage) -> Reader {
        Reader {
            url: stage.scene.database.url(),
            brokers: stage.kafka.brokers().to_owned(),
            group: stage.group.clone(),
            topic: stage.topic.clone(),
            settings: Vec::new(),
            limits: "",
            undeduplicated: "",
            panics_at: "",
        }
        .set("client.id", "reader")
    }

    /// Any setting of librdkafka.
    pub fn set(mut self, name: &str, value: &str) -> Reader {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The group soon gives up on it when it has died.
    pub fn soon_missed(self) -> Reader {
        self.set("session.timeout.ms", SESSION_MS).set("heartbeat.interval.ms", HEARTBEAT_MS)
    }

    /// A static member: started again under the same name, it has its partitions back at once.
    pub fn named(self, name: &str) -> Reader {
        self.set("group.instance.id", name)
    }

    /// Lines of `name=value`.
    pub fn limits(self, limits: &'static str) -> Reader {
        Reader { limits, ..self }
    }

    /// Nothing is recognised when it comes again.
    pub fn undeduplicated(self) -> Reader {
        Reader { undeduplicated: "yes", ..self }
    }

    /// Has the thread or task panic that emits this event.
    pub fn panics_at(self, event: &'static str) -> Reader {
        Reader { panics_at: event, ..self }
    }

    pub fn spawn(&self) -> Child {
        let settings: Vec<String> = self.settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let variables = [
            (URL, self.url.as_str()),
            (BROKERS, &self.brokers),
            (GROUP, &self.group),
            (TOPIC, &self.topic),
            (SETTINGS, &settings.join("\n")),
            (LIMITS, self.limits),
            (UNDEDUPLICATED, self.undeduplicated),
            (PANICS_AT, self.panics_at),
        ];
        Child::spawn(ROLE.0, &variables)
    }
}

/// How often the reader has said this.
pub fn times_said(child: &Child, message: &str) -> usize {
    child.lines().iter().filter(|line| line.starts_with(message)).count()
}

/// The child: reads until it is killed, asked to end by SIGTERM, or cannot go on.
fn read() {
    let subscriber = tracing_subscriber::registry().with(Speaker { panics_at: parameter(PANICS_AT) });
    tracing::subscriber::set_global_default(subscriber).expect("a child has one role");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let topic = parameter(TOPIC);
        let mut limits = quick().crash_limit(1_000).backoff_max(Duration::from_millis(200));
        for (name, value) in parameter(LIMITS).lines().map(|line| line.split_once('=').unwrap()) {
            limits.set(name, value).unwrap();
        }
        let identity = match &*parameter(UNDEDUPLICATED) {
            "" => Identity::position(),
            _ => Identity::header("none").or_undeduplicated(),
        };
        let inbox = Inbox::builder(Store::connect(&parameter(URL)).await.unwrap())
            .limits(limits)
            .subscribe(&*topic, handler(key("a"), async |_: Message<Raw>| Ok::<(), Failure>(())).concurrency(100))
            .identity(&*topic, identity)
            .build()
            .unwrap();
        let settings = parameter(SETTINGS);
        let settings = settings.lines().map(|line| line.split_once('=').unwrap());
        let kafka = Kafka::new(parameter(BROKERS), parameter(GROUP));
        let kafka = settings.fold(kafka, |kafka, (name, value)| kafka.set(name, value));
        let mut running = inbox.start_from(kafka).await.unwrap();
        say("at work");
        let mut asked_to_end = signal(SignalKind::terminate()).unwrap();
        tokio::select! {
            _ = asked_to_end.recv() => {}
            error = running.failure() => {
                say(format!("failed: {error:#}"));
                say(format!("health: {}", running.health()));
            }
        }
        running.shutdown(Duration::from_secs(5)).await.unwrap();
        say("ended");
    });
}

/// Says the events, and panics at one.
struct Speaker {
    panics_at: String,
}

impl<S: Subscriber> Layer<S> for Speaker {
    fn enabled(&self, metadata: &tracing::Metadata<'_>, _: Context<'_, S>) -> bool {
        let level = if self.panics_at.is_empty() { Level::INFO } else { Level::DEBUG };
        metadata.target().starts_with("wharf") && *metadata.level() <= level
    }

    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut line = Line::default();
        event.record(&mut line);
        assert!(self.panics_at.is_empty() || line.message != self.panics_at, "at {}", line.message);
        say(format!("{}{}", line.message, line.fields));
    }
}

#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        } else {
            let _ = write!(self.fields, " {}={value:?}", field.name());
        }
    }
}
