//! The order over any sequence of accepts, runs and operator actions on PostgreSQL, for a handler with two ids: two
//! handler keys became one handler, so deliveries of an ordering key are stored under both ids. After each drain, every
//! delivery is in the state that a model predicts. For SQLite: `src/store/sqlite/ordered/tests.rs`.
//!
//! Each run of the test has other cases. It prints the seed; `PROPTEST_RNG_SEED` repeats it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngSeed, TestRunner};
use wharf::operate::{DeliveryFilter, Operator};
use wharf::order::{OnPoison, OrderKey};
use wharf::{Failure, Inbox, Message, Postgres, Raw, Record, Registration};

use crate::scene::{Runs, Scene};

const CASES: usize = 30;

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

#[derive(Debug, Default)]
struct Model {
    on_poison: OnPoison,
    /// In the order of acceptance: the key and the state of each.
    deliveries: Vec<(usize, State)>,
    answers: VecDeque<Answer>,
    violations: Vec<String>,
}

impl Model {
    /// Runs a delivery: none before it may be open, and no poisoned one may hold its key.
    fn run(&mut self, number: usize) -> Result<(), Failure> {
        let (key, own) = self.deliveries[number];
        let of_key = |&(_, &(other, _)): &(usize, &(usize, State))| other == key;
        let blocks = |&(place, &(_, state)): &(usize, &(usize, State))| {
            self.holds(state) || state == State::Open && place < number
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

    /// Whether a delivery in this state holds its key until a person acts.
    fn holds(&self, state: State) -> bool {
        state == State::Poisoned && self.on_poison == OnPoison::Hold
    }

    /// Deliveries that could run: no other holds their key.
    fn could_run(&self) -> Vec<usize> {
        let is_held = |key| self.deliveries.iter().any(|&(other, state)| other == key && self.holds(state));
        let open = |&place: &usize| self.deliveries[place].1 == State::Open;
        (0..self.deliveries.len()).filter(open).filter(|&place| !is_held(self.deliveries[place].0)).collect()
    }

    /// Replaying such a delivery is left out. It is held behind the later one, and if that one is replayed too, it runs
    /// first.
    fn is_held_by_a_later_one(&self, place: usize) -> bool {
        let key = self.deliveries[place].0;
        self.deliveries[place + 1..].iter().any(|&(other, state)| other == key && self.holds(state))
    }

    fn nth(&self, place: usize, is_meant: impl Fn(State) -> bool) -> Option<usize> {
        let meant: Vec<usize> = (0..self.deliveries.len()).filter(|&one| is_meant(self.deliveries[one].1)).collect();
        (!meant.is_empty()).then(|| meant[place % meant.len()])
    }
}

impl State {
    /// As in `inbox_status`, which does not list deleted deliveries.
    fn stored(self) -> Option<&'static str> {
        match self {
            State::Open => Some("pending"),
            State::Poisoned => Some("poisoned"),
            State::Done => Some("done"),
            State::Discarded => Some("discarded"),
            State::Deleted => None,
        }
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

fn on_poison() -> impl Strategy<Value = OnPoison> {
    prop_oneof![Just(OnPoison::Hold), Just(OnPoison::Pass)]
}

/// With a new seed, or with that of an earlier run.
fn runner() -> TestRunner {
    let config = ProptestConfig::default();
    let seed = match config.rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => rand::random(),
    };
    // Shown if the test fails.
    eprintln!("to repeat these cases: PROPTEST_RNG_SEED={seed}");
    TestRunner::new(ProptestConfig { rng_seed: RngSeed::Fixed(seed), ..config })
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
    async fn new(scene: &'a Scene, number: usize, on_poison: OnPoison) -> Case<'a> {
        let model = Arc::new(Mutex::new(Model { on_poison, ..Model::default() }));
        let (old, new) = (leaked(format!("old{number}")), leaked(format!("new{number}")));
        let topic = format!("t{number}");
        let handler = |key: &'static str| -> Registration<Postgres> {
            let model = Arc::clone(&model);
            let run = move |message: &Message<Raw>| {
                let place = message.id().rsplit('-').next().unwrap().parse().unwrap();
                model.lock().unwrap().run(place)
            };
            Runs::new().answering(key, run).ordered_by(OrderKey::record_key().on_poison(on_poison)).concurrency(1)
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
                self.assert_all_is_as_in_the_model().await;
            }
            Step::Replay { place } => {
                let is_given_up = |state| matches!(state, State::Poisoned | State::Discarded);
                let is_meant = |place: &usize| !self.model.lock().unwrap().is_held_by_a_later_one(*place);
                if let Some(place) = self.nth(*place, is_given_up).filter(is_meant) {
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

    /// After a drain: everything has run in order, except deliveries whose key is held, and the stored states are those
    /// of the model.
    async fn assert_all_is_as_in_the_model(&self) {
        let topic = format!("t{}", self.number);
        let states = format!("SELECT concat_ws(' ', message_id, state) FROM inbox_status WHERE topic = '{topic}'");
        let mut stored = self.scene.database.query_texts(&states).await;
        let model = self.model.lock().unwrap();
        assert_eq!(model.violations, [""; 0]);
        assert!(model.could_run().is_empty(), "held without a delivery before it: {:?}", model.deliveries);
        let expected = model.deliveries.iter().enumerate();
        let expected = expected.filter_map(|(place, (_, state))| Some((self.id(place), state.stored()?)));
        let mut expected: Vec<String> = expected.map(|(id, state)| format!("{id} {state}")).collect();
        stored.sort();
        expected.sort();
        assert_eq!(stored, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_of_a_key_run_in_order_under_two_ids_and_none_is_left_behind() {
    let scene = Scene::new().await;
    let mut runner = runner();
    for number in 0..CASES {
        let (on_poison, steps) = (on_poison(), steps()).new_tree(&mut runner).unwrap().current();
        eprintln!("case {number}: {on_poison:?} {steps:?}");
        let case = Case::new(&scene, number, on_poison).await;
        for step in &steps {
            case.step(step).await;
        }
        case.step(&Step::Drain(Vec::new())).await;
    }
}
