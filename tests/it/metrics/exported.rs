//! A running service exports every metric of the table, with its type and its labels, and no other metric.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use wharf::observe::{Metric, MetricKind, metrics};
use wharf::{Failure, Record};

use super::service;
use crate::kafka::stage::Stage;
use crate::scene::{Runs, within};
use support::http;
use support::kafka_records::TestRecord;

/// The text that Prometheus scrapes.
pub(super) struct Exported(String);

/// A sample: its name, its labels, its value.
struct Sample<'a> {
    name: &'a str,
    labels: BTreeMap<&'a str, &'a str>,
    value: f64,
}

impl Exported {
    async fn of(address: &str) -> Self {
        let answer = http::request(address, "GET", "/metrics", &[], "").await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        Self(answer.body)
    }

    /// The type of each metric, by name.
    fn types(&self) -> BTreeMap<&str, &str> {
        self.0.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect()
    }

    fn samples(&self) -> impl Iterator<Item = Sample<'_>> {
        self.0.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(sample)
    }

    /// The first value of a metric whose labels have all these values.
    pub(super) fn value(&self, name: &str, values: &[&str]) -> Option<f64> {
        let is_it = |sample: &Sample<'_>| {
            sample.name == name && values.iter().all(|value| sample.labels.values().any(|found| found == value))
        };
        self.samples().find(is_it).map(|sample| sample.value)
    }
}

/// Parses a line. The label values of the tests contain no quotes.
fn sample(line: &str) -> Sample<'_> {
    let (named, value) = line.rsplit_once(' ').expect("a value");
    let (name, labels) = named.split_once('{').unwrap_or((named, ""));
    let labels = labels.trim_end_matches('}').split("\",").filter(|label| !label.is_empty());
    let labels = labels.map(|label| label.split_once("=\"").expect("a label")).collect::<Vec<_>>();
    let labels = labels.into_iter().map(|(label, value)| (label, value.trim_end_matches('"'))).collect();
    Sample { name, labels, value: value.parse().expect("a number") }
}

/// The metric of a sample, by name. Samples of a histogram have a suffix.
fn metric_of(name: &str) -> Option<&'static Metric> {
    let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
    metrics().iter().copied().find(|metric| {
        metric.name == name || metric.kind == MetricKind::Histogram && base.is_some_and(|base| metric.name == base)
    })
}

/// Polls until the exported metrics satisfy the condition.
pub(super) async fn until(address: &str, is_wanted: impl Fn(&Exported) -> bool) -> Exported {
    within(async {
        loop {
            let exported = Exported::of(address).await;
            if is_wanted(&exported) {
                return exported;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_service_exports_every_metric_of_the_table_and_no_other() {
    let stage = Stage::new(1).await;
    // The service counts this poisoned delivery when it first samples the database.
    let poisoned = Runs::new().answering("metered", |_| Err(Failure::poison("before")));
    let inbox = stage.scene.inbox().subscribe("before", poisoned).build().unwrap();
    inbox.accept(Record::new("before").with_id("one")).await.unwrap();
    inbox.drain().await.unwrap();
    let payloads = ["good", "bad", "good"];
    stage.kafka.produce(&stage.topic, 0, &payloads.map(TestRecord::new)).await;
    let service = service::spawn(&stage);
    let said = service.await_line(|line| line.starts_with("listening on ")).await;
    let address = said.trim_start_matches("listening on ");
    stage.stored(4).await;
    stage.scene.settled().await;
    let sent_to = stage.kafka.create_unique_topic(1).await;
    stage.scene.database.execute(&format!("SELECT inbox_publish('{sent_to}', 'anything', record_key => 'k')")).await;

    let topic = stage.topic.as_str();
    let expected = [
        ("wharf_records_total", &[topic, "accepted"][..], 3.0),
        ("wharf_outcomes_total", &["metered", "done"], 2.0),
        ("wharf_poisoned_total", &["metered", "permanent"], 1.0),
        ("wharf_end_to_end_seconds_count", &["metered"], 2.0),
        ("messaging_client_consumed_messages_total", &[topic], 3.0),
        ("messaging_process_duration_seconds_count", &[topic, "permanent"], 1.0),
        ("wharf_kafka_lag_records", &[topic], 0.0),
        ("wharf_kafka_partitions", &["reading"], 1.0),
        ("wharf_handler_processes", &["metered"], 1.0),
        ("wharf_handler_running", &["metered"], 0.0),
        ("wharf_outbox_total", &["sent"], 1.0),
        ("wharf_breakers_total", &["metered", "open"], 0.0),
    ];
    let slots = |exported: &Exported| exported.value("wharf_handler_slots", &["metered"]);
    let both = (service::SLOTS + service::OTHER_SLOTS) as f64;
    let is_whole = |exported: &Exported| {
        let names = exported.types();
        metrics().iter().all(|metric| names.contains_key(metric.name))
            && slots(exported) == Some(both)
            && expected.iter().all(|(name, values, expected)| exported.value(name, values) == Some(*expected))
    };
    let exported = until(address, is_whole).await;

    let listed: BTreeMap<&str, &str> = metrics().iter().map(|metric| (metric.name, metric.kind.as_str())).collect();
    assert_eq!(exported.types(), listed);
    for sample in exported.samples() {
        let metric = metric_of(sample.name).unwrap_or_else(|| panic!("{} is not in the table", sample.name));
        let labels: BTreeSet<&str> = sample.labels.keys().copied().filter(|label| *label != "le").collect();
        let listed = metric.labels.iter().copied().chain(metric.fixed.iter().map(|(label, _)| *label));
        assert_eq!(labels, listed.collect(), "{}", sample.name);
        let last = metric.labels.last().and_then(|label| sample.labels.get(label)).copied().unwrap_or_default();
        assert!(metric.values.is_empty() || metric.values.contains(&last), "{}: {last}", sample.name);
    }
    for (name, values, expected) in expected {
        assert_eq!(exported.value(name, values), Some(expected), "{name} {values:?}");
    }
    assert!(exported.value("wharf_deliveries", &["metered", "poisoned"]) >= Some(1.0));

    // After the other inbox has shut down, the gauges count only this one.
    let connections = |exported: &Exported| exported.value("wharf_pool_connections", &["max"]);
    assert!(connections(&exported) > Some(service::CONNECTIONS as f64), "{:?}", connections(&exported));
    assert_eq!(http::request(address, "POST", "/end-other", &[], "").await.status, 200);
    let alone = Exported::of(address).await;
    let expected = (Some(service::SLOTS as f64), Some(service::CONNECTIONS as f64), Some(1.0));
    let processes = alone.value("wharf_handler_processes", &["metered"]);
    assert_eq!((slots(&alone), connections(&alone), processes), expected);
    assert!(alone.value("wharf_deliveries", &["metered", "poisoned"]) >= Some(1.0));
    service.kill9().await;
}
