//! The state that accepting needs: the store, the limits, the rules of the topics, and the engine that can start
//! deliveries at once.
//!
//! An inbox has one `Intake`. Direct calls, Kafka and the replay of quarantined records share it. Handlers are
//! registered on first use, so building an inbox does not touch the database.

use std::sync::{Arc, PoisonError, RwLock};

use super::batch::Row;
use super::hand_over::HandOver;
use super::identify::Fallback;
use super::prepare::{Prepared, prepare};
#[cfg(feature = "kafka")]
use super::quarantine_run::QuarantineRuns;
use super::ready::{Answers, Decision, Undecided};
use super::rules::Rules;
use crate::handler::OnPoison;
use crate::store::seam::{HandlerIds, Order, Rated, WantedHandler};
use crate::store::{Backend, Store};
use crate::telemetry::{counts, events};
use crate::types::{Error, Limits, Record, Result};

/// The shared state of the accept stage. Always behind an `Arc`; health checks and callbacks hold it weakly, so that
/// they do not keep the store open.
pub(crate) struct Intake<B: Backend> {
    pub(crate) store: Store<B>,
    pub(crate) limits: Limits,
    pub(crate) rules: Rules,
    /// Whether `InboxBuilder::on_poison` is set: a function to call for each poisoned delivery.
    pub(crate) calls_on_poison: bool,
    /// The handlers' ids, in the order of registration. Empty until the first use.
    handlers: tokio::sync::OnceCell<Arc<[HandlerIds]>>,
    /// How many records of each topic were quarantined in a row.
    #[cfg(feature = "kafka")]
    pub(super) quarantine_runs: QuarantineRuns,
    /// The engine that runs deliveries; set while the inbox is running. A std lock: nothing awaits while holding it.
    hand_over: RwLock<Option<Arc<dyn HandOver>>>,
}

impl<B: Backend> Intake<B> {
    /// Whether a handler needs this row stored before the rows after it.
    pub(super) fn is_in_order(&self, row: &Row) -> bool {
        match row {
            Row::Message { message, .. } => self.rules.is_in_order(&message.topic),
            Row::Quarantine(_) => false,
        }
    }

    pub(crate) fn new(store: Store<B>, limits: Limits, rules: Rules) -> Self {
        Self {
            store,
            limits,
            rules,
            calls_on_poison: false,
            handlers: tokio::sync::OnceCell::new(),
            #[cfg(feature = "kafka")]
            quarantine_runs: QuarantineRuns::default(),
            hand_over: RwLock::new(None),
        }
    }

    /// The ids of the handlers, in the order of registration; registers them on first use.
    pub(crate) async fn handlers(self: &Arc<Self>) -> Result<Arc<[HandlerIds]>> {
        let registering = async || {
            let intake = Arc::clone(self);
            // Runs on the store's thread: a caller that drops its future must not leave the registration's transaction,
            // and its lock, open.
            let registered = self.store.backend.reactor().spawn(async move { intake.register().await });
            registered
                .await
                .unwrap_or_else(|_| Err(Error::stopped("the store was closed while the handlers were registered")))
        };
        self.handlers.get_or_try_init(registering).await.cloned()
    }

    /// Checks the schema and registers the handlers. Returns their ids in the order of registration.
    async fn register(&self) -> Result<Arc<[HandlerIds]>> {
        self.store.backend.check_schema().await?;
        let subscriptions = self.rules.subscriptions().iter();
        let wanted: Vec<WantedHandler> = subscriptions
            .map(|handler| WantedHandler {
                key: handler.key.as_str().to_owned(),
                former_keys: handler.former_keys.clone(),
                dead_letters: handler.dead_letters.clone(),
                calls_on_poison: self.calls_on_poison,
                rate: handler.rate.map(|rate| Rated {
                    interval_us: rate.interval_us(),
                    burst: i32::try_from(rate.burst).unwrap_or(i32::MAX),
                }),
                order: handler.order.as_ref().map(|order| Order { passes_poisoned: order.on_poison == OnPoison::Pass }),
                is_fair: handler.fair.is_some(),
                wants: handler.stored(),
            })
            .collect();
        let ids = self.store.backend.register(&wanted).await?;
        if ids.len() == wanted.len() {
            return Ok(ids.into());
        }
        Err(Error::bug(format!("{} handlers were registered and {} ids came back", wanted.len(), ids.len())))
    }

    /// Registers the metrics of the handlers and topics at 0, before anything is counted.
    pub(crate) fn begin_counting(&self) {
        let handlers = self.rules.subscriptions().iter().map(|subscription| subscription.key.as_str());
        counts::begin(handlers, self.rules.topics());
    }

    /// Decides what the record becomes, without waiting for a decoder.
    pub(crate) fn decide(&self, record: Record) -> Decision {
        self.decide_with(record, Answers::default(), rand::random)
    }

    /// Like [`Self::decide`], with the answers of decoders that were waited for. `chance` provides the id of a record
    /// that is accepted without an identity.
    pub(super) fn decide_with(&self, record: Record, answers: Answers, chance: impl FnOnce() -> u128) -> Decision {
        let Some(rules) = self.rules.of(&record.topic) else {
            events::unwanted(&record.topic, false);
            return Decision::Decided(None);
        };
        let wanted_by = |event_type: Option<&[u8]>| self.rules.wanted_by(&rules, event_type);
        let row = match prepare(record, &self.limits, &rules, wanted_by, &answers, chance) {
            Prepared::Message { message, payload_hash, wanted_by, size_bytes, fallback } => {
                match fallback {
                    None => {}
                    Some(Fallback::Position) => events::identified_by_position(&message),
                    Some(Fallback::Undeduplicated) => events::undeduplicated(&message),
                }
                Some((Row::Message { message, payload_hash, wanted_by }, size_bytes))
            }
            Prepared::Quarantine(quarantined) => {
                let size_bytes = quarantined.record.size_bytes();
                Some((Row::Quarantine(quarantined), size_bytes))
            }
            Prepared::Unwanted => {
                events::unwanted(&rules.topic, true);
                None
            }
            Prepared::NotYet(record, not_yet) => return Decision::NotYet(Undecided { record, answers, not_yet }),
        };
        Decision::Decided(row)
    }

    /// The engine that runs deliveries; `None` while the inbox is not running.
    pub(crate) fn hand_over(&self) -> Option<Arc<dyn HandOver>> {
        self.hand_over.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on, hands deliveries over to `hand_over`. Returns false and changes nothing when an engine is attached
    /// already.
    #[must_use]
    pub(crate) fn attach(&self, hand_over: Arc<dyn HandOver>) -> bool {
        let mut attached = self.hand_over.write().unwrap_or_else(PoisonError::into_inner);
        let is_free = attached.is_none();
        if is_free {
            *attached = Some(hand_over);
        }
        is_free
    }

    /// Stops handing deliveries over. Records are still accepted.
    pub(crate) fn detach(&self) {
        *self.hand_over.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
