//! Layers: async functions around each run of a handler.
//!
//! A layer sees which delivery runs and decides when it does: it can measure, trace, refuse or answer in the handler's place. It
//! wraps the handler's own code only: claim, timeout, panic and outcome are handled outside of it, so a layer that panics or hangs counts as
//! its handler.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::batch::BatchBody;
use super::erased::{Body, ErasedHandler, ErasedTxHandler};
use super::failure::Failure;
use super::key::HandlerKey;
use crate::types::{Claim, Headers, StoredMessage};

/// A layer with its types erased.
pub(crate) type LayerFn =
    dyn for<'a> Fn(Attempt<'a>, Next<'a>) -> BoxFuture<'a, Result<(), Failure>> + Send + Sync + 'static;

/// One run of a handler, as a layer sees it.
#[derive(Clone, Copy)]
pub struct Attempt<'a> {
    key: &'a HandlerKey,
    number: u32,
    message: &'a StoredMessage,
}

impl<'a> Attempt<'a> {
    pub(super) fn new(key: &'a HandlerKey, number: u32, message: &'a StoredMessage) -> Self {
        Self { key, number, message }
    }

    /// The handler's key.
    pub fn handler_key(&self) -> &'a HandlerKey {
        self.key
    }

    /// How often this delivery has been started, this time counted: 1 on the first run.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The message's id.
    pub fn message_id(&self) -> &'a str {
        &self.message.id
    }

    /// Who gave the id: the topic, unless the record or its CloudEvents identity named another source.
    pub fn source(&self) -> &'a str {
        &self.message.source
    }

    /// The topic the record was accepted from.
    pub fn topic(&self) -> &'a str {
        &self.message.topic
    }

    /// The record's headers.
    pub fn headers(&self) -> &'a Headers {
        &self.message.headers
    }

    /// How long ago the producer or the broker stamped the record, by this machine's clock. `None` for records without a stamp.
    pub fn age(&self) -> Option<Duration> {
        let recorded_at = self.message.recorded_at?;
        Some(SystemTime::now().duration_since(recorded_at).unwrap_or_default())
    }
}

impl fmt::Debug for Attempt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt")
            .field("handler_key", &self.key.as_str())
            .field("number", &self.number)
            .field("message_id", &self.message_id())
            .finish_non_exhaustive()
    }
}

/// The rest of a run: the layers further in, then the handler.
#[must_use = "the handler runs only when `run` is awaited"]
pub struct Next<'a>(BoxFuture<'a, Result<(), Failure>>);

impl<'a> Next<'a> {
    pub(super) fn new(run: BoxFuture<'a, Result<(), Failure>>) -> Self {
        Self(run)
    }

    /// Runs the handler. A layer that does not call this answers in the handler's place.
    pub fn run(self) -> BoxFuture<'a, Result<(), Failure>> {
        self.0
    }
}

impl fmt::Debug for Next<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Next")
    }
}

impl<C: Send + 'static> Body<C> {
    /// The same handler with a layer around it.
    pub(crate) fn layered(self, key: &HandlerKey, layer: Arc<LayerFn>) -> Self {
        let key = key.clone();
        match self {
            Self::Plain(inner) => Self::Plain(Arc::new(Layered { inner, layer, key })),
            Self::Transactional(inner) => Self::Transactional(Arc::new(Layered { inner, layer, key })),
            Self::Batch(BatchBody { one, many }) => Self::Batch(BatchBody {
                one: Arc::new(Layered { inner: one, layer: Arc::clone(&layer), key: key.clone() }),
                many: Arc::new(Layered { inner: many, layer, key }),
            }),
            Self::TxBatch(BatchBody { one, many }) => Self::TxBatch(BatchBody {
                one: Arc::new(Layered { inner: one, layer: Arc::clone(&layer), key: key.clone() }),
                many: Arc::new(Layered { inner: many, layer, key }),
            }),
        }
    }

    /// The same handler with a layer around runs of one message. Calls with several messages are as they were.
    pub(crate) fn layered_alone(self, key: &HandlerKey, layer: Arc<LayerFn>) -> Self {
        let key = key.clone();
        match self {
            Self::Plain(_) | Self::Transactional(_) => self.layered(&key, layer),
            Self::Batch(BatchBody { one, many }) => {
                Self::Batch(BatchBody { one: Arc::new(Layered { inner: one, layer, key }), many })
            }
            Self::TxBatch(BatchBody { one, many }) => {
                Self::TxBatch(BatchBody { one: Arc::new(Layered { inner: one, layer, key }), many })
            }
        }
    }
}

pub(super) struct Layered<H: ?Sized> {
    pub(super) inner: Arc<H>,
    pub(super) layer: Arc<LayerFn>,
    pub(super) key: HandlerKey,
}

impl ErasedHandler for Layered<dyn ErasedHandler> {
    fn run(&self, message: Arc<StoredMessage>, claim: Claim) -> BoxFuture<'_, Result<(), Failure>> {
        async move {
            let next = Next(self.inner.run(Arc::clone(&message), claim));
            (self.layer)(Attempt { key: &self.key, number: claim.attempt, message: &message }, next).await
        }
        .boxed()
    }
}

impl<C: Send + 'static> ErasedTxHandler<C> for Layered<dyn ErasedTxHandler<C>> {
    fn run<'c>(
        &'c self,
        message: Arc<StoredMessage>,
        claim: Claim,
        conn: &'c mut C,
    ) -> BoxFuture<'c, Result<(), Failure>> {
        async move {
            let next = Next(self.inner.run(Arc::clone(&message), claim, conn));
            (self.layer)(Attempt { key: &self.key, number: claim.attempt, message: &message }, next).await
        }
        .boxed()
    }
}
