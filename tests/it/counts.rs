//! Every decision is counted, under names and labels that are a contract. No label contains data of a record.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use tokio::sync::Semaphore;
use wharf::{Failure, Identity, Message, Raw, Record, Retention, tx_handler};

use crate::scene::{Connection, Runs, Scene, key};
use support::events::{Event, Events};

/// A recorder for the whole process: other tests count too, with other labels.
#[derive(Clone, Default)]
struct Recorded(Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>);

/// Counts the recorded values.
struct Times(Arc<AtomicU64>);

impl HistogramFn for Times {
    fn record(&self, _: f64) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Recorded {
    /// Starts recording. Threads that counted something before are not recorded.
    fn begin() -> Self {
        static RECORDED: OnceLock<Recorded> = OnceLock::new();
        let install = || {
            let recorded = Self::default();
            metrics::set_global_recorder(recorded.clone()).unwrap_or_else(|_| panic!("no other recorder is installed"));
            recorded
        };
        RECORDED.get_or_init(install).clone()
    }

    fn of(&self, key: &Key) -> Arc<AtomicU64> {
        let labels: Vec<String> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        let name = format!("{} {}", key.name(), labels.join(", "));
        Arc::clone(self.0.lock().unwrap().entry(name).or_default())
    }

    /// All counts whose name contains this text, as lines.
    fn with(&self, piece: &str) -> Vec<String> {
        let all = self.0.lock().unwrap();
        let found = all.iter().filter(|(name, _)| name.contains(piece));
        found.map(|(name, count)| format!("{name}: {}", count.load(Ordering::Relaxed))).collect()
    }
}

impl Recorder for Recorded {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.of(key))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(Times(self.of(key))))
    }
}

