//! The turns of tenants in any sequence of accepts, claims and outcomes, compared with a model that has a queue per
//! tenant.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tokio::runtime::Builder;

use crate::store::seam::{
    Accepted, Ask, AskedRate, ClaimId, ClaimRequest, ClaimScope, HandlerIds, NewDelivery, ScanFrom, Seam, Settlement,
    Settler, Turns, WantedHandler,
};
use crate::store::sqlite::tests::{batch, new_delivery, new_message};
use crate::store::{Sqlite, Store};
use crate::types::Outcome;

#[derive(Debug, Clone, Copy)]
enum Step {
    Accept { tenant: i64 },
    Claim { limit: i32 },
    Settle { place: usize, is_done: bool },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (-3i64..4).prop_map(|tenant| Step::Accept { tenant }),
        // A burst of one tenant.
        2 => Just(Step::Accept { tenant: 2 }),
        4 => (1i32..6).prop_map(|limit| Step::Claim { limit }),
        4 => (0usize..8, any::<bool>()).prop_map(|(place, is_done)| Step::Settle { place, is_done }),
    ];
    prop::collection::vec(step, 1..80)
}

/// The free deliveries of each tenant, by seq, and the claimed ones.
#[derive(Debug, Default)]
struct Model {
    free: BTreeMap<i64, BTreeSet<i64>>,
    claimed: Vec<(i64, ClaimId)>,
    accepted: i64,
}

impl Model {
    /// The tenants with something due, each once, from the one after `after` on.
    fn around(&self, after: i64) -> Vec<i64> {
        let (before, beyond): (Vec<i64>, Vec<i64>) = self.free.keys().partition(|tenant| **tenant <= after);
        beyond.into_iter().chain(before).collect()
    }

    /// The seqs that a claim takes.
    fn claim(&mut self, after: i64, limit: usize) -> BTreeSet<i64> {
        let tenants: Vec<i64> = self.around(after).into_iter().take(limit).collect();
        let mut taken = BTreeSet::new();
        for (place, tenant) in tenants.iter().enumerate() {
            let share = limit / tenants.len() + usize::from(place < limit % tenants.len());
            taken.extend(self.free[tenant].iter().copied().take(share));
        }
        taken
    }
}

struct Bench {
    store: Store<Sqlite>,
    ids: HandlerIds,
    model: Model,
    after: i64,
    /// Tenants with due deliveries and without a turn for at least this many claimed deliveries.
    waited: BTreeMap<i64, usize>,
}

impl Bench {
    async fn new() -> Self {
        let store = Store::<Sqlite>::in_memory().await.unwrap();
        store.migrate().await.unwrap();
        let wanted = WantedHandler { key: "mail".to_owned(), is_fair: true, ..WantedHandler::default() };
        let ids = store.backend.register(&[wanted]).await.unwrap().remove(0);
        Self { store, ids, model: Model::default(), after: 0, waited: BTreeMap::new() }
    }

    async fn accept(&mut self, tenant: i64) {
        self.model.accepted += 1;
        let delivery = NewDelivery { fair_hash: Some(tenant), ..new_delivery(&self.ids) };
        let batch = batch(vec![new_message(format!("m{}", self.model.accepted), delivery)]);
        let answers = self.store.backend.accept(&Arc::new(batch)).await.unwrap().unwrap();
        let [Accepted::New { seq }] = answers.messages[..] else { panic!("it is new") };
        self.model.free.entry(tenant).or_default().insert(seq);
    }

    /// Claims in the store and in the model; both must take the same. No tenant is skipped twice before all others had
    /// their turn.
    async fn claim(&mut self, limit: i32) -> Result<usize, TestCaseError> {
        let handler_id = self.ids.current;
        let request = ClaimRequest {
            processor: 1,
            lease: Duration::from_secs(600),
            asks: vec![Ask {
                handler_id,
                limit,
                after: Some(self.after),
                from: ScanFrom::Beginning,
                is_probe: false,
                rate: AskedRate::Unlimited,
            }],
            scope: ClaimScope::All,
            ordered_ids: Vec::new(),
            suspect_from_crashes: 100,
            suspect_from_store_errors: 100,
            with_ages: false,
            payload_bytes_max: i32::MAX,
        };
        let claims = self.store.backend.claim(&request).await.unwrap();
        let expected = self.model.claim(self.after, limit.unsigned_abs() as usize);
        let taken: BTreeSet<i64> = claims.deliveries.iter().map(|one| one.claim.message_seq).collect();
        prop_assert_eq!(&taken, &expected);
        let [Turns { last, is_more, .. }] = claims.turns[..] else { panic!("one handler takes turns") };
        self.after = last.unwrap_or(self.after);
        for delivery in &claims.deliveries {
            let seq = delivery.claim.message_seq;
            let tenant = *self.model.free.iter().find(|(_, seqs)| seqs.contains(&seq)).unwrap().0;
            self.model.free.get_mut(&tenant).unwrap().remove(&seq);
            self.model.claimed.push((tenant, delivery.claim));
            self.waited.remove(&tenant);
        }
        self.model.free.retain(|_, seqs| !seqs.is_empty());
        prop_assert!(is_more || self.model.free.is_empty(), "something is left: {:?}", self.model);
        self.waited.retain(|tenant, _| self.model.free.contains_key(tenant));
        for tenant in self.model.free.keys() {
            let waited = self.waited.entry(*tenant).or_default();
            *waited += limit.unsigned_abs() as usize;
            // Seven tenants, and the claim in which one has become due.
            prop_assert!(*waited <= 7 + 5, "{} waits while {} others are claimed", tenant, waited);
        }
        Ok(taken.len())
    }

    async fn settle(&mut self, place: usize, is_done: bool) {
        if self.model.claimed.is_empty() {
            return;
        }
        let (tenant, claim) = self.model.claimed.remove(place % self.model.claimed.len());
        let outcome = if is_done { Outcome::Done } else { Outcome::Released };
        let by = Settler { processor: 1, attempt_rows_max: 20, ordered_ids: Vec::new() };
        assert!(self.store.backend.settle(&by, &[Settlement { claim, outcome }]).await.unwrap().is_empty());
        if !is_done {
            self.model.free.entry(tenant).or_default().insert(claim.message_seq);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn tenants_take_turns_as_in_the_model_and_every_delivery_runs(steps in steps()) {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut bench = Bench::new().await;
            for step in steps {
                match step {
                    Step::Accept { tenant } => bench.accept(tenant).await,
                    Step::Claim { limit } => drop(bench.claim(limit).await?),
                    Step::Settle { place, is_done } => bench.settle(place, is_done).await,
                }
            }
            while bench.claim(3).await? > 0 {}
            prop_assert!(bench.model.free.is_empty());
            Ok(())
        })?;
    }
}
