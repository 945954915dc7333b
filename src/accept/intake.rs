//! What accepting stands on: the store, the limits, the rules of the topics, and who takes over what can start at once.
//!
//! An inbox has one, shared by direct calls, by Kafka and by the replay of quarantined records. Handlers are registered on first use, so
//! that building an inbox touches no database.

use std::sync::{Arc, PoisonError, RwLock};

use super::hand_over::HandOver;
use super::identify::Fallback;
use super::prepare::{Prepared, prepare};
#[cfg(feature = "kafka")]
use super::quarantine_run::QuarantineRuns;
use super::rules::Rules;
use super::write::Row;
use crate::handler::OnPoison;
use crate::store::seam::{HandlerIds, Order, Rated, WantedHandler};
use crate::store::{Backend, Store};
use crate::telemetry::events;
use crate::types::{Error, Limits, Record, Result};

pub(crate) struct Intake<B: Backend> {
    pub(crate) store: Store<B>,
    pub(crate) limits: Limits,
    pub(crate) rules: Rules,
    /// A function is called for each poisoned delivery.
    pub(crate) calls_on_poison: bool,
    /// The handlers' ids, in the order of registration. Empty until the first use.
    handlers: tokio::sync::OnceCell<Arc<[HandlerIds]>>,
    #[cfg(feature = "kafka")]
    pub(super) quarantine_runs: QuarantineRuns,
    /// Who runs deliveries, while the inbox is running. A std lock: nothing awaits while holding it.
    hand_over: RwLock<Option<Arc<dyn HandOver>>>,
}

impl<B: Backend> Intake<B> {
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
            // On the store's thread: a caller that goes away must not leave the registration's transaction, and its lock, open.
            let registered = self.store.backend.reactor().spawn(async move { intake.register().await });
            registered
                .await
                .unwrap_or_else(|_| Err(Error::stopped("the store was closed while the handlers were registered")))
        };
        self.handlers.get_or_try_init(registering).await.cloned()
    }

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
                wants: handler.stored(),
            })
            .collect();
        let ids = self.store.backend.register(&wanted).await?;
        if ids.len() == wanted.len() {
            return Ok(ids.into());
        }
        Err(Error::bug(format!("{} handlers were registered and {} ids came back", wanted.len(), ids.len())))
    }

    /// Decides what the record becomes; `None` when nobody wants it. Also returns the bytes it takes in a batch.
    pub(crate) fn row(&self, record: Record) -> Option<(Row, usize)> {
        self.row_with(record, rand::random)
    }

    /// The same, with an id of the caller's choice for a record that is accepted without identity.
    pub(super) fn row_with(&self, record: Record, chance: impl FnOnce() -> u128) -> Option<(Row, usize)> {
        let Some(rules) = self.rules.of(&record.topic) else {
            events::unwanted(&record.topic, false);
            return None;
        };
        let wanted_by = |event_type: Option<&[u8]>| self.rules.wanted_by(&rules.topic, event_type);
        match prepare(record, &self.limits, rules, wanted_by, chance) {
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
        }
    }

    /// Who runs deliveries now, if anybody does.
    pub(crate) fn hand_over(&self) -> Option<Arc<dyn HandOver>> {
        self.hand_over.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Hands deliveries over to `hand_over` from here on. False, and nothing is changed, when somebody else runs them.
    #[must_use]
    pub(crate) fn attach(&self, hand_over: Arc<dyn HandOver>) -> bool {
        let mut attached = self.hand_over.write().unwrap_or_else(PoisonError::into_inner);
        let is_free = attached.is_none();
        if is_free {
            *attached = Some(hand_over);
        }
        is_free
    }

    /// Hands nothing over any more. Accepting goes on.
    pub(crate) fn detach(&self) {
        *self.hand_over.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
