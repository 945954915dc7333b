//! When an idle relay is healthy again, which topics it stops holding, and what it does when the database is slow or has
//! failed. On SQLite, because no server is needed.

use std::collections::VecDeque;
use std::future::pending;

use super::*;
use crate::store::outbound::{NewOutgoing, Outbound};
use crate::store::seam::Seam;
use crate::store::transaction::{Then, Transacted, Transaction};
use crate::store::{Sqlite, SqliteOptions};
use crate::types::{Headers, Kind};

/// Answers calls in this order. It waits forever for the results of what it sends.
struct AnsweringWire(VecDeque<bool>);

impl Wire for AnsweringWire {
    async fn send(&mut self, _records: &[Outgoing]) -> Vec<SendResult> {
        pending().await
    }

    async fn reaches_brokers(&mut self) -> bool {
        self.0.pop_front().unwrap_or(true)
    }

    fn is_usable(&self) -> bool {
        true
    }
}

type TestRelay<M> = Relaying<Sqlite, AnsweringWire, M>;

async fn relaying(answers: &'static [bool]) -> TestRelay<impl Fn() -> Result<AnsweringWire> + Send + Sync> {
    let store = Store::<Sqlite>::in_memory().await.unwrap();
    store.migrate().await.unwrap();
    relaying_on(store, Duration::from_secs(60), answers).await
}

async fn relaying_on(
    store: Store<Sqlite>,
    lease: Duration,
    answers: &'static [bool],
) -> TestRelay<impl Fn() -> Result<AnsweringWire> + Send + Sync> {
    let settings = RelaySettings {
        lease,
        poll: PAUSE_MIN,
        batch_rows: 10,
        batch_bytes: 1_000,
        keep_sent: Duration::ZERO,
        unknown_topic_grace: Duration::from_secs(60),
    };
    let problem = WireProblem::default();
    Relaying {
        held_slots: HeldSlots::new(
            store.backend.register_relay("relay", lease).await.unwrap(),
            "relay".into(),
            lease,
            problem.clone(),
        ),
        floors: Floors::new(Instant::now()),
        topics: HeldTopics::new(settings.unknown_topic_grace),
        suspects: HashSet::new(),
        wire: None,
        call_at: Instant::now(),
        pause: PAUSE_MIN,
        backoff: Backoff::new(BACKOFF_MAX),
        store,
        settings,
        problem,
        make: move || Ok(AnsweringWire(answers.iter().copied().collect())),
        stopping: watch::channel(false).1,
    }
}

#[tokio::test]
async fn an_idle_relay_is_healthy_again_when_a_broker_answers() {
    let mut relay = relaying(&[false, true]).await;
    relay.idle().await;
    assert!(relay.wire.is_none(), "without a problem, no broker is asked");

    relay.problem.note("no broker answers".to_owned());
    let asked_at = relay.call_at;
    while relay.call_at == asked_at {
        relay.idle().await;
    }
    assert!(relay.problem.get().is_some(), "the first call is not answered");
    assert!(!relay.prepare_call(), "the next one follows after a pause");
    relay.call_at = asked_at;
    while relay.call_at == asked_at {
        relay.idle().await;
    }
    assert_eq!(relay.problem.get(), None);
}

#[tokio::test]
async fn the_problem_of_a_held_topic_does_not_end_when_a_broker_answers() {
    let mut relay = relaying(&[true]).await;
    relay.topics.is_denied(&"t".into(), Instant::now());
    relay.problem.note("not authorized".to_owned());
    assert!(!relay.prepare_call());
    relay.topics.works("t");
    assert!(relay.prepare_call());
}

// Operators may discard the records of a topic while records of other topics always wait.
#[tokio::test]
async fn a_topic_whose_records_are_gone_is_not_held_any_more_although_others_wait() {
    let mut relay = relaying(&[]).await;
    let record = |topic: &str| NewOutgoing {
        topic: topic.into(),
        message_id: "id".to_owned(),
        source: "/shop".to_owned(),
        recorded_at: None,
        key: None,
        headers: Headers::default(),
        payload: Some(vec![0; 100].into()),
    };
    let mut publishing = relay.store.backend.begin(0).await.unwrap();
    Sqlite::publish(publishing.conn().unwrap(), ["a", "b"].map(record).into()).await.unwrap();
    assert!(matches!(publishing.commit(&[], Then::End).await, Transacted::Committed));
    relay.held_slots.hold(&relay.store).await.unwrap();
    let earlier = Instant::now() - Duration::from_secs(2);

    for topic in ["a", "gone"] {
        relay.topics.is_denied(&topic.into(), earlier);
    }
    relay.settings.batch_bytes = 200;
    assert_eq!(relay.read().await.unwrap().len(), 2);
    assert!(relay.topics.works("gone"), "the limit may have left its records out");
    relay.topics.is_denied(&"gone".into(), earlier);
    relay.settings.batch_bytes = 201;
    assert_eq!(relay.read().await.unwrap().len(), 2);
    assert!(!relay.topics.works("gone") && relay.topics.works("a"));
}

#[tokio::test]
async fn a_batch_is_given_up_when_the_lease_ends_during_a_renewal() {
    let folder = tempfile::tempdir().unwrap();
    let options = SqliteOptions::default().busy_timeout(Duration::from_secs(3_600));
    let store = Store::<Sqlite>::open_with(folder.path().join("inbox.db"), options).await.unwrap();
    store.migrate().await.unwrap();
    let mut relay = relaying_on(store.clone(), Duration::from_millis(500), &[]).await;
    relay.held_slots.hold(&relay.store).await.unwrap();
    let mut wire = (relay.make)().unwrap();
    let _holds_the_writer = store.backend.begin(0).await.unwrap();
    let answers = timeout(Duration::from_secs(60), relay.answers(&mut wire, &[], &[])).await;
    assert!(matches!(answers.expect("the renewal waits for an hour"), Err(Interrupted::SlotsLost)));
}

// A database that has failed over may give ids again that are below the floors.
#[tokio::test]
async fn after_an_error_of_the_database_slots_are_read_from_the_beginning() {
    let mut relay = relaying(&[]).await;
    let row = |id| Outgoing {
        id,
        slot: 3,
        topic: "t".into(),
        recorded_at: None,
        key: None,
        headers: Headers::default(),
        payload: None,
    };
    let raise = |floors: &mut Floors| {
        floors.note_read(&[row(10)], 1);
        floors.note_marked(1);
        floors.note_read(&[row(11)], 2);
        assert_eq!(floors.of(3, Instant::now()), 11);
    };
    let error = || Error::new(Kind::Passing, "the connection was lost");
    raise(&mut relay.floors);
    relay.rest("read the outbox", &error()).await;
    assert_eq!(relay.floors.of(3, Instant::now()), i64::MIN);

    relay.held_slots.hold(&relay.store).await.unwrap();
    raise(&mut relay.floors);
    let failures = std::sync::atomic::AtomicBool::new(false);
    let has_failed = || failures.swap(true, std::sync::atomic::Ordering::SeqCst);
    let written =
        relay.written("mark records as sent", || std::future::ready(if has_failed() { Ok(()) } else { Err(error()) }));
    assert!(written.await.is_some());
    assert_eq!(relay.floors.of(3, Instant::now()), i64::MIN);
}
