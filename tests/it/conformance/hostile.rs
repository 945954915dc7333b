//! Records of any bytes: each becomes a message or a quarantine row, byte for byte, and none affects its neighbours.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use wharf::{Failure, Limits, Message, Raw, Receipt, Record, Registration, handler};

use super::scene::{Database, Db, Runs, Scene, State, key, quick, record};

type HeaderPairs = Vec<(Vec<u8>, Option<Vec<u8>>)>;

/// A message as a handler received it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Seen {
    id: String,
    source: String,
    key: Option<Vec<u8>>,
    headers: HeaderPairs,
    payload: Option<Vec<u8>>,
}

impl Seen {
    fn of(message: &Message<Raw>) -> Self {
        let headers = message.headers().iter().map(|(name, value)| (name.to_vec(), value.map(<[u8]>::to_vec)));
        Self {
            id: message.id().to_owned(),
            source: message.source().to_owned(),
            key: message.key().map(<[u8]>::to_vec),
            headers: headers.collect(),
            payload: message.payload.0.as_ref().map(|bytes| bytes.to_vec()),
        }
    }

    fn record(&self) -> Record {
        let record = Record::new("orders").with_id(self.id.clone()).with_source(self.source.clone());
        let record = self.key.iter().cloned().fold(record, Record::with_key);
        let record = self.payload.iter().cloned().fold(record, Record::with_payload);
        self.headers.iter().cloned().fold(record, |record, (name, value)| match value {
            Some(value) => record.with_header(name, value),
            None => record.with_null_header(name),
        })
    }
}

/// A handler that keeps the messages it receives.
fn seeing() -> (Arc<Mutex<Vec<Seen>>>, Registration<Db>) {
    let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
    let list = Arc::clone(&seen);
    let registration = handler(key("stock"), move |message: Message<Raw>| {
        list.lock().unwrap().push(Seen::of(&message));
        async { Ok::<(), Failure>(()) }
    });
    (seen, registration)
}

fn sorted(seen: &Mutex<Vec<Seen>>) -> Vec<Seen> {
    let mut seen = seen.lock().unwrap().clone();
    seen.sort();
    seen
}

