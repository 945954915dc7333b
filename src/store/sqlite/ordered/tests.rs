//! Any sequence of accepts, claims, outcomes and operator actions, compared with a model that is a list.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tokio::runtime::Builder;

use crate::store::operating::{Act, Operating, Signed, Verb};
use crate::store::seam::{
    Accepted, Ask, AskedRate, ClaimId, ClaimRequest, ClaimScope, HandlerIds, NewDelivery, Order, ScanFrom, Seam,
    Settlement, Settler, WantedHandler,
};
use crate::store::sqlite::tests::{batch, new_delivery, new_message};
use crate::store::{Sqlite, Store};
use crate::types::{DeliveryFilter, FailedBy, Outcome, PoisonReason};

#[derive(Debug, Clone, Copy)]
enum Step {
    Accept { key: i64 },
    Claim,
    Settle { place: usize, answer: Answer },
    Replay { place: usize },
    Discard { place: usize },
}

#[derive(Debug, Clone, Copy)]
enum Answer {
    Done,
    Retry,
    Released,
    Discarded,
    Poisoned,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let answer = prop_oneof![
        4 => Just(Answer::Done),
        1 => Just(Answer::Retry),
        1 => Just(Answer::Released),
        1 => Just(Answer::Discarded),
        2 => Just(Answer::Poisoned),
    ];
    let step = prop_oneof![
        4 => (0i64..3).prop_map(|key| Step::Accept { key }),
        3 => Just(Step::Claim),
        4 => (0usize..8, answer).prop_map(|(place, answer)| Step::Settle { place, answer }),
        1 => (0usize..8).prop_map(|place| Step::Replay { place }),
        1 => (0usize..8).prop_map(|place| Step::Discard { place }),
    ];
    prop::collection::vec(step, 1..60)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Open; with the attempt if it is claimed.
    Open(Option<i32>),
    Finished,
    /// Whether later deliveries passed it.
    Poisoned(bool),
    Discarded,
}

#[derive(Debug)]
struct Delivery {
    seq: i64,
    key: i64,
    is_held: bool,
    state: State,
}

impl Delivery {
    fn is_in_the_way(&self) -> bool {
        matches!(self.state, State::Open(_) | State::Poisoned(false))
    }

    /// It blocks its key.
    fn is_leader(&self) -> bool {
        matches!(self.state, State::Open(Some(_)) | State::Poisoned(false))
    }
}

/// Deliveries by seq.
#[derive(Debug, Default)]
struct Model {
    deliveries: Vec<Delivery>,
    passes: bool,
}

impl Model {
    fn accept(&mut self, seq: i64, key: i64) {
        let is_held = self.deliveries.iter().any(|other| other.key == key && other.is_in_the_way());
        self.deliveries.push(Delivery { seq, key, is_held, state: State::Open(None) });
    }

    /// The seqs that may be claimed now.
    fn claim(&mut self) -> Vec<i64> {
        let mut turns = Vec::new();
        for key in 0..3 {
            let of_key = self.deliveries.iter_mut().filter(|one| one.key == key && one.is_in_the_way() && !one.is_held);
            let mut members: Vec<&mut Delivery> = of_key.collect();
            if !members.iter().any(|one| one.state == State::Open(None)) {
                continue;
            }
            members.sort_by_key(|one| (!one.is_leader(), one.seq));
            let mut members = members.into_iter();
            if let Some(first) = members.next().filter(|first| first.state == State::Open(None)) {
                turns.push(first.seq);
            }
            members.filter(|one| one.state == State::Open(None)).for_each(|one| one.is_held = true);
        }
        turns.sort_unstable();
        turns
    }

    fn set(&mut self, seq: i64, state: State) {
        let Some(one) = self.deliveries.iter_mut().find(|one| one.seq == seq) else { return };
        let stood_in_the_way = one.is_in_the_way() && !one.is_held;
        one.state = state;
        if matches!(state, State::Open(None)) && !stood_in_the_way {
            // A replay: due now.
            one.is_held = false;
        }
        let key = one.key;
        if stood_in_the_way && !one.is_in_the_way() {
            let is_next = |one: &&mut Delivery| one.key == key && one.is_held && one.state == State::Open(None);
            if let Some(next) = self.deliveries.iter_mut().find(is_next) {
                next.is_held = false;
            }
        }
    }

    fn nth(&self, place: usize, is_meant: impl Fn(State) -> bool) -> Option<&Delivery> {
        let meant: Vec<&Delivery> = self.deliveries.iter().filter(|one| is_meant(one.state)).collect();
        (!meant.is_empty()).then(|| meant[place % meant.len()])
    }
}

struct Bench {
    store: Store<Sqlite>,
    ids: HandlerIds,
    model: Model,
}

impl Bench {
    async fn new(passes_poisoned: bool) -> Self {
        let store = Store::<Sqlite>::in_memory().await.unwrap();
        store.migrate().await.unwrap();
        let order = Some(Order { passes_poisoned });
        let wanted = WantedHandler { key: "stock".to_owned(), order, ..WantedHandler::default() };
        let ids = store.backend.register(&[wanted]).await.unwrap().remove(0);
        Self { store, ids, model: Model { passes: passes_poisoned, ..Model::default() } }
    }

