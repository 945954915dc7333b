//! The order over any sequence of accepts, runs and operator actions on PostgreSQL, for a handler with two ids: two
//! handler keys became one handler, so deliveries of an ordering key are stored under both ids. For SQLite there is an
//! exact model: `src/store/sqlite/ordered/tests.rs`.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use wharf::operate::{DeliveryFilter, Operator};
use wharf::order::OrderKey;
use wharf::{Failure, Inbox, Message, Postgres, Raw, Record, Registration};

use crate::scene::{Runs, Scene};

const CASES: usize = 8;

#[derive(Debug, Clone)]
enum Step {
    /// By a process from before the keys became one handler, or by one from afterwards.
    Accept {
        key: usize,
        is_before: bool,
    },
    /// The runs return these answers, and then `done`.
    Drain(Vec<Answer>),
    Replay {
        place: usize,
    },
    Discard {
        place: usize,
    },
    Delete {
        place: usize,
    },
}

#[derive(Debug, Clone, Copy)]
enum Answer {
    Done,
    Retry,
    Discard,
    Poison,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Poisoned,
    Done,
    Discarded,
    Deleted,
}

/// The deliveries in the order of acceptance: the key and the state of each.
#[derive(Debug, Default)]
struct Model {
    deliveries: Vec<(usize, State)>,
    answers: VecDeque<Answer>,
    violations: Vec<String>,
}

impl Model {
    /// Runs a delivery: no delivery of its key may be poisoned, and none before it may be open.
    fn run(&mut self, number: usize) -> Result<(), Failure> {
        let (key, own) = self.deliveries[number];
        let of_key = |&(_, &(other, _)): &(usize, &(usize, State))| other == key;
        let blocks = |&(place, &(_, state)): &(usize, &(usize, State))| {
            state == State::Poisoned || state == State::Open && place < number
        };
        let blocked_by: Vec<usize> =
            self.deliveries.iter().enumerate().filter(of_key).filter(blocks).map(|(place, _)| place).collect();
        if own != State::Open || !blocked_by.is_empty() {
            self.violations.push(format!("{number} of key {key} ran as {own:?}, behind {blocked_by:?}"));
        }
        let (state, answer) = match self.answers.pop_front().unwrap_or(Answer::Done) {
            Answer::Done => (State::Done, Ok(())),
            Answer::Retry => (State::Open, Err(Failure::retry_after(std::time::Duration::ZERO, "again"))),
            Answer::Discard => (State::Discarded, Err(Failure::discard("not needed"))),
            Answer::Poison => (State::Poisoned, Err(Failure::poison("hopeless"))),
        };
        self.deliveries[number].1 = state;
        answer
    }

    fn nth(&self, place: usize, is_meant: impl Fn(State) -> bool) -> Option<usize> {
        let meant: Vec<usize> = (0..self.deliveries.len()).filter(|&one| is_meant(self.deliveries[one].1)).collect();
        (!meant.is_empty()).then(|| meant[place % meant.len()])
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let answer = prop_oneof![3 => Just(Answer::Done), 1 => Just(Answer::Retry), 1 => Just(Answer::Discard), 2 => Just(Answer::Poison)];
    let step = prop_oneof![
        6 => (0usize..2, any::<bool>()).prop_map(|(key, is_before)| Step::Accept { key, is_before }),
        3 => prop::collection::vec(answer, 0..4).prop_map(Step::Drain),
        1 => (0usize..8).prop_map(|place| Step::Replay { place }),
        1 => (0usize..8).prop_map(|place| Step::Discard { place }),
        1 => (0usize..8).prop_map(|place| Step::Delete { place }),
    ];
    prop::collection::vec(step, 10..24)
}

fn leaked(name: String) -> &'static str {
    Box::leak(name.into_boxed_str())
}

struct Case<'a> {
    scene: &'a Scene,
    number: usize,
    model: Arc<Mutex<Model>>,
    before: Inbox<Postgres>,
    after: Inbox<Postgres>,
}