/// Accepts each record between two valid ones, all in one batch. The valid ones are accepted and handled in any case.
async fn among_neighbours(limits: Limits, hostile: Vec<(Record, Option<&'static str>)>) -> Scene {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let inbox = scene.inbox().limits(limits).subscribe("orders", runs.handler("stock")).build().unwrap();
    let mut batch = vec![record("neighbour 0")];
    let mut expected = vec![Receipt::Accepted { deliveries: 1 }];
    let mut refused = 0;
    for (number, (record_, reason)) in hostile.into_iter().enumerate() {
        batch.extend([record_, record(&format!("neighbour {}", number + 1))]);
        refused += i64::from(reason.is_some());
        let receipt = reason.map_or(Receipt::Accepted { deliveries: 1 }, |reason| Receipt::Quarantined { reason });
        expected.extend([receipt, Receipt::Accepted { deliveries: 1 }]);
    }
    let count = i64::try_from(batch.len()).unwrap();

    let receipts = inbox.accept_or_quarantine(batch.clone()).await.unwrap();
    assert_eq!(receipts.len(), expected.len());
    for (number, (receipt, expected)) in receipts.iter().zip(&expected).enumerate() {
        assert_eq!(receipt, expected, "record {number}");
    }

    // Accepted again: nothing is stored or quarantined twice.
    inbox.accept_or_quarantine(batch).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(scene.count_in(State::Done).await, count - refused);
    assert_eq!(scene.count("inbox_quarantine").await, refused);
    scene
}

// PostgreSQL rejects NUL and invalid UTF-8 in text. An id that is missing, too long or not text affects one record,
// never its batch.
#[tokio::test(flavor = "multi_thread")]
async fn an_identity_that_is_not_1_to_200_characters_of_text_is_quarantined_alone() {
    let id = |bytes: Vec<u8>| Record::new("orders").with_id(bytes).with_payload("p");
    let source = |bytes: Vec<u8>| record("has a source").with_source(bytes);
    among_neighbours(
        quick(),
        vec![
            (Record::new("orders").with_payload("no id"), Some("missing identity")),
            (id(vec![]), Some("empty identity")),
            (id("é".repeat(200).into()), None),
            (id("𐍈".repeat(200).into()), None),
            (id("x".repeat(200).into()), None),
            (id("x".repeat(201).into()), Some("identity too long")),
            (id("𐍈".repeat(201).into()), Some("identity too long")),
            (id(vec![b'x'; 2 << 20]), Some("identity too long")),
            (id(b"a\0b".to_vec()), Some("identity is not text")),
            (id(vec![0xff, 0xfe]), Some("identity is not text")),
            // A lone surrogate, and an overlong NUL.
            (id(vec![0xed, 0xa0, 0x80]), Some("identity is not text")),
            (id(vec![0xc0, 0x80]), Some("identity is not text")),
            (id("  \n\u{202e}\u{ffff}'; --".into()), None),
            (source(vec![]), Some("empty source")),
            (source("é".repeat(200).into()), None),
            (source("x".repeat(201).into()), Some("source too long")),
            (source(b"\0".to_vec()), Some("source is not text")),
            (source(vec![0x80]), Some("source is not text")),
        ],
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_of_any_kind_are_kept() {
    let many = (0..10_000u32).fold(record("many"), |record, n| record.with_header(n.to_string(), n.to_be_bytes().to_vec()));
    let odd = record("odd")
        .with_header("", "")
        .with_header(vec![0xff, 0], vec![0, 0xff])
        .with_header("twice", "1")
        .with_header("twice", "2")
        .with_null_header("none")
        .with_null_header("");
    let scene = among_neighbours(quick(), vec![(many, None), (odd, None)]).await;

    let expected = ["=", "\\xff00=\\x00ff", "twice=1", "twice=2", "none", ""];
    assert_eq!(scene.database.headers_of("odd").await, expected);
    let names: Vec<String> = (0..10_000u32).map(|n| format!("{n}=\\x{n:08x}")).collect();
    assert_eq!(scene.database.headers_of("many").await, names);
}

// Memory is bounded by limits on the size of a record.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_above_a_limit_is_quarantined_completely() {
    let limits = quick().payload_bytes_max(1_000_000).headers_bytes_max(1_000);
    let big = vec![b'p'; 1_000_001];
    let scene = among_neighbours(
        limits,
        vec![
            (record("as large as allowed").with_payload(big[1..].to_vec()), None),
            (record("too large").with_payload(big.clone()), Some("payload too large")),
            // Each header counts 8 bytes in addition to its content.
            (record("headers as large as allowed").with_header("n", vec![b'v'; 991]), None),
            (record("headers too large").with_header("n", vec![b'v'; 992]), Some("headers too large")),
            (
                (0..126).fold(record("too many headers"), |record, _| record.with_null_header("")),
                Some("headers too large"),
            ),
        ],
    )
    .await;

    let sizes = "SELECT concat_ws(' ', inbox_text(message_id), length(payload), length(headers))
                 FROM inbox_quarantine ORDER BY length(payload) DESC";
    assert_eq!(
        scene.database.query_texts(sizes).await,
        ["too large 1000001", "headers too large 28 1001", "too many headers 27 1008"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn extreme_timestamps_and_positions_are_accepted() {
    let at = |id: &str, time: Option<SystemTime>| record(id).with_recorded_at(time.unwrap());
    let far = Duration::from_secs(1 << 60);
    among_neighbours(
        quick(),
        vec![
            (at("long ago", UNIX_EPOCH.checked_sub(far)), None),
            (at("far away", UNIX_EPOCH.checked_add(far)), None),
            (record("last offset").with_position(i32::MAX, i64::MAX), None),
            (record("no such offset").with_position(i32::MIN, i64::MIN), None),
        ],
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_payload_is_not_an_empty_payload() {
    let scene = Scene::new().await;
    let (seen, stock) = seeing();
    let inbox = scene.inbox().subscribe("orders", stock).build().unwrap();

    inbox.accept_all([Record::new("orders").with_id("none"), Record::new("orders").with_id("empty").with_payload("")]).await.unwrap();

    inbox.drain().await.unwrap();
    let payloads: Vec<_> = sorted(&seen).into_iter().map(|seen| (seen.id, seen.payload)).collect();
    assert_eq!(payloads, [("empty".to_owned(), Some(vec![])), ("none".to_owned(), None)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payload_of_20_mib_reaches_the_handler_byte_for_byte() {
    let scene = Scene::new().await;
    let (seen, stock) = seeing();
    let inbox = scene.inbox().subscribe("orders", stock).build().unwrap();
    let payload: Vec<u8> = (0..20u32 << 20).map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();

    let batch = [record("before"), record("large").with_payload(payload.clone()), record("after")];
    let receipts = inbox.accept_all(batch).await.unwrap();

    assert_eq!(receipts, vec![Receipt::Accepted { deliveries: 1 }; 3]);
    inbox.drain().await.unwrap();
    let large = sorted(&seen).into_iter().find(|seen| seen.id == "large").unwrap();
    assert!(large.payload == Some(payload));
}

fn any_seen() -> impl Strategy<Value = Seen> {
    let text = || {
        prop::collection::vec(any::<char>().prop_filter("no NUL", |c| *c != '\0'), 1..30).prop_map(String::from_iter)
    };
    let bytes = || prop::collection::vec(any::<u8>(), 0..60);
    let headers = prop::collection::vec((bytes(), prop::option::of(bytes())), 0..6);
    (text(), text(), prop::option::of(bytes()), headers, prop::option::of(bytes()))
        .prop_map(|(id, source, key, headers, payload)| Seen { id, source, key, headers, payload })
}

// The bytes are the same whether they come from memory (handed over) or from the database (claimed).
#[tokio::test(flavor = "multi_thread")]
async fn records_of_any_bytes_reach_the_handler_byte_for_byte() {
    let mut runner = TestRunner::deterministic();
    let mut given: Vec<Seen> = (0..400).map(|_| any_seen().new_tree(&mut runner).unwrap().current()).collect();
    given.sort();
    given.dedup_by_key(|seen| (seen.id.clone(), seen.source.clone()));
    let batch: Vec<Record> = given.iter().map(Seen::record).collect();

    let claimed = Scene::new().await;
    let (seen, stock) = seeing();
    let inbox = claimed.inbox().subscribe("orders", stock).build().unwrap();
    inbox.accept_or_quarantine(batch.clone()).await.unwrap();
    inbox.drain().await.unwrap();
    assert_eq!(sorted(&seen), given);

    let handed_over = Scene::new().await;
    let (seen, stock) = seeing();
    let inbox = handed_over.inbox().subscribe("orders", stock.concurrency(1_000)).build().unwrap();
    let running = inbox.start().await.unwrap();
    inbox.accept_or_quarantine(batch).await.unwrap();
    handed_over.settled().await;
    assert_eq!(sorted(&seen), given);
    running.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_views_for_operators_show_records_of_any_bytes() {
    let scene = Scene::new().await;
    let runs = Runs::new();
    let poisoning = runs.answering("stock", |_| Err(Failure::poison("no")));
    let inbox = scene.inbox().subscribe("orders", poisoning).build().unwrap();
    let mut runner = TestRunner::deterministic();
    let mut given: Vec<Seen> = (0..100).map(|_| any_seen().new_tree(&mut runner).unwrap().current()).collect();
    given.push(Seen { payload: Some(vec![0xff; 1 << 20]), key: Some(vec![0]), ..given[0].clone() });
    given[100].id.push_str("of its own");
    inbox.accept_all(given.iter().map(Seen::record)).await.unwrap();
    inbox.drain().await.unwrap();

    let bytes = "length(concat(record_key, payload))";
    assert_eq!(scene.count(&format!("(SELECT concat(message_id, source, {bytes}) AS v FROM inbox_poisoned) t WHERE v <> ''")).await, 101);
    assert_eq!(scene.count("(SELECT concat(message_id, source, state) AS v FROM inbox_status) t WHERE v <> ''").await, 101);
    let shown = scene.database.query_texts("SELECT payload FROM inbox_poisoned WHERE message_id LIKE '%of its own'").await;
    assert_eq!(shown, [format!("\\x{}", "ff".repeat(1 << 20))]);
}