fn to(topic: &'static str, id: &'static str) -> Record {
    Record::new(topic).with_id(id).with_payload("anything")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_result_of_each_record_is_counted_by_topic() {
    let recorded = Recorded::begin();
    let scene = Scene::new().await;
    let inbox = scene
        .inbox()
        .subscribe(["counts.a", "counts.b", "counts.c"], Runs::new().handler("counts.accept").event_type("wanted"))
        .identity("counts.b", Identity::header("id").or_position())
        .identity("counts.c", Identity::header("id").or_undeduplicated())
        .build()
        .unwrap();
    let wanted = |record: Record| record.with_header("ce_type", "wanted");
    for record in [
        to("counts.a", "one"),
        to("counts.a", "two"),
        to("counts.a", "one"),
        to("counts.a", "one").with_payload("other"),
        Record::new("counts.a"),
        Record::new("counts.b").with_position(0, 7),
        Record::new("counts.c"),
    ] {
        inbox.accept_or_quarantine([wanted(record)]).await.unwrap();
    }
    inbox.accept(to("counts.a", "three").with_header("ce_type", "another")).await.unwrap();
    inbox.accept(to("counts.nobody", "one")).await.unwrap();

    assert_eq!(
        recorded.with("topic=counts."),
        [
            "wharf_missing_identities_total topic=counts.b, replacement=position: 1",
            "wharf_missing_identities_total topic=counts.c, replacement=undeduplicated: 1",
            "wharf_quarantined_total topic=counts.a, reason=conflict: 1",
            "wharf_quarantined_total topic=counts.a, reason=missing identity: 1",
            "wharf_records_total topic=counts.a, result=accepted: 2",
            "wharf_records_total topic=counts.a, result=duplicate: 1",
            "wharf_records_total topic=counts.a, result=quarantined: 2",
            "wharf_records_total topic=counts.a, result=unwanted: 1",
            "wharf_records_total topic=counts.b, result=accepted: 1",
            "wharf_records_total topic=counts.c, result=accepted: 1",
        ]
    );
    assert_eq!(recorded.with("topic=(other), result=unwanted").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_claim_each_run_and_each_outcome_is_counted_by_handler() {
    let recorded = Recorded::begin();
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", Runs::new().obeying("counts.outcome")).build().unwrap();
    inbox.accept_all(Runs::ORDERS.map(|id| to("orders", id))).await.unwrap();
    inbox.drain().await.unwrap();

    let expected = [
        "wharf_claims_total handler=counts.outcome, claim=claimed: 7",
        "wharf_handler_seconds handler=counts.outcome: 7",
        "wharf_outcomes_total handler=counts.outcome, outcome=discarded: 1",
        "wharf_outcomes_total handler=counts.outcome, outcome=done: 3",
        "wharf_outcomes_total handler=counts.outcome, outcome=poisoned: 1",
        "wharf_outcomes_total handler=counts.outcome, outcome=retried: 1",
        "wharf_outcomes_total handler=counts.outcome, outcome=snoozed: 1",
        "wharf_poisoned_total handler=counts.outcome, reason=permanent: 1",
    ];
    assert_eq!(recorded.with("handler=counts.outcome"), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_that_expire_at_their_start_or_in_bulk_are_counted_as_expired() {
    const HOUR: Duration = Duration::from_secs(3_600);
    let (recorded, events) = (Recorded::begin(), Events::capture());
    let scene = Scene::new().await;
    let (runs, gate) = (Runs::new(), Arc::new(Semaphore::new(0)));
    let held = runs.held("counts.expired", &gate).concurrency(1).expires_after(HOUR);
    let inbox = scene.inbox().subscribe("orders", held).build().unwrap();
    inbox.accept(to("orders", "at its start")).await.unwrap();
    scene.database.execute("UPDATE inbox_message SET received_at = received_at - interval '2 hours'").await;
    inbox.drain().await.unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept(to("orders", "running")).await.unwrap();
    runs.reached(1).await;
    inbox.accept_all([to("orders", "a"), to("orders", "b")]).await.unwrap();
    let waited = "UPDATE inbox_delivery SET due_at = due_at - interval '2 hours' WHERE locked_until IS NULL";
    scene.database.execute(waited).await;
    let both = |event: &Event| event.has("handler", "counts.expired") && event.has("deliveries", "2");
    events.wait_for(|event| event.message == "expired" && both(event)).await;
    gate.add_permits(1);
    running.shutdown(Duration::from_secs(5)).await.unwrap();

    let expected = [
        "wharf_outcomes_total handler=counts.expired, outcome=done: 1",
        "wharf_outcomes_total handler=counts.expired, outcome=expired: 3",
    ];
    let mut outcomes = recorded.with("wharf_outcomes_total handler=counts.expired");
    outcomes.retain(|outcome| !outcome.ends_with(": 0"));
    assert_eq!(outcomes, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transactional_handler_is_counted_like_any_other() {
    async fn nothing(_: Message<Raw>, _: &mut Connection) -> Result<(), Failure> {
        Ok(())
    }
    let recorded = Recorded::begin();
    let scene = Scene::new().await;
    let inbox = scene.inbox().subscribe("orders", tx_handler(key("counts.tx"), nothing)).build().unwrap();
    inbox.accept_all([to("orders", "a"), to("orders", "b")]).await.unwrap();
    inbox.drain().await.unwrap();

    let expected = [
        "wharf_claims_total handler=counts.tx, claim=claimed: 2",
        "wharf_handler_seconds handler=counts.tx: 2",
        "wharf_outcomes_total handler=counts.tx, outcome=done: 2",
    ];
    assert_eq!(recorded.with("handler=counts.tx"), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_label_contains_data_of_a_record() {
    let recorded = Recorded::begin();
    let scene = Scene::new().await;
    let failing = Runs::new().answering("counts.canary", |_| Err(Failure::poison("canary-error")));
    let inbox = scene.inbox().subscribe("orders", failing).build().unwrap();
    let record = to("orders", "canary-id")
        .with_key("canary-key")
        .with_payload("canary-payload")
        .with_header("canary-name", "canary");
    inbox
        .accept_or_quarantine([record.clone().with_source("canary-source"), record, Record::new("canary-topic")])
        .await
        .unwrap();
    inbox.drain().await.unwrap();
    scene.store.purge(&Retention::after(Duration::ZERO), |_| {}).await.unwrap();

    let found = recorded.with("canary");
    assert!(!found.is_empty() && found.iter().all(|name| name.contains("handler=counts.canary")), "{found:?}");
}