    async fn accept(&mut self, key: i64) {
        let number = self.model.deliveries.len();
        let delivery = NewDelivery { order_hash: Some(key), ..new_delivery(&self.ids) };
        let batch = batch(vec![new_message(format!("m{number}"), delivery)]);
        let answers = self.store.backend.accept(&Arc::new(batch)).await.unwrap().unwrap();
        let [Accepted::New { seq }] = answers.messages[..] else { panic!("it is new") };
        assert_eq!(seq, i64::try_from(number).unwrap() + 1);
        self.model.accept(seq, key);
    }

    /// Claims in the store and in the model; both must claim the same deliveries.
    async fn claim(&mut self) -> Result<usize, TestCaseError> {
        let handler_id = self.ids.current;
        let request = ClaimRequest {
            processor: 1,
            lease: Duration::from_secs(600),
            asks: vec![Ask {
                handler_id,
                limit: 1_000,
                after: None,
                from: ScanFrom::Beginning,
                is_probe: false,
                rate: AskedRate::Unlimited,
            }],
            scope: ClaimScope::All,
            ordered_ids: vec![handler_id],
            suspect_from_crashes: 100,
            suspect_from_store_errors: 100,
            with_ages: false,
            payload_bytes_max: i32::MAX,
        };
        let mut claimed: Vec<ClaimId> =
            self.store.backend.claim(&request).await.unwrap().deliveries.iter().map(|one| one.claim).collect();
        claimed.sort_unstable();
        let turns = self.model.claim();
        prop_assert_eq!(claimed.iter().map(|claim| claim.message_seq).collect::<Vec<_>>(), turns);
        for claim in &claimed {
            self.model.set(claim.message_seq, State::Open(Some(claim.attempt)));
        }
        for key in 0..3 {
            let of_key = self.model.deliveries.iter().filter(|one| one.key == key);
            let running = of_key.filter(|one| matches!(one.state, State::Open(Some(_)))).count();
            prop_assert!(running <= 1, "{} of one key run at a time", running);
        }
        Ok(claimed.len())
    }

    async fn settle(&mut self, place: usize, answer: Answer) {
        let Some(one) = self.model.nth(place, |state| matches!(state, State::Open(Some(_)))) else { return };
        let State::Open(Some(attempt)) = one.state else { return };
        let claim = ClaimId { message_seq: one.seq, handler_id: self.ids.current, attempt };
        let poisoned =
            Outcome::Poisoned { reason: PoisonReason::Permanent, error: Some("no".to_owned()), charged: true };
        let (outcome, state) = match answer {
            Answer::Done => (Outcome::Done, State::Finished),
            Answer::Retry => (
                Outcome::Retry { after: Duration::ZERO, by: FailedBy::Error, error: "again".to_owned() },
                State::Open(None),
            ),
            Answer::Released => (Outcome::Released, State::Open(None)),
            Answer::Discarded => (Outcome::Discarded { reason: "not needed".to_owned() }, State::Discarded),
            Answer::Poisoned => (poisoned, State::Poisoned(self.model.passes)),
        };
        let lost = self
            .store
            .backend
            .settle(
                &Settler { processor: 1, attempt_rows_max: 20, ordered_ids: Vec::new() },
                &[Settlement { claim, outcome }],
            )
            .await
            .unwrap();
        assert!(lost.is_empty());
        self.model.set(claim.message_seq, state);
    }

    async fn act(&mut self, verb: Verb, seq: i64, state: State) {
        let filter = DeliveryFilter::default().handler_key("stock").message_id(format!("m{}", seq - 1));
        let act = Act::Deliveries { verb, filter, limit: 1 };
        assert_eq!(self.store.backend.act(act, Signed::default()).await.unwrap(), 1);
        self.model.set(seq, state);
    }

    async fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Accept { key } => self.accept(key).await,
            Step::Claim => drop(self.claim().await?),
            Step::Settle { place, answer } => self.settle(place, answer).await,
            Step::Replay { place } => {
                let is_given_up = |state| matches!(state, State::Poisoned(_) | State::Discarded);
                if let Some(seq) = self.model.nth(place, is_given_up).map(|one| one.seq) {
                    self.act(Verb::Replay, seq, State::Open(None)).await;
                }
            }
            Step::Discard { place } => {
                let is_free = |state| matches!(state, State::Poisoned(_) | State::Open(None));
                if let Some(seq) = self.model.nth(place, is_free).map(|one| one.seq) {
                    self.act(Verb::Discard, seq, State::Discarded).await;
                }
            }
        }
        Ok(())
    }

    /// All deliveries finish, except those behind a poisoned one.
    async fn drain(&mut self) -> Result<(), TestCaseError> {
        loop {
            while self.model.nth(0, |state| matches!(state, State::Open(Some(_)))).is_some() {
                self.settle(0, Answer::Done).await;
            }
            if self.claim().await? == 0 {
                break;
            }
        }
        let holds = |key| self.model.deliveries.iter().any(|one| one.key == key && one.state == State::Poisoned(false));
        for one in &self.model.deliveries {
            prop_assert!(!matches!(one.state, State::Open(_)) || holds(one.key), "{:?} waits for nobody", one);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn deliveries_of_a_key_run_as_in_the_model_and_every_delivery_runs(passes in any::<bool>(), steps in steps()) {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut bench = Bench::new(passes).await;
            for step in steps {
                bench.step(step).await?;
            }
            bench.drain().await
        })?;
    }
}