impl<'a> Case<'a> {
    async fn new(scene: &'a Scene, number: usize) -> Case<'a> {
        let model = Arc::new(Mutex::new(Model::default()));
        let (old, new) = (leaked(format!("old{number}")), leaked(format!("new{number}")));
        let topic = format!("t{number}");
        let handler = |key: &'static str| -> Registration<Postgres> {
            let model = Arc::clone(&model);
            let run = move |message: &Message<Raw>| {
                let place = message.id().rsplit('-').next().unwrap().parse().unwrap();
                model.lock().unwrap().run(place)
            };
            Runs::new().answering(key, run).ordered_by(OrderKey::record_key()).concurrency(1)
        };
        let inbox = |registration| scene.inbox().subscribe(topic.as_str(), registration).build().unwrap();
        let before = inbox(handler(old));
        // Both handler keys get their own id before they become one handler.
        before.accept_all([]).await.unwrap();
        inbox(handler(new)).accept_all([]).await.unwrap();
        let after = inbox(handler(new).formerly(old));
        after.accept_all([]).await.unwrap();
        Case { scene, number, model, before, after }
    }

    fn id(&self, place: usize) -> String {
        format!("{}-{place}", self.number)
    }

    fn filter(&self, place: usize) -> DeliveryFilter {
        DeliveryFilter::default().message_id(self.id(place))
    }

    fn nth(&self, place: usize, is_meant: impl Fn(State) -> bool) -> Option<usize> {
        self.model.lock().unwrap().nth(place, is_meant)
    }

    fn set(&self, place: usize, state: State) {
        self.model.lock().unwrap().deliveries[place].1 = state;
    }

    async fn step(&self, step: &Step) {
        let operator: Operator<Postgres> = self.scene.store.operate();
        match step {
            Step::Accept { key, is_before } => {
                let place = self.model.lock().unwrap().deliveries.len();
                self.model.lock().unwrap().deliveries.push((*key, State::Open));
                let record =
                    Record::new(format!("t{}", self.number)).with_id(self.id(place)).with_key(format!("k{key}"));
                let inbox = if *is_before { &self.before } else { &self.after };
                inbox.accept(record).await.unwrap();
            }
            Step::Drain(answers) => {
                self.model.lock().unwrap().answers = answers.iter().copied().collect();
                self.after.drain().await.unwrap();
            }
            Step::Replay { place } => {
                let is_given_up = |state| matches!(state, State::Poisoned | State::Discarded);
                if let Some(place) = self.nth(*place, is_given_up) {
                    assert_eq!(operator.replay(&self.filter(place), 1).await.unwrap(), 1);
                    self.set(place, State::Open);
                }
            }
            Step::Discard { place } => {
                if let Some(place) = self.nth(*place, |state| matches!(state, State::Poisoned | State::Open)) {
                    assert_eq!(operator.discard(&self.filter(place), 1).await.unwrap(), 1);
                    self.set(place, State::Discarded);
                }
            }
            Step::Delete { place } => {
                if let Some(place) = self.nth(*place, |state| state == State::Poisoned) {
                    let delete = "DELETE FROM inbox_delivery d USING inbox_message m WHERE m.seq = d.message_seq AND m.message_id";
                    self.scene.database.execute(&format!("{delete} = '{}'", self.id(place))).await;
                    self.set(place, State::Deleted);
                }
            }
        }
    }

    /// Everything has run except deliveries that a poisoned one holds.
    async fn assert_nothing_is_left(&self, steps: &[Step]) {
        self.step(&Step::Drain(Vec::new())).await;
        let model = self.model.lock().unwrap();
        assert_eq!(model.violations, [""; 0], "{steps:?}");
        let holds = |key| model.deliveries.contains(&(key, State::Poisoned));
        let waiting = |&(key, state): &(usize, State)| state == State::Open && !holds(key);
        assert!(
            !model.deliveries.iter().any(waiting),
            "held without a delivery before it: {:?} after {steps:?}",
            model.deliveries
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_of_a_key_run_in_order_under_two_ids_and_none_is_left_behind() {
    let scene = Scene::new().await;
    let mut runner = TestRunner::deterministic();
    for number in 0..CASES {
        let steps = steps().new_tree(&mut runner).unwrap().current();
        let case = Case::new(&scene, number).await;
        for step in &steps {
            case.step(step).await;
        }
        case.assert_nothing_is_left(&steps).await;
    }
}
