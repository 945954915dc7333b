//! The child process that the tests of the consumer group kill, stop and continue: an inbox that reads the test's
//! topic.
//!
//! It prints every Wharf event at level INFO and above as `message field=value ...`, and its own end.

use std::fmt::{Debug, Write};
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tracing::field::{Field, Visit};
use tracing::{Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use wharf::kafka::Kafka;
use wharf::order::OrderKey;
use wharf::{Failure, Identity, Inbox, Message, Raw, Record, Store, handler, tx_handler};

use super::stage::Stage;
use crate::effect::{Connection, execute};
use crate::scene::{key, quick};
use support::child::{Child, Role, parameter, say};

pub const ROLE: (&str, Role) = ("reader", read);

const URL: &str = "READER_URL";
const BROKERS: &str = "READER_BROKERS";
const GROUP: &str = "READER_GROUP";
const TOPIC: &str = "READER_TOPIC";
/// Kafka settings, one `name=value` per line.
const SETTINGS: &str = "READER_SETTINGS";
/// Fields of `Limits`, in the same form.
const LIMITS: &str = "READER_LIMITS";
/// Not empty: records have no identity, and each stored copy is a separate message.
const UNDEDUPLICATED: &str = "READER_UNDEDUPLICATED";
/// Not empty: the handler is ordered, and writes each record to the table `history`.
const IN_ORDER: &str = "READER_IN_ORDER";
/// The event whose emitter panics; empty for none.
const PANICS_AT: &str = "READER_PANICS_AT";

/// The session timeout in milliseconds.
const SESSION_MS: &str = "1500";
const HEARTBEAT_MS: &str = "300";

/// The settings of a reader.
#[derive(Clone)]
pub struct Reader {
    pub url: String,
    brokers: String,
    group: String,
    topic: String,
    settings: Vec<(String, String)>,
    limits: &'static str,
    undeduplicated: &'static str,
    in_order: &'static str,
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
            in_order: "",
            panics_at: "",
        }
        .set("client.id", "reader")
    }

    /// Sets a property of librdkafka.
    pub fn set(mut self, name: &str, value: &str) -> Reader {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets a short session timeout, so that the group notices a crash soon.
    pub fn soon_missed(self) -> Reader {
        self.set("session.timeout.ms", SESSION_MS).set("heartbeat.interval.ms", HEARTBEAT_MS)
    }

    /// Makes it a static member: started again under the same name, it gets its partitions back at once.
    pub fn named(self, name: &str) -> Reader {
        self.set("group.instance.id", name)
    }

    /// Sets limits, one `name=value` per line.
    pub fn limits(self, limits: &'static str) -> Reader {
        Reader { limits, ..self }
    }

    /// Turns deduplication off: a redelivered record is a new message.
    pub fn undeduplicated(self) -> Reader {
        Reader { undeduplicated: "yes", ..self }
    }

    /// Makes the handler ordered: ten keys per partition. It writes each record to the table `history`.
    pub fn in_order(self) -> Reader {
        Reader { in_order: "yes", ..self }
    }

    /// Makes the thread or task panic that emits this event.
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
            (IN_ORDER, self.in_order),
            (PANICS_AT, self.panics_at),
        ];
        Child::spawn(ROLE.0, &variables)
    }
}

/// How often the reader has printed this message.
pub fn times_said(child: &Child, message: &str) -> usize {
    child.lines().iter().filter(|line| line.starts_with(message)).count()
}

/// The child: reads until it is killed, ended by SIGTERM, or fails.
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
        let registration = match &*parameter(IN_ORDER) {
            "" => handler(key("a"), async |_: Message<Raw>| Ok::<(), Failure>(())).concurrency(100),
            _ => tx_handler(key("a"), write_history).ordered_by(OrderKey::by(ordering_key)),
        };
        let inbox = Inbox::builder(Store::connect(&parameter(URL)).await.unwrap())
            .limits(limits)
            .subscribe(&*topic, registration)
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

fn ordering_key(record: &Record) -> Option<Vec<u8>> {
    let position = record.position()?;
    Some(format!("{}/{}", position.partition, position.offset % 10).into_bytes())
}

/// Fails now and then at the first attempt, so that retries hold their keys.
async fn write_history(message: Message<Raw>, conn: &mut Connection) -> Result<(), Failure> {
    let Some(position) = message.position() else { return Err(Failure::poison("not from Kafka")) };
    if position.offset % 97 == 0 && message.attempt() == 1 {
        return Err(Failure::retry_after(Duration::from_millis(50), "busy"));
    }
    let values = format!("({}, {})", position.partition, position.offset);
    execute(conn, &format!("INSERT INTO history (kafka_partition, kafka_offset) VALUES {values}")).await?;
    Ok(())
}

/// Prints the events, and panics at one.
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
