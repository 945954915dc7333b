//! A child process that reads from Kafka, for tests of a whole process: its memory, its signals, and its events without
//! those of other tests.
//!
//! It prints every event of `wharf::kafka` as a line, `message name=value ...`. Its handler waits until the gate file
//! exists, if there is one.

use std::path::Path;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use wharf::kafka::Kafka as Source;
use wharf::{Failure, Identity, Inbox, Message, Raw, Store, handler};

use super::stage::Stage;
use crate::scene::{key, quick};
use support::child::{Child, Role, parameter, say};
use support::events::{Event, Events};

pub const ROLE: (&str, Role) = ("ingester", work);

const URL: &str = "INGESTER_URL";
const BROKERS: &str = "INGESTER_BROKERS";
const GROUP: &str = "INGESTER_GROUP";
const TOPIC: &str = "INGESTER_TOPIC";
/// Lines of `name=value`, for librdkafka and for `Limits`.
const SETTINGS: &str = "INGESTER_SETTINGS";
const LIMITS: &str = "INGESTER_LIMITS";
const GATE: &str = "INGESTER_GATE";

/// The settings of an ingester.
pub struct Ingester {
    pub url: String,
    pub settings: &'static str,
    pub limits: &'static str,
    /// The file that the handler waits for; empty for none.
    pub gate: String,
}

impl Ingester {
    pub fn on(stage: &Stage) -> Self {
        Self { url: stage.scene.database.url(), settings: "", limits: "", gate: String::new() }
    }

    pub fn spawn(&self, stage: &Stage) -> Child {
        let variables = [
            (URL, self.url.as_str()),
            (BROKERS, stage.kafka.brokers()),
            (GROUP, &stage.group),
            (TOPIC, &stage.topic),
            (SETTINGS, self.settings),
            (LIMITS, self.limits),
            (GATE, &self.gate),
            // Large blocks go back to the system at once, so that a peak of the memory shows what the process holds, and
            // not what the allocator keeps: glibc otherwise raises this threshold to the largest block that was freed.
            ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ];
        Child::spawn(ROLE.0, &variables)
    }
}

/// How many lines of this event the child has printed.
pub fn said(child: &Child, event: &str) -> usize {
    child.lines().iter().filter(|line| line.starts_with(event)).count()
}

/// Waits until the child prints a line of this event.
pub async fn await_event(child: &Child, event: &str) -> String {
    child.await_line(|line| line.starts_with(event)).await
}

/// The child: reads until it is killed, or ended by SIGTERM.
fn work() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let events = Events::capture();
        tokio::spawn(async move { events.for_each(tell).await });
        let mut limits = quick();
        for (name, value) in pairs(&parameter(LIMITS)) {
            limits.set(&name, &value).unwrap();
        }
        let source = Source::new(parameter(BROKERS), parameter(GROUP));
        let source =
            pairs(&parameter(SETTINGS)).into_iter().fold(source, |source, (name, value)| source.set(name, value));
        let store = Store::connect(&parameter(URL)).await.unwrap();
        let waiting = handler(key("a"), async |_: Message<Raw>| {
            while !Path::new(&parameter(GATE)).exists() && !parameter(GATE).is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Ok::<(), Failure>(())
        });
        let inbox = Inbox::builder(store).limits(limits).subscribe(parameter(TOPIC), waiting.concurrency(20));
        let inbox = inbox.identity(parameter(TOPIC), Identity::position()).build().unwrap();
        let running = inbox.start_from(source).await.unwrap();
        say("at work");
        signal(SignalKind::terminate()).unwrap().recv().await;
        // Outcomes that cannot be written do not matter to these tests.
        let _ = running.shutdown(Duration::from_millis(100)).await;
        say("ended");
    });
}

fn pairs(lines: &str) -> Vec<(String, String)> {
    lines.lines().map(|line| line.split_once('=').unwrap()).map(|(a, b)| (a.to_owned(), b.to_owned())).collect()
}

fn tell(event: &Event) {
    if event.target == "wharf::kafka" {
        let fields: String = event.fields.iter().map(|(name, value)| format!(" {name}={value}")).collect();
        say(format!("{}{fields}", event.message));
    }
}
