//! State that all requests share: the store, the sampler, cached lookups and background actions.

use std::sync::Arc;
use std::time::Duration;

use super::access::{Access, Visitor};
use super::decoding::Decoding;
use super::jobs::Jobs;
use super::looked_up::{LookedUp, LookedUpBy};
use super::reads::Reads;
use super::sampler::Sampler;
use crate::operate::Operator;
use crate::store::story::MessageStory;
use crate::store::{Backend, Store};
use crate::types::{DeliverySummary, LedgerGap, LedgerStatus};

pub(super) struct App<B: Backend> {
    pub(super) store: Store<B>,
    pub(super) access: Access,
    /// The audit name of visitors without a name.
    actor: String,
    /// Host names under which browsers may reach the dashboard, in lower case.
    pub(super) hosts: Vec<String>,
    pub(super) sampler: Arc<Sampler<B>>,
    pub(super) kafka: LookedUp<KafkaLook>,
    pub(super) stories: LookedUpBy<StoryKey, StoryLook>,
    pub(super) jobs: Arc<Jobs>,
    pub(super) reads: Reads,
    pub(super) sample_every: Duration,
    pub(super) decoding: Decoding,
}

/// The content of the Kafka page.
pub(super) struct KafkaLook {
    pub(super) positions: Vec<LedgerStatus>,
    pub(super) gaps: Vec<LedgerGap>,
}

/// A message by its id and its source, which can be empty.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct StoryKey {
    pub(super) message: String,
    pub(super) source: String,
}

/// The content of the page of one message.
pub(super) struct StoryLook {
    /// The deliveries of all messages with the id.
    pub(super) deliveries: Vec<DeliverySummary>,
    /// What happened to the first of these messages.
    pub(super) story: MessageStory,
}

impl<B: Backend> App<B> {
    pub(super) fn new(
        store: Store<B>,
        access: Access,
        actor: String,
        hosts: Vec<String>,
        sample_every: Duration,
        decoding: Decoding,
    ) -> Self {
        let sampler = Arc::new(Sampler::new(store.clone(), sample_every));
        let hosts = hosts.into_iter().map(|host| host.to_ascii_lowercase()).collect();
        let (kafka, stories, jobs) = (LookedUp::default(), LookedUpBy::default(), Arc::default());
        let reads = Reads::default();
        Self { store, access, actor, hosts, sampler, kafka, stories, jobs, reads, sample_every, decoding }
    }

    /// An operator for reading.
    pub(super) fn operator(&self) -> Operator<B> {
        self.store.operate()
    }

    /// An operator for actions in the visitor's name.
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
