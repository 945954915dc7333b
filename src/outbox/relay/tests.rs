//! When an idle relay is healthy again. On SQLite, because nothing is read or written.

use std::collections::VecDeque;

use super::*;
use crate::store::Sqlite;

/// Answers calls in this order. It sends nothing.
struct AnsweringWire(VecDeque<bool>);

impl Wire for AnsweringWire {
    async fn send(&mut self, _records: &[Outgoing]) -> Vec<SendResult> {
        Vec::new()
    }

    async fn reaches_brokers(&mut self) -> bool {
        self.0.pop_front().unwrap_or(true)
    }

    fn is_usable(&self) -> bool {
        true
    }
}

async fn relaying(
    answers: &'static [bool],
) -> Relaying<Sqlite, AnsweringWire, impl Fn() -> Result<AnsweringWire> + Send + Sync> {
    let settings = RelaySettings {
        lease: Duration::from_secs(60),
        poll: PAUSE_MIN,
        batch_rows: 1,
        batch_bytes: 1,
        keep_sent: Duration::ZERO,
        unknown_topic_grace: Duration::from_secs(60),
    };
    let problem = WireProblem::default();
    Relaying {
        held_slots: HeldSlots::new(1, "relay".into(), settings.lease, problem.clone()),
        floors: Floors::new(Instant::now()),
        topics: HeldTopics::new(settings.unknown_topic_grace),
        suspects: HashSet::new(),
        wire: None,
        call_at: Instant::now(),
        pause: PAUSE_MIN,
        backoff: Backoff::new(BACKOFF_MAX),
        store: Store::<Sqlite>::in_memory().await.unwrap(),
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
