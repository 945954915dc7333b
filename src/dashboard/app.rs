//! What all requests share: the store, the sampler, what was looked up for everybody, and acts that take a while.

use std::sync::Arc;
use std::time::Duration;

use super::access::{Access, Visitor};
use super::jobs::Jobs;
use super::looked_up::LookedUp;
use super::sampler::Sampler;
use crate::operate::Operator;
use crate::store::{Backend, Store};
use crate::types::{LedgerGap, LedgerStatus};

pub(super) struct App<B: Backend> {
    pub(super) store: Store<B>,
    pub(super) access: Access,
    /// The name of those who have none.
    actor: String,
    /// Names under which browsers may reach it, in lower case.
    pub(super) hosts: Vec<String>,
    pub(super) sampler: Arc<Sampler<B>>,
    pub(super) kafka: LookedUp<KafkaLook>,
    pub(super) jobs: Arc<Jobs>,
    pub(super) sample_every: Duration,
}

/// What is known of Kafka.
pub(super) struct KafkaLook {
    pub(super) positions: Vec<LedgerStatus>,
    pub(super) gaps: Vec<LedgerGap>,
}

impl<B: Backend> App<B> {
    pub(super) fn new(
        store: Store<B>,
        access: Access,
        actor: String,
        hosts: Vec<String>,
        sample_every: Duration,
    ) -> Self {
        let sampler = Arc::new(Sampler::new(store.clone(), sample_every));
        let hosts = hosts.into_iter().map(|host| host.to_ascii_lowercase()).collect();
        let (kafka, jobs) = (LookedUp::default(), Arc::default());
        Self { store, access, actor, hosts, sampler, kafka, jobs, sample_every }
    }

    /// To look.
    pub(super) fn operator(&self) -> Operator<B> {
        self.store.operate()
    }

    /// To act in the visitor's name.
    pub(super) fn acting(&self, visitor: &Visitor, because: &str) -> Operator<B> {
        let operator = self.operator().acting_as(self.name_of(visitor));
        match because.trim() {
            "" => operator,
            because => operator.because(because),
        }
    }

    pub(super) fn name_of(&self, visitor: &Visitor) -> String {
        visitor.name.clone().filter(|name| !name.trim().is_empty()).unwrap_or_else(|| self.actor.clone())
    }
}
